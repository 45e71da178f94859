"""How gradients travel in fewer bytes: pairs of encode and decode with their state in the open."""

from .base import Codec, Compression, MeanCodec
from .delta import Delta
from .lowrank import LowRank
from .quantized import Cast, Int4, Int8, OneBit, Ternary, TwoBit
from .sparse import Rows, TopK

#: All of them are public names of `zeroshard`.
__all__ = [
    "Cast",
    "Codec",
    "Compression",
    "Delta",
    "Int4",
    "Int8",
    "LowRank",
    "MeanCodec",
    "OneBit",
    "Rows",
    "Ternary",
    "TopK",
    "TwoBit",
]
