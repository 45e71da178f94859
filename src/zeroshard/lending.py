"""Buffers that are lent: gathered ones on the device in a training step, and those on the host that bytes
pass through between tiers. Integers only.

Gathered ones follow `runtime`: forward keeps the root and the last unit, backward lets a unit go when the
next one comes, and gathers run some units ahead where the transport overlaps. A recomputed unit comes before
the one above it has gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from .layout import aligned

BLOCKS, REQUEST = 16, 4 * 2**20  # what weights on the disk pass through, as in the disk tier
Sizes = Counter[tuple[int, str]]  # elements and dtype of a buffer -> how many


def most_lent(
    sizes: Mapping[str, Sizes],
    stages: Mapping[str, Sizes],
    ahead: int,
    recomputes: Callable[[str], bool],
    at_once: bool = False,
) -> Sizes:
    """The most buffers of each size. `sizes`: what every unit gathers, in forward order; nothing where it is
    always whole. `stages`: where its codes arrive meanwhile; `at_once`: those of all units together."""
    order, lent, arriving, most = list(sizes), dict[str, None](), dict[str, None](), Sizes()

    def count(held: Iterable[Sizes]) -> None:
        for key, number in sum(held, Sizes()).items():
            most[key] = max(most[key], number)

    def take(names: Sequence[str]) -> None:
        for name in names:
            if name not in lent:
                lent[name] = arriving[name] = None
                count(sizes[held] for held in lent)
                count(stages[held] for held in arriving)

    if at_once:
        count(stages.values())
    for place, name in enumerate(order):
        take(order[place : place + 1 + ahead])
        arriving.pop(name, None)
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
        arriving.pop(order[place], None)
        above = order[place]
    return most


def block_bytes(stretches: Iterable[int]) -> int:
    """The ring that weights pass through on their way from the disk; bytes of each part's."""
    return BLOCKS * min(REQUEST, max(stretches, default=0))


def staging_bytes(sizes: Sequence[int], stages: int) -> int:
    """The staging memory of parts of these sizes: room for `stages` of the middle size, and the largest."""
    if not sizes:
        return 0
    lines = sorted(max(aligned(size, 64), 64) for size in sizes)
    return max(lines[-1], min(stages, len(lines) + 1) * lines[len(lines) // 2])
