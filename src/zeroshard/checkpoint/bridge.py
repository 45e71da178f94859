"""Rows on a GPU, on their way to host memory beside training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroshard.tier.pinned import pinned

from .elements import as_bytes, byte_view
from .records import CHUNK


class Bridge:
    """On a GPU, a stream of its own and page-locked memory for a chunk, so that the kernels of training
    neither wait for copies nor overtake them. Without one, nothing: rows are read where they are."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._landing: torch.Tensor | None = None

    def begin(self) -> None:
        """In the thread that trains: what it has launched by now is what rows will show."""
        if torch.cuda.is_initialized():
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def crossing(self) -> Iterator[None]:
        """In the thread that copies, around all of `bytes_of` and the reading of rows."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def bytes_of(self, rows: torch.Tensor) -> memoryview:
        """The rows in host memory; those of a GPU until the next call."""
        if self._stream is None or rows.device != self._stream.device or rows.nbytes > CHUNK:
            return as_bytes(rows)
        if self._landing is None:
            self._landing = pinned(CHUNK, rows.device)
        place = self._landing[: rows.nbytes]
        place.view(rows.dtype).view(rows.shape).copy_(rows.detach(), non_blocking=True)
        self._stream.synchronize()
        return byte_view(place)
