"""Where bytes rest when they are not on the device, and how they travel there and back."""

from .arena import Arena
from .copies import Copies, Mark
from .paging import Page, Paging
from .pinned import pinned
from .ring import Ring, Stage
from .scratch import Scratch, grains
from .streaming import Streaming, Stretch

__all__ = [
    "Arena",
    "Copies",
    "Mark",
    "Page",
    "Paging",
    "Ring",
    "Scratch",
    "Stage",
    "Streaming",
    "Stretch",
    "grains",
    "pinned",
]
