"""Provides pinned host memory for copies between the device and the host, and the streams they run on.

Pinned memory has exact size: torch's pinned allocator rounds up to a power of two, which is why other systems
take 19 host bytes a parameter where 16 are used. Registering ordinary memory does not round.

Copies run beside the computation. On a GPU each direction has a stream of its own, so that both run at once
and neither waits for the other. On the CPU the device tier is ordinary memory: a copy is done when it is
asked for. `delay` is called before every copy; tests put random sleeps there.

Staging memory is bounded: a ring of places of one size, or an arena that groups of different sizes share, so
that a few large ones need not make room for all to be large. Whoever finds no room waits: that back-pressure
keeps host memory within the plan."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroshard.errors import TierError
from zeroshard.kernels import CopyStreams, cudart

_PAGE = mmap.PAGESIZE


def pinned(nbytes: int, device: torch.device) -> Tensor:
    """Host bytes that copies to and from `device` run at full speed with, beginning with a page as direct
    I/O wants it. Ordinary memory where the device is the CPU."""
    size = -(-max(nbytes, 1) // _PAGE) * _PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type != "cuda":
        return tensor[:nbytes]
    address = tensor.data_ptr()
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(address, size, 0))
    if code != 0:
        raise TierError(
            f"CUDA could not lock {size} bytes of host memory (error {code}): raise the limit of locked "
            "memory (`ulimit -l`), or pass smaller Offload(stages=..., stage_bytes=...)."
        )
    weakref.finalize(memory, cudart.cudaHostUnregister, address)
    return tensor[:nbytes]


class CopyMark:
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


class TierCopies:
    """Two directions of copies for one device."""

    def __init__(self, device: torch.device, delay: Callable[[], None] | None = None) -> None:
        self.device, self._delay = device, delay
        cuda = device.type == "cuda"
        self.out_stream = torch.cuda.Stream(device) if cuda else None
        self.in_stream = torch.cuda.Stream(device) if cuda else None
        self.copy_streams = self._copy_streams()

    @property
    def number(self) -> int:
        """Of the device among those of its kind."""
        index = self.device.index
        return index if index is not None else torch.cuda.current_device() if self.out_stream else 0

    @property
    def native(self) -> bool:
        """Whether C code can copy by itself; see [Note: without the interpreter] in `kernels/transfer.py`."""
        return self._delay is None and (self.out_stream is None or self.copy_streams is not None)

    def _copy_streams(self) -> CopyStreams | None:
        found = None if self.out_stream is None else cudart.functions()
        if found is None or self.out_stream is None or self.in_stream is None:
            return None
        return CopyStreams(found, self.out_stream.cuda_stream, self.in_stream.cuda_stream)

    def out(self, host: Sequence[Tensor], device: Sequence[Tensor], after: CopyMark) -> CopyMark:
        """Copy to the host what the device has computed by the moment `after`."""
        return self._copy(self.out_stream, host, device, after)

    def back(
        self, device: Sequence[Tensor], host: Sequence[Tensor], after: CopyMark | None = None
    ) -> CopyMark:
        """Copy to the device. The copy begins when `after` has passed: until then the device reads what is
        overwritten."""
        return self._copy(self.in_stream, device, host, after)

    def here(self) -> CopyMark:
        """The present moment of the current stream."""
        if self.out_stream is None:
            return CopyMark()
        event = torch.cuda.Event()
        event.record()
        return CopyMark(event)

    def mark(self) -> CopyMark:
        """A moment that C code sets anew: until then, now. A thread that waits for it sleeps."""
        if self.out_stream is None:
            return CopyMark()
        event = torch.cuda.Event(blocking=True)
        event.record(self.out_stream)
        return CopyMark(event)

    @torch.no_grad()
    def _copy(
        self,
        stream: torch.cuda.Stream | None,
        to: Sequence[Tensor],
        of: Sequence[Tensor],
        after: CopyMark | None,
    ) -> CopyMark:
        if self._delay is not None:
            self._delay()
        if stream is None:
            if to:
                torch._foreach_copy_(list(to), list(of))
            return CopyMark()
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait_on_device()
            for target, source in zip(to, of, strict=True):
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    source.record_stream(stream)  # it may be freed while the copy is under way
            event.record()
        return CopyMark(event)


class StagingPlace:
    """One place in the ring: `memory` is flat bytes.

    Views are made once. Torch gives the interpreter away to make one, and where the training thread wants it,
    too, each costs that thread more than the view itself.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._views: dict[tuple[torch.dtype, int, int], Tensor] = {}

    @property
    def bytes(self) -> memoryview:
        return memoryview(self.memory.numpy().data)

    def view(self, dtype: torch.dtype, numel: int, offset: int = 0) -> Tensor:
        found = self._views.get((dtype, numel, offset))
        if found is None:
            size = numel * dtype.itemsize
            found = self._views[dtype, numel, offset] = self.memory[offset : offset + size].view(dtype)
        return found


class StagingRing:
    """`count` stages of `nbytes` each."""

    def __init__(self, count: int, nbytes: int, device: torch.device) -> None:
        nbytes = -(-nbytes // 64) * 64
        self.nbytes = nbytes * count
        self._memory = pinned(self.nbytes, device)
        self._free: deque[tuple[StagingPlace, CopyMark]] = deque(
            (StagingPlace(self._memory[i * nbytes : (i + 1) * nbytes]), CopyMark()) for i in range(count)
        )
        self._changed = threading.Condition()

    def take(self) -> StagingPlace:
        """A stage whose last copy is done; waits for one if none is free."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            stage, mark = self._free.popleft()
        mark.wait_on_host()
        return stage

    def give(self, stage: StagingPlace, after: CopyMark) -> None:
        """Give a stage back; it is used again when the copy that `after` marks is done."""
        with self._changed:
            self._free.append((stage, after))
            self._changed.notify()


LINE = 64
KNOWN = 256  # stages that are kept for the next time: sizes and places repeat from step to step


@dataclass
class _FreeSpan:
    """Free bytes, and the copies that still use them."""

    start: int
    stop: int
    marks: list[CopyMark] = field(default_factory=list)


class StagingArena:
    """`nbytes` of staging memory, lent in ranges: the first free one that is long enough."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._memory = pinned(nbytes, device)
        self._free = [_FreeSpan(0, nbytes)]
        self._stages: dict[tuple[int, int], StagingPlace] = {}
        self._changed = threading.Condition()
        self._broken: BaseException | None = None

    def take(self, nbytes: int) -> StagingPlace:
        """A stage of so many bytes whose last copies are done; waits for room."""
        size = max(-(-nbytes // LINE), 1) * LINE
        assert size <= self.nbytes
        with self._changed:
            while (span := next((s for s in self._free if s.stop - s.start >= size), None)) is None:
                if self._broken is not None:
                    raise TierError(
                        "the host update failed, so its staging memory never came free."
                    ) from self._broken
                self._changed.wait(1.0)
            start, marks = span.start, list(span.marks)
            span.start += size
            self._free = [s for s in self._free if s.start < s.stop]
        for mark in marks:
            mark.wait_on_host()
        return self._stage(start, size)

    def _stage(self, start: int, size: int) -> StagingPlace:
        found = self._stages.get((start, size))
        if found is None:
            if len(self._stages) >= KNOWN:
                self._stages.clear()
            found = self._stages[start, size] = StagingPlace(self._memory[start : start + size])
        return found

    def give(self, stage: StagingPlace, after: CopyMark) -> None:
        """Give a stage back; it is used again when the copy that `after` marks is done."""
        start = stage.memory.data_ptr() - self._memory.data_ptr()
        with self._changed:
            freed = _FreeSpan(start, start + stage.memory.numel(), [after])
            merged: list[_FreeSpan] = []
            for span in sorted([*self._free, freed], key=lambda s: s.start):
                if merged and merged[-1].stop == span.start:
                    merged[-1] = _FreeSpan(
                        merged[-1].start, span.stop, _waiting(merged[-1].marks + span.marks)
                    )
                else:
                    merged.append(span)
            self._free = merged
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Wake whoever waits: no stage will come back."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()


def _waiting(marks: list[CopyMark]) -> list[CopyMark]:
    return [mark for mark in marks if not mark.passed()]
