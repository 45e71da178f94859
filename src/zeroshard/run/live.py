"""A unit at run time: its bundles, and who stands in its modules; see [Note: who stands in the modules] in
`runtime`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import StateError
from zeroshard.host.part import Part
from zeroshard.life.face import Face
from zeroshard.life.param import Bundle
from zeroshard.life.shard import Faces, Param
from zeroshard.life.step import Update
from zeroshard.life.units import Unit

from .written import inside_forward

_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")
_place = Tensor.data_ptr


def after_close() -> StateError:
    return StateError(
        "this backward leads through a forward that was made before run.close(), and the parameters that it "
        "computed with are no longer the model's. Run backward before close(), or make the forward again."
    )


class LiveUnit:
    """A unit with its bundles, and where it is in the current forward or backward."""

    def __init__(self, unit: Unit, bundles: Sequence[Bundle]) -> None:
        self.name, self.label, self.module = unit.name, unit.label, unit.module
        self.bundles = list(bundles)
        self.params = [p for b in self.bundles for p in b.params]
        self.depth = 0  # entries that have not been left
        self.trainable = sum(p.trainable for p in self.params)
        self._frozen = {id(p) for p in self.params if not p.trainable}
        self.expected = self.trainable  # gradients that have yet to arrive in this backward
        self.sharded = any(not b.resident for b in self.bundles)
        self._seats = _seats(self.params)
        stand = [(seats, at, home) for seats, _, homes in self._seats for at, home in homes.items()]
        self._stand = [seats for seats, _, _ in stand], [at for _, at, _ in stand], [h for _, _, h in stand]
        self._leaves, self._homes = [p.leaf for p in self.params], [p.home for p in self.params]
        self._learning = list(map(_requires_grad, self._leaves))
        told = [home.writes for home in self._homes if isinstance(home, Face)]
        self._writes = told[0] if len(told) == len(self._homes) > 0 else None  # tells of new settings
        self._settings = 0
        # Where plain homes and leaves are; and how often leaves were written of which there are copies: from
        # those nothing goes home, or peers may have read them before or after.
        self._plain = [home for home in self._homes if Faces.local(home) is home]
        self._home_places = list(map(_place, self._plain))
        self._leaf_places = list(map(_place, self._leaves))
        copied = [b for b in self.bundles if not b.resident or b.refreshes or b.region is not None]
        self._lost = [p.leaf for b in copied for p in b.params]
        self._versions: list[int] = []  # when the forward began
        self.parts: list[Part] = []  # updates on the host that its weights wait for

    @property
    def stays(self) -> bool:
        """Whether it is always whole, and nothing is to be asked for."""
        return not self.sharded and not self.parts

    def follow_homes(self) -> None:
        """`requires_grad` is the user's to change, on the homes of parameters that there are buckets for."""
        self._check_homes()
        settings = self._writes.settings if self._writes is not None else -1
        if settings == self._settings:
            return
        learning = list(map(_requires_grad, self._homes))
        for param in self.params if learning != self._learning else ():
            if param.leaf.requires_grad is not param.home.requires_grad:
                if id(param) in self._frozen:
                    raise StateError(
                        f"`{param.name}` was frozen when zs.shard() was called, so its gradient has no "
                        "place. Freeze it after shard() instead of before: then it can be thawed."
                    )
                param.leaf.requires_grad_(param.home.requires_grad)
        self._learning, self._settings = learning, max(settings, 0)

    def _check_homes(self) -> None:
        """A forward is about to put leaves where something else than the homes may stand."""
        seats, names, homes = self._stand
        found = list(map(dict.get, seats, names))
        if not all(map(is_, found, homes)):
            gone = next(home for home, other in zip(homes, found, strict=True) if other is not home)
            name = next(p.name for p in self.params if p.home is gone)
            raise StateError(
                f"`{name}` in the model is not what zs.shard() put there, and no forward would use it. "
                "It was replaced (by assignment, or load_state_dict(assign=True)), or this forward is "
                "inside run.gathered() or torch.func.functional_call(). Write values through "
                "run.gathered(write=True) and run the model after the block; run.kept_full() keeps what "
                "is gathered for several forwards; call functions on a copy made inside gathered()."
            )
        if self._plain and list(map(_place, self._plain)) != self._home_places:
            raise inside_forward(f"a parameter of {self.label}")  # before it, `Written` has seen to that

    def stand_leaves(self) -> None:
        for seats, leaves, _ in self._seats:
            seats.update(leaves)

    def begin(self) -> None:
        """It is whole, and a forward is about to compute with it."""
        self.stand_leaves()
        self._versions = list(map(_version, self._lost))  # a step counts as a write, too; see `changes`
        if self.sharded:
            self._leaf_places = list(map(_place, self._leaves))

    def fault(self, output: Any, kept: bool) -> StateError | None:
        """A forward has ended: what it may have done to leaves, or with them."""
        if list(map(_place, self._leaves)) != self._leaf_places:
            for bundle in self.bundles:
                bundle.rejoin()
            return inside_forward(f"a parameter of {self.label}")
        if self._lost:
            versions, before = list(map(_version, self._lost)), self._versions
            if versions != before:
                written = [now != old for now, old in zip(versions, before, strict=True)].index(True)
                return inside_forward(f"`{self._name_of(self._lost[written])}`")
        return self._returned(output) if self.sharded and not kept else None

    def _returned(self, output: Any) -> StateError | None:
        """It is about to be let go: what a forward returns of its memory would turn to NaN."""
        lent = [b.full for b in self.bundles if not b.resident and b.full is not None]
        memory = set(map(_memory, lent))
        for tensor in _tensors(output) if memory else ():
            if _memory(tensor) in memory:
                return StateError(
                    f"the forward of {self.label} returned a parameter, or a view of one, of shape "
                    f"{tuple(tensor.shape)}: stage 3 lets it go when that forward ends. Return a copy "
                    "(.clone()), or name a unit that holds whoever uses it, too (units=)."
                )
        return None

    def _name_of(self, leaf: Tensor) -> str:
        return next(p.name for p in self.params if p.leaf is leaf)

    def stand_homes(self) -> None:
        for seats, _, homes in self._seats:
            seats.update(homes)

    def release(self) -> None:
        for bundle in self.bundles:
            bundle.release()

    def abandon(self) -> None:
        """As before its first entry."""
        self.depth = 0
        self.stand_homes()
        self.release()


Seats = dict[str, nn.Parameter | None]


class Caller:
    """The frame that a forward was begun from. Torch calls no hook where an interrupt (Ctrl-C) ends a
    forward; but then this frame is on the stack no more."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._thread = 0

    def note(self) -> None:
        """A forward begins: its frame is the first that is neither ours nor the compiler's."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _passing(frame):
            frame = frame.f_back
        self._frame, self._thread = frame, threading.get_ident()

    def forget(self) -> None:
        self._frame = None

    @property
    def gone(self) -> bool:
        """Whether the forward has ended, as far as this thread can tell."""
        if self._frame is None or threading.get_ident() != self._thread:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is None


def wants_all() -> bool:
    """Whether the backward that ends is to give every parameter its gradient: `loss.backward()`, and neither
    `torch.autograd.grad()` nor one with `inputs=`. Torch tells no hook, but the caller's stack does; on a GPU
    backward may end in a thread of torch's."""
    here = threading.get_ident()
    stacks = sys._current_frames()
    for frame in (stacks.pop(here), *stacks.values()):
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is torch.autograd.grad.__code__:
                return False
            if at.f_code is torch.autograd.backward.__code__:
                return not at.f_locals.get("inputs")
            at = at.f_back
    return False


def _passing(frame: FrameType) -> bool:
    """Whether it ends before the forward does: a hook of ours, or what the compiler wraps around it."""
    return str(frame.f_globals.get("__name__")).startswith(("zeroshard.", "torch._dynamo."))


class Course:
    """The order in which units compute, recorded in forward: which come next, and which stay for backward."""

    def __init__(self) -> None:
        self.last: list[LiveUnit] = []  # stay from forward to backward, which needs them first
        self._units: list[LiveUnit] = []
        self._places: dict[int, int] = {}  # id(unit) -> place among them
        self._trace: list[LiveUnit] = []
        self._reach = 0

    def enter(self, unit: LiveUnit) -> None:
        """It computes, in forward."""
        self._trace.append(unit)

    def drop(self) -> None:
        """A forward was interrupted: its order says nothing."""
        self._trace.clear()

    def end(self, reach: int) -> None:
        """A forward is over. `reach`: how many units are gathered ahead of use."""
        units = list(dict.fromkeys(self._trace))
        self._trace.clear()
        if len(units) >= len(self._units):
            self._units, self._reach = units, reach
            self._places = {id(unit): place for place, unit in enumerate(units)}
            self.last = units[-1 - reach :]

    def upcoming(self, unit: LiveUnit, backward: bool) -> list[LiveUnit]:
        """What is gathered ahead while a unit computes."""
        place = self._places.get(id(unit))
        if place is None:
            return []
        if backward:
            return self._units[max(place - self._reach, 0) : place][::-1]
        return self._units[place + 1 : place + 1 + self._reach]


def _seats(params: Sequence[Param]) -> list[tuple[Seats, Seats, Seats]]:
    """Per module where parameters stand: its own parameters, and the leaves and homes to put there."""
    found: dict[int, tuple[Seats, Seats, Seats]] = {}
    for param in params:
        for place in param.places:
            seats = place.module._parameters
            _, leaves, homes = found.setdefault(id(seats), (seats, {}, {}))
            leaves[place.attribute], homes[place.attribute] = param.leaf, param.home
    return list(found.values())


def drop_accumulated(params: Sequence[Param], others: Sequence[Update]) -> bool:
    """Drop what was accumulated without synchronisation, but for parameters that `others` update. Whether
    anything is left."""
    for param in params:
        if not any(id(param.home) in update.params for update in others):
            param.leaf.grad = None
    return any(param.leaf.grad is not None for param in params)


def leaf_of(view: Tensor, trainable: bool) -> nn.Parameter:
    """A leaf over a bundle's memory. Through `.data`, so that refilling the buffer does not count as
    changing the leaf in place."""
    return nn.Parameter(view.data, requires_grad=trainable)


def share_count(param: Param) -> None:
    """Let a plain home that is its leaf's own memory have one count of writes with it: see `changes`."""
    home, leaf = param.home, param.leaf
    both = [(t.data_ptr(), t.device, t.dtype, t.shape, t.stride()) for t in (home, leaf)]
    if type(home) is nn.Parameter and both[0] == both[1]:
        param.leaf = nn.Parameter(home.detach(), requires_grad=leaf.requires_grad)
        param.one_count = True


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those that a forward returns, alone or in plain containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper without memory of its own
        return -1
