"""Codes on a GPU, in Triton or, bit for bit, in torch; see `programs`."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zeroshard.kernels import triton_programs
from zeroshard.kernels.codes import BlockFormat

# Values that a program takes, as in gpu_kernels. Longer blocks than this are for torch.
TILE = 4096


def encode(
    form: BlockFormat, values: Tensor, residual: Tensor | None, scales: Tensor, packed: Tensor
) -> bool:
    """As `Blocks.encode`, on the stream in force; False where it has done nothing."""
    kernels = _kernels_for(values, form)
    if kernels is None:
        return False
    salt = form.salt
    if salt is not None and salt >> 31:
        salt -= 1 << 32  # the same bits as a signed number, which is what Triton takes it for
    given = (values, residual, scales, packed.view(torch.int8), values.numel(), salt)
    triton_programs.start(kernels.encode_blocks, given, *_programs(form, values.numel()), **_shape(form))
    return True


def decode(form: BlockFormat, scales: Tensor, packed: Tensor, out: Tensor, add: bool) -> bool:
    """As `Blocks.decode`, on the stream in force; False where it has done nothing."""
    kernels = _kernels_for(out, form)
    if kernels is None:
        return False
    given = (scales, packed.view(torch.int8), out, out.numel())
    triton_programs.start(
        kernels.decode_blocks, given, *_programs(form, out.numel()), ADD=add, **_shape(form)
    )
    return True


def widen(halves: Tensor, out: Tensor, add: bool) -> bool:
    """16-bit numbers as fp32 ones, or added to those there; False where it has done nothing."""
    kernels = _kernels_for(out)
    if kernels is None:
        return False
    whole, rest = divmod(out.numel(), TILE)
    triton_programs.start(kernels.widen, (halves, out, out.numel()), whole, int(rest > 0), ADD=add)
    return True


def _shape(form: BlockFormat) -> dict[str, int]:
    """The constants that a kernel is compiled for."""
    side = form.block * form.bits // 8
    return {"BLOCK": form.block, "BITS": form.bits, "PAD": 1 << (side - 1).bit_length()}


def _programs(form: BlockFormat, numel: int) -> tuple[int, int]:
    """How many programs without masks, and with."""
    side, pad = form.block * form.bits // 8, _shape(form)["PAD"]
    tile = TILE * side // (pad * form.block) * form.block
    whole = numel // tile if pad == side else 0
    return whole, -(-(numel - whole * tile) // tile)


def _kernels_for(tensor: Tensor, form: BlockFormat | None = None) -> ModuleType | None:
    if form is not None and (form.bits not in (4, 8) or form.block > TILE):
        return None
    return _kernels(tensor.device) if tensor.numel() else None


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The kernels, tried once; None where torch has to do their work."""

    def load() -> ModuleType:
        from zeroshard.compress import gpu_triton

        return gpu_triton

    return triton_programs.tried(
        load, lambda kernels: _try(kernels, device), f"codecs run in torch on {device}"
    )


def _try(kernels: Any, device: torch.device) -> None:
    halves, out = torch.ones(4, dtype=torch.bfloat16, device=device), torch.ones(4, device=device)
    triton_programs.start(kernels.widen, (halves, out, 4), 0, 1, ADD=True)
    if out.tolist() != [2.0] * 4:
        raise RuntimeError("it computes wrong sums here")
