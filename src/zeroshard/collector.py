"""Pauses Python's cycle collector while work makes thousands of objects and keeps them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing in here is searched for cycles: among all objects of a large model that takes longer, again and
    again, than to make them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
