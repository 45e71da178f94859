"""One per `shard()`: owns the units, the gradients, the updates and the transport, and decides when each of
them acts.

[Note: who stands in the modules] Outside of computation the modules hold the homes, so that
`model.parameters()` means rows with a global meaning. From a unit's first entry to its last exit its modules
hold the leaves. During backward all modules hold leaves, because recomputation calls modules again.

[Note: nested backward] Reentrant checkpointing runs a backward inside a backward, and a callback queued there
fires when the inner one ends. So the outermost is found early, by a hook on the root's output; should that be
missed, an inner end counts as an end, and what comes later is reduced in another round and added: slower, but
the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id
from torch.autograd import Variable
from torch.optim import Optimizer

from zeroshard.comm import Transport
from zeroshard.config import Options
from zeroshard.count.layout import Slot
from zeroshard.count.placement import Placement
from zeroshard.errors import StateError
from zeroshard.host.part import Part
from zeroshard.host.place import Host
from zeroshard.host.updates import HostUpdates
from zeroshard.life.grad import Gradients, LocalGradients
from zeroshard.life.guard import Reader
from zeroshard.life.param import Bundle, Residence
from zeroshard.life.saved import SavedTensors
from zeroshard.life.shard import Faces, Param
from zeroshard.life.spans import span
from zeroshard.life.step import Update, tell_of_no_gradient
from zeroshard.sync import Pace
from zeroshard.tier.pool import Ledger, Pool

from .changes import Changes
from .live import Caller, LiveUnit, after_close, drop_accumulated, wants_all
from .norm import Clipping
from .steps import Steps
from .supply import Supply
from .whole import collect
from .written import Written, attach


class Runtime:
    """See the module's docstring. `hooks` calls `enter`, `leave`, `arrived`, `step`; `api` the rest."""

    def __init__(
        self, options: Options, transport: Transport, faces: Faces, pool: Pool, ledger: Ledger
    ) -> None:
        self.options, self.transport, self.faces = options, transport, faces
        self.pool, self.ledger = pool, ledger
        self.units: list[LiveUnit] = []
        self.params: list[Param] = []
        self.pace: Pace  # owns the gradients, runs the updates
        self.updates: list[Update] = []
        self.host: Host | None = None
        self.placement = Placement(())
        self.clipping = Clipping(options, transport)
        self.buffers: list[Tensor] = []  # what the root's forward broadcasts from rank 0
        self.saved = SavedTensors(pool, self.ensure)
        self.supply = Supply(transport)
        self.sync = True
        self.unsynced = False  # leaves hold gradients that were accumulated under no_sync
        self.steps = Steps()
        self.closed = False
        self.reader: Reader | None = None  # a background save that may still be copying state
        self._active = 0  # units entered and not left
        self._keep_full = False
        self._caller = Caller()
        self._task: int | None = None  # graph task of the backward under way
        self._nested = False
        self._reached = False  # some backward has given some parameter a gradient
        self._stray = False  # a home got a gradient of its own in this backward
        self._recent: list[LiveUnit] = []  # gathered in this backward, oldest first

    # ------------------------------------------------------------------ forward

    def enter(self, unit: LiveUnit) -> None:
        """A module of this unit is about to compute."""
        if unit.depth == 0:
            if self._active == 0:
                self._caller.note()
                self._wake()
            if self._task is not None:
                self._make_room(unit, done=True)  # it is recomputed: the one above it has had its turn
            else:
                unit.follow_homes()
            self._bring(unit)
            if self._task is None:
                self.pace.advance()
                unit.begin()
                self.supply.course.enter(unit)
            self._active += 1
        unit.depth += 1
        if unit.sharded:
            self.saved.push()

    def leave(self, unit: LiveUnit, output: Any = None) -> None:
        """It has computed, or failed."""
        if unit.depth == 0:
            return  # its entry failed: nothing to undo, and the cause must not be hidden by another error
        if unit.sharded:
            self.saved.pop()
        unit.depth -= 1
        if unit.depth:
            return
        self._active -= 1
        fault = None
        if self._task is None:
            fault = unit.fault(output, kept := not unit.sharded or self._kept_for_backward(unit))
            unit.stand_homes()
            if not kept:
                unit.release()
        if self._active == 0:
            self._caller.forget()
            if self._task is None:
                self.supply.course.end(self.options.prefetch if self.supply.overlaps else 0)
        if fault is not None:
            raise fault

    def recover(self) -> None:
        """Leave a forward that was interrupted (see `Caller`), and on one rank a backward that died."""
        if self._active and self._caller.gone:
            for unit in self.units:
                unit.abandon()
            self.saved.abandon()
            self.supply.course.drop()
            self._caller.forget()
            self._active = 0
        if self.transport.size == 1:
            self._abandon()

    def _kept_for_backward(self, unit: LiveUnit) -> bool:
        """The root and the last units are the first that backward needs; dropping them would fetch them
        twice in a row. There is room for as many as are gathered ahead."""
        wanted = torch.is_grad_enabled() and (unit is self.units[0] or unit in self.supply.course.last)
        return wanted or self._keep_full

    @property
    def computing(self) -> bool:
        """Whether a forward is under way."""
        return self._active > 0 and self._task is None and not self._caller.gone

    def _wake(self) -> None:
        """The first unit of a forward: hand on this rank's newest rows, and start to fetch the peers'."""
        if self.closed:
            raise StateError("this run is closed; call zs.shard() again to train on.")
        self._abandon()
        self.changes.look()
        if self._task is None and not self._ahead:
            self._refuse_pending()
            self.notice()
        if self._task is None and not self._keep_full:
            for unit in self.supply.course.last[:-1]:
                if unit is not self.units[0]:
                    unit.release()  # of a forward that no backward has followed yet: their room is wanted
        self.publish()

    def publish(self) -> None:
        """Let the peers have this rank's newest rows, if they changed."""
        self.supply.publish(self._host_updates)

    def _abandon(self) -> None:
        """If a backward died half way: one rank starts afresh; several cannot know what others have sent."""
        if self._task is None or _current_graph_task_id() != -1:
            return
        if self.transport.size > 1 or not isinstance(self.gradients, LocalGradients):
            raise StateError(
                "an earlier backward failed on this rank before its gradients were reduced; restart the "
                "run from a checkpoint."
            )
        self.gradients.abandon(self.unsynced)
        self._end(land=False)

    def _bring(self, unit: LiveUnit) -> None:
        self.supply.bring(unit, self._host_updates, backward=self._task is not None)

    @property
    def bundles(self) -> list[Bundle]:
        return [bundle for unit in self.units for bundle in unit.bundles]

    @property
    def gradients(self) -> Gradients | LocalGradients:
        return self.pace.gradients

    # ------------------------------------------------------------------ backward

    def begin_backward(self) -> None:
        """Called at every sign of a backward; acts on the first."""
        if self.closed:
            raise after_close()
        task = _current_graph_task_id()
        if self._task is not None:
            self._nested = self._nested or task != self._task
            return
        self._task, self._nested, self._stray = task, False, False
        Variable._execution_engine.queue_callback(self.end_backward)
        self.changes.look()
        if self._host_updates is not None:
            self._host_updates.await_unasked()
        for unit in (unit for unit in self.units if unit.depth == 0):
            unit.stand_leaves()

    def arrived(self, unit: LiveUnit, param: Param) -> None:
        """Autograd has accumulated a leaf's gradient."""
        if _current_graph_task_id() != self._task:
            self.begin_backward()
        unit.expected -= 1
        if self.sync:
            self.pace.gradients.arrived(param)
        else:
            self.unsynced = True

    def strayed(self, param: Param, grad: Tensor) -> Tensor:
        """Autograd is about to add to a home; what it shall add instead."""
        self.begin_backward()
        self._stray = True
        self.unsynced = self.unsynced or not self.sync
        gradients = self.gradients
        return gradients.redirect(param, grad) if isinstance(gradients, Gradients) else grad

    def ensure(self, bundle: Bundle) -> None:
        """Autograd unpacks something that lives in this bundle's buffer."""
        if _current_graph_task_id() != self._task:
            self.begin_backward()
        unit = self._unit_of[id(bundle)]
        if not self._recent or self._recent[-1] is not unit:
            self._make_room(unit)
            self._recent.append(unit)
            self._bring(unit)
        elif bundle.residence is not Residence.FULL or bundle.epoch < self.supply.epoch:
            bundle.gather(self.supply.epoch)
            bundle.finish()

    def _make_room(self, coming: LiveUnit, done: bool = False) -> None:
        """Release what backward is done with: units whose gradients are all in, or which have none, and
        unless only the `done` shall go all but the last two."""
        root, keep = self.units[0], []
        for index, unit in enumerate(self._recent):
            old = unit.expected <= 0 or (index < len(self._recent) - 1 and not done)
            if unit is coming or unit is root or unit.depth or not old or self._keep_full:
                keep.append(unit)
            else:
                unit.release()
        self._recent = [unit for unit in dict.fromkeys(keep) if done or unit is not coming]

    def end_backward(self) -> None:
        arrived = self._stray or any(unit.expected != unit.trainable for unit in self.units)
        self._reached = self._reached or arrived
        self._end(land=self.sync and (arrived or self._awaited()))

    def _awaited(self) -> bool:
        """Whether peers may wait for gradients of a backward that had none here: an expert or an adapter that
        this rank's batch did not come to. Who asks for gradients of inputs alone waits for nobody."""
        return self.transport.size > 1 and any(p.leaf.requires_grad for p in self.params) and wants_all()

    def _end(self, land: bool) -> None:
        with span("land"):
            if land:
                self.pace.ended()
                if (self._nested or self._stray) and self.transport.size > 1:
                    self._land_late_ones()
                self.unsynced = False
                self.clipping.settled = False
                self.steps.landed()
        for unit in self.units:
            unit.expected = unit.trainable
            if unit.depth == 0:  # else this backward was one inside a forward, which goes on
                unit.stand_homes()
                if not self._keep_full:
                    unit.release()
        self._recent.clear()
        self._task = None

    def _land_late_ones(self) -> None:
        """Gradients that came after their bucket had left, from a nested backward or from outside of the
        model, take another round. Ranks that have none make none: not all come to every checkpoint. Where
        they are not the same on all ranks, the barrier tells, before anything is added up."""
        if any(p.leaf.grad is not None for b in self.gradients.buckets for p in b.params):
            self.transport.barrier("gradients that came late")
            self.gradients.finish()

    # ------------------------------------------------------------------ update

    def step(self, update: Update, step: Callable[[], Any], loss_scale: float = 1.0) -> None:
        """Run one optimizer's step on the local rows. `loss_scale`: what gradients in fp16 still have."""
        self.recover()
        if not self.sync:
            raise StateError(
                "optimizer.step() inside run.no_sync(): gradients of this rank alone are not the gradient. "
                "Leave the block before the last micro-batch's backward, then step."
            )
        if self.unsynced:
            raise StateError(
                "gradients accumulated under run.no_sync() were never synchronised: run the last "
                "micro-batch's backward outside of the block before optimizer.step()."
            )
        if not self._reached:
            self._reached = True
            tell_of_no_gradient(self.params, self.transport.rank)
        self.notice()
        with span("step"), self.changes.in_step(update, self._host_updates):
            if not self.pace.apart:
                self.transport.fence()  # peers have read the rows that are about to change
            self.before_change(in_step=True)
            update.shrink(self.clipping.settle(self.params, self._host_updates, loss_scale))
            with self.host.stepped(update) if self.host is not None else nullcontext():
                self.pace.step(update, step)
        self.supply.stale = True
        self.steps.count(update)

    @property
    def _host_updates(self) -> HostUpdates | None:
        return self.host.updates if self.host is not None else None

    @property
    def _ahead(self) -> bool:
        """Whether the host is at a step whose backward has yet to end; [Note: a step ahead] in `updates`."""
        return self.pace.begun and self.clipping.settled

    def changed(self, params: Sequence[Param] = ()) -> None:
        """Homes were written by someone else than the optimizer; those of `params` past themselves."""
        self.changes.of(params)
        self.written.note()
        self.supply.changed()
        self.pace.rewritten()

    def notice(self) -> None:
        """Take over what the loop has written into homes by hand; see `written`."""
        if self.written.seen(self.supply.stale, self._quieten):
            self.changed()

    def await_host(self) -> None:
        """The loop is about to use homes, which the host may be updating."""
        if self._task is None and not self.computing:
            self._settle_updates()

    def _quieten(self) -> None:
        """Nobody works on homes any more, nor reads them."""
        self._settle_updates()
        self.before_change()

    def before_change(self, in_step: bool = False) -> None:
        """State is about to change, in a step but what has an owner: whoever is reading it comes first."""
        if self.reader is not None:
            self.reader.copied_of(None) if in_step else self.reader.copied()

    def forget(self, optimizer: Optimizer | None = None) -> None:
        """`zero_grad` also drops what was accumulated without synchronisation, or is going to the host."""
        self.recover()
        if self._host_updates is not None and self._host_updates.pending and not self._ahead:
            assert self.host is not None
            self._host_updates.discard(self.host.parts_of(optimizer))
            self.clipping.settled = not self._host_updates.pending
        if self.pace.forget(optimizer):
            self.before_change()
            self.pace.turn()
            self.supply.stale = True
        if self.unsynced:
            others = [u for u in self.updates if u.optimizer is not optimizer and optimizer is not None]
            self.unsynced = drop_accumulated(self.params, others)

    # ------------------------------------------------------------------ whole tensors

    @torch.no_grad()
    def collect(self, local: Tensor, slot: Slot) -> Tensor:
        """The whole tensor from every rank's rows; all ranks call it in the same order."""
        # A peer may still be in a forward pass that this rank did not make, and wait for its rows.
        self.publish()
        return collect(self.transport, local, slot)

    @contextmanager
    def kept_full(self) -> Iterator[None]:
        """Gather every unit once and release none until the end: see `Run.kept_full`."""
        before = self.pool.known
        self._wake()
        self._keep_full = True
        try:
            for unit in self.units:
                self._bring(unit)
            yield
        finally:
            self._keep_full = False
            for unit in (unit for unit in self.units if unit.depth == 0):
                unit.release()
            if gone := self.pool.drop(before):
                for bundle in self.bundles:
                    bundle.forget(gone)

    def adopt_parts(self, parts: list[Part]) -> None:
        unit_of = {id(p): unit for unit in self.units for p in unit.params}
        for part in parts:
            unit_of[id(part.params[0])].parts.append(part)
        self.written.adopt_parts(parts)

    def settle(self) -> None:
        """Wait until all that was begun is in its place: what the host updates, and changes that travel."""
        self.recover()
        self.notice()  # before it waits for the host, as what was written did not
        for bundle in self.bundles:
            bundle.catch_up()
        self._settle_updates()

    def _settle_updates(self) -> None:
        if self._host_updates is not None:
            self._refuse_pending()
            self._host_updates.settle()

    def _refuse_pending(self) -> None:
        """With early updates, weights and state are neither old nor new between backward and step."""
        if self._host_updates is not None and (self._host_updates.pending or self.pace.begun):
            raise StateError(
                "parameters and optimizer state cannot be used between backward and optimizer.step(): with "
                "offload and clip_norm their update has begun (with sync=Delayed() in forward). Do it after "
                "the step, or drop the gradients with zero_grad() first."
            )

    def close(self) -> None:
        """End the threads, after what they have begun."""
        self.closed = True
        self._recent.clear()
        if self._host_updates is not None:
            try:
                self._host_updates.wind_up()
            except BaseException:
                assert self.host is not None
                self.host.close()
                raise
            finally:
                self._host_updates.close()

    def adopt_units(self, units: list[LiveUnit]) -> None:
        self.units, self.params = units, [param for unit in units for param in unit.params]
        self._unit_of = {id(bundle): unit for unit in units for bundle in unit.bundles}
        self.supply.adopt(self.bundles)
        copied = [param for bundle in self.bundles if bundle.refreshes for param in bundle.params]
        self.written = Written(self.faces, self.params, copied)
        self.changes = Changes(self.params, self.faces.writes)
        attach(self.faces.writes, self)
