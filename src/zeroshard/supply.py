"""What the units compute with: parameters that their owners hand on after an update, and that are gathered
ahead of use. `runtime` says when.

[Note: in turn] Over a transport that keeps one order, whatever peers read passes through an operation that
this rank starts. So a unit is handed on when its own update on the host is done, and forward begins while
later ones are under way. Stages 1 and 2 hand on all units in one order, each at the latest when forward needs
it, and the rest when forward is over: before anything else is sent, and whichever units a rank has used.
Where forward itself begins the next updates, a step ahead, those before are waited for first.
"""

from __future__ import annotations

from collections.abc import Sequence

from .comm import Transport
from .host import HostUpdates
from .live import Course, LiveUnit
from .param import Bundle
from .spans import span


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
        self._due: list[LiveUnit] = []  # those with anything to hand on, and how many of them were
        self._handed_on = 0
        self._place: dict[int, int] = {}
        self._in_turn = False

    def adopt(self, units: Sequence[LiveUnit]) -> None:
        bundles = [bundle for unit in units for bundle in unit.bundles]
        self.overlaps = self.overlaps or any(b.rests.rows != "device" for b in bundles)
        self._refreshed = [b for b in bundles if b.refreshes]  # in `publish`: often none of many
        self._due = [unit for unit in units if any(map(self._hands_on, unit.bundles))]
        self._handed_on = len(self._due)
        self._place = {id(unit): place for place, unit in enumerate(self._due)}
        # Codes are made of all rows at once. Without one order peers read rows, and layers of a unit that is
        # bypassed homes, whenever they like.
        alone = self._transport.size == 1 or self._transport.keeps_order
        self._in_turn = alone and all(bundle.coded is None for bundle in bundles)

    def _hands_on(self, bundle: Bundle) -> bool:
        travels = bundle.region is not None or bundle.coded is not None
        return bundle.exchanges or (travels and self.overlaps and bundle.resident)

    def changed(self) -> None:
        """Homes were written by someone else than the optimizer."""
        self.stale, self._rewritten, self.repeats = True, True, False

    def publish(self, updates: HostUpdates | None, in_turn: bool = False) -> None:
        """Let the peers have this rank's newest rows. Not done by `step`: loops write parameters after it.
        `in_turn`: a forward begins, and hands units on as it needs them; see [Note: in turn]."""
        if self.stale:
            self.hand_on(updates)  # what a forward that was interrupted has left
            in_turn = in_turn and self._in_turn and not self._rewritten
            if updates is not None:
                in_turn = in_turn and not updates.ahead
                if not in_turn:
                    updates.drain()
            for bundle in self._refreshed:
                bundle.refresh(self._rewritten, self.repeats)
            self._rewritten = self.repeats = False
            self._transport.open()
            self.epoch += 1
            self.stale = False
            self._handed_on = 0
        if not in_turn or updates is None:
            self.hand_on(updates)

    def hand_on(self, updates: HostUpdates | None, until: LiveUnit | None = None) -> None:
        """Units up to this one, or all that are left."""
        stop = len(self._due) if until is None else self._place.get(id(until), -1) + 1
        for unit in self._due[self._handed_on : stop]:
            self._handed_on += 1
            for part in unit.parts:
                if updates is not None and not part.holding:
                    updates.wait(part)
            for bundle in unit.bundles:
                bundle.exchange()
                if bundle.resident and self.overlaps:
                    bundle.gather(self.epoch)

    def bring(self, unit: LiveUnit, updates: HostUpdates | None, backward: bool) -> None:
        """Gather a unit, start on the ones that come next, and wait for it."""
        with span(f"gather {unit.label}"):
            self._fetch(unit, updates, backward)

    def _fetch(self, unit: LiveUnit, updates: HostUpdates | None, backward: bool) -> None:
        if updates is not None and not backward:
            for part in unit.parts:
                if not part.holding:
                    updates.ask(part)
        self._gather(unit, updates)
        if self.overlaps:
            for ahead in self.course.upcoming(unit, backward):
                if not all(part.holding or part.done.is_set() for part in ahead.parts):
                    break  # and none after it: all ranks gather in one order
                self._gather(ahead, updates)
        for bundle in unit.bundles:
            bundle.finish()

    def _gather(self, unit: LiveUnit, updates: HostUpdates | None) -> None:
        self.hand_on(updates, unit)
        for bundle in unit.bundles:
            bundle.gather(self.epoch)
