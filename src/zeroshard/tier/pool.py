"""Buffers of exact size that are lent and given back, and a ledger of how many bytes exist for what.

Why not the allocators: on the CPU a fresh 128 MiB tensor costs 61 ms of page faults; on the GPU buffers of
changing sizes fragment. The sizes that a run needs are few and known, so nothing grows after the first step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from zeroshard.errors import PlanError
from zeroshard.sizes import show_apart, show_bytes

Kind = Literal["parameters", "gradients", "state", "gathered", "buckets", "host", "staging", "disk"]
KINDS: tuple[Kind, ...] = (
    "parameters",
    "gradients",
    "state",
    "gathered",
    "buckets",
    "host",
    "staging",
    "disk",
)


class Ledger:
    """Live and peak bytes by kind. Whoever makes a lasting tensor books it here."""

    def __init__(self) -> None:
        self.live: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._caps: list[tuple[tuple[str, ...], int, str, int]] = []

    def cap(self, kinds: Sequence[str], most: int, what: str, aside: int = 0) -> None:
        """These kinds together may not take more than so many bytes: a plan's limit, named `what`. `aside`:
        bytes of them that do not pass this ledger, or are still to come."""
        self._caps.append((tuple(kinds), most, what, aside))

    def book(self, kind: Kind, nbytes: int) -> None:
        for kinds, most, what, aside in self._caps:
            after = sum(self.live[k] for k in kinds) + aside + nbytes
            if kind in kinds and nbytes > 0 and after > most:
                would, has = show_apart(after, most)
                raise PlanError(
                    f"{show_bytes(nbytes)} more of {kind} would make {would}, and {what} is {has}. "
                    "Nothing was allocated for them."
                )
        self.live[kind] += nbytes
        self.peak[kind] = max(self.peak[kind], self.live[kind])

    def forget_peak(self) -> None:
        """The most from now on."""
        self.peak = dict(self.live)


class Pool:
    """Lends flat buffers; a buffer given back is lent again to whoever asks for the same size and dtype."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self.device, self._ledger = device, ledger
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self.lent: dict[int, object] = {}  # address of a lent buffer -> who has it

    def take(self, numel: int, dtype: torch.dtype, owner: object) -> Tensor:
        idle = self._idle[numel, dtype]
        if idle:
            buffer = idle.pop()
        else:
            self._ledger.book("gathered", numel * dtype.itemsize)
            # Plain memory even when asked for inside inference mode: a buffer outlives the caller's mode.
            with torch.inference_mode(False):
                buffer = torch.empty(numel, dtype=dtype, device=self.device)
        self.lent[buffer.data_ptr()] = owner
        return buffer

    def give(self, buffer: Tensor) -> None:
        del self.lent[buffer.data_ptr()]
        self._idle[buffer.numel(), buffer.dtype].append(buffer)

    @property
    def known(self) -> set[int]:
        """Addresses of all buffers."""
        return {buffer.data_ptr() for idle in self._idle.values() for buffer in idle} | self.lent.keys()

    def drop(self, but: Collection[int] = ()) -> set[int]:
        """Let the idle buffers go, `but` those at these addresses. Returns the addresses of what went:
        whoever keeps views of it must let them go, too."""
        before = self.known
        for key, idle in self._idle.items():
            kept = [buffer for buffer in idle if buffer.data_ptr() in but]
            self._ledger.book("gathered", sum(map(_nbytes, kept)) - sum(map(_nbytes, idle)))
            self._idle[key] = kept
        return before - self.known


def _nbytes(buffer: Tensor) -> int:
    return buffer.nbytes
