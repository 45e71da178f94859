"""What happens around training: batch statistics, fused evaluation, generation, exceptions."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_loops import Normed, generate
from test_module_kinds import Layers, encoder_layer, pictures
from test_param_kinds import Stack, Tied, four, next_token, squared
from torch import Tensor
from trained_twice import STAGES, Case, Training, adamw, in_float64, plain_turn, rows, same_tensors, tokens

import zeroshard as zs
from zeroshard.comm.diagnosis import exits
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks
WORLD = 2


# ---------------------------------------------------------------------- batch statistics


def statistics(stage: int, buffers: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    model = in_float64(Normed)
    optimizer = adamw(model.parameters())
    run = zs.shard(model, optimizer, stage=stage, buffers=buffers, transport="auto")
    for step in range(6):
        squared(model, rows(step, run.rank, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    out = model(rows(99, 0, 4)).detach()
    run.close()
    return dict(model.named_parameters()), {n: b.clone() for n, b in model.named_buffers()}, out


def statistics_by_hand(share: bool) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """One process that keeps every rank's buffers; with `share` each forward starts from rank 0's."""
    model = in_float64(Normed)
    optimizer = adamw(model.parameters())
    kept = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(WORLD)]
    for step in range(6):
        before = {n: b.clone() for n, b in kept[0].items()}
        for rank in range(WORLD):
            for name, buffer in model.named_buffers():
                tracked = name != "seen"  # only batch statistics are rank 0's
                buffer.copy_((before if share and tracked else kept[rank])[name])
            (squared(model, rows(step, rank, 4)) / WORLD).backward()
            kept[rank] = {n: b.clone() for n, b in model.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), kept


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_batch_statistics(buffers: str, stage: int) -> None:
    params, kept = statistics_by_hand(buffers == "broadcast")
    for rank, (got, mine, _) in enumerate(ranks(WORLD).run(statistics, stage, buffers)):
        same_tensors(got, params, 1e-9, f"on rank {rank}")
        same_tensors(mine, kept[rank], 1e-9, f"on rank {rank}")


# ---------------------------------------------------------------------- evaluation


def fused_evaluation(stage: int) -> tuple[list[Tensor], Tensor]:
    case = Case(lambda: Layers(encoder_layer(), encoder_layer()), pictures, squared)
    training = Training(case, [dist.get_rank()], {"stage": stage})
    outs = []
    for step in range(3):
        plain_turn(training, step)
        training.model.eval()
        with torch.inference_mode():
            outs.append(training.model(pictures(90, 0)).clone())
        training.model.train()
    assert training.run is not None
    training.run.close()
    with torch.no_grad():
        slow = training.model(pictures(90, 0))
    return outs, slow


@pytest.mark.parametrize("stage", STAGES)
def test_fused_evaluation_of_encoder_layers(stage: int) -> None:
    """In eval mode torch runs a layer by one fused kernel that reads the weights of its children."""
    case = Case(lambda: Layers(encoder_layer(), encoder_layer()), pictures, squared)
    training = Training(case, list(range(WORLD)))
    expected = []
    for step in range(3):
        plain_turn(training, step)
        training.model.eval()
        with torch.inference_mode():
            expected.append(training.model(pictures(90, 0)).clone())
        training.model.train()
    for outs, slow in ranks(WORLD).run(fused_evaluation, stage):
        for got, want in zip(outs, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(slow, expected[-1], rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------- generation


def generation(stage: int, transport: str) -> list[list[int]]:
    """After every step a text whose length depends on the rank; the last rank generates nothing at all."""
    case = Case(Tied, tokens, next_token, options={"transport": transport})
    training = Training(case, [dist.get_rank()], {"stage": stage, **case.options})
    run, texts = training.run, []
    assert run is not None
    for step in range(3):
        plain_turn(training, step)
        length = 4 * (run.size - 1 - run.rank)
        if transport == "shm":
            texts.append(generate(training.model, length))
        else:
            with run.kept_full():
                texts.append(generate(training.model, length))
    run.close()
    return texts


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_generate_to_different_lengths(world: int, transport: str, stage: int) -> None:
    training = Training(Case(Tied, tokens, next_token), list(range(world)))
    expected = []
    for step in range(3):
        plain_turn(training, step)
        expected.append([generate(training.model, 4 * (world - 1 - rank)) for rank in range(world)])
    got = ranks(world).run(generation, stage, transport)
    assert [list(texts) for texts in zip(*got, strict=True)] == expected


# ---------------------------------------------------------------------- exceptions


class Fragile(Stack):
    """Raises where it is told to."""

    broken = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.broken == "forward" and number == 1:
                raise ValueError("broken in forward")
            if self.broken == "interrupted" and number == 1:
                raise KeyboardInterrupt
            if self.broken == "backward" and number == 1:
                x.register_hook(self.fail)
        return self.last(x)

    @staticmethod
    def fail(grad: Tensor) -> None:
        raise ValueError("broken in backward")


def recovering(stage: int | None, where: str) -> dict[str, Tensor]:
    """One rank: a step fails every now and then, and is left out."""
    case = Case(Fragile, four, squared)
    training = Training(case, [0], None if stage is None else {"stage": stage})
    for step in range(6):
        training.model.broken = where if step in (1, 2, 4) and stage is not None else ""
        if training.model.broken:
            with pytest.raises(ValueError, match=f"broken in {where}"):
                plain_turn(training, step)
            training.optimizer.zero_grad()
        elif step not in (1, 2, 4):
            plain_turn(training, step)
    if training.run is not None:
        training.run.close()
    return {n: p.detach() for n, p in training.model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_recovers_from_an_exception(where: str, stage: int) -> None:
    same_tensors(recovering(stage, where), recovering(None, where), 0.0, "")


ON_ONE_RANK: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "recompute": {"precision": "bf16", "recompute": True},
    "streamed": {"offload": zs.Offload(parameters="host"), "clip_norm": 1.0},
    "host": {"offload": zs.Offload(stage_bytes=512)},
}


def disturbed(options: dict[str, Any], where: str) -> tuple[list[float], dict[str, Tensor]]:
    """Forward or backward ends before its time every now and then, and the step is done again."""
    torch.manual_seed(3)
    model, losses = Fragile(), []
    optimizer = adamw(model.parameters())
    run = zs.shard(model, optimizer, **options)
    for step in range(5):
        if where and step in (1, 3):
            model.broken = where
            with pytest.raises((KeyboardInterrupt, ValueError)):
                squared(model, four(step, 0).float()).backward()
            model.broken = ""
            optimizer.zero_grad()
            if step == 3:  # outside of a forward modules hold what the optimizer has
                model.state_dict()
                held = optimizer.param_groups[0]["params"]
                assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
        loss = squared(model, four(step, 0).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.close()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_one_rank_goes_on_after_an_interrupt(name: str) -> None:
    """As in a notebook. Torch tells no hook that an interrupt ended a forward."""
    want, same = disturbed(ON_ONE_RANK[name], "")
    assert len(set(want)) == 5  # it learns all the while
    for where in ("interrupted", "backward"):
        losses, params = disturbed(ON_ONE_RANK[name], where)
        assert losses == pytest.approx(want, rel=1e-6)
        same_tensors(params, same, 1e-6, f"after one that was {where}")  # early updates are taken back


def caught_in_forward(stage: int) -> dict[str, Tensor]:
    """All ranks: a forward that fails on every rank alike, say out of memory in a long batch, is left out."""
    training = Training(Case(Fragile, four, squared), [dist.get_rank()], {"stage": stage})
    for step in range(6):
        training.model.broken = "forward" if step in (1, 4) else ""
        try:
            plain_turn(training, step)
        except ValueError:
            training.optimizer.zero_grad()
    assert training.run is not None
    training.run.close()
    return {n: p.detach() for n, p in training.model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_recover_from_an_exception_in_forward(stage: int) -> None:
    training = Training(Case(Fragile, four, squared), list(range(WORLD)))
    for step in (0, 2, 3, 5):
        plain_turn(training, step)
    expected = {n: p.detach() for n, p in training.model.named_parameters()}
    for rank, got in enumerate(ranks(WORLD).run(caught_in_forward, stage)):
        same_tensors(got, expected, 1e-9, f"on rank {rank}")


def caught_in_backward(stage: int) -> str:
    training = Training(Case(Fragile, four, squared), [dist.get_rank()], {"stage": stage})
    plain_turn(training, 0)
    training.model.broken = "backward"
    with pytest.raises(ValueError, match="broken in backward"):
        plain_turn(training, 1)
    training.model.broken = ""
    with pytest.raises(zs.StateError) as caught:
        plain_turn(training, 2)
    return str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_several_ranks_refuse_to_go_on_after_a_failed_backward(stage: int) -> None:
    for text in ranks(WORLD).run(caught_in_backward, stage):
        assert text == ("an earlier backward failed on this rank before its gradients were reduced; "
                        "restart the run from a checkpoint.")  # fmt: skip


def with_a_child(transport: str) -> list[float]:
    """One that loads data, say: it fails, and its exit handlers run, before the ranks go on."""
    training = Training(Case(Stack, four, squared), [dist.get_rank()], {"stage": 3, "transport": transport})
    plain_turn(training, 0)
    child = os.fork()
    if child == 0:
        exits._announce(ValueError("of a child"))
        exits._close_all()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for step in (1, 2):
        plain_turn(training, step)
    assert training.run is not None
    training.run.close()
    return training.losses


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_child_that_a_rank_forks_ends_as_it_likes(transport: str) -> None:
    training = Training(Case(Stack, four, squared), list(range(WORLD)))
    for step in range(3):
        plain_turn(training, step)
    losses = ranks(WORLD).run(with_a_child, transport)
    mean = [sum(of_ranks) / WORLD for of_ranks in zip(*losses, strict=True)]
    assert mean == pytest.approx(training.losses, rel=1e-9)


# ---------------------------------------------------------------------- stray uses


def stray_uses(stage: int) -> dict[str, Any]:
    """Things that loops do between steps, each of which must not disturb training."""
    training = Training(Case(Stack, four, squared), [dist.get_rank()], {"stage": stage})
    plain_turn(training, 0)
    model, run = training.model, training.run
    assert run is not None
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    count = sum(p.numel() for p in model.parameters())
    texts = [repr(model), repr(run), repr(training.optimizer)]
    norm = torch.linalg.vector_norm(torch.stack([p.detach().norm() for p in model.parameters()]))
    model.train().eval().train().requires_grad_(True)
    model.apply(lambda module: None)
    partial = model.blocks[1](torch.zeros(2, 6, dtype=torch.float64)).detach()  # a unit called on its own
    plain_turn(training, 1)
    result = {"shapes": shapes, "count": count, "norm": _number(norm), "partial": partial, "texts": texts}
    run.close()
    return result | {"params": {n: p.detach() for n, p in model.named_parameters()}}


def _number(tensor: Any) -> float:
    return float(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


@pytest.mark.parametrize("stage", STAGES)
def test_stray_uses_between_steps(stage: int) -> None:
    training = Training(Case(Stack, four, squared), list(range(WORLD)))
    plain_turn(training, 0)
    model = training.model
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    count = sum(p.numel() for p in model.parameters())
    norm = _number(torch.stack([p.detach().norm() for p in model.parameters()]).norm())
    partial = model.blocks[1](torch.zeros(2, 6, dtype=torch.float64)).detach()
    plain_turn(training, 1)
    for got in ranks(WORLD).run(stray_uses, stage):
        assert (got["shapes"], got["count"]) == (shapes, count)
        assert "Stack(" in got["texts"][0]
        assert f"zeroshard.Run Stack: stage {stage}, rank" in got["texts"][1]
        assert "AdamW (" in got["texts"][2]
        assert got["norm"] == pytest.approx(norm, rel=1e-9)
        torch.testing.assert_close(got["partial"], partial, rtol=1e-9, atol=1e-9)
        same_tensors(got["params"], {n: p.detach() for n, p in model.named_parameters()}, 1e-9, "")


# ---------------------------------------------------------------------- what a run tells of itself


def told(stage: int) -> tuple[set[str], dict[str, float], int]:
    """The spans of one step, how long it waited, and for how many steps."""
    training = Training(Case(Stack, four, squared), [dist.get_rank()], {"stage": stage})
    plain_turn(training, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain_turn(training, 1)
    assert training.run is not None
    stats = training.run.stats()
    training.run.close()
    names = {event.key for event in profile.key_averages() if event.key.startswith("zeroshard.")}
    return names, dict(stats.waited), stats.steps


@pytest.mark.parametrize("stage", STAGES)
def test_spans_are_named_after_units_and_waits_are_counted(stage: int) -> None:
    for names, waited, steps in ranks(WORLD).run(told, stage):
        assert {"zeroshard.step", "zeroshard.land"} <= names
        assert {f"zeroshard.gather blocks.{number}" for number in range(3)} <= names
        assert any(name.startswith("zeroshard.reduce gradients 0 (") for name in names)
        assert all(map(str.isascii, names)), "export_chrome_trace leaves out all others"
        assert steps == 2
        assert waited
        assert all(seconds >= 0 for seconds in waited.values())
