"""What autograd is told of parameters that have changed, so that it refuses a backward through weights which
its forward did not use.

Torch finds that by its count of writes: a graph that saved a weight at one count is not followed at another.
Our updates write rows, which are not what autograd saved, so they count by hand: each change of a parameter
is one write of its leaf. A plain home that is the leaf's own memory shares its count, and nothing is left to
do (`live.share_count`). At stage 3 `Bundle.restore` compares the counts, as torch does not look at what hooks
save.

It is one parameter at a time: a step of the discriminator says nothing of the generator's graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_, ne

from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.host.updates import HostUpdates
from zeroshard.life.face import Face, Writes
from zeroshard.life.shard import Param
from zeroshard.life.step import Update

_version, _grad = attrgetter("_version"), attrgetter("grad")


class Changes:
    """Counts them on the leaves of a run, of those parameters that do not share a count with their home."""

    def __init__(self, params: Sequence[Param], writes: Writes) -> None:
        self._apart = [param for param in params if not param.one_count]
        self._homes = [param.home for param in self._apart]
        self._leaf_of = {id(param.home): param.leaf for param in self._apart}
        # Faces tell that there was a write; what is written by `p.data` counts for them, but not for torch.
        self._told = all(isinstance(home, Face) for home in self._homes)
        self._writes, self._seen = writes, writes.count
        self._versions = list(map(_version, self._homes))
        # By id(update): its homes, which of them had no gradient, and the leaves of the others.
        self._due: dict[int, tuple[list[Tensor], list[bool], list[Tensor]]] = {}

    def of(self, params: Sequence[Param]) -> None:
        """Their rows were written past their homes."""
        increment_version([param.leaf for param in params])

    def look(self) -> None:
        """What the loop has written into homes since the last look."""
        if self._told and self._seen == self._writes.count:
            return
        before = self._note()
        if before != self._versions:
            both = zip(self._apart, map(ne, before, self._versions), strict=True)
            self.of([param for param, differs in both if differs])

    def _note(self) -> list[int]:
        before, self._versions = self._versions, list(map(_version, self._homes))
        self._seen = self._writes.count
        return before

    @contextmanager
    def in_step(self, update: Update, host: HostUpdates | None) -> Iterator[None]:
        """Around a step: it changes what has a gradient, here or with the host."""
        self.look()
        # Mostly a step is like the one before. Then no gradient is looked at again, of thousands.
        known = self._with_gradient(update) if not update.alike else None
        begun = [param.leaf for param in host.begun] if host is not None else []
        try:
            yield
        finally:
            known = self._with_gradient(update) if known is None else known
            increment_version([*known, *begun])
            if not self._told:
                self._note()  # an optimizer may have written plain homes themselves

    def _with_gradient(self, update: Update) -> list[Tensor]:
        before, had, leaves = self._due.get(id(update), ([], [], []))
        if update.alike or not self._apart:
            return leaves
        homes = [home for group in update.optimizer.param_groups for home in group["params"]]
        without = list(map(is_, map(_grad, homes), repeat(None)))
        if without != had or not all(map(is_, homes, before)):
            pairs = zip(homes, without, strict=True)
            found = [self._leaf_of.get(id(home)) for home, none in pairs if not none]
            leaves = [leaf for leaf in found if leaf is not None]
            self._due[id(update)] = homes, without, leaves
        return leaves
