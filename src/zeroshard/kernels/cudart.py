"""Functions of CUDA's runtime, by their addresses, for C code that copies and waits by itself."""

from __future__ import annotations

import ctypes
import functools

from zeroshard.kernels import library as abi

_NAMES = {
    "copy": "cudaMemcpyAsync",
    "record": "cudaEventRecord",
    "follow": "cudaStreamWaitEvent",
    "wait": "cudaEventSynchronize",
    "query": "cudaEventQuery",
    "use": "cudaSetDevice",
}


@functools.cache
def functions() -> abi.DeviceRecord | None:
    """Those of the library that torch has loaded; None where there is none, or it is part of another one."""
    path = _loaded("libcudart.so")
    try:
        library = ctypes.CDLL(path) if path is not None else None
        if library is None:
            return None
        found = {field: ctypes.cast(library[name], ctypes.c_void_p) for field, name in _NAMES.items()}
    except (OSError, AttributeError):
        return None
    return abi.DeviceRecord(**{field: pointer.value for field, pointer in found.items()})


def _loaded(name: str) -> str | None:
    """The path of a library of this process."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            paths = (line.split(maxsplit=5)[-1].strip() for line in lines)
            return next((path for path in paths if path.rpartition("/")[2].startswith(name)), None)
    except OSError:
        return None
