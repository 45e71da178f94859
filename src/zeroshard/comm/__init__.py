"""Transports: how pieces move between ranks, and who may read what when. See `Transport`."""

from .connect import connect
from .gloo import GlooTransport
from .local import LocalTransport
from .nccl import NcclTransport
from .nodes import NodesTransport
from .shm import ShmTransport
from .sums import Span, sum_spans
from .transport import Counters, Region, Transport, Work

__all__ = [
    "Counters",
    "GlooTransport",
    "LocalTransport",
    "NcclTransport",
    "NodesTransport",
    "Region",
    "ShmTransport",
    "Span",
    "Transport",
    "Work",
    "connect",
    "sum_spans",
]
