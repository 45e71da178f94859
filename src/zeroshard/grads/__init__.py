"""Gradients on their way to the sharded parameters: counted, reduced together as they are or through a codec,
and landed."""

from .bucket import AllReduceBucket, ReducedBucket
from .codec_workspace import CodecWorkspace
from .coded_bucket import CodedBucket
from .mean_bucket import MeanBucket
from .reducer import Bucket, EarlySink, KeepingSink, OwnBucket, PackedBucket, Reducer, Sink
from .sparse_bucket import SparseBucket

__all__ = [
    "Bucket",
    "ReducedBucket",
    "AllReduceBucket",
    "CodedBucket",
    "MeanBucket",
    "SparseBucket",
    "OwnBucket",
    "PackedBucket",
    "CodecWorkspace",
    "Reducer",
    "Sink",
    "KeepingSink",
    "EarlySink",
]
