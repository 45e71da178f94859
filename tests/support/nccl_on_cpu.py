"""The NCCL transport over gloo and on the CPU: its padding, packing and sums are the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from zeroshard.comm import NcclTransport


class FakeStream:
    """Stands in for a stream of a GPU: everything has always happened already."""

    waits = 0  # of the host for any of them

    def __init__(self, device: object = None) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        FakeStream.waits += 1


@contextmanager
def nccl_over_gloo(store: Any) -> Iterator[NcclTransport]:
    fakes = {
        "Stream": FakeStream,
        "Event": FakeStream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device: FakeStream(),
    }
    with patch.multiple(torch.cuda, **fakes):
        yield NcclTransport(store, dist.group.WORLD, torch.device("cpu"))
