"""Names spans of a run for `torch.profiler`. Without a profiler they cost nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function


def span(name: str) -> AbstractContextManager[object]:
    """A block that a profile shows as ``zeroshard.<name>``."""
    return (
        record_function(f"zeroshard.{_plain(name)}") if torch.autograd._profiler_enabled() else nullcontext()
    )


def _plain(name: str) -> str:
    """In ASCII: `export_chrome_trace` leaves out what has any other letter in its name."""
    return name.replace("…", "...").encode("ascii", "backslashreplace").decode()
