"""Modules whose parameters are kept compute in master precision, and nobody around them notices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.params.widening import Widening
from zeroshard.testing import assert_same_bits


class Scale(nn.Module):
    """A norm as models write it by hand: what it returns has the wider dtype of input and weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        root = x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        return {"x": self.weight * (x.float() * root * scale).to(x.dtype)}


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.own_norm = nn.LayerNorm(width), Scale(width)
        self.up, self.router = (
            nn.Linear(width, width),
            nn.Sequential(nn.Linear(width, 4), nn.Linear(4, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(self.own_norm(self.norm(x), scale=2.0)["x"])
        return x * self.router(x).softmax(-1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


KEEP = ("*norm*", "*.router.*")
PRECISION = zs.Precision("bfloat16", keep=KEEP)


def fresh() -> Net:
    torch.manual_seed(3)
    return Net()


class Wide(nn.Module):
    """The same by hand."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        out = self.module(x.float(), **kwargs)
        return {"x": out["x"].bfloat16()} if isinstance(out, dict) else out.bfloat16()


def by_hand() -> Net:
    """Computes in bf16 but for what is kept."""
    model = fresh().bfloat16()
    wide = fresh()
    for block, own in zip(model.blocks, wide.blocks, strict=True):
        for name in ("norm", "own_norm", "router"):
            setattr(block, name, Wide(getattr(own, name)))
    model.norm = Wide(wide.norm)  # type: ignore[assignment]
    return model


def losses(model: nn.Module) -> Tensor:
    ids = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(1))
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"units": ("blocks.*", "norm")}], ids=str)
def test_has_the_bits_of_casts_by_hand(options: dict[str, Any]) -> None:
    model, plain = fresh(), by_hand()
    run = zs.shard(model, precision=PRECISION, **options)
    loss, expected = losses(model), losses(plain)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    right = {
        n.replace("module.", ""): p.grad.float() for n, p in plain.named_parameters() if p.grad is not None
    }
    assert_same_bits(found, right)
    run.close()
    assert all("forward" not in vars(module) for module in model.modules())
    assert losses(model).dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_in_a_compiled_unit() -> None:
    model = fresh()
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    run = zs.shard(model, precision=PRECISION)
    assert torch.equal(losses(model), losses(by_hand()))
    run.close()


def test_the_outermost_modules_that_can_be_called_are_widened() -> None:
    model = fresh()
    names = {id(module): name for name, module in model.named_modules()}

    def found(*keep: str) -> list[str]:
        widening = Widening(zs.Precision("bfloat16", keep=keep))
        return [names[id(module)] for module in widening.modules(model)]

    assert found("blocks.*") == ["blocks.0", "blocks.1"]
    assert found("blocks.0.router.*", "norm.*") == ["blocks.0.router", "norm"]
    assert found("blocks.0.router.0.*", "norm.weight") == ["blocks.0.router.0"]
    assert found("*") == [""]
    assert found() == []
    assert list(Widening(None).modules(model)) == []


def test_what_is_wide_already_stays_wide() -> None:
    """Its caller has asked for it: a router's scores, say."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run = zs.shard(model, precision=zs.Precision("bfloat16", keep=("1.*",)))
    inner = model[1]
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    assert inner(torch.ones(2, 4)).dtype == torch.float32
    run.close()


def test_batch_norms_mix_dtypes_for_themselves() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3))
    assert list(Widening(zs.Precision("bfloat16", keep=("1.*",))).modules(model)) == []
    plain = copy.deepcopy(model)
    plain[0].bfloat16()
    run = zs.shard(model, precision=zs.Precision("bfloat16", keep=("1.*",)))
    x = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x), plain(x.bfloat16()))
    run.close()
