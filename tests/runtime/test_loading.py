"""State that does not fit is refused by `load_state_dict` before anything changes, on all ranks; what plain
PyTorch saved, and what a run showed, loads."""

from __future__ import annotations

import copy
import math
import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import AdamW, Optimizer

import zeroshard as zs
from zeroshard.testing import ranks

HEIGHT = 6  # rows of the weight: three on each of two ranks
HOST = {"optimizer": "host", "threads": 1}
RUNS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "level": {"stage": 3, "split": "level"},
    "whole": {"stage": 3, "split": "whole"},
    "gloo": {"stage": 2, "transport": "gloo"},
    "host": {"stage": 2, "clip_norm": math.inf, "offload": HOST},
    "host, in the step": {"stage": 3, "offload": HOST},
    "8 bits": {"stage": 2, "clip_norm": math.inf, "offload": {**HOST, "moments": "int8"}},
    "split": {"stage": 2, "clip_norm": math.inf, "precision": "bf16", "offload": {**HOST, "master": "split"}},
    "disk": {"stage": 3, "clip_norm": math.inf, "offload": {**HOST, "optimizer": "disk"}},
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, HEIGHT), nn.Linear(HEIGHT, 4))


def stepped(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(make: Callable[[Any], Optimizer] = AdamW) -> dict[str, Any]:
    """By plain PyTorch."""
    model = net()
    optimizer = make(model.parameters())
    stepped(model, optimizer)
    return copy.deepcopy(optimizer.state_dict())


def sharded(
    options: dict[str, Any], scratch: str = "", make: Callable[[Any], Optimizer] = AdamW
) -> tuple[nn.Module, Optimizer, zs.Run]:
    given = dict(options)
    if "offload" in given:
        path = scratch if given["offload"]["optimizer"] == "disk" else None
        given["offload"] = zs.Offload(**given["offload"], path=path)
    model = net()
    optimizer = make(model.parameters())
    return model, optimizer, zs.shard(model, optimizer, **given)


def plain(value: Any) -> Any:
    """All of a state dict, in plain numbers, whatever shows it."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    local = value._local_tensor if isinstance(value, DTensor) else value
    return local.tolist() if isinstance(local, Tensor) else value


def damaged(state: dict[str, Any], key: str, value: Any, number: int = 0) -> dict[str, Any]:
    state = copy.deepcopy(state)
    state["state"][number][key] = value
    return state


# What is in the place of an entry of the first weight, which is (6, 4), and what is said of it.
ROWS = r"These may be the rows of one rank: load whole tensors, as plain PyTorch saves them and of which each"
OTHER = r"The state is of another model, or of the same parameters in another order\. Nothing was loaded\.$"
WRONG: dict[str, tuple[str, Any, str]] = {
    "rows": ("exp_avg", torch.zeros(3, 4), r"is \(3, 4\) in the given state and must be \(6, 4\); the w"),
    "fewer": ("exp_avg_sq", torch.zeros(2, 4), r"is \(2, 4\) in the given state and must be \(6, 4\)"),
    "turned": ("exp_avg", torch.zeros(4, 6), rf"is \(4, 6\) .*; the whole parameter is \(6, 4\)\. {OTHER}"),
    "flat": ("exp_avg", torch.zeros(24), rf"is \(24,\) in the given state .* {OTHER}"),
    "number": ("exp_avg", torch.tensor(1.0), rf"is \(\) in the given state and must be \(6, 4\).* {OTHER}"),
    "step": ("step", torch.ones(6, 4), rf"is \(6, 4\) in .* state and must be a single number.* {OTHER}"),
}  # fmt: skip


def refused(name: str) -> tuple[list[str], bool]:
    """What each kind of wrong state is told, and whether anything has changed."""
    with tempfile.TemporaryDirectory() as scratch:
        model, optimizer, run = sharded(RUNS[name], scratch)
        stepped(model, optimizer)
        good = saved()
        good["param_groups"][0]["lr"] = 0.5
        before, objects = plain(optimizer.state_dict()), [id(group) for group in optimizer.param_groups]
        told = []
        for key, value, _ in WRONG.values():
            with pytest.raises(zs.ModelError) as caught:
                optimizer.load_state_dict(damaged(good, key, value))
            told.append(str(caught.value))
        same = plain(optimizer.state_dict()) == before
        same &= [id(group) for group in optimizer.param_groups] == objects
        stepped(model, optimizer)
        optimizer.load_state_dict(good)
        assert optimizer.param_groups[0]["lr"] == 0.5
        stepped(model, optimizer)
        run.close()
    return told, same


@pytest.mark.ranks
@pytest.mark.parametrize("name", RUNS)
def test_state_of_another_shape_is_refused_before_anything_changes(name: str) -> None:
    first, second = ranks(2).run(refused, name)
    assert first == second
    assert first[1]
    divided = name not in ("stage 0", "whole")
    for text, (case, (key, _, said)) in zip(first[0], WRONG.items(), strict=True):
        assert text.startswith(f"optimizer.load_state_dict(): `{key}` of `0.weight` is ")
        hint = (ROWS if divided else OTHER) if case in ("rows", "fewer") else ""
        assert_said(text, said, hint)


def assert_said(text: str, *patterns: str) -> None:
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern}\n{text}"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_is_told_too(stage: int, fused: bool) -> None:
    """A fused kernel would write past the end of what is too short."""
    model, optimizer, run = sharded({"stage": stage}, make=lambda params: AdamW(params, fused=fused))
    stepped(model, optimizer)
    before = plain(optimizer.state_dict())
    with pytest.raises(zs.ModelError, match=r"`exp_avg` of `0\.weight` is \(3, 4\) in .* Nothing was"):
        optimizer.load_state_dict(damaged(saved(), "exp_avg", torch.zeros(3, 4)))
    assert plain(optimizer.state_dict()) == before
    stepped(model, optimizer)
    run.close()


# ---------------------------------------------------------------------- what fits


def loaded(name: str) -> float:
    """State of plain PyTorch, and then what the run shows of it: how far the two are apart."""
    with tempfile.TemporaryDirectory() as scratch:
        _, optimizer, run = sharded(RUNS[name], scratch)
        given, kept = saved(), saved()
        optimizer.load_state_dict(given)
        first = plain(optimizer.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        assert plain(optimizer.state_dict()) == first
        assert plain(given) == plain(kept)  # it is the loop's
        run.close()
        whole = optimizer.state_dict()["state"]
    return max(
        (whole[number][key].float() - value.float()).abs().max().item()
        for number, entries in kept["state"].items()
        for key, value in entries.items()
    )


@pytest.mark.ranks
@pytest.mark.parametrize("name", RUNS)
def test_state_of_plain_pytorch_loads_and_comes_back(name: str) -> None:
    far = ranks(2).run(loaded, name)
    assert max(far) <= (0.5 if name == "8 bits" else 0.0)


class Shampoo(Optimizer):
    """Keeps two matrices of other shapes for each parameter, a number and a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None or not p.numel():
                continue
            state, grad = self.state[p], p.grad.reshape(len(p), -1)
            if not state:
                state |= {"left": torch.zeros(len(p), len(p)), "right": torch.zeros(grad.shape[1], 1)}
                state |= {"step": torch.zeros(1), "block": 128, "shapes": [len(p)]}
            state["step"] += 1
            state["left"] += grad @ grad.T
            state["right"] += grad.square().sum(0).unsqueeze(1)
            p -= 0.01 * p.grad


class Own(AdamW):
    """Torch's own step under another name."""


MADE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, foreach=True),
    "fused": lambda params: AdamW(params, fused=True),
    **{
        name: getattr(torch.optim, name)
        for name in ("Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "Rprop", "ASGD", "Adafactor")
    },
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2]),
    "subclass": Own,
    "Shampoo": Shampoo,
}  # fmt: skip


def every_optimizer() -> list[str]:
    """Of plain PyTorch's state and of the run's own; names of those that did not come back."""
    wrong = []
    for name, make in MADE.items():
        given = saved(make)
        model, optimizer, run = sharded({"stage": 2}, make=make)
        optimizer.load_state_dict(copy.deepcopy(given))
        first = plain(optimizer.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        if plain(optimizer.state_dict()) != first:
            wrong.append(f"{name}: its own")
        stepped(model, optimizer)
        stepped(model, optimizer)
        optimizer.load_state_dict(copy.deepcopy(given))
        run.close()
        if plain(optimizer.state_dict()["state"]) != plain(given["state"]):
            wrong.append(name)
    return wrong


@pytest.mark.ranks
def test_every_optimizers_state_loads_and_comes_back() -> None:
    assert ranks(2).run(every_optimizer) == [[], []]


# Optimizer, entry, value, and what is said; the parameter is (6, 4).
UNFIT: list[tuple[str, str, Tensor, str]] = [
    ("Adafactor", "row_var", torch.zeros(4, 1), r"`row_var` of `0\.weight` is \(4, 1\) .* must be \(6, 1\)"),
    ("Adafactor", "col_var", torch.zeros(4), r"`col_var` of `0\.weight` is \(4,\) .* must be \(1, 4\)"),
    ("Muon", "momentum_buffer", torch.zeros(3, 4), r"`momentum_buffer` of `0\.weight` is \(3, 4\)"),
    ("NAdam", "mu_product", torch.zeros(2), r"`mu_product` of `0\.weight` is \(2,\) .* a single number"),
    ("subclass", "exp_avg", torch.zeros(3, 4), r"`exp_avg` of `0\.weight` is \(3, 4\)"),
    ("SGD", "momentum_buffer", torch.zeros(6), r"`momentum_buffer` of `0\.weight` is \(6,\)"),
    ("fused", "mine", torch.zeros(3, 4), r"`mine` of `0\.weight` is \(3, 4\) .* must be \(6, 4\)"),
]  # fmt: skip


def unfit_entries() -> list[str]:
    told = []
    for name, key, value, _ in UNFIT:
        model, optimizer, run = sharded({"stage": 2}, make=MADE[name])
        with pytest.raises(zs.ModelError) as caught:
            optimizer.load_state_dict(damaged(saved(MADE[name]), key, value))
        told.append(str(caught.value))
        stepped(model, optimizer)
        run.close()
    return told


@pytest.mark.ranks
def test_entries_of_other_optimizers_are_looked_at_as_far_as_they_are_known() -> None:
    first, second = ranks(2).run(unfit_entries)
    assert first == second
    for text, (_, _, _, said) in zip(first, UNFIT, strict=True):
        assert_said(text, said)


def other_ways() -> list[Any]:
    """Entries that are missing, beside torch's own, or under other numbers."""
    model, optimizer, run = sharded({"stage": 3})
    given = saved()
    partial = copy.deepcopy(given)
    del partial["state"][1]
    optimizer.load_state_dict(partial)
    held = [len(entries) for entries in optimizer.state_dict()["state"].values()]
    stepped(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    called = {"state": dict(zip(names, copy.deepcopy(given)["state"].values(), strict=True))}
    called["param_groups"] = [given["param_groups"][0] | {"params": names}]
    optimizer.load_state_dict(called)
    stepped(model, optimizer)
    optimizer.load_state_dict(damaged(given, "notes", torch.zeros(7)))
    kept = optimizer.state_dict()["state"][0]["notes"]
    told = []
    for wrong in (
        given | {"param_groups": given["param_groups"] * 2},
        given | {"param_groups": [given["param_groups"][0] | {"params": [0, 1, 2]}]},
    ):
        with pytest.raises(zs.ModelError) as caught:
            optimizer.load_state_dict(wrong)
        told.append(str(caught.value))
    stepped(model, optimizer)
    run.close()
    return [held, kept.tolist(), *told]


@pytest.mark.ranks
def test_state_need_not_be_complete_nor_numbered() -> None:
    for held, kept, groups, lengths in ranks(2).run(other_ways):
        assert held == [3, 3, 3]
        assert kept == [0.0] * 7
        words = "optimizer.load_state_dict(): the parameter groups of the given state have"
        assert groups.startswith(f"{words} 4, 4 parameters, and those of AdamW 4. Load what was saved with")
        assert lengths.startswith(f"{words} 3 parameters, and those of AdamW 4. Load what was saved with")


def divided_otherwise(stage: int) -> list[str]:
    """DTensors of the right shape."""
    model, optimizer, run = sharded({"stage": stage})
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    columns = DTensor.from_local(torch.zeros(6, 2), mesh, [Shard(1)])
    copies = DTensor.from_local(torch.zeros(6, 4), mesh, [Replicate()])
    told = []
    for value in (columns, copies):
        try:
            optimizer.load_state_dict(damaged(saved(), "exp_avg", value))
            told.append("")
        except zs.ModelError as error:
            told.append(str(error))
    stepped(model, optimizer)
    run.close()
    return told


@pytest.mark.ranks
def test_dtensors_of_other_rows_are_refused() -> None:
    start = (
        "optimizer.load_state_dict(): `exp_avg` of `0.weight` has 6 rows here, and this is rank 0 of 2, with "
    )
    for columns, copies in ranks(2).run(divided_otherwise, 2)[:1]:
        assert columns.startswith(f"{start}rows 0 to 3. A file of")
        assert copies == columns
    for columns, copies in ranks(2).run(divided_otherwise, 0)[:1]:
        assert columns.startswith(f"{start}rows 0 to 6. A file of")
        assert copies == ""


# ---------------------------------------------------------------------- on one rank alone


def wrong_on_one_rank(transport: Any) -> list[str]:
    model, optimizer, run = sharded({"stage": 3, "transport": transport})
    stepped(model, optimizer)
    mine = dist.get_rank() == 1
    good, weights = saved(), net().state_dict()
    before = [plain(optimizer.state_dict()), plain(dict(model.state_dict()))]
    told = []
    for load in (
        lambda: optimizer.load_state_dict(damaged(good, "exp_avg", torch.zeros(3, 4)) if mine else good),
        lambda: optimizer.load_state_dict({"state": {}} if mine else good),
        lambda: model.load_state_dict(weights | {"1.bias": torch.zeros(7)} if mine else weights),
    ):
        with pytest.raises(zs.RankError) as caught:
            load()
        told.append(str(caught.value))
    assert [plain(optimizer.state_dict()), plain(dict(model.state_dict()))] == before
    stepped(model, optimizer)
    run.close()
    return told


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_what_does_not_fit_on_one_rank_is_refused_on_all(transport: str) -> None:
    first, second = ranks(2).run(wrong_on_one_rank, transport)
    assert first == second
    because = "load_state_dict() is refused on all 2 ranks because of rank 1 (check code and files that "
    because += "depend on the rank):"
    assert first[0].startswith(f"optimizer.{because} ModelError: optimizer.load_state_dict(): `exp_avg` of")
    assert first[1] == f"optimizer.{because} KeyError: 'param_groups'"
    assert first[2].startswith(f"model.{because} ModelError: load_state_dict: `1.bias` is (7,) in the given")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tied_weight_is_looked_at_by_all_of_its_names(stage: int) -> None:
    model = Tied()
    run = zs.shard(model, AdamW(model.parameters()), stage=stage)
    state = {"words.weight": torch.zeros(6, 4), "head.weight": torch.zeros(3, 4)}
    with pytest.raises(zs.ModelError, match=r"`head\.weight` is \(3, 4\) in the given state and \(6, 4\)"):
        model.load_state_dict(state)
    assert model.words.weight.abs().sum() > 0
    run.close()
