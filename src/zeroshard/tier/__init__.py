"""Where bytes rest when they are not on the device, and how they travel there and back."""

from .copies import Copies, Mark
from .pinned import pinned
from .ring import Ring, Stage

__all__ = ["Copies", "Mark", "Ring", "Stage", "pinned"]
