"""CRC-32 of bytes in memory, as zlib has it, at the speed of memory where the kernels are built."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from typing import Any

from zeroshard.kernels import library

# Bytes below which a call into the library costs more than it saves.
_SMALL = 1 << 14


def crc32(data: memoryview, sum: int = 0) -> int:
    """`zlib.crc32(data, sum)`. Releases the GIL."""
    call = _kernel()
    # ctypes gives the address of memory that may be written; tensors' may, and other things are small.
    if call is None or len(data) < _SMALL or data.readonly:
        return zlib.crc32(data, sum)
    record = library.ChecksumRecord(len(data), ctypes.addressof(ctypes.c_char.from_buffer(data)), sum, 0)
    call(ctypes.byref(record))
    return int(record.sum) if record.done else zlib.crc32(data, sum)


def copy_crc32(to: memoryview, data: memoryview) -> int:
    """Copy `data` to `to`, as long, and return its CRC-32: one pass over memory, past the caches, where the
    kernels are built. Releases the GIL."""
    kernels = library.kernels()
    call = kernels.copy_sum if kernels is not None else None
    if len(data) < _SMALL or data.readonly:
        to[:] = data
        return zlib.crc32(data)
    target, source = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (to, data))
    record = library.CopyChecksumRecord(len(data), target, source, 0, 0)
    if call is not None:
        call(ctypes.byref(record))
    if record.done:
        return int(record.sum)
    ctypes.memmove(target, source, len(data))
    return zlib.crc32(data)


def _kernel() -> Callable[[Any], None] | None:
    kernels = library.kernels()
    return kernels.checksum if kernels is not None else None
