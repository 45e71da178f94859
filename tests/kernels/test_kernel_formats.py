"""Number formats, sums and checks of the host kernels, and what surrounds them: notice, mistakes, threads."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable

import pytest
import torch
from kernel_values import (
    BF16,
    F16,
    F32,
    F64,
    adam_state,
    assert_same_bits,
    both_paths,
    built,
    contents,
    each_path,
    rough,
)
from torch import Tensor

from zeroshard import kernels as native
from zeroshard.errors import OptionError, StateError
from zeroshard.kernels import AdamRows, AdamStep, SgdRows, SgdStep, library, moments8

FIXTURES = (both_paths, each_path)  # pytest finds them among the names of this module


# -- formats
def lows() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    return torch.cat([chosen, torch.randint(0, 65536, (8,), generator=generator)])


def test_split_is_one_to_one_and_the_weight_is_the_nearest(path) -> None:
    """All 65,536 upper halves with sampled lower halves: every NaN, infinity, zero and subnormal class is
    there."""
    upper = torch.arange(65536)
    for low in lows().tolist():
        bits = ((upper << 16) | low).where(upper < 0x8000, ((upper << 16) | low) - 2**32).to(torch.int32)
        master = bits.view(F32)
        weight, remainder = native.split(master)
        assert torch.equal(native.join(weight, remainder).view(torch.int32), bits)
        number = ~master.isnan()
        nearest = master.to(BF16)
        tie = (low == 0x8000) & number & (upper % 2 == 0)  # away from zero there, to even in torch
        assert_same_bits(weight[number & ~tie], nearest[number & ~tie])
        assert ((weight.view(torch.int16) - nearest.view(torch.int16))[tie] == 1).all()
        assert weight[master.isnan() & ((upper & 0x40) != 0)].isnan().all()  # the quiet ones
        # and every pair is the split of some master
        pair = upper.where(upper < 0x8000, upper - 65536).to(torch.int16).view(BF16)
        other = torch.full((65536,), low if low < 0x8000 else low - 65536, dtype=torch.int16)
        again = native.split(native.join(pair, other))
        assert torch.equal(again[0].view(torch.int16), pair.view(torch.int16))
        assert torch.equal(again[1], other)


def test_casts_are_torchs(path) -> None:
    halves = torch.arange(-32768, 32768).to(torch.int16)
    bits = torch.randint(-(2**31), 2**31, (100_003,), generator=torch.Generator().manual_seed(0)).to(
        torch.int32
    )
    inputs = [halves.view(BF16), halves.view(F16), bits.view(F32), rough(5000, 0), rough(5000, 1).to(F64)]
    grid = (
        torch.arange(0, 2**16, 7, dtype=torch.int32) * 4096 + 0x33000000
    )  # around every rounding point of fp16
    for source, dtype in itertools.product([*inputs, grid.view(F32)], [F32, BF16, F16, F64]):
        to = torch.empty(source.numel() - 1, dtype=dtype)
        native.cast(to, source[1:])
        assert_same_bits(to, source[1:].to(dtype), f"{source.dtype} to {dtype}")


def test_8_bit_moments_keep_what_the_update_needs(path) -> None:
    """Elements of one block differ by e±9 in size. Squares come back within a step of their code, never as
    zero; the ratio that moves the weight within 1/127 of the block's largest."""
    m, v = rough(256 * 20 + 5, 0, edges=False), rough(256 * 20 + 5, 1, edges=False).square()
    m, v[10] = m * v.sqrt() / 50, 0.0
    m[10] = 0.0
    means, squares = moments8.decode(*moments8.encode(m, v, step=3))
    assert ((squares == 0) == (v == 0)).all()
    kept = v > 0
    assert ((squares / v)[kept].log().abs() < 0.25).all()
    ratio, stored = (m / squares.sqrt())[kept], (means / squares.sqrt())[kept]
    assert ((ratio - stored).abs() <= ratio.abs().max() / 127).all()


def test_8_bit_moments_follow_fp32_over_300_steps(path) -> None:
    """The update stays within 15 % of fp32's, though gradients shrink fivefold on the way: the rounding of
    the second moment has no bias that would keep it where it was."""
    numel, generator = 256 * 8, torch.Generator().manual_seed(1)
    sizes = torch.exp(torch.randn(numel, generator=generator)) * 1e-3
    exact, coded = AdamRows.zeros(numel), AdamRows.zeros(numel, moments="int8")
    for step in range(1, 301):
        noise = torch.randn(numel, generator=generator) + 0.3
        grad = sizes * noise * (1.0 if step < 200 else 0.2)
        before = exact.master.clone(), coded.master.clone()
        for state in (exact, coded):
            native.update_rows(state, grad, None, AdamStep(lr=1e-3, step=step, beta2=0.99))
    moved = exact.master - before[0], coded.master - before[1]
    assert (moved[0] - moved[1]).norm() < 0.15 * moved[0].norm()
    squares = moments8.decode(coded.exp_avg, coded.exp_avg_sq, coded.scales)[1]
    assert abs(float((squares / exact.exp_avg_sq).log().mean())) < 0.05


# -- sums


@built
def test_sums_are_bit_equal_in_c_and_torch(assert_both_same) -> None:
    dtypes = [F32, BF16, F16, F64]
    for out, first, second in itertools.product(dtypes, repeat=3):

        def run(out=out, first=first, second=second) -> list[Tensor]:
            sources = [rough(1500, 0).to(first), rough(1500, 1).to(second), rough(1500, 2).to(first)]
            total = torch.empty(1499, dtype=out)
            native.sum_shards(total, [source[1:] for source in sources], 1 / 3)
            running = rough(1500, 3).to(out)
            native.accumulate(running, sources[1], 0.3)
            return [
                total,
                running,
            ]

        assert_both_same(run)


def test_sums_accumulate_in_fp32_in_order(path) -> None:
    sources = [rough(4000, seed, edges=False).to(BF16) for seed in range(5)]
    out = sources[0].clone()
    expected = ((((sources[0].float() + sources[1]) + sources[2]) + sources[3]) + sources[4]) * 0.2
    native.sum_shards(out, [out, *sources[1:]], 0.2)
    assert_same_bits(out, expected.to(BF16))


# -- what surrounds the kernels


@built
def test_a_library_of_other_sources_is_refused(monkeypatch) -> None:
    spec = library.importlib.util.find_spec(library.MODULE)
    monkeypatch.setattr(library, "version", lambda: 0)
    with pytest.raises(OSError, match="other sources"):
        library.load(spec.origin)


def test_a_missing_or_foreign_library_is_said_once(monkeypatch, caplog) -> None:
    with pytest.raises(OSError, match="without a C compiler"):
        library.load(None)
    with pytest.raises(OSError, match="no ZeroShard kernels"):
        library.load("libc.so.6")
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    library.kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "zeroshard"):
            assert library.kernels() is None
            native.cast(torch.empty(3), torch.ones(3))
        assert len(caplog.records) == 1
        assert "host updates run in torch" in caplog.text
    finally:
        library.kernels.cache_clear()


def rows(**changed: Tensor | None) -> AdamRows:
    tensors: dict[str, Tensor | None] = {name: torch.zeros(8) for name in ("exp_avg", "exp_avg_sq", "master")}
    return AdamRows(**(tensors | changed))  # type: ignore[arg-type]


STEP = AdamStep(lr=0.1, step=1)
MISTAKES: list[tuple[str, Callable[[], object]]] = [
    ("either `master`", lambda: rows(remainder=torch.zeros(8, dtype=torch.int16))),
    ("`exp_avg` holds 7 elements; 8", lambda: rows(exp_avg=torch.zeros(7))),
    ("`exp_avg_sq` is bfloat16; float32", lambda: rows(exp_avg_sq=torch.zeros(8, dtype=BF16))),
    (
        "AMSGrad needs fp32",
        lambda: AdamRows(**vars(AdamRows.zeros(8, moments="int8")) | {"max_exp_avg_sq": torch.zeros(8)}),
    ),
    ("flat contiguous", lambda: rows(master=torch.zeros(16)[::2])),
    ("`grad` is on meta", lambda: native.update_rows(rows(), torch.zeros(8, device="meta"), None, STEP)),
    ("`grad` holds 8 elements; 4", lambda: native.update_rows(rows(), torch.zeros(8), None, STEP, start=4)),
    ("rows 4:9", lambda: native.update_rows(rows(), torch.zeros(5), None, STEP, start=4, stop=9)),
    (
        "`weight` is float64",
        lambda: native.update_rows(rows(), torch.zeros(8), torch.zeros(8, dtype=F64), STEP),
    ),
    (
        "split master needs",
        lambda: native.update_rows(AdamRows.zeros(8, master="split"), torch.zeros(8), None, STEP),
    ),
    ("cut a block", lambda: AdamRows.zeros(600, moments="int8").rows(0, 300)),
    ("ties='up'", lambda: native.update_rows(rows(), torch.zeros(8), None, STEP, ties="up")),
    ("the first step is 1", lambda: AdamStep(lr=0.1, step=0)),
    ("lr=nan", lambda: AdamStep(lr=math.nan, step=1)),
    ("below 1", lambda: AdamStep(lr=0.1, step=1, beta2=1.0)),
    ("nesterov needs", lambda: SgdStep(lr=0.1, nesterov=True)),
    (
        "hold no buffer",
        lambda: native.update_rows(SgdRows(torch.zeros(8)), torch.zeros(8), None, SgdStep(0.1, 0.9)),
    ),
    ("`sources` is empty", lambda: native.sum_shards(torch.zeros(8), [])),
    (r"`sources\[1\]` holds 7", lambda: native.sum_shards(torch.zeros(8), [torch.zeros(8), torch.zeros(7)])),
    ("`source` is int32", lambda: native.cast(torch.zeros(8), torch.zeros(8, dtype=torch.int32))),
    ("threads=0", lambda: native.Workers(0)),
]


@pytest.mark.parametrize(("text", "mistake"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_mistakes_are_named_before_memory_is_touched(text, mistake) -> None:
    with pytest.raises(OptionError, match=text):
        mistake()


def test_allocated_rows_are_zero_apart_within_a_page_and_outlive_one_another() -> None:
    tensors = native.allocate(1 << 20, [F32, F32, F32, torch.int16, BF16, BF16])
    offsets = sorted(tensor.data_ptr() % 4096 for tensor in tensors)
    gaps = [after - before for before, after in itertools.pairwise([*offsets, offsets[0] + 4096])]
    assert min(gaps) >= 512
    assert all(int(tensor.count_nonzero()) == 0 for tensor in tensors)
    last = tensors.pop()
    del tensors
    assert float(last.fill_(2).sum(dtype=F64)) == 2 << 20
    assert native.allocate(0, [F32])[0].numel() == 0


def test_workers_run_side_by_side_in_order_and_raise_here() -> None:
    workers = native.Workers(2)
    meeting = threading.Barrier(2)
    assert workers.run([lambda: meeting.wait(30) >= 0] * 2) == [True, True]
    names = workers.run([lambda: threading.current_thread().name] * 8)
    assert set(names) <= {"zeroshard-host-0", "zeroshard-host-1"}
    assert workers.spread(10, 4, lambda start, stop: (start, stop)) == [(0, 4), (4, 8), (8, 10)]
    with pytest.raises(ZeroDivisionError):
        workers.run([lambda: 1, lambda: 1 // 0, lambda: 2])
    with pytest.raises(StateError, match="wait for itself"):
        workers.submit(lambda: workers.run([])).result(30)
    workers.close()
    with pytest.raises(StateError, match="after close"):
        workers.submit(lambda: 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("zeroshard-host")]


def test_threads_update_one_state_together(path) -> None:
    numel, grain = 256 * 40, 256 * 3
    numbers = AdamStep(lr=1e-2, step=9, weight_decay=0.1)
    grad = rough(numel, 1).to(BF16)
    expected, expected_weight = adam_state(numel, 3, True, {"moments": "int8"})
    native.update_rows(expected, grad, expected_weight, numbers)
    state, weight = adam_state(numel, 3, True, {"moments": "int8"})
    workers = native.Workers(3)
    workers.spread(
        numel,
        grain,
        lambda a, b: native.update_rows(state, grad[a:b], weight[a:b], numbers, start=a, stop=b),
    )
    workers.close()
    for found, wanted in zip([*contents(state), weight], [*contents(expected), expected_weight], strict=True):
        assert_same_bits(found, wanted)
