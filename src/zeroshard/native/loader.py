"""Finds the compiled kernels. They are built with the package and never at run time; without them torch does
the same work, bit for bit, in more passes over memory, and one line says so."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from . import abi

MODULE = "zeroshard.native._kernels"
LEVELS = ("baseline", "avx2", "avx512")

_log = logging.getLogger("zeroshard")


class TeamCalls:
    """Threads of the library's own; see `team`. Not where there are no POSIX threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.open, self.run, self.close = library.zs_team_open, library.zs_team, library.zs_team_close
        self.open.argtypes, self.open.restype = [ctypes.c_int32], ctypes.c_void_p
        self.run.argtypes, self.run.restype = [ctypes.POINTER(abi.Errand)], None
        self.close.argtypes, self.close.restype = [ctypes.c_void_p], None


class PostCalls:
    """Couriers of the library's own; see `post`. Where there are teams."""

    def __init__(self, library: ctypes.CDLL) -> None:
        post, parcel = ctypes.c_void_p, ctypes.POINTER(abi.Parcel)
        number, count = ctypes.c_int32, ctypes.c_int64
        self.open, self.close = library.zs_post_open, library.zs_post_close
        self.send, self.wait = library.zs_post_send, library.zs_post_wait
        self.error, self.drop = library.zs_post_error, library.zs_post_drop
        self.open.argtypes, self.open.restype = [post, post, number, post, count], post
        self.send.argtypes, self.send.restype = [post, parcel, number], None
        self.wait.argtypes, self.wait.restype = [post, parcel, count], number
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
        self.post = PostCalls(library) if self.team is not None else None
        # A library from before these existed is as good for all else, and zlib takes their place.
        self.checksum = self._newer(library, "checksum")
        self.copy_sum = self._newer(library, "copy_sum")

    @classmethod
    def _newer(cls, library: ctypes.CDLL, name: str) -> Callable[[Any], None] | None:
        return cls._function(library, name) if hasattr(library, f"zs_{name}") else None

    @staticmethod
    def _function(library: ctypes.CDLL, name: str) -> Callable[[Any], None]:
        function = library[f"zs_{name}"]
        function.argtypes, function.restype = [ctypes.POINTER(abi.RECORDS[name])], None
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
    if entry() != abi.version():
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
