"""A `shard()` that fails half way leaves the user's model and optimizer as they were, so that it can be
called again; or, where no rank has all values any more, parameters of which any use is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW

import zeroshard as zs
from zeroshard.grads import Reducer
from zeroshard.offload.build import OffloadedState
from zeroshard.params import sharded_param
from zeroshard.runtime.build import RuntimeBuilder
from zeroshard.runtime.hooks import Hooks
from zeroshard.runtime.runtime import Runtime
from zeroshard.runtime.undo import LostParam
from zeroshard.testing import ranks


class Broken(Exception):
    """Whatever may go wrong."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.tail = nn.Linear(4, 4)
        self.tail.weight = self.head.weight
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = x + block(x)
        return self.scale * self.tail(self.norm(x))


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def seen(model: nn.Module, optimizer: Any) -> list[Any]:
    """All that a user can find in them, objects and their settings; values apart."""
    params = {id(p): n for n, p in model.named_parameters()}
    modules = [
        (name, sorted(vars(module)), [len(h) for k, h in sorted(vars(module).items()) if "hooks" in k])
        for name, module in model.named_modules()
    ]
    each = [
        (name, id(p), type(p), p.requires_grad, p.grad_dtype, p.dtype, id(p.grad), bool(p._backward_hooks))
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    buffers = [(name, id(b), b.device, b.dtype) for name, b in model.named_buffers()]
    groups = [
        {k: [params[id(p)] for p in v] if k == "params" else v for k, v in g.items()}
        for g in optimizer.param_groups
    ]
    state = [
        (params[id(p)], sorted(own), [id(v) for v in own.values()]) for p, own in optimizer.state.items()
    ]
    return [modules, each, buffers, groups, state, sorted(vars(optimizer)), type(optimizer.step)]


def values(model: nn.Module) -> dict[str, Tensor]:
    grads = {f"{n} grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: t.detach().clone() for n, t in (dict(model.state_dict()) | grads).items()}


# Where it fails: what is called there, and how often before.
POINTS: dict[str, tuple[Any, str, int]] = {
    **{f"unit {n}": (RuntimeBuilder, "_gather_group", n) for n in range(4)},
    **{f"value {n}": (RuntimeBuilder, "_taking", n) for n in (0, 3, 9)},
    "buckets": (RuntimeBuilder, "_gradients", 0),
    "reducer": (Reducer, "__init__", 0),
    "strategy": (Runtime, "adopt_strategy", 0),
    "threads": (OffloadedState, "start", 0),
    "parts": (Runtime, "adopt_offload_groups", 0),
    "hooks": (Hooks, "_on_optimizer", 0),
    "last hooks": (Hooks, "_guard_moves", 0),
}
BF16 = zs.Precision("bf16", keep=("norm.*",))
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "bf16": {"stage": 2, "precision": BF16},
    "split masters": {"stage": 3, "precision": BF16, "offload": zs.Offload(master="split"), "clip_norm": 1.0},
    "host": {"stage": 3, "offload": zs.Offload()},
    "host, plain loop": {"stage": 1, "offload": zs.Offload()},
    "streamed": {"stage": 3, "offload": zs.Offload(parameters="host")},
}


@contextmanager
def failing(point: str, error: type[BaseException], here: bool) -> Iterator[None]:
    owner, name, before = POINTS[point]
    own, calls = getattr(owner, name), 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if here and calls == before + 1:
            raise error("on purpose")
        return own(*args, **kwargs)

    with patch.object(owner, name, fails):
        yield


def trained(model: nn.Module, optimizer: Any, run: Any = None) -> dict[str, Tensor]:
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if run is not None:
        run.close()
    return values(model)


def broken(
    point: str,
    options: dict[str, Any],
    everywhere: bool,
    error: type[BaseException] = Broken,
    kind: Callable[..., Any] = AdamW,
) -> str:
    model = net()
    for number, param in enumerate(model.parameters()):
        if number % 3 == 0 and param.requires_grad:
            param.grad = torch.full_like(param, 0.25)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plain = net()
    other = kind([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    before, kept = seen(model, optimizer), values(model)
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    with failing(point, error, everywhere or last):
        said = ""
        try:
            zs.shard(model, optimizer, **options).close()
        except (error, zs.RankError) as caught:
            said = str(caught)
    if not said:
        return "never came there"
    assert "on purpose" in said
    lost = [p for p in model.parameters() if isinstance(p, LostParam)]
    for param in lost:
        for use in (lambda p: p + 1, lambda p: p.data, lambda p: p.shape, Tensor.sum, copy.deepcopy):
            with pytest.raises(zs.StateError, match=r"failed.*build the model and its"):
                use(param)
    if lost:
        with pytest.raises((zs.StateError, zs.RankError), match="build the model and its optimizer again"):
            zs.shard(model, optimizer, **options)
        return "lost"
    assert seen(model, optimizer) == before
    found = values(model)
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    model.zero_grad()
    try:
        run = zs.shard(model, optimizer, **options)
    except zs.RankError as error:
        if "build the model and its optimizer again" not in str(error):
            raise
        return "kept, but not by its peer"
    got = trained(model, optimizer, run)
    again = zs.shard(plain, other, **options)
    want = trained(plain, other, again)
    assert all(torch.equal(got[name], want[name]) for name in want)
    return "kept"


def came(ended: str, point: str, options: dict[str, Any]) -> bool:
    return ended != "never came there" or (point in ("threads", "parts") and "offload" not in options)


@pytest.mark.wide(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("point", POINTS)
def test_on_one_rank_everything_is_as_before(layout: str, point: str) -> None:
    ended = broken(point, LAYOUTS[layout], True)
    assert came(ended, point, LAYOUTS[layout])
    assert ended != "lost"


@pytest.mark.parametrize("kind", [SGD, Adam, Adagrad])
def test_other_optimizers_have_what_they_had(kind: Callable[..., Any]) -> None:
    assert broken("last hooks", {"stage": 3}, True, kind=kind) == "kept"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_whatever_it_is_that_fails(error: type[BaseException]) -> None:
    assert broken("unit 2", {"stage": 3}, True, error) == "kept"


@pytest.mark.parametrize("parameters", ["device", "host", "disk"])
@pytest.mark.parametrize("point", ["unit 0", "unit 2", "value 9", "last hooks"])
def test_what_went_to_the_disk_comes_back(parameters: Any, point: str, tmp_path: Path) -> None:
    options = {
        "stage": 3,
        "precision": BF16,
        "offload": zs.Offload(optimizer="disk", parameters=parameters, path=str(tmp_path)),
        "clip_norm": 1.0,
    }
    assert broken(point, options, True) == "kept"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [0, 3])
def test_what_went_to_another_device_comes_back(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a model on the CPU and device="cuda": each value goes into memory of another kind."""
    own = sharded_param._rebind

    def elsewhere(parameter: nn.Parameter, local: Tensor) -> nn.Parameter:
        return type(parameter)(local.data, requires_grad=parameter.requires_grad)

    monkeypatch.setattr(sharded_param, "_rebind", elsewhere)
    assert broken("last hooks", {"stage": stage}, True) == "kept"
    monkeypatch.setattr(sharded_param, "_rebind", own)


@pytest.mark.ranks
@pytest.mark.wide(8)
@pytest.mark.parametrize("layout", ["stage 0", "stage 1", "stage 2", "stage 3", "bf16", "host"])
@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("point", POINTS)
def test_on_two_ranks_it_is_as_before_or_says_so(layout: str, point: str, everywhere: bool) -> None:
    """Values that were divided among the ranks are on none any more."""
    options = LAYOUTS[layout]
    for ended in ranks(2).run(broken, point, options, everywhere):
        assert came(ended, point, options)
        if layout in ("stage 0", "stage 1", "stage 2") or (point == "unit 0" and everywhere):
            assert ended in ("kept", "never came there")
        elif point in ("buckets", "hooks", "last hooks"):
            assert ended == "lost"


def interrupted(stage: int) -> str:
    return broken("unit 2", {"stage": stage}, False, KeyboardInterrupt)


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "ended"), [(0, "kept"), (2, "kept"), (3, "lost")])
def test_an_interrupted_rank_and_its_peer(stage: int, ended: str) -> None:
    assert set(ranks(2).run(interrupted, stage)) == {ended}
