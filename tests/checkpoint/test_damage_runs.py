"""Whole runs on disks that are full and with checkpoints that are damaged: training goes on where it can."""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import models
import pytest
import torch

import zeroshard as zs
from zeroshard.checkpoint import PendingSave, SaveResult, verify
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks


class Training:
    """A few steps on this rank, and what is said meanwhile."""

    def __init__(self, stage: int = 3) -> None:
        self.model = models.build("gpt")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.run = zs.shard(self.model, self.optimizer, stage=stage)
        self.said: list[str] = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zeroshard").addHandler(self.handler)

    def step(self, number: int) -> float:
        loss = self.model(models.GPT.batch(4, seed=10 * number + self.run.rank))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def close(self) -> None:
        self.run.close()
        logging.getLogger("zeroshard").removeHandler(self.handler)


@contextmanager
def quota(most: int) -> Iterator[None]:
    """No file of this process may be larger: the system itself refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_neither_training_nor_the_next_save(tmp_path: Path) -> None:
    alone = Training()
    wanted = [alone.step(number) for number in range(3)]
    alone.close()
    training = Training()
    losses = [training.step(0)]
    training.run.save(tmp_path / "1", extra={"step": 1})
    with quota(100_000):
        pending = training.run.save(tmp_path / "2", extra={"step": 2}, background=True)
        assert isinstance(pending, PendingSave)
        losses.append(training.step(1))
        with pytest.raises(zs.CheckpointError) as caught:
            pending.wait()
    losses.append(training.step(2))
    saved = training.run.save(tmp_path / "3", extra={"step": 3})
    assert isinstance(saved, SaveResult)
    training.close()
    error = str(caught.value)
    assert "the file would be larger than this process may write (ulimit -f)" in error
    assert "rank-00000-of-00001.safetensors" in error
    assert f"The latest complete checkpoint besides it is {tmp_path}/1." in error
    assert saved.after_failure == error
    assert any("saving again after the background save" in line for line in training.said)
    assert losses == wanted
    assert sorted(os.listdir(tmp_path)) == ["1", "3"]
    assert verify(tmp_path / "1").ok
    assert verify(tmp_path / "3").ok


def saved_thrice(folder: Path) -> None:
    training = Training()
    for number in (1, 2, 3):
        training.step(number)
        training.run.save(folder / f"step-{number}", extra={"step": number})
    training.close()


def resumed(folder: Path) -> tuple[object, list[str], dict[str, torch.Tensor]]:
    training = Training(stage=2)
    try:
        extra: object = training.run.resume(folder)
    except zs.CheckpointError as error:
        extra = str(error)
    with training.run.gathered() as whole:
        weights = {name: p.detach().clone() for name, p in whole.items()}
    training.close()
    return extra, training.said, weights


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    ranks(2).run(saved_thrice, folder)
    shutil.copytree(folder, tmp_path / "good")
    shutil.rmtree(tmp_path / "good" / "step-3")
    wanted = ranks(2).run(resumed, tmp_path / "good")[0][2]
    flip(folder / "step-3" / "rank-00001-of-00002.safetensors")
    for extra, said, weights in ranks(2).run(resumed, folder):
        assert extra == {"step": 2}
        line = next(text for text in said if "Going on from" in text)
        assert "step-3/rank-00001-of-00002.safetensors: rows" in line
        assert "do not match their checksum" in line
        assert line.endswith(f"Going on from {folder}/step-2 instead.")
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    for number in (1, 2):
        flip(folder / f"step-{number}" / "rank-00000-of-00002.safetensors")
    for extra, _, _ in ranks(2).run(resumed, folder):
        assert "step-1/rank-00000-of-00002.safetensors" in str(extra), "no sound one is left"


def of_another_model(folder: Path) -> str:
    model = models.build("mlp")
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=1)
    with pytest.raises(zs.CheckpointError) as caught:
        run.resume(folder)
    run.close()
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_no_reason_to_take_an_older_one(tmp_path: Path) -> None:
    ranks(2).run(saved_thrice, tmp_path)
    for text in ranks(2).run(of_another_model, tmp_path):
        assert f"{tmp_path}/step-3 is not a checkpoint of this model" in text
