"""Codes on a GPU. Triton comes with torch's GPU builds; where it is missing or cannot compile, torch computes
the same bits in more passes, and one line says so."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.native.codes import Blocks

_log = logging.getLogger("zeroshard")

# Values that a program takes. Longer blocks than this are for torch.
_TILE = 4096
_WARPS = 4


def encode(form: Blocks, values: Tensor, residual: Tensor | None, scales: Tensor, packed: Tensor) -> bool:
    """As `Blocks.encode`, on the stream in force; False where it has done nothing."""
    kernels = _kernels_for(values, form)
    if kernels is None:
        return False
    salt = form.salt or 0
    for launch in _launches(form, values.numel()):
        launch.start(
            kernels.encode_blocks,
            (values, values if residual is None else residual, scales, packed.view(torch.int8)),
            (values.numel(), salt - (1 << 32) if salt >> 31 else salt),
            LEVELS=(1 << form.bits - 1) - 1,
            FEEDBACK=residual is not None,
            STOCHASTIC=form.salt is not None,
        )
    return True


def decode(form: Blocks, scales: Tensor, packed: Tensor, out: Tensor, add: bool) -> bool:
    """As `Blocks.decode`, on the stream in force; False where it has done nothing."""
    kernels = _kernels_for(out, form)
    if kernels is None:
        return False
    for launch in _launches(form, out.numel()):
        launch.start(kernels.decode_blocks, (scales, packed.view(torch.int8), out), (out.numel(),), ADD=add)
    return True


def add_halves(halves: Tensor, out: Tensor) -> bool:
    """Add 16-bit numbers to fp32 ones; False where it has done nothing."""
    kernels = _kernels_for(out)
    if kernels is None:
        return False
    whole, short = divmod(out.numel(), _TILE)
    for launch in (_Launch(whole, 0, False, {}), _Launch(int(short > 0), whole, True, {})):
        launch.start(kernels.add_halves, (halves, out), (out.numel(),), PAD=_TILE)
    return True


class _Launch(NamedTuple):
    """Programs side by side."""

    programs: int
    first: int  # row that they begin with
    masked: bool
    shape: dict[str, int]

    def start(self, kernel: Any, tensors: Sequence[Tensor], numbers: Sequence[int], **options: Any) -> None:
        if not self.programs:
            return
        with torch.cuda.device_of(tensors[0]):
            kernel[(self.programs,)](
                *tensors,
                self.first,
                *numbers,
                **self.shape,
                **options,
                MASKED=self.masked,
                num_warps=_WARPS,
                enable_fp_fusion=False,
            )


def _launches(form: Blocks, numel: int) -> tuple[_Launch, _Launch]:
    """Programs without masks over whole tiles, then masked ones over the rest."""
    side = form.block * form.bits // 8
    pad = 1 << (side - 1).bit_length()
    rows = max(1, _TILE * form.bits // 8 // pad)
    shape = {"BLOCK": form.block, "SIDE": side, "PAD": pad, "ROWS": rows}
    whole = numel // (rows * form.block) if pad == side else 0
    rest = -(-(numel - whole * rows * form.block) // (rows * form.block))
    return _Launch(whole, 0, False, shape), _Launch(rest, whole * rows, True, shape)


def _kernels_for(tensor: Tensor, form: Blocks | None = None) -> ModuleType | None:
    if form is not None and (form.bits not in (4, 8) or form.block > _TILE):
        return None
    return _kernels(tensor.device) if tensor.numel() else None


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The kernels, tried once; None where torch has to do their work."""
    try:
        from zeroshard.codec import gpu_kernels

        _try(gpu_kernels, device)
    except Exception as reason:  # whatever keeps Triton from compiling, the answer is the same
        _log.warning(
            "codecs run in torch on %s, in more passes over memory than with Triton, because %s",
            device,
            reason,
        )
        return None
    return gpu_kernels


def _try(kernels: Any, device: torch.device) -> None:
    halves, out = torch.ones(4, dtype=torch.bfloat16, device=device), torch.ones(4, device=device)
    _Launch(1, 0, True, {}).start(kernels.add_halves, (halves, out), (4,), PAD=_TILE)
    if out.tolist() != [2.0] * 4:
        raise RuntimeError("it computes wrong sums here")
