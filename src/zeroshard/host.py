"""The life of an update on the host (ZeRO-Offload): gradient lands → staged out → one pass over the state → weight staged back.

Tensors of a part (P elements: one bucket's rows on this rank, padded):

- `flat`    gradient dtype, on the device: the reduced gradient, kept until the global norm is known.
- `stage`   pinned bytes from the ring: the gradient on its way out, and in its place the new weight on its way back.
- `state`   on the host, not pinned: fp32 master (or the 16-bit remainder of a split one) and moments.
- `targets` compute dtype, on the device or the host: this rank's rows of each parameter, which the next forward uses.

[Note: clipping without waiting] The global norm is known only when backward ends, and by then the updates should be almost done.
While the norm has stayed clear of the limit, each part is updated as it lands, with the gradient as it is. `optimizer.step()`
then looks at the norm. Below the limit, the update was right. Above it, every part is taken back by the inverse formula, evaluated
in fp64, and done again with the clipped gradient: equal to the plain order to fp32 rounding. While the norm is near the limit or
above it, nothing is updated before the norm is known; the update then hides behind the next forward, unit by unit.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .errors import StateError, TierError
from .native import AdamRows, AdamStep, SgdRows, SgdStep, Workers, adam_update, join, sgd_update, split
from .native import moments8
from .shard import Faces, Param
from .tier import Copies, Mark, Ring, Stage

SHARE = 1 << 20  # elements that a worker updates at a time, at most
GRAIN = 1 << 16  # elements that a worker updates at least: below, handing out work costs more than doing it
AHEAD = 2  # parts on their way to the host while one is updated
BACKLOG = 4  # parts that may wait on the device where no room was planned for all
BLOCK = 4096  # shares are whole pages, and whole blocks of 8-bit moments
CLEAR = 0.95  # updates start before the norm is known while the last norm was below this share of the limit


@dataclass(frozen=True)
class Run:
    """Neighbouring parameters of a part that have had equally many updates: elements start..stop and the numbers of the step."""

    start: int
    stop: int
    step: AdamStep | SgdStep


@dataclass
class Part:
    """One bucket's update: where its gradient, state and weights are, and how far it has come."""

    label: str
    params: list[Param]
    spans: list[tuple[int, int]]  # offset and length of each parameter's rows in the flat gradient
    numel: int
    group: dict[str, Any]  # the optimizer's, for its hyperparameters
    state: AdamRows | SgdRows
    targets: list[Tensor]  # flat
    grad_dtype: torch.dtype
    counted: list[bool]  # whether this rank counts the parameter towards the global norm
    flat: Tensor | None = None
    squares: Tensor | None = None
    used: list[bool] = field(default_factory=list)
    taken: list[Run] | None = None  # the update under way or done since the last step
    ready: Mark = field(default_factory=Mark)
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.done.set()
        ends = [at for at, _ in self.spans[1:]] + [self.numel]
        self.gaps = [(at + n, end) for (at, n), end in zip(self.spans, ends, strict=True) if at + n < end]  # padding
        self.steps = [0] * len(self.params)  # updates that each parameter has had
        self._shares: dict[tuple[int, int], AdamRows | SgdRows] = {}
        self.shown_steps: list[Tensor] = []  # the same, as `optimizer.state` shows it

    def share(self, start: int, stop: int) -> AdamRows | SgdRows:
        """The state of some elements; cut once, as the same shares are asked for every step."""
        found = self._shares.get((start, stop))
        if found is None:
            found = self._shares[start, stop] = self.state.rows(start, stop)
        return found

    def shown(self, index: int, moments: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """One parameter's state as torch's optimizer names it. 8-bit moments are shown where they come decoded."""
        at, n = self.spans[index]
        found = {"step": self.shown_steps[index]} if isinstance(self.state, AdamRows) else {}
        flat = moments if moments is not None else {} if self.coded else self._moments()
        return found | {key: tensor[at : at + n].view(self.params[index].local.shape) for key, tensor in flat.items()}

    def _moments(self) -> dict[str, Tensor]:
        names = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq", "momentum": "momentum_buffer"}
        found = {shown: getattr(self.state, name, None) for name, shown in names.items()}
        return {shown: tensor for shown, tensor in found.items() if tensor is not None}

    def decoded(self) -> dict[str, Tensor]:
        """The moments in fp32, flat; the state's own memory unless they are 8-bit."""
        if not self.coded:
            return self._moments()
        assert isinstance(self.state, AdamRows) and self.state.scales is not None
        pair = moments8.decode(self.state.exp_avg, self.state.exp_avg_sq, self.state.scales)
        return dict(zip(("exp_avg", "exp_avg_sq"), (t.reshape(-1) for t in pair), strict=True))

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what was loaded for each parameter; what is missing was never updated."""
        flat = {key: torch.zeros_like(tensor) for key, tensor in self.decoded().items()}
        for index, ((at, n), state) in enumerate(zip(self.spans, states, strict=True)):
            for key, tensor in flat.items():
                if isinstance(state.get(key), Tensor):
                    tensor[at : at + n].copy_(Faces.local(state[key]).reshape(-1))
            # SGD keeps no count; whether there was a first step is all that it needs.
            self.steps[index] = int(state.get("step", isinstance(state.get("momentum_buffer"), Tensor)))
            self.shown_steps[index].fill_(self.steps[index])
        if self.coded:
            assert isinstance(self.state, AdamRows) and self.state.scales is not None
            codes = moments8.encode(flat["exp_avg"], flat["exp_avg_sq"], max(self.steps))
            for stored, code in zip((self.state.exp_avg, self.state.exp_avg_sq, self.state.scales), codes, strict=True):
                stored.copy_(code)
        else:
            for key, tensor in self._moments().items():
                tensor.copy_(flat[key])

    @property
    def coded(self) -> bool:
        return isinstance(self.state, AdamRows) and self.state.scales is not None

    @property
    def splits(self) -> bool:
        return self.state.master is None

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.targets[0].dtype

    @property
    def stage_bytes(self) -> int:
        """The weight takes the gradient's place, except where both are read (split master) or their sizes differ."""
        return self.numel * self.grad_dtype.itemsize + (0 if self.in_place else self.numel * self.weight_dtype.itemsize)

    @property
    def in_place(self) -> bool:
        return not self.splits and self.grad_dtype.itemsize == self.weight_dtype.itemsize


@dataclass(frozen=True)
class _Job:
    """An update that is due. `landed`: when its gradient is complete on the device."""

    part: Part
    flat: Tensor
    runs: list[Run]
    landed: Mark


@dataclass(frozen=True)
class _Staged:
    """An update whose gradient is on its way to the host."""

    job: _Job
    stage: Stage
    arrived: Mark


class _Countdown:
    """Calls `then` when `count` things are done."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count, self._then, self._lock = count, then, threading.Lock()

    def one_done(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._then()


class HostUpdates:
    """Runs the parts on worker threads.

    Newest first: what lands last in backward is needed first in the next forward. So the host may fall behind during backward and
    catch up during forward, and the two together hide it.
    """

    def __init__(self, parts: Sequence[Part], ring: Ring, copies: Copies, workers: Workers, clip_norm: float,
                 undo: bool = True) -> None:  # fmt: skip
        self.parts, self.ring, self.copies, self.workers = list(parts), ring, copies, workers
        self.clip_norm, self.undo = clip_norm, undo
        self.norm = 0.0
        self.counts = {"early": 0, "late": 0, "undone": 0}  # steps by how their updates ran
        # 8-bit moments cannot be taken back to their exact codes, nor AMSGrad's maximum to the one before, so they wait for the norm.
        lossy = any(p.coded or getattr(p.state, "max_exp_avg_sq", None) is not None for p in self.parts)
        self._reversible = not (lossy and math.isfinite(clip_norm))
        # [Note: clipping without waiting]. Nothing is known of the first norm, and it often is the largest.
        self._early = not math.isfinite(clip_norm)
        self._failure: tuple[str, BaseException] | None = None
        self._due: list[_Job] = []
        self._changed = threading.Condition()
        self._closing = False
        self._busy = threading.Semaphore(2)
        self._thread = threading.Thread(target=self._run, name="zeroshard-offload", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ during backward

    def accept(self, part: Part, flat: Tensor, used: list[bool]) -> None:
        """A reduced gradient has landed on the device."""
        self.check()
        if not any(used):
            return
        if part.flat is not None or part.taken is not None:
            raise StateError(f"a second backward before optimizer.step(): with clip_norm the update of `{part.params[0].name}` and others "
                             "is under way already. Accumulate inside run.no_sync(), and step after each synchronised backward; a backward "
                             "whose gradients are not wanted here (a GAN's other half) belongs inside run.no_sync() too.")  # fmt: skip
        part.flat, part.used = flat, used
        if math.isfinite(self.clip_norm):
            part.squares = self._square_sum(part, flat)
        if self._early:
            self._start(part, 1.0)
            if not self._keeps_gradients:
                part.flat = None

    @property
    def _keeps_gradients(self) -> bool:
        return math.isfinite(self.clip_norm) and self.undo

    @torch.no_grad()
    def _square_sum(self, part: Part, flat: Tensor) -> Tensor:
        if all(part.counted):
            if part.gaps:  # buckets share wires from stage 2 on: here may be what another one left
                torch._foreach_zero_([flat[start:stop] for start, stop in part.gaps])
            whole: Tensor = torch.linalg.vector_norm(flat[: part.numel], dtype=torch.float32)
            return whole.square()
        rows = [flat[at : at + n] for (at, n), counts in zip(part.spans, part.counted, strict=True) if counts]
        return torch.stack([torch.linalg.vector_norm(r, dtype=torch.float32).square() for r in rows] or [flat.new_zeros(())]).sum()

    def _start(self, part: Part, scale: float) -> None:
        """Make a part's update due."""
        assert part.flat is not None
        part.taken = self._runs_of(part, scale)
        part.done.clear()
        job = _Job(part, part.flat, part.taken, self.copies.here())
        with self._changed:
            # Gradients that wait on the device take room there; without `undo` none was planned for all of them.
            while not self.undo and len(self._due) >= BACKLOG and self._failure is None:
                self._changed.wait(1.0)
            self._due.append(job)
            self._changed.notify_all()

    @staticmethod
    def _weights_in(part: Part, stage: Stage) -> Tensor:
        return stage.view(part.weight_dtype, part.numel, 0 if part.in_place else part.numel * part.grad_dtype.itemsize)

    def _runs_of(self, part: Part, scale: float) -> list[Run]:
        """Parameters that no rank used are left out, as torch's optimizers leave out those without a gradient."""
        ends = [at for at, _ in part.spans[1:]] + [part.numel]
        runs: list[Run] = []
        for index, ((start, _), end) in enumerate(zip(part.spans, ends, strict=True)):
            if not part.used[index]:
                continue
            step = self._step_of(part, part.steps[index] + 1, scale)
            if runs and runs[-1].stop == start and runs[-1].step == step:
                runs[-1] = Run(runs[-1].start, end, step)
            else:
                runs.append(Run(start, end, step))
        return runs

    @staticmethod
    def _step_of(part: Part, count: int, scale: float) -> AdamStep | SgdStep:
        group = part.group
        lr = float(group["lr"])
        if isinstance(part.state, AdamRows):
            beta1, beta2 = (float(b) for b in group["betas"])
            return AdamStep(lr=lr, step=count, beta1=beta1, beta2=beta2, eps=float(group["eps"]), weight_decay=float(group["weight_decay"]),
                            decoupled=bool(group["decoupled_weight_decay"]), maximize=bool(group["maximize"]), grad_scale=scale)  # fmt: skip
        return SgdStep(lr=lr, momentum=float(group["momentum"]), dampening=float(group["dampening"]), first=count == 1,
                       weight_decay=float(group["weight_decay"]), nesterov=bool(group["nesterov"]), maximize=bool(group["maximize"]),
                       grad_scale=scale)  # fmt: skip

    # ------------------------------------------------------------------ worker side

    def _run(self) -> None:
        if self.copies.device.type == "cuda":
            torch.cuda.set_device(self.copies.device)
        staged: deque[_Staged] = deque()
        while self._wait_for_work(bool(staged)):
            job = None
            try:
                while len(staged) < AHEAD and (job := self._next_due(idle=not staged)) is not None:
                    staged.append(self._stage(job))
                job = staged[0].job
                self._update(staged.popleft())
            except BaseException as error:  # it must reach the training thread, whatever it is
                self._fail(job.part if job is not None else None, error)
            if self._failure is not None:
                return
            job = None

    def _wait_for_work(self, staged: bool) -> bool:
        with self._changed:
            while not staged and not self._due and not self._closing:
                self._changed.wait()
            return staged or bool(self._due)

    def _next_due(self, idle: bool) -> _Job | None:
        """The newest job whose gradient is there. The training thread launches far ahead of the device, so the newest job may be the
        last to be ready: where none is ready, an idle host takes the oldest, which will be first."""
        with self._changed:
            ready = next((i for i in reversed(range(len(self._due))) if self._due[i].landed.passed()), None)
            if ready is None and not (idle and self._due):
                return None
            job = self._due.pop(ready if ready is not None else 0)
            self._changed.notify_all()
            return job

    def _stage(self, job: _Job) -> _Staged:
        """Send a part's gradient to the host; with a split master its weights too, which are the master's other half."""
        part, stage = job.part, self.ring.take()
        to, of = [stage.view(part.grad_dtype, part.numel)], [job.flat[: part.numel]]
        if part.splits:
            weights = self._weights_in(part, stage)
            to += [weights[at : at + n] for at, n in part.spans]
            of += part.targets
        return _Staged(job, stage, self.copies.out(to, of, job.landed))

    def _update(self, staged: _Staged) -> None:
        """Hand out a part's elements to the workers; whoever finishes last sends the weights back.

        Two parts are in the workers' hands at a time, so that none of them idles while the last share of a part is done.
        """
        part, stage = staged.job.part, staged.stage
        staged.arrived.wait_on_host()
        grad, weight = stage.view(part.grad_dtype, part.numel), self._weights_in(part, stage)
        share = min(SHARE, max(GRAIN, -(-part.numel // (len(self.workers) * BLOCK)) * BLOCK))
        shares = [(run, at, min(at + share, run.stop)) for run in staged.job.runs for at in range(run.start, run.stop, share)]
        self._busy.acquire()
        if not shares:  # this rank has no rows of any of them
            self._finish(staged, weight)
            return
        left = _Countdown(len(shares), partial(self._finish, staged, weight))
        for run, start, stop in shares:
            state = part.share(start, stop)
            if isinstance(state, AdamRows):
                assert isinstance(run.step, AdamStep)
                task: Callable[[], None] = partial(adam_update, state, grad[start:stop], weight[start:stop], run.step)
            else:
                assert isinstance(run.step, SgdStep)
                task = partial(sgd_update, state, grad[start:stop], weight[start:stop], run.step)
            self.workers.submit(partial(self._work, part, task, left))

    def _work(self, part: Part, task: Callable[[], None], left: _Countdown) -> None:
        try:
            task()
            left.one_done()
        except BaseException as error:
            self._fail(part, error)

    def _finish(self, staged: _Staged, weight: Tensor) -> None:
        part = staged.job.part
        moved = [(t, weight[at : at + n]) for t, (at, n), used in zip(part.targets, part.spans, part.used, strict=True) if used]
        part.ready = self.copies.back([t for t, _ in moved], [w for _, w in moved])
        self.ring.give(staged.stage, part.ready)
        self._busy.release()
        part.done.set()

    def _fail(self, part: Part | None, error: BaseException) -> None:
        """Keep an error for the training thread, and wake whoever waits for what will not come."""
        if self._failure is None:
            self._failure = (part.label if part is not None else "a part", error)
        self.ring.fail(error)
        self._busy.release()
        with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------ step

    def squares(self) -> list[Tensor]:
        """What this rank's parts add to the square of the global norm."""
        return [part.squares for part in self.parts if part.squares is not None]

    def commit(self, norm: float, scale: float) -> None:
        """`optimizer.step()`: settle what the global norm says; `scale` is what it clips gradients by."""
        self.check()
        self.norm = norm
        waiting = [part for part in self.parts if part.flat is not None or part.taken is not None]
        self._check_unchanged(waiting)
        if not self._early:
            self.counts["late"] += 1
            for part in reversed(waiting):  # newest first: the first unit of the forward is done first
                self._start(part, scale)
        elif scale < 1.0 and waiting:
            self._redo(waiting, scale)
        else:
            self.counts["early"] += 1
        for part in waiting:
            part.steps = [count + used for count, used in zip(part.steps, part.used, strict=True)]
            for shown, count in zip(part.shown_steps, part.steps, strict=True):
                shown.fill_(count)
            part.flat = part.squares = part.taken = None
        self.resume(norm)

    def resume(self, norm: float) -> None:
        """Go on after a step whose norm this was."""
        self.norm = norm
        self._early = self._reversible and (not math.isfinite(self.clip_norm) or norm < CLEAR * self.clip_norm)

    def _check_unchanged(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.taken is not None and part.taken != self._runs_of(part, 1.0):
                raise StateError(f"hyperparameters of `{part.params[0].name}` changed between backward and optimizer.step(), and the update "
                                 "has begun with the old ones. Change them after the step, as LR schedulers do.")  # fmt: skip

    def _redo(self, parts: Sequence[Part], scale: float) -> None:
        """The norm was above the limit after all: take the updates back and do them with the clipped gradient."""
        if not self.undo:
            raise StateError(f"the gradient norm {self.norm:.4g} exceeds clip_norm={self.clip_norm} after updates had begun, and no room was "
                             "planned to take them back (undo=False). Load the last checkpoint and pass undo=True.")  # fmt: skip
        self.counts["undone"] += 1
        for part in parts:
            self.wait(part)
            assert part.taken is not None and part.flat is not None
            part.ready.wait_on_host()
            for run in part.taken:
                take_back(part, part.flat[: part.numel].cpu(), run)
            self._start(part, scale)

    @property
    def pending(self) -> bool:
        """Whether a backward has been that no step has followed."""
        return any(part.flat is not None or part.taken is not None for part in self.parts)

    def discard(self, parts: Sequence[Part]) -> None:
        """The gradient of the last backward is not wanted after all: take back what was done with it."""
        for part in parts:
            if part.taken is not None:
                self.wait(part)
                if part.flat is None:
                    raise StateError(f"the gradients of `{part.params[0].name}` and others were dropped between backward and optimizer.step(), "
                                     "and their update has begun, with no room planned to take it back. Run a backward whose gradients are not "
                                     "wanted inside run.no_sync(), or pass a finite clip_norm and Offload(undo=True).")  # fmt: skip
                part.ready.wait_on_host()
                for run in part.taken:
                    take_back(part, part.flat[: part.numel].cpu(), run)
                if part.state.master is not None:
                    part.ready = self.copies.back(part.targets, [part.state.master[at : at + n] for at, n in part.spans])
            part.flat = part.squares = part.taken = None

    # ------------------------------------------------------------------ forward

    def wait(self, part: Part) -> None:
        """The next forward needs this part's weights."""
        while not part.done.wait(0.5):
            self.check()
        self.check()
        part.ready.wait_on_device()

    def drain(self) -> None:
        for part in self.parts:
            self.wait(part)
            part.ready.wait_on_host()

    def check(self) -> None:
        """Raise in the training thread what failed in a worker."""
        if self._failure is not None:
            label, error = self._failure
            raise TierError(f"the host update of {label} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.workers.close()


@torch.no_grad()
def take_back(part: Part, grad: Tensor, run: Run, block: int = 1 << 20) -> None:
    """The state before a run, from the state after it and the gradient: the inverse formula in fp64."""
    weights, step = _joined_weights(part), run.step
    for at in range(run.start, run.stop, block):
        rows = slice(at, min(at + block, run.stop))
        g = grad[rows].double() * step.grad_scale * (-1.0 if step.maximize else 1.0)
        if isinstance(part.state, AdamRows):
            assert isinstance(step, AdamStep)
            _take_back_adam(part.state, weights, g, step, rows)
        else:
            assert isinstance(step, SgdStep)
            _take_back_sgd(part.state, weights, g, step, rows)
    if part.splits:
        _store_split(part, weights)


def _take_back_adam(state: AdamRows, w: Tensor, g: Tensor, step: AdamStep, rows: slice) -> None:
    n = step.numbers()
    m, v, x = state.exp_avg[rows].double(), state.exp_avg_sq[rows].double(), w[rows].double()
    before = x - n.stride * m / (v.sqrt() / n.bias + n.eps)
    if n.coupled:
        g = g + n.decay * before
    else:
        before = before / n.decay
    w[rows] = before.to(w.dtype)
    if n.step == 1:  # exactly, where the difference of two large numbers would leave a rest
        state.exp_avg[rows] = state.exp_avg_sq[rows] = 0.0
        return
    rest = m - n.lerp * g
    rest[rest.abs() <= 2.0**-23 * m.abs()] = 0.0  # a mean of zero, but for the rounding of the update
    mean, square = rest / (1.0 - n.lerp), ((v - n.gain2 * g * g) / n.beta2).clamp_(min=0.0)
    # Next to a large gradient a small square is lost, and a mean over no square would be a huge step. By Cauchy and Schwarz no square
    # is smaller than this share of the mean's.
    decay = (1.0 - n.lerp) ** 2 / n.beta2 if n.beta2 > 0.0 else 1.0
    if decay < 1.0:
        square = torch.maximum(square, mean.square() * (n.gain2 * (1.0 - decay) / n.lerp**2))
    state.exp_avg[rows], state.exp_avg_sq[rows] = mean.float(), square.float()


def _take_back_sgd(state: SgdRows, w: Tensor, g: Tensor, step: SgdStep, rows: slice) -> None:
    n = step.numbers()
    x = w[rows].double()
    buf = state.momentum[rows].double() if state.momentum is not None else None
    # x' = x + stride * d, with d linear in g and x where weight decay is coupled: solve for x first.
    if buf is None:
        before = (x - n.stride * g) / (1.0 + n.stride * n.decay)
    elif n.nesterov:
        before = (x - n.stride * (g + n.inertia * buf)) / (1.0 + n.stride * n.decay)
    else:
        before = x - n.stride * buf
    w[rows] = before.to(w.dtype)
    if buf is not None:
        assert state.momentum is not None
        full = g + n.decay * before
        state.momentum[rows] = (torch.zeros_like(buf) if n.first else (buf - n.gain * full) / n.inertia).float()


def _joined_weights(part: Part) -> Tensor:
    if part.state.master is not None:
        return part.state.master
    assert part.state.remainder is not None
    weight = torch.zeros(part.numel, dtype=torch.bfloat16)
    for (at, n), target in zip(part.spans, part.targets, strict=True):
        weight[at : at + n].copy_(target)
    return join(weight, part.state.remainder)


def _store_split(part: Part, master: Tensor) -> None:
    assert part.state.remainder is not None
    weight, remainder = split(master)
    part.state.remainder.copy_(remainder)
    for (at, n), target in zip(part.spans, part.targets, strict=True):
        target.copy_(weight[at : at + n])



class HostGradients:
    """The plain way to the host: gradients land there and `home.grad` shows them; the optimizer's own step updates the master.

    For optimizers without a native kernel, and for loops that clip or unscale gradients themselves.
    """

    def __init__(self, params: list[Param], grads: list[Tensor], flat: Tensor) -> None:
        self.params, self.grads, self.flat = params, grads, flat

    @torch.no_grad()
    def accept(self, flat: Tensor, used: list[bool]) -> None:
        held = [None if p.home.grad is None else Faces.local(p.home.grad).clone() for p in self.params]
        self.flat.copy_(flat[: self.flat.numel()])
        for param, grad, old, has in zip(self.params, self.grads, held, used, strict=True):
            local = Faces.local(grad)
            if old is not None:
                local.add_(old) if has else local.copy_(old)
            param.home.grad = grad if has or old is not None else None
