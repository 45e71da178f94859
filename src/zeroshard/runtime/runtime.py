"""The runtime of one `shard()`: owns units, gradients, updates and the transport, and says when each acts.

[Note: what stands in the modules] Outside of computation the modules hold the sharded parameters, so that
`model.parameters()` means rows with a global meaning. From a unit's first entry to its last exit its modules
hold the unsharded parameters. During backward all modules hold these, because recomputation calls modules
again.

[Note: nested backward] Reentrant checkpointing runs a backward inside a backward, and a callback queued there
fires when the inner one ends. So the outermost is found early, by a hook on the root's output; should that be
missed, an inner end counts as an end, and what comes later is reduced in another round and added: slower, but
the same numbers.

[Note: used again] A block that runs twice under reentrant checkpoints gives its parameters a gradient, and is
then computed again for the next. So what the host updates of it may not change before backward ends; and its
gradients leave then, together: other ranks may not use it, and would know of no further round.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import Variable
from torch.optim import Optimizer

from zeroshard.comm import GatherRequest, Transport
from zeroshard.errors import StateError
from zeroshard.grads import Reducer
from zeroshard.layout.placement import Placement
from zeroshard.layout.sharding import ShardSpec
from zeroshard.offload.build import OffloadedState
from zeroshard.offload.group import OffloadGroup
from zeroshard.offload.updates import HostUpdates
from zeroshard.optim.sharded_optimizer import ShardedOptimizer, tell_of_no_gradient
from zeroshard.options import Options
from zeroshard.params.gather_group import BufferPool, GatherGroup, ParamState, SavedTensors, whole_of
from zeroshard.params.resharded import Lender, lend
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors
from zeroshard.profiling import span
from zeroshard.sync import SyncStrategy
from zeroshard.tiers.ledger import MemoryLedger

from .clipping import NormClipping
from .loading import collect
from .param_writes import ParamWrites, VersionCounters, attach
from .unit import (
    RunningUnit,
    accumulates,
    after_close,
    drop_accumulated,
    inside_function,
    inside_no_sync,
    never_synchronised,
    outside_forward,
    refuse_transform,
    wants_all,
)


class StepCounter:
    """Counts steps: at the first optimizer that follows a backward, and at one that steps again without."""

    def __init__(self) -> None:
        self.made = 0
        self._landed = -1  # backward passes that an optimizer has followed
        self._seen: set[int] = set()  # ids of optimizers: a closed run holds none

    def count(self, optimizer: object, landed: int) -> None:
        """An optimizer has stepped after so many synchronised backward passes of the run."""
        if landed != self._landed or id(optimizer) in self._seen:
            self.made, self._landed = self.made + 1, landed
            self._seen.clear()
        self._seen.add(id(optimizer))


class ForwardOrder:
    """The order in which units compute in a forward: which come next, and which stay for backward."""

    def __init__(self) -> None:
        self.last: list[RunningUnit] = []  # stay from forward to backward, which needs them first
        self._units: list[RunningUnit] = []
        self._places: dict[int, int] = {}  # id(unit) -> place among them
        self._reach = 0

    def end(self, order: Sequence[RunningUnit], reach: int) -> None:
        """A forward is over. `reach`: how many units are gathered ahead of use."""
        units = list(dict.fromkeys(order))
        if len(units) >= len(self._units):
            self._units, self._reach = units, reach
            self._places = {id(unit): place for place, unit in enumerate(units)}
            self.last = units[-1 - reach :]

    def upcoming(self, unit: RunningUnit, backward: bool) -> list[RunningUnit]:
        """What is gathered ahead while a unit computes."""
        place = self._places.get(id(unit))
        if place is None:
            return []
        if backward:
            return self._units[max(place - self._reach, 0) : place][::-1]
        return self._units[place + 1 : place + 1 + self._reach]


class ParamSupply:
    """Publishes this rank's rows and brings units what the peers have published. `updates`, where a call
    takes them, are the host's: weights wait for those under way."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.forward_order = ForwardOrder()
        self.stale = True  # sharded parameters are newer than what the unsharded parameters hold
        self._rewritten = self.repeats = False  # by another than the optimizer; with what peers know already
        self.epoch = 0
        # Over shared memory a gather is a copy by this thread: starting it early hides nothing.
        self.overlaps = transport.traits.overlaps
        self._refreshed: list[GatherGroup] = []
        self._handed_on: list[GatherGroup] = []
        self._small: list[GatherGroup] = []  # fetched by one call, when the first of them is wanted
        self._fetches: list[GatherRequest] = []
        self._waits = True  # for all of the host's updates before a forward
        self._moves = True  # parameters come from elsewhere before a unit computes
        self.keeps_full = False  # no unit is released; see `Runtime.kept_full`

    def adopt(self, gather_groups: Sequence[GatherGroup]) -> None:
        self.overlaps = self.overlaps or any(g.rests.rows != "device" for g in gather_groups)
        self._refreshed = [g for g in gather_groups if g.own.refreshes]  # in `publish`: often none of many
        # [Note: in turn] Peers read rows, or codes of all of them, whenever they like. Where nobody does (one
        # rank, stage 0) each unit waits for its own update, and forward begins while later ones are under
        # way. Not over transports of the CPU: layers of a bypassed unit compute with sharded parameters,
        # which change.
        alone = self._transport.size == 1 or self._transport.traits.keeps_order
        read = any(g.memory.transport_buffer is not None or g.memory.coded is not None for g in gather_groups)
        self._waits = read or not alone
        self._moves = read or any(not g.rests.resident for g in gather_groups)
        self._handed_on = [g for g in gather_groups if g.exchanges or (self.overlaps and g.rests.resident)]
        self._small = [] if self.overlaps else [g for g in gather_groups if g.is_small]

    def keep_full(self, kept: bool) -> None:
        """Release no unit from now on, or units as ever."""
        self.keeps_full = kept

    def stepped(self) -> None:
        """An update has written sharded parameters."""
        self.stale = True

    def changed(self) -> None:
        """Sharded parameters were written by someone else than the optimizer."""
        self.stale, self._rewritten, self.repeats = True, True, False

    def publish(self, updates: HostUpdates | None) -> None:
        """Let the peers have this rank's newest rows. Not done by `step`: loops write parameters after it."""
        if self._moves and (level := peek_interpreter_stack()) is not None:
            refuse_transform(level.key())
        if self.stale:
            if updates is not None and (self._waits or self._rewritten or updates.ahead):
                updates.drain()
            for gather_group in self._refreshed:
                gather_group.refresh(self._rewritten, self.repeats)
            self._rewritten = self.repeats = False
            self._transport.open()
            self.epoch += 1
            self.stale = False
            for gather_group in self._handed_on:
                gather_group.exchange()
                if gather_group.rests.resident and self.overlaps:
                    gather_group.gather(self.epoch)

    def bring(self, unit: RunningUnit, updates: HostUpdates | None, backward: bool) -> None:
        """Gather a unit, start on the ones that come next, and wait for it."""
        with span(f"gather {unit.label}"):
            here = not self.overlaps and all(g.epoch == self.epoch for g in unit.gather_groups)
            if here and not unit.sharded and not unit.offload_groups:
                return  # always whole, and nothing is to be asked for
            if updates is not None and not backward:
                for group in unit.offload_groups:
                    if not group.update.holding:
                        updates.ask(group)
            for gather_group in unit.gather_groups:
                if gather_group.epoch < self.epoch and gather_group in self._small:
                    self._fetch_small()
                gather_group.gather(self.epoch)
            for ahead in self.forward_order.upcoming(unit, backward) if self.overlaps else ():
                if all(g.update.holding or g.update.done.is_set() for g in ahead.offload_groups):
                    for gather_group in ahead.gather_groups:
                        gather_group.gather(self.epoch)
            for gather_group in unit.gather_groups:
                gather_group.finish()

    def _fetch_small(self) -> None:
        """All of the small ones: with many of them, calls and not bytes take the time."""
        if not self._fetches:
            self._fetches = [gather_group.as_fetch() for gather_group in self._small]
        with torch.inference_mode(False), torch.no_grad():
            self._transport.gather_all("publish", self._fetches)
        for gather_group in self._small:
            gather_group.epoch = self.epoch


_INPUTS = 3  # where `inputs` stand among what follows the outputs of a backward
# What ends before a forward does: a hook of ours, or what the compiler wraps around it.
_PASSING = ("zeroshard.", "torch._dynamo.")


class ForwardPass:
    """The forward under way: the units that it is in, and the frame that it was begun from. Torch calls no
    hook where an interrupt (Ctrl-C) ends a forward; but then this frame is on the stack no more."""

    def __init__(self) -> None:
        self.learns = False  # it was called with gradients enabled
        self.active = 0  # units entered and not left
        self._order: list[RunningUnit] = []  # in which they have computed
        self._frame: FrameType | None = None
        self._thread = 0

    def enter(self, unit: RunningUnit, recomputed: bool) -> None:
        """A unit computes, the first or another; `recomputed` in a backward."""
        if not self.active:
            self.learns = torch.is_grad_enabled() or inside_function()
            frame = sys._getframe(1)  # the first that is neither ours nor the compiler's is the caller's
            while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_PASSING):
                frame = frame.f_back
            self._frame, self._thread = frame, threading.get_ident()
        self.active += 1
        if not recomputed:
            self._order.append(unit)

    def leave(self) -> list[RunningUnit] | None:
        """A unit has computed. When it was the last, the order in which they came."""
        self.active -= 1
        if self.active:
            return None
        self._frame = None
        order, self._order = self._order, []
        return order

    def drop(self) -> None:
        """It was interrupted: its order says nothing."""
        self.active, self._frame = 0, None
        self._order.clear()

    @property
    def inside(self) -> bool:
        """Whether some call from outside has come in and not gone out, as far as this thread can tell."""
        if not self.active or self._frame is None or threading.get_ident() != self._thread:
            return self.active > 0
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class BackwardPass:
    """The backward under way: autograd's number of it, and the units that it has gathered."""

    def __init__(self, units: Sequence[RunningUnit]) -> None:
        self.task: int | None = None  # autograd's number; see [Note: nested backward]
        self.nested = False  # another has begun inside it
        self.strayed = False  # a sharded parameter got a gradient of its own
        self.reached = False  # some backward has given some parameter a gradient, or the user was told
        self.landed = 0  # backward passes whose gradients are where `p.grad` shows them
        self.recent: list[RunningUnit] = []  # gathered in it, oldest first
        self._root = units[0] if units else None
        self.unit_of = {id(group): unit for unit in units for group in unit.gather_groups}

    def begin(self, task: int) -> bool:
        """There is a sign of a backward. Whether it is the first one."""
        if self.task is not None:
            self.nested = self.nested or task != self.task >= 0
            return False
        self.task, self.nested, self.strayed = task, False, False
        return True

    def go_on_as(self, task: int | None) -> int | None:
        """Another backward runs inside it, of no number of autograd's, or has run. Returns what it was."""
        before, self.task = self.task, task
        return before

    def stray(self) -> None:
        self.strayed = True

    def reach(self) -> None:
        self.reached = True

    def make_room(self, coming: RunningUnit, kept: bool, recomputed: bool) -> None:
        """A unit comes: release what backward is done with, which are units whose gradients are all in or
        which have none. Unless it is `recomputed`, and the one above it has had its turn, release all but the
        last two. `kept`: all stay whole."""
        stay = []
        for index, unit in enumerate(self.recent):
            old = unit.expected <= 0 or (index < len(self.recent) - 1 and not recomputed)
            if unit is coming or unit is self._root or unit.depth or not old or kept:
                stay.append(unit)
            else:
                unit.release()
        self.recent = [unit for unit in dict.fromkeys(stay) if recomputed or unit is not coming]
        if not recomputed:
            self.recent.append(coming)

    def end(self, reached: bool, landed: bool) -> None:
        """It is over. `reached`: it has given some parameter a gradient. `landed`: with all ranks."""
        self.reached = self.reached or reached
        self.landed += landed
        self.recent.clear()
        self.task = None


@dataclass(eq=False)
class RuntimeParts:
    """What a runtime is made of. All but the pool and the host stay as they are."""

    options: Options
    transport: Transport
    sharded_tensors: ShardedTensors
    pool: BufferPool
    ledger: MemoryLedger
    placement: Placement
    host: OffloadedState | None
    hands_on_in_step: bool = False  # see [Note: a state of one rank alone] in `own_state`

    def __post_init__(self) -> None:
        self.clipping = NormClipping(self.options, self.transport)

    def let_go_of_memory(self) -> None:
        """The run has ended: lend no buffers, and know no host, any more."""
        self.pool, self.host = BufferPool(self.pool.device, self.ledger), None


@dataclass(eq=False)
class Runtime(RuntimeParts):
    """What is registered calls `enter`, `leave`, `step` and `arrived`; `api` the rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.units: list[RunningUnit] = []
        self.params: list[ShardedParam] = []
        self.sync_strategy: SyncStrategy  # owns the gradients, runs the updates
        self.updates: list[ShardedOptimizer] = []
        self.host_updates: HostUpdates | None = None
        self.saved = SavedTensors(self.pool, self.ensure)
        self.supply = ParamSupply(self.transport)
        self.sync = True
        self.unsynced = False  # unsharded parameters hold gradients that were accumulated under no_sync
        self.steps = StepCounter()
        self.closed = False
        self.forward, self.backward = ForwardPass(), BackwardPass([])

    # ------------------------------------------------------------------ forward

    def enter(self, unit: RunningUnit, module: nn.Module | None = None) -> None:
        """A module of this unit is about to compute: its own, or another."""
        if unit.depth == 0:
            if self.forward.active == 0:
                self._wake()
            forward = self.backward.task is None
            if forward:
                unit.in_modules.check()
                unit.learning.follow()
            else:
                self.backward.make_room(unit, self.supply.keeps_full, recomputed=True)
            self.supply.bring(unit, self.host_updates, not forward)
            if forward and self.sync_strategy.advances:
                self.sync_strategy.advance()
            unit.in_modules.begin(forward)
            self.forward.enter(unit, recomputed=not forward)
        if self.backward.task is None:
            again = unit.entries.enter(module, self.forward.learns)
            if again is not None:
                self.gradients.hold_back(unit.used_again(again))
        unit.depth += 1
        if unit.sharded:
            self.saved.push()

    def leave(self, unit: RunningUnit, output: Any = None) -> None:
        """It has computed, or failed."""
        if unit.depth == 0:
            return  # its entry failed: nothing to undo, and the cause must not be hidden by another error
        if unit.sharded:
            self.saved.pop()
        unit.depth -= 1
        if unit.depth:
            return
        fault, forward = None, self.backward.task is None
        if forward:
            # The root and the last units are the first that backward needs; dropping them would fetch them
            # twice in a row. There is room for as many as are gathered ahead.
            last = unit is self.units[0] or unit in self.supply.forward_order.last
            fault = unit.end_forward(output, self.supply.keeps_full or (last and torch.is_grad_enabled()))
        else:
            unit.in_modules.end()
        order = self.forward.leave()
        if order is not None and forward:
            self.supply.forward_order.end(order, self.options.prefetch if self.supply.overlaps else 0)
        if fault is not None:
            raise fault

    def recover(self) -> None:
        """Leave a forward that was interrupted (see `ForwardPass`), and on one rank a backward that died."""
        if self.forward.active and not self.forward.inside:
            for unit in self.units:
                unit.abandon()
            self.saved.abandon()
            self.forward.drop()
        if self.backward.task is not None and self.transport.size == 1:
            self._abandon()

    @property
    def computing(self) -> bool:
        """Whether a forward is under way."""
        return self.backward.task is None and self.forward.inside

    def _wake(self) -> None:
        """The first unit of a forward: hand on this rank's newest rows, and start to fetch the peers'."""
        if self.closed:
            raise StateError("this run is closed; call zs.shard() again to train on.")
        if self.backward.task is not None:
            self._abandon()
        self.changes.look()
        if self.backward.task is None and (self.host_updates is None or not self._ahead):
            if self.host_updates is not None:
                self._refuse_pending(self.host_updates)
            self.notice()
        if self.backward.task is None and not self.supply.keeps_full:
            for unit in self.supply.forward_order.last[:-1]:
                if unit is not self.units[0]:
                    unit.release()  # of a forward that no backward has followed yet: their room is wanted
        self.supply.publish(self.host_updates)

    def publish(self) -> None:
        """Let the peers have this rank's newest rows, if they changed."""
        self.supply.publish(self.host_updates)

    def _abandon(self) -> None:
        """If a backward died half way: one rank starts afresh; several cannot know what others have sent."""
        if _current_graph_task_id() != -1:
            return
        if self.transport.size > 1:
            raise StateError(
                "an earlier backward failed on this rank before its gradients were reduced; restart the "
                "run from a checkpoint."
            )
        self.gradients.abandon(self.unsynced)
        self.end_backward(died=True)

    @property
    def gather_groups(self) -> list[GatherGroup]:
        return [gather_group for unit in self.units for gather_group in unit.gather_groups]

    @property
    def gradients(self) -> Reducer:
        return self.sync_strategy.gradients

    # ------------------------------------------------------------------ backward

    def begin_backward(self) -> None:
        """Prepares for a backward. Every hook that sees one calls this; only the first call of each acts."""
        if self.closed:
            raise after_close()
        if not self.backward.begin(_current_graph_task_id()):
            if self.backward.nested and self.host_updates is not None:
                self.host_updates.nested = True
            return
        Variable._execution_engine.queue_callback(self.end_backward)
        self.changes.look()
        if self.host_updates is not None:
            self.host_updates.begin_backward()
        for unit in (unit for unit in self.units if unit.depth == 0):
            unit.in_modules.put_unsharded()

    def accumulated(self, param: ShardedParam) -> None:
        """A gradient has come that waits for a later backward to be reduced."""
        param.widen_sum()
        self.unsynced = True

    def strayed(self, param: ShardedParam, grad: Tensor) -> Tensor:
        """Autograd is about to add to a sharded parameter; what it shall add instead."""
        self.begin_backward()
        self.backward.stray()
        self.unsynced = self.unsynced or not self.sync
        return self.gradients.redirect(param, grad)

    def ensure(self, gather_group: GatherGroup) -> None:
        """Autograd unpacks something that lives in this gather group's buffer."""
        if _current_graph_task_id() != self.backward.task:
            self.begin_backward()
        unit, recent = self.backward.unit_of[id(gather_group)], self.backward.recent
        if not recent or recent[-1] is not unit:
            self.backward.make_room(unit, self.supply.keeps_full, recomputed=False)
            self.supply.bring(unit, self.host_updates, backward=True)
        elif gather_group.residence is not ParamState.FULL or gather_group.epoch < self.supply.epoch:
            gather_group.gather(self.supply.epoch)
            gather_group.finish()

    def _lend(self, gather_group: GatherGroup, name: str) -> int:
        """Somebody uses a parameter of it while its unit is not computing; see `away`."""
        if self.closed:
            raise after_close()
        if _current_graph_task_id() != -1:
            self.ensure(gather_group)
        elif gather_group.residence is not ParamState.FULL or gather_group.epoch < self.supply.epoch:
            raise outside_forward(name)
        return gather_group.epoch

    def end_backward(self, died: bool = False) -> None:
        """Autograd is done, or it `died` half way."""
        arrived = self.backward.strayed or any(unit.expected != unit.trainable for unit in self.units)
        land = not died and self.sync and (arrived or self._awaited())
        with span("land"):
            if land:
                self.sync_strategy.ended()
                if self.backward.nested or self.backward.strayed:
                    self._land_late_ones()
                self.unsynced = self.clipping.settled = False
        if self.host_updates is not None:
            self.host_updates.end_backward()
        for unit in self.units:
            unit.end_backward(self.supply.keeps_full)
        self.backward.end(arrived and not died, land)

    def _awaited(self) -> bool:
        """Whether peers may wait for gradients of a backward that had none here: an expert or an adapter that
        this rank's batch did not come to. Who asks for gradients of inputs alone waits for nobody."""
        return (
            self.transport.size > 1
            and any(p.unsharded_param.requires_grad for p in self.params)
            and wants_all()
        )

    def _land_late_ones(self) -> None:
        """Gradients that came after their bucket had left, from a nested backward or from outside of the
        model, take another round. Ranks that have none make none: the barrier tells of it."""
        if any(
            p.unsharded_param.grad is not None for bucket in self.gradients.buckets for p in bucket.params
        ):
            self.transport.barrier("gradients that came late")
            self.gradients.finish()

    # ------------------------------------------------------------------ update

    def step(self, update: ShardedOptimizer, step: Callable[[], Any], loss_scale: float = 1.0) -> None:
        """Run one optimizer's step on the local rows. `loss_scale`: what gradients in fp16 still have."""
        self.recover()
        if not self.sync:
            raise inside_no_sync()
        if self.unsynced:
            raise never_synchronised()
        if not self.backward.reached:
            self.backward.reach()
            tell_of_no_gradient(self.params, self.transport.rank)
        self.notice()
        with span("step"), self.changes.in_step(update, self.host_updates):
            if not self.sync_strategy.apart:
                self.transport.fence()  # peers have read the rows that are about to change
            if self.written.reader is not None:
                self.written.reader.copied_of(None)  # what has no owner
            clips = self.clipping.limit is not None or loss_scale != 1.0
            factor = self.clipping.settle(self.params, self.host_updates, loss_scale) if clips else 1.0
            if factor != 1.0 or update.shrinks != 1.0:
                update.shrink(factor)
            with self.host.stepped(update) if self.host is not None else nullcontext():
                self.sync_strategy.step(update, step)
        self.supply.stepped()
        self.steps.count(update, self.backward.landed)
        if self.hands_on_in_step:
            self.publish()

    @property
    def _ahead(self) -> bool:
        """Whether the host is at a step whose backward has yet to end; [Note: a step ahead] in `updates`."""
        return self.sync_strategy.begun and self.clipping.settled

    def changed(self, params: Sequence[ShardedParam] = ()) -> None:
        """Sharded parameters were written by someone else than the optimizer; those of `params` past
        themselves."""
        self.changes.of(params)
        self.written.note()
        self.supply.changed()
        self.sync_strategy.rewritten()

    def notice(self) -> None:
        """Take over what the loop has written into sharded parameters by hand; see `written`."""
        if self.written.seen(self.supply.stale, self._quieten):
            self.changed()

    def await_host(self) -> None:
        """The loop is about to use sharded parameters, which the host may be updating."""
        updates = self.host_updates
        if updates is not None and torch.is_grad_enabled():
            updates.graphed = True
        idle = updates is not None and not updates.busy and self.transport.size == 1
        if self.backward.task is None and not self.computing and not idle:
            self._settle_updates()

    def _quieten(self) -> None:
        """Nobody works on sharded parameters any more, nor reads them."""
        self._settle_updates()
        self.before_change()

    def before_change(self) -> None:
        """State is about to change: whoever is reading it comes first."""
        if self.written.reader is not None:
            self.written.reader.copied()

    def before_written(self) -> None:
        """The loop is about to write a sharded parameter by hand; an optimizer's step has waited for its
        own."""
        if not self.changes.stepping:
            self.before_change()

    def forget(self, optimizer: Optimizer | None = None) -> None:
        """`zero_grad` also drops what was accumulated without synchronisation, or is going to the host."""
        self.recover()
        if self.host_updates is not None and not self._ahead:
            assert self.host is not None
            groups, pending = self.host.parts_of(optimizer), self.host_updates.pending
            if pending and any(group.update.begun for group in groups):
                self.transport.fence()  # peers have read the rows, which change once more
                self.supply.stepped()  # and read them again when all ranks' are back, to the same bits
            self.host_updates.discard(groups)
            if pending:
                self.clipping.settled = not self.host_updates.pending
        if self.sync_strategy.forget(optimizer):
            self.before_change()
            self.sync_strategy.turn()
            self.supply.stepped()
        if self.unsynced:
            others = [u for u in self.updates if u.optimizer is not optimizer and optimizer is not None]
            self.unsynced = drop_accumulated(self.params, others)

    # ------------------------------------------------------------------ whole tensors

    @torch.no_grad()
    def collect(self, local: Tensor, slot: ShardSpec) -> Tensor:
        """The whole tensor from every rank's rows; all ranks call it in the same order."""
        # A peer may still be in a forward pass that this rank did not make, and wait for its rows.
        self.publish()
        return collect(self.transport, local, slot)

    @contextmanager
    def kept_full(self) -> Iterator[None]:
        """Gather every unit once and release none until the end: see `Run.kept_full`."""
        before = self.pool.known
        self._wake()
        self.supply.keep_full(True)
        try:
            for unit in self.units:
                self.supply.bring(unit, self.host_updates, backward=self.backward.task is not None)
            yield
        finally:
            self.supply.keep_full(False)
            for unit in (unit for unit in self.units if unit.depth == 0):
                unit.release()
            if gone := self.pool.drop(before):
                for gather_group in self.gather_groups:
                    gather_group.forget(gone)

    def adopt_offload_groups(self, groups: list[OffloadGroup]) -> None:
        unit_of = {id(p): unit for unit in self.units for p in unit.params}
        for group in groups:
            unit_of[id(group.params[0])].offload_groups.append(group)
        self.written.adopt_offload_groups(groups)
        self.host_updates = self.host.updates if self.host is not None else None
        if self.host is not None:
            self.host.guard_params(partial(_before_use, ref(self)))

    def settle(self) -> None:
        """Wait until all that was begun is in its place: what the host updates, and changes that travel."""
        self.recover()
        self.notice()  # before it waits for the host, as what was written did not
        for gather_group in self.gather_groups:
            gather_group.catch_up()
        self._settle_updates()

    def _settle_updates(self) -> None:
        if self.host_updates is not None:
            self._refuse_pending(self.host_updates)
            self.host_updates.settle()

    def _refuse_pending(self, updates: HostUpdates) -> None:
        """With early updates, weights and state are neither old nor new between backward and step."""
        if updates.pending or self.sync_strategy.begun:
            raise StateError(
                "parameters and optimizer state cannot be used between backward and optimizer.step(): with "
                "offload and clip_norm their update has begun (with sync=Delayed() in forward). Do it after "
                "the step, or drop the gradients with zero_grad() first."
            )
        updates.interrupt()

    def close(self) -> None:
        """End the threads, after what they have begun."""
        self.closed = True
        self.backward.recent.clear()
        if self.host_updates is not None:
            try:
                self.host_updates.wind_up()
            except BaseException:
                assert self.host is not None
                self.host.close()
                raise
            finally:
                self.host_updates.close()

    def let_go(self) -> None:
        """Keep nothing of what a run that has ended was made of."""
        self.let_go_of_memory()
        self.saved = SavedTensors(self.pool, self.ensure)
        self.supply = ParamSupply(self.transport)
        self.adopt_units([])
        self.sync_strategy = SyncStrategy(Reducer([], self.transport))
        self.updates, self.host_updates = [], None

    def adopt_strategy(self, sync_strategy: SyncStrategy) -> None:
        """Reduce gradients, and step, as this strategy says."""
        self.sync_strategy = sync_strategy
        coded = [group.memory.coded for group in self.gather_groups if group.memory.coded is not None]
        sync_strategy.keep_beliefs([private for rows in coded for private in rows.private()])

    def adopt_units(self, units: list[RunningUnit]) -> None:
        self.units, self.params = units, [param for unit in units for param in unit.params]
        for gather_group in self.gather_groups:
            for index, param in enumerate(() if gather_group.rests.resident else gather_group.params):
                lends = partial(_lend, ref(self), ref(gather_group), param.name)
                lend(
                    param.unsharded_param,
                    Lender(param.name, lends, partial(whole_of, ref(gather_group), index)),
                )
        for unit in units:
            unit.in_modules.end()
        self.backward = BackwardPass(units)
        self.supply.adopt(self.gather_groups)
        copied = [
            param
            for gather_group in self.gather_groups
            if gather_group.own.refreshes
            for param in gather_group.params
        ]
        self.written = ParamWrites(self.sharded_tensors, self.params, copied)
        self.changes = VersionCounters(self.params, self.sharded_tensors.writes)
        attach(self.sharded_tensors.writes, self)


class CheckedBackward:
    """Torch's function that runs a backward, after a look at the inputs that a loop names."""

    def __init__(self, own: Callable[..., Any], looks: Callable[[Any, Any], None]) -> None:
        self.own, self._looks = own, looks

    def __call__(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > _INPUTS and args[_INPUTS]:
            self._looks(outputs, args[_INPUTS])
        return self.own(outputs, *args, **kwargs)


def arrived(runtime: ref[Runtime], unit: ref[RunningUnit], unsharded_param: Tensor) -> None:
    """Autograd has accumulated the gradient of an unsharded parameter."""
    live, of_unit = runtime(), unit()
    if live is None:
        return
    if live.closed or _current_graph_task_id() != live.backward.task:
        live.begin_backward()  # of a run that is closed, it says that this comes too late
    if of_unit is None:
        return
    of_unit.expected -= 1
    param = of_unit.param_of[id(unsharded_param)]
    if live.sync:
        live.sync_strategy.gradients.arrived(param)
    else:
        live.accumulated(param)


def strayed(runtime: ref[Runtime], param: ref[ShardedParam], grad: Tensor) -> Tensor:
    """Autograd has a gradient for a sharded parameter. Rows are of all ranks already; who asks
    `torch.autograd.grad` for it gets it as it is."""
    live, which = runtime(), param()
    if live is None or which is None or not accumulates() or ShardedTensors.divided(grad):
        return grad
    return live.strayed(which, grad)


def _before_use(runtime: ref[Runtime]) -> None:
    """A parameter is about to be used that the host may be updating."""
    live = runtime()
    if live is not None and not live.closed:
        live.await_host()


def _lend(runtime: ref[Runtime], gather_group: ref[GatherGroup], name: str) -> int:
    live, where = runtime(), gather_group()
    if live is None or where is None:
        raise after_close()
    return live._lend(where, name)
