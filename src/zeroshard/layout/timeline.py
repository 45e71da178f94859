"""Counts the bytes of one training step over time: forward and backward of every segment, and the update.

Integers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .memory import MemoryModel
from .specs import WIDTHS, ParamSpec

# On the device, in the order in which a table shows them.
KINDS = (
    "parameters",
    "gradients",
    "state",
    "gathered",
    "buckets",
    "arriving",
    "activations",
    "update",
    "inputs",
    "workspace",
    "margin",
)
# Where a plan is for the whole of a device: CUDA's context and NCCL's buffers, which no allocator gives out.
OUTSIDE = ("context", "nccl")
IN_FLIGHT = 7  # parts of the host update that may be on the device at a time where gradients are not kept


@dataclass(frozen=True)
class StepSegment:
    """A part of forward in one unit (the root: several).

    - `saved`: bytes that autograd keeps from here until backward comes back.
    - `forward`, `backward`: the most that lives meanwhile beyond what was saved before, and beyond what is
      still saved.
    - `flops`, `back`: operations of its forward, and of its backward with what is recomputed there.
      `moved`, `moved_back`: bytes that all else reads and writes. `kernels`, `kernels_back`: operations of
      both kinds.
    - `order`, `levels`: weights in the order in which their gradients arrive, and the most that lives as for
      `backward` before the first, after the first, and so on. Empty where no step was traced.
    - `spoils`: its forward writes what it was given, so that it cannot be recomputed.
    - `entered`: in how many units forward is, this one included, where it begins with entering its unit; 0
      where forward goes on in it. `needs`: units whose weights backward wants again, in the order of forward.
    """

    unit: str
    saved: int = 0
    forward: int = 0
    backward: int = 0
    flops: int = 0
    back: int = 0
    moved: int = 0
    moved_back: int = 0
    kernels: int = 0
    kernels_back: int = 0
    order: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    spoils: bool = False
    entered: int = 0
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepMoment:
    """What lives on the device at one point of a step, by kind."""

    where: str
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


def step_moments(
    setup: MemoryModel, segments: Sequence[StepSegment], inputs: int = 0, unsynced: bool = False
) -> list[StepMoment]:
    """One step in time, of several micro-batches the last. `inputs`: bytes of the batch and of the model's
    buffers. Without segments: no activations. `unsynced`: unsharded parameters hold what backward passes
    without synchronisation have accumulated."""
    held = setup.held
    chain = list(segments) or [StepSegment(unit.name) for unit in setup.units]
    lasting = {
        "parameters": held.parameters,
        "state": held.state,
        "gathered": held.gathered,
        "buckets": held.buckets + setup.stage,
        "inputs": inputs,
    }
    # Gradients that do not travel are there as they land; those of the step before all the time.
    settled = held.gradients if setup.reduces else held.gradients - _once(setup)
    moments, saved = [], 0
    before = {"gradients": settled, "arriving": _unsynced(setup) if unsynced else 0}
    for segment in chain:
        kinds = lasting | before | {"activations": saved + max(segment.forward, segment.saved)}
        moments.append(_moment(f"forward of {_label(segment)}", kinds))
        saved += segment.saved
    fullest, landed_last = _arrivals(setup, chain, unsynced)
    repeated = repeated_units(setup, unsynced)
    kept = 0  # the gradient of what the last of the repeated units returned
    for again in (False, True):
        for index in reversed(range(len(chain))):
            segment, (arriving, landed, level) = chain[index], fullest[index]
            if again and segment.unit not in repeated:
                continue
            waiting = landed_last + _in_flight(setup, segment.unit) if again else landed
            kinds = lasting | {
                "gradients": settled + waiting,
                "arriving": arriving,
                "activations": saved + kept + level,
            }
            moments.append(_moment(f"{'second ' * again}backward of {_label(segment)}", kinds))
            if segment.unit in repeated and not again:  # what it was given stays
                kept = kept or segment.saved
            else:
                saved -= segment.saved
    kinds = lasting | {"gradients": settled + landed_last, "update": setup.update}
    return [*moments, _moment("the update", kinds)]


def repeated_units(setup: MemoryModel, unsynced: bool) -> frozenset[str]:
    """Units whose backward runs twice. The sum of several micro-batches cannot be brought again."""
    return frozenset(() if unsynced else setup.repeated)


def _in_flight(setup: MemoryModel, unit: str) -> int:
    """Bytes of a unit's gradients that are on their way to the host at a time."""
    sizes = [b.full * WIDTHS[b.landed] for b in setup.buckets if b.part is not None and b.part.unit == unit]
    return min(sum(sizes), IN_FLIGHT * max(sizes, default=0))


def peak_of(moments: Sequence[StepMoment]) -> StepMoment:
    """The first moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total)


def _moment(where: str, kinds: dict[str, int]) -> StepMoment:
    return StepMoment(where, {kind: kinds.get(kind, 0) for kind in KINDS})


def _label(segment: StepSegment) -> str:
    return f"`{segment.unit}`" if segment.unit else "the root"


def _once(setup: MemoryModel) -> int:
    """Bytes of a whole gradient, but for what ends on the host."""
    alone = [b for b in setup.buckets if b.part is None]
    return sum(w.numel * WIDTHS[b.landed] for b in alone for w in b.weights if w.used)


def _unsynced(setup: MemoryModel) -> int:
    """Bytes of a whole gradient on unsharded parameters."""
    return sum(w.numel * WIDTHS[setup.sum_dtype(w)] for w in setup.trainable.values() if w.used)


class _Arrivals:
    """Gradients on their way: `now` bytes wait on unsharded parameters for their bucket to fill and to
    have its turn, or are held behind it; on one rank `landed` bytes have become gradients of sharded
    parameters, or are flat ones for the host. `unsynced`: all unsharded parameters hold a sum from the
    beginning, to which the new ones are added."""

    def __init__(self, setup: MemoryModel, unsynced: bool) -> None:
        self.setup, self.now, self._due = setup, _unsynced(setup) if unsynced else 0, 0
        self._added = not unsynced
        self._shown = self._flat = self._held = 0
        self._arriving = setup.arriving
        self._holding = setup.holding_sums if unsynced else setup.holding
        self._missing = [len(bucket.weights) for bucket in setup.buckets]
        self._waiting = [0] * len(self._missing)
        self._repeated = repeated_units(setup, unsynced)  # their gradients do not wait for the norm

    @property
    def landed(self) -> int:
        return self._shown + self._flat

    def add(self, weight: ParamSpec) -> tuple[int, int]:
        """One more; returns what waits and what has landed at the moment when its bucket leaves: on one rank
        a flat copy of it is there beside the gradients that it is made of."""
        setup, (number, size) = self.setup, self._arriving[weight.name]
        if not self._added:
            size = weight.numel * WIDTHS[setup.sum_dtype(weight)]
        bucket = setup.buckets[number]
        if not setup.reduces and bucket.part is None:
            self._shown += weight.numel * WIDTHS[bucket.landed]
            self.now -= 0 if self._added else size
            return self.now, self.landed
        self.now += size if self._added else 0
        most = self.now, self.landed
        self._waiting[number] += size
        self._missing[number] -= 1
        while setup.reduces and self._due < len(self._missing) and self._missing[self._due] == 0:
            unsharded_params = self._waiting[self._due]
            self.now -= unsharded_params + self._held
            self._held = unsharded_params if self._holding[self._due] else 0
            self.now, self._due = self.now + self._held, self._due + 1
        if not setup.reduces and self._missing[number] == 0:
            most = self._flatten(number)
        return most

    def end(self) -> list[tuple[int, int]]:
        """Backward has ended: the same of each bucket that did not fill, since parts of it were not used."""
        if self.setup.reduces:
            return []  # they are laid out in wires that are there
        left = [number for number, missing in enumerate(self._missing) if missing and self._waiting[number]]
        return [self._flatten(number) for number in left]

    def _flatten(self, number: int) -> tuple[int, int]:
        bucket = self.setup.buckets[number]
        flat = bucket.full * WIDTHS[bucket.landed]
        most = self.now, self.landed + flat
        self.now -= self._waiting[number]
        if bucket.part is None or bucket.part.unit not in self._repeated:
            self._flat = _kept(self.setup, self._flat, flat)
        return most


def _arrivals(
    setup: MemoryModel, chain: Sequence[StepSegment], unsynced: bool
) -> tuple[list[tuple[int, int, int]], int]:
    """For each segment's backward, at its fullest: the bytes of gradients that wait on unsharded parameters
    and that have landed, and of activations beyond the saved ones. Then what has landed in the end."""
    # Of a traced step, backward may not come to a segment at all: the root's before the first unit, say.
    traced = any(segment.levels for segment in chain)
    guessed = [[] for _ in chain] if traced else _weights_by_segment(setup, chain)
    by_name = setup.trainable
    state, result = _Arrivals(setup, unsynced), [(0, 0, 0)] * len(chain)
    for index in reversed(range(len(chain))):
        segment = chain[index]
        if segment.levels:  # a new gradient is among the activations until it arrives
            points = [(state.now, state.landed, segment.levels[0])]
            for name, level in zip(segment.order, segment.levels[1:], strict=True):
                if name in by_name:
                    leaving = state.add(by_name[name])
                    if not setup.reduces:
                        points.append((*leaving, level))
                points.append((state.now, state.landed, level))
        else:
            points = [(state.now, state.landed, segment.backward)]
            for weight in sorted(guessed[index], key=lambda w: -w.number):
                points.append((*state.add(weight), segment.backward))
        if index == 0:
            points += [(*leaving, points[-1][-1]) for leaving in state.end()]
        result[index] = max(points, key=sum)
    return result, state.landed


def _kept(setup: MemoryModel, flat: int, size: int) -> int:
    """One rank, offload: a gradient stays on the device until the norm is known where updates may have to
    be taken back, and where the loop clips it; else a few are on their way to the host."""
    offload, clip = setup.options.offload, setup.options.clip_norm
    if setup.options.defers:
        return flat + size
    if clip is None or offload is None:
        return max(flat, size)
    if offload.undo and math.isfinite(clip):
        return flat + size
    return max(flat, min(flat + size, IN_FLIGHT * size))


def _weights_by_segment(setup: MemoryModel, chain: Sequence[StepSegment]) -> list[list[ParamSpec]]:
    """Where each trainable weight's gradient arrives. The root's: with its last segment what is registered
    behind the units (a head), with its first what stands before them (an embedding)."""
    result: list[list[ParamSpec]] = [[] for _ in chain]
    first: dict[str, int] = {}
    for index, segment in enumerate(chain):
        first.setdefault(segment.unit, index)
    roots = [index for index, segment in enumerate(chain) if not segment.unit] or [0]
    in_units = [w.number for unit in setup.units if unit.name for w in unit.weights]
    middle = max(in_units, default=-1)
    for unit in setup.units:
        for weight in unit.weights:
            if weight.trainable:
                root = roots[-1] if weight.number > middle else roots[0]
                result[first.get(unit.name, 0) if unit.name else root].append(weight)
    return result
