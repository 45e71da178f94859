"""Plans of models that are not as most: what they keep for backward, what can be advised, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from plan_models import measured_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.search import fewest_ranks
from zeroshard.testing import assert_bytes


class Rectified(nn.Module):
    """Its output is what its own backward needs: the block that comes next saves it for nobody."""

    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.base, self.adapted = nn.Linear(32, 32), adapted
        if adapted:
            self.base.requires_grad_(False)
            self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.base(x) + (self.up(self.down(x)) if self.adapted else x)
        return torch.relu(found)


class Stacked(nn.Module):
    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rectified(adapted) for _ in range(8))
        self.head = nn.Linear(32, 512)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@pytest.mark.parametrize("adapted", [False, True])
def test_blocks_that_save_their_own_output_are_foreseen(adapted: bool) -> None:
    batch, limit = torch.randn(256, 32), 2**30
    for _ in range(4):
        model = Stacked(adapted)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        try:
            run = zs.shard(model, optimizer, limit=limit, batch=batch)
        except zs.PlanError:
            break
        assert run.plan is not None
        chosen = run.plan.chosen
        device, _ = measured_step(run, model, optimizer, batch)
        assert_bytes(chosen.device, device + batch.nbytes, 0.001, chosen.label)
        limit = int(chosen.device * 0.97)
        run.close()
    assert limit < 2**29


class Kept(Stacked):
    """Checkpoints its blocks itself, each or by twos."""

    def __init__(self, together: int) -> None:
        super().__init__(adapted=False)
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        for start in range(0, len(self.blocks), self.together):
            some = nn.Sequential(*self.blocks[start : start + self.together])
            x = checkpoint(some, x, use_reentrant=False)
        return self.head(x).square().mean()


@pytest.mark.parametrize(("together", "recompute"), [(1, False), (1, True), (2, False), (2, True)])
def test_models_that_recompute_for_themselves_are_foreseen(together: int, recompute: bool) -> None:
    model, batch = Kept(together), torch.randn(256, 32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = zs.shard(model, optimizer, limit=2**30, recompute=recompute, batch=batch)
    assert run.plan is not None
    device, _ = measured_step(run, model, optimizer, batch)
    assert_bytes(run.plan.chosen.device, device + batch.nbytes, 0.001, run.plan.chosen.label)
    run.close()


class Masked(nn.Module):
    """Torch's own encoder with a causal mask, whose values a trace does not know."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        found: Tensor = self.encoder(x, mask=mask)
        return found.square().mean()


def test_an_encoder_with_a_mask_is_planned() -> None:
    model, batch = Masked(), torch.randn(8, 16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = zs.shard(model, optimizer, limit=2**30, batch=batch)
    assert run.plan is not None
    device, _ = measured_step(run, model, optimizer, batch)
    assert 0.9 * run.plan.chosen.device <= device + batch.nbytes <= run.plan.chosen.device
    run.close()


def test_what_shard_would_refuse_is_not_planned() -> None:
    model = nn.Sequential(nn.Embedding(64, 8, max_norm=1.0), nn.Linear(8, 8))
    with pytest.raises(zs.ModelError, match=r"has max_norm=1\.0: its forward writes the rows"):
        zs.plan(model, ranks=2, limit="1GiB")
    assert zs.plan(model, ranks=1, limit="1GiB").chosen.fits


def advised(model: nn.Module, batch: Tensor, **given: Any) -> str:
    with pytest.raises(zs.PlanError) as refused:
        zs.plan(model, batch=batch, **given)
    return str(refused.value)


def test_what_is_advised_fits() -> None:
    """A larger limit where the host has no room for more; no half of one row; no bf16 that is refused."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    given: dict[str, Any] = {"ranks": 1, "limit": "1MiB", "host_limit": "1MiB"}
    said = advised(model, torch.zeros(1, 256), **given)
    assert "halve" not in said
    limit = re.search(r'pass limit="([^"]+)"', said)
    assert limit is not None, said
    assert zs.plan(model, batch=torch.zeros(1, 256), **given | {"limit": limit[1]}).chosen.fits
    normed = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64))
    said = advised(normed, torch.zeros(4096, 64), ranks=1, limit="8MiB")
    assert "halve the micro-batch" in said
    assert "bf16" not in said


def test_the_fewest_ranks_may_need_two_tiers() -> None:
    """With little room on the device and on the host, only what fills both fits."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    given: dict[str, Any] = {"limit": "7MiB", "host_limit": "4MiB", "batch": torch.zeros(1, 256)}
    assert zs.plan(model, ranks=1, **given).chosen.placing == "some on host"
    assert fewest_ranks(model, **given).value == 1


def test_more_ranks_of_a_node_share_what_it_has() -> None:
    """They are advised where the device is too small, and not where the node is."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    asked: dict[str, Any] = {"ranks_per_node": 8, "batch": torch.zeros(2, 256)}
    small: dict[str, Any] = {"limit": "2500KiB", "host_limit": "3MiB"}
    assert "use 8 ranks" in advised(model, ranks=2, **asked, **small)
    assert zs.plan(model, ranks=8, **asked, **small).chosen.fits
    said = advised(model, ranks=2, **asked, memory_limit_per_node="2MiB")
    assert "ranks," not in said
    assert 'pass memory_limit_per_node="4.9MiB"' in said
    assert zs.plan(model, ranks=2, **asked, memory_limit_per_node="4.9MiB").chosen.fits


class Grown(nn.Module):
    """Makes its weights of a small one: what it keeps for backward has little to do with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Parameter(torch.ones(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        grown = self.seed
        for _ in range(4):
            grown = (grown * torch.ones(64, 4096)).tanh()[:, :4096]
        return torch.tanh(x @ grown[:, :64]).square().mean()


def test_half_a_batch_is_advised_where_it_fits() -> None:
    """Not where activations do not go with the batch, nor where the model does not take half of it."""
    batch = torch.zeros(256, 64)
    asked: dict[str, Any] = {"ranks": 1, "machine": "H100"}
    need = zs.plan(Grown(), batch=batch, limit="1GiB", **asked).chosen.device
    assert "halve" not in advised(Grown(), batch, limit=int(0.6 * need), **asked)
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    need = zs.plan(deep, batch=batch, limit="1GiB", recompute=False, offload=None, **asked).chosen.device
    asked |= {"limit": int(0.8 * need), "recompute": False, "offload": None}
    assert "halve the micro-batch" in advised(deep, batch, **asked)
    assert zs.plan(deep, batch=batch[:128], **asked).chosen.fits
    whole = nn.Sequential(Fixed(256), *deep)
    assert "halve" not in advised(whole, batch, **asked)


class Fixed(nn.Module):
    """Takes batches of so many rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return x.view(self.rows, -1, x.shape[-1]).squeeze(1)


@pytest.mark.parametrize(
    "options",
    [
        {"offload": None},
        {"offload": None, "precision": "bf16"},
        {"offload": None, "sync": zs.Delayed()},
        {"offload": zs.Offload(optimizer="auto", device_bytes=150_000)},
        {"offload": zs.Offload(), "clip_norm": 1.0},
    ],
    ids=str,
)
def test_gradients_of_one_rank_are_held_against_their_plan(options: dict[str, Any]) -> None:
    """They are seen whenever a backward ends, also if the loop has dropped them since."""
    model, batch = Stacked(adapted=False), torch.randn(16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = zs.shard(model, optimizer, limit=2**30, batch=batch, **options)
    for _ in range(3):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = run.stats()
    run.close()
    assert stats.peak["gradients"] == stats.planned["gradients"]
