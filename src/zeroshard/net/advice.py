"""Which strategy suits a link: a pure function of what was measured, the model's size and the step's length.

An estimate: exchanges take their bytes at the rate that a rank reached while all ranks sent, and their
messages at the latency of the slowest link. Reductions of a step run beside its backward pass, which is two
thirds of its computation; a delayed update gives them the whole of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.codec import Int8, TopK
from zeroshard.config import Numerics
from zeroshard.sizes import show_bytes

from .links import Links

BACKWARD = 2 / 3
BUCKET = 25 * 2**20  # bytes of a message
TOLERATED = 0.1  # of a step, beyond the computation: up to this, the more faithful way is better
MANY = 1 << 20  # elements at which a codec's bytes are read off
STEPS = 16


@dataclass(frozen=True)
class Way:
    """A strategy: what to pass to `shard`, the bytes that a rank sends in a step, the seconds that this
    takes, and those of them that no computation hides."""

    options: str
    numerics: Numerics
    sent: float
    exchange: float
    exposed: float


@dataclass(frozen=True)
class Advice:
    """All ways, the most faithful first, the one to take, and why."""

    ways: tuple[Way, ...]
    best: Way
    reasons: tuple[str, ...]


def advise(links: Links, parameters: float, step: float) -> Advice:
    """`parameters`: of the model, fp32; `step`: seconds that forward and backward compute."""
    share = (links.ranks - 1) / links.ranks
    whole = 4 * parameters * share
    ways = [
        _way(links, step, "stage=2", "exact", whole, whole),
        _way(links, step, 'stage=2, precision="bf16"', "rounding", whole / 2, whole / 2),
    ]
    each = links.ranks // links.node_count
    if links.node_count > 1 and each > 1:
        ways.insert(
            1, _way(links, step, 'stage=2, transport="nodes"', "rounding", whole / each, whole / each)
        )
    small = whole * Int8().wire_bytes(MANY) / (4 * MANY)
    ways += [
        _way(links, step, "stage=2, compress=zs.Int8(), gather=zs.Int8()", "rounding", small, small),
        _way(links, step, "stage=0, sync=zs.Delayed()", "approximate", 2 * whole, 0.0, hidden=1.0),
    ]
    sparse = whole * TopK(ratio=0.01).wire_bytes(MANY) / (4 * MANY)
    ways += [
        _way(links, step, "stage=0, compress=zs.TopK(ratio=0.01)", "approximate", sparse, sparse),
        _way(links, step, f"stage=0, sync=zs.Local(steps={STEPS})", "approximate", 2 * whole / STEPS, 0.0),
    ]
    best = next((way for way in ways if way.exposed <= TOLERATED * step), None)
    if best is None:
        best = min(ways, key=lambda way: way.exposed)
    return Advice(tuple(ways), best, _reasons(links, ways[0], best, step))


def _way(
    links: Links,
    step: float,
    options: str,
    numerics: Numerics,
    gradients: float,
    parameters: float,
    hidden: float = BACKWARD,
) -> Way:
    sent = gradients + parameters
    messages = 2 * max(gradients / BUCKET, 1.0)
    exchange = sent / links.rate + messages * links.latency
    # New parameters are fetched while the first units compute, so a part of forward hides them too.
    room = hidden * step * gradients / sent + (1 - BACKWARD) * step * parameters / sent
    return Way(options, numerics, sent, exchange, max(exchange - room, 0.0))


def _reasons(links: Links, exact: Way, best: Way, step: float) -> tuple[str, ...]:
    speed = f"a rank sends {show_bytes(links.rate)}/s while all send, {1e3 * links.latency:.3g} ms away"
    plain = (
        f"Exact and every step: {show_bytes(exact.sent)} in {exact.exchange:.3g} s, "
        f"{exact.exposed:.3g} s of it beside no computation ({step:.3g} s a step)."
    )
    if best is exact:
        return (f"{speed[0].upper()}{speed[1:]}.", plain, "That is hidden, or nearly: nothing to gain.")
    chosen = (
        f"{best.options}: {show_bytes(best.sent)} in {best.exchange:.3g} s, {best.exposed:.3g} s exposed "
        f"({best.numerics})."
    )
    verdict = (
        "It is the most faithful way that costs at most a tenth of a step."
        if best.exposed <= TOLERATED * step
        else "No way hides the exchange; this one leaves least of it."
    )
    return (f"{speed[0].upper()}{speed[1:]}.", plain, chosen, verdict)
