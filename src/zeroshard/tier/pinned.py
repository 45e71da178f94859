"""Page-locked host memory of exact size.

torch's pinned allocator rounds up to a power of two, which is why other systems take 19 host bytes a
parameter where 16 are used. Registering ordinary memory does not round.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from zeroshard.errors import TierError

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
