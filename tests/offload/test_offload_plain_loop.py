"""The plain loop with state on the host: `p.grad` is a handle, and every loop has torch's numbers."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from offload_loop import Pace, batch, furthest, make_model, named_state, paced
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import zeroshard as zs
from zeroshard.kernels import update_rows
from zeroshard.offload import python_executor
from zeroshard.offload.deferred import GradHandle
from zeroshard.offload.group import UpdateDone
from zeroshard.offload.python_executor import PythonExecutor
from zeroshard.offload.updates import HostUpdates
from zeroshard.params.guarded import GuardedParam
from zeroshard.params.sharded_param import ShardedTensors
from zeroshard.testing import assert_same_bits, ranks

STEPS = 9
CALM = 6  # steps that clip next to nothing: updates begin early
HOST = zs.Offload(stage_bytes=4096, threads=2)


class Loop:
    """A model, its optimizers, and what a loop has seen. `run`: none in plain PyTorch."""

    def __init__(self, options: dict[str, Any] | None, two: bool = False) -> None:
        self.model = make_model()
        rest = [*self.model.tokens.parameters(), *self.model.norm.parameters(), *self.model.head.parameters()]
        apart = [torch.optim.AdamW(self.model.blocks.parameters(), 1e-3), torch.optim.SGD(rest, 0.1, 0.9)]
        whole = [torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)]
        self.optimizers: list[torch.optim.Optimizer] = [*apart] if two else [*whole]
        self.run = None if options is None else zs.shard(self.model, self.optimizers, **options)
        self.rank = self.run.rank if self.run is not None else 0
        self.seen: list[float] = []
        self.ease = 1.0  # what limits are multiplied by
        self.average = [p.detach().clone() for p in self.params]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self, step: int, micro: int = 0) -> Tensor:
        self.ease = 20.0 if step < CALM else 1.0
        loss: Tensor = self.model(batch(step, self.rank, micro)) * (30.0 if step == 4 else 1.0)
        return loss

    def see(self, value: Tensor) -> None:
        self.seen.append(float(value.full_tensor() if hasattr(value, "full_tensor") else value))

    def clip(self, limit: float = 0.8, **how: Any) -> None:
        self.see(clip_grad_norm_(self.params, limit * self.ease, **how))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def readme(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    loop.clip()
    loop.step()
    loop.zero()


def no_clipping(loop: Loop, step: int) -> None:
    loop.zero()
    loop.loss(step).backward()
    loop.step()


def one_by_one(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    loop.clip(foreach=False)
    loop.step()
    loop.zero()


def largest_norm(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    loop.clip(0.05, norm_type=float("inf"))
    loop.step()
    loop.zero()


def by_value(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    clip_grad_value_(loop.params, 0.01)
    loop.clip(0.3)
    loop.step()
    loop.zero()


def norm_apart(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    total = get_total_norm([p.grad for p in loop.params if p.grad is not None])
    loop.see(total)
    clip_grads_with_norm_(loop.params, 0.8 * loop.ease, total)
    loop.clip(0.5)
    loop.step()
    loop.zero()


def logs(loop: Loop, step: int) -> None:
    """Norms of single gradients, before and after; the loop looks at one every other step."""
    loop.loss(step).backward()
    for p in loop.params[:3]:
        assert p.grad is not None
        loop.see(p.grad.detach().norm(2))
    loop.clip()
    first = loop.params[2].grad
    assert first is not None
    loop.see(first.data.norm())
    if step % 2:
        loop.see(first.abs().mean())
    loop.step()
    loop.see(first.norm())  # it is the gradient until it is dropped
    loop.zero()
    loop.see((first * 2.0).abs().sum())  # and to whom holds it


def changes(loop: Loop, step: int) -> None:
    """Gradients are masked, replaced, scaled by different numbers and left out."""
    loop.loss(step).backward()
    one, two, three, four, five = loop.params[:5]
    assert one.grad is not None
    assert two.grad is not None
    one.grad.clamp_(-0.01, 0.01)
    two.grad = two.grad * 0.5
    loop.clip()
    assert three.grad is not None
    three.grad.mul_(0.25)
    assert four.grad is not None
    four.grad.zero_()
    if step % 2:
        five.grad = None
    loop.step()
    loop.zero()


def exchanges(loop: Loop, step: int) -> None:
    """Gradients of one unit and of several change places; what was there is kept by who has it."""
    loop.loss(step).backward()
    for module, name in ((nn.Linear, "weight"), (nn.LayerNorm, "weight"), (nn.LayerNorm, "bias")):
        all_ = [getattr(m, name) for m in loop.model.modules() if type(m) is module]
        alike = [p for p in all_ if p.shape == all_[0].shape]
        assert len(alike) > 1
        grads = [p.grad for p in alike]
        for p, grad in zip(alike, [*grads[1:], grads[0]], strict=True):
            p.grad = grad
    last = loop.params[-1]
    kept, last.grad = last.grad, torch.full_like(last, 0.01)
    assert kept is not None
    loop.step()
    loop.zero()
    loop.see(kept.abs().sum())


def skips(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    loop.clip()
    if step % 3 != 1:
        loop.step()
    loop.zero()


def steps_twice(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    loop.clip()
    loop.step()
    loop.step()
    loop.zero()


def zeros_stay(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    loop.clip()
    loop.step()
    loop.zero(set_to_none=False)


def dropped_by_hand(loop: Loop, step: int) -> None:
    for p in loop.params:
        p.grad = None
    loop.loss(step).backward()
    loop.clip()
    loop.step()


def accumulates(loop: Loop, step: int) -> None:
    """Two backward passes without a word, between which the loop clips."""
    loop.loss(step).backward()
    loop.clip()
    loop.loss(step, 1).backward()
    loop.clip(1.0)
    loop.step()
    loop.zero()


def unsynchronised(loop: Loop, step: int) -> None:
    for micro in range(3):
        with loop.run.no_sync() if loop.run is not None and micro < 2 else nullcontext():
            (loop.loss(step, micro) / 3).backward()
    loop.clip()
    loop.step()
    loop.zero()


def closure(loop: Loop, step: int) -> None:
    """As Lightning calls it: everything but the step happens inside of it."""

    def inside() -> Tensor:
        loop.zero()
        loss = loop.loss(step)
        loss.backward()
        loop.clip()
        return loss

    loss: Any = loop.optimizers[0].step(cast(Any, inside))
    loop.seen.append(loss.item())


def averages(loop: Loop, step: int) -> None:
    """Weights are read and written as soon as the step has returned."""
    loop.loss(step).backward()
    loop.clip()
    loop.step()
    with torch.no_grad():
        for mean, p in zip(loop.average, loop.params, strict=True):
            mean.lerp_(p.detach(), 0.3)
        if step % 3 == 2:
            loop.params[3].mul_(0.9)
    loop.zero()
    loop.see(loop.params[5].detach().norm())


def penalty(loop: Loop, step: int) -> None:
    (loop.loss(step) + 0.01 * sum(p.square().sum() for p in loop.params[:4])).backward()
    loop.clip()
    loop.step()
    loop.zero()


def late_penalty(loop: Loop, step: int) -> None:
    """Of weights as they are before the forward, so backward comes to it last; and not from the beginning."""
    weighs = 0.01 * sum(p.square().sum() for p in loop.params[:4]) if step > 2 else 0.0
    (loop.loss(step) + weighs).backward()
    loop.step()
    loop.zero()


def two_graphs(loop: Loop, step: int) -> None:
    """One backward after another, from the fourth step on; then two in each step."""
    losses = [loop.loss(step, micro) for micro in range(2 if step > 2 else 1)]
    for loss in losses:
        loss.backward()
    loop.step()
    loop.zero()


def one_rank_looks(loop: Loop, step: int) -> None:
    """At weights and gradients, as for a log: other ranks go on."""
    loop.loss(step).backward()
    if loop.rank == 0 and step % 2:
        loop.see(ShardedTensors.local(loop.params[0]).detach().norm())
        assert loop.params[2].grad is not None
        loop.see(ShardedTensors.local(loop.params[2].grad).abs().max())
    loop.step()
    if step % 2:
        with torch.no_grad():
            loop.seen.append(loop.loss(step, 7).item())
    loop.zero()


def scaled(loop: Loop, step: int) -> None:
    """One step has a loss that is infinite."""
    loss = loop.loss(step) * (float("inf") if step == 2 else 1.0)
    loop.scaler.scale(loss).backward()
    for optimizer in loop.optimizers:
        loop.scaler.unscale_(optimizer)
    if step != 2:
        loop.clip()
    for optimizer in loop.optimizers:
        loop.scaler.step(optimizer)
    loop.scaler.update()
    loop.zero()


def scaled_only(loop: Loop, step: int) -> None:
    loop.scaler.scale(loop.loss(step)).backward()
    for optimizer in loop.optimizers:
        loop.scaler.step(optimizer)
    loop.scaler.update()
    loop.zero()


def saves(loop: Loop, step: int) -> None:
    """State goes out and in between steps."""
    loop.loss(step).backward()
    loop.clip()
    loop.step()
    loop.zero()
    if step % 2:
        for optimizer in loop.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def evaluates(loop: Loop, step: int) -> None:
    loop.loss(step).backward()
    with torch.no_grad():
        loop.seen.append(loop.loss(step, 7).item())
    loop.clip()
    loop.step()
    loop.zero()
    with torch.no_grad():
        loop.seen.append(loop.loss(step, 8).item())


# Moments lose bits where a gradient is taken back, of elements that had next to none before.
TAKEN_BACK = 5e-6
LOOPS: list[Callable[[Loop, int], None]] = [
    *(readme, no_clipping, one_by_one, largest_norm, by_value, norm_apart, logs, changes, skips, steps_twice),
    *(zeros_stay, dropped_by_hand, accumulates, unsynchronised, closure, averages, penalty, scaled),
    *(scaled_only, saves, evaluates, late_penalty, two_graphs, exchanges),
]
TOGETHER = [
    readme,
    one_by_one,
    norm_apart,
    changes,
    zeros_stay,
    accumulates,
    unsynchronised,
    scaled,
    evaluates,
    late_penalty,
    two_graphs,
    exchanges,
    one_rank_looks,
]
Result = tuple[dict[str, Tensor], list[float], dict[str, dict[str, Tensor]]]


def trained(
    way: Callable[[Loop, int], None],
    options: dict[str, Any] | None,
    pace: Pace = "overlapped",
    two: bool = False,
    steps: int = STEPS,
) -> Result:
    with paced(pace):
        loop = Loop(options, two)
        for step in range(steps):
            way(loop, step)
        if loop.run is not None:
            loop.run.close()
    weights = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    state = named_state(loop.model, loop.optimizers[0])
    return weights | {f"mean {n}": mean for n, mean in enumerate(loop.average)}, loop.seen, state


def check(got: Result, want: Result, within: float = 1e-6) -> None:
    assert furthest(got[0], want[0])[0] <= within
    assert got[1] == pytest.approx(want[1], rel=1e-5, abs=1e-6)
    for name, state in want[2].items():
        for key, value in state.items():
            assert float((got[2][name][key] - value).abs().max()) <= 1e-5, (name, key)


@pytest.mark.wide(2)
@pytest.mark.parametrize("two", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("way", LOOPS, ids=lambda way: way.__name__)
def test_every_order_of_calls_has_the_numbers_of_torch(way: Callable[[Loop, int], None], two: bool) -> None:
    if two and way is closure:
        two = False  # a closure is that of one optimizer
    want = trained(way, None, two=two)
    waited = trained(way, {"offload": HOST}, "waited", two)
    delayed = trained(way, {"offload": HOST}, "delayed", two)
    check(waited, want, TAKEN_BACK if way is skips else 1e-6)
    assert_same_bits(delayed[0], waited[0])
    assert delayed[1] == waited[1]


@pytest.mark.parametrize("units", ["auto", "none"])
def test_gradients_of_an_optimizer_without_a_kernel_change_places(units: str) -> None:
    def weights(options: dict[str, Any] | None) -> list[Tensor]:
        loop = Loop(None)
        loop.optimizers = [torch.optim.RMSprop(loop.params, lr=1e-3)]
        run = None if options is None else zs.shard(loop.model, loop.optimizers, **options)
        for step in range(3):
            exchanges(loop, step)
        if run is not None:
            run.close()
        return [p.detach() for p in loop.params]

    for got, want in zip(weights({"offload": HOST, "units": units}), weights(None), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", [readme, changes, accumulates, averages], ids=lambda way: way.__name__)
def test_timing_changes_no_bit_in_bf16(way: Callable[[Loop, int], None]) -> None:
    options = {"offload": HOST, "precision": "bf16"}
    waited, delayed = trained(way, options, "waited"), trained(way, options, "delayed")
    assert_same_bits(delayed[0], waited[0])
    assert delayed[1] == waited[1]


FP16, ALL_FP16 = zs.Precision("float16"), zs.Precision("float16", grad="float16")


@pytest.mark.parametrize(
    ("way", "precision"),
    [(scaled, FP16), (scaled_only, FP16), (scaled_only, ALL_FP16)],
    ids=lambda one: str(one)[:12],
)
def test_fp16_has_the_numbers_of_a_run_that_is_not_offloaded(
    way: Callable[[Loop, int], None], precision: zs.Precision
) -> None:
    want = trained(way, {"precision": precision})
    options = {"precision": precision, "offload": HOST}
    waited, delayed = (trained(way, options, pace) for pace in ("waited", "delayed"))
    check(waited, want)
    assert_same_bits(delayed[0], waited[0])


def on_rank(stage: int, offload: bool) -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    found = {}
    for way in TOGETHER:
        options = {"stage": stage, "offload": HOST if offload else None}
        found[way.__name__] = trained(way, options, "delayed" if offload else "overlapped", steps=5)[:2]
    return found


@pytest.mark.ranks
@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_have_the_numbers_of_a_run_that_is_not_offloaded(stage: int) -> None:
    here, there = (ranks(2).run(on_rank, stage, offload)[0] for offload in (True, False))
    for name, (weights, seen) in there.items():
        assert furthest(here[name][0], weights)[0] <= 1e-6, name
        assert here[name][1] == pytest.approx(seen, rel=1e-5, abs=1e-6), name


def host_of(loop: Loop) -> Any:
    assert loop.run is not None
    return loop.run._runtime.host


def begun() -> Loop:
    loop = Loop({"offload": HOST})
    loop.loss(0).backward()
    return loop


def test_the_readme_s_loop_looks_at_no_gradient() -> None:
    loop = begun()
    loop.clip()
    held = [p.grad for p in loop.params]
    assert all(type(grad) is GradHandle and grad.waits for grad in held)
    loop.step()
    assert all(type(grad) is GradHandle and grad.waits for grad in held)
    for step in range(1, STEPS):
        readme(loop, step)
    assert loop.run is not None
    # Nothing is known of the first; the gradient of the fifth leaps, and is clipped; so is the seventh.
    assert loop.run.stats().updates == {"early": 3, "late": 6, "undone": 0}
    loop.run.close()


def begun_early(loop: Loop) -> list[bool]:
    return [part.update.begun for part in host_of(loop).parts] if loop.run is not None else [True]


def reads_weights(loop: Loop) -> None:
    loop.see(loop.params[3].detach().norm())


def writes_weights(loop: Loop) -> None:
    with torch.no_grad():
        loop.params[3].mul_(0.5)


def forward_between(loop: Loop) -> None:
    with torch.no_grad():
        loop.seen.append(loop.loss(1, 7).item())


def backward_between(loop: Loop) -> None:
    loop.loss(1, 1).backward()


def shows_state(loop: Loop) -> None:
    state = loop.optimizers[0].state_dict()["state"][2]
    loop.see(state["exp_avg"].norm())
    loop.see(loop.model.state_dict()["blocks.1.up.weight"].norm())


def loads_state(loop: Loop) -> None:
    state = copy.deepcopy(loop.optimizers[0].state_dict())
    state["state"][2]["exp_avg"].mul_(0.5)
    loop.optimizers[0].load_state_dict(state)


def replaces_state(loop: Loop) -> None:
    with loop.run.gathered() if loop.run is not None else nullcontext():  # which waits for the host
        pass
    state = loop.optimizers[0].state[loop.params[1]]
    state["exp_avg"] = state["exp_avg"] * 0.5


def other_rate(loop: Loop) -> None:
    loop.optimizers[0].param_groups[0]["lr"] *= 0.5


def drops(loop: Loop) -> None:
    loop.zero()


def drops_by_hand(loop: Loop) -> None:
    for p in loop.params:
        p.grad = None


def drops_one(loop: Loop) -> None:
    loop.params[4].grad = None


def looks(loop: Loop) -> None:
    assert loop.params[2].grad is not None
    loop.see(loop.params[2].grad.abs().max())


def masks(loop: Loop) -> None:
    assert loop.params[2].grad is not None
    loop.params[2].grad[0] = 0.0


def scales_one(loop: Loop) -> None:
    assert loop.params[2].grad is not None
    loop.params[2].grad.mul_(0.25)


def clips_all(loop: Loop) -> None:
    loop.clip(0.01)


def gives_others(loop: Loop) -> None:
    for p in loop.params:
        p.grad = torch.full_like(p, 0.02)


OTHERWISE: list[Callable[[Loop], None]] = [
    *(reads_weights, writes_weights, forward_between, backward_between, shows_state, loads_state),
    *(replaces_state, other_rate, drops, drops_by_hand, drops_one, looks, masks, scales_one, clips_all),
    gives_others,
]


@pytest.mark.wide(4)
@pytest.mark.parametrize("other", OTHERWISE, ids=lambda other: other.__name__)
def test_what_has_begun_is_taken_back_where_the_loop_does_something_else(
    other: Callable[[Loop], None],
) -> None:
    begun_at = list[bool]()

    def way(loop: Loop, step: int) -> None:
        loop.loss(min(step, 3)).backward()
        if step in (3, 8):
            begun_at.append(all(begun_early(loop)))
            other(loop)
        loop.step()
        loop.zero()

    want = trained(way, None)
    begun_at.clear()
    waited, delayed = (trained(way, {"offload": HOST}, pace) for pace in ("waited", "delayed"))
    assert begun_at[0]
    assert begun_at == begun_at[:2] * 2
    check(waited, want, TAKEN_BACK)
    assert_same_bits(delayed[0], waited[0])
    assert delayed[1] == waited[1]


def test_updates_hide_behind_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """`step()` does not wait, nor does what looks at no values; what does, waits."""
    gate, update, wait_for = threading.Event(), update_rows, PythonExecutor.wait_for

    def gated(*args: Any, **kwargs: Any) -> None:
        gate.wait()
        update(*args, **kwargs)

    def let_through(executor: PythonExecutor, done: UpdateDone) -> None:
        gate.set()
        wait_for(executor, done)

    with paced("delayed"):  # by threads that a test can hold up, as long as this block lasts
        monkeypatch.setattr(python_executor, "update_rows", gated)
        loop = begun()
        monkeypatch.setattr(PythonExecutor, "wait_for", let_through)
        try:
            loop.clip()
            loop.step()
            loop.zero()
            updates: HostUpdates = host_of(loop).updates
            assert all(p.grad is None and p.requires_grad and p.shape.numel() for p in loop.params)
            assert not any(part.update.done.is_set() for part in updates.parts)
            assert updates.busy
            assert not gate.is_set()
            first = loop.params[0].detach().clone()
            assert gate.is_set()
            assert not updates.busy
            assert torch.equal(first, loop.params[0])
        finally:
            gate.set()
        assert loop.run is not None
        loop.run.close()


def test_what_goes_past_dispatch_has_the_values() -> None:
    loop, other = begun(), Loop(None)
    other.loss(0).backward()
    loop.clip()
    other.clip()
    grads = [(p.grad, q.grad) for p, q in zip(loop.params, other.params, strict=True)]
    for number, (handle, want) in enumerate(grads[:8]):
        assert type(handle) is GradHandle
        assert want is not None
        got: Any = (
            lambda g: torch.tensor(g.tolist()),
            lambda g: torch.from_numpy(g.numpy()),
            lambda g: torch.from_dlpack(g),
            copy.deepcopy,
            pickled,
            lambda g: torch.empty(0).set_(g.untyped_storage()).view(g.shape),
            lambda g: g.cpu().clone(),
            lambda g: g if g.data_ptr() and repr(g).startswith("tensor(") else None,
        )[number](handle)
        torch.testing.assert_close(torch.as_tensor(got).clone(), want, rtol=1e-5, atol=1e-8)
    assert loop.run is not None
    loop.run.close()


def pickled(grad: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    found: Tensor = torch.load(file)
    assert type(found) is Tensor
    return found


def test_gradients_go_with_their_handles() -> None:
    """What is on the device goes with the update, once the loop has dropped the gradient."""
    loop = begun()
    assert loop.run is not None
    landed = [part.deferred.landed for part in host_of(loop).parts]
    assert all(each is not None for each in landed)
    del landed
    loop.step()
    loop.zero()
    assert all(part.deferred.landed is None for part in host_of(loop).parts)
    loop.run.close()


def test_parameters_are_plain_again_when_the_run_is_closed() -> None:
    loop = begun()
    assert all(isinstance(p, GuardedParam) for p in loop.params)
    assert all(type(p) is nn.Parameter for p in copy.deepcopy(loop.params))
    loop.step()
    assert loop.run is not None
    loop.run.close()
    assert all(type(p) is nn.Parameter for p in loop.params)
    assert all(type(p.grad) is Tensor for p in loop.params)


def test_gradients_that_the_loop_makes_itself() -> None:
    """Without a backward, as a loop does that was handed gradients."""
    results = []
    for options in (None, {"offload": HOST}):
        loop = Loop(options)
        for p in loop.params:
            p.grad = torch.full_like(p, 0.5)
        loop.step()
        state = loop.optimizers[0].state[loop.params[0]]
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.25)  # taken over as torch would
        loop.step()
        if loop.run is not None:
            loop.run.close()
        results.append({name: p.detach().clone() for name, p in loop.model.named_parameters()})
    assert furthest(*results)[0] <= 1e-6
    assert ShardedTensors.local(loop.params[0]) is loop.params[0]
