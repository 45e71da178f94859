"""How gradients travel in fewer bytes: pairs of encode and decode with their state in the open."""

from zeroshard.codec.base import Codec, from_settings
from zeroshard.codec.blocks import Int8
from zeroshard.codec.cast import Cast

__all__ = ["Cast", "Codec", "Int8", "from_settings"]
