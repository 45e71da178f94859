"""Reports what a run has moved, waited for, and holds. Plain numbers, made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeroshard.sizes import show_bytes

# What ranks wait for beside what is sent.
WAITS = {
    "agree": "until all ranks have given a word",
    "fence": "until peers have read rows that change next",
    "barrier": "until all ranks have come",
    "fill": "until peers have read a buffer",
}
LASTING = ("parameters", "gradients", "state")


@dataclass(frozen=True)
class Stats:
    """Totals since `shard()`; divide by `steps`, or subtract an earlier one (`now - before`), for a rate.
    `print()` shows them as tables.

    - `sent`, `received`: bytes by kind (``reduce``: gradients, ``gather``: parameters of stage 3,
      ``publish``: updated parameters of stages 1 and 2, ``collect``, ``broadcast``).
    - `between`: of `sent`, what went to ranks of other nodes, by kind; the rest stayed inside the node.
    - `uncompressed`: what `sent` would be without codecs; `error`: by codec, the norm of what it lost of a
      step's gradient over the gradient's norm, measured in every 16th step.
    - `waited`: seconds this rank waited for others, by kind: those of `sent`, and ``agree`` (all ranks give
      a word and get everybody's: whether gradients are finite, a norm, options), ``fence`` (until peers have
      read the rows that are about to change, before a step), ``barrier`` (until all have come), ``fill``
      (until a buffer that peers read is free).
    - `live`, `peak`: bytes on this rank now, and at most since `shard()` or `run.reset_peak()`, by kind
      (``parameters``, ``gradients``, ``state``, ``gathered``, ``buckets``; with offload ``host``,
      ``staging``, ``disk``). Gradients of one rank, which the loop drops, are looked at when a backward ends.
    - `norm`: of the last gradient, before clipping, where `clip_norm` measures it.
    - `updates`: steps by how the host's updates ran: ``early`` (during backward, before the norm was known),
      ``late`` (after it, behind the next forward), ``undone`` (early, taken back because the norm exceeded
      the limit, and done again).
    - `sync`: the policy in force, the same on all ranks; `switches`: its last 200 changes and why.
    - `planned`: under a plan, what it foresaw by kind, to hold against `peak`: the lasting kinds,
      ``activations``, and ``device`` for all of the device at its fullest.
    - `data_parallel`: bytes that plain data-parallel training of this model would hold (parameters,
      gradients, state).
    """

    steps: int
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    data_parallel: int = 0
    norm: float = 0.0
    updates: dict[str, int] = field(default_factory=dict)
    sync: str = ""
    switches: tuple[str, ...] = ()
    planned: dict[str, int] = field(default_factory=dict)
    between: dict[str, int] = field(default_factory=dict)
    uncompressed: dict[str, int] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)

    @property
    def inside(self) -> dict[str, int]:
        """Of `sent`, what went to ranks of the same node, by kind."""
        return {kind: count - self.between.get(kind, 0) for kind, count in self.sent.items()}

    def __sub__(self, before: Stats) -> Stats:
        """What happened between two moments; what is no total, such as live bytes, is the later one's."""

        def less(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
            return {kind: value - then.get(kind, 0) for kind, value in now.items()}

        return replace(
            self,
            steps=self.steps - before.steps,
            sent=less(self.sent, before.sent),
            received=less(self.received, before.received),
            waited=less(self.waited, before.waited),
            updates=less(self.updates, before.updates),
            switches=tuple(line for line in self.switches if line not in before.switches),
            between=less(self.between, before.between),
            uncompressed=less(self.uncompressed, before.uncompressed),
        )

    def __str__(self) -> str:
        """Tables for people: what travelled, and what is held."""
        sizes = {"live": self.live, "peak": self.peak} | ({"planned": self.planned} if self.planned else {})
        moved = {"sent": (self.sent, show_bytes), "received": (self.received, show_bytes)}
        lasting = sum(self.live.get(kind, 0) for kind in LASTING)
        words = [f"{kind}: {why}" for kind, why in WAITS.items() if self.waited.get(kind)]
        lines = [
            f"{self.steps} steps" + (f", {self.sync}" if self.sync else ""),
            *(_table(moved | {"waited": (self.waited, "{:,.3f} s".format)}) or ["nothing has travelled"]),
            *(["waits without bytes: " + "; ".join(words)] if words else []),
            *_table({name: (column, show_bytes) for name, column in sizes.items()}),
            f"{', '.join(LASTING)}: {show_bytes(lasting)}; unsharded {show_bytes(self.data_parallel)}",
            *self.switches,
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """Each number by a name of its own, such as ``live/state``, for what draws curves.

        >>> Stats(2, live={"state": 8}).scalars()
        {'steps': 2, 'live/state': 8, 'data_parallel': 0, 'norm': 0.0}
        """
        told: dict[str, float] = {}
        for name, value in self.as_dict().items():
            if isinstance(value, dict):
                told |= {f"{name}/{kind}": number for kind, number in value.items()}
            elif isinstance(value, (int, float)):
                told[name] = value
        return told


def _table(columns: Mapping[str, tuple[Mapping[str, float], Callable[[float], str]]]) -> list[str]:
    """A line for each kind of which some column has anything: names to the left, figures to the right."""
    kinds = dict.fromkeys(kind for figures, _ in columns.values() for kind, n in figures.items() if n)
    rows = [["", *columns]] if kinds else []
    for kind in kinds:
        rows.append([kind, *(show(n) if (n := had.get(kind)) else "" for had, show in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]
