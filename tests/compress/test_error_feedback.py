"""What a codec did not send is not lost, and what is not finite is seen by all: through the whole library,
for every codec under every stage and policy, not for the codec alone."""

from __future__ import annotations

import math
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks
SMALL = "2KiB"  # several buckets
NODES = {"node_cache": True, "ranks_per_node": 2}

# ---------------------------------------------------------------------- error feedback

FEEDBACK = [
    zs.Int8(feedback=True),
    zs.Int4(stochastic=True),
    zs.OneBit(warmup_steps=1),
    zs.TopK(ratio=0.05),
    zs.LowRank(rank=2),
    zs.TwoBit(),
    zs.Ternary(block=16, large=1),
    zs.OneBit(warmup_steps=2, warmup=zs.Int4()),
    zs.TopK(ratio=0.05, warmup_steps=1, ramp_steps=2),
]


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad  # type: ignore[no-any-return]


def kept_of_sums(run: Any) -> dict[str, Tensor]:
    """Stage 0: what this rank, as owner, did not send of the sum, in the places of the parameters."""
    found = {}
    for bucket in run._runtime.gradients.buckets:
        again = getattr(bucket, "_again", {}).get("residual")
        if again is not None:
            first, numel = bucket._bodies[run.rank]
            flat = torch.zeros(bucket.pack.wire)
            flat[first : first + numel] = again
            for slot, at in zip(bucket.pack.slots, bucket.pack.full_offsets, strict=True):
                found[slot.name] = flat[at : at + slot.numel].view(slot.shape).clone()
    return found


def sums(codecs: list[Any], options: dict[str, Any], steps: int) -> list[dict[str, dict[str, Tensor]]]:
    """For each codec: the sum of the gradients that arrived, what this rank has not sent, and what it has not
    sent of sums."""
    told = []
    for codec in codecs:
        model = models.build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = zs.shard(model, optimizer, bucket_bytes=SMALL, compress=codec, **options)
        for step in range(steps):  # without zero_grad: what arrives is added up
            model(models.MLP.batch(3, seed=10 * step + run.rank)).backward()
        total = {name: whole(p.grad).double() for name, p in model.named_parameters() if p.grad is not None}
        shapes = {name: value.shape for name, value in total.items()}
        rest = {
            held.name: held.read(0, held.numel).double().view(shapes[held.name])
            for held in run._runtime.sync_strategy.state().private
            if held.key.startswith("residual") and held.name in shapes
        }
        told.append({"total": total, "rest": rest, "of sums": kept_of_sums(run)})
        run.close()
    return told


CONSERVED = [
    *[(2, {"stage": stage}) for stage in (0, 1, 2, 3)],
    (4, {"stage": 3, "gather": zs.Cast("float16"), **NODES}),
]


@pytest.mark.wide(2)
@pytest.mark.parametrize(("world", "options"), CONSERVED, ids=str)
def test_what_arrived_and_what_is_kept_are_the_sum_of_the_gradients(
    world: int, options: dict[str, Any]
) -> None:
    codecs = FEEDBACK if world == 2 else FEEDBACK[1::2]
    everyone = ranks(world).run(sums, [None, *codecs], options, 4, timeout=300)
    exact = everyone[0][0]["total"]
    largest = max(float(value.abs().max()) for value in exact.values())
    for number, codec in enumerate(codecs, 1):
        mine = [told[number] for told in everyone]
        lost = 0.0
        for name, value in exact.items():
            rest = sum((m["rest"][name] for m in mine if name in m["rest"]), torch.zeros(1)) / world
            rest = rest + sum((m["of sums"][name] for m in mine if name in m["of sums"]), torch.zeros(1))
            gap = (mine[0]["total"][name] + rest - value).abs().max()
            assert gap <= 1e-6 * largest, f"{codec}: {name}"
            lost = max(lost, float((mine[0]["total"][name] - value).abs().max()))
        assert lost > 1e-5 * largest, f"{codec} has kept nothing, so nothing was tested"


# ---------------------------------------------------------------------- what is not finite

CODECS: list[Any] = [
    None,
    zs.Cast("bfloat16"),
    zs.Int8(),
    zs.Int8(feedback=True),
    zs.Int4(),
    zs.OneBit(warmup_steps=0),
    zs.TopK(ratio=0.1),
    zs.LowRank(rank=2),
    zs.Rows(),
]
INFINITE, NAN, STEPS = 1, 3, 6


def overflowed(model: nn.Module, in_rows: bool) -> bool:
    """Whether any number of the gradients is not finite; where ranks hold rows, of all ranks' rows, as a
    norm over all of them is."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [getattr(grad, "_local_tensor", grad) for grad in grads]
    found = torch.tensor([float(not all(bool(grad.isfinite().all()) for grad in local))])
    if in_rows:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def finite(runs: list[dict[str, Any]]) -> list[tuple[list[bool], tuple[str, ...]]]:
    """For each run: in which steps this rank sees a finite norm, and what it says of switches. The last rank
    has one infinite number in one step, and NaN everywhere in another."""
    told = []
    for options in runs:
        model = models.build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = zs.shard(model, optimizer, bucket_bytes=SMALL, **options)
        seen = []
        for step in range(STEPS):
            ill = run.rank == run.size - 1
            batch = models.MLP.batch(3, seed=10 * step + run.rank)
            if ill and step == NAN:
                batch[0, 0] = math.nan
            model(batch, ill and step == INFINITE).backward()
            seen.append(not overflowed(model, run.options.stage > 0))
            if seen[-1]:
                optimizer.step()
            optimizer.zero_grad()
        told.append((seen, run.stats().switches))
        run.close()
    return told


def policies(stage: int, codec: Any) -> list[dict[str, Any]]:
    """Options for every policy that this stage and codec go with."""
    plain, this = zs.EveryStep(), zs.EveryStep(compress=codec)
    chosen = (this, plain) if codec is not None else (plain, zs.EveryStep(compress=zs.Int8()))
    found: list[dict[str, Any]] = [
        {"compress": codec},
        {"sync": zs.Adaptive(choices=chosen, window=3, gain=1e-9, unrest=1e9)},
    ]
    if stage > 0:
        found.append({"compress": codec, "gather": zs.Int8()})
        if not isinstance(codec, zs.LowRank):
            found.append({"compress": codec, "sync": zs.Delayed()})
    return [{"stage": stage, **options} for options in found]


def check_all_see_it(world: int, runs: list[dict[str, Any]]) -> None:
    everyone = ranks(world).run(finite, runs, timeout=300)
    for number, options in enumerate(runs):
        late = isinstance(options.get("sync"), zs.Delayed)
        expected = [step - late not in (INFINITE, NAN) for step in range(STEPS)]
        for rank, told in enumerate(everyone):
            assert told[number][0] == expected, f"rank {rank}: {options}"
            assert told[number][1] == everyone[0][number][1], f"rank {rank}: {options}"


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_not_finite_is_seen_by_all_ranks_in_the_same_step(stage: int) -> None:
    check_all_see_it(2, [options for codec in CODECS for options in policies(stage, codec)])


def test_what_is_not_finite_crosses_nodes() -> None:
    gathers = [zs.Int8(), zs.Int4(feedback=False), zs.Cast("bfloat16")]
    runs = [
        {"stage": 3, "compress": codec, "gather": gathers[number % 3], **NODES}
        for number, codec in enumerate(CODECS[2:])
    ]
    check_all_see_it(4, [*runs, {"stage": 3, "sync": zs.Delayed(), "gather": zs.Int8(), **NODES}])


def meeting(steps: int) -> list[bool]:
    model = models.build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = zs.shard(model, optimizer, stage=0, sync=zs.Local(steps=2))
    seen = []
    for step in range(steps):
        model(models.MLP.batch(3, seed=run.rank), run.rank == 1 and step == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(all(bool(p.isfinite().all()) for p in model.parameters()))
    run.close()
    return seen


def test_local_steps_see_it_when_they_meet() -> None:
    """Between meetings a rank's gradients are its own; what it made of its parameters all ranks get."""
    assert ranks(2).run(meeting, 3) == [[True, False, False], [False, False, False]]
