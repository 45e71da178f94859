"""A segment of a step while it is traced, and what stands for a unit that is like an earlier one.

[Note: stand-ins] What a repeated unit computes is taken over from the first of its kind; what lives around
it is its own. So a stand-in keeps what the first one kept of its inputs and outputs, gives its weights
gradients, which autograd adds up where weights are used several times, and its figures are those of the first
one, moved by how much more or less lived when forward and backward came to it: outputs that the root keeps
for later, sums of gradients that are not complete.
"""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(eq=False)
class RecordedSegment:
    """A segment that is being recorded. `entered`: as of a `StepSegment`; `like`: of a repeated unit, the
    first one."""

    unit: str
    entered: int = 0
    number: int = 0  # in the order of forward
    before: int = 0  # bytes really saved by those before it
    like: SegmentTemplate | None = None
    saved: int = 0
    forward: int = 0
    flops: int = 0
    back: int = 0
    moved: int = 0
    moved_back: int = 0
    kernels: int = 0
    kernels_back: int = 0
    spoils: bool = False
    needs: list[str] = field(default_factory=list)
    start: int = 0  # what lives beyond what is saved when forward comes to it
    base: int = 0  # the same of backward
    after: int = 0  # the same when backward has left it
    # Weights whose gradients arrived in its backward, and the most that lived before the first, after it, …
    order: list[str] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)  # of a repeated one, as in its twin
    reaches: list[str] = field(default_factory=list)  # those that backward comes to
    begun: set[str] = field(default_factory=set)  # of those, whose sums had begun when it came
    standing: int = 0  # bytes that a repeated one really keeps: inputs and outputs that the first one saved
    held: list[Tensor] = field(default_factory=list)  # those, as long as backward would keep them

    @property
    def real(self) -> int:
        """Bytes that its tensors in this trace really keep for backward."""
        return self.saved if self.like is None else self.standing

    @property
    def below(self) -> int:
        """Bytes really saved up to and including it; repeated ones saved nothing."""
        return self.before + self.real

    @property
    def situation(self) -> Situation:
        return self.start, self.base, self.after

    @property
    def is_elsewhere(self) -> bool:
        """Whether it stands for a unit around which other things lived than around the first one."""
        return self.like is not None and self.situation != self.like.segment.situation

    def begin(self, now: int) -> None:
        """Forward comes to it, and so much lives."""
        self.start = now - self.below

    def rise(self, now: int) -> None:
        """So much lives in its forward."""
        self.forward = max(self.forward, now - self.below + self.saved)

    def work(self, flops: int, moved: int, back: bool) -> None:
        """One operation more."""
        if back:
            self.back, self.moved_back = self.back + flops, self.moved_back + moved
            self.kernels_back += bool(flops or moved)
        else:
            self.flops, self.moved = self.flops + flops, self.moved + moved
            self.kernels += bool(flops or moved)

    def save(self, nbytes: int) -> None:
        """Autograd keeps so much more of it; of what stands for another, of what that one saved."""
        if self.like is None:
            self.saved += nbytes
        else:
            self.standing += nbytes

    def return_to(self, level: int) -> None:
        """Backward comes to it, and so much lives beyond what is saved."""
        if not self.levels:
            self.base = level
            self.levels.append(level)

    def leave(self, level: int) -> None:
        """Backward has left it."""
        self.after = level

    def computed(self, reaches: list[str], spoils: bool) -> None:
        """The first of its kind has computed: the weights that backward comes to through its outputs, and
        whether it has written what it was given."""
        self.reaches, self.spoils = reaches, spoils

    def stand_for(self, weights: list[str]) -> SegmentTemplate:
        """A repeated one takes the place of the first, with weights of its own."""
        assert self.like is not None
        self.weights = weights
        self.reaches = [weights[number] for number in self.like.reaches]
        return self.like

    def follow(self, begun: set[str]) -> None:
        """`begun`: weights whose sums have begun when backward comes to it."""
        self.begun = begun.intersection(self.reaches)
        begun.update(self.reaches)

    def done(self, sizes: dict[str, int]) -> StepSegment:
        """As a record. `sizes`: bytes of every weight's gradient."""
        source = self if self.like is None else self.like.segment
        order, levels = (self.order, self.levels) if self.like is None else self._moved(self.like, sizes)
        return StepSegment(
            unit=self.unit,
            saved=source.saved,
            forward=source.forward + self.start - source.start,
            backward=max(levels, default=0),
            flops=source.flops,
            back=source.back,
            moved=source.moved,
            moved_back=source.moved_back,
            kernels=source.kernels,
            kernels_back=source.kernels_back,
            order=tuple(order),
            levels=tuple(levels),
            spoils=source.spoils,
            entered=self.entered,
            needs=tuple(self.unit if name == source.unit else name for name in source.needs),
        )

    def _moved(self, template: SegmentTemplate, sizes: dict[str, int]) -> tuple[list[str], list[int]]:
        """Arrivals and levels of the first one, with those gradients that arrive here: of weights that are
        used again before, the sum goes on, and is held; of others, the last part may come here."""
        source = template.segment
        mine = dict(zip(template.weights, self.weights, strict=True))
        more = self.base - source.base
        order, levels = list[str](), [level + more for level in source.levels[:1]]
        for name, level in zip(source.order, source.levels[1:], strict=True):
            own = mine.get(name, "")
            # The first one's sum has gone to its unsharded parameter, with what there was of it when
            # backward came.
            more += sizes[name] * ((name in source.begun) - (own in self.begun))
            if own in self.order or own not in self.reaches:
                order.append(own)
                levels.append(level + more)
            else:
                more += sizes[name]
                levels[-1] = max(levels[-1], level + more)
        for name in self.order:
            if name not in order:
                order.append(name)
                levels.append(levels[-1] - sizes[name])
        return order, levels


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
