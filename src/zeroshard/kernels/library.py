"""Loads the compiled kernels, and declares the records that they take.

The records are field for field the structs of the headers. Kernels are built with the package and never at
run time; without them torch does the same work, bit for bit, in more passes over memory, and one line says
so."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Callable
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


class AdamRecord(ctypes.Structure):
    _fields_ = _fields(
        "i64: count; ptr: master remainder exp_avg exp_avg_sq peak scales grad weight;"
        "i32: grad_kind weight_kind coupled; u32: salt;"
        "f32: grad_scale lerp beta2 gain2 stride bias eps decay; i32: first; ptr: taken size; f32: most",
        _TYPES,
    )


class SgdRecord(ctypes.Structure):
    _fields_ = _fields(
        "i64: count; ptr: master remainder momentum grad weight;"
        "i32: grad_kind weight_kind first nesterov decays;"
        "f32: grad_scale stride inertia gain decay; ptr: taken size; f32: most",
        _TYPES,
    )


class SumRecord(ctypes.Structure):
    _fields_ = _fields(
        "i64: count; ptr: out sources source_kinds; i32: source_count out_kind doubles; f64: scale", _TYPES
    )


class PairRecord(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: to source; i32: to_kind from_kind doubles; f64: scale", _TYPES)


class SplitRecord(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: master weight remainder", _TYPES)


class CopiesRecord(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: to source bytes times step; i64: past", _TYPES)


class ChecksumRecord(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: source; u32: sum; i32: done", _TYPES)


class CopyChecksumRecord(ctypes.Structure):
    _fields_ = _fields("i64: count; ptr: to source; u32: sum; i32: done", _TYPES)


class BlocksRecord(ctypes.Structure):
    _fields_ = _fields(
        "i64: count first; ptr: values residual scales packed;"
        "u32: block; i32: bits stochastic add; u32: salt; i32: large",
        _TYPES,
    )


class ShardsRecord(ctypes.Structure):
    _fields_ = [
        ("first", BlocksRecord),
        *_fields("i64: shards value_step code_step; ptr: salts", _TYPES),
    ]


class PartsRecord(ctypes.Structure):
    _fields_ = [
        ("out", BlocksRecord),
        *_fields("i64: parts value_step; ptr: codes; i64: scales packed", _TYPES),
    ]


class TallyRecord(ctypes.Structure):
    _fields_ = _fields("i64: count parts; ptr: codes; i64: at; ptr: marks", _TYPES)


class LargestRecord(ctypes.Structure):
    _fields_ = _fields("i64: count k; ptr: values residual momentum places chosen; f32: inertia", _TYPES)


class TouchedRecord(ctypes.Structure):
    _fields_ = _fields("i64: count width; ptr: words found; u32: mask", _TYPES)


class DeviceRecord(ctypes.Structure):
    _fields_ = _fields("ptr: copy record follow wait query use", _TYPES)


class UpdateRecord(ctypes.Structure):
    _fields_ = _fields(
        "ptr: team record; i64: share; ptr: device;"
        "i64: outs; ptr: out_to out_source out_bytes; i64: backs; ptr: back_to back_source back_bytes;"
        "ptr: leaving coming landed arrived ready; i32: kernel error",
        _TYPES,
    )


class TaskRecord(ctypes.Structure):
    _fields_ = _fields(
        "ptr: errands; i64: count; ptr: place; i64: bytes turn; ptr: after; i32: done error", _TYPES
    )


RECORDS: dict[str, type[ctypes.Structure]] = {
    "adam": AdamRecord,
    "adam_back": AdamRecord,
    "sgd": SgdRecord,
    "sgd_back": SgdRecord,
    "sum": SumRecord,
    "accumulate": PairRecord,
    "cast": PairRecord,
    "split": SplitRecord,
    "join": SplitRecord,
    "move": CopiesRecord,
    "checksum": ChecksumRecord,
    "copy_sum": CopyChecksumRecord,
    "encode_blocks": BlocksRecord,
    "decode_blocks": BlocksRecord,
    "encode_shards": ShardsRecord,
    "decode_parts": PartsRecord,
    "tally": TallyRecord,
    "largest": LargestRecord,
    "touched": TouchedRecord,
}


def version() -> int:
    """What `zs_abi` of a library built from these very records returns."""
    size = ctypes.sizeof
    return 10 + 1000 * (size(AdamRecord) + 1000 * (size(SgdRecord) + 1000 * size(SumRecord)))


MODULE = "zeroshard.kernels._kernels"
LEVELS = ("baseline", "avx2", "avx512")

_log = logging.getLogger("zeroshard")


class TeamCalls:
    """Threads of the library's own; see `team`. Not where there are no POSIX threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.open, self.run, self.close = library.zs_team_open, library.zs_team, library.zs_team_close
        self.open.argtypes, self.open.restype = [ctypes.c_int32], ctypes.c_void_p
        self.run.argtypes, self.run.restype = [ctypes.POINTER(UpdateRecord)], None
        self.close.argtypes, self.close.restype = [ctypes.c_void_p], None


class TransferCalls:
    """Transfer workers of the library's own; see `post`. Where there are teams."""

    def __init__(self, library: ctypes.CDLL) -> None:
        post, host_task = ctypes.c_void_p, ctypes.POINTER(TaskRecord)
        number, count = ctypes.c_int32, ctypes.c_int64
        self.open, self.close = library.zs_post_open, library.zs_post_close
        self.send, self.wait = library.zs_post_send, library.zs_post_wait
        self.error, self.drop = library.zs_post_error, library.zs_post_drop
        self.open.argtypes, self.open.restype = [post, post, number, post, count], post
        self.send.argtypes, self.send.restype = [post, host_task, number], None
        self.wait.argtypes, self.wait.restype = [post, host_task, count], number
        self.error.argtypes, self.error.restype = [post], number
        for each in (self.close, self.drop):
            each.argtypes, each.restype = [post], None


class Kernels:
    """The functions of the library, each taking one record of `abi`. Calls release the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._limit = library.zs_limit
        self._limit.argtypes, self._limit.restype = [ctypes.c_int32], ctypes.c_int32
        self.adam = self._function(library, "adam")
        self.sgd = self._function(library, "sgd")
        self.adam_back = self._function(library, "adam_back")
        self.sgd_back = self._function(library, "sgd_back")
        self.sum = self._function(library, "sum")
        self.accumulate = self._function(library, "accumulate")
        self.cast = self._function(library, "cast")
        self.split = self._function(library, "split")
        self.join = self._function(library, "join")
        self.move = self._function(library, "move")
        self.encode_blocks = self._function(library, "encode_blocks")
        self.decode_blocks = self._function(library, "decode_blocks")
        self.largest = self._function(library, "largest")
        self.touched = self._function(library, "touched")
        self.team = TeamCalls(library) if hasattr(library, "zs_team") else None
        self.post = TransferCalls(library) if self.team is not None else None
        # A library from before these existed is as good for all else, and zlib takes their place.
        self.checksum = self._newer(library, "checksum")
        self.copy_sum = self._newer(library, "copy_sum")
        # Without these every shard is a call.
        self.encode_shards = self._newer(library, "encode_shards")
        self.decode_parts = self._newer(library, "decode_parts")
        self.tally = self._newer(library, "tally")

    @classmethod
    def _newer(cls, library: ctypes.CDLL, name: str) -> Callable[[Any], None] | None:
        return cls._function(library, name) if hasattr(library, f"zs_{name}") else None

    @staticmethod
    def _function(library: ctypes.CDLL, name: str) -> Callable[[Any], None]:
        function = library[f"zs_{name}"]
        function.argtypes, function.restype = [ctypes.POINTER(RECORDS[name])], None
        call: Callable[[Any], None] = function
        return call

    def limit(self, level: str = LEVELS[-1]) -> str:
        """Use at most this instruction set, process-wide; returns the one in force."""
        return LEVELS[self._limit(LEVELS.index(level))]


def load(path: str | None) -> Kernels:
    """The kernels in the library at `path`. Raises OSError with the reason why they cannot be used."""
    if path is None:
        raise OSError("the package was installed without a C compiler")
    library = ctypes.CDLL(path)
    try:
        entry = library.zs_abi
    except AttributeError:
        raise OSError(f"{path} holds no ZeroShard kernels") from None
    entry.argtypes, entry.restype = [], ctypes.c_int64
    if entry() != version():
        raise OSError(f"{path} was built from other sources")
    return Kernels(library)


@functools.cache
def kernels() -> Kernels | None:
    """The compiled kernels, or None, said once in one line, where torch has to do their work."""
    spec = importlib.util.find_spec(MODULE)
    try:
        return load(spec.origin if spec is not None else None)
    except OSError as reason:
        _log.warning(
            "host updates run in torch, ten times slower than compiled kernels, because %s; "
            "with a C compiler present, reinstall: pip install --force-reinstall --no-deps zeroshard",
            reason,
        )
        return None
