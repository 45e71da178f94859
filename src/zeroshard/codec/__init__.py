"""How gradients travel in fewer bytes: pairs of encode and decode with their state in the open."""

from zeroshard.codec.base import Codec, Compression, from_settings
from zeroshard.codec.cast import Cast
from zeroshard.codec.delta import Delta
from zeroshard.codec.integers import Int4, Int8
from zeroshard.codec.lowrank import LowRank
from zeroshard.codec.onebit import OneBit
from zeroshard.codec.rows import Rows
from zeroshard.codec.ternary import Ternary
from zeroshard.codec.topk import TopK
from zeroshard.codec.twobit import TwoBit

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
