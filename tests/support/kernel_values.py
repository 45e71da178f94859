"""What the tests of the host kernels share: awkward values, bit equality, and running on both paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from zeroshard import kernels as native
from zeroshard.kernels import AdamRows, SgdRows, library, moments8

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EDGES = [0.0, -0.0, 1e-45, -1e-40, 1.17549435e-38, 6e-8, 65504.0, 65519.9, 65520.0, 3.4e38, -3.4e38, math.inf]
EDGES += [-math.inf, math.nan, 1.00390625, 1.01171875, 6.1e-5, -5.96e-8, 2.98e-8, 1e-20, 1e20]
COMPILED = library.kernels()
built = pytest.mark.skipif(COMPILED is None, reason="the kernels were not compiled")


@pytest.fixture(name="path", params=["compiled", "torch"])
def each_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the compiled kernels and on their fallback."""
    if request.param == "compiled" and COMPILED is None:
        pytest.skip("the kernels were not compiled")
    monkeypatch.setattr(library, "kernels", lambda: COMPILED if request.param == "compiled" else None)
    return str(request.param)


@pytest.fixture(name="assert_both_same")
def both_paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], list[Tensor]]], None]]:
    """Checks that a function of the kernels gives the fallback's bits at every vector width."""

    def check(make: Callable[[], list[Tensor]]) -> None:
        assert COMPILED is not None
        monkeypatch.setattr(library, "kernels", lambda: None)
        expected = make()
        monkeypatch.setattr(library, "kernels", lambda: COMPILED)
        for level in library.LEVELS:
            COMPILED.limit(level)
            for found, wanted in zip(make(), expected, strict=True):
                assert_same_bits(found, wanted, level)

    yield check
    if COMPILED is not None:
        COMPILED.limit()


def assert_same_bits(found: Tensor, wanted: Tensor, what: str = "") -> None:
    """Equal patterns, so -0 is not 0; of NaNs only the places are compared."""
    assert found.dtype == wanted.dtype
    if found.is_floating_point():
        nan = wanted.isnan()
        assert torch.equal(found.isnan(), nan), what
        kind = INTEGERS[found.dtype.itemsize]
        found, wanted = found.view(kind)[~nan], wanted.view(kind)[~nan]
    assert torch.equal(found, wanted), f"{what}: {int((found != wanted).sum())} of {found.numel()} differ"


def rough(numel: int, seed: int, edges: bool = True) -> Tensor:
    """Values of very different size, and the awkward ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
    if edges:
        values[: len(EDGES)] = torch.tensor(EDGES).roll(seed)
    return values


def adam_state(numel: int, seed: int, edges: bool, options: dict[str, object]) -> tuple[AdamRows, Tensor]:
    """State some steps old, and the bf16 weight of it."""
    state = AdamRows.zeros(numel, **options)  # type: ignore[arg-type]
    weight, remainder = native.split(rough(numel, seed, edges))
    if state.remainder is not None:
        state.remainder.copy_(remainder)
    if state.master is not None:
        state.master.copy_(native.join(weight, remainder))
    moments = rough(numel, seed + 1, edges) * 0.1, rough(numel, seed + 2, edges).square() * 0.01
    if state.scales is not None:
        moments = moments8.encode(*moments, step=1)  # type: ignore[assignment]
        state.scales.copy_(moments[2])  # type: ignore[misc]
    state.exp_avg.copy_(moments[0])
    state.exp_avg_sq.copy_(moments[1])
    return state, weight


def contents(state: AdamRows | SgdRows) -> list[Tensor]:
    return [value.clone() for value in vars(state).values() if value is not None]
