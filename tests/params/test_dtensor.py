"""What a user reads off sharded parameters and gradients is of the whole tensor, on every rank alike: also
where a rank has no row of it, and where torch would have left the ranks' parts apart."""

from __future__ import annotations

import copy
import io
import math
import pickle
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zeroshard as zs
from zeroshard.testing import ranks, run_threads

WORLD = 2
ORDERS = (0.0, 1.0, 2.0, 3.0, math.inf, -math.inf)
READINGS = {
    "norm": lambda t: float(t.norm()),
    "largest": lambda t: float(t.abs().max()),
    "smallest": lambda t: float(t.amin()),
    "sum": lambda t: t.sum().item(),
    "zeros": lambda t: int(torch.count_nonzero(t)),
    "shown": lambda t: float(f"{t.detach().norm(3):.6f}"),
    "rows": lambda t: _whole(torch.linalg.vector_norm(t, math.inf, dim=-1)).flatten().tolist(),
    "columns": lambda t: _whole(torch.linalg.vector_norm(t, math.inf, dim=0)).flatten().tolist(),
}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _model() -> nn.Sequential:
    weights = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=weights)
    return model


def _batch(rank: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(rank))


def read(model: nn.Sequential) -> dict[str, object]:
    """Readings of a weight that one rank has no row of and of a gradient that both have rows of, and of the
    former's gradient; then clipped norms of all. The gradients are halved in between."""
    tensors = {
        "weight": model[2].weight.detach(),
        "gradient": model[0].weight.grad,
        "no": model[2].weight.grad,
    }
    told: dict[str, object] = {
        f"{what} of {name}": reading(tensor)
        for name, tensor in tensors.items()
        for what, reading in READINGS.items()
    }
    for p in model.parameters():
        p.grad = p.grad / 4  # a gradient of the user's own making is one of these as well
        p.grad *= 2
    for order, foreach in product(ORDERS, (None, False)):
        told[f"clip {order} {foreach}"] = float(
            nn.utils.clip_grad_norm_(model.parameters(), 0.9, norm_type=order, foreach=foreach)
        )
    told["clipped"] = [_whole(p.grad).flatten().tolist() for p in model.parameters()]
    return told


def on_a_rank(stage: int, precision: str | None) -> dict[str, object]:
    model = _model()
    run = zs.shard(model, torch.optim.SGD(model.parameters()), stage=stage, precision=precision)
    model(_batch(dist.get_rank())).square().mean().backward()
    told = read(model)
    run.close()
    return told


def in_one_process() -> dict[str, object]:
    model = _model()
    for rank in range(WORLD):
        (model(_batch(rank)).square().mean() / WORLD).backward()
    return read(model)


def assert_close(found: dict[str, object], expected: dict[str, object], tolerance: float) -> None:
    for name, value in expected.items():
        for one, other in zip(_flat(found[name]), _flat(value), strict=True):
            assert one == pytest.approx(other, rel=tolerance, abs=tolerance), name


def _flat(value: object) -> list[float]:
    if isinstance(value, list):
        return [number for item in value for number in _flat(item)]
    assert isinstance(value, int | float)
    return [float(value)]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_read_is_of_the_whole_tensor(stage: int) -> None:
    told = run_threads(WORLD, on_a_rank, stage, None)
    assert told[1] == told[0]
    assert_close(told[0], in_one_process(), 2e-6)


def test_stages_read_alike_in_half_precision() -> None:
    whole, rows = (run_threads(WORLD, on_a_rank, stage, "bf16")[0] for stage in (0, 2))
    assert_close(rows, whole, 1e-2)


def refused_and_pickled() -> list[str]:
    model = _model()
    run = zs.shard(model, torch.optim.SGD(model.parameters()), stage=2)
    model(_batch(dist.get_rank()) * (math.nan if dist.get_rank() == 1 else 1.0)).sum().backward()
    told = []
    for order in (2.0, math.inf):
        with pytest.raises(RuntimeError, match=f"total norm of order {order} .* non-finite") as caught:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
        told.append(str(caught.value))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert b"zeroshard" not in file.getvalue()
    assert b"zeroshard" not in pickle.dumps(model[0].weight.detach())
    with pytest.raises(TypeError):
        f"{model[0].weight:.2f}"
    run.close()
    return told


def test_a_norm_that_is_not_finite_is_refused_on_all_ranks_and_files_have_torch_classes() -> None:
    first, *others = run_threads(WORLD, refused_and_pickled)
    assert others == [first] * (WORLD - 1)


def copied(stage: int) -> list[str]:
    """What deep copies of a model's state are, and whether they are copies."""
    model = nn.Module()
    model.scale, model.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
    model.wide = nn.Parameter(torch.ones(4, 3))
    run = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    state = model.state_dict()
    copies = copy.deepcopy(state)
    found = []
    for name, value in copies.items():
        assert type(value) is type(state[name])
        value.to_local().add_(1.0)
        assert torch.equal(value.full_tensor(), state[name].full_tensor() + 1.0)
        found.append(f"{name} {tuple(value.shape)}")
    model.load_state_dict(copies)
    assert model.scale.full_tensor().item() == 1.5
    run.close()
    assert model.scale.item() == 1.5
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, 3])
def test_state_with_numbers_can_be_copied(stage: int) -> None:
    assert ranks(2).run(copied, stage) == [["scale ()", "empty (0, 3)", "wide (4, 3)"]] * 2


LISTS = {
    "added": lambda ps, gs: torch._foreach_add(ps, gs, alpha=0.3),
    "lerped": lambda ps, gs: torch._foreach_lerp(ps, gs, 0.2),
    "of three": lambda ps, gs: torch._foreach_addcmul(ps, gs, gs, 0.5),
    "by a number": lambda ps, gs: torch._foreach_mul(ps, torch.tensor(3.0)),
    "other dtype": lambda ps, gs: torch._foreach_mul(ps, torch.tensor(3.0, dtype=torch.float64)),
    "by numbers": lambda ps, gs: torch._foreach_mul(ps, [float(n) for n in range(len(ps))]),
    "largest": lambda ps, gs: torch._foreach_max(ps[:2]),
    "norms": lambda ps, gs: torch._foreach_norm(ps, math.inf),
    "norms in fp64": lambda ps, gs: torch._foreach_norm(ps, 2, dtype=torch.float64),
    "stacked": lambda ps, gs: [torch.stack(torch._foreach_norm([*ps, *gs], 1))],
    "copied": lambda ps, gs: (torch._foreach_copy_(ps, gs), torch._foreach_lerp_(ps, gs, 0.5), ps)[2],
}


def lists_of(model: nn.Module) -> dict[str, list[list[float]]]:
    """Of parameters, two of them scalars, and gradients."""
    ps, gs = [p.detach() for p in model.parameters()], [p.grad for p in model.parameters()]
    told = {}
    for name, function in LISTS.items():
        made = function(ps, gs)
        told[name] = [_whole(one).double().flatten().tolist() for one in made]
    return told


class _WithScalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _model()
        self.gain, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(-0.2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.gain + self.shift).square().mean()


def lists_on_a_rank(split: str) -> dict[str, list[list[float]]]:
    model = _WithScalars()
    run = zs.shard(model, torch.optim.SGD(model.parameters()), stage=2, split=split)
    model(_batch(dist.get_rank())).backward()
    told = lists_of(model)
    run.close()
    return told


@pytest.mark.parametrize("split", ["rows", "whole"])
def test_lists_are_computed_with_as_one_by_one(split: str) -> None:
    model = _WithScalars()
    for rank in range(WORLD):
        (model(_batch(rank)) / WORLD).backward()
    expected = lists_of(model)
    for told in run_threads(WORLD, lists_on_a_rank, split):
        for name, values in expected.items():
            assert _flat(told[name]) == pytest.approx(_flat(values), rel=2e-6, abs=1e-7), name
