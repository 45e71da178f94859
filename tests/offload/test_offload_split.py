"""A split master on the device: 2 bytes fewer a parameter, and the bits of a plain one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import whole_weights
from offload_loop import (
    OPTIMIZERS,
    THREE_SPIKES,
    Case,
    Trained,
    batch,
    make_model,
    offloaded,
    paced,
    parts,
    thirds,
)
from torch import Tensor, nn

import zeroshard as zs
from zeroshard import options as config
from zeroshard.errors import OptionError
from zeroshard.layout.memory import IN_FLIGHT, MemoryModel, step_moments
from zeroshard.layout.placement import Placement, UnitPlacement
from zeroshard.optim import sharded_optimizer as step_module
from zeroshard.planner.signatures import blocks_of, rules_of
from zeroshard.testing import PeakBytes, assert_same_bits, ranks

SHORT = Case(steps=THREE_SPIKES)  # so that clipping is active
SPLIT = zs.Offload(optimizer="device", master="split")
Options = dict[str, Any]


@contextmanager
def small_chunks(size: int = 4096) -> Iterator[None]:
    """So that a step takes several."""
    with patch.dict(step_module.WIDEN_BYTES, cpu=size):
        yield


def halves(case: Case, options: Options) -> Trained:
    with small_chunks():
        return offloaded(case, {"precision": "bf16", "offload": SPLIT} | options)


def whole(case: Case, options: Options) -> Trained:
    """The plain master that all others have to equal: its weights are rounded by the same rule."""
    return offloaded(case, {"precision": "bf16"} | options, "ties away")


def check_same(got: Trained, want: Trained) -> None:
    assert_same_bits(got.weights, want.weights)
    assert got.losses == want.losses
    assert got.state.keys() == want.state.keys()
    for name, state in want.state.items():
        assert_same_bits(got.state[name], state)


CASES = [
    SHORT,
    Case("momentum", steps=THREE_SPIKES),
    Case("rmsprop", steps=THREE_SPIKES),
    Case(steps=THREE_SPIKES, accumulate=2, tied=True),
    Case(steps=THREE_SPIKES, skips=True),
]


@pytest.mark.wide(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank_has_the_bits_of_a_plain_master(case: Case) -> None:
    check_same(halves(case, {}), whole(case, {}))


@pytest.mark.wide(2)
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_have_the_bits_of_a_plain_master(stage: int) -> None:
    got, want = (ranks(2).run(way, SHORT, {"stage": stage}) for way in (halves, whole))
    for mine, its in zip(got, want, strict=True):
        check_same(mine, its)


def spread(case: Case, master: str, stage: int, world: int, path: str) -> Trained:
    """`auto`, with something in every tier."""
    options = {"precision": "bf16", "stage": stage}
    offload = thirds(options, world, master=master, path=path, stage_bytes=4096, threads=1)
    return offloaded(case, options | {"offload": offload}, "overlapped" if master == "split" else "ties away")


@pytest.mark.wide(2)
@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "world"), [(0, 1), (1, 2), (3, 2)])
def test_auto_splits_every_master(stage: int, world: int, disk_folder: Path) -> None:
    def train(master: str) -> Trained:
        given = SHORT, master, stage, world, str(disk_folder)
        return spread(*given) if world == 1 else ranks(world).run(spread, *given)[0]

    got, want = train("split"), train("plain")
    check_same(got, want)
    assert {state for state, _ in got.rests} == {"device", "host", "disk"}
    assert got.rests == want.rests
    assert got.stats is not None
    assert want.stats is not None
    assert got.stats.live["state"] < want.stats.live["state"]


# ---------------------------------------------------------------------- what a loop does beside


def loop(options: Options, steps: int, **given: Any) -> tuple[nn.Module, torch.optim.Optimizer, zs.Run]:
    """A loop that clips by itself."""
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    run = zs.shard(model, optimizer, precision="bf16", **options)
    train(model, optimizer, run, steps, **given)
    return model, optimizer, run


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, run: zs.Run, steps: int, first: int = 0
) -> None:
    for number in range(first, first + steps):
        model(batch(number, run.rank)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def bits(run: zs.Run) -> dict[str, Tensor]:
    return whole_weights(run)


def by_hand(split: bool, stage: int) -> dict[str, Tensor]:
    """Clipping by torch, writing through `gathered`, both state dicts."""
    with small_chunks(), paced("overlapped" if split else "ties away"):
        model, optimizer, run = loop({"stage": stage, "offload": SPLIT if split else None}, 3)
        with run.gathered("head.weight", write=True) as found:
            found["head.weight"].data.mul_(1.0 + 2**-12)
        kept, wide = optimizer.state_dict(), bits(run)
        train(model, optimizer, run, 2, first=3)
        optimizer.load_state_dict(kept)
        model.load_state_dict(wide)
        train(model, optimizer, run, 3, first=5)
        told = bits(run)
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        assert {m.dtype for m in moments} == {torch.float32}
        run.close()
    assert_same_bits({n: p.detach() for n, p in model.named_parameters()}, told)
    return told


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_state_dicts_and_gathered(stage: int) -> None:
    got, want = (ranks(2).run(by_hand, split, stage) for split in (True, False))
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[0])


def test_state_dicts_and_gathered_of_one_rank() -> None:
    assert_same_bits(by_hand(True, 3), by_hand(False, 3))


def test_step_hooks_see_the_new_weights() -> None:
    """The user's hooks run when the halves have been written."""
    with small_chunks(1 << 30):
        model, optimizer, run = loop({"offload": SPLIT}, 1)
        seen: list[dict[str, Tensor]] = []
        optimizer.register_step_post_hook(
            lambda *_: seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
        )
        train(model, optimizer, run, 1, first=1)
    assert_same_bits(seen[0], {n: p.detach() for n, p in model.named_parameters()})
    run.close()


def test_a_step_that_fails_leaves_the_masters() -> None:
    with small_chunks(1 << 30):
        model, optimizer, run = loop({"offload": SPLIT}, 1)
        before = bits(run)
        model(batch(1, 0)).backward()
        fails = patch.object(sys.modules["torch.optim.adam"], "adam", side_effect=RuntimeError("no memory"))
        with fails, pytest.raises(RuntimeError, match="no memory"):
            optimizer.step()
        assert_same_bits(bits(run), before)
        optimizer.zero_grad()
        train(model, optimizer, run, 1, first=1)
        assert any(not torch.equal(now, before[name]) for name, now in bits(run).items())
        run.close()


# ---------------------------------------------------------------------- checkpoints

WAYS: dict[str, Options] = {
    "split on the device": {"offload": SPLIT},
    "plain on the device": {},
    "split on the host": {"offload": parts(master="split")},
}
PAIRS = [(a, b) for a in WAYS for b in WAYS if "split on the device" in (a, b)]


def held(run: zs.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    run.close()
    names = {id(p): name for name, p in model.named_parameters()}
    found = {name: p.detach() for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        found |= {f"{names[id(p)]}.{key}": value for key, value in state.items()}
    return found


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_checkpoints_of_every_way_are_read_by_the_others(one: str, other: str, tmp_path: Path) -> None:
    made = []
    for way, steps in ((one, 3), (other, 1)):
        model = make_model()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        run = zs.shard(model, optimizer, precision="bf16", clip_norm=4.0, **WAYS[way])
        for number in range(steps):
            model(batch(number, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        made.append((run, model, optimizer))
    made[0][0].save(tmp_path / "kept")
    made[1][0].load(tmp_path / "kept")
    assert_same_bits(held(*made[1]), held(*made[0]))


def test_a_fresh_run_takes_a_checkpoint(tmp_path: Path) -> None:
    """Its optimizer has no state yet: that is made in fp32, not in the dtype of the sharded parameters."""
    model, optimizer, run = loop({"offload": SPLIT}, 3)
    run.save(tmp_path / "kept")
    other, its, again = loop({"offload": SPLIT}, 0)
    again.load(tmp_path / "kept")
    for training in ((model, optimizer, run), (other, its, again)):
        train(*training, 2, first=3)
    assert_same_bits(held(again, other, its), held(run, model, optimizer))


# ---------------------------------------------------------------------- bytes


def test_a_step_joins_one_chunk_at_a_time() -> None:
    """A step makes a chunk's masters and gradients in fp32 and no more; the timeline counts on that."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(32)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    run = zs.shard(model, optimizer, precision="bf16", offload=SPLIT)
    each, chunk = 64 * 64 * 4, 4 * 64 * 64 * 4

    def backward() -> None:
        model(torch.ones(2, 64)).sum().backward()

    with small_chunks(chunk):
        backward()
        optimizer.step()
        with PeakBytes() as peak:
            optimizer.step()
    assert 2 * chunk <= peak.most <= 2 * chunk + each
    assert run.stats().live["state"] == 32 * 64 * 64 * (2 + 8)
    setup = MemoryModel(units, run.options, 1, rules)
    with patch("zeroshard.layout.memory.WIDEN_BYTES", chunk):
        assert step_moments(setup, ())[-1].kinds["update"] == 2 * chunk
    assert setup.held.state == run.stats().live["state"]
    run.close()


def test_gradients_of_state_on_the_device_wait_beside_those_that_leave() -> None:
    """Without `undo` those for the host leave at once; those for the device wait for the norm."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    offload = zs.Offload("auto", device_bytes="1GiB", master="split", undo=False, stage_bytes=1024)
    options = config.Options(offload=offload, precision="bf16", clip_norm=1.0)  # type: ignore[arg-type]
    places = [UnitPlacement(u.label, "device" if u is units[-1] else "host", "device") for u in units]
    setup = MemoryModel(units, options, 1, rules, placement=Placement(tuple(places)))
    waiting = 2 * units[-1].numel
    leaving = max(2 * bucket.pack.full for bucket in setup.buckets if bucket.part is not None)
    gradients = step_moments(setup, ())[-1].kinds["gradients"]
    assert waiting + leaving <= gradients <= waiting + IN_FLIGHT * leaving


def test_what_is_frozen_or_kept_wide() -> None:
    """A frozen parameter keeps every bit of its master too; what computes in fp32 has nothing to split."""
    model = make_model()
    model.blocks[1].requires_grad_(False)
    want = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = OPTIMIZERS["adamw"](p for p in model.parameters() if p.requires_grad)
    run = zs.shard(model, optimizer, precision=zs.Precision(keep=("*norm*",)), offload=SPLIT)
    train(model, optimizer, run, 2)
    run.close()
    frozen = {n for n in want if n.startswith("blocks.1")}
    got = {n: p.detach() for n, p in model.named_parameters()}
    assert_same_bits({n: got[n] for n in frozen}, {n: want[n] for n in frozen})
    assert all(not torch.equal(got[n], want[n]) for n in got.keys() - frozen)


def test_whole_tensors_keep_a_plain_master() -> None:
    """An optimizer that is not element-wise is called once for all of its parameters, so none is split."""
    model = make_model()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    with pytest.raises(OptionError, match=r"is for element-wise optimizers .* has Adafactor"):
        zs.shard(model, optimizer, precision="bf16", offload=SPLIT)
    model = make_model()
    blocks = [p for block in model.blocks for p in block.parameters()]
    rest = [p for p in model.parameters() if all(p is not q for q in blocks)]
    both = [torch.optim.Adafactor(blocks, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)]
    units, rules = blocks_of(model, both, "auto"), rules_of(both)
    run = zs.shard(model, both, precision="bf16", offload=SPLIT)
    before = run.stats().live["state"]
    setup = MemoryModel(units, run.options, 1, rules)
    assert before == sum(g.master_width * g.pack.body(setup.rank) for g in setup.gather_groups)
    assert {p.dtype for p in model.blocks.parameters()} == {torch.float32}
    assert model.head.weight.dtype == torch.bfloat16
    run.close()


def test_splitting_needs_bf16() -> None:
    model = make_model()
    with pytest.raises(OptionError, match="needs bf16 compute weights and an fp32 master"):
        zs.shard(model, torch.optim.AdamW(model.parameters()), offload=SPLIT)
