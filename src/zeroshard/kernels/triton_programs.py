"""Programs of a GPU, written in Triton, which comes with torch's GPU builds: tried once on a device, then
started over tensors. Where it is missing or cannot compile, torch does their work in more passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

_log = logging.getLogger("zeroshard")
_WARPS = 4

Kernels = TypeVar("Kernels")


def tried(load: Callable[[], Kernels], check: Callable[[Kernels], None], what: str) -> Kernels | None:
    """The kernels, if they can be loaded and `check` does not raise; else None, and one line says why `what`
    runs in torch."""
    try:
        kernels = load()
        check(kernels)
    except Exception as reason:  # whatever keeps Triton from compiling, the answer is the same
        _log.warning("%s, in more passes over memory than with Triton, because %s", what, reason)
        return None
    return kernels


def start(kernel: Any, given: Sequence[Any], whole: int, rest: int, **options: Any) -> None:
    """Programs without masks over whole tiles, then masked ones over the rest."""
    with torch.cuda.device_of(given[0]):
        for programs, masked in ((whole, False), (rest, True)):
            if programs:
                kernel[(programs,)](
                    *given, **options, MASKED=masked, num_warps=_WARPS, enable_fp_fusion=False
                )
