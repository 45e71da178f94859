"""What a run has moved, waited for, and holds. Plain numbers, made when asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Stats:
    """Totals since `shard()`; divide by `steps`, or subtract an earlier one (`now - before`), for a rate.

    - `sent`, `received`: bytes by kind (``reduce``: gradients, ``gather``: parameters of stage 3,
      ``publish``: updated parameters of stages 1 and 2, ``collect``, ``broadcast``).
    - `between`: of `sent`, what went to ranks of other nodes, by kind; the rest stayed inside the node.
    - `uncompressed`: what `sent` would be without codecs; `error`: by codec, the norm of what it lost of a
      step's gradient over the gradient's norm, measured in every 16th step.
    - `waited`: seconds this rank waited for others, by kind.
    - `live`, `peak`: bytes on this rank by kind (``parameters``, ``gradients``, ``state``, ``gathered``,
      ``buckets``; with offload ``host``, ``staging``, ``disk``). Gradients of one rank, which the loop drops,
      are looked at when a backward ends.
    - `norm`: of the last gradient, before clipping, where `clip_norm` measures it.
    - `updates`: steps by how the host's updates ran: ``early`` (during backward, before the norm was known),
      ``late`` (after it, behind the next forward), ``undone`` (early, taken back because the norm exceeded
      the limit, and done again).
    - `sync`: the policy in force, the same on all ranks; `switches`: each change of it and why, a line each.
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
            switches=self.switches[len(before.switches) :],
            between=less(self.between, before.between),
            uncompressed=less(self.uncompressed, before.uncompressed),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
