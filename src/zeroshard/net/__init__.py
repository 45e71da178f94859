"""What the links between ranks give, and which strategy suits them. See `zeroshard net`."""

from .advice import Advice, Way, advise
from .links import Link, Links, Sample, measure

__all__ = ["Advice", "Link", "Links", "Sample", "Way", "advise", "measure"]
