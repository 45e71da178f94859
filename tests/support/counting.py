"""Counts the calls that Python makes, and bytes on sockets: costs that are the same on every machine,
however busy."""

from __future__ import annotations

import gc
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore


def calls_of(function: Callable[[], object]) -> int:
    """How many functions are called, those of C among them, on this thread. What is collected meanwhile, of
    whoever ran before, is not counted."""
    count, collects = 0, gc.isenabled()

    def heard(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(heard)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count


def sent_on_sockets() -> int:
    """Bytes that the kernel has sent for the TCP connections of this process: `tcpi_bytes_sent` without
    `tcpi_bytes_retrans`, what a busy machine sends again."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=copy) as opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
                known = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, again = struct.unpack_from("QQ", known, 200)
                total += sent - again
    return total


@contextmanager
def simulated(world: int) -> Iterator[None]:
    """One rank of a world that is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Small(nn.Module):
    """A unit of many small tensors."""

    def __init__(self, tensors: int, width: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((width, width), 0.1) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + (x @ weight).tanh()
        return x


def many_small(tensors: int, each: int = 10, width: int = 4) -> nn.Sequential:
    """A model in which overhead shows: `each` tensors a unit."""
    return nn.Sequential(*(Small(each, width) for _ in range(tensors // each)))
