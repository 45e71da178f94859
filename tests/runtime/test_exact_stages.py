"""Every stage gives the numbers of plain PyTorch: the same bits as data-parallel training done by hand in one
process, and the losses of one process that has the whole batch.
"""

from __future__ import annotations

import pytest
import torch
from recipes import (
    Recipe,
    mean_losses,
    on_ranks,
    optimizers,
    rank_by_rank_once,
    whole_batch_once,
)
from torch import Tensor, nn

from zeroshard.testing import assert_losses, assert_same_bits, ulps

STAGES = (0, 1, 2, 3)
# torch's Muon orthogonalises in bf16, where a gradient's last bit may flip a rounding: one process on the
# whole batch differs from itself by as much when it only adds the same gradients in another order.
LOSSES = {"muon": 1e-3}

OTHERS = ("adamw foreach", "sgd", "adam", "adafactor", "muon", "rmsprop")
# Each optimizer on both models and both world sizes at least once; AdamW, by far the most used, on all four.
CASES = [
    *[("adamw", model, world) for model in ("gpt", "mlp") for world in (2, 4)],
    *[("adamw fused", "even gpt", world) for world in (2, 4)],
    *[(name, *where) for name in OTHERS for where in (("gpt", 2), ("mlp", 4))],
]


@pytest.mark.ranks
@pytest.mark.parametrize(("optimizer", "model", "world"), CASES)
def test_every_stage_has_the_bits_of_plain_pytorch(optimizer: str, model: str, world: int) -> None:
    recipe = Recipe(model, optimizer)
    by_hand, one_process = rank_by_rank_once(recipe, world), whole_batch_once(recipe, world)
    for stage in STAGES:
        trained = on_ranks(world, recipe, stage=stage)
        assert_same_bits(trained[0].weights, by_hand.weights)
        assert_losses(mean_losses(trained), one_process.losses, LOSSES.get(optimizer, 1e-6))
    assert one_process.losses[-1] < one_process.losses[0], "the run learnt nothing, so it proves little"


# [Note: torch's fused tail] `AdamW(fused=True)` updates whole vectors of 8 or 16 numbers with one code and
# what is left at a tensor's end with another, which rounds the second moment otherwise. Rows end elsewhere
# than the tensor does, so where rows are no multiple of the vector, sharded and whole updates may differ in
# the last bit: at any stage, in ZeroShard or without it. The next three tests name and bound that: it is
# torch's own; it is one ulp a step; and the stages that all have rows (1, 2, 3) do not differ at all.


def test_the_fused_tail_is_torchs_own() -> None:
    draw = torch.Generator().manual_seed(0)
    size, cut, width = 53 * 20, 27 * 20, 16
    whole = nn.Parameter(torch.randn(size, generator=draw))
    state: dict[str, Tensor] = {}
    ends = ((0, cut), (cut, size), (0, size))
    odd = {at for start, stop in ends for at in range(start + (stop - start) // width * width, stop)}
    worst = 0
    for _ in range(20):
        grad = torch.randn(size, generator=draw)
        before, before_state = whole.detach().clone(), {k: v.clone() for k, v in state.items()}
        state = _fused_step(whole, grad, state)
        for start, stop in ends[:2]:
            rows = nn.Parameter(before[start:stop].clone())
            kept = {k: (v[start:stop] if v.dim() else v).clone() for k, v in before_state.items()}
            after = _fused_step(rows, grad[start:stop], kept)
            moments = [(after[key], state[key]) for key in ("exp_avg", "exp_avg_sq")]
            for mine, theirs in ((rows.detach(), whole.detach()), *moments):
                differs = (mine != theirs[start:stop]).nonzero().flatten() + start
                assert set(differs.tolist()) <= odd
                worst = max(worst, ulps(mine, theirs[start:stop]))
    assert worst <= 1


def _fused_step(parameter: nn.Parameter, grad: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True)
    if state:
        optimizer.state[parameter] = state
    parameter.grad = grad.clone()
    optimizer.step()
    return dict(optimizer.state[parameter])


@pytest.mark.ranks
@pytest.mark.parametrize(("model", "world"), [("gpt", 2), ("gpt", 4), ("mlp", 2), ("mlp", 4)])
def test_fused_on_odd_rows(model: str, world: int) -> None:
    recipe = Recipe(model, "adamw fused")
    by_hand, one_process = rank_by_rank_once(recipe, world), whole_batch_once(recipe, world)
    assert_same_bits(on_ranks(world, recipe, stage=0)[0].weights, by_hand.weights)
    first = on_ranks(world, recipe, stage=1)
    for stage in (2, 3):
        assert_same_bits(on_ranks(world, recipe, stage=stage)[0].weights, first[0].weights)
    assert_losses(mean_losses(first), one_process.losses, 1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize(("model", "world"), [("gpt", 2), ("mlp", 4)])
def test_fused_on_odd_rows_is_one_ulp_a_step(model: str, world: int) -> None:
    """From equal weights, one step: at most one ulp of the larger of weight and step apart."""
    recipe = Recipe(model, "adamw fused", steps=1)
    whole, rows = (on_ranks(world, recipe, stage=stage)[0].weights for stage in (0, 3))
    for name, value in whole.items():
        ulp = torch.finfo(torch.float32).eps * value.abs().clamp(min=1e-3)
        assert ((rows[name] - value).abs() <= ulp).all(), name


def test_muon_has_matrices_and_adamw_the_rest() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    muon, adamw = optimizers("muon", model)
    assert [p.dim() for p in muon.param_groups[0]["params"]] == [2]
    assert [p.dim() for p in adamw.param_groups[0]["params"]] == [1, 1, 1]
