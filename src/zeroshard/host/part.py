"""A part: the optimizer state of one bucket off the device, and how far its update has come.

Tensors of a part (P elements: one bucket's rows on this rank, padded):

- `flat`    gradient dtype, on the device: the reduced gradient, kept until the global norm is known.
- `stage`   pinned bytes from the ring: the gradient on its way out, and in its place the new weight on its
  way back.
- `state`   in host memory, not pinned: fp32 master (or the 16-bit remainder of a split one) and moments.
  Where the part rests on the disk, it is there only while it is updated: in a berth that `tier.paging` lends.
- `targets` compute dtype, on the device or the host: this rank's rows of each parameter, which the next
  forward uses. Where they rest on the disk they are a part of the page, and `weights` while it is in memory.
- `held`    compute dtype, pinned, of parts whose updates may begin a step early: the weights after it.

A part is *overlapped*: updated from its gradient as that lands. Or it is *stepped*: its gradient lands in
host memory, where the loop sees and may change it, and `optimizer.step()` updates from there (`landing`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.life.guard import Guarded
from zeroshard.life.shard import Faces, Param
from zeroshard.native import AdamRows, AdamStep, SgdRows, SgdStep, join, moments8, split
from zeroshard.tier import Mark, Page, Paging

from .form import Array, Form
from .landing import HostGradients

# Moments as torch's optimizers name them, and as the kernels do.
MOMENTS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "max_exp_avg_sq": "max_exp_avg_sq",
    "momentum_buffer": "momentum",
}


@dataclass(frozen=True)
class Stretch:
    """Neighbouring parameters of a part that have had equally many updates: elements start..stop and the
    numbers of the step."""

    start: int
    stop: int
    step: AdamStep | SgdStep


@dataclass(frozen=True)
class Strip:
    """Targets that follow one another in memory as they do in the flat gradient: one copy for all of them,
    `target` from or to elements start..stop."""

    target: Tensor
    start: int
    stop: int


def joined(targets: Sequence[Tensor], spans: Sequence[tuple[int, int]]) -> list[Strip]:
    """As few strips as can be. Every copy takes the interpreter from the thread that launches kernels."""
    found: list[Strip] = []
    for target, (at, n) in zip(targets, spans, strict=True):
        last = found[-1] if found else None
        if last is not None and last.stop == at and n and _follows(last.target, target):
            whole = last.target.as_strided((last.target.numel() + n,), (1,))
            found[-1] = Strip(whole, last.start, at + n)
        elif n:
            found.append(Strip(target, at, at + n))
    return found


def _follows(first: Tensor, second: Tensor) -> bool:
    """Whether two flat tensors are neighbours in one memory."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    plain = first.is_contiguous() and second.is_contiguous()
    return same and plain and first.data_ptr() + first.nbytes == second.data_ptr()


@dataclass(frozen=True)
class OnDisk:
    """A part's place on the disk, while its page is away."""

    paging: Paging
    page: Page

    def read(self, array: Array, start: int, stop: int) -> Tensor:
        """A copy of some elements of one of the page's arrays."""
        width = array.dtype.itemsize
        at, nbytes = array.offset + start * width, (stop - start) * width
        return self.paging.peek(self.page, at, nbytes).view(array.dtype)

    def write(self, array: Array, start: int, values: Tensor) -> None:
        self.paging.poke(self.page, array.offset + start * array.dtype.itemsize, values.to(array.dtype))


class PagedMaster:
    """The master rows of one parameter on the disk; see `shard.Master`. `weight`: its compute rows, where
    they are not on the disk too."""

    on_disk = True

    def __init__(self, disk: OnDisk, arrays: dict[str, Array], at: int, weight: Tensor) -> None:
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


class Done(Protocol):
    """Tells when an update is done."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


def _never_begun() -> Done:
    done = threading.Event()
    done.set()
    return done


@dataclass
class Part(Guarded):
    """One bucket's update: where its gradient, state and weights are, and how far it has come."""

    label: str
    params: list[Param]
    spans: list[tuple[int, int]]  # offset and length of each parameter's rows in the flat gradient
    numel: int
    group: dict[str, Any]  # the optimizer's, for its hyperparameters
    form: Form
    state: AdamRows | SgdRows | None  # None: on the disk
    targets: list[Tensor]  # flat
    grad_dtype: torch.dtype
    counted: list[bool]  # whether this rank counts the parameter towards the global norm
    optimizer: Optimizer | None = None  # which shows the state
    disk: OnDisk | None = None  # its place there, if it rests on the disk
    landing: HostGradients | None = None  # where its gradient is, if it is stepped
    weights: Tensor | None = None  # those of the page, while it is in memory
    flat: Tensor | None = None
    squares: Tensor | None = None
    room: tuple[Tensor, Tensor] | None = None  # for its squares, and for what is added to them
    used: list[bool] = field(default_factory=list)
    taken: list[Stretch] | None = None  # the update under way or done since the last step
    held: Tensor | None = None  # host memory for new weights that must not show yet; see `updates`
    holding: bool = False  # an update under way or done leaves its weights there
    free: Mark = field(default_factory=Mark)  # from when on `targets` may be written
    ready: Mark = field(default_factory=Mark)
    signs: tuple[Mark, Mark] | None = None  # its own, which C code sets: the gradient is here; `ready`
    done: Done = field(default_factory=_never_begun)
    known: bool = True  # whether the training thread has waited for the last update that was begun
    turn: int = 0  # as which of all parts forward last asked for its weights

    def __post_init__(self) -> None:
        self._ends = [at for at, _ in self.spans[1:]] + [self.numel]
        ends = zip(self.spans, self._ends, strict=True)
        self.gaps = [(at + n, end) for (at, n), end in ends if at + n < end]  # padding
        self.steps = [0] * len(self.params)  # updates that each parameter has had
        self.strips = joined(self.targets, self.spans)
        self._shares: dict[tuple[int, int], AdamRows | SgdRows] = {}
        self.shown_steps: list[Tensor] = []  # the same, as `optimizer.state` shows it

    # ------------------------------------------------------------------ the state, wherever it rests

    @property
    def rows(self) -> AdamRows | SgdRows:
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

    def share(self, start: int, stop: int) -> AdamRows | SgdRows:
        """The state of some elements; cut once, as the same shares are asked for every step."""
        if self.disk is not None:
            return self.rows.rows(start, stop)  # in another berth every time
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

    def _array(self, name: str) -> Array:
        return self.form.arrays(self.numel)[name]

    @torch.no_grad()
    def square_sum(self, flat: Tensor) -> Tensor:
        """What a gradient adds to the square of the global norm."""
        assert self.room is not None
        total, one = self.room
        if all(self.counted):
            if self.gaps:  # buckets share wires from stage 2 on: here may be what another one left
                torch._foreach_zero_([flat[start:stop] for start, stop in self.gaps])
            torch.linalg.vector_norm(flat[: self.numel], dtype=torch.float32, out=total)
            return total.square_()
        total.zero_()
        for (at, n), counts in zip(self.spans, self.counted, strict=True):
            if counts:
                torch.linalg.vector_norm(flat[at : at + n], dtype=torch.float32, out=one)
                total.addcmul_(one, one)
        return total

    def strips_of(self, used: Sequence[bool]) -> list[Strip]:
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

    def stretches(self, scale: float) -> list[Stretch]:
        """What the next update does. Parameters that no rank used are left out, as torch's optimizers leave
        out those without a gradient."""
        found: list[Stretch] = []
        made: dict[int, AdamStep | SgdStep] = {}  # most have had equally many
        for index, ((start, _), end) in enumerate(zip(self.spans, self._ends, strict=True)):
            if not self.used[index]:
                continue
            count = self.steps[index] + 1
            step = made.get(count) or made.setdefault(count, self._step(count, scale))
            if found and found[-1].stop == start and found[-1].step == step:
                found[-1] = Stretch(found[-1].start, end, step)
            else:
                found.append(Stretch(start, end, step))
        return found

    def _step(self, count: int, scale: float) -> AdamStep | SgdStep:
        group = self.group
        lr = float(group["lr"])
        if self.form.kind == "adam":
            beta1, beta2 = (float(b) for b in group["betas"])
            return AdamStep(
                lr=lr,
                step=count,
                beta1=beta1,
                beta2=beta2,
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                decoupled=bool(group["decoupled_weight_decay"]),
                maximize=bool(group["maximize"]),
                grad_scale=scale,
            )
        return SgdStep(
            lr=lr,
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            first=count == 1,
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            grad_scale=scale,
        )

    # ------------------------------------------------------------------ as others see it

    @property
    def visible(self) -> bool:
        """Whether `optimizer.state` shows the moments themselves: they are fp32, and in memory."""
        return self.disk is None and not self.coded

    def shown(self, index: int, moments: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """One parameter's state as torch's optimizer names it. Moments that are 8-bit or on the disk are
        shown where they come along."""
        at, n = self.spans[index]
        found = {"step": self.shown_steps[index]} if self.form.kind == "adam" else {}
        flat = moments if moments is not None else self._moments() if self.visible else {}
        return found | {
            key: tensor[at : at + n].view(self.params[index].local.shape) for key, tensor in flat.items()
        }

    def unlike(self, states: Mapping[Any, Mapping[str, Any]]) -> Param | None:
        """A parameter of which `optimizer.state` does not show the host's own any more, or another count."""
        flat = self._moments() if self.visible else {}
        places = {key: (tensor.data_ptr(), tensor.element_size()) for key, tensor in flat.items()}
        for param, (at, n), count in zip(self.params, self.spans, self.steps, strict=True):
            state = states.get(param.home, {})
            found = [(state.get(key), start + at * width) for key, (start, width) in places.items() if n]
            same = all(isinstance(t, Tensor) and t.data_ptr() == place for t, place in found)
            if not same or (self.form.kind == "adam" and state.get("step", -1) != count):
                return param
        return None

    @property
    def moments(self) -> dict[str, str]:
        """The moments that this part has: torch's name → the kernels'."""
        return {shown: name for shown, name in MOMENTS.items() if name in self.form.dtypes()}

    def _moments(self) -> dict[str, Tensor]:
        return {shown: getattr(self.rows, name) for shown, name in self.moments.items()}

    def decoded(self) -> dict[str, Tensor]:
        """The moments in fp32, flat; the state's own memory unless they are 8-bit or on the disk."""
        with self.lent():
            found = self._moments()
            if not self.coded:
                return found if self.disk is None else {key: t.clone() for key, t in found.items()}
            assert isinstance(self.rows, AdamRows)
            assert self.rows.scales is not None
            pair = moments8.decode(self.rows.exp_avg, self.rows.exp_avg_sq, self.rows.scales)
            return dict(zip(("exp_avg", "exp_avg_sq"), (t.reshape(-1) for t in pair), strict=True))

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what was loaded for each parameter; what is missing was never updated."""
        flat = {key: torch.zeros(self.numel) for key in self.moments}
        for index, ((at, n), state) in enumerate(zip(self.spans, states, strict=True)):
            for key, tensor in flat.items():
                if isinstance(state.get(key), Tensor):
                    tensor[at : at + n].copy_(Faces.local(state[key]).reshape(-1))
            # SGD keeps no count; whether there was a first step is all that it needs.
            self.steps[index] = int(state.get("step", isinstance(state.get("momentum_buffer"), Tensor)))
            self.shown_steps[index].fill_(self.steps[index])
        with self.lent(write=True):
            if self.coded:
                self.load_codes(moments8.encode(flat["exp_avg"], flat["exp_avg_sq"], max(self.steps)))
            else:
                for key, tensor in self._moments().items():
                    tensor.copy_(flat[key])

    def load_codes(self, codes: Sequence[Tensor]) -> None:
        """8-bit moments and their scales, bit for bit. The state is in memory."""
        assert isinstance(self.rows, AdamRows)
        assert self.rows.scales is not None
        for stored, code in zip(
            (self.rows.exp_avg, self.rows.exp_avg_sq, self.rows.scales), codes, strict=True
        ):
            stored.copy_(code)

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
