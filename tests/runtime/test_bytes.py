"""Live bytes: what a rank holds after a step is what the design says, by the library's own books, and by
a walk over all tensors of the process that asks the library nothing.

Ψ is the number of parameters, N the number of ranks; AdamW keeps two moments. Bytes of a rank:

| stage | 16 bits, fp32 master | fp16, gradients in fp32 | fp32       |
|-------|----------------------|-------------------------|------------|
| 0     |                      |                         | 16Ψ        |
| 1     | 4Ψ + 12Ψ/N           | 4Ψ + 16Ψ/N              | 8Ψ + 8Ψ/N  |
| 2     | 2Ψ + 14Ψ/N           | 2Ψ + 16Ψ/N              | 4Ψ + 12Ψ/N |
| 3     | 16Ψ/N                | 18Ψ/N                   | 16Ψ/N      |

(Gradients of fp16 land in fp32 unless told otherwise, because GradScaler's `unscale_` refuses fp16 ones.)

Counted are parameters, gradients, master weights and moments. Gathered units and buckets come on top, and do
not grow with the model: this one has many units, and buckets of one unit's size, so that the walk over all
tensors, units and buckets included, stays within the same 2 %. Stage 0 keeps a whole wire besides, as DDP
keeps its buckets.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import PeakBytes, assert_bytes, ranks, tensor_bytes

pytestmark = pytest.mark.ranks
WIDTH = 96
UNIT = 2 * (WIDTH * WIDTH + WIDTH)

Given = str | zs.Precision | None
ALL_FP16 = zs.Precision("float16", grad="float16")

# stage -> bytes a parameter that every rank holds, and that ranks share
FORMS: dict[Given, dict[int, tuple[int, int]]] = {
    None: {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)},
    "bfloat16": {1: (4, 12), 2: (2, 14), 3: (0, 16)},
    "float16": {1: (4, 16), 2: (2, 16), 3: (0, 18)},
    ALL_FP16: {1: (4, 12), 2: (2, 14), 3: (0, 16)},
}
CASES = [
    (p, stage, world)
    for p, forms in FORMS.items()
    for stage in forms
    for world in (2, 4)
    if world == 2 or (p == "bfloat16" and stage in (1, 3)) or (p, stage) == (None, 2)
]


def tower(
    stage: int, precision: Given, blocks: int, transport: str = "auto"
) -> tuple[models.Tower, torch.optim.Optimizer, zs.Run]:
    model = models.Tower(WIDTH, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    bucket = UNIT * (4 if precision is None else 2)
    run = zs.shard(
        model, optimizer, stage=stage, precision=precision, bucket_bytes=bucket, transport=transport
    )
    return model, optimizer, run


def hold(stage: int, precision: Given, transport: str = "auto") -> dict[str, Any]:
    """Two steps of a large model; what is alive afterwards."""
    before, others = tensor_bytes()  # what earlier tests left in these processes is not ours
    model, optimizer, run = tower(stage, precision, 75 * dist.get_world_size(), transport)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
    private, shared = tensor_bytes()
    live, count = run.stats().live, sum(run.units.values())
    run._runtime.transport.close()
    own = {inode: size for inode, size in shared.items() if inode not in others}
    return {"count": count, "private": private - before, "shared": own, "live": live}


@pytest.mark.wide(2)
@pytest.mark.parametrize(("precision", "stage", "world"), CASES)
def test_live_bytes(precision: Given, stage: int, world: int) -> None:
    held = ranks(world).run(hold, stage, precision)
    everyone, split = FORMS[precision][stage]
    expected = held[0]["count"] * (everyone + split / world)
    for rank, one in enumerate(held):
        booked = sum(one["live"][kind] for kind in ("parameters", "gradients", "state"))
        assert_bytes(booked, expected, 0.02, f"the books of rank {rank}")
    # A segment of shared memory is mapped by every rank and belongs to one: it is counted once for all of
    # them.
    segments = {inode: size for one in held for inode, size in one["shared"].items()}
    walked = (sum(one["private"] for one in held) + sum(segments.values())) / world
    assert_bytes(
        walked, sum(sum(one["live"].values()) for one in held) / world, 0.01, "the walk against the books"
    )
    if stage > 0:
        assert_bytes(walked, expected, 0.02, "the walk over all tensors")


@pytest.mark.wide(2)
@pytest.mark.parametrize(("precision", "stage"), [(None, 0), ("bfloat16", 1), (None, 2), (None, 3)])
def test_live_bytes_over_messages(precision: Given, stage: int) -> None:
    """What messages arrive in is booked, too."""
    for one in ranks(2).run(hold, stage, precision, "gloo"):
        assert_bytes(one["private"], sum(one["live"].values()), 0.01, "the walk against the books")


class Words(nn.Module):
    """An embedding that is the head too, larger than all blocks together."""

    COUNT, BLOCKS = 32_001, 6

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(self.COUNT, 128)
        make = (
            nn.Sequential(nn.Linear(128, 1023), nn.Tanh(), nn.Linear(1023, 128)) for _ in range(self.BLOCKS)
        )
        self.blocks = nn.ModuleList(make)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(nn.functional.linear(x, self.words.weight), tokens)


def hold_words(stage: int, precision: Given) -> tuple[int, dict[int, int]]:
    """Two steps with default options; what is alive afterwards."""
    before, others = tensor_bytes()
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = zs.shard(model, optimizer, stage=stage, precision=precision)
    for _ in range(2):
        model(torch.arange(4)).backward()
        optimizer.step()
    private, shared = tensor_bytes()
    run._runtime.transport.close()
    return private - before, {inode: size for inode, size in shared.items() if inode not in others}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_a_large_tensor_is_on_one_wire(stage: int, precision: Given) -> None:
    """Beside the formula there are, whole, the root and one block (stage 3) and three wires: one as large as
    the largest tensor, and two of the default size of buckets."""
    held, world, width = ranks(2).run(hold_words, stage, precision), 2, 4 if precision is None else 2
    model = Words()
    largest, block = (
        width * model.words.weight.numel(),
        width * sum(p.numel() for p in model.blocks[0].parameters()),
    )
    everyone, split = FORMS[precision][stage]
    formula = sum(p.numel() for p in model.parameters()) * (everyone + split / world)
    wires = largest + min(2 * 6 * 2**20, Words.BLOCKS * block)
    gathered = largest + block if stage == 3 else 0
    segments = {inode: size for _, shared in held for inode, size in shared.items()}
    walked = (sum(private for private, _ in held) + sum(segments.values())) / world
    assert walked <= 1.002 * (formula + gathered + wires)


def gathered_and_made(stage: int, blocks: int) -> tuple[int, int]:
    """The most bytes of gathered units, and of tensors that the operations of one step made, after two
    others.
    """
    model, optimizer, run = tower(stage, None, blocks)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with PeakBytes() as peak:
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
    gathered = run.stats().peak["gathered"]
    run._runtime.transport.close()
    return gathered, peak.most


def test_peak_does_not_grow_with_the_model() -> None:
    """Stage 3 holds a few units at a time, and lets every gradient go as its bucket leaves."""
    (few, _), _ = ranks(2).run(gathered_and_made, 3, 20)
    (many, made), _ = ranks(2).run(gathered_and_made, 3, 80)
    assert few == many <= 3 * 4 * UNIT
    activations = 80 * 4 * (2 * WIDTH * 4)  # four vectors a block are saved or made, for two rows
    assert made <= 3 * 4 * UNIT + activations
    with PeakBytes() as plain:
        models.Tower(WIDTH, 80)(torch.ones(2, WIDTH)).backward()
    assert plain.most > 10 * made, "the count cannot tell: plain PyTorch holds all gradients"


def through_kept_full(
    transport: str, gather: zs.Codec | None, keeps: bool
) -> tuple[list[int], list[int], bytes]:
    """Tensor bytes and bytes of gathered units before all were kept and after, and the trained model."""
    torch.manual_seed(0)
    model = models.Tower(WIDTH, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = zs.shard(model, optimizer, stage=3, transport=transport, gather=gather)
    walked, booked = [], []

    def train(steps: int) -> None:
        for number in range(steps):
            model(torch.full((2, WIDTH), 1.0 + number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        private, shared = tensor_bytes()
        walked.append(private + sum(shared.values()))
        booked.append(run.stats().live["gathered"])

    train(2)
    if keeps:
        with run.kept_full(), torch.no_grad():
            model(torch.ones(2, WIDTH))
            assert run.stats().live["gathered"] >= 4 * sum(run.units.values())
    train(0)
    train(2)
    with run.gathered():
        trained = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    run._runtime.transport.close()
    return walked, booked, trained


@pytest.mark.parametrize(("transport", "gather"), [("shm", None), ("gloo", None), ("gloo", zs.Int8())])
def test_what_was_kept_full_is_let_go(transport: str, gather: zs.Codec | None) -> None:
    """Also what views and transports have of it; and buffers at the same addresses are not taken for it."""
    plain = ranks(2).run(through_kept_full, transport, gather, False)
    for (walked, booked, trained), (_, _, expected) in zip(
        ranks(2).run(through_kept_full, transport, gather, True), plain, strict=True
    ):
        assert booked[0] == booked[1] == booked[2]
        assert max(walked) - min(walked) <= 4096
        assert trained == expected


def leftovers(stage: int, close: bool) -> tuple[int, int]:
    """Tensor bytes before a run, and after it is gone."""
    before = tensor_bytes()
    model, optimizer, run = tower(stage, None, blocks=3)
    model(torch.ones(2, WIDTH)).backward()
    optimizer.step()
    if close:
        run.close()
    else:
        run._runtime.transport.close()
    del model, optimizer, run
    after = tensor_bytes()
    return before[0] + sum(before[1].values()), after[0] + sum(after[1].values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("close", [True, False])
def test_nothing_stays_when_a_run_is_gone(stage: int, close: bool) -> None:
    ranks(2).run(leftovers, stage, close)  # the first run of a process may fill caches
    for before, after in ranks(2).run(leftovers, stage, close):
        assert after <= before + 64
