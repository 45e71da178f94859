"""Ranks that are all inside collectives of torch, each in another one.

There nobody waits in a transport of ours who could tell, and torch would wait for half an hour. It keeps a
record of the collectives that it has started, by group and number, and the guards of all ranks compare these
records once every rank has been inside torch for a while. Two things are then a fact and not a guess: ranks
whose collective of one number differs, and ranks of which each is ahead of the other in some group. A rank
that is merely ahead may have left a broadcast early, and is no mismatch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

__all__ = ["CALLED", "Started", "differ", "named", "started"]

CALLED = " (called at "  # in a label: where the user's program asks for it

# By group: the number of the last collective that a rank has started, and what it is.
Started = Mapping[str, Sequence[Any]]

_SIZED = {"all_reduce"}  # where different sizes are different collectives


def started() -> dict[str, list[Any]]:
    """This process's; empty where torch keeps no record of them. The newest is the last."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    try:
        return _read(json.loads(dump()).get("entries", ())) if dump is not None else {}
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):  # of another torch
        return {}


def _read(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {group: [0, ""] for group in _groups() if entries}
    for entry in entries:
        if not entry["is_p2p"]:
            group = entry["process_group"][0]
            found.pop(group, None)
            found[group] = [entry["collective_seq_id"], _what(entry)]
    return found


def _groups() -> list[str]:
    """Those that this rank is in."""
    return [] if not dist.is_initialized() else [str(name) for name in c10d._world.pg_names.values()]


def _what(entry: Mapping[str, Any]) -> str:
    name: str = entry["profiling_name"].rpartition(":")[2]
    return f"{name} of {entry['input_sizes']}" if name in _SIZED else name


def named(label: str, told: Started) -> str:
    """A label that says what torch waits for rather than that it does, and in which of several groups."""
    name, called, place = label.partition(CALLED)
    group, (_, newest) = list(told.items())[-1] if told else ("", (0, ""))
    if newest and ("wait_tensor" in name or name.startswith("a collective of torch")):
        name = f"torch.distributed's {newest}"
    where = f" in group {group}" if len(told) > 1 else ""
    return f"{name}{where}{called}{place}"


def differ(told: Sequence[Started]) -> bool:
    """Whether the ranks' last collectives cannot be the same ones."""
    groups = sorted({group for each in told for group in each})
    return any(_other(told, group) for group in groups) or any(
        _ahead(list(_numbers(told, *pair))) for pair in combinations(groups, 2)
    )


def _other(told: Sequence[Started], group: str) -> bool:
    """Whether ranks did different things under one number."""
    numbered: dict[int, str] = {}
    last = [each[group] for each in told if group in each]
    return any(numbered.setdefault(number, what) != what for number, what in last)


def _numbers(told: Sequence[Started], one: str, other: str) -> Iterator[tuple[int, int]]:
    for each in told:
        if one in each and other in each:
            yield each[one][0], each[other][0]


def _ahead(numbers: list[tuple[int, int]]) -> bool:
    """Whether some rank is ahead of another in the first group and behind it in the second."""
    least: dict[int, int] = {}
    for one, other in numbers:
        least[one] = min(other, least.get(one, other))
    most = {one: max(b for a, b in numbers if a == one) for one in least}
    high = 0
    for below, above in pairwise(sorted(least)):
        high = max(high, most[below])
        if least[above] < high:
            return True
    return False
