"""An offload group: the optimizer state of one bucket off the device, and how far its update has come.

The form of a part's state: which arrays it has, of which dtype, and where they lie next to one another.

A part: the optimizer state of one bucket off the device, and how far its update has come (`GroupUpdate`).

Tensors of a part (P elements: one bucket's rows on this rank, padded):

- `flat`    gradient dtype, on the device: the reduced gradient, kept until the global norm is known.
- `stage`   pinned bytes from the ring: the gradient on its way out, and in its place the new weight on its
  way back.
- `state`   in host memory, not pinned: fp32 master (or the 16-bit remainder of a split one) and moments.
  Where the part rests on the disk, it is there only while it is updated: in a frame that `tier.paging` lends.
- `targets` compute dtype, on the device or the host: this rank's rows of each parameter, which the next
  forward uses. Where they rest on the disk they are a part of the page, and `weights` while it is in memory.
- `size`    fp32, one number on the device: the sum of the squares of `flat`; `seen` is pinned memory for it.
- `held`    compute dtype, pinned, of parts whose updates may begin a step early: the weights after it.

A part is *overlapped*: updated from its gradient as that lands. Or it is *deferred*: its gradient waits on
the device, the loop has handles of it, and `optimizer.step()` begins the update. Or it is *stepped*: its
gradient lands in host memory, where the loop sees and may change it, and `optimizer.step()` updates from
there (`reduced_grad`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from itertools import compress, repeat
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.kernels import AdamRows, Bound, HostStep, StateRows, allocate, join, moments8, split
from zeroshard.params.sharded_param import GuardedState, ShardedParam, ShardedTensors
from zeroshard.tiers import CopyMark, DiskPage, DiskPager, TierCopies, grains

from .deferred import DeferredGrads, HostGradients

_PAGE, _LINE = 4096, 64


@dataclass(frozen=True)
class StateArray:
    """One array of a state that lies in one stretch of bytes."""

    dtype: torch.dtype
    numel: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype)


@dataclass(frozen=True)
class StateForm:
    """`update`: what updates it, and `moments`: its arrays beside the master. `splits`: the master is the
    weight and a remainder. `coded`: 8-bit moments. `weight`: the dtype of the compute weights, where they
    rest beside the state: on the disk, in front of it, in whole blocks of direct I/O, so that a forward reads
    them alone."""

    update: type[StateRows]
    moments: tuple[str, ...]
    splits: bool = False
    coded: bool = False
    weight: torch.dtype | None = None

    def dtypes(self) -> dict[str, torch.dtype]:
        found = {"remainder": torch.int16} if self.splits else {"master": torch.float32}
        if self.coded:
            return found | {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8, "scales": torch.float32}
        return found | dict.fromkeys(self.moments, torch.float32)

    @cached_property
    def shown(self) -> dict[str, str]:
        """What `optimizer.state` has: by its names there, the arrays."""
        return {name: array for name, array in self.update.shown.items() if array in self.moments}

    @cached_property
    def lossy(self) -> bool:
        """Whether no update of it can be taken back."""
        return bool(self.update.lossy & set(self.dtypes()))

    def arrays(self, numel: int) -> dict[str, StateArray]:
        """In one stretch, each beginning at another offset within a page, as in `native.pages` and for the
        same reason."""
        dtypes = self.dtypes()
        apart = _PAGE // len(dtypes) // _LINE * _LINE
        found, end = {}, 0
        if self.weight is not None:
            found["weight"] = StateArray(self.weight, numel, 0)
            end = grains(found["weight"].nbytes)
        for index, (name, dtype) in enumerate(dtypes.items()):
            count = moments8.scale_count(numel) if name == "scales" else numel
            array = found[name] = StateArray(dtype, count, end + (index * apart - end) % _PAGE)
            end = array.offset + array.nbytes
        return found

    def nbytes(self, numel: int) -> int:
        """Bytes of that stretch, in whole blocks of direct I/O."""
        return grains(max(a.offset + a.nbytes for a in self.arrays(numel).values())) if numel else 0

    def over(self, memory: Tensor, numel: int) -> StateRows:
        """The state in a stretch of bytes."""
        arrays = self.arrays(numel)
        return self.update(**{name: arrays[name].of(memory) for name in self.dtypes()})

    def zeros(self, numel: int) -> StateRows:
        """Fresh state in host memory."""
        dtypes = self.dtypes()
        scales = dtypes.pop("scales", None)
        tensors = dict(zip(dtypes, allocate(numel, list(dtypes.values())), strict=True))
        if scales is not None:
            tensors["scales"] = torch.zeros(moments8.scale_count(numel), dtype=scales)
        return self.update(**tensors)


@dataclass(frozen=True)
class StepRange:
    """Neighbouring parameters of a part that have had equally many updates: elements start..stop and the
    numbers of the step."""

    start: int
    stop: int
    step: HostStep


@dataclass(frozen=True)
class CopyStrip:
    """Targets that follow one another in memory as they do in the flat gradient: one copy for all of them,
    `target` from or to elements start..stop."""

    target: Tensor
    start: int
    stop: int


def joined(targets: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> list[CopyStrip]:
    """As few strips as can be. Every copy takes the interpreter from the thread that launches kernels."""
    found: list[CopyStrip] = []
    for target, (at, n) in zip(targets, spans, strict=True):
        last = found[-1] if found else None
        if last is not None and last.stop == at and n and _follows(last.target, target):
            whole = last.target.as_strided((last.target.numel() + n,), (1,))
            found[-1] = CopyStrip(whole, last.start, at + n)
        elif n:
            found.append(CopyStrip(target, at, at + n))
    return found


def _follows(first: Tensor, second: Tensor) -> bool:
    """Whether two flat tensors are neighbours in one memory."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    plain = first.is_contiguous() and second.is_contiguous()
    return same and plain and first.data_ptr() + first.nbytes == second.data_ptr()


@dataclass(frozen=True)
class DiskPlace:
    """A part's place on the disk, while its page is away."""

    paging: DiskPager
    page: DiskPage

    def read(self, array: StateArray, start: int, stop: int) -> Tensor:
        """A copy of some elements of one of the page's arrays."""
        width = array.dtype.itemsize
        at, nbytes = array.offset + start * width, (stop - start) * width
        return self.paging.peek(self.page, at, nbytes).view(array.dtype)

    def write(self, array: StateArray, start: int, values: Tensor) -> None:
        self.paging.poke(self.page, array.offset + start * array.dtype.itemsize, values.to(array.dtype))


class PagedMaster:
    """The master rows of one parameter on the disk; see `shard.Master`. `weight`: its compute rows, where
    they are not on the disk too."""

    on_disk = True

    def __init__(self, disk: DiskPlace, arrays: dict[str, StateArray], at: int, weight: Tensor) -> None:
        self._disk, self._at = disk, at
        self._array = arrays["remainder"] if "remainder" in arrays else arrays["master"]
        self._paged = arrays.get("weight")
        self._weight = weight.view(-1)
        self._splits = self._array.dtype == torch.int16

    def read(self, start: int, stop: int) -> Tensor:
        first, last = self._at + start, self._at + stop
        found = self._disk.read(self._array, first, last)
        if not self._splits:
            return found
        paged = self._paged
        near = self._weight[start:stop].cpu() if paged is None else self._disk.read(paged, first, last)
        return join(near, found)

    def write(self, start: int, values: Tensor) -> None:
        values = values.cpu()
        weight, stored = split(values) if self._splits else (values, values)
        self._disk.write(self._array, self._at + start, stored)
        if self._paged is not None:
            self._disk.write(self._paged, self._at + start, weight)
        else:
            self._weight[start : start + values.numel()].copy_(weight)


@dataclass
class GradientSize:
    """Where a part's gradient is measured, and how large it may be: `total` is what counts towards the global
    norm, `one` for what is added to it. `size` and `seen` have one element, the square of its norm."""

    total: Tensor
    one: Tensor
    size: Tensor
    seen: Tensor
    usual: float = 0.0  # `size` as it has lately been
    most: float = -1.0  # of it, for an update that can be taken back; nothing is known at first

    def expect(self, size: float | None, leap: float) -> None:
        """After a gradient of which the update has seen this square: how large the next one may be. One that
        was large leaves little of its size in the state. None: it was not what was measured."""
        if size is None:
            self.usual, self.most = 0.0, -1.0
        elif math.isfinite(size):
            self.usual = max(min(size, 4 * self.usual), self.usual / 2) if self.usual else size
            self.most = leap * self.usual

    def bound(self, scale: float) -> Bound:
        """Of the gradient as it landed, for an update that multiplies it by `scale`."""
        return Bound(self.seen, self.most / (scale * scale))


class UpdateDone(Protocol):
    """Tells when an update is done."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


def _never_begun() -> UpdateDone:
    done = threading.Event()
    done.set()
    return done


class UpdatePhase(Enum):
    """How far a group is with its last gradient."""

    NONE = auto()  # no gradient waits
    LANDED = auto()  # one waits for its step
    BEGUN = auto()  # its update has begun before the step, and the gradient is kept to take it back
    FINAL = auto()  # its update has begun before the step, and the gradient is gone
    DROPPED = auto()  # measured, and gone: a second backward brings it for the step


class GroupUpdate:
    """Where the update of one group stands, between a gradient and the weights that follow. Others look, and
    say here what has come: nobody else changes it."""

    def __init__(self) -> None:
        self.phase = UpdatePhase.NONE
        self.flat: Tensor | None = None  # the gradient, on the device
        self.used: list[bool] = []  # which parameters have one
        self.squares: Tensor | None = None  # what it adds to that of the global norm
        self.fresh = False  # it came in the backward under way
        self.awaits_end = False  # backward has to end before its update may begin
        self.ranges: list[StepRange] | None = None  # of the update that has begun since the last step
        self.limit: Bound | None = None  # of the gradient, above which that was left out
        self.holding = False  # it leaves its weights in `held` memory
        self.done = _never_begun()  # tells of the last update that was begun
        self.known = True  # whether the training thread has waited for that
        self.ready = CopyMark()  # when its weights are where they are used
        self.free = CopyMark()  # from when on they may be written there
        self.turn = 0  # as which of all groups forward last asked for its weights

    @property
    def waits(self) -> bool:
        """Whether its gradient is that of the next step."""
        return self.phase is not UpdatePhase.NONE

    @property
    def begun(self) -> bool:
        """Whether an update has begun that the next step may keep."""
        return self.ranges is not None

    def land(self, flat: Tensor, used: list[bool]) -> None:
        """A gradient waits for its step."""
        self.phase, self.flat, self.used, self.fresh = UpdatePhase.LANDED, flat, used, True

    def measure(self, squares: Tensor) -> None:
        """What the gradient adds to the square of the global norm."""
        self.squares = squares

    def move(self, flat: Tensor) -> None:
        """The gradient lies elsewhere."""
        self.flat = flat

    def begin(self, ranges: list[StepRange] | None, holding: bool, limit: Bound | None) -> tuple[Any, ...]:
        """An update of these elements is due, or where there are none, one is taken back. Returns what
        `withdraw` needs."""
        before = self.phase, self.ranges, self.holding, self.known
        self.phase = UpdatePhase.LANDED if ranges is None else UpdatePhase.BEGUN
        self.ranges, self.holding, self.limit, self.known = ranges, holding, limit, False
        return before

    def withdraw(self, before: tuple[Any, ...]) -> None:
        """It could not be made due."""
        self.phase, self.ranges, self.holding, self.known = before

    def leave_out(self) -> None:
        """It was not made, as the gradient is over the limit."""
        self.phase, self.ranges, self.holding = UpdatePhase.LANDED, None, False

    def drop(self) -> None:
        """Only what the gradient adds to the norm is kept."""
        self.phase, self.flat = UpdatePhase.DROPPED, None

    def await_second(self, used: list[bool]) -> None:
        """The step wants the gradients of these, which were dropped."""
        self.phase, self.flat, self.used = UpdatePhase.DROPPED, None, used

    def come_again(self, flat: Tensor) -> None:
        """The gradient that was dropped is here."""
        self.phase, self.flat = UpdatePhase.LANDED, flat

    @property
    def dropped(self) -> bool:
        """Whether a second backward is to bring its gradient."""
        return self.phase is UpdatePhase.DROPPED

    def let_gradient_go(self) -> None:
        """The gradient is another's, or not needed."""
        self.phase = UpdatePhase.FINAL if self.begun else UpdatePhase.NONE
        self.flat = None

    def end(self) -> None:
        """The step has been, or the gradient is dropped."""
        self.phase, self.fresh = UpdatePhase.NONE, False
        self.flat = self.squares = self.ranges = None

    def age(self) -> None:
        """Another backward begins."""
        self.fresh = False

    def await_end(self) -> None:
        """Its weights may be used again in this backward; see [Note: used again] in `runtime`."""
        self.awaits_end = True

    def end_wait(self) -> bool:
        """Backward has ended. Whether that was waited for."""
        waited, self.awaits_end = self.awaits_end, False
        return waited

    def ask(self, turn: int) -> None:
        """Forward wants its weights, as so many others before."""
        self.turn = turn

    def wait_over(self) -> None:
        """The training thread has waited for what was begun."""
        self.known = True

    def send(self, done: UpdateDone, ready: CopyMark | None = None) -> None:
        """It is under way; `done` tells of it, and `ready` when weights are back, if that is known."""
        self.done, self.ready = done, ready or self.ready

    def arrive(self, ready: CopyMark) -> None:
        """Its weights are on their way back."""
        self.ready = ready

    def show(self, free: CopyMark) -> None:
        """Its weights may be written where they are used, from then on."""
        self.holding, self.free = False, free


@dataclass(frozen=True)
class _ShownState:
    """What `optimizer.state` was given of a group's parameters: their dicts, and what these hold by each
    name."""

    dicts: list[dict[str, Tensor]]
    held: dict[str, list[Tensor]]

    def stands(self, found: Sequence[Any]) -> bool:
        """Whether these dicts are the same, and hold the same."""
        if len(found) != len(self.dicts) or not all(map(is_, found, self.dicts)):
            return False
        held = self.held.items()
        return all(all(map(is_, map(dict.get, self.dicts, repeat(name)), own)) for name, own in held)


@dataclass
class OffloadGroup(GuardedState):
    """One bucket's update: where its gradient, state and weights are, and how far it has come."""

    label: str
    params: list[ShardedParam]
    spans: list[tuple[int, int]]  # offset and length of each parameter's rows in the flat gradient
    numel: int
    group: dict[str, Any]  # the optimizer's, for its hyperparameters
    form: StateForm
    state: StateRows | None  # None: on the disk
    targets: list[Tensor]  # flat
    grad_dtype: torch.dtype
    counted: list[bool]  # whether this rank counts the parameter towards the global norm
    optimizer: Optimizer | None = None  # which shows the state
    disk: DiskPlace | None = None  # its place there, if it rests on the disk
    reduced_grad: HostGradients | None = None  # where its gradient is, if it is stepped
    deferred: DeferredGrads | None = None  # where it is, if it waits for the loop's step
    weights: Tensor | None = None  # those of the page, while it is in memory
    measured: GradientSize | None = None
    held: Tensor | None = None  # host memory for new weights that must not show yet; see `updates`
    # Its own, which C code sets: the gradient is here; the weights are back.
    copy_events: tuple[CopyMark, CopyMark] | None = None
    update: GroupUpdate = field(default_factory=lambda: GroupUpdate())

    def __post_init__(self) -> None:
        self.steps = [0] * len(self.params)  # updates that each parameter has had
        self._shares: dict[tuple[int, int], StateRows] = {}
        self._counts = torch.zeros(len(self.params))
        self.shown_steps = list(self._counts.unbind())  # the same, as `optimizer.state` shows it
        self._shown = _ShownState([], {})

    def hold_back(self, memory: Tensor) -> None:
        """New weights wait in host memory until they may show."""
        self.held = memory

    def measure_in(self, measured: GradientSize) -> None:
        """Where its gradients are measured."""
        self.measured = measured

    def regroup(self, group: dict[str, Any]) -> None:
        """The optimizer has other groups now."""
        self.group = group

    def events(self, copies: TierCopies) -> tuple[CopyMark, CopyMark]:
        """Of its own, which C code sets: the gradient is here; the weights are back."""
        if self.copy_events is None:
            self.copy_events = copies.mark(), copies.mark()
        return self.copy_events

    @cached_property
    def _ends(self) -> list[int]:
        return [at for at, _ in self.spans[1:]] + [self.numel]

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Padding."""
        ends = zip(self.spans, self._ends, strict=True)
        return [(at + n, end) for (at, n), end in ends if at + n < end]

    @cached_property
    def strips(self) -> list[CopyStrip]:
        """What the weights of all parameters are copied by."""
        return joined(self.targets, self.spans)

    # ------------------------------------------------------------------ the state, wherever it rests

    @property
    def rows(self) -> StateRows:
        """The state, which is in memory now."""
        assert self.state is not None
        return self.state

    def fetch(self) -> None:
        """The state will be needed: start to read it, if it rests on the disk."""
        if self.disk is not None:
            self.disk.paging.fetch(self.disk.page)

    def arrive(self) -> None:
        """Wait until what was fetched is here."""
        if self.disk is not None:
            memory = self.disk.paging.memory(self.disk.page)
            self.state = self.form.over(memory, self.numel)
            if self.paged:
                self.weights = self._array("weight").of(memory)

    def leave(self, written: bool = True) -> None:
        """The state is not needed any more: start to write it, if it rests on the disk."""
        if self.disk is not None:
            self.state = self.weights = None
            (self.disk.paging.store if written else self.disk.paging.drop)(self.disk.page)

    @contextmanager
    def lent(self, write: bool = False) -> Iterator[None]:
        """The state is in memory for the length of a block."""
        self.fetch()
        self.arrive()
        try:
            yield
        except BaseException:
            self.leave(written=False)
            raise
        self.leave(write)

    def share(self, start: int, stop: int) -> StateRows:
        """The state of some elements; cut once, as the same shares are asked for every step."""
        if self.disk is not None:
            return self.rows.rows(start, stop)  # in another frame every time
        found = self._shares.get((start, stop))
        if found is None:
            found = self._shares[start, stop] = self.rows.rows(start, stop)
        return found

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Some elements of one array of the state; a copy where it rests on the disk."""
        if self.disk is None:
            found: Tensor = getattr(self.rows, name)[start:stop]
            return found
        return self.disk.read(self._array(name), start, stop)

    def write(self, name: str, start: int, values: Tensor) -> None:
        if self.disk is None:
            getattr(self.rows, name)[start : start + values.numel()].copy_(values)
        else:
            self.disk.write(self._array(name), start, values)

    def _array(self, name: str) -> StateArray:
        return self.form.arrays(self.numel)[name]

    @property
    def size(self) -> Tensor:
        assert self.measured is not None
        return self.measured.size

    @torch.no_grad()
    def measure(self, flat: Tensor) -> None:
        """What a gradient adds to the square of the global norm, and its own."""
        assert self.measured is not None
        total, one, size = self.measured.total, self.measured.one, self.measured.size
        if self.gaps:  # buckets share wires from stage 2 on: here may be what another one left
            torch._foreach_zero_([flat[start:stop] for start, stop in self.gaps])
        torch.linalg.vector_norm(flat[: self.numel], dtype=torch.float32, out=size[0])
        size.square_()
        self.update.measure(size[0])
        if not all(self.counted):
            self.update.measure(total.zero_())
            for (at, n), counts in zip(self.spans, self.counted, strict=True):
                if counts:
                    torch.linalg.vector_norm(flat[at : at + n], dtype=torch.float32, out=one)
                    total.addcmul_(one, one)

    def strips_of(self, used: Sequence[bool]) -> list[CopyStrip]:
        """What the weights of some parameters are copied by."""
        if all(used):
            return self.strips
        places = zip(self.targets, self.spans, used, strict=True)
        some = [(target, span) for target, span, wanted in places if wanted]
        return joined([target for target, _ in some], [span for _, span in some])

    def clear_padding(self, grad: Tensor, weight: Tensor) -> None:
        """8-bit moments have one scale for 256 elements, to which padding would add whatever was in the
        staging memory before."""
        if self.coded:
            for start, stop in self.gaps:
                weight[start:stop].zero_()
                grad[start:stop].zero_()

    # ------------------------------------------------------------------ steps

    def ranges_at(self, scale: float | Sequence[float]) -> list[StepRange]:
        """What the next update does; `scale` may be one for each parameter. Parameters that no rank used are
        left out, as torch's optimizers leave out those without a gradient."""
        if isinstance(scale, float) and all(self.update.used) and len(set(self.steps)) == 1:
            return [StepRange(self.spans[0][0], self.numel, self._step(self.steps[0] + 1, scale))]
        found: list[StepRange] = []
        scales = [scale] * len(self.spans) if isinstance(scale, float) else list(scale)
        made: dict[tuple[int, float], HostStep] = {}  # most have had equally many
        for index, ((start, _), end) in enumerate(zip(self.spans, self._ends, strict=True)):
            if not self.update.used[index]:
                continue
            key = (self.steps[index] + 1, scales[index])
            step = made.get(key) or made.setdefault(key, self._step(*key))
            if found and found[-1].stop == start and found[-1].step == step:
                found[-1] = StepRange(found[-1].start, end, step)
            else:
                found.append(StepRange(start, end, step))
        return found

    def _step(self, count: int, scale: float) -> HostStep:
        return self.form.update.step_of(self.group, count, scale)

    @property
    def reversible(self) -> bool:
        """Whether the state before the next update can be told from the one after it."""
        return not self.form.lossy and self._step(1, 1.0).invertible

    @property
    def leap(self) -> float:
        """By how many times the square of the next gradient may exceed those before."""
        fewest = min(compress(self.steps, self.update.used), default=0)
        return self._step(fewest + 1, 1.0).leap(of_few=self.deferred is not None)

    # ------------------------------------------------------------------ as others see it

    @property
    def visible(self) -> bool:
        """Whether `optimizer.state` shows the moments themselves: they are fp32, and in memory."""
        return self.disk is None and not self.coded

    def shown(self, index: int, moments: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """One parameter's state as torch's optimizer names it. Moments that are 8-bit or on the disk are
        shown where they come along."""
        at, n = self.spans[index]
        found = {"step": self.shown_steps[index]} if self.form.update.counts else {}
        flat = moments if moments is not None else self._moments() if self.visible else {}
        return found | {
            key: tensor[at : at + n].view(self.params[index].local.shape) for key, tensor in flat.items()
        }

    @cached_property
    def sharded_params(self) -> list[Tensor]:
        """What the optimizer has."""
        return [param.sharded_param for param in self.params]

    def count(self) -> None:
        """One more update of those that were used, which stands."""
        used = self.update.used
        if all(used):
            self.steps = [count + 1 for count in self.steps]
            self._counts.add_(1.0)
        else:
            self.steps = [count + has for count, has in zip(self.steps, used, strict=True)]
            self._counts.copy_(torch.tensor(self.steps, dtype=torch.float32))
        self.update.end()

    def show(self) -> None:
        """`optimizer.state` shows the host's tensors themselves, so that state dicts and inspection work as
        ever."""
        assert self.optimizer is not None
        dicts = [self.shown(index) for index in range(len(self.params))]
        for sharded_param, state in zip(self.sharded_params, dicts, strict=True):
            self.optimizer.state[sharded_param] = state
        self._shown = _ShownState(dicts, {name: [state[name] for state in dicts] for name in dicts[0]})

    def unlike(self, states: Mapping[Any, Mapping[str, Any]]) -> ShardedParam | None:
        """A parameter of which `optimizer.state` does not show the host's own any more, or another count."""
        counted = not self.form.update.counts or self._counts.tolist() == self.steps
        if counted and self._shown.stands(list(map(states.get, self.sharded_params))):
            return None
        flat = self._moments() if self.visible else {}
        places = {key: (tensor.data_ptr(), tensor.element_size()) for key, tensor in flat.items()}
        for param, (at, n), count in zip(self.params, self.spans, self.steps, strict=True):
            state = states.get(param.sharded_param, {})
            found = [(state.get(key), start + at * width) for key, (start, width) in places.items() if n]
            same = all(isinstance(t, Tensor) and t.data_ptr() == place for t, place in found)
            if not same or (self.form.update.counts and state.get("step", -1) != count):
                return param
        return None

    @property
    def replaced(self) -> bool:
        """Whether the loop has put something in the place of the host's own in `optimizer.state`."""
        return self.optimizer is not None and self.unlike(self.optimizer.state) is not None

    def take_replaced(self) -> None:
        """Take over what the loop has put there."""
        if self.replaced:
            assert self.optimizer is not None
            states = self.optimizer.state
            self.before_change()
            self.load([dict(states.get(param.sharded_param, {})) for param in self.params])
            self.show()

    @property
    def moments(self) -> dict[str, str]:
        """The moments that this part has: torch's name → the kernels'."""
        return self.form.shown

    def _moments(self) -> dict[str, Tensor]:
        return {shown: getattr(self.rows, name) for shown, name in self.form.shown.items()}

    def decoded(self) -> dict[str, Tensor]:
        """The moments in fp32, flat; the state's own memory unless they are 8-bit or on the disk."""
        with self.lent():
            found = self._moments()
            if not self.coded:
                return found if self.disk is None else {key: t.clone() for key, t in found.items()}
            pair = moments8.decode(*self._codes())
            return dict(zip(("exp_avg", "exp_avg_sq"), (t.reshape(-1) for t in pair), strict=True))

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what was loaded for each parameter; what is missing was never updated."""
        flat = {key: torch.zeros(self.numel) for key in self.moments}
        for index, ((at, n), state) in enumerate(zip(self.spans, states, strict=True)):
            for key, tensor in flat.items():
                if isinstance(state.get(key), Tensor):
                    tensor[at : at + n].copy_(ShardedTensors.local(state[key]).reshape(-1))
            # Where no count is kept, all that matters is whether there was a first step.
            begun = any(isinstance(state.get(key), Tensor) for key in self.moments)
            self.steps[index] = int(state.get("step", begun)) if self.form.update.counts else int(begun)
            self.shown_steps[index].fill_(self.steps[index])
        with self.lent(write=True):
            if self.coded:
                self.load_codes(moments8.encode(flat["exp_avg"], flat["exp_avg_sq"], max(self.steps)))
            else:
                for key, tensor in self._moments().items():
                    tensor.copy_(flat[key])

    def load_codes(self, codes: Sequence[Tensor]) -> None:
        """8-bit moments and their scales, bit for bit. The state is in memory."""
        for stored, code in zip(self._codes(), codes, strict=True):
            stored.copy_(code)

    def _codes(self) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(self.rows, AdamRows)
        assert self.rows.scales is not None
        return self.rows.exp_avg, self.rows.exp_avg_sq, self.rows.scales

    def clear(self, index: int) -> None:
        """One parameter as before its first update."""
        self.steps[index] = 0
        self.shown_steps[index].zero_()
        at, zeros = self.spans[index][0], torch.zeros(self._ends[index] - self.spans[index][0])
        if not self.coded:
            for name in self.moments.values():
                self.write(name, at, zeros)
            return
        places = {"exp_avg": at, "exp_avg_sq": at, "scales": moments8.scale_count(at)}
        for (name, start), codes in zip(places.items(), moments8.encode(zeros, zeros, 0), strict=True):
            self.write(name, start, codes)

    @property
    def coded(self) -> bool:
        return self.form.coded

    @property
    def splits(self) -> bool:
        return self.form.splits

    @property
    def paged(self) -> bool:
        """Whether the compute weights rest on the disk, with the state."""
        return self.form.weight is not None

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.targets[0].dtype

    @property
    def stage_bytes(self) -> int:
        """The weight takes the gradient's place, except where both are read (split master) or their sizes
        differ. Weights on the disk come with the state."""
        if self.paged:
            return self.numel * self.grad_dtype.itemsize
        weight = 0 if self.in_place else self.weight_dtype.itemsize
        return self.numel * (self.grad_dtype.itemsize + weight)

    @property
    def in_place(self) -> bool:
        return not self.splits and self.grad_dtype.itemsize == self.weight_dtype.itemsize
