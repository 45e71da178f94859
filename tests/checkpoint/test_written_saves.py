"""Weights that the loop writes by hand while a background save still copies: the save has what they were."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import whole_weights
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import PendingSave
from zeroshard.checkpoint.staging import FileImage
from zeroshard.testing import ranks

fill = FileImage.fill


def slowly(*given: Any) -> None:
    time.sleep(0.05)
    fill(*given)


def made(**options: Any) -> tuple[nn.Module, Any, zs.Run]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = zs.shard(model, optimizer, **options)
    for _ in range(2):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, run


def in_place(model: nn.Module, run: zs.Run) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)


def through_data(model: nn.Module, run: zs.Run) -> None:
    for p in model.parameters():
        p.data.mul_(3.0)


def loaded(model: nn.Module, run: zs.Run) -> None:
    model.load_state_dict({name: value * 0 + 5 for name, value in model.state_dict().items()})


def gathered(model: nn.Module, run: zs.Run) -> None:
    with run.gathered(write=True) as whole:
        for p in whole.values():
            p.data.fill_(9.0)


def told_again(folder: str, write: Any, options: dict[str, Any]) -> list[bool]:
    """Whether the checkpoint has each weight as it was at the save."""
    model, _, run = made(**options)
    before = whole_weights(run)
    with patch.object(FileImage, "fill", slowly):
        pending = run.save(Path(folder) / "step-2", background=True)
        assert isinstance(pending, PendingSave)
        write(model, run)
        pending.wait()
    with run.gathered() as whole:
        assert not any(torch.equal(p, before[name]) for name, p in whole.items()), "nothing was written"
    run.load(Path(folder) / "step-2")
    with run.gathered() as whole:
        same = [torch.equal(p, before[name]) for name, p in whole.items()]
    run.close()
    return same


def many(folder: str, cases: list[tuple[Any, dict[str, Any]]]) -> list[list[bool]]:
    return [told_again(f"{folder}/{number}", *case) for number, case in enumerate(cases)]


WRITES = (in_place, through_data, loaded, gathered)
HOST = {"offload": zs.Offload(threads=1), "clip_norm": 1e9}


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, HOST], ids=["plain", "bf16", "host"])
def test_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    for number, write in enumerate(WRITES):
        assert all(told_again(str(tmp_path / str(number)), write, options)), write.__name__


def test_on_two_ranks() -> None:
    cases = [
        (write, options) for write in WRITES for options in ({"stage": 0}, {"stage": 2}, {"stage": 3, **HOST})
    ]
    with tempfile.TemporaryDirectory() as folder:
        for told in ranks(2).run(many, folder, cases):
            for (write, options), same in zip(cases, told, strict=True):
                assert all(same), (write.__name__, options)
