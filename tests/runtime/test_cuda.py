"""On a GPU: the same numbers as plain PyTorch, with real streams; two ranks that share the device; offload
that overlaps."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offload_loop import paced
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import zeroshard as zs
from zeroshard.kernels import join, split, split_master
from zeroshard.optim.sharded_optimizer import WIDEN_BYTES
from zeroshard.runtime import build

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
STEPS = 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))
        self.head = nn.Linear(64, 96)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 96, (8, 17), generator=torch.Generator().manual_seed(step)).cuda()
    mine = ids.chunk(world)[rank]
    return mine[:, :-1], mine[:, 1:]


def train(
    rank: int = 0, world: int = 1, clip: float = 1.0, spikes: tuple[int, ...] = (), **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, **options)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step, rank, world)) * (6.0 if step in spikes else 1.0)
        loss.backward()
        if "clip_norm" not in options:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    with run.gathered() as whole:
        values = {name: p.detach().cpu().clone() for name, p in whole.items()}
    run.close()
    return torch.stack(losses).cpu(), values


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_of_one_rank_are_bit_equal(stage: int) -> None:
    losses, values = train(stage=stage)
    plain_losses, plain_values = train(stage=0)
    assert torch.equal(losses, plain_losses)
    assert furthest(values, plain_values) == 0.0


def _two(rank: int, folder: str, options: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    losses, values = train(rank, 2, **options)
    dist.all_reduce(losses)
    if rank == 0:
        torch.save((losses / 2, values), f"{folder}/out.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "options", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "transport": "gloo"}], ids=str
)
def test_two_ranks_that_share_a_gpu_train_like_one(options: dict[str, Any], tmp_path: Path) -> None:
    spawn(_two, (str(tmp_path), options), nprocs=2)
    losses, values = torch.load(tmp_path / "out.pt")
    alone_losses, alone_values = train(stage=0)
    assert ((losses - alone_losses).abs() / alone_losses).max() < 1e-5
    # Adam turns the rounding noise of gradients that are truly zero into steps of full size: 12 steps of 1e-2
    # each.
    assert furthest(values, alone_values) < 2e-3


@pytest.mark.parametrize(
    "offload",
    [zs.Offload(stage_bytes=40_000), zs.Offload(parameters="host", stage_bytes=40_000)],
    ids=["state", "all"],
)
@pytest.mark.parametrize("spikes", [(), (3, 7)], ids=["calm", "spikes"])
def test_host_updates_equal_the_device_s(offload: zs.Offload, spikes: tuple[int, ...]) -> None:
    losses, values = train(stage=3, clip_norm=2.0, offload=offload, spikes=spikes)
    plain_losses, plain_values = train(stage=0, clip=2.0, spikes=spikes)
    assert ((losses - plain_losses).abs() / plain_losses).max() < 1e-5
    assert furthest(values, plain_values) < 2e-3


@pytest.mark.parametrize("master", ["plain", "split"])
def test_delays_in_copies_change_no_bit(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offload = zs.Offload(master=master, stage_bytes=40_000)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "stage": 1,
        "precision": "bf16",
        "clip_norm": 2.0,
        "offload": offload,
        "spikes": (4,),
    }
    losses, values = train(**options)
    dice = random.Random(1)

    def slow(device: torch.device) -> build.TierCopies:
        return copies(device, delay=lambda: time.sleep(dice.random() * 2e-3))

    copies = build.TierCopies
    monkeypatch.setattr(build, "TierCopies", slow)
    slow_losses, slow_values = train(**options)
    assert torch.equal(losses, slow_losses)
    assert furthest(values, slow_values) == 0.0


def test_the_halves_of_a_master_are_those_of_the_host() -> None:
    assert split_master._kernels(torch.device("cuda", torch.cuda.current_device())) is not None, (
        "Triton compiles"
    )
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = (upper | low).view(torch.float32)[: -3 if low & 1 else None]
        weight, remainder = split(master.cuda())
        want = split(master)
        assert torch.equal(weight.cpu().view(torch.int16), want[0].view(torch.int16))
        assert torch.equal(remainder.cpu(), want[1])
        assert torch.equal(join(weight, remainder).cpu().view(torch.int32), master.view(torch.int32))


@pytest.mark.parametrize("clipping", [{}, {"clip_norm": 2.0}], ids=str)
def test_a_split_master_on_the_device_has_the_bits_of_a_plain_one(
    clipping: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WIDEN_BYTES, "cuda", 40_000)
    losses, values = train(precision="bf16", offload=zs.Offload("device", master="split"), **clipping)
    with paced("ties away"):
        plain_losses, plain_values = train(precision="bf16", **clipping)
    assert torch.equal(losses, plain_losses)
    assert furthest(values, plain_values) == 0.0


@pytest.mark.parametrize("clipping", [{}, {"clip_norm": 2.0}], ids=str)
def test_a_parameter_without_elements_rests_on_the_host_with_the_others(clipping: dict[str, Any]) -> None:
    """Its address is that of any other without elements, whatever the device."""
    model = nn.Linear(4, 4).cuda()
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3, device="cuda")))
    optimizer = torch.optim.AdamW(model.parameters())
    run = zs.shard(model, optimizer, offload=zs.Offload(), **clipping)
    for _ in range(3):
        (model(torch.ones(2, 4, device="cuda")).sum() + model.empty.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    assert model.empty.is_cuda
    assert model.empty.shape == (0, 3)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("offload", ["none", "host"])
def test_gradients_come_back_to_the_device_with_the_model(offload: str, precision: Any) -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"offload": zs.Offload()} if offload == "host" else {}
    run = zs.shard(model, optimizer, precision=precision, **options)
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    run.close()
    assert model.weight.is_cuda
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0, device="cuda"))
    optimizer.step()
