"""A segment of a step while it is traced, and what stands for a unit that is like an earlier one.

[Note: stand-ins] What a repeated unit computes is taken over from the first of its kind; what lives around
it is its own. So a stand-in keeps what the first one kept of its inputs and outputs, gives its weights
gradients, which autograd adds up where weights are used several times, and its figures are those of the first
one, moved by how much more or less lived when forward and backward came to it: outputs that the root keeps
for later, sums of gradients that are not complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from zeroshard.layout.timeline import StepSegment

# What lives beyond what is saved when forward and backward come to a unit, and when backward has left it.
Situation = tuple[int, int, int]


@dataclass(eq=False)
class SegmentTemplate:
    """The first of several units that are alike.

    - `outputs`: how each looks, and whether it is saved; `tree`: theirs.
    - `saves`: the numbers of the inputs that it was the first to save.
    - `reaches`: the numbers of its weights that backward comes to through its outputs. `weights`: the names
      of all, by number.
    """

    segment: RecordedSegment
    outputs: list[tuple[Any, ...]]
    tree: TreeSpec
    saves: list[int]
    weights: list[str]
    reaches: list[int]


@dataclass
class OperationSums:
    """What operations add up to: of a segment's forward, or of its backward."""

    flops: int = 0
    moved: int = 0
    kernels: int = 0

    def add(self, flops: int, moved: int) -> None:
        """One operation more."""
        self.flops, self.moved = self.flops + flops, self.moved + moved
        self.kernels += bool(flops or moved)


@dataclass
class GradientArrivals:
    """Weights whose gradients arrived in the backward of a segment, and the most that lived before the first,
    after it, … `reaches`: those that backward comes to; `begun`: of those, whose sums had begun when it came.
    """

    order: list[str] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    reaches: list[str] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)

    def arrive(self, name: str, level: int) -> None:
        """One gradient more, after which so much lives."""
        self.order.append(name)
        self.levels.append(level)

    def rise(self, level: int) -> None:
        """So much lives."""
        self.levels[-1] = max(self.levels[-1], level)

    def follow(self, begun: set[str]) -> None:
        """`begun`: weights whose sums have begun when backward comes to it."""
        self.begun = begun.intersection(self.reaches)
        begun.update(self.reaches)


@dataclass
class RepeatedUnit:
    """What a repeated unit has of its own, that stands for another: its weights, as in its twin, and the
    tensors that it really keeps, as long as backward would: inputs and outputs that the first one saved."""

    first: SegmentTemplate
    weights: list[str] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class RecordedSegment:
    """A segment that is being recorded. `entered`: as of a `StepSegment`."""

    unit: str
    entered: int = 0
    number: int = 0  # in the order of forward
    before: int = 0  # bytes really saved by those before it
    repeats: RepeatedUnit | None = None
    saved: int = 0
    kept: int = 0  # that its tensors in this trace really keep for backward: none of a repeated one is saved
    most: int = 0  # that lived in its forward
    forward: OperationSums = field(default_factory=OperationSums)
    backward: OperationSums = field(default_factory=OperationSums)
    spoils: bool = False
    needs: list[str] = field(default_factory=list)
    situation: Situation = (0, 0, 0)
    arrivals: GradientArrivals = field(default_factory=GradientArrivals)

    @property
    def below(self) -> int:
        """Bytes really saved up to and including it; repeated ones saved nothing."""
        return self.before + self.kept

    @property
    def is_elsewhere(self) -> bool:
        """Whether it stands for a unit around which other things lived than around the first one."""
        return self.repeats is not None and self.situation != self.repeats.first.segment.situation

    def begin(self, now: int) -> None:
        """Forward comes to it, and so much lives."""
        self.situation = (now - self.below, *self.situation[1:])

    def rise(self, now: int) -> None:
        """So much lives in its forward."""
        self.most = max(self.most, now - self.below + self.saved)

    def save(self, nbytes: int) -> None:
        """Autograd keeps so much more of it; of what stands for another, of what that one saved."""
        self.kept += nbytes
        self.saved += nbytes if self.repeats is None else 0

    def need(self, unit: str) -> None:
        """Backward wants weights of that unit."""
        if unit not in self.needs[-1:]:
            self.needs.append(unit)

    def hold(self, tensor: Tensor, nbytes: int) -> None:
        """What stands for another keeps what that one saved: one tensor more."""
        assert self.repeats is not None
        self.save(nbytes)
        self.repeats.held.append(tensor.detach())

    def let_go(self) -> None:
        """Backward has passed it."""
        if self.repeats is not None:
            self.repeats.held.clear()

    def return_to(self, level: int) -> None:
        """Backward comes to it, and so much lives beyond what is saved."""
        if not self.arrivals.levels:
            start, _, after = self.situation
            self.situation = start, level, after
            self.arrivals.levels.append(level)

    def leave(self, level: int) -> None:
        """Backward has left it."""
        self.situation = (*self.situation[:2], level)

    def computed(self, reaches: list[str], spoils: bool) -> None:
        """The first of its kind has computed: the weights that backward comes to through its outputs, and
        whether it has written what it was given."""
        self.arrivals.reaches.extend(reaches)
        self.spoils = spoils

    def repeat(self, first: SegmentTemplate) -> None:
        """It stands for a unit that is like an earlier one."""
        self.repeats = RepeatedUnit(first)

    def stand_for(self, weights: list[str]) -> SegmentTemplate:
        """A repeated one takes the place of the first, with weights of its own."""
        assert self.repeats is not None
        self.repeats.weights[:] = weights
        self.arrivals.reaches[:] = [weights[number] for number in self.repeats.first.reaches]
        return self.repeats.first

    def done(self, sizes: dict[str, int]) -> StepSegment:
        """As a record. `sizes`: bytes of every weight's gradient."""
        source, (order, levels) = self, (self.arrivals.order, self.arrivals.levels)
        if self.repeats is not None:
            source, (order, levels) = self.repeats.first.segment, self._moved(self.repeats, sizes)
        return StepSegment(
            unit=self.unit,
            saved=source.saved,
            forward=source.most + self.situation[0] - source.situation[0],
            backward=max(levels, default=0),
            flops=source.forward.flops,
            back=source.backward.flops,
            moved=source.forward.moved,
            moved_back=source.backward.moved,
            kernels=source.forward.kernels,
            kernels_back=source.backward.kernels,
            order=tuple(order),
            levels=tuple(levels),
            spoils=source.spoils,
            entered=self.entered,
            needs=tuple(self.unit if name == source.unit else name for name in source.needs),
        )

    def _moved(self, repeats: RepeatedUnit, sizes: dict[str, int]) -> tuple[list[str], list[int]]:
        """Arrivals and levels of the first one, with those gradients that arrive here: of weights that are
        used again before, the sum goes on, and is held; of others, the last part may come here."""
        source, mine = repeats.first.segment, self.arrivals
        names = dict(zip(repeats.first.weights, repeats.weights, strict=True))
        more = self.situation[1] - source.situation[1]
        order, levels = list[str](), [level + more for level in source.arrivals.levels[:1]]
        for name, level in zip(source.arrivals.order, source.arrivals.levels[1:], strict=True):
            own = names.get(name, "")
            # The first one's sum has gone to its unsharded parameter, with what there was of it when
            # backward came.
            more += sizes[name] * ((name in source.arrivals.begun) - (own in mine.begun))
            if own in mine.order or own not in mine.reaches:
                order.append(own)
                levels.append(level + more)
            else:
                more += sizes[name]
                levels[-1] = max(levels[-1], level + more)
        for name in mine.order:
            if name not in order:
                order.append(name)
                levels.append(levels[-1] - sizes[name])
        return order, levels


class TracedWeights:
    """The fake weights of one trace, by name, unit and memory, and which of them have a gradient."""

    def __init__(self) -> None:
        self._by_name: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}  # by id
        self._by_memory: dict[int, tuple[str, str]] = {}  # the unit, and the name
        self._waiting: dict[str, dict[str, Tensor]] = {}  # by unit: those that have no gradient yet
        self._arrived: list[Tensor] = []  # those that hold a gradient
        self.grad_bytes = 0  # of those

    def add(self, name: str, fake: Tensor, unit: str) -> None:
        """One weight more. Of several on one memory the first gives the name, the last the unit."""
        memory = fake.untyped_storage()._cdata
        first = self._by_memory.get(memory, ("", name))[1]
        self._by_name[name], self._names[id(fake)], self._by_memory[memory] = fake, name, (unit, first)
        self._waiting.setdefault(unit, {})[name] = fake

    def name(self, fake: Tensor) -> str:
        """Of a weight itself."""
        return self._names[id(fake)]

    def by_memory(self, tensor: Tensor) -> tuple[str, str] | None:
        """The unit and the name of the weight on whose memory a tensor lies, if on any."""
        return self._by_memory.get(tensor.untyped_storage()._cdata)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every weight's gradient."""
        return {name: fake.nbytes for name, fake in self._by_name.items()}

    def newly_arrived(self, unit: str, everywhere: bool) -> Iterator[str]:
        """Names of the weights whose gradients have come since the last look: of a unit and the root, or
        `everywhere`."""
        for place in dict.fromkeys((unit, "", *(self._waiting if everywhere else ()))):
            waiting = self._waiting.get(place, {})
            for name in [name for name, fake in waiting.items() if fake.grad is not None]:
                fake = waiting.pop(name)
                assert fake.grad is not None
                self._arrived.append(fake)
                self.grad_bytes += fake.grad.untyped_storage().nbytes()
                yield name

    def drop_grads(self) -> None:
        """Those that have arrived are in their buckets."""
        for fake in self._arrived:
            fake.grad = None
        self._arrived.clear()
        self.grad_bytes = 0


class StandIn(torch.autograd.Function):
    """Stands for a unit that is like an earlier one; see [Note: stand-ins]."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Any], arrive: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.arrive, ctx.shapes = arrive, [(t.shape, t.dtype, t.requires_grad) for t in tensors]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))  # so that a checkpoint around it keeps what it would keep
        return tuple(torch.empty(shape, dtype=dtype) for _, shape, dtype, *_ in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _ = ctx.saved_tensors
        ctx.arrive()
        return (
            None,
            None,
            *(torch.empty(shape, dtype=dtype) if needed else None for shape, dtype, needed in ctx.shapes),
        )


def reached(outputs: list[Any], inputs: list[Any]) -> set[int]:
    """The ids of the unsharded parameters that a backward comes to from these outputs, before it comes to
    the inputs."""
    ends = {x.grad_fn for x in inputs if isinstance(x, Tensor)}
    left = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen, found = set(left), set[int]()
    while left:
        node = left.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        for after, _ in node.next_functions if node not in ends else ():
            if after is not None and after not in seen:
                seen.add(after)
                left.append(after)
    return found
