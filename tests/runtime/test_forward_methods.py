"""Methods other than `forward` that a loop calls: registered, they begin as the forward does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks

WORLD, STAGES = 2, [0, 1, 2, 3]


class Lit(nn.Module):
    """Trained by a method of its own, which uses layers, blocks and a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x * self.scale))
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: dict[str, Tensor], index: int = 0) -> dict[str, Tensor]:
        x = self.norm(self.first(batch["x"] * self.scale))
        for block in self.blocks:
            x = block(x)
        return {"loss": (x - batch["y"]).square().mean()}

    def by_forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": (self(batch["x"]) - batch["y"]).square().mean()}

    def stream(self, x: Tensor) -> Any:
        yield self.first(x)


def batch(step: int, rank: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(10 * step + rank)
    return {"x": torch.randn(5, 3, generator=rng), "y": torch.randn(5, 4, generator=rng)}


def train(stage: int, method: str, options: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Four steps by a method, or by the forward where none is named."""
    torch.manual_seed(1)
    model = Lit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, stage=stage, **options)
    if method:
        zs.register_forward_method(model, method)
        zs.register_forward_method(model, method, "forward")  # known already
    for step in range(4):
        now = batch(step, dist.get_rank())
        if method:
            loss = getattr(model, method)(now)["loss"]
        else:
            wide = {k: v.bfloat16() for k, v in now.items()} if options.get("precision") else now
            loss = (model(wide["x"]) - wide["y"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = sum(run.stats().sent.values())
    run.close()
    assert "training_step" not in vars(model)
    return [*(p.detach() for p in model.parameters()), *(b.detach() for b in model.buffers())], sent


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("method", ["training_step", "by_forward"])
@pytest.mark.parametrize(
    "options", [{}, {"precision": zs.Precision("bfloat16", keep=("norm*",))}, {"buffers": "local"}], ids=str
)
def test_a_method_trains_as_the_forward_does(stage: int, method: str, options: dict[str, Any]) -> None:
    expected = ranks(WORLD).run(train, stage, "", options)
    for (got, sent), (by_forward, usual) in zip(
        ranks(WORLD).run(train, stage, method, options), expected, strict=True
    ):
        assert all(map(torch.equal, got, by_forward))
        assert sent == usual  # statistics were broadcast once a step


def unregistered(stage: int, options: dict[str, Any]) -> str:
    model = Lit()
    run = zs.shard(model, stage=stage, **options)
    try:
        model.first(torch.ones(2, 3, dtype=torch.bfloat16 if options.get("precision") else None))
        model.norm(torch.ones(2, 4)).sum().backward()
    except zs.StateError as error:
        with torch.no_grad():
            model.norm(torch.ones(2, 4))  # nothing is learnt
        model.eval()
        model.norm(torch.ones(2, 4)).sum().backward()
        run.close()
        return str(error)
    run.close()
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_statistics_that_would_drift_apart(stage: int) -> None:
    texts = ranks(WORLD).run(unregistered, stage, {})
    assert texts == [texts[0]] * WORLD
    assert texts[0].startswith("`norm` was called from outside of the forward of Lit, with which rank 0's")
    assert 'zs.register_forward_method(model.norm, "forward")' in texts[0]
    assert ranks(WORLD).run(unregistered, stage, {"buffers": "local"}) == [""] * WORLD


@pytest.mark.parametrize("stage", STAGES)
def test_dtypes_that_nobody_casts(stage: int) -> None:
    """The words are torch's, with a note on where to cast."""
    model = Lit().eval()
    run = zs.shard(model, stage=stage, precision=zs.Precision("bfloat16", keep=("norm*",)))
    with pytest.raises(RuntimeError, match=r"dtype") as caught:
        model.first(torch.ones(2, 3))
    assert "precision= casts what Lit.forward is given, and this part was" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"size of tensor") as caught:
        model(torch.ones(2, 2))
    assert not hasattr(caught.value, "__notes__")
    zs.register_forward_method(model.first, "forward")
    assert model.first(torch.ones(2, 3)).dtype == torch.bfloat16
    run.close()


def test_what_cannot_be_registered() -> None:
    model = Lit()
    with pytest.raises(zs.StateError, match=r"this Lit is no part of a sharded model: call"):
        zs.register_forward_method(model, "training_step")
    run = zs.shard(model)
    with pytest.raises(
        zs.OptionError, match=r"Lit has no method 'train_step'\. Did you mean \"training_step\""
    ):
        zs.register_forward_method(model, "train_step")
    with pytest.raises(zs.OptionError, match=r"Lit\.stream is a generator or a coroutine, which runs after"):
        zs.register_forward_method(model, "stream")
    run.close()


def a_method_that_fails(stage: int) -> None:
    """It leaves what it entered."""
    model = Lit()
    run = zs.shard(model, stage=stage)
    zs.register_forward_method(model, "training_step")
    with pytest.raises(KeyError):
        model.training_step({"x": torch.ones(2, 3)})
    model.training_step(batch(0, 0))["loss"].backward()
    run.close()


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_a_method_that_fails(stage: int) -> None:
    ranks(WORLD).run(a_method_that_fails, stage)


def generated(stage: int, transport: str, precision: str | None) -> list[int]:
    """Ranks end at different lengths, and train on."""
    transformers = pytest.importorskip("transformers")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 30, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, stage=stage, transport=transport, precision=precision)
    ids = torch.arange(8).view(2, 4)
    lengths = []
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        more = 3 + 5 * dist.get_rank()
        lengths.append(model.generate(ids, max_new_tokens=more, do_sample=False, pad_token_id=0).shape[1])
        with run.kept_full():
            lengths.append(model.generate(ids, max_new_tokens=more, do_sample=False, pad_token_id=0).shape[1])
    run.close()
    warnings.simplefilter("error")
    return lengths


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize(("stage", "precision"), [(0, None), (1, None), (2, "bf16"), (3, None), (3, "bf16")])
def test_texts_of_different_lengths(stage: int, transport: str, precision: str | None) -> None:
    assert ranks(WORLD).run(generated, stage, transport, precision) == [[7] * 4, [12] * 4]
