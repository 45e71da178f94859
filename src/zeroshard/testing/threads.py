"""Ranks as threads of this process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.extend import StateError

from .processes import Outcome, RankFailure, summary


def run_threads(size: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """`function(*args)` on `size` threads of this process, each a rank of one group; results in rank order.

    Cheap for many ranks, and a debugger sees them all. CPU only, torch 2.13 or newer. Threads share torch's
    random numbers: draw from generators of your own.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11: leaving a group then fails, or crashes
        raise StateError(
            f"torch {torch.__version__} has no groups of threads that can be left: take torch 2.13, or "
            "Ranks(...), which starts processes."
        )
    outcomes: list[Outcome | None] = [None] * size
    # Joining a group wraps the hook, and leaving does not unwrap it: put it back when all ranks have joined.
    joined = threading.Barrier(size, action=partial(setattr, sys, "excepthook", sys.excepthook))
    store = dist.HashStore()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    threaded._install_threaded_pg()
    try:

        def call(rank: int) -> Any:
            dist.init_process_group("threaded", store=store, rank=rank, world_size=size)
            joined.wait(timeout)
            result = function(*args)
            dist.destroy_process_group()
            return result

        body = partial(_thread, threaded.ProcessLocalGroup, outcomes, call)
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    told = [o.trace if o else "no answer in time" for o in outcomes]
    failed = [f"--- rank {rank}\n{text}" for rank, text in enumerate(told) if text]
    if failed:
        raise RankFailure(summary(function, failed, size))
    return [outcome.value for outcome in outcomes if outcome is not None]


def _thread(group: Any, outcomes: list[Outcome | None], call: Callable[[int], Any], rank: int) -> None:
    try:
        outcomes[rank] = Outcome(call(rank))
    except BaseException as error:
        outcomes[rank] = Outcome.of(error)
        group.exception_handle(error)  # wakes the ranks that wait for this one
