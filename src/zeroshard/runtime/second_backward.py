"""Runs the backward of units a second time: for `Offload(repeat_backward=)`, see [Note: a second backward] in
`offload/updates.py`.

Of a unit that is to run again its inputs are kept (which recomputation keeps anyway), the random states,
and the gradient of what it returned. With these its forward is computed again, and backward goes through it
alone: so the second backward is a loop over units, whatever the model's own code does between them.

[Note: gradients that follow] Where one unit takes what the one before it returned, and nobody else does, the
gradient of that comes out of the second backward of the later unit, too. So of a chain of blocks only the
last keeps the gradient of its output. Who takes it is read from the graph when forward has ended: all that
does is numbered within the forward of the one unit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _get_sequence_nr as _next_number
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from zeroshard.errors import OptionError, StateError
from zeroshard.offload.group import OffloadGroup
from zeroshard.offload.work import SecondBackward
from zeroshard.params.widening import has_forward

from .forward import Still, tracks_statistics
from .runtime import Runtime
from .unit import RunningUnit, tensors_in

log = logging.getLogger("zeroshard")
Forward = Callable[..., Any]
_AGAIN = -2  # in place of autograd's number of a backward
# Of dispatch keys: those of a plain call. It may be one inside of an operation on a handle, below autograd.
_AS_EVER = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@dataclass(frozen=True)
class _RandomState:
    """The random states and autocast in which a forward began."""

    cpu: Tensor
    devices: list[int]
    states: list[Tensor]
    kind: str  # of device
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def now(cls, given: Sequence[Any]) -> _RandomState:
        devices, states = get_device_states(*given)
        kind = next((t.device.type for t in given if isinstance(t, Tensor)), "cpu")
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(torch.get_rng_state(), devices, states, kind, autocast)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        enabled, dtype = self.autocast
        kind = self.kind if self.devices else "cuda"
        with torch.random.fork_rng(self.devices, device_type=kind), torch.autocast(self.kind, dtype, enabled):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield


@dataclass(eq=False)
class UnitCall:
    """One call of a unit's forward, as it can be made again. `grads`: of the tensors that it returned, by
    number; `from_later`: of others, the call whose input they were, whose second backward gives theirs."""

    unit: RunningUnit
    forward: Forward
    leaves: list[Any]  # what it was given
    learns: list[bool]  # which of that requires a gradient
    structure: Any
    random: _RandomState
    versions: list[int]
    grads: dict[int, Tensor] = field(default_factory=dict)
    from_later: dict[int, UnitCall] = field(default_factory=dict)
    takers: dict[int, tuple[UnitCall, int]] = field(
        default_factory=dict
    )  # of an output: a call, as which input
    earlier: list[tuple[UnitCall, int, int]] = field(default_factory=list)  # whose outputs it was given

    @classmethod
    def made(cls, unit: RunningUnit, forward: Forward, args: Any, kwargs: Any) -> UnitCall:
        leaves, structure = tree_flatten((args, kwargs))
        kept = [value.detach() if isinstance(value, Tensor) else value for value in leaves]
        learns = [isinstance(value, Tensor) and value.requires_grad for value in leaves]
        versions = [value._version for value in leaves if isinstance(value, Tensor)]
        return cls(unit, forward, kept, learns, structure, _RandomState.now(leaves), versions)

    @property
    def held(self) -> int:
        """Bytes that it keeps."""
        kept = [value for value, learns in zip(self.leaves, self.learns, strict=True) if learns]
        return sum(tensor.nbytes for tensor in (*kept, *self.grads.values()))

    def landed(self, number: int, grad: Tensor) -> None:
        """The gradient of a tensor that it returned."""
        taker, index = self.takers.pop(number, (None, 0))
        if taker is None:
            self.grads[number] = grad
        else:
            self.from_later[number] = taker
            taker.earlier.append((self, number, index))

    def run(self) -> None:
        """Make it again, and go backward through it."""
        if [value._version for value in self.leaves if isinstance(value, Tensor)] != self.versions:
            raise StateError(
                f"what the forward of {self.unit.label} was given has been written in place since, and its "
                "second backward would begin with that. Write to a copy (x = x + y), or pass "
                "Offload(repeat_backward=0)."
            )
        leaves = [
            value.detach().requires_grad_() if learns else value
            for value, learns in zip(self.leaves, self.learns, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self.structure)
        with torch._C._ForceDispatchKeyGuard(*_AS_EVER), torch.enable_grad():
            with self.random.replayed():
                returned = list(tensors_in(self.forward(*args, **kwargs)))
            grads, self.grads = self.grads, {}
            torch.autograd.backward([returned[number] for number in grads], list(grads.values()))
        for call, number, index in self.earlier:
            del call.from_later[number]
            if leaves[index].grad is not None:
                call.grads[number] = leaves[index].grad
        self.earlier.clear()

    def let_go(self) -> None:
        """It will not be made again."""
        self.leaves = []
        for kept in (self.grads, self.from_later, self.takers, self.earlier):
            kept.clear()


Edge = tuple[Any, int]  # a node of autograd's graph, and which of its outputs


@dataclass(frozen=True)
class _Place:
    """Where a call is in the graph: the numbers of its nodes, and the edges to what it was given and what it
    returned."""

    call: UnitCall
    numbers: range
    given: dict[int, Edge]
    returned: dict[int, Edge]


def _edge(tensor: Tensor) -> Edge:
    return tensor.grad_fn, tensor.output_nr


def _follow(places: Sequence[_Place], roots: Sequence[Any]) -> None:
    """Find the outputs that one later call alone takes; see [Note: gradients that follow]."""
    made = {edge: (place.call, number) for place in places for number, edge in place.returned.items()}
    users: dict[Edge, list[int]] = {edge: [] for edge in made}
    first = min((place.numbers.start for place in places), default=0)
    own = {node for node, _ in made}
    seen, queue = set(roots), list(roots)
    while queue:
        node = queue.pop()
        for edge in node.next_functions:
            if edge in users:
                users[edge].append(node._sequence_nr())
            if (
                edge[0] is not None
                and edge[0] not in seen
                and (edge[0] in own or edge[0]._sequence_nr() >= first)
            ):
                seen.add(edge[0])
                queue.append(edge[0])
    for edge, numbers in users.items():
        call, number = made[edge]
        takers = [place for place in places if numbers and all(n in place.numbers for n in numbers)]
        leaves = [value for place in takers for value, given in place.given.items() if given == edge]
        if len(takers) == len(leaves) == 1 and edge[0] not in roots:
            call.takers[number] = takers[0].call, leaves[0]


def _with_later(calls: Sequence[UnitCall]) -> list[UnitCall]:
    """These, and those whose second backward gives the gradients of their outputs."""
    every = dict.fromkeys(calls)
    queue = list(calls)
    while queue:
        for later in queue.pop().from_later.values():
            if later not in every:
                every[later] = None
                queue.append(later)
    return list(every)


class RepeatedUnits(SecondBackward):
    """The units of a run whose backward runs twice, and what is kept of their calls."""

    def __init__(self, runtime: Runtime, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        self.running = False
        self._runtime = runtime
        self._unit_of = {id(part): unit for unit in runtime.units for part in unit.offload_groups}
        self._came: dict[RunningUnit, list[UnitCall]] = {}  # calls whose outputs have had their gradients
        self._told = False
        self._places: list[_Place] = []  # of the calls of the forward under way
        self.most = 0  # bytes kept for a second backward, at their most

    # ------------------------------------------------------------------ the first forward and backward

    def around(self, unit: RunningUnit, plain: Forward, own: Forward) -> Forward:
        """What stands in place of a unit's forward. `plain`: what is computed again; `own`: the same, with
        recomputation."""
        runtime, still = self._runtime, tracks_statistics(unit.module)

        def again(*args: Any, **kwargs: Any) -> Any:
            runtime.enter(unit)
            try:
                with Still(unit.module) if still else ExitStack():
                    return plain(*args, **kwargs)
            finally:
                runtime.leave(unit)

        def forward(*args: Any, **kwargs: Any) -> Any:
            first = torch.is_grad_enabled() and runtime.backward.task is None and runtime.sync
            if not first or torch.compiler.is_compiling() or runtime.closed:
                return own(*args, **kwargs)
            call = UnitCall.made(unit, again, args, kwargs)
            given = [value if isinstance(value, Tensor) else None for value in tree_leaves((args, kwargs))]
            begun = _next_number()
            result = own(*args, **kwargs)
            returned = {n: tensor for n, tensor in enumerate(tensors_in(result)) if tensor.requires_grad}
            self._places.append(
                _Place(
                    call,
                    range(begun, _next_number()),
                    {
                        n: _edge(value)
                        for n, value in enumerate(given)
                        if value is not None and value.requires_grad
                    },
                    {number: _edge(tensor) for number, tensor in returned.items()},
                )
            )
            for number, tensor in returned.items():
                tensor.register_hook(partial(self._arrived, call, number))
            return result

        return forward

    def end_forward(self, output: Any) -> None:
        """A call from outside has returned this."""
        places, self._places = self._places, []
        if places and torch.is_grad_enabled():
            _follow(places, [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None])

    def _arrived(self, call: UnitCall, number: int, grad: Tensor) -> None:
        """Backward has come to what a unit returned."""
        if self._runtime.backward.task is None:
            self._runtime.begin_backward()
        if call not in (came := self._came.setdefault(call.unit, [])):
            came.append(call)
        call.landed(number, grad)

    def covers(self, part: OffloadGroup) -> bool:
        return self._unit_of[id(part)].name in self.names

    def can(self, part: OffloadGroup) -> bool:
        unit = self._unit_of[id(part)]
        if not self.covers(part):
            return False
        calls, accumulated = len(self._came.get(unit, ())), self._runtime.unsynced
        if (calls != 1 or accumulated) and not self._told:
            self._told = True
            log.warning(
                "the gradients of %s wait for the norm, although Offload(repeat_backward=) names it: its "
                "backward runs a second time only where one call of it gave them (here: %s). That takes more "
                "memory than planned.",
                unit.label,
                "several micro-batches" if accumulated else f"{calls} calls",
            )
        return calls == 1 and not accumulated

    def keep(self, parts: Sequence[OffloadGroup]) -> None:
        self._places.clear()
        units = {id(self._unit_of[id(part)]) for part in parts}
        calls = [call for unit, came in self._came.items() if id(unit) in units for call in came]
        stay = {id(call.unit) for call in _with_later(calls)}
        for unit in [unit for unit in self._came if id(unit) not in stay]:
            self._forget(unit)

    # ------------------------------------------------------------------ the second

    def run(self, parts: Sequence[OffloadGroup]) -> None:
        self.most = max(self.most, self.held)
        wanted = {id(self._unit_of[id(part)]): self._unit_of[id(part)] for part in parts}
        calls = [call for unit, came in self._came.items() if id(unit) in wanted for call in came]
        order = [call for came in self._came.values() for call in came]
        due = sorted(_with_later(calls), key=order.index)
        runtime = self._runtime
        outer, synced = runtime.backward.go_on_as(_AGAIN), runtime.sync
        self.running, runtime.sync = True, True
        try:
            with runtime.gradients.once_more():
                for call in due:
                    self._run(call, outer is not None)
        finally:
            self.running, runtime.sync = False, synced
            runtime.backward.go_on_as(outer)
            if outer is None:
                runtime.backward.recent.clear()

    def _run(self, call: UnitCall, inside: bool) -> None:
        """`inside` another backward, in which all modules hold unsharded parameters."""
        runtime, unit = self._runtime, call.unit
        expected, unit.expected = unit.expected, unit.trainable
        unit.in_modules.put_unsharded()
        runtime.forward.enter(unit, recomputed=True)  # none begins, nor does one end
        try:
            call.run()
            runtime.gradients.land_again(unit.params)
        finally:
            runtime.forward.leave()
            unit.expected = expected
            if not inside:
                unit.in_modules.put_sharded()
                if not runtime.supply.keeps_full:
                    unit.release()
            self._came[unit].remove(call)
            call.let_go()

    def _forget(self, unit: RunningUnit) -> None:
        for call in self._came.pop(unit, ()):
            call.let_go()

    @property
    def held(self) -> int:
        """Bytes that are kept for a second backward."""
        return sum(call.held for came in self._came.values() for call in came)


def second_backward(runtime: Runtime) -> RepeatedUnits | None:
    """What runs the backward of some units twice, if any are to."""
    host, updates = runtime.host, runtime.host_updates
    if host is None or updates is None or not host.repeated:
        return None
    for unit in runtime.units:
        if unit.name in host.repeated and (
            not has_forward(unit.module) or unit.module._compiled_call_impl is not None
        ):
            raise OptionError(
                f"Offload(repeat_backward={host.offload.repeat_backward}) runs the forward of {unit.label} "
                "again, and that module has none of its own, or is compiled: repeat fewer units, or compile "
                "what is inside."
            )
    second = RepeatedUnits(runtime, host.repeated)
    updates.repeat_by(second)
    return second
