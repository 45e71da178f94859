"""Counts which gathered buffers are in use at one time in a training step. Integers only.

It follows `runtime`: gathers run some units ahead where the transport overlaps; forward keeps the root, the
last unit, and as many before it as run ahead; backward lets a unit go when the next one comes, or, where it
has gradients to come, the one after that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .sharding import aligned

Sizes = Counter[tuple[int, str]]  # elements and dtype of a buffer -> how many

# [Note: small units] Gathering and releasing costs about 25 µs a parameter and step, whatever its size. Where
# a model has hundreds of parameters of a few KiB, that is most of its step, and all of them together are less
# memory than one bucket. Such units stay whole on every rank at stage 3 too, as they do at stage 2.
SMALL_BYTES = 4096  # of a parameter, on average over its unit
SMALL_COUNT = 500  # parameters; fewer cost too little time
SMALL_ROOM = 4 * 2**20  # bytes of all that stay whole


@dataclass(frozen=True)
class UnitVisit:
    """A part of forward in a unit: `entered` and `needs` as of a `StepSegment`; `reached`: whether backward
    comes to it."""

    unit: str
    entered: int = 0
    needs: tuple[str, ...] = ()
    reached: bool = True


@dataclass(frozen=True)
class UnitGathers:
    """How a step gathers the units.

    - `sizes`: what every unit gathers, the root first, in the order in which they are registered; nothing
      where it is always whole. `ahead`: how many units are gathered ahead of use.
    - `stages`: where the codes of every unit arrive meanwhile; `at_once`: those of all units together.
    - `visits`: in the order of forward; where there are none, every unit once, as they are registered.
    - `waiting`: units that never have all of their gradients. `frozen`: those that wait for none.
      `recomputed`: those that compute again in backward.
    """

    sizes: Mapping[str, Sizes]
    stages: Mapping[str, Sizes]
    at_once: bool
    ahead: int
    visits: Sequence[UnitVisit] = ()
    waiting: Container[str] = ()
    frozen: Container[str] = ()
    recomputed: Container[str] = ()

    @cached_property
    def lent(self) -> LentBuffers:
        """What a step borrows, found by following it."""
        lending = _Lending(self)
        if self.at_once:
            for name in self.sizes:
                lending.arriving.take(name)
            for name in self.sizes:
                lending.arriving.give(name)
        lending.forward()
        lending.backward()
        return LentBuffers(lending.most, lending.lent.times)


@dataclass(frozen=True)
class LentBuffers:
    """What a step borrows: the `most` buffers of each size at one time, and how many `times` it gathers each
    unit."""

    most: Sizes
    times: Counter[str]


class _Lending:
    """One step, as `runtime` makes it."""

    def __init__(self, gathers: UnitGathers) -> None:
        self.most = Sizes()
        self.lent = _HeldSizes(gathers.sizes, self.most)
        self.arriving = _HeldSizes(gathers.stages, self.most)
        self._gathers, self._sizes, self._ahead = gathers, gathers.sizes, gathers.ahead
        self._root, *others = gathers.sizes
        self._visits = gathers.visits or [UnitVisit(name, 1, (name,)) for name in others]
        entered = [visit.unit for visit in self._visits if visit.entered]
        self._order = list(dict.fromkeys([self._root, *entered]))
        self._places = {name: place for place, name in enumerate(self._order)}
        self._last = self._order[-1 - self._ahead :]  # stay from forward to backward
        self._left = Counter(visit.unit for visit in self._visits)  # visits until its gradients are complete
        self._recent: list[str] = []

    def forward(self) -> None:
        inside = [self._root]
        self._fetch(self._root, 1)
        for visit in self._visits:
            if visit.entered:
                while len(inside) > visit.entered:
                    self._leave(inside.pop())
                self._fetch(visit.unit, 1)
                inside.append(visit.unit)
        while len(inside) > 1:
            self._leave(inside.pop())

    def _leave(self, name: str) -> None:
        if name not in self._last:
            self.lent.give(name)

    def backward(self) -> None:
        for visit in reversed(self._visits):
            needs = visit.needs if visit.reached else ()
            if visit.reached and visit.unit in self._gathers.recomputed and self._sizes[visit.unit]:
                self._make_room(visit.unit, done=True)
                self._fetch(visit.unit, -1)
                needs = needs or (visit.unit,)  # nothing was saved of what is computed again
            for name in reversed(needs):
                if self._sizes[name] and self._recent[-1:] != [name]:
                    self._make_room(name)
                    self._recent.append(name)
                    self._fetch(name, -1)
            self._left[visit.unit] -= 1

    def _make_room(self, coming: str, done: bool = False) -> None:
        kept = []
        for index, name in enumerate(self._recent):
            old = self._has_all(name) or (index < len(self._recent) - 1 and not done)
            if name in (coming, self._root) or not old:
                kept.append(name)
            else:
                self.lent.give(name)
        self._recent = [name for name in dict.fromkeys(kept) if done or name != coming]

    def _has_all(self, name: str) -> bool:
        gathers = self._gathers
        return name in gathers.frozen or (self._left[name] <= 0 and name not in gathers.waiting)

    def _fetch(self, name: str, way: int) -> None:
        """A unit and those that come next, forward or (-1) backward."""
        wanted, place = [name], self._places.get(name)
        if place is not None:
            places = [place + way * step for step in range(1, 1 + self._ahead)]
            wanted += [self._order[at] for at in places if 0 <= at < len(self._order)]
        for one in wanted:
            if one not in self.lent.names:
                self.lent.take(one)
                self.arriving.take(one)
        self.arriving.give(name)


class _HeldSizes:
    """What is held at one time, and in `most` the most of each size that ever was."""

    def __init__(self, sizes: Mapping[str, Sizes], most: Sizes) -> None:
        self.names: set[str] = set()
        self.times = Counter[str]()  # by name, how often it was taken
        self._sizes, self._most, self._now = sizes, most, Sizes()

    def take(self, name: str) -> None:
        if name not in self.names:
            self.names.add(name)
            self.times[name] += 1
            self._now.update(self._sizes[name])
            for key in self._sizes[name]:
                self._most[key] = max(self._most[key], self._now[key])

    def give(self, name: str) -> None:
        if name in self.names:
            self.names.discard(name)
            self._now.subtract(self._sizes[name])


def small_units(sizes: Mapping[str, Sequence[int]]) -> frozenset[str]:
    """The units that stay whole at stage 3; see [Note: small units]. `sizes`: by unit, the bytes of its
    parameters."""
    small = {name: sum(of) for name, of in sizes.items() if of and sum(of) < SMALL_BYTES * len(of)}
    kept, room = set[str](), SMALL_ROOM
    if sum(len(sizes[name]) for name in small) >= SMALL_COUNT:
        for name, total in small.items():
            if total <= room:
                kept.add(name)
                room -= total
    return frozenset(kept)


def staging_bytes(sizes: Sequence[int], stages: int) -> int:
    """The staging memory of parts of these sizes: room for `stages` of the middle size, and the largest."""
    if not sizes:
        return 0
    lines = sorted(max(aligned(size, 64), 64) for size in sizes)
    return max(lines[-1], min(stages, len(lines) + 1) * lines[len(lines) // 2])
