"""Element types: the one table of what a checkpoint can hold, by our name, safetensors' code and torch's
dtype."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from zeroshard.errors import CheckpointError
from zeroshard.kernels import raw

_TABLE: tuple[tuple[str, str, torch.dtype], ...] = (
    ("bool", "BOOL", torch.bool),
    ("uint8", "U8", torch.uint8),
    ("int8", "I8", torch.int8),
    ("float8_e5m2", "F8_E5M2", torch.float8_e5m2),
    ("float8_e4m3fn", "F8_E4M3", torch.float8_e4m3fn),
    ("uint16", "U16", torch.uint16),
    ("int16", "I16", torch.int16),
    ("float16", "F16", torch.float16),
    ("bfloat16", "BF16", torch.bfloat16),
    ("uint32", "U32", torch.uint32),
    ("int32", "I32", torch.int32),
    ("float32", "F32", torch.float32),
    ("uint64", "U64", torch.uint64),
    ("int64", "I64", torch.int64),
    ("float64", "F64", torch.float64),
    ("complex64", "C64", torch.complex64),
)
CODE = {name: code for name, code, _ in _TABLE}
NAME_OF_CODE = {code: name for name, code, _ in _TABLE}
DTYPE = {name: dtype for name, _, dtype in _TABLE}
SIZE = {name: dtype.itemsize for name, _, dtype in _TABLE}
_NAME_OF_DTYPE = {dtype: name for name, _, dtype in _TABLE}


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype, or an error for the few that safetensors cannot hold."""
    try:
        return _NAME_OF_DTYPE[dtype]
    except KeyError:
        raise CheckpointError(
            f"tensors of {dtype} cannot be stored; a checkpoint holds {', '.join(sorted(DTYPE))}. Convert "
            "it first."
        ) from None


def convertible(stored: str, wanted: str) -> bool:
    """Whether rows stored as one dtype may be loaded into another: between floats only, where rounding is
    understood."""
    return stored == wanted or (DTYPE[stored].is_floating_point and DTYPE[wanted].is_floating_point)


def height(shape: tuple[int, ...]) -> int:
    """Rows of a tensor of this shape; a tensor without dims has one."""
    return shape[0] if shape else 1


def row_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape[1:]) * SIZE[dtype]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor, in place where it lies contiguous in host memory."""
    return byte_view(raw(tensor.detach().to("cpu").contiguous())) if tensor.numel() else memoryview(b"")


def byte_view(flat: torch.Tensor) -> memoryview:
    """The memory of a one-dimensional uint8 tensor, to read and to write."""
    array: Any = flat.numpy()  # numpy's stubs do not say that an array is a buffer
    return memoryview(array)
