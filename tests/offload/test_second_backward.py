"""Units whose backward runs twice: no gradient of theirs waits for the norm, and no number changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_loop import OPTIMIZERS, SPIKES, batch, make_model, paced
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.layout.memory import MemoryModel, StepSegment, step_moments
from zeroshard.options import Options
from zeroshard.planner.signatures import blocks_of, rules_of
from zeroshard.runtime.second_backward import RepeatedUnits
from zeroshard.testing import assert_same_bits, ranks

STEPS = 8
ALWAYS, NEVER = 0.05, 1e9  # limits that clip in every step, and in none
Loop = Callable[["Training", int], None]


def host(repeat: int, **more: Any) -> zs.Offload:
    return zs.Offload(stage_bytes=4096, threads=2, repeat_backward=repeat, **more)


class Training:
    """One run and what it has come to."""

    def __init__(
        self,
        repeat: int,
        optimizer: str = "adamw",
        limit: float | None = ALWAYS,
        model: nn.Module | None = None,
        more: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.model = make_model() if model is None else model
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        given = {"stage": 0, "recompute": True, "clip_norm": limit} | options
        self.run = zs.shard(self.model, self.optimizer, offload=host(repeat, **(more or {})), **given)
        self.norms: list[float] = []
        updates = self.run._runtime.host_updates
        assert updates is not None
        self.updates = updates
        self.repeated = updates.second

    @property
    def second(self) -> RepeatedUnits:
        assert isinstance(self.repeated, RepeatedUnits)
        return self.repeated

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self, step: int, micro: int = 0) -> Tensor:
        loss: Tensor = self.model(batch(step, 0, micro)) * SPIKES.get(step, 1.0)
        return loss

    def train(self, loop: Loop, steps: int = STEPS) -> dict[str, Tensor]:
        torch.manual_seed(11)
        for step in range(steps):
            loop(self, step)
        return self.end()

    def end(self) -> dict[str, Tensor]:
        self.run.close()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def clipped_by_shard(training: Training, step: int) -> None:
    training.loss(step).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def readme(training: Training, step: int) -> None:
    training.loss(step).backward()
    training.norms.append(float(clip_grad_norm_(training.params, ALWAYS)))
    training.optimizer.step()
    training.optimizer.zero_grad()


def check(loop: Loop, repeat: int = 2, steps: int = STEPS, **options: Any) -> None:
    """The same bits as of a run whose gradients wait."""
    torch.manual_seed(5)
    want = Training(0, **options)
    weights = want.train(loop, steps)
    torch.manual_seed(5)
    got = Training(repeat, **options)
    assert_same_bits(got.train(loop, steps), weights)
    assert got.norms == want.norms
    assert got.second.most > 0, "some backward has run twice"


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "momentum"])
def test_clipped_in_every_step(optimizer: str) -> None:
    check(clipped_by_shard, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_clipped_in_no_step(optimizer: str) -> None:
    check(clipped_by_shard, optimizer=optimizer, limit=NEVER)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage(stage: int) -> None:
    check(clipped_by_shard, stage=stage)


SETTINGS: dict[str, dict[str, Any]] = {
    "split master": {"more": {"master": "split"}, "precision": "bf16"},
    "8-bit moments": {"more": {"moments": "int8"}},
    "streamed": {"more": {"parameters": "host"}, "stage": 3},
    "fp16 with the loop's own step": {"precision": "fp16", "limit": None},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_form_of_state(setting: str) -> None:
    check(clipped_by_shard, **SETTINGS[setting])


def test_state_on_the_disk(tmp_path: Path) -> None:
    check(clipped_by_shard, more={"optimizer": "disk", "path": str(tmp_path)})


@pytest.mark.parametrize("repeat", [1, 3])
def test_the_plain_loop(repeat: int) -> None:
    check(readme, repeat, limit=None)


def test_delays_change_no_bit() -> None:
    torch.manual_seed(5)
    want = Training(0).train(clipped_by_shard)
    for seed in (1, 2):
        with paced("delayed", seed):
            assert_same_bits(Training(2).train(clipped_by_shard), want)


# ---------------------------------------------------------------------- other models


class Noisy(nn.Module):
    """Blocks with dropout, in a chain or with what one returned used again. `own`: they are checkpointed by
    the model itself."""

    def __init__(self, joins: bool = False, own: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(4))
        self.head = nn.Linear(12, 1)
        self.joins, self.own, self.twice = joins, own, twice

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.sin(torch.arange(12.0) * tokens[:, :1]) * 0.5
        first = None
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.own else block(x)
            first = x if first is None else first
        if self.twice:
            x = self.blocks[3](x)
        x = self.head(x + first if self.joins else x)
        return (x**2).mean()


class NoisyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)
        self.spare = nn.Linear(3, 3)  # not used

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.3, self.training))


@pytest.mark.parametrize("joins", [False, True])
def test_random_states_are_replayed(joins: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        models = [Noisy(joins), Noisy(joins)]
    models[1].load_state_dict(models[0].state_dict())
    want = Training(0, model=models[0]).train(clipped_by_shard)
    got = Training(4, model=models[1])
    assert_same_bits(got.train(clipped_by_shard), want)


def test_a_model_that_checkpoints_its_blocks() -> None:
    models = [Noisy(own=True), Noisy(own=True)]
    models[1].load_state_dict(models[0].state_dict())
    want = Training(0, model=models[0], recompute=False).train(clipped_by_shard)
    got = Training(2, model=models[1], recompute=False)
    assert_same_bits(got.train(clipped_by_shard), want)
    assert got.second.most > 0


def test_a_block_that_is_called_twice_keeps_its_gradients(caplog: pytest.LogCaptureFixture) -> None:
    models = [Noisy(twice=True), Noisy(twice=True)]
    models[1].load_state_dict(models[0].state_dict())
    want = Training(0, model=models[0]).train(clipped_by_shard)
    with caplog.at_level(logging.WARNING, "zeroshard"):
        assert_same_bits(Training(2, model=models[1]).train(clipped_by_shard), want)
    assert "wait for the norm, although Offload(repeat_backward=) names it" in caplog.text


# ---------------------------------------------------------------------- other loops


def accumulated(training: Training, step: int) -> None:
    with training.run.no_sync():
        training.loss(step, 1).backward()
    clipped_by_shard(training, step)


def two_backward_passes(training: Training, step: int) -> None:
    training.loss(step, 1).backward()
    readme(training, step)


def two_graphs(training: Training, step: int) -> None:
    losses = [training.loss(step, micro) for micro in range(2)]
    losses[0].backward()
    losses[1].backward()
    training.norms.append(float(clip_grad_norm_(training.params, ALWAYS)))
    training.optimizer.step()
    training.optimizer.zero_grad()


def evaluates(training: Training, step: int) -> None:
    training.loss(step).backward()
    with torch.no_grad():
        training.norms.append(float(training.loss(step + 1)))
    training.norms.append(float(clip_grad_norm_(training.params, ALWAYS)))
    training.optimizer.step()
    training.optimizer.zero_grad()


def looks(training: Training, step: int) -> None:
    training.loss(step).backward()
    shown = training.params[3 + 5 * (step % 5)].grad
    assert shown is not None
    training.norms.append(float(shown.abs().max()))
    readme_step(training)


def by_value(training: Training, step: int) -> None:
    training.loss(step).backward()
    clip_grad_value_(training.params, 0.01)
    readme_step(training)


def readme_step(training: Training) -> None:
    training.norms.append(float(clip_grad_norm_(training.params, ALWAYS)))
    training.optimizer.step()
    training.optimizer.zero_grad()


def keeps_zeros(training: Training, step: int) -> None:
    training.optimizer.zero_grad(set_to_none=False)
    training.loss(step).backward()
    training.norms.append(float(clip_grad_norm_(training.params, ALWAYS)))
    training.optimizer.step()


def skips(training: Training, step: int) -> None:
    """Every third step is left out, after backward."""
    training.loss(step).backward()
    training.norms.append(float(clip_grad_norm_(training.params, ALWAYS)))
    if step % 3 != 1:
        training.optimizer.step()
    training.optimizer.zero_grad()


def drops_some(training: Training, step: int) -> None:
    """Some gradients are taken away by hand, and one is the loop's own."""
    training.loss(step).backward()
    training.params[-4].grad = None
    if step % 2:
        training.params[12].grad = torch.ones_like(training.params[12])
    readme_step(training)


LOOPS = [two_backward_passes, two_graphs, evaluates, looks, by_value, keeps_zeros, skips, drops_some]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_of_the_users_own(loop: Loop) -> None:
    check(loop, limit=None, steps=6)


def test_a_gradient_scaler() -> None:
    """One step overflows, and is left out."""
    weights = []
    for repeat in (0, 2):
        training = Training(repeat, limit=None, precision="fp16")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for step in range(5):
            scaler.scale(training.loss(step) * (1e9 if step == 2 else 1.0)).backward()
            scaler.unscale_(training.optimizer)
            training.norms.append(float(clip_grad_norm_(training.params, ALWAYS)))
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
        assert scaler.get_scale() < 2.0**12
        weights.append(training.end())
    assert_same_bits(*weights)


def test_accumulation_waits() -> None:
    """The sum of micro-batches cannot be brought again, so it is kept."""
    want = Training(0).train(accumulated, 4)
    got = Training(2)
    assert_same_bits(got.train(accumulated, 4), want)
    assert got.second.most == 0


def test_a_step_that_is_left_out_with_clip_norm() -> None:
    def loop(training: Training, step: int) -> None:
        training.loss(step).backward()
        if step % 3 != 1:
            training.optimizer.step()
        training.optimizer.zero_grad()

    check(loop)


def test_norms_need_no_second_backward() -> None:
    training = Training(2, limit=None)
    training.loss(0).backward()
    clip_grad_norm_(training.params, ALWAYS)
    kept = training.second.held
    assert kept > 0
    held = training.params[-4].grad
    assert held is not None
    float(held.norm())
    assert training.second.held == kept
    held.tolist()
    assert training.second.held < kept, "of the unit that was looked at nothing waits any more"
    training.end()


def test_a_save_and_what_follows(tmp_path: Path) -> None:
    want = Training(0).train(clipped_by_shard)
    first = Training(2)
    for step in range(4):
        clipped_by_shard(first, step)
    first.run.save(tmp_path)
    first.end()
    second = Training(2)
    second.run.load(tmp_path)
    for step in range(4, STEPS):
        clipped_by_shard(second, step)
    assert_same_bits(second.end(), want)


# ---------------------------------------------------------------------- memory


def test_bytes_that_are_kept() -> None:
    """Inputs of the units that run twice, and of a chain one gradient; no gradient of theirs waits."""
    one = 2 * 8 * 20 * 4
    training = Training(2)
    training.loss(0).backward()
    assert training.second.held == 3 * one
    waiting = [part for part in training.updates.parts if part.update.flat is not None]
    names = {param.name for part in waiting for param in part.params}
    assert names == {
        name for name, _ in training.model.named_parameters() if not name.startswith(("blocks.1", "blocks.2"))
    }
    training.optimizer.step()
    assert training.second.held == 0
    assert training.second.most == 3 * one
    training.end()


def test_planned_bytes_are_those_that_are_held() -> None:
    one = 2 * 8 * 20 * 4
    training = Training(2)
    training.loss(0).backward()
    held, parts = training.second.held, training.updates.parts
    waiting = sum(part.update.flat.nbytes for part in parts if part.update.flat is not None)
    training.optimizer.step()
    training.end()
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    blocks = [StepSegment(f"blocks.{number}", saved=one, backward=7) for number in range(3)]
    chain = [StepSegment(""), *blocks, StepSegment("")]

    def moments(repeat: int, micro_batches: int = 1) -> dict[str, dict[str, int]]:
        asked = Options(stage=0, clip_norm=ALWAYS, recompute=True, offload=host(repeat))
        step = step_moments(MemoryModel(units, asked, 1, rules), chain, 0, micro_batches > 1)
        return {moment.where: moment.kinds for moment in step}

    plain, twice = moments(0), moments(2)
    assert twice["the update"]["gradients"] == waiting < plain["the update"]["gradients"]
    assert twice["backward of `blocks.0`"]["activations"] == 7 + one + held
    assert plain["backward of `blocks.0`"]["activations"] == 7 + one
    assert twice["second backward of `blocks.2`"]["activations"] == 7 + held
    assert twice["second backward of `blocks.1`"]["activations"] == 7 + held - one
    assert "second backward of `blocks.0`" not in twice
    assert moments(2, micro_batches=2) == moments(0, micro_batches=2), "sums of micro-batches wait"


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": float("inf")}, "saves the room in which gradients wait"),
        ({"more": {"undo": False}}, "saves the room in which gradients wait"),
        ({"repeat": 4}, "of 3 units the backward can run twice"),
        ({"repeat": 1, "optimizer": "rmsprop"}, "of 0 units the backward can run twice"),
        ({"repeat": -1}, "must be a whole number, 0 or more"),
    ],
)
def test_what_has_no_effect_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(zs.OptionError, match=words):
        Training(**({"repeat": 2} | options))


def on_two_ranks() -> str:
    try:
        Training(2)
    except zs.OptionError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_several_ranks_are_refused() -> None:
    assert all("is for one rank, and these are 2" in told for told in ranks(2).run(on_two_ranks))


def test_a_compiled_unit_is_refused() -> None:
    model = make_model()
    model.blocks[2].compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(zs.OptionError, match="that module has none of its own, or is compiled"):
        zs.shard(model, optimizer, clip_norm=1.0, offload=zs.Offload(repeat_backward=1))


def test_a_forward_that_computes_something_else_is_refused() -> None:
    class Counting(NoisyBlock):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                self.calls += 1
            return super().forward(x) * (1.0 if self.calls < 3 else 5.0)

    model = Noisy()
    model.blocks[3] = Counting()
    training = Training(1, model=model, units=("blocks.*",))
    training.loss(0).backward()
    with pytest.raises(zs.StateError, match="gave other gradients than the first"):
        training.optimizer.step()


def test_inputs_that_are_written_are_refused() -> None:
    model, given = Noisy(), list[Tensor]()
    model.blocks[3].register_forward_pre_hook(lambda block, args: given.append(args[0]))
    training = Training(1, model=model, recompute=False)
    training.loss(0).backward()
    with torch.no_grad():
        given[0].add_(1.0)
    with pytest.raises(zs.StateError, match="has been written in place since"):
        training.optimizer.step()


def test_a_gradient_is_gone_after_the_step() -> None:
    training = Training(2, limit=None)
    training.loss(0).backward()
    clip_grad_norm_(training.params, ALWAYS)
    training.optimizer.step()
    grads = [p.grad for p in training.params]
    with pytest.raises(zs.StateError, match="and others is gone: with Offload"):
        [grad.tolist() for grad in grads if grad is not None]
    training.optimizer.zero_grad()
    training.end()
