"""Transports: how pieces move between ranks, and who may read what when. See `Transport`."""

from .connect import connect, refuse
from .gloo import GlooTransport
from .local import LocalTransport
from .nccl import NcclTransport
from .nodes import NodesTransport
from .shm import ShmTransport
from .sums import Span, first_scale, sum_spans
from .targets import Targets, in_wire
from .transport import Counters, Fetch, Region, Transport, Work

__all__ = [
    "Counters",
    "Fetch",
    "GlooTransport",
    "LocalTransport",
    "NcclTransport",
    "NodesTransport",
    "Region",
    "ShmTransport",
    "Span",
    "Targets",
    "Transport",
    "Work",
    "connect",
    "first_scale",
    "in_wire",
    "refuse",
    "sum_spans",
]
