"""What a front end's script came to, sharded, beside what it came to by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import pytest
import torch
from torch import Tensor

from zeroshard.testing import assert_losses


class Trained(Protocol):
    losses: list[float]
    norms: list[float]
    weights: Mapping[str, Tensor]


def assert_near(got: Trained, want: Trained, within: float = 1e-6) -> None:
    """Losses, norms and weights, where sums are made in another order."""
    assert_losses(got.losses, want.losses, within)
    assert got.norms == pytest.approx(want.norms, rel=within)
    for name, value in want.weights.items():
        torch.testing.assert_close(got.weights[name], value, rtol=0, atol=within)
