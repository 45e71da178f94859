"""Host updates: torch's numbers, and the same bits from C at every vector width, from torch, in any
chunks."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_values import (
    BF16,
    F16,
    F32,
    adam_state,
    assert_same_bits,
    both_paths,
    built,
    contents,
    each_path,
    rough,
)
from torch import Tensor

from zeroshard import kernels
from zeroshard.errors import OptionError
from zeroshard.kernels import AdamRows, AdamStep, SgdRows, SgdStep, TensorCopies, library

FIXTURES = (both_paths, each_path)  # pytest finds them among the names of this module

VARIANTS = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "decoupled": False},
    {"beta1": 0.3},
    {"beta1": 0.3, "weight_decay": 0.1, "decoupled": False},
]


@built
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"master": "split"}, {"moments": "int8"}], ids=str
)
def test_adam_is_bit_equal_in_c_and_torch(assert_both_same, variant, options) -> None:
    weights = [BF16] if "master" in options else [None, F32, BF16, F16, "away"]
    for (grad, out), edges in itertools.product(itertools.product([F32, BF16, F16], weights), [False, True]):

        def run(grad=grad, out=out, edges=edges) -> list[Tensor]:
            state, weight = adam_state(1031, 3, edges, options)
            weight = None if out is None else weight if out == "away" else weight.to(out)
            ties = "away" if out == "away" else "even"
            for step in (7, 8):
                numbers = AdamStep(lr=1e-2, step=step, grad_scale=0.37, **variant)
                kernels.update_rows(state, rough(1031, step, edges).to(grad), weight, numbers, ties=ties)
            return [*contents(state), *([] if weight is None else [weight])]

        assert_both_same(run)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_is_torchs_adam_over_50_steps(path, variant, amsgrad) -> None:
    """Within 2 units in the last place of the larger of weight and update in one step from equal state,
    against the fused kernel and against the loop; within 2e-6 after 50 steps."""
    start = rough(513, 5, edges=False)
    options = {"lr": 1e-2, "betas": (variant.get("beta1", 0.9), 0.999), "amsgrad": amsgrad}
    options |= {name: variant[name] for name in ("weight_decay", "maximize") if name in variant}
    options.setdefault("weight_decay", 0.0)
    kind = torch.optim.AdamW if variant.get("decoupled", True) else torch.optim.Adam
    for fused in (False, True):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], foreach=False, fused=fused, **options)
        state = AdamRows.zeros(513, amsgrad=amsgrad)
        state.master.copy_(start)
        for step in range(1, 51):
            parameter.grad = rough(513, step, edges=False)
            before = parameter.detach().clone()
            if step > 1:
                theirs = optimizer.state[parameter]
                beside = AdamRows(
                    theirs["exp_avg"].clone(),
                    theirs["exp_avg_sq"].clone(),
                    before.clone(),
                    max_exp_avg_sq=theirs["max_exp_avg_sq"].clone() if amsgrad else None,
                )
                kernels.update_rows(beside, parameter.grad, None, AdamStep(lr=1e-2, step=step, **variant))
            optimizer.step()
            kernels.update_rows(state, parameter.grad, None, AdamStep(lr=1e-2, step=step, **variant))
            if step > 1:
                size = torch.maximum(before.abs(), parameter.detach().abs()) + (parameter - before).abs()
                assert ((beside.master - parameter).abs() <= 2 * 2**-23 * size).all()
        torch.testing.assert_close(state.master, parameter.detach(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(state.exp_avg, optimizer.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"master": "split"}, {"moments": "int8"}], ids=str
)
def test_adam_does_not_depend_on_chunks_or_alignment(path, options) -> None:
    numel, cuts = 256 * 5 + 77, [0, 1, 3, 258, 261, 900, 256 * 5 + 77]
    if "moments" in options:
        cuts = [0, 256, 1024, 256 * 5 + 77]
    numbers = AdamStep(lr=1e-2, step=9, weight_decay=0.1)
    grad = rough(numel, 1).to(BF16)
    whole, weight = adam_state(numel, 3, True, options)
    kernels.update_rows(whole, grad, weight, numbers)
    parts, other = adam_state(numel, 3, True, options)
    for start, stop in itertools.pairwise(cuts):
        kernels.update_rows(parts, grad[start:stop], other[start:stop], numbers, start=start, stop=stop)
    for found, wanted in zip([*contents(parts), other], [*contents(whole), weight], strict=True):
        assert_same_bits(found, wanted)


def test_the_weight_may_replace_the_gradient_and_a_split_master_equals_a_plain_one(path) -> None:
    plain = adam_state(3000, 3, True, {})[0]
    halves, half_weight = adam_state(3000, 3, True, {"master": "split"})
    for step in range(5, 9):
        slot = rough(3000, step).to(BF16)
        numbers = AdamStep(lr=1e-2, step=step, weight_decay=0.1)
        kernels.update_rows(halves, slot, half_weight, numbers)
        kernels.update_rows(plain, slot, slot, numbers, ties="away")
        assert_same_bits(kernels.join(half_weight, halves.remainder), plain.master)
        assert_same_bits(half_weight, slot)
    assert_same_bits(halves.exp_avg_sq, plain.exp_avg_sq)
    with pytest.raises(OptionError, match='ties=\'up\'; "even" or "away" is needed'):
        kernels.update_rows(plain, slot, slot, numbers, ties="up")


# -- SGD


SGD_VARIANTS = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
]


@pytest.mark.parametrize("variant", SGD_VARIANTS, ids=str)
def test_sgd_is_torchs_sgd(path, variant) -> None:
    start = rough(513, 5, edges=False)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False, **variant)
    state = SgdRows(start.clone(), momentum=torch.zeros(513) if "momentum" in variant else None)
    weight = torch.empty(513, dtype=F16)
    for step in range(50):
        parameter.grad = rough(513, step, edges=False)
        optimizer.step()
        kernels.update_rows(state, parameter.grad, weight, SgdStep(lr=0.1, first=step == 0, **variant))
    scale = 50 * float(start.abs().max())
    torch.testing.assert_close(state.master, parameter.detach(), rtol=1e-5, atol=1e-7 * scale)
    assert_same_bits(weight, state.master.to(F16))


@built
@pytest.mark.parametrize("variant", SGD_VARIANTS, ids=str)
def test_sgd_is_bit_equal_in_c_and_torch(assert_both_same, variant) -> None:
    for grad, splits, first in itertools.product([F32, BF16, F16], [False, True], [False, True]):

        def run(grad=grad, splits=splits, first=first) -> list[Tensor]:
            weight, remainder = kernels.split(rough(1031, 3))
            master = {"remainder": remainder} if splits else {"master": rough(1031, 3)}
            buffer = rough(1031, 4) if "momentum" in variant else None
            state = SgdRows(**master, momentum=buffer)
            numbers = SgdStep(lr=0.1, first=first, grad_scale=0.3, **variant)
            kernels.update_rows(state, rough(1000, 5).to(grad), weight[7:1007], numbers, start=7, stop=1007)
            return [*contents(state), weight]

        assert_both_same(run)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moves(compiled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of strided targets take consecutive parts of their source; the rest is a plain copy."""
    if not compiled:
        monkeypatch.setattr(library, "kernels", lambda: None)
    wire = torch.zeros(40, dtype=dtype)
    to = [wire.as_strided((2, 3), (20, 1), 1), wire[30:34], wire[39:39]]
    moves = TensorCopies(to, to)
    for seed in range(2):
        sources = [torch.randn(t.numel(), generator=torch.manual_seed(seed)).to(dtype) for t in to]
        moves.run(to, sources, "source")
        assert torch.equal(to[0].reshape(-1), sources[0])
        assert torch.equal(to[1], sources[1])
        assert wire.count_nonzero() == 10
    more = torch.zeros(40, dtype=dtype)
    other = [more.as_strided((2, 3), (20, 1), 1), more[30:34], more[39:39]]
    moves.run(other, sources, "to")
    assert torch.equal(other[0].reshape(-1), sources[0])
    more.zero_()
    moves.run(other, sources, "neither")
    assert torch.equal(other[0].reshape(-1), sources[0])
    wide = [source.double() for source in sources]
    moves.run(other, [10 * source for source in wide])
    assert torch.equal(other[1], (10 * wide[1]).to(dtype)), "another dtype is converted"


@pytest.mark.parametrize("compiled", [True, False])
def test_moves_of_parts_and_past_the_caches(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(library, "kernels", lambda: None)
    wire, grad = torch.zeros(100_001), torch.randn(100_000, generator=torch.manual_seed(0))
    to = [wire[3:90_000], wire[90_001:90_005]]
    moves = TensorCopies(to, to, shifts=[10, 2], past=True)
    moves.run(to, [grad, grad], "source")
    assert torch.equal(to[0], grad[10 : 10 + 89_997])
    assert torch.equal(to[1], grad[2:6])
    assert wire[:3].count_nonzero() == wire[90_000] == wire[90_005:].count_nonzero() == 0


def test_moves_leave_sources_on_another_device_to_torch() -> None:
    to = [torch.zeros(4)]
    moves = TensorCopies(to, to, torch.device("meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        moves.run(to, [torch.zeros(4, device="meta")], "source")
