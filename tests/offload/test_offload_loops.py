"""What users do around an offloaded run: other optimizers, clipping by hand, schedulers, freezing, state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_loop import OPTIMIZERS, Case, batch, furthest, loss_of, make_model, named_state, offloaded, plain
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import zeroshard as zs
from zeroshard.errors import StateError
from zeroshard.testing import assert_same_bits, ranks

STEPS = 12
HOST = zs.Offload(stage_bytes=4096, threads=2)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def step_once(model: nn.Module, optimizers: list[Optimizer], step: int, clip: float | None = None) -> None:
    model(batch(step, 0)).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def both(make: Callable[[nn.Module], list[Optimizer]], clip: float, by_hand: bool, **options: Any) -> float:
    """How far an offloaded run ends from plain PyTorch."""
    runs, steps = [], 6 if make is muon_and_adamw else STEPS  # one bit of a gradient may flip Muon's rounding
    for offload in (False, True):
        model = make_model()
        optimizers = make(model)
        run = None
        if offload:
            run = zs.shard(model, optimizers, offload=HOST, clip_norm=None if by_hand else clip, **options)
        for step in range(steps):
            step_once(model, optimizers, step, clip if by_hand or not offload else None)
        if run is not None:
            run.close()
        runs.append(weights(model))
    return furthest(*runs)[0]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Both in every unit, so that some rows are updated by the host's kernel and their neighbours are not."""
    params = list(model.parameters())
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=1e-3)]


def groups(model: nn.Module) -> list[Optimizer]:
    """Groups across units, with rates and decays of their own."""
    params = list(model.parameters())
    decayed = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    both_groups = [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "lr": 3e-3}]
    return [torch.optim.AdamW(both_groups, lr=1e-3, weight_decay=0.0)]


MAKES: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "muon and adamw": muon_and_adamw,
    "groups": groups,
    "two optimizers": lambda m: [
        torch.optim.AdamW(m.blocks.parameters(), lr=1e-3),
        torch.optim.SGD([*m.tokens.parameters(), *m.head.parameters()], lr=0.1, momentum=0.9),
    ],
    "adamw": lambda m: [OPTIMIZERS["adamw"](m.parameters())],
    "rmsprop": lambda m: [OPTIMIZERS["rmsprop"](m.parameters())],
    "adafactor": lambda m: [OPTIMIZERS["adafactor"](m.parameters())],
}


@pytest.mark.parametrize("by_hand", [True, False], ids=["clip_grad_norm_", "clip_norm"])
@pytest.mark.parametrize("make", MAKES)
def test_any_optimizer_and_either_clipping(make: str, by_hand: bool) -> None:
    # Muon orthogonalises in bf16, where one bit of a gradient may flip a rounding.
    assert both(MAKES[make], 0.8, by_hand) <= (1e-3 if "muon" in make else 1e-6)


def on_rank(make: str, by_hand: bool, stage: int, offload: bool) -> dict[str, Tensor]:
    model = make_model()
    optimizers = MAKES[make](model)
    where, clip = HOST if offload else None, None if by_hand else 0.8
    run = zs.shard(model, optimizers, stage=stage, offload=where, clip_norm=clip)
    for step in range(STEPS):
        model(batch(step, run.rank)).backward()
        if by_hand:
            nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return weights(model)


MIXED = [("muon and adamw", False, 3), ("adafactor", True, 1), ("adamw", True, 2), ("groups", False, 2)]


@pytest.mark.wide(2)
@pytest.mark.ranks
@pytest.mark.parametrize(("make", "by_hand", "stage"), MIXED)
def test_two_ranks_agree_with_the_run_that_is_not_offloaded(make: str, by_hand: bool, stage: int) -> None:
    """Also: `clip_norm` without offload clips as with it."""
    here, there = (ranks(2).run(on_rank, make, by_hand, stage, offload)[0] for offload in (True, False))
    assert furthest(here, there)[0] <= (1e-3 if "muon" in make else 1e-6)


def test_fp16_with_a_grad_scaler() -> None:
    """The scaler divides what no one brings: the kernels multiply."""
    runs = []
    for offload in (None, HOST):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = zs.shard(model, optimizer, precision="fp16", offload=offload)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        for step in range(STEPS):
            scaler.scale(model(batch(step, 0))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.8)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        run.close()
        runs.append(weights(model))
    assert furthest(*runs)[0] <= 1e-6  # our kernels, torch's


def test_schedulers_change_the_rate_after_the_step() -> None:
    runs = []
    for offload in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = LambdaLR(optimizer, lambda step: 0.8**step)
        run = zs.shard(model, optimizer, offload=HOST, clip_norm=4.0) if offload else None
        for step in range(STEPS):
            step_once(model, [optimizer], step, None if offload else 4.0)
            schedule.step()
        if run is not None:
            assert run.stats().updates["early"] == STEPS - 1
            run.close()
        runs.append(weights(model))
    assert furthest(*runs)[0] <= 1e-6


def test_a_rate_changed_between_backward_and_step() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, offload=HOST, clip_norm=math.inf)
    model(batch(0, 0)).backward()
    optimizer.param_groups[0]["lr"] = 1e-4
    with pytest.raises(StateError, match=r"hyperparameters of `.*` changed between backward and "):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    run.close()


def test_frozen_parameters_stay() -> None:
    runs = []
    for offload in (False, True):
        model = make_model()
        model.tokens.weight.requires_grad_(False)
        model.blocks[1].up.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = zs.shard(model, optimizer, offload=HOST, clip_norm=0.8) if offload else None
        for step in range(STEPS):
            step_once(model, [optimizer], step, None if offload else 0.8)
        if run is not None:
            run.close()
        runs.append(weights(model))
    assert furthest(*runs)[0] <= 1e-6
    assert torch.equal(runs[1]["tokens.weight"], make_model().tokens.weight)


MASTERS = [(None, "plain"), ("bf16", "plain"), ("bf16", "split")]


@pytest.mark.parametrize(("precision", "master"), MASTERS)
def test_reading_and_writing_between_steps(precision: str | None, master: Any) -> None:
    """`gathered` waits for the host and shows the master; what is written, the next forward and step use."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = zs.Offload(stage_bytes=4096, threads=2, master=master)
    run = zs.shard(model, optimizer, offload=offload, precision=precision, clip_norm=4.0)
    step_once(model, [optimizer], 0)
    with run.gathered("head.weight", write=True) as whole:
        assert whole["head.weight"].dtype == torch.float32
        whole["head.weight"].data.fill_(1 / 3)
    with torch.no_grad():
        loss = model(batch(1, 0))
    assert abs(float(loss) - math.log(41)) < 1e-2, "equal logits: the written head is used"
    with run.gathered("head.*") as whole:
        assert torch.equal(whole["head.weight"], torch.full((41, 20), 1 / 3)), "to the last bit of fp32"
    step_once(model, [optimizer], 1)
    with run.gathered("head.*") as whole:
        moved = (whole["head.weight"].detach() - 1 / 3).abs().max()
        assert 0 < float(moved) < 0.1, "the step went on from what was written"
    run.close()


def test_evaluation_between_steps_changes_nothing() -> None:
    with_evaluation = make_model()
    optimizer = torch.optim.AdamW(with_evaluation.parameters(), lr=1e-3, weight_decay=0.1)
    run = zs.shard(with_evaluation, optimizer, offload=HOST, clip_norm=4.0)
    reference, losses = make_model(), []
    other = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(STEPS):
        step_once(with_evaluation, [optimizer], step)
        step_once(reference, [other], step, 4.0)
        with torch.no_grad():
            losses.append((float(with_evaluation(batch(99, 0))), float(reference(batch(99, 0)))))
        with torch.inference_mode():
            with_evaluation(batch(98, 0))
    run.close()
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in losses)
    assert furthest(weights(with_evaluation), weights(reference))[0] <= 1e-6


@pytest.mark.parametrize(("precision", "master"), MASTERS)
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_close_leaves_a_plain_loop_that_goes_on(name: str, precision: str | None, master: Any) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    offload = zs.Offload(stage_bytes=4096, threads=2, master=master)
    run = zs.shard(model, optimizer, offload=offload, precision=precision, clip_norm=4.0)
    for step in range(5):
        step_once(model, [optimizer], step)
    run.close()
    assert all(p.dtype == torch.float32 and type(p) is nn.Parameter for p in model.parameters())
    template = make_model()
    template.load_state_dict(model.state_dict())
    other = OPTIMIZERS[name](template.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert named_state(model, optimizer).keys() == dict(model.named_parameters()).keys()
    for step in range(5, 8):
        step_once(model, [optimizer], step, 4.0)
        step_once(template, [other], step, 4.0)
    assert_same_bits(weights(model), weights(template))
    if precision is None:
        assert furthest(weights(model), plain(Case(name, steps=8, spikes=())).weights)[0] <= 1e-6


@pytest.mark.parametrize("moments", ["float32", "int8"])
@pytest.mark.parametrize(("precision", "master"), MASTERS)
def test_state_dicts_carry_a_run_on(precision: str | None, master: Any, moments: Any) -> None:
    """Saved after some steps and loaded into a new run, which goes on, with the groups that loading made."""
    offload = zs.Offload(stage_bytes=4096, threads=2, master=master, moments=moments)
    saved: dict[str, Any] = {}
    results = []
    for resumed in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = zs.shard(model, optimizer, offload=offload, precision=precision, clip_norm=4.0)
        if resumed:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in range(4 if resumed else 0, 8):
            step_once(model, [optimizer], step)
            optimizer.param_groups[0]["lr"] = 1e-3 * 0.9**step
            if step == 3:
                state = optimizer.state_dict()
                assert all(v.dtype == torch.float32 for s in state["state"].values() for v in s.values())
                assert all(int(s["step"]) == 4 for s in state["state"].values())
                with run.gathered() as whole:
                    saved["model"] = {n: p.detach().clone() for n, p in whole.items()}
                saved["optimizer"] = copy.deepcopy(state)
        run.close()
        results.append(weights(model))
    if moments == "float32":
        assert_same_bits(results[1], results[0])
    else:
        assert furthest(*results)[0] <= 1e-3  # decoded and encoded again, with other dice


def test_zero_grad_before_the_step_takes_the_update_back() -> None:
    """A loop that skips a step: that backward leaves nothing but the rounding of the inverse formula. Where a
    gradient was hundreds of times its usual size, fp32 has lost part of the square: up to 2 % of a step."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, offload=HOST, clip_norm=4.0)
    reference = make_model()
    other = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(STEPS):
        if step % 3 != 1:
            step_once(model, [optimizer], step)
            step_once(reference, [other], step, 4.0)
            continue
        before = run.stats().updates
        model(batch(step, 0)).backward()
        optimizer.zero_grad()
        optimizer.step()  # nothing to step with
        assert run.stats().updates == before
        with torch.no_grad():
            assert math.isclose(float(model(batch(97, 0))), float(reference(batch(97, 0))), rel_tol=1e-6)
    model(batch(50, 0)).backward()
    run.close()  # drops the last backward too
    apart = {name: (value - weights(reference)[name]).abs() for name, value in weights(model).items()}
    assert max(float(a.max()) for a in apart.values()) <= 0.02 * 1e-3
    assert sum(int((a > 1e-6).sum()) for a in apart.values()) <= 1e-3 * sum(a.numel() for a in apart.values())
    assert all(int(s["step"]) == 8 for s in optimizer.state.values())


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def gan(offload: zs.Offload | None, frozen: bool) -> list[dict[str, Tensor]]:
    """Two runs; the generator's loss goes through the critic, whose gradients are not wanted then."""
    torch.manual_seed(3)
    maker, critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6)), Critic()
    steppers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (maker, critic)]
    clip: dict[str, Any] = {"offload": offload, "clip_norm": 0.05}
    runs = [zs.shard(m, s, **clip) for m, s in zip((maker, critic), steppers, strict=True)]
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        real, noise = torch.randn(8, 6, generator=draw), torch.randn(8, 4, generator=draw)
        loss = critic(torch.cat([maker(noise).detach(), real])).sigmoid().mean()
        loss.backward()
        steppers[1].step()
        steppers[1].zero_grad()
        for p in critic.parameters():
            p.requires_grad_(not frozen)
        if frozen:
            (-critic(maker(noise)).mean()).backward()
        else:
            with runs[1].no_sync():
                (-critic(maker(noise)).mean()).backward()
        for p in critic.parameters():
            p.requires_grad_(True)
        steppers[0].step()
        for stepper in steppers:
            stepper.zero_grad()
    for run in runs:
        run.close()
    return [weights(maker), weights(critic)]


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen critic", "no_sync"])
def test_two_offloaded_runs_of_a_gan(frozen: bool) -> None:
    for got, want in zip(gan(HOST, frozen), gan(None, frozen), strict=True):
        assert furthest(got, want)[0] <= 1e-6


def test_kept_parameters_have_a_plain_master_beside_split_ones() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = zs.Offload(stage_bytes=4096, threads=2, master="split")
    precision = zs.Precision("bf16", keep=("*norm*",))
    run = zs.shard(model, optimizer, offload=offload, precision=precision, clip_norm=4.0)
    for step in range(3):
        step_once(model, [optimizer], step)
    run.close()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not torch.equal(model.norm.weight, torch.ones(20))


def test_the_loss_of_the_case_falls() -> None:
    """A run that learnt nothing would prove little."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, offload=HOST, clip_norm=4.0)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(Case(spikes=()), model, 0, 0, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.close()
    assert losses[-1] < 0.95 * losses[0]
    assert offloaded(Case(steps=1), {"offload": HOST}).losses[0] == losses[0]


@pytest.mark.parametrize("where", ["host", "disk"])
def test_momentum_before_a_first_update_is_none(where: Any, tmp_path: Any) -> None:
    """Zeros, loaded, would be dampened where torch begins with the gradient."""
    runs = []
    for offload in (None, zs.Offload(where, threads=1, path=str(tmp_path) if where == "disk" else None)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        run = zs.shard(model, sgd, offload=offload, clip_norm=100.0) if offload else None
        for step in range(4):
            layers = model if step > 1 else model[:1]
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            layers(x).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
            assert len(sgd.state_dict()["state"]) == (4 if step > 1 else 2)
            sgd.load_state_dict(sgd.state_dict())
        if run is not None:
            run.close()
        runs.append(weights(model))
    assert furthest(*runs)[0] <= 1e-6


def norms(offload: bool, stage: int) -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, stage=stage, offload=HOST if offload else None, clip_norm=math.inf)
    found = []
    for step in range(3):
        step_once(model, [optimizer], step)
        found.append(run.stats().norm)
    run.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("offload", [False, True])
def test_without_a_limit_the_norm_is_measured(offload: bool, world: int) -> None:
    model, wanted = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        model(batch(step, 0)).backward()
        wanted.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    for found in [norms(offload, 3)] if world == 1 else ranks(2).run(norms, offload, 1):
        assert found == pytest.approx(wanted, rel=1e-5)
