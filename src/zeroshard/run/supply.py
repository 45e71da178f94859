"""What the units compute with: parameters that their owners hand on after an update, and that are gathered
ahead of use. `runtime` says when."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack

from zeroshard.comm import Fetch, Transport
from zeroshard.errors import StateError
from zeroshard.host.updates import HostUpdates
from zeroshard.life.param import Bundle
from zeroshard.life.spans import span

from .live import Course, LiveUnit


class Supply:
    """Publishes this rank's rows and brings units what the peers have published. `updates`, where a call
    takes them, are the host's: weights wait for those under way."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.course = Course()
        self.stale = True  # homes are newer than what the leaves hold
        self._rewritten = self.repeats = False  # by another than the optimizer; with what peers know already
        self.epoch = 0
        # Over shared memory a gather is a copy by this thread: starting it early hides nothing.
        self.overlaps = transport.overlaps
        self._refreshed: list[Bundle] = []
        self._handed_on: list[Bundle] = []
        self._small: list[Bundle] = []  # fetched by one call, when the first of them is wanted
        self._fetches: list[Fetch] = []
        self._waits = True  # for all of the host's updates before a forward
        self._moves = True  # parameters come from elsewhere before a unit computes

    def adopt(self, bundles: Sequence[Bundle]) -> None:
        self.overlaps = self.overlaps or any(b.rests.rows != "device" for b in bundles)
        self._refreshed = [b for b in bundles if b.refreshes]  # in `publish`: often none of many
        # [Note: in turn] Peers read rows, or codes of all of them, whenever they like. Where nobody does (one
        # rank, stage 0) each unit waits for its own update, and forward begins while later ones are under
        # way. Not over transports of the CPU: layers of a bypassed unit compute with homes, which change.
        alone = self._transport.size == 1 or self._transport.keeps_order
        read = any(b.region is not None or b.coded is not None for b in bundles)
        self._waits = read or not alone
        self._moves = read or any(not b.resident for b in bundles)
        self._handed_on = [b for b in bundles if b.exchanges or (self.overlaps and b.resident)]
        self._small = [] if self.overlaps else [b for b in bundles if b.is_small]

    def changed(self) -> None:
        """Homes were written by someone else than the optimizer."""
        self.stale, self._rewritten, self.repeats = True, True, False

    def publish(self, updates: HostUpdates | None) -> None:
        """Let the peers have this rank's newest rows. Not done by `step`: loops write parameters after it."""
        if self._moves:
            _refuse_transforms()
        if self.stale:
            if updates is not None and (self._waits or self._rewritten or updates.ahead):
                updates.drain()
            for bundle in self._refreshed:
                bundle.refresh(self._rewritten, self.repeats)
            self._rewritten = self.repeats = False
            self._transport.open()
            self.epoch += 1
            self.stale = False
            for bundle in self._handed_on:
                bundle.exchange()
                if bundle.resident and self.overlaps:
                    bundle.gather(self.epoch)

    def bring(self, unit: LiveUnit, updates: HostUpdates | None, backward: bool) -> None:
        """Gather a unit, start on the ones that come next, and wait for it."""
        with span(f"gather {unit.label}"):
            here = not self.overlaps and all(bundle.epoch == self.epoch for bundle in unit.bundles)
            if not here or not unit.stays:
                self._fetch(unit, updates, backward)

    def _fetch(self, unit: LiveUnit, updates: HostUpdates | None, backward: bool) -> None:
        if unit.parts and updates is not None and not backward:
            for part in unit.parts:
                if not part.holding:
                    updates.ask(part)
        for bundle in unit.bundles:
            if bundle.epoch < self.epoch and bundle in self._small:
                self._fetch_small()
            bundle.gather(self.epoch)
        if self.overlaps:
            for ahead in self.course.upcoming(unit, backward):
                if all(part.holding or part.done.is_set() for part in ahead.parts):
                    for bundle in ahead.bundles:
                        bundle.gather(self.epoch)
        for bundle in unit.bundles:
            bundle.finish()

    def _fetch_small(self) -> None:
        """All of the small ones: with many of them, calls and not bytes take the time."""
        if not self._fetches:
            self._fetches = [bundle.as_fetch() for bundle in self._small]
        with torch.inference_mode(False), torch.no_grad():
            self._transport.gather_all("publish", self._fetches)
        for bundle in self._small:
            bundle.epoch = self.epoch


def _refuse_transforms() -> None:
    """Inside of `torch.func.grad` and its like every tensor that is made is one of theirs, without memory."""
    level = peek_interpreter_stack()
    if level is not None and level.key() != TransformType.Vmap:
        raise StateError(
            "a forward inside torch.func (grad, vjp, jvp, jacrev, hessian) of a sharded model: parameters "
            "cannot be gathered there. Use torch.autograd.grad() or torch.autograd.functional, or transform "
            "a copy of the model made inside `with run.gathered():`."
        )
