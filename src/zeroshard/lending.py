"""The bytes of the buffers that whole units are lent for a while. Integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .division import Division
from .shapes import WIDTHS


def gathered(setup: Division) -> int:
    """Bytes of the pool's buffers after a training step: what ever was lent at one time, size by size.

    Follows `runtime`: forward keeps the root and the last unit, backward lets a unit go when the next one
    comes, and gathers run `prefetch` units ahead where the transport overlaps. A recomputed unit comes
    before the one above it has gone.
    """
    order, lent = [unit.name for unit in setup.units], dict[str, None]()
    sizes = {name: Counter[tuple[int, str]]() for name in order}
    most, now = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for bundle in setup.bundles:
        if not setup.keeps(bundle):
            sizes[bundle.unit][bundle.full, bundle.compute] += 1
    ahead = setup.options.prefetch if setup.overlaps or setup.streamed else 0

    def take(names: Sequence[str]) -> None:
        for name in names:
            if name not in lent:
                lent[name] = None
                now.update(sizes[name])
                for key in sizes[name]:
                    most[key] = max(most[key], now[key])

    def give(name: str) -> None:
        if name in lent:
            del lent[name]
            now.subtract(sizes[name])

    for place, name in enumerate(order):
        take(order[place : place + 1 + ahead])
        if name != order[0] and place < len(order) - 1:
            give(name)
    above: str | None = None
    for place in reversed(range(len(order))):
        if not sizes[order[place]]:
            continue  # always whole: backward does not notice it
        coming = order[max(place - ahead, 0) : place + 1][::-1]
        if setup.recomputes(order[place]):
            take(coming)
        if above is not None and above != order[0]:
            give(above)
        take(coming)
        above = order[place]
    return sum(count * numel * WIDTHS[dtype] for (numel, dtype), count in most.items())
