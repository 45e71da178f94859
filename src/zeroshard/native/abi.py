"""The records that pass between Python and `kernels.c`: field for field the structs of the headers there."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import torch

# Kinds of element. The last three exist for weights only: nothing is written, ties are rounded away from
# zero, the weight is one half of a split master.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
NONE, BF16_AWAY, SPLIT = 4, 5, 6

BLOCK = 256  # elements of a block of 8-bit moments


def _fields(text: str, types: dict[str, Any]) -> list[tuple[str, Any]]:
    """`"i64: count; ptr: master remainder"` as ctypes fields."""
    found = []
    for part in text.split(";"):
        kind, names = part.split(":")
        found += [(name, types[kind.strip()]) for name in names.split()]
    return found


_TYPES = {"i64": c_int64, "i32": c_int32, "u32": c_uint32, "f32": c_float, "f64": c_double, "ptr": c_void_p}


class Adam(ctypes.Structure):
    _fields_ = _fields(
        "i64: count; ptr: master remainder exp_avg exp_avg_sq peak scales grad weight;"
        "i32: grad_kind weight_kind coupled; u32: salt;"
        "f32: grad_scale lerp beta2 gain2 stride bias eps decay; i32: first; ptr: taken",
        _TYPES,
    )


class Sgd(ctypes.Structure):
    _fields_ = _fields(
        "i64: count; ptr: master remainder momentum grad weight;"
        "i32: grad_kind weight_kind first nesterov decays;"
        "f32: grad_scale stride inertia gain decay; ptr: taken",
        _TYPES,
    )


class Sum(ctypes.Structure):
    _fields_ = _fields(
        "i64: count; ptr: out sources source_kinds; i32: source_count out_kind doubles; f64: scale", _TYPES
    )


class Pair(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: to source; i32: to_kind from_kind doubles; f64: scale", _TYPES)


class Halves(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: master weight remainder", _TYPES)


class Moves(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: to source bytes times step; i64: past", _TYPES)


class Checksum(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: source; u32: sum; i32: done", _TYPES)


class CopySum(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: to source; u32: sum; i32: done", _TYPES)


class Blocks(ctypes.Structure):
    _fields_ = _fields(
        "i64: count first; ptr: values residual scales packed;"
        "u32: block; i32: bits stochastic add; u32: salt; i32: large",
        _TYPES,
    )


class Largest(ctypes.Structure):
    _fields_ = _fields("i64: count k; ptr: values residual momentum places chosen; f32: inertia", _TYPES)


class Touched(ctypes.Structure):
    _fields_ = _fields("i64: count width; ptr: words found; u32: mask", _TYPES)


class Device(ctypes.Structure):
    _fields_ = _fields("ptr: copy record follow wait query use", _TYPES)


class Errand(ctypes.Structure):
    _fields_ = _fields(
        "ptr: team record; i64: share; ptr: device;"
        "i64: outs; ptr: out_to out_source out_bytes; i64: backs; ptr: back_to back_source back_bytes;"
        "ptr: leaving coming landed arrived ready; i32: kernel error",
        _TYPES,
    )


class Parcel(ctypes.Structure):
    _fields_ = _fields(
        "ptr: errands; i64: count; ptr: place; i64: bytes turn; ptr: after; i32: done error", _TYPES
    )


RECORDS: dict[str, type[ctypes.Structure]] = {
    "adam": Adam,
    "adam_back": Adam,
    "sgd": Sgd,
    "sgd_back": Sgd,
    "sum": Sum,
    "accumulate": Pair,
    "cast": Pair,
    "split": Halves,
    "join": Halves,
    "move": Moves,
    "checksum": Checksum,
    "copy_sum": CopySum,
    "encode_blocks": Blocks,
    "decode_blocks": Blocks,
    "largest": Largest,
    "touched": Touched,
}


def version() -> int:
    """What `zs_abi` of a library built from these very records returns."""
    size = ctypes.sizeof
    return 9 + 1000 * (size(Adam) + 1000 * (size(Sgd) + 1000 * size(Sum)))
