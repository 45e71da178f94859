"""Parameters and gradients that the loop writes by hand, at any time and by any name, and tells nobody."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_param_kinds import Stack, four, squared
from torch import Tensor, nn
from trained_twice import (
    STAGES,
    Case,
    Training,
    assert_as_one_process,
    assert_trained_alike,
    in_float64,
    plain,
    plain_turn,
    sharded,
    update,
)

import zeroshard as zs
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks


def ascended(training: Training, step: int) -> None:
    """Sharpness-aware: the gradient is that of a point uphill, from which the weights come back."""
    training.loss(step).backward()
    params = list(training.model.parameters())
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p in params:
            p.add_(p.grad, alpha=0.05)
    training.optimizer.zero_grad()
    training.loss(step).backward()
    with torch.no_grad():
        for p, value in zip(params, before, strict=True):
            p.copy_(value)
    update(training)


def between_forwards(training: Training, step: int) -> None:
    """A rank is through with a forward, and writes what another may still be reading."""
    plain_turn(training, step)
    training.loss(step)
    for p in training.model.parameters():
        p.data.mul_(0.98)
    training.loss(step)
    with torch.no_grad():
        torch._foreach_mul_(list(training.model.parameters()), 0.99)
        training.model.last.weight[:, 1:].t().clamp_(-0.2, 0.2)
    training.loss(step)


def assigned(training: Training, step: int) -> None:
    training.loss(step).backward()
    for p in training.model.parameters():
        p.data = p.data * 0.99
    update(training)
    for p in training.model.parameters():
        p.data = p.data.clamp(-0.3, 0.3)


def swapped(training: Training, step: int) -> None:
    """An average of the weights stands in the model while it is evaluated."""
    plain_turn(training, step)
    params = list(training.model.parameters())
    if step == 0:
        training.average = [p.detach().clone() for p in params]
    kept = [p.data.clone() for p in params]
    for mean, p in zip(training.average, params, strict=True):
        mean.lerp_(p.data, 0.3)
        p.data.copy_(mean)
    with torch.no_grad():
        training.loss(step + 40)
    for p, value in zip(params, kept, strict=True):
        p.data = value


def gradients_assigned(training: Training, step: int) -> None:
    """Twice, since the second backward adds to what the first has left."""
    for micro in range(2):
        training.loss(2 * step + micro).backward()
        for p in training.model.parameters():
            p.grad.data = p.grad.data * 0.5
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=step % 2 == 0)


def other_optimizer(training: Training, step: int) -> None:
    """One that is built after shard(), and that nobody was told of."""
    if step == 0:
        training.other = torch.optim.SGD(training.model.last.parameters(), lr=0.1)
    plain_turn(training, step)
    training.loss(step).backward()
    training.other.step()
    training.model.zero_grad()
    training.loss(step)


TURNS = (ascended, between_forwards, assigned, swapped, gradients_assigned, other_optimizer)
HOST: dict[str, Any] = {"offload": zs.Offload()}
CASES = {
    **{turn.__name__: Case(Stack, four, squared, turn=turn, steps=4) for turn in TURNS},
    **{f"{t.__name__} host": Case(Stack, four, squared, turn=t, steps=4, options=HOST) for t in TURNS},
}


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", [turn.__name__ for turn in TURNS])
def test_equals_one_process(name: str, stage: int) -> None:
    assert_as_one_process(__name__, name, stage)


@pytest.mark.wide(2)
@pytest.mark.parametrize("name", [turn.__name__ for turn in TURNS])
def test_equals_one_process_over_gloo(name: str) -> None:
    assert_as_one_process(__name__, name, 3, transport="gloo")


def several(names: list[str], stage: int) -> list[Any]:
    return [sharded(__name__, name, stage, "auto") for name in names]


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 0), (2, 2)])
def test_equals_one_process_with_state_on_the_host(world: int, stage: int) -> None:
    names = [name for name in CASES if name.endswith("host") and not name.startswith("between")]
    found = ranks(world).run(several, names, stage)
    for name, trained in zip(names, zip(*found, strict=True), strict=True):
        assert_trained_alike(list(trained), plain(CASES[name], world), CASES[name].tolerance)


def narrow(assigns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What a bf16 model of one rank computes: as it is, written by hand, and after run.publish()."""
    model = nn.Linear(4, 3)
    run = zs.shard(model, torch.optim.SGD(model.parameters()), precision="bf16")
    x = torch.ones(1, 4)
    first = model(x).detach()
    with torch.no_grad():
        for p in model.parameters():
            if assigns:
                p.data = p.data * 2
            else:
                p.mul_(2)
    second = model(x).detach()
    run.publish()
    return first, second, model(x).detach()


@pytest.mark.parametrize("assigns", [False, True])
def test_a_copy_in_sixteen_bits_follows(assigns: bool) -> None:
    first, second, third = narrow(assigns)
    torch.testing.assert_close(second, 2 * first)
    assert torch.equal(third, second)


# ---------------------------------------------------------------------- beside the host


def decayed(stage: int | None, waits: bool) -> list[float]:
    """Weights that shrink right after the step, by their own norm, when the host may be at them still."""
    torch.manual_seed(3)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = None
    if stage is not None:
        run = zs.shard(model, optimizer, stage=stage, offload=zs.Offload(), clip_norm=1e9)
    losses = []
    for step in range(4):
        loss = squared(model, four(step, 0).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if run is not None and waits:
            with run.gathered():
                pass
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - 0.1 * p.norm().clamp(max=1.0))
        losses.append(squared(model, four(step, 0).float()).item())
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_rows_wait_for_the_host(stage: int) -> None:
    expected = pytest.approx(decayed(None, waits=False), rel=1e-6)
    assert all(found == expected for found in ranks(2).run(decayed, stage, False))


@pytest.mark.parametrize("world", [1, 2])
def test_plain_parameters_are_written_after_waiting(world: int) -> None:
    found = ranks(world).run(decayed, 0, True)
    assert found == [pytest.approx(decayed(None, waits=False), rel=1e-6)] * world
    with pytest.raises(zs.StateError, match=r"`first\.weight` was written by hand while the host .* neither"):
        decayed(0, waits=False)


def way_back(folder: str, assigns: bool) -> None:
    """What was written beside the host is told once; then a checkpoint is loaded, or the run closed."""
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, offload=zs.Offload(), clip_norm=1e9)
    x = four(0, 0).float()
    squared(model, x).backward()
    optimizer.step()
    run.save(folder)
    expected = squared(model, x).item()
    squared(model, x).backward()
    optimizer.step()
    with torch.no_grad():
        if assigns:
            model.last.bias.data = torch.zeros(5)
        else:
            model.last.bias.zero_()
    with pytest.raises(zs.StateError, match="Load the last checkpoint to go on"):
        model(x)
    run.load(folder)
    assert squared(model, x).item() == expected
    run.close()


@pytest.mark.parametrize("assigns", [False, True])
def test_there_is_a_way_back(tmp_path: Path, assigns: bool) -> None:
    way_back(str(tmp_path / "kept"), assigns)


def pruned(stage: int | None, **options: Any) -> list[float]:
    """Zeros where there were weights, and one forward and two steps after that. In bf16: zeros have no
    remainder, and so have the ones that are added."""
    torch.manual_seed(3)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage is not None:
        zs.shard(model, optimizer, stage=stage, precision="bf16", clip_norm=1e9, **options)
    losses = []
    for step in range(5):
        loss = squared(model, four(step, 0).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 2:
            model(four(step, 0).float())  # it waits for the host
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(p > 0) if p.dim() == 1 else p.zero_()
                    p.add_(1.0)
    return losses


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 0), (2, 1), (2, 3)])
def test_masters_follow_what_is_written_beside_them(world: int, stage: int, tmp_path: Path) -> None:
    """Halves of a split master, and masters on the disk, are not what the sharded parameter shows."""
    expected = ranks(world).run(partial(pruned, offload=None), stage)[0]
    ways = {
        "device": zs.Offload(optimizer="device", master="split"),
        "host": zs.Offload(master="split"),
        "disk": zs.Offload(optimizer="disk", path=str(tmp_path)),
    }
    for name, offload in ways.items():
        found = ranks(world).run(partial(pruned, offload=offload), stage)[0]
        assert found == pytest.approx(expected, rel=0.02), name


def written_on_disk(folder: str) -> None:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offload = zs.Offload(optimizer="disk", parameters="disk", path=folder)
    run = zs.shard(model, optimizer, stage=3, offload=offload, clip_norm=1e9)
    before = squared(model, four(0, 0).float()).item()
    with torch.no_grad():
        model.last.weight.zero_()
    with pytest.raises(zs.StateError, match=r"`last.weight` was written by hand, .* rest on the disk"):
        model(four(0, 0).float())
    assert squared(model, four(0, 0).float()).item() == before
    run.close()


def test_what_rests_on_the_disk_is_not_written_by_hand(tmp_path: Path) -> None:
    written_on_disk(str(tmp_path))


# ---------------------------------------------------------------------- what is refused


def assign_another(stage: int) -> None:
    model = in_float64(Stack)
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
    weight = model.last.weight
    if stage:
        said = (
            r"p\.data = .* of shape \(5, 6\) .* takes one like it, .* not a Tensor .*gathered\(write=True\)"
        )
        with pytest.raises(zs.StateError, match=said):
            weight.data = torch.zeros(5, 6, dtype=torch.float64)
    else:
        weight.data = torch.zeros(5, 6)
        said = (
            r"`last\.weight`\.data was replaced by .* torch\.float32 .* keeps it as \(5, 6\), torch\.float64"
        )
        with pytest.raises(zs.StateError, match=said):
            model(four(0, run.rank))


@pytest.mark.parametrize("stage", [0, 2])
def test_other_kinds_of_tensors_are_refused(stage: int) -> None:
    ranks(2).run(assign_another, stage)


class Writes(Stack):
    """Writes parameters while it computes: of the root, or of a block that has yet to run."""

    how = ""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "root":
                self.last.bias.mul_(0.9)
            elif self.how == "root assigned":
                self.last.bias.data = self.last.bias.data * 0.9
            elif self.how == "block":
                self.blocks[1].up.weight.data.mul_(0.9)
            elif self.how == "block assigned":
                self.blocks[1].up.weight.data = self.blocks[1].up.weight.data * 0.9
        return super().forward(x)


REFUSED = {  # by stage, where what is written would be lost; elsewhere it is the model's
    0: ("root assigned", "block assigned"),
    2: ("root", "root assigned", "block", "block assigned"),
    3: ("root", "root assigned", "block", "block assigned"),
}


def write_inside(stage: int, ways: tuple[str, ...]) -> None:
    training = Training(Case(Writes, four, squared), [dist.get_rank()], {"stage": stage})
    plain_turn(training, 0)
    for how in ways:
        training.model.how = how
        said = (
            r"(a parameter|a parameter of .*|`last.bias`) was written inside a forward\. .* in the loop, bef"
        )
        with pytest.raises(zs.StateError, match=said):
            plain_turn(training, 1)
        training.model.how = ""
    training.model.load_state_dict(in_float64(Writes).state_dict())
    found = squared(training.model, four(1, 0)).item()
    assert found == pytest.approx(squared(in_float64(Writes), four(1, 0)).item())  # all is as it was


@pytest.mark.parametrize("stage", REFUSED)
def test_writing_inside_a_forward_is_refused(stage: int) -> None:
    ranks(2).run(write_inside, stage, REFUSED[stage])


# ---------------------------------------------------------------------- what nobody has written


def evaluate_unequally() -> list[float]:
    """Frozen rows lie beside those that the run copies from the host: none of that is the loop's writing."""
    torch.manual_seed(5)  # the same on every rank: it fills what is built on meta
    with torch.device("meta"):
        model = Stack()
    model.last.weight.requires_grad_(False)
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.05)
    run = zs.shard(model, optimizer, stage=0, offload=zs.Offload())
    x, losses = four(0, 0).float(), []
    for _ in range(3):
        for _ in range(1 + 2 * run.rank):
            with torch.no_grad():
                model(x)
        loss = squared(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_ranks_that_evaluate_unequally_stay_together() -> None:
    first, second = ranks(2).run(evaluate_unequally)
    assert first == second
