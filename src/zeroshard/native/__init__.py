"""Host kernels: one pass over memory for updates, sums, casts, codes and checksums of flat CPU tensors.

Each runs on the calling thread and releases the GIL; `Workers` runs chunks side by side, and a `Team` shares
one update out among threads in C, on a `Trip` with the copies around it; a `Post` has threads that go such
ways by themselves. They are compiled with the package; without a compiler torch computes the same bits and
one line says so (`loader`, `fallback`).
"""

from .adam import AdamRows, AdamStep, adam_update
from .checksum import copy_crc32, crc32
from .master import Ties, join, split
from .moves import Moves
from .ordered import sum_in_order
from .pages import allocate, trim
from .post import Parcel, Post
from .sgd import SgdRows, SgdStep, sgd_update
from .sums import Span, accumulate, cast, sum_pieces, sum_spans
from .team import Team
from .trip import Copy, Journey, Roads, Signs, Trip
from .workers import Workers, usable_cores

__all__ = [
    "AdamRows",
    "AdamStep",
    "Copy",
    "Journey",
    "Moves",
    "Parcel",
    "Post",
    "Roads",
    "SgdRows",
    "SgdStep",
    "Signs",
    "Span",
    "Team",
    "Ties",
    "Trip",
    "Workers",
    "accumulate",
    "adam_update",
    "allocate",
    "cast",
    "copy_crc32",
    "crc32",
    "join",
    "sgd_update",
    "split",
    "sum_in_order",
    "sum_pieces",
    "sum_spans",
    "trim",
    "usable_cores",
]
