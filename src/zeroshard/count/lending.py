"""Which gathered buffers are lent at one time in a training step. Integers only.

Follows `runtime`: gathers run some units ahead where the transport overlaps; forward keeps the root, the last
unit, and as many before it as run ahead; backward lets a unit go when the next one comes. Recomputation
changes nothing in that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .layout import aligned

Sizes = Counter[tuple[int, str]]  # elements and dtype of a buffer -> how many

# [Note: small units] Gathering and releasing costs about 25 µs a parameter and step, whatever its size. Where
# a model has hundreds of parameters of a few KiB, that is most of its step, and all of them together are less
# memory than one bucket. Such units stay whole on every rank at stage 3 too, as they do at stage 2.
SMALL_BYTES = 4096  # of a parameter, on average over its unit
SMALL_COUNT = 500  # parameters; fewer cost too little time
SMALL_ROOM = 4 * 2**20  # bytes of all that stay whole


def most_lent(
    sizes: Mapping[str, Sizes],
    stages: Mapping[str, Sizes],
    ahead: int,
    at_once: bool = False,
) -> Sizes:
    """The most buffers of each size. `sizes`: what every unit gathers, in forward order; nothing where it is
    always whole. `stages`: where its codes arrive meanwhile; `at_once`: those of all units together."""
    order, most = list(sizes), Sizes()
    lent, arriving = _Held(sizes, most), _Held(stages, most)

    def take(names: Sequence[str]) -> None:
        for name in names:
            if name not in lent.names:
                lent.take(name)
                arriving.take(name)

    if at_once:
        for name in order:
            arriving.take(name)
        for name in order:
            arriving.give(name)
    for place, name in enumerate(order):
        take(order[place : place + 1 + ahead])
        arriving.give(name)
        if name != order[0] and place < len(order) - 1 - ahead:
            lent.give(name)
    above: str | None = None
    for place in reversed(range(len(order))):
        if not sizes[order[place]]:
            continue  # always whole: backward does not notice it
        if above is not None and above != order[0]:
            lent.give(above)
        take(order[max(place - ahead, 0) : place + 1][::-1])
        arriving.give(order[place])
        above = order[place]
    return most


class _Held:
    """What is held at one time, and in `most` the most of each size that ever was."""

    def __init__(self, sizes: Mapping[str, Sizes], most: Sizes) -> None:
        self.names: set[str] = set()
        self._sizes, self._most, self._now = sizes, most, Sizes()

    def take(self, name: str) -> None:
        if name not in self.names:
            self.names.add(name)
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
