"""Offload: bytes are what the formulas say, nothing grows, and 8-bit moments stay within stated bounds."""

from __future__ import annotations

import gc
import math
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offload_loop import Case, Trained, batch, furthest, make_model, offloaded, plain, thirds
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.layout.memory import MemoryModel
from zeroshard.layout.sharding import aligned
from zeroshard.planner.signatures import blocks_of, rules_of
from zeroshard.runtime import snapshot
from zeroshard.testing import ranks
from zeroshard.tiers import pinned, staging

Options = dict[str, Any]


def rows_of(shape: torch.Size, world: int, rank: int) -> int:
    """Elements that a rank has of a tensor divided by rows, as `torch.chunk` divides."""
    chunk = -(-shape[0] // world)
    return max(min(chunk, shape[0] - rank * chunk), 0) * shape[1:].numel()


def held(world: int, rank: int, align: int = 16) -> int:
    return sum(aligned(rows_of(p.shape, world, rank), align) for p in make_model().parameters())


def stats_of(options: Options, steps: int = 2) -> zs.Stats:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, **{"clip_norm": 4.0} | options)
    for step in range(steps):
        model(batch(step, run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = run.stats()
    run.close()
    return stats


# What a parameter takes on the host: master, two moments, and where they are streamed the weights.
BYTES: list[tuple[str | None, Options, float]] = [
    (None, {}, 4 + 8),
    ("bf16", {}, 4 + 8),
    ("bf16", {"master": "split"}, 2 + 8),
    ("bf16", {"moments": "int8"}, 4 + 2 + 12 / 256),
    ("bf16", {"master": "split", "moments": "int8"}, 2 + 2 + 12 / 256),
]


@pytest.mark.parametrize(("precision", "given", "each"), BYTES)
def test_host_bytes_of_a_parameter(precision: str | None, given: Options, each: float) -> None:
    offload = zs.Offload(stage_bytes=8192, threads=1, **given)
    stats = stats_of({"offload": offload, "precision": precision})
    assert stats.live["host"] == held(1, 0, 256 if offload.moments == "int8" else 16) * each
    assert stats.peak["host"] == stats.live["host"]
    assert stats.live["state"] == 0, "nothing of it is on the device"


@pytest.mark.parametrize(("precision", "size"), [(None, 4), ("bf16", 2)])
def test_streamed_parameters_are_on_the_host_too(precision: str | None, size: int) -> None:
    offload = zs.Offload(parameters="host", stage_bytes=8192, threads=1)
    stats = stats_of({"offload": offload, "precision": precision})
    assert stats.live["host"] == held(1, 0) * (12 + size)
    assert stats.live["parameters"] == 0


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_has_the_state_of_its_rows(stage: int) -> None:
    told = ranks(2).run(stats_of, {"stage": stage, "offload": zs.Offload(stage_bytes=8192, threads=1)})
    assert [stats.live["host"] for stats in told] == [held(2, rank) * 12 for rank in range(2)]
    assert [stats.live["state"] for stats in told] == [0, 0]


RINGS = [(None, "plain", 3), ("bf16", "plain", 4), ("bf16", "split", 2)]


@pytest.mark.parametrize(("precision", "master", "stages"), RINGS)
def test_the_staging_ring(precision: str | None, master: Any, stages: int) -> None:
    """Stages times the largest. The weight takes the gradient's place, unless a split master needs both."""
    offload = zs.Offload(stages=stages, stage_bytes=1 << 20, threads=1, master=master)
    stats = stats_of({"offload": offload, "precision": precision})
    block = sum(aligned(p.numel()) for p in make_model().blocks[0].parameters())
    size = {(None, "plain"): 4, ("bf16", "plain"): 2, ("bf16", "split"): 4}[precision, master]
    assert stats.live["staging"] == stages * -(-block * size // 64) * 64


def test_what_torch_updates_keeps_its_state_on_the_host() -> None:
    """Master and gradient (4 + 4 bytes), and what the optimizer makes: two moments."""
    offload = zs.Offload(stage_bytes=8192, undo=False)  # no room for gradients on the device until the step
    stats = stats_of({"offload": offload, "clip_norm": None})
    numel = sum(p.numel() for p in make_model().parameters())
    assert stats.live["host"] == held(1, 0) * 8 + numel * 8
    assert stats.live["state"] == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def grown(options: Options) -> tuple[int, int]:
    """By how much memory and threads grow between step 60 and step 300, with all three ways of updating."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = zs.shard(model, optimizer, **{"clip_norm": 4.0} | options)
    marks = []
    for step in range(301):
        skip = 1 if step % 7 == 3 else None
        (model(batch(step % 9, run.rank), skip) * (40.0 if step % 10 == 5 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (60, 300):
            gc.collect()
            marks.append((resident_bytes(), threading.active_count()))
    assert all(run.stats().updates.values())
    run.close()
    (before, threads), (now, still) = marks
    return now - before, still - threads


@pytest.mark.parametrize("given", [{}, {"parameters": "host"}], ids=str)
def test_nothing_grows(given: Options) -> None:
    memory, threads = grown({"offload": zs.Offload(stage_bytes=4096, threads=2, **given)})
    assert memory < 4 << 20
    assert threads == 0


# ---------------------------------------------------------------------- 8-bit moments


@pytest.mark.parametrize("skips", [False, True], ids=["all used", "some unused"])
def test_8_bit_moments_stay_near_fp32_ones(skips: bool) -> None:
    """Over 50 steps of at most about 0.001: no weight ends further than 0.003 from the run with fp32 moments,
    the root mean square is under 0.0003, and no loss differs by more than 0.05 %. A parameter that a step
    leaves out, in the middle of a part, keeps its weight and its count."""
    case = Case(skips=skips, steps=50)
    coded = offloaded(case, {"offload": zs.Offload(stage_bytes=4096, threads=2, moments="int8")})
    want = plain(case)
    check_near(coded, want)
    assert coded.stats is not None
    assert coded.stats.updates == {"early": 0, "late": 50, "undone": 0}, "codes cannot be taken back"
    counts = {name: int(state["step"]) for name, state in coded.state.items()}
    assert counts == {name: int(state["step"]) for name, state in want.state.items()}


def check_near(got: Trained, want: Trained) -> None:
    assert furthest(got.weights, want.weights)[0] <= 0.003
    apart = torch.cat([(got.weights[name] - want.weights[name]).reshape(-1) for name in want.weights])
    assert float(apart.square().mean().sqrt()) <= 0.0003
    assert max(abs(a - b) / b for a, b in zip(got.losses, want.losses, strict=True)) <= 0.0005


@pytest.mark.wide(2)
@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_8_bit_moments_on_two_ranks(stage: int) -> None:
    case = Case(skips=True)
    offload = zs.Offload(stage_bytes=4096, threads=2, moments="int8")
    told = ranks(2).run(offloaded, case, {"stage": stage, "offload": offload})
    want = plain(case, 2)
    check_near(told[0], want)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_what_was_in_the_staging_memory_before_does_not_matter(
    moments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding shares a scale with the elements of its block, and decay adds its weight to its gradient."""

    def trained_over(byte: int) -> dict[str, Tensor]:
        monkeypatch.setattr(staging, "pinned", lambda nbytes, device: pinned(nbytes, device).fill_(byte))
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1)
        offload = zs.Offload(master="split", moments=moments, stage_bytes=4096, threads=1)
        run = zs.shard(model, optimizer, precision="bf16", offload=offload, clip_norm=math.inf)
        for step in range(2):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.close()
        return {name: p.detach() for name, p in model.named_parameters()}

    got, want = trained_over(255), trained_over(0)  # every float of 255s is NaN
    assert furthest(got, want)[0] == 0.0


class Thin(nn.Module):
    """Parameters of which the second rank has no rows, alone in a part and next to others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.first(x).tanh()) * self.scale).square().mean()


def thin(options: Options) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Thin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, clip_norm=0.5, **options)
    for step in range(8):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).chunk(run.size)[run.rank]
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize("stage_bytes", [4, 1 << 20], ids=["parts of one", "one part"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_without_rows(stage: int, stage_bytes: int) -> None:
    offload = zs.Offload(stage_bytes=stage_bytes, threads=1)
    got = ranks(2).run(thin, {"stage": stage, "offload": offload})[0]
    want = ranks(2).run(thin, {"stage": stage})[0]
    assert furthest(got, want)[0] <= 1e-6


def test_padding_of_8_bit_parts_is_cleared() -> None:
    """Behind a gradient in its wire may be what another bucket left there, something else on each rank: what
    all ranks hold would drift apart."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    offload = zs.Offload(moments="int8", threads=1)
    run = zs.shard(model, optimizer, precision="bf16", offload=offload, clip_norm=1.0)
    for part in snapshot.host_parts(run._runtime):
        grad, weight = torch.ones(part.numel), torch.ones(part.numel)
        part.clear_padding(grad, weight)
        kept = [index for at, n in part.spans for index in range(at, at + n)]
        assert len(kept) < part.numel
        for flat in (grad, weight):
            assert flat.nonzero().view(-1).tolist() == kept
    run.close()


# ---------------------------------------------------------------------- foreseen, to the byte


def foreseen(options: Options, parameters: str | None = None) -> tuple[zs.Stats, dict[str, int]]:
    """What a run holds after three steps, and what the memory model says that it does."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    if parameters is not None:
        shared = {key: value for key, value in options.items() if key not in ("path", "offload")}
        given = SMALL | {"path": options["path"], "master": shared.pop("master", "plain")}
        offload = thirds(shared, 2 if parameters == "ranks" else 1, **given)
        options = shared | {"offload": offload}
    run = zs.shard(model, optimizer, **{"clip_norm": 4.0} | options)
    setup = MemoryModel(units, run.options, run.size, rules, run.rank, placement=run.placement)
    for step in range(3):
        model(batch(step, run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = run.stats()
    run.close()
    return stats, asdict(setup.held)


SMALL: Options = {"stage_bytes": 4096, "threads": 1}
KINDS = ("parameters", "state", "host", "staging", "disk")
PLANNED: list[tuple[Options, Options]] = [
    ({"optimizer": "host"}, {}),
    ({"optimizer": "host", "master": "split"}, {"precision": "bf16"}),
    ({"optimizer": "device", "master": "split"}, {"precision": "bf16", "clip_norm": None}),
    ({"optimizer": "host", "parameters": "host"}, {"precision": "bf16"}),
    ({"optimizer": "disk"}, {}),
    ({"optimizer": "disk", "stages": 3}, {"clip_norm": None}),
    ({"optimizer": "disk", "moments": "int8"}, {"precision": "bf16"}),
    ({"optimizer": "disk", "parameters": "host"}, {"precision": "bf16"}),
    ({"optimizer": "disk", "parameters": "disk"}, {}),
    ({"optimizer": "disk", "parameters": "disk", "master": "split"}, {"precision": "bf16"}),
    ({"optimizer": "disk", "parameters": "disk"}, {"precision": "fp16", "clip_norm": None}),
]


def check_foreseen(stats: zs.Stats, said: dict[str, int]) -> None:
    assert {kind: stats.live[kind] for kind in KINDS} == {kind: said[kind] for kind in KINDS}
    assert {kind: stats.peak[kind] for kind in KINDS} == {kind: said[kind] for kind in KINDS}


@pytest.mark.parametrize(("given", "options"), PLANNED, ids=str)
def test_every_tier_is_foreseen_to_the_byte(given: Options, options: Options, disk_folder: Path) -> None:
    path = {"path": str(disk_folder)} if given["optimizer"] == "disk" else {}
    check_foreseen(*foreseen({**options, "offload": zs.Offload(**SMALL, **given, **path)}))


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "bf16", "master": "split"}], ids=str
)
def test_auto_is_foreseen_to_the_byte(options: Options, disk_folder: Path) -> None:
    stats, said = foreseen({**options, "path": str(disk_folder)}, "one")
    check_foreseen(stats, said)
    assert min(said["state"], said["host"], said["disk"]) > 0, "something in every tier"


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("given", [{}, {"precision": "bf16", "master": "split"}], ids=str)
def test_auto_of_two_ranks_is_foreseen_to_the_byte(stage: int, given: Options, disk_folder: Path) -> None:
    options = {"stage": stage, "path": str(disk_folder), **given}
    for stats, said in ranks(2).run(foreseen, options, "ranks"):
        check_foreseen(stats, said)
        assert min(said["host"], said["disk"]) > 0


def frozen_kept(options: Options, folder: Path) -> None:
    """Frozen and in no optimizer, alone in their unit and beside what trains: training, a save, a write by
    hand, a load and close() leave their fp32 bits as they were; plans count them."""
    model = make_model()
    model.blocks[1].requires_grad_(False)
    next(model.blocks[0].parameters()).requires_grad_(False)
    added = next(p for n, p in model.blocks[2].named_parameters() if n.endswith("bias"))
    still = {n for n, p in model.named_parameters() if not p.requires_grad or p is added}
    want = {n: p.detach().clone() for n, p in model.named_parameters() if n in still}
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad and p is not added], lr=1e-2
    )
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    run = zs.shard(model, optimizer, clip_norm=4.0, precision="bf16", **options)
    setup = MemoryModel(units, run.options, run.size, rules, run.rank, placement=run.placement)

    def train() -> None:
        model(batch(0, run.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def exact() -> bool:
        with run.gathered():
            bits = [
                torch.equal(p.float().bfloat16(), want[n].bfloat16())
                for n, p in model.named_parameters()
                if n in still
            ]
        whole = run.full_state_dict(rank=0)
        return all(bits) and (run.rank > 0 or all(torch.equal(whole[n], value) for n, value in want.items()))

    train()
    assert exact()
    model.load_state_dict(model.state_dict())
    train()
    assert exact()
    live, said = run.stats().live, asdict(setup.held)
    assert {kind: live[kind] for kind in KINDS} == {kind: said[kind] for kind in KINDS}
    saved = run.save(folder / "saved", overwrite=True)
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.zero_()
    train()
    assert not exact()
    run.load(saved.path)
    train()
    assert exact()
    run.close()
    now = {n: p.detach() for n, p in model.named_parameters()}
    assert all(torch.equal(now[n], value) for n, value in want.items())


FROZEN: list[Options] = [
    {},
    {"master": "split"},
    {"parameters": "host"},
    {"optimizer": "disk", "parameters": "disk"},
    {"optimizer": "auto", "device_bytes": 30_000, "host_bytes": 10**9},
]


def frozen_everywhere(stage: int, folder: Path) -> None:
    for number, given in enumerate(FROZEN if stage == 3 else FROZEN[:2]):
        if dist.get_world_size() > 1 and given.get("parameters") == "disk":
            given = given | {"parameters": "host"}
        path = {"path": str(folder)} if given.get("optimizer") == "disk" else {}
        frozen_kept({"stage": stage, "offload": zs.Offload(**SMALL, **given, **path)}, folder / str(number))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_what_no_update_keeps_is_exact(world: int, disk_folder: Path) -> None:
    for stage in (3, 1)[:world]:
        ranks(world).run(frozen_everywhere, stage, disk_folder)
