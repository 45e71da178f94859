"""Transports: how pieces move between ranks, and who may read what when. See `Transport`."""

from .connect import connect
from .local import LocalTransport
from .shm import ShmTransport
from .transport import Counters, Region, Transport, Work

__all__ = ["Counters", "LocalTransport", "Region", "ShmTransport", "Transport", "Work", "connect"]
