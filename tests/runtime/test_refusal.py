"""What one rank alone is refused by `shard()`, or fails at there, is told on all ranks at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW

import zeroshard as zs
from zeroshard.comm.refusal import raise_together, told_of
from zeroshard.testing import ranks

REFUSED = (
    "shard() is refused on all {} ranks because of rank {} (check code and files that depend on the rank): "
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def astray() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def plain(**options: Any) -> tuple[Any, Any, dict[str, Any]]:
    model = net()
    return model, AdamW(model.parameters()), options


def foreign() -> tuple[Any, Any, dict[str, Any]]:
    return net(), AdamW(net().parameters()), {}


def stepped() -> tuple[Any, Any, dict[str, Any]]:
    model, optimizer, _ = plain()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, {}


def hooked() -> tuple[Any, Any, dict[str, Any]]:
    model, optimizer, _ = plain()
    model[1].bias.register_hook(lambda grad: grad)
    return model, optimizer, {}


def on_two_devices() -> tuple[Any, Any, dict[str, Any]]:
    model, optimizer, _ = plain()

    def devices(_: nn.Module) -> set[torch.device]:
        return {torch.device("cpu"), torch.device("cuda", 0)}

    patch("zeroshard.runtime.admission.devices_of", devices).start()
    return model, optimizer, {}


class Odd(nn.Module):
    """Its parameters cannot be listed: no error of ours."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("parts")


# What the last rank gives, and what all ranks are told of it.
ALONE: dict[str, tuple[Callable[[], tuple[Any, Any, dict[str, Any]]], str]] = {
    "stage": (lambda: plain(stage=7), "OptionError: stage=7 is not one of 0, 1, 2, 3."),
    "type": (lambda: plain(prefetch="two"), "OptionError: prefetch='two' must be a number of units"),
    "option": (lambda: plain(stages=2), "OptionError: shard() has no option 'stages'. Did you mean"),
    "unit": (lambda: plain(units="blocks.*"), 'OptionError: unit pattern "blocks.*" matches none of the 2'),
    "codec": (lambda: plain(compress={"x": zs.Int8()}), 'OptionError: compress: pattern "x" matches no tr'),
    "limit": (lambda: plain(limit="some"), "OptionError: limit='some' is not a size"),
    "plan": (lambda: plain(plan="plan.json"), "OptionError: plan='plan.json' must be a zs.Plan; zs.Plan."),
    "init": (lambda: plain(init=3), "OptionError: init=3 must be a function that fills a module"),
    "group": (lambda: plain(group="all"), "OptionError: group='all' is no process group of torch.distribut"),
    "model": (lambda: (None, None, {}), "ModelError: shard() takes a torch.nn.Module, not NoneType."),
    "optimizer": (lambda: (net(), 0.1, {}), "ModelError: shard() takes torch optimizers, not float."),
    "foreign optimizer": (foreign, "ModelError: 4 of the 4 parameters of AdamW are not in the model. Build"),
    "optimizer with state": (stepped, "ModelError: AdamW has stepped already: it holds state for 4 param"),
    "gradient hook": (hooked, "ModelError: `1.bias` has gradient hooks, which would not be called: autogr"),
    "devices": (on_two_devices, "ModelError: the model is on several devices (cpu, cuda:0): move it to one"),
    "no error of ours": (lambda: (Odd(), None, {}), "KeyError: 'parts'"),
}  # fmt: skip


def refused(name: str, options: dict[str, Any]) -> str:
    """How the call ends; afterwards the ranks can train."""
    model, optimizer, given = ALONE[name][0]() if astray() else plain(**options)
    before = dict(nn.Module.named_parameters(model)) if isinstance(model, nn.Sequential) else {}
    try:
        with pytest.raises(zs.RankError) as caught:
            zs.shard(model, optimizer, **given)
    finally:
        patch.stopall()
    assert all(p is before[n] for n, p in model.named_parameters()) if before else True
    assert (caught.value.__cause__ is not None) == astray()
    model, optimizer, _ = plain()
    run = zs.shard(model, optimizer, stage=2, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    run.close()
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_is_refused_all_are_told(name: str) -> None:
    said = ranks(2).run(refused, name, {})
    assert said[0].startswith(REFUSED.format(2, 1) + ALONE[name][1])
    assert said[1] == said[0]


@pytest.mark.ranks
def test_it_is_so_over_gloo_and_with_more_ranks() -> None:
    said = ranks(4).run(refused, "stage", {"transport": "gloo"})
    assert said == [REFUSED.format(4, 3) + ALONE["stage"][1]] * 4


def refused_early() -> tuple[str, str]:
    """The other rank comes when this one has gone on."""
    model, optimizer, _ = plain()
    store = dist.distributed_c10d._get_default_store()
    if not astray():
        store.wait(["refused early"])
    with patch("zeroshard.comm.connect._PATIENCE", 0.2), pytest.raises(zs.ZeroShardError) as caught:
        zs.shard(model, optimizer, **({"stage": 7} if astray() else {}))
    store.set("refused early", "")
    dist.barrier()
    zs.shard(model, optimizer).close()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.ranks
def test_who_comes_late_is_told_too() -> None:
    said = ranks(2).run(refused_early)
    text = "stage=7 is not one of 0, 1, 2, 3."
    assert said == [("RankError", f"{REFUSED.format(2, 1)}OptionError: {text}"), ("OptionError", text)]


def refused_on_all(same: bool) -> tuple[str, str]:
    model, optimizer, _ = plain()
    options: dict[str, Any] = {"stage": 7 if same or astray() else 0}
    if not same and not astray():
        optimizer = Adagrad(net().parameters())
    with pytest.raises(zs.ZeroShardError) as caught:
        zs.shard(model, optimizer, **options)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.ranks
def test_the_same_mistake_of_all_ranks_is_told_as_it_is() -> None:
    assert ranks(2).run(refused_on_all, True) == [("OptionError", "stage=7 is not one of 0, 1, 2, 3.")] * 2


@pytest.mark.ranks
def test_different_mistakes_are_told_with_one_text() -> None:
    first, second = ranks(2).run(refused_on_all, False)
    assert first == second
    kind, text = first
    assert kind == "RankError"
    assert text.startswith(
        "shard() is refused on all 2 ranks because of rank 0 and of 1 more (check code and files that depend "
        "on the rank): ModelError: 4 of the 4 parameters of Adagrad are not in the model."
    )


def outside_of_the_group() -> str:
    """Nobody waits for a rank that is not in the group."""
    group = dist.new_group([0])
    model, optimizer, _ = plain()
    if dist.get_rank() == 0:
        zs.shard(model, optimizer, group=group).close()
        return ""
    with pytest.raises(zs.OptionError) as caught:
        zs.shard(model, optimizer, group=group)
    return str(caught.value)


@pytest.mark.ranks
def test_a_rank_outside_of_the_group_is_refused_alone() -> None:
    said = ranks(2).run(outside_of_the_group)
    assert said[1].startswith("group=-100 is no process group of torch.distributed that this rank is in")


def different_nodes() -> str:
    with pytest.raises(zs.OptionError) as caught:
        zs.shard(net(), ranks_per_node=3 if astray() else 1)
    return str(caught.value)


@pytest.mark.ranks
def test_different_nodes_are_refused_before_the_ranks_can_talk() -> None:
    said = ranks(2).run(different_nodes)
    assert said == ["ranks ask for different ranks_per_node: 1, 3 (in rank order)"] * 2


def different_plans() -> str:
    model, optimizer, _ = plain()
    plan = zs.plan(model, optimizer, ranks=2, limit="1GiB", batch=torch.ones(1, 3))
    with pytest.raises(zs.RankError) as caught:
        zs.shard(model, optimizer, plan=replace(plan, limit=2**20) if astray() else plan)
    return str(caught.value)


@pytest.mark.ranks
def test_plans_that_differ_in_what_they_keep_are_refused() -> None:
    said = ranks(2).run(different_plans)
    assert said[0].startswith("ranks disagree about the options: plan is stage ")
    assert said[1] == said[0]


# ---------------------------------------------------------------------- while the run is built


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3, device="meta"))

    def reset_parameters(self) -> None:
        if astray():
            raise MemoryError("no room for `weight`")
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def fails_at_the_end(*given: Any, own: Any = zs.api._recomputed) -> Any:
    if astray():
        raise OSError(28, "the disk is full")
    return own(*given)


def fails_while_it_builds(where: str, transport: Any, per_node: int | None = None) -> tuple[str, str]:
    options: dict[str, Any] = {"stage": 2, "transport": transport, "ranks_per_node": per_node}
    model: nn.Module = Filled() if where == "filling" else net()
    end = fails_at_the_end if where == "the end" else zs.api._recomputed
    with patch("zeroshard.api._recomputed", end), pytest.raises(Exception) as caught:  # noqa: PT011
        zs.shard(model, SGD(model.parameters(), lr=0.1), **options)
    again, optimizer, _ = plain()  # another model: of this one each rank has rows, or nothing
    zs.shard(again, optimizer, **options).close()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize(("where", "own", "told"), [
    ("filling", ("MemoryError", "no room for `weight`"), "MemoryError: no room for `weight`"),
    ("the end", ("OSError", "[Errno 28] the disk is full"), "OSError: [Errno 28] the disk is full"),
])  # fmt: skip
def test_what_one_rank_fails_at_all_are_told(
    where: str, own: tuple[str, str], told: str, transport: str
) -> None:
    said = ranks(2).run(fails_while_it_builds, where, transport)
    assert said == [("RankError", f"rank 1 failed: {told}"), own]


@pytest.mark.ranks
@pytest.mark.parametrize("where", ["filling", "the end"])
def test_ranks_that_hear_of_it_from_others_are_told_the_cause(where: str) -> None:
    *others, _ = ranks(4).run(fails_while_it_builds, where, "nodes", 2)
    assert {kind for kind, _ in others} == {"RankError"}
    assert len({text for _, text in others}) == 1
    assert others[0][1].startswith("rank 3 failed: ")


# ---------------------------------------------------------------------- without a launcher

SCRIPT = Path(__file__).parents[1] / "support" / "failing.py"


@pytest.mark.ranks
def test_ranks_that_no_launcher_started_are_told_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "refused", "shm", "3"],
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [1, 1], said
    for text in said:
        assert REFUSED.format(2, 1) + ALONE["stage"][1] in text


# ---------------------------------------------------------------------- the rule


def test_nothing_is_raised_where_no_rank_is_refused() -> None:
    raise_together("shard()", [told_of(None)] * 3, None)


def test_of_several_ranks_the_first_is_named() -> None:
    error = ValueError("b")
    told = [None, told_of(KeyError("a")), told_of(error)]
    with pytest.raises(zs.RankError, match=r"^load\(\) is refused on all 3 ranks because of rank 1 and "):
        raise_together("load()", told, None)
    with pytest.raises(zs.RankError, match=r"KeyError: 'a'$") as caught:
        raise_together("load()", told, error)
    assert caught.value.__cause__ is error
