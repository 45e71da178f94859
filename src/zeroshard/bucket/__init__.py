"""Gradients that are reduced together: as they are, or through a codec."""

from .coded import CodedBucket
from .desk import Desk
from .plain import Bucket, Sink

__all__ = ["Bucket", "CodedBucket", "Desk", "Sink"]
