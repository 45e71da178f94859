"""How gradients travel in fewer bytes: pairs of encode and decode with their state in the open."""

from .base import Codec, Compression, from_settings
from .cast import Cast
from .delta import Delta
from .integers import Int4, Int8
from .lowrank import LowRank
from .onebit import OneBit
from .rows import Rows
from .ternary import Ternary
from .topk import TopK
from .twobit import TwoBit

__all__ = [
    "Cast",
    "Codec",
    "Compression",
    "Delta",
    "Int4",
    "Int8",
    "LowRank",
    "OneBit",
    "Rows",
    "Ternary",
    "TopK",
    "TwoBit",
    "from_settings",
]
