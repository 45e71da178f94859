"""Loads the compiled kernels, and declares the records that they take.

The records are field for field the structs of the headers. Kernels are built with the package and never at
run time; without them torch does the same work, bit for bit, in more passes over memory, and one line says
so."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import TYPE_CHECKING, Any, Self

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


class States(ctypes.Structure):
    """Arrays beside a master, in the order of the fields of their `StateRows`."""

    _fields_ = _fields("ptr: first second third", _TYPES)


class RowsRecord(ctypes.Structure):
    """`struct update`, with which the record of every update begins."""

    _fields_ = [
        *_fields("i64: count bytes; ptr: master remainder", _TYPES),
        ("states", States),
        *_fields(
            "ptr: scales grad weight taken size; f32: most; i32: grad_kind weight_kind width",
            _TYPES,
        ),
    ]

    def limit(self, most: float) -> None:
        """Change the bound of an update that has one."""
        self.most = most


class StepRecord(ctypes.Structure):
    """An update: its rows, and the numbers of its step."""

    Numbers: type[ctypes.Structure]
    rows: RowsRecord

    @property
    def address(self) -> int:
        return ctypes.addressof(self)

    def keep(self, *others: object) -> Self:
        """They have only their addresses here, and live as long."""
        self._kept = others
        return self

    def renew(self, numbers: tuple[Any, ...], most: float | None) -> None:
        """The same update in another step."""
        self.numbers = self.Numbers(*numbers)
        if most is not None:
            self.rows.limit(most)


def step_record(name: str, numbers: str) -> type[StepRecord]:
    """The record of a kernel whose struct goes on with such numbers."""
    inner = type(name, (ctypes.Structure,), {"_fields_": _fields(numbers, _TYPES)})
    own = {"_fields_": [("rows", RowsRecord), ("numbers", inner)], "Numbers": inner}
    return type(f"{name}Record", (StepRecord,), own)


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


class CopyListRecord(ctypes.Structure):
    """Copies of so many bytes each, from and to these addresses."""

    _fields_ = _fields("i64: count; ptr: to source bytes", _TYPES)


class UpdateRecord(ctypes.Structure):
    """A kernel and its record, by whose threads it runs, and the copies around it."""

    _fields_ = [
        *_fields("ptr: team record kernel; i64: share; ptr: device", _TYPES),
        ("out", CopyListRecord),
        ("back", CopyListRecord),
        *_fields("ptr: leaving coming landed arrived ready; i32: error", _TYPES),
    ]

    def by(self, team: int) -> Self:
        """The threads of that team run it."""
        self.team = team
        return self

    def wait_for(self, landed: int | None) -> None:
        """From that event on there is something to fetch."""
        self.landed = landed


class TaskRecord(ctypes.Structure):
    """Updates of one offload group that a transfer worker carries; `done` and `error` are C's."""

    _fields_ = _fields(
        "ptr: errands; i64: count; ptr: place; i64: bytes turn; ptr: after; i32: done error", _TYPES
    )

    def again(self, turn: int) -> None:
        """What was carried is carried once more."""
        self.turn, self.done, self.after = turn, 0, None


RECORDS: dict[str, type[ctypes.Structure]] = {
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
    return 11 + 1000 * (ctypes.sizeof(RowsRecord) + 1000 * ctypes.sizeof(SumRecord))


MODULE = "zeroshard.kernels._kernels"
LEVELS = ("baseline", "avx2", "avx512")

_log = logging.getLogger("zeroshard")


def _typed(function: Any, takes: list[Any], gives: Any = None) -> Any:
    """A function of the library, as it is declared in C."""
    function.argtypes, function.restype = takes, gives
    return function


class TeamCalls:
    """Threads of the library's own; see `team`. Not where there are no POSIX threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.open = _typed(library.zs_team_open, [c_int32], c_void_p)
        self.run = _typed(library.zs_team, [ctypes.POINTER(UpdateRecord)])
        self.close = _typed(library.zs_team_close, [c_void_p])


class TransferCalls:
    """Transfer workers of the library's own; see `post`. Where there are teams."""

    def __init__(self, library: ctypes.CDLL) -> None:
        post, host_task = c_void_p, ctypes.POINTER(TaskRecord)
        self.open = _typed(library.zs_post_open, [post, post, c_int32, post, c_int64], post)
        self.close = _typed(library.zs_post_close, [post])
        self.send = _typed(library.zs_post_send, [post, host_task, c_int32])
        self.wait = _typed(library.zs_post_wait, [post, host_task, c_int64], c_int32)
        self.error = _typed(library.zs_post_error, [post], c_int32)
        self.drop = _typed(library.zs_post_drop, [post])


class UpdateKernel:
    """A function of the library that updates what a `StepRecord` says."""

    def __init__(self, function: Any) -> None:
        self._function = _typed(function, [c_void_p])
        self.address = ctypes.cast(function, c_void_p).value

    def __call__(self, record: StepRecord) -> None:
        self._function(record.address)


class Kernels:
    """The functions of the library, each under its name in `RECORDS` and taking one such record. Calls
    release the GIL. A library from before some of them existed is as good for all else; those are None."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._updates = library, dict[str, UpdateKernel | None]()
        vars(self).update({name: self._function(name, [ctypes.POINTER(of)]) for name, of in RECORDS.items()})
        self.team = TeamCalls(library) if hasattr(library, "zs_team") else None
        self.post = TransferCalls(library) if self.team is not None else None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def update(self, name: str) -> UpdateKernel | None:
        """What updates rows of that kernel; None where torch does."""
        if name not in self._updates:
            function = self._function(name, [c_void_p])
            self._updates[name] = None if function is None else UpdateKernel(function)
        return self._updates[name]

    def _function(self, name: str, takes: list[Any]) -> Any:
        found = f"zs_{name}"
        return _typed(self._library[found], takes) if hasattr(self._library, found) else None

    def limit(self, level: str = LEVELS[-1]) -> str:
        """Use at most this instruction set, process-wide; returns the one in force."""
        limit = _typed(self._library.zs_limit, [c_int32], c_int32)
        return LEVELS[limit(LEVELS.index(level))]


def load(path: str | None) -> Kernels:
    """The kernels in the library at `path`. Raises OSError with the reason why they cannot be used."""
    if path is None:
        raise OSError("the package was installed without a C compiler")
    library = ctypes.CDLL(path)
    try:
        entry = library.zs_abi
    except AttributeError:
        raise OSError(f"{path} holds no ZeroShard kernels") from None
    if _typed(entry, [], c_int64)() != version():
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
