"""Copies between the device and the host that run beside the computation.

On a GPU each direction has a stream of its own, so that both run at once and neither waits for the other. On
the CPU the device tier is ordinary memory: a copy is done when it is asked for. `delay` is called before
every copy; tests put random sleeps there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeroshard.native import Roads, cudart


class Mark:
    """A moment on a copy stream. On the CPU every moment has passed."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def wait_on_host(self) -> None:
        """Block this thread until the copy is done."""
        if self._event is not None:
            self._event.synchronize()

    def wait_on_device(self) -> None:
        """Let what this thread launches next wait for the copy."""
        if self._event is not None:
            self._event.wait()

    def passed(self) -> bool:
        return self._event is None or self._event.query()

    @property
    def handle(self) -> int | None:
        """CUDA's own, of an event that was recorded once."""
        return None if self._event is None else int(self._event.cuda_event)


class Copies:
    """Two directions of copies for one device."""

    def __init__(self, device: torch.device, delay: Callable[[], None] | None = None) -> None:
        self.device, self._delay = device, delay
        cuda = device.type == "cuda"
        self.out_stream = torch.cuda.Stream(device) if cuda else None
        self.in_stream = torch.cuda.Stream(device) if cuda else None
        self.roads = self._roads()

    @property
    def number(self) -> int:
        """Of the device among those of its kind."""
        index = self.device.index
        return index if index is not None else torch.cuda.current_device() if self.out_stream else 0

    @property
    def native(self) -> bool:
        """Whether C code can copy by itself; see [Note: without the interpreter] in `native/trip.py`."""
        return self._delay is None and (self.out_stream is None or self.roads is not None)

    def _roads(self) -> Roads | None:
        found = None if self.out_stream is None else cudart.functions()
        if found is None or self.out_stream is None or self.in_stream is None:
            return None
        return Roads(found, self.out_stream.cuda_stream, self.in_stream.cuda_stream)

    def out(self, host: Sequence[Tensor], device: Sequence[Tensor], after: Mark) -> Mark:
        """Copy to the host what the device has computed by the moment `after`."""
        return self._copy(self.out_stream, host, device, after)

    def back(self, device: Sequence[Tensor], host: Sequence[Tensor], after: Mark | None = None) -> Mark:
        """Copy to the device. `after`: a moment before which the device still reads what is overwritten."""
        return self._copy(self.in_stream, device, host, after)

    def here(self) -> Mark:
        """The present moment of the current stream."""
        if self.out_stream is None:
            return Mark()
        event = torch.cuda.Event()
        event.record()
        return Mark(event)

    def mark(self) -> Mark:
        """A moment that C code sets anew: until then, now. A thread that waits for it sleeps."""
        if self.out_stream is None:
            return Mark()
        event = torch.cuda.Event(blocking=True)
        event.record(self.out_stream)
        return Mark(event)

    @torch.no_grad()
    def _copy(
        self, stream: torch.cuda.Stream | None, to: Sequence[Tensor], of: Sequence[Tensor], after: Mark | None
    ) -> Mark:
        if self._delay is not None:
            self._delay()
        if stream is None:
            for target, source in zip(to, of, strict=True):
                target.copy_(source)
            return Mark()
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait_on_device()
            for target, source in zip(to, of, strict=True):
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    source.record_stream(stream)  # it may be freed while the copy is under way
            event.record()
        return Mark(event)
