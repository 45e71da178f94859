"""Tries an optimizer that is not torch's before it is sharded, on copies of a few corners of its parameters.

It finds out whether an update of one parameter depends on the others, which may be with other ranks; whether
it draws random numbers, talks to other processes, or calls its closure in the midst of a step. Nothing of the
optimizer itself is touched. What cannot be copied or fails is not found out here: then `rank_agreement`
compares the ranks' numbers while they train."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.kernels import StateRows, update_rows

STEPS = 8  # after so many, step sizes that are found while training have left their beginnings
CORNER, EACH = 4, 2  # the longest side of a copy, and how many are made of each number of dimensions
SMALL = 1e-3  # gradients for an optimizer that passes over those of usual size
SHARE = 1e-3  # of how far a parameter has moved; what depends on others moves it elsewhere by more
NEAR = 3e-5  # the same, of what computes the same but for rounding
_PLAIN = (int, float, bool, str, tuple, list, type(None))
_OWN = ("step", "zero_grad", "add_param_group")  # what schedulers replace on an optimizer
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@dataclass(frozen=True)
class Findings:
    """What an optimizer does beside updating each parameter by itself."""

    across: bool = False
    draws: bool = False
    talks: bool = False
    evaluates: bool = False  # its closure, in a step that cannot do without
    nests: str = ""  # in what its state has tensors that are no entries of their own


class _Talks(Exception):
    """An optimizer has called another process."""


class _Silence(TorchDispatchMode):
    """No collective call leaves the process: the peers may not be trying at all."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(function, "namespace", "").startswith(("c10d", "_c10d_functional")):
            raise _Talks
        return function(*args, **(kwargs or {}))


def try_out(optimizer: Optimizer) -> Findings:
    """What it does with copies of a few of its parameters."""
    chosen = _chosen(optimizer)
    if any(group.get("fsdp_in_use") is True for group in optimizer.param_groups):
        return Findings()  # it has been told that its parameters are divided, and adds up what it needs
    with _undisturbed():
        try:
            usual = _trained(optimizer, chosen)
        except _Talks:
            return Findings(talks=True)
        except Exception:
            with suppress(Exception):
                _trained(optimizer, chosen, closure=True)
                return Findings(evaluates=True)
            return Findings()
        scale = 1.0
        if not _moved(usual):  # it passes over what is large
            scale = SMALL
            with suppress(Exception):
                usual = _trained(optimizer, chosen, scale=scale)
        across = False
        with suppress(Exception):
            for kept in dict.fromkeys((0, len(chosen) - 1)) if len(chosen) > 1 else ():
                other = _trained(optimizer, chosen, alone=kept, scale=scale)
                apart = repr(usual.numbers) != repr(other.numbers)
                across = across or apart or _differ(usual, other, kept)
        return Findings(across=across, draws=usual.drawn, nests=usual.nests)


def passes_on(wrapper: Optimizer, inner: Optimizer) -> bool:
    """Whether a step of the one is a step of the other, as far as that can be tried."""
    chosen = _chosen(inner)
    with _undisturbed(), suppress(Exception):
        mine, its = (_trained(wrapper, chosen, inside=inside) for inside in (False, True))
        return not any(_differ(mine, its, index) for index in range(len(chosen)))
    return True


def follows(optimizer: Optimizer, update: type[StateRows]) -> bool:
    """Whether a few steps of an optimizer are those of the host's update, as far as that can be tried."""
    with _undisturbed():
        noise = torch.Generator().manual_seed(2)
        copies = {id(param): _corner(param, noise, 1e-2) for param in _chosen(optimizer)}
        template = _template(optimizer, copies)
        members = [(group, param) for group in template.param_groups for param in group["params"]]
        rows = []
        for group, param in members:
            arrays = {name: torch.zeros(param.numel()) for name in update.arrays(group)}
            rows.append(update(**arrays | {"master": param.detach().float().flatten().clone()}))
        first = [own.master.clone() for own in rows if own.master is not None]
        step = getattr(type(template).step, "__wrapped__", type(template).step)
        for number in range(STEPS):
            for own, (group, param) in zip(rows, members, strict=True):
                param.grad = torch.randn(param.shape, generator=noise).to(param)
                update_rows(own, param.grad.float().flatten(), None, update.step_of(group, number + 1, 1.0))
            try:
                step(template)
            except Exception:  # as in `try_out`
                return True
        return all(_near(*each) for each in zip(members, rows, first, strict=True))


def _near(member: tuple[dict[str, Any], Tensor], own: StateRows, first: Tensor) -> bool:
    """But for rounding, which is larger in what is trained in 16 bits."""
    param = member[1].detach().flatten()
    assert own.master is not None
    apart, moved = (own.master - param.float()).abs().max(), (own.master - first).abs().max()
    rounding = STEPS * torch.finfo(param.dtype).eps * float(own.master.abs().max())
    return bool(apart <= NEAR * moved + rounding)


@dataclass(frozen=True)
class _Trained:
    first: list[Tensor]
    last: list[Tensor]
    numbers: list[dict[str, Any]]  # of the optimizer's groups
    drawn: bool  # random numbers
    nests: str  # see `Findings`


def _moved(trained: _Trained) -> bool:
    return any(not torch.equal(*pair) for pair in zip(trained.first, trained.last, strict=True))


def _differ(one: _Trained, other: _Trained, index: int) -> bool:
    moved = (one.last[index] - one.first[index]).abs().max()
    apart = (one.last[index] - other.last[index]).abs().max()
    return bool(apart > SHARE * moved) or not bool(apart.isfinite() or not moved.isfinite())


def _chosen(optimizer: Optimizer) -> list[Tensor]:
    """Some parameters of every group and number of dimensions."""
    found: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.requires_grad and param.is_floating_point() and param.numel():
                held = found[number, param.dim()]
                held.append(param) if len(held) < EACH else None
    return [param for params in found.values() for param in params][:16]


def _trained(
    optimizer: Optimizer,
    chosen: list[Tensor],
    alone: int | None = None,
    closure: bool = False,
    inside: bool = False,
    scale: float = 1.0,
) -> _Trained:
    """Copies of the chosen parameters after some steps of a copy of the optimizer; `inside`: of the one that
    it has inside. `alone`: the one whose gradients are as ever; all others have large ones at random.
    `scale`: of all gradients."""
    noise = torch.Generator().manual_seed(1)
    copies = {id(param): _corner(param, noise) for param in chosen}
    template = _template(optimizer, copies)
    if inside:
        template = cast(Any, template).optimizer
    torch.manual_seed(0)
    with suppress(Exception):  # of those that tell training from evaluation
        cast(Any, template).train()
    small = list(copies.values())
    first = [param.detach().clone() for param in small]
    fixed = [torch.randn(param.shape, generator=noise).to(param) for param in small]
    step = getattr(type(template).step, "__wrapped__", type(template).step)
    before = torch.get_rng_state()

    def evaluated() -> float:
        for index, param in enumerate(small):
            param.grad = fixed[index] * scale
        return 1.0

    for number in range(STEPS):
        for index, param in enumerate(small):
            own = torch.Generator().manual_seed(STEPS * index + number)
            usual = alone is None or index == alone
            changing = torch.randn(param.shape, generator=own).to(param)
            param.grad = (fixed[index] + changing / 2 if usual else 1e3 * changing) * scale
        step(template, evaluated) if closure else step(template)
    drawn = not torch.equal(torch.get_rng_state(), before)
    last = [param.detach().clone() for param in small]
    return _Trained(first, last, numbers_of(template), drawn, _nests(template))


def _nests(optimizer: Optimizer) -> str:
    """For example ``a list (`GG`)``."""
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(value, Tensor) and any(isinstance(x, Tensor) for x in tree_leaves(value)):
                return f"a {type(value).__name__} (`{key}`)"
    return ""


def numbers_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What stands in each group beside its parameters, as plain numbers and words."""
    found = []
    for group in optimizer.param_groups:
        plain = {
            key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params"
        }
        found.append({key: value for key, value in plain.items() if isinstance(value, _PLAIN)})
    return found


def _corner(param: Tensor, noise: torch.Generator, size: float = 1e-3) -> nn.Parameter:
    """Small values: what moves them by a millionth shall be seen."""
    shape = [min(side, CORNER) for side in param.shape]
    dtype = torch.float32 if param.dtype.itemsize < 4 else param.dtype
    return nn.Parameter((size * torch.randn(shape, generator=noise)).to(dtype))


def _template(optimizer: Optimizer, copies: dict[int, nn.Parameter]) -> Optimizer:
    """Another one like it, of those copies, and without a state."""
    memo: dict[int, Any] = dict(copies)
    nothing = torch.empty(0)
    for group in optimizer.param_groups:
        for param in group["params"]:
            memo.setdefault(id(param), nothing)
    template = _like(optimizer, memo)
    inner = vars(optimizer).get("optimizer")
    if isinstance(inner, Optimizer):
        cast(Any, template).optimizer = memo[id(inner)] = _like(inner, memo)
    kept = {id(param) for param in copies.values()}
    for group in template.param_groups:
        group["params"] = [param for param in group["params"] if id(param) in kept]
    return template


def _like(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    made = object.__new__(type(optimizer))
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in (*_OWN, *_HOOKS, "state", "optimizer")
    }
    vars(made).update(copy.deepcopy(own, memo))
    if "state" in vars(optimizer):
        vars(made)["state"] = defaultdict(dict)
    for name in _HOOKS:
        vars(made)[name] = OrderedDict()
    return made


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers go on as they were, and nobody outside notices. Nor does the compiler: what it meets
    inside of a dispatch mode it passes over from then on."""
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, torch.random.fork_rng(devices=[]), _Silence():  # type: ignore[no-untyped-call]
        yield
