"""Gradients that are reduced together: as they are, or through a codec."""

from .coded import CodedBucket
from .desk import Desk
from .lowrank import LowRankBucket
from .plain import Bucket, EarlySink, Sink
from .rows import RowsBucket
from .whole import WholeBucket

__all__ = ["Bucket", "CodedBucket", "Desk", "EarlySink", "LowRankBucket", "RowsBucket", "Sink", "WholeBucket"]
