"""Which gathered buffers are lent at one time in a training step. Integers only.

Follows `runtime`: forward keeps the root and the last unit, backward lets a unit go when the next one comes,
and gathers run some units ahead where the transport overlaps. A recomputed unit comes before the one above it
has gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Sizes = Counter[tuple[int, str]]  # elements and dtype of a buffer -> how many


def most_lent(sizes: Mapping[str, Sizes], ahead: int, recomputes: Callable[[str], bool]) -> Sizes:
    """The most buffers of each size. `sizes`: what every unit gathers, in forward order; nothing where it is
    always whole."""
    order, lent, most = list(sizes), dict[str, None](), Sizes()

    def take(names: Sequence[str]) -> None:
        for name in names:
            if name not in lent:
                lent[name] = None
                now = sum((sizes[held] for held in lent), Sizes())
                for key, count in now.items():
                    most[key] = max(most[key], count)

    for place, name in enumerate(order):
        take(order[place : place + 1 + ahead])
        if name != order[0] and place < len(order) - 1:
            del lent[name]
    above: str | None = None
    for place in reversed(range(len(order))):
        if not sizes[order[place]]:
            continue  # always whole: backward does not notice it
        coming = order[max(place - ahead, 0) : place + 1][::-1]
        if recomputes(order[place]):
            take(coming)
        if above is not None and above != order[0]:
            lent.pop(above, None)
        take(coming)
        above = order[place]
    return most
