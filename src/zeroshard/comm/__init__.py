"""Transports: how shards move between ranks, and who may read what when. See `Transport`."""

from zeroshard.kernels.passes import SumSpan

from .connect import connect, refuse, register_transport
from .gloo import GlooTransport
from .local import LocalTransport
from .nccl import NcclTransport
from .nodes import NodesTransport
from .shm import ShmTransport
from .sums import first_scale, sum_spans
from .targets import GatherTargets, in_wire
from .transport import Counters, GatherRequest, Transport, TransportBuffer, Work

__all__ = [
    "Counters",
    "GatherRequest",
    "GlooTransport",
    "LocalTransport",
    "NcclTransport",
    "NodesTransport",
    "TransportBuffer",
    "ShmTransport",
    "SumSpan",
    "GatherTargets",
    "Transport",
    "Work",
    "connect",
    "first_scale",
    "in_wire",
    "refuse",
    "register_transport",
    "sum_spans",
]
