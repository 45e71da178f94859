"""State that goes in and out: whole tensors, state dicts, a closed run that trains on, the meta device."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_param_kinds import Block, Stack, Tied, Tiny, four, next_token, squared
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from trained_twice import STAGES, Case, Training, plain, plain_turn, rows, same_tensors, tokens, train

import zeroshard as zs
from zeroshard.testing import PeakBytes, ranks

pytestmark = pytest.mark.ranks
WORLD = 2
CASES = {
    "stack": Case(Stack, four, squared),
    "tied": Case(Tied, tokens, next_token),
    "tiny": Case(Tiny, four, squared),
}


def start(name: str, stage: int) -> Training:
    return Training(CASES[name], [dist.get_rank()], {"stage": stage})


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A state dict with every tensor in it changed."""
    if isinstance(value, dict):
        return {key: mapped(change, item) for key, item in value.items()}
    return change(value) if isinstance(value, Tensor) else value


def whole(tensor: Tensor) -> Tensor:
    """As one would write it to a file."""
    return cloned(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


# ---------------------------------------------------------------------- close


class Remembers(torch.optim.SGD):
    """Keeps its last gradients in a list."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("seen", []).append(p.grad.detach().clone())
        super().step(closure)


def nested_state(stage: int, folder: Path) -> str:
    """What a save says of it, before anything is done; without it the run is saved and closed as ever."""
    model = Stack()
    optimizer = Remembers(model.parameters(), lr=0.1)
    run = zs.shard(model, optimizer, stage=stage, **({"split": "rows"} if stage else {}))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(zs.StateError) as refused:
        run.save(folder / "none")
    assert not (folder / "none").exists()
    optimizer.state.clear()
    run.save(folder / "some")
    run.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return str(refused.value)


@pytest.mark.parametrize("stage", STAGES)
def test_tensors_in_lists_are_refused_before_anything_is_lost(stage: int, tmp_path: Path) -> None:
    for text in ranks(WORLD).run(nested_state, stage, tmp_path):
        assert text.startswith("cannot save now (rank 0): Remembers keeps tensors in a list (`seen` of")
        assert "optimizer.state.clear()" in text


class Projector:
    """What some optimizers keep for each parameter: an object with a tensor."""

    def __init__(self, like: Tensor) -> None:
        self.seen, self.rank = like.clone(), 4


class Keeper(torch.optim.Optimizer):
    """Keeps what the optimizers of others do, in lists, dicts by number, objects and sparse tensors."""

    elementwise = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, none=None, shape=(1, "x"), now=torch.zeros_like(p))
                    state["by beta"] = {beta: torch.zeros_like(p) for beta in (0.0, 0.9)}
                    state["list"] = [torch.zeros_like(p), torch.tensor(2.0)]
                    state["projector"] = Projector(p)
                    state["sparse"] = torch.eye(3).to_sparse()
                state["count"] += 1
                state["now"].copy_(p.grad)
                state["list"][0] += p.grad
                state["projector"].seen.lerp_(p.grad, 0.5)
                for beta, moment in state["by beta"].items():
                    moment.mul_(beta).add_(p.grad)
                    p.data.add_(moment, alpha=-group["lr"])
                p.data.add_(state["list"][0] + state["projector"].seen, alpha=-group["lr"])


class Whole(Keeper):
    """The same of whole tensors."""

    elementwise = False


class Stream(Remembers):
    """Keeps what no other process can have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["seen"] = [open(os.devnull)]  # noqa: SIM115


def flat_state(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Every entry of every parameter's state, with objects and sparse tensors opened."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = dict(optimizer.state[p])
            if "projector" in state:
                state["projector"] = vars(state["projector"])
            if "sparse" in state:
                assert state["sparse"].layout is torch.sparse_coo
                state["sparse"] = state["sparse"].to_dense()
            found.append(mapped(torch.Tensor.clone, state))
    return found


def close_with(kinds: list[type], stage: int) -> list[list[Any]]:
    """By kind: its state and weights after a close and a plain step; sharded by ranks, or in one process."""
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        model = Stack()
        optimizer = kind(model.parameters(), {"lr": 0.01})
        run = zs.shard(model, optimizer, stage=stage) if dist.is_initialized() else None
        for step in range(3):
            if run is not None and step == 2:
                given = run.full_optimizer_state_dict(rank=None)["state"]
                run.close()
                assert list(given[0]) == list(optimizer.state[next(model.parameters())])
            model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([*flat_state(optimizer), [p.detach().clone() for p in model.parameters()]])
    return found


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.allclose(one, other, rtol=1e-6, atol=1e-7)
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(alike, one, other)) and len(one) == len(other)
    return bool(one == other)


@pytest.mark.parametrize("stage", STAGES)
def test_a_closed_run_gives_back_whatever_an_optimizer_keeps(stage: int) -> None:
    kinds: list[type] = [Keeper, Whole]
    want = close_with(kinds, stage)
    for got in ranks(WORLD).run(close_with, kinds, stage):
        assert alike(got, want)


def unsent(stage: int) -> str:
    model = Stack()
    optimizer = Stream(model.parameters(), lr=0.1)
    run = zs.shard(model, optimizer, stage=stage)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(zs.StateError) as refused:
        run.close()
    for state in optimizer.state.values():
        state.pop("seen")[0].close()
    run.close()
    return str(refused.value)


def sparse(stage: int, folder: Path) -> str:
    model = Stack()
    optimizer = Whole(model.parameters(), {"lr": 0.1})
    run = zs.shard(model, optimizer, stage=stage)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        for key in ("by beta", "list", "projector"):
            state.pop(key, None)  # of some parameters another rank has the state
    with pytest.raises(zs.StateError) as refused:
        run.save(folder / "none")
    run.close()
    return str(refused.value)


def sparse_rows() -> str:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = zs.shard(model, optimizer, stage=2)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to_sparse()
    with pytest.raises(zs.StateError) as refused:
        run.close()
    optimizer.state.clear()
    run.close()
    return str(refused.value)


def test_what_cannot_be_sent_or_saved_is_named(tmp_path: Path) -> None:
    for text in ranks(WORLD).run(unsent, 2):
        assert text.startswith("cannot close now (rank 0): Stream keeps a list (`seen` of `")
        assert "that cannot be sent to other ranks (TypeError: cannot pickle" in text
    for text in ranks(WORLD).run(sparse_rows):
        assert re.search(
            r"SGD keeps the rows of a sparse tensor \(`momentum_buffer` of `.*`\), and only", text
        )
    for text in ranks(WORLD).run(sparse, 2, tmp_path):
        assert re.search(
            r"Whole keeps a sparse tensor \(`sparse` of `.*`\), and only dense ones can be saved", text
        )


class Quantised(Tensor):
    """As torchao's: a tensor around another, which knows few operations."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> Quantised:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Quantised:
        return cls(parts["codes"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes)
        raise NotImplementedError(str(function))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def averaged(p: Tensor, grad: Tensor, mean: Tensor) -> None:
    mean.lerp_(grad, 0.1)
    p.add_(mean, alpha=-0.1)


class InQuantised(Optimizer):
    """A mean of gradients in float16, updated by compiled code, as torchao's optimizers are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        update = torch.compile(averaged, fullgraph=True, backend="eager", dynamic=False)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            codes = (
                self.state[p]["mean"].codes if p in self.state else torch.zeros_like(p, dtype=torch.float16)
            )
            mean = codes.float()
            with torch._dynamo.utils.disable_cache_limit():
                update(p, p.grad, mean)
            self.state[p]["mean"] = Quantised(mean.half())


def quantised(stage: int, folder: Path) -> dict[str, Tensor]:
    """State of this kind goes from one run to another, and back to a plain loop."""

    def begun() -> tuple[nn.Module, InQuantised, zs.Run]:
        torch.manual_seed(0)
        model = Stack()
        optimizer = InQuantised(model.parameters())
        return model, optimizer, zs.shard(model, optimizer, stage=stage)

    model, optimizer, run = begun()

    def stepped(model: nn.Module, optimizer: Optimizer, number: int, parts: list[int]) -> None:
        torch.stack([squared(model, four(number, part).float()) for part in parts]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    rank = [dist.get_rank()]
    stepped(model, optimizer, 0, rank)
    with pytest.raises(zs.StateError, match=r"InQuantised keeps its state in tensors of its own kind \(Quan"):
        run.save(folder / "none")
    weights, state = run.full_state_dict(), run.full_optimizer_state_dict()
    other, others, second = begun()
    second.load_full_state_dict(weights)
    second.load_full_optimizer_state_dict(state)
    second.close()
    assert all(type(kept["mean"]) is Quantised for kept in others.state.values())
    stepped(model, optimizer, 1, rank)
    stepped(other, others, 1, [0, 1])
    run.close()
    same_tensors(values(model), values(other), 1e-6, "of a run and of the plain loop that went on")
    return values(model)


def test_state_in_tensors_of_an_optimizers_own_kind(tmp_path: Path) -> None:
    for stage in (1, 3):
        for got in ranks(WORLD).run(quantised, stage, tmp_path):
            assert got


def closed_amid(name: str, stage: int) -> dict[str, Tensor]:
    """Three steps sharded, then closed, then three plain steps on the whole batch."""
    training = start(name, stage)
    for step in range(3):
        plain_turn(training, step)
    assert training.run is not None
    training.run.close()
    training.run.close()  # harmless
    training.parts = list(range(WORLD))
    for step in range(3, 6):
        plain_turn(training, step)
    assert all(type(p) is nn.Parameter for p in training.model.parameters())
    assert training.model.state_dict().keys() == CASES[name].build().state_dict().keys()
    training.model.to(torch.float32)  # guards are gone
    training.model.to(torch.float64)
    return values(training.model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_closed_run_trains_on(name: str, stage: int) -> None:
    expected = plain(CASES[name], WORLD).params
    for rank, got in enumerate(ranks(WORLD).run(closed_amid, name, stage)):
        # Three of six steps end in float32.
        same_tensors(got, expected, 1e-6, f"on rank {rank}")


def sharded_again(stage: int) -> dict[str, Tensor]:
    """Closed, and sharded again at another stage with a new optimizer that takes over the old one's state."""
    case = Case(Stack, four, squared)
    first = Training(case, [dist.get_rank()], {"stage": stage})
    for step in range(3):
        plain_turn(first, step)
    assert first.run is not None
    first.run.close()
    state = first.optimizer.state_dict()
    first.optimizer = case.optimizer(first.model.parameters())
    first.run = zs.shard(first.model, first.optimizer, stage=3 - stage)
    first.optimizer.load_state_dict(state)
    for step in range(3, 6):
        plain_turn(first, step)
    first.run.close()
    return values(first.model)


@pytest.mark.parametrize("stage", STAGES)
def test_sharded_again_at_another_stage(stage: int) -> None:
    expected = plain(CASES["stack"], WORLD).params
    for rank, got in enumerate(ranks(WORLD).run(sharded_again, stage)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


# ---------------------------------------------------------------------- state dicts


def round_trip(name: str, stage: int, how: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Save after three steps, spoil everything with two other steps, load, and go on."""
    training = start(name, stage)
    for step in range(3):
        plain_turn(training, step)
    change = whole if how == "whole" else cloned
    saved = [mapped(change, part.state_dict()) for part in (training.model, training.optimizer)]
    for step in range(50, 52):
        plain_turn(training, step)
    del training.losses[3:]
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    for step in range(3, 6):
        plain_turn(training, step)
    end = mapped(whole, training.optimizer.state_dict())
    assert training.run is not None
    training.run.close()
    return values(training.model), end


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["whole", "rows"])
@pytest.mark.parametrize("name", CASES)
def test_state_dicts_round_trip(name: str, how: str, stage: int) -> None:
    case = CASES[name]
    training = Training(case, list(range(WORLD)))
    expected = train(training)
    momenta = training.optimizer.state_dict()["state"]
    for rank, (got, state) in enumerate(ranks(WORLD).run(round_trip, name, stage, how)):
        same_tensors(got, expected.params, 1e-9, f"on rank {rank}")
        for index, mine in state["state"].items():
            same_tensors(mine, momenta[index], 1e-9, f"state {index} on rank {rank}")


def best_so_far(stage: int) -> dict[str, Tensor]:
    """What loops with early stopping do: keep a copy of the best weights, and go back to it."""
    training = start("stack", stage)
    for step in range(3):
        plain_turn(training, step)
    best = copy.deepcopy(training.model.state_dict())
    plain_turn(training, 3)
    training.model.load_state_dict(best)
    assert training.run is not None
    training.run.close()
    return values(training.model)


@pytest.mark.parametrize("stage", STAGES)
def test_state_dict_can_be_deep_copied(stage: int) -> None:
    expected = plain(Case(Stack, four, squared, steps=3), WORLD).params
    for rank, got in enumerate(ranks(WORLD).run(best_so_far, stage)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


def loaded_from_plain(stage: int, model: dict[str, Tensor], optimizer: dict[str, Any]) -> dict[str, Tensor]:
    training = start("stack", stage)
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    for step in range(3, 6):
        plain_turn(training, step)
    assert training.run is not None
    training.run.close()
    return values(training.model)


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_a_plain_process_is_taken_up(stage: int) -> None:
    training = Training(CASES["stack"], list(range(WORLD)))
    for step in range(3):
        plain_turn(training, step)
    state = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    expected = plain(CASES["stack"], WORLD).params
    for rank, got in enumerate(ranks(WORLD).run(loaded_from_plain, stage, *state)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


# ---------------------------------------------------------------------- gathered


def read_and_written(stage: int) -> dict[str, Any]:
    training = start("stack", stage)
    plain_turn(training, 0)
    run, model = training.run, training.model
    assert run is not None
    before = model.first.weight
    with run.gathered("first.*", "blocks.1.up.weight") as some:
        names = sorted(some)
        stood = model.first.weight is some["first.weight"]
        read = model.first.weight.detach().clone()
        model.first.weight.data.zero_()  # without write=True this is lost
    same = model.first.weight is before
    with run.gathered("first.*", write=True), torch.no_grad():
        model.first.weight.copy_(read + 1)
    out = model(four(0, 0)).detach()
    run.close()
    return {"names": names, "stood": stood, "same": same, "read": read, "out": out, "after": values(model)}


@pytest.mark.parametrize("stage", STAGES)
def test_gathered_reads_and_writes(stage: int) -> None:
    reference = Training(CASES["stack"], list(range(WORLD)))
    plain_turn(reference, 0)
    read = reference.model.first.weight.detach().clone()
    with torch.no_grad():
        reference.model.first.weight.add_(1)
    expected = values(reference.model)
    out = reference.model(four(0, 0)).detach()
    for got in ranks(WORLD).run(read_and_written, stage):
        assert got["names"] == ["blocks.1.up.weight", "first.bias", "first.weight"]
        assert got["stood"]
        assert got["same"]
        same_tensors({"read": got["read"], "out": got["out"]}, {"read": read, "out": out}, 1e-9, "")
        same_tensors(got["after"], expected, 1e-9, "after")


# ---------------------------------------------------------------------- meta


class Big(nn.Module):
    """Six blocks of equal size; one module holds a parameter and a buffer, one a buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.phases = Phases(32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(6))
        self.odd = Scale(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.phases(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.odd(x)


class Phases(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("phases", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.phases, 0.7)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.phases


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.register_buffer("shift", torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain)
        nn.init.ones_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


def by_formula(module: nn.Module) -> None:
    """Values that depend on shapes alone, so that a plain model can have the same."""
    for tensor in [*module._parameters.values(), *module._buffers.values()]:
        if tensor is not None:
            line = torch.linspace(-3.0, 4.0, tensor.numel(), dtype=tensor.dtype)
            tensor.copy_(line.sin().view(tensor.shape) / 10)


def optimizer_of(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(model: nn.Module, optimizer: Optimizer, parts: list[int]) -> None:
    for step in range(4):
        torch.stack([model(rows(step, part, 4)).pow(2).mean() for part in parts]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def from_meta(stage: int, formula: bool) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Big().double()
    optimizer = optimizer_of(model)
    torch.manual_seed(11 + dist.get_rank())
    run = zs.shard(model, optimizer, stage=stage, init=by_formula if formula else None)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    if formula:
        steps(model, optimizer, [run.rank])
    run.close()
    return values(model) | dict(model.named_buffers())


@pytest.mark.parametrize("stage", STAGES)
def test_meta_model_trains_like_a_plain_one(stage: int) -> None:
    model = Big().double()
    with torch.no_grad():
        for module in model.modules():
            by_formula(module)
    steps(model, optimizer_of(model), list(range(WORLD)))
    expected = values(model) | dict(model.named_buffers())
    assert all(bool(tensor.isfinite().all()) for tensor in expected.values())
    for rank, got in enumerate(ranks(WORLD).run(from_meta, stage, True)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


def test_meta_model_is_drawn_alike_on_all_ranks_and_stages() -> None:
    drawn = [got for stage in STAGES for got in ranks(WORLD).run(from_meta, stage, False)]
    for other in drawn[1:]:
        same_tensors(other, drawn[0], 0.0, "")
    assert not torch.equal(drawn[0]["blocks.0.up.weight"], drawn[0]["blocks.1.up.weight"])


class PrivateBytes(PeakBytes):
    """Without meta tensors, which only look like memory, and without segments that ranks share: rows."""

    def _meet(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        at = 0 if storage.device.type == "meta" else storage.data_ptr()
        if at and not any(start <= at < stop for start, stop in memory_files()):
            super()._meet(storage, given)


def memory_files() -> Iterator[tuple[int, int]]:
    """The addresses of files in memory that this process maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            start, _, stop = line.split()[0].partition("-")
            yield int(start, 16), int(stop, 16)


def bytes_at_most() -> tuple[int, int, int]:
    """Private bytes at most while sharding, those of this rank's rows, and those of the whole model."""
    with torch.device("meta"):
        model = Big().double().requires_grad_(False)  # frozen: no buffers for gradients
    with PrivateBytes() as peak:
        run = zs.shard(model, stage=3)
    nbytes = sum(p.numel() for p in model.parameters()) * 8
    held = run.stats().live["parameters"]
    run.close()
    return peak.most, held, nbytes


@pytest.mark.parametrize("world", [2, 4])
def test_no_rank_ever_holds_the_whole_model(world: int) -> None:
    for most, held, nbytes in ranks(world).run(bytes_at_most):
        assert held == pytest.approx(nbytes / world, rel=0.05)  # padding
        assert most < nbytes / 10  # one module at a time, of which the largest is a thirteenth of the model


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(torch.empty(3, 3))


class NoFill(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("shift", torch.zeros(2))


def no_values() -> nn.Module:
    phases = Phases(3)
    phases.reset_parameters = None  # type: ignore[assignment, method-assign]
    return nn.Sequential(nn.Linear(3, 3), phases)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            NoReset,
            r"`inner.weight` is on the meta device, and `inner` \(Module\) has no reset_parameters\(\)",
        ),
        (no_values, r"`1.phases` is on the meta device, and `1` \(Phases\) has no reset_param"),
        (
            NoFill,
            r"buffer `shift` was on the meta device, and what fills `the model` \(NoFill\) has not written",
        ),
    ],
)
def test_meta_module_that_nothing_fills_is_refused(build: Callable[[], nn.Module], said: str) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(zs.ModelError, match=said):
        zs.shard(model)
