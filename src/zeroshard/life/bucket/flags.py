"""The used flags of a bucket as a tensor; see [Note: used flags]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flags_on(device: torch.device, used: Sequence[bool], dtype: torch.dtype) -> Tensor:
    """A number for each parameter. A copy out of pageable memory would wait until the device has done all
    that was launched before, with every bucket; one out of pinned memory does not."""
    if device.type != "cuda":
        return torch.tensor(used, dtype=dtype, device=device)
    return torch.tensor(used, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
