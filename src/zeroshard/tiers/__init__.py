"""Where bytes rest when they are not on the device, and how they travel there and back."""

from .disk import DiskPage, DiskPager, PageSegment, WeightStream
from .scratch_file import ScratchFile, TierStorage, grains, open_storage, register_tier
from .staging import CopyMark, StagingArena, StagingPlace, StagingRing, TierCopies, pinned

__all__ = [
    "StagingArena",
    "TierCopies",
    "CopyMark",
    "DiskPage",
    "DiskPager",
    "StagingRing",
    "ScratchFile",
    "StagingPlace",
    "WeightStream",
    "PageSegment",
    "TierStorage",
    "grains",
    "open_storage",
    "pinned",
    "register_tier",
]
