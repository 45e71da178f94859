"""`run.full_state_dict()` and `run.full_optimizer_state_dict()`: what plain PyTorch's `state_dict()`
gives, on one rank or all; and they load back, into sharded and plain models."""

from __future__ import annotations

import math
import re
import tempfile
from collections import OrderedDict
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon

import zeroshard as zs
from zeroshard.testing import assert_same_bits, ranks

LAYOUTS = ("rows", "level", "whole")
PRECISE = {"precision": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    **{f"{stage} {split}": {"stage": stage, "split": split} for stage, split in product((1, 2, 3), LAYOUTS)},
    "0": {"stage": 0},
    "0 bf16": {"stage": 0, **PRECISE},
    "3 bf16 level": {"stage": 3, "split": "level", **PRECISE},
    "2 bf16 split": {"stage": 2, **PRECISE, "offload": {"optimizer": "device", "master": "split"}},
    "host early": {"stage": 3, "clip_norm": math.inf, "offload": {"optimizer": "host"}},
    "host split": {
        "stage": 1,
        "clip_norm": math.inf,
        **PRECISE,
        "offload": {"optimizer": "host", "master": "split"},
    },
    "host in the step": {"stage": 2, "split": "level", "offload": {"optimizer": "host"}},
    "host 8 bits": {"stage": 2, "clip_norm": math.inf, "offload": {"optimizer": "host", "moments": "int8"}},
    "disk": {"stage": 3, "clip_norm": math.inf, "offload": {"optimizer": "disk"}},
    "disk in the step": {"stage": 3, **PRECISE, "offload": {"optimizer": "disk"}},
}


class Scaled(nn.Module):
    """Has what a state dict may have beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.calls = 0
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.scale

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Odd(nn.Module):
    """A tied weight, one with a single row, a frozen one, batch statistics, and hooks that rename and
    compute."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight
        self.norm, self.scaled = nn.BatchNorm1d(5), Scaled()
        self.inner, self.last = nn.Linear(5, 5), nn.Linear(7, 1)
        self.frozen = nn.Parameter(torch.randn(4, 3), requires_grad=False)
        self.inner.register_state_dict_post_hook(_halved)
        self.inner.register_load_state_dict_pre_hook(_doubled)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.inner(self.scaled(self.norm(self.words(numbers))))
        return self.last(self.head(x)).square().mean()


def _halved(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[prefix + "half"] = state.pop(prefix + "weight") / 2


def _doubled(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if prefix + "half" in state:
        state[prefix + "weight"] = state.pop(prefix + "half") * 2


def odd() -> Odd:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Odd()


def numbers(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank() if dist.is_initialized() else step)
    return torch.randint(7, (6,), generator=draw)


def sharded(options: dict[str, Any], scratch: str) -> tuple[Odd, AdamW, zs.Run]:
    options = dict(options)
    if "offload" in options:
        given = dict(options["offload"])
        if given["optimizer"] != "device":
            given |= {"threads": 1, "stage_bytes": 4096}
        path = scratch if given["optimizer"] == "disk" else None
        options["offload"] = zs.Offload(**given, path=path)
    model = odd()
    if "precision" in options:
        options["precision"] = zs.Precision("bfloat16", keep=("norm*",))
    optimizer = AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    return model, optimizer, zs.shard(model, optimizer, **options)


def steps(model: nn.Module, optimizer: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        model(numbers(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def cloned(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: cloned(value) for key, value in state.items()}
    return state.detach().clone() if isinstance(state, Tensor) else state


def assert_plain(state: Any) -> None:
    for value in state.values():
        if isinstance(value, dict):
            assert_plain(value)
        elif isinstance(value, Tensor):
            assert type(value) is Tensor
            assert value.device.type == "cpu"


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            same(value, other[key])
        elif isinstance(value, Tensor):
            assert_same_bits({key: value}, {key: other[key]})
        else:
            assert value == other[key]


def read_and_loaded(name: str) -> None:
    """What is read equals what a closed run has, lives on when training goes on, and loads again: into a
    plain model, and into another run from one rank."""
    options, me = CASES[name], dist.get_rank()
    last = dist.get_world_size() - 1
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        model, optimizer, run = sharded(options, one)
        steps(model, optimizer, 0, 2)
        weights, state = run.full_state_dict(), run.full_optimizer_state_dict(optimizer)
        assert bool(weights) == bool(state) == (me == 0)
        first = weights, state
        weights, state = run.full_state_dict(None), run.full_optimizer_state_dict(rank=None)
        assert_plain(weights)
        assert_plain(state["state"])
        kept = cloned(weights), cloned(state)
        if me == 0:
            same(first[0], weights)
            same(first[1], state)
        assert type(weights) is OrderedDict
        assert list(weights) == list(odd().state_dict())
        assert weights._metadata.keys() == odd().state_dict()._metadata.keys()
        assert weights["words.weight"].data_ptr() == weights["head.weight"].data_ptr()
        assert all(value.dtype == torch.float32 for value in weights.values() if not _is_count(value))
        narrow = run.full_state_dict(last, dtype=torch.bfloat16)
        assert bool(narrow) == (me == last)
        if narrow:
            same(narrow, {n: v if _is_count(v) else v.bfloat16() for n, v in weights.items()})
        with run.gathered():
            same(run.full_state_dict(None), weights)
        again, stepper, second = sharded(options, other)
        steps(again, stepper, 7, 1)
        keys = second.load_full_state_dict(weights if me == last else None, last)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        second.load_full_optimizer_state_dict(state if me == last else {}, rank=last)
        same(second.full_state_dict(None), weights)
        loaded = second.full_optimizer_state_dict(rank=None)
        if "8 bits" not in name:  # which are rounded once more
            same(loaded, state)
        second.close()
        steps(model, optimizer, 2, 1)
        same(weights, kept[0])
        same(state, kept[1])
        # Back again, this time by the loads of torch itself, from every rank.
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        run.close()
    if me == 0:  # others may have other batch statistics since the last broadcast
        same(weights, cloned(model.state_dict()))
    if "8 bits" not in name:
        same(state["state"], cloned(optimizer.state_dict()["state"]))
    taken = odd()
    taken.load_state_dict(weights)
    by_hand = AdamW((p for p in taken.parameters() if p.requires_grad), lr=0.0)
    by_hand.load_state_dict(state)
    same(taken.state_dict(), weights)
    for at, entries in by_hand.state_dict()["state"].items():
        same(entries, state["state"][at])
    assert by_hand.param_groups[0]["lr"] == 1e-2


def _is_count(value: object) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point()


def all_read_and_loaded(names: list[str]) -> None:
    for name in names:
        try:
            read_and_loaded(name)
        except Exception as error:
            raise AssertionError(f"case {name!r}") from error


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 3])
def test_whole_state_is_what_plain_pytorch_has(world: int) -> None:
    ranks(world).run(all_read_and_loaded, list(CASES), timeout=300)


def assigned(stage: int) -> None:
    """`assign=True` brings values, and leaves the parameters that the optimizer updates."""
    model = nn.Linear(3, 4)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, stage=stage)
    sharded_param, given = model.weight, {"weight": torch.ones(4, 3), "bias": torch.zeros(4)}
    model.load_state_dict(given, assign=True)
    assert model.weight is sharded_param
    same(run.full_state_dict(None), given)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert run.full_state_dict(None)["weight"].max() < 1.0
    run.close()


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_assigned_values_arrive_in_the_parameters_that_train(stage: int) -> None:
    for world in (1, 2):
        ranks(world).run(assigned, stage)


def of_matrices(stage: int) -> None:
    """Muon's state lies on one rank each; a parameter that was never updated has none, as in plain
    PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4), nn.Linear(5, 2))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon, adam = Muon(matrices), AdamW([p for p in model.parameters() if p.dim() == 1])
    run = zs.shard(model, [muon, adam], stage=stage)
    model[1](model[0](torch.randn(6, 5))).square().mean().backward()
    muon.step()
    adam.step()
    first, second = (run.full_optimizer_state_dict(o, rank=None) for o in (muon, adam))
    weights = run.full_state_dict(None)
    for told, optimizer in ((first, muon), (second, adam)):
        with pytest.raises(zs.OptionError, match="takes one of the optimizers that"):
            run.full_optimizer_state_dict(torch.optim.SGD(nn.Linear(1, 1).parameters()))
        run.load_full_optimizer_state_dict(told if run.rank == 0 else None, optimizer)
    assert list(first["state"]) == list(second["state"]) == [0, 1]
    assert first["state"][1]["momentum_buffer"].shape == (4, 3)
    run.close()
    for told, optimizer in ((first, muon), (second, adam)):
        same(told["state"], cloned(optimizer.state_dict()["state"]))
    same(weights, cloned(model.state_dict()))


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_of_several_optimizers_and_of_whole_matrices(stage: int) -> None:
    for world in (1, 2, 3):
        ranks(world).run(of_matrices, stage)


def of_owners(kind: str, offload: bool) -> None:
    """State that was loaded lies where it lay before: of a whole parameter on one rank alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4), nn.Linear(4, 2))
    matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    both: list[torch.optim.Optimizer] = [Muon(matrices), AdamW(vectors)]
    optimizers = both if kind == "muon" else [Adafactor([*matrices, *vectors])]
    run = zs.shard(model, optimizers, stage=3, offload=zs.Offload() if offload else None)

    def step() -> None:
        model(torch.randn(6, 5)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def held() -> tuple[int, int, list[list[int]]]:
        """Bytes, and by parameter those of its state on this rank."""
        live, params = run.stats().live, list(model.parameters())
        sizes = [[len(o.state[p]) for p in params if p in o.state] for o in optimizers]
        return live["state"], live["host"], sizes

    step()
    before, first = held(), next(iter(optimizers[0].param_groups[0]["params"]))
    for rank in (None, 0):
        for optimizer in optimizers:
            run.load_full_optimizer_state_dict(
                run.full_optimizer_state_dict(optimizer, rank), optimizer, rank
            )
        assert held() == before
        if not optimizers[0].state[first]:
            with pytest.raises(zs.StateError, match=r"of `0\.weight` is on rank . alone"):
                optimizers[0].state[first]["momentum_buffer"]
        step()
        assert held() == before
    run.close()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["muon", "adafactor"])
@pytest.mark.parametrize("offload", [False, True])
def test_loaded_state_of_whole_parameters_lies_on_one_rank(kind: str, offload: bool) -> None:
    ranks(3).run(of_owners, kind, offload)


class Refusing(nn.Linear):
    """Its hook fails, on one rank alone."""

    def get_extra_state(self) -> int:
        if dist.get_rank() == 0:
            raise ValueError("no state today")
        return 0

    def set_extra_state(self, state: Any) -> None:
        return None


def refused() -> list[str]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = AdamW(model.parameters())
    run = zs.shard(model, optimizer, stage=3)
    me, rows = run.rank, dict(model.state_dict())
    whole = run.full_state_dict(None)
    wrong = {"0.weight": torch.zeros(4, 4)}
    told = []
    for ask in (
        lambda: run.full_state_dict(2),
        lambda: run.full_state_dict(me),
        lambda: run.full_state_dict(dtype=torch.int8),
        lambda: run.load_full_state_dict(rows),
        lambda: run.load_full_state_dict(None),
        lambda: run.load_full_state_dict({} if me == 0 else None),
        lambda: run.load_full_state_dict(whole | wrong),
        lambda: run.load_full_optimizer_state_dict({"state": {}, "param_groups": []}),
    ):
        with pytest.raises((zs.ZeroShardError, RuntimeError)) as caught:
            ask()
        told.append(str(caught.value))
    keys = run.load_full_state_dict({"0.bias": torch.ones(4), "9.bias": torch.ones(4)}, strict=False)
    assert (len(keys.missing_keys), keys.unexpected_keys) == (3, ["9.bias"])
    assert run.full_state_dict(None)["0.bias"].tolist() == [1.0] * 4
    with run.no_sync():
        model(torch.ones(1, 3)).sum().backward()
    run.full_state_dict()  # gradients under way do not matter
    optimizer.zero_grad()
    run.close()
    alone = Refusing(3, 4)
    run = zs.shard(alone, stage=3)
    with pytest.raises(zs.RankError) as caught:
        run.full_state_dict()
    told.append(str(caught.value))
    assert all(type(p).__name__ == "ShardedDTensor" for p in alone.parameters())
    run.close()
    return told


@pytest.mark.ranks
def test_what_cannot_be_read_or_loaded_is_refused_on_all_ranks() -> None:
    first, second = ranks(2).run(refused)
    assert first == second
    words = (
        r"run.full_state_dict\(\): rank=2 is none of the 2 ranks",
        r"run.full_state_dict\(\): ranks ask for different states, by rank: rank=0 .*, rank=1",
        r"run.full_state_dict\(dtype=torch.int8\) takes a floating dtype",
        r"run.load_full_state_dict\(\).*'0.weight' is rows, and not a whole tensor",
        r"run.load_full_state_dict\(\).* takes a state dict, and this is a NoneType",
        r"Missing key\(s\) in state_dict: \"0.weight\"",
        r"`0.weight` is \(4, 4\) in the given state and \(4, 3\) in the model",
        r"the parameter groups of the given state have no parameters",
        r"run.full_state_dict\(\) is refused on all 2 ranks because of rank 0 .*no state today",
    )
    for text, word in zip(first, words, strict=True):
        assert re.search(word, text), (word, text)


def between() -> list[str]:
    """Where the ranks have no one state."""
    told = []
    model = nn.Linear(3, 4)
    optimizer = AdamW(model.parameters())
    run = zs.shard(model, optimizer, stage=0, sync=zs.Local(steps=4))
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    for ask in (run.full_state_dict, run.full_optimizer_state_dict):
        with pytest.raises(zs.StateError) as caught:
            ask()
        told.append(str(caught.value))
    run.close()
    inside = Asks()
    inside.run = run = zs.shard(inside, stage=3)
    with pytest.raises(zs.StateError) as caught:
        inside(torch.ones(1, 3))
    told.append(str(caught.value))
    run.close()
    return told


class Asks(nn.Linear):
    run: zs.Run

    def __init__(self) -> None:
        super().__init__(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.run.full_state_dict()
        return super().forward(x)


@pytest.mark.ranks
def test_at_a_moment_without_one_state_it_is_refused() -> None:
    for apart, also, inside in ranks(2).run(between):
        for text in (apart, also):
            assert text.startswith(
                "cannot read the whole state now (rank 0): with sync=Local(...) the ranks'"
            )
        assert "inside a forward modules hold copies" in inside
