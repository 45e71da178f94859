"""Architectures of transformers under Trainer: sharded, with the losses and weights of DDP, and read again by
`from_pretrained`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_architectures import ARCHITECTURES, trained

from zeroshard.testing import Ranks, assert_same_bits

pytestmark = pytest.mark.ranks
#: Shares of theirs end inside of a vector of torch's fused Adam, whose last elements are rounded otherwise.
ODD = ("convnext", "resnet", "swin")


@pytest.mark.wide(8)
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_trains_as_under_ddp(pool: Ranks, tmp_path: Path, name: str) -> None:
    plain = pool.run(trained, name, str(tmp_path / "plain"), None)[0]
    for stage in (2, 3):
        ours = pool.run(trained, name, str(tmp_path / f"{stage}"), stage)[0]
        assert ours.losses == plain.losses
        assert ours.norms == pytest.approx(plain.norms, rel=1e-6)
        if name not in ODD:
            assert_same_bits(ours.weights, plain.weights)
        for key, value in plain.weights.items():
            torch.testing.assert_close(ours.weights[key], value, rtol=0, atol=1e-8)
