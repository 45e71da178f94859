"""A tier that the library does not know: storage in a list of blocks, registered under a scheme."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from offload_loop import batch, make_model
from torch import Tensor

import zeroshard as zs
from zeroshard import options
from zeroshard.extend import TierStorage, register_tier
from zeroshard.tiers import scratch_file


class Blocks:
    """Blocks of 4 KiB in a dict. `WHERE` is how many writes succeed."""

    made: ClassVar[list[Blocks]] = []

    def __init__(self, where: str, nbytes: int) -> None:
        self.nbytes, self.left = nbytes, int(where or 10**9)
        self.blocks: dict[int, bytes] | None = {}
        self.lock = threading.Lock()
        Blocks.made.append(self)

    def read(self, memory: memoryview, offset: int) -> None:
        assert self.blocks is not None
        for at in range(0, len(memory), 4096):
            part = memory[at : at + 4096]
            part[:] = self.blocks.get(offset + at, bytes(4096))[: len(part)]

    def write(self, memory: memoryview, offset: int) -> None:
        assert self.blocks is not None
        with self.lock:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EIO, "no blocks left")
        for at in range(0, len(memory), 4096):
            self.blocks[offset + at] = bytes(memory[at : at + 4096]).ljust(4096, b"\0")

    def close(self) -> None:
        self.blocks = None


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For one test: elsewhere the scheme is unknown."""
    names: list[str] = []
    monkeypatch.setattr(options, "TIER_SCHEMES", names)
    monkeypatch.setattr(scratch_file, "TIER_SCHEMES", names)
    monkeypatch.setattr(scratch_file, "_makers", {})
    register_tier("blocks", Blocks)
    yield
    Blocks.made.clear()


def trained(offload: zs.Offload | None) -> list[Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, offload=offload, clip_norm=1.0)
    for step in range(4):
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return [p.detach().clone() for p in model.parameters()]


def test_it_trains_as_the_host_does_and_is_given_back() -> None:
    want = trained(zs.Offload())
    assert all(
        torch.equal(a, b)
        for a, b in zip(trained(zs.Offload(optimizer="disk", path="blocks://")), want, strict=True)
    )
    (storage,) = Blocks.made
    assert storage.blocks is None
    assert storage.nbytes > 8 * sum(p.numel() for p in make_model().parameters())
    checked: TierStorage = storage
    checked.close()


def test_what_it_fails_with_ends_the_run() -> None:
    with pytest.raises(
        zs.TierError, match=r"the disk tier failed at `.*: OSError: \[Errno 5\] no blocks left"
    ):
        trained(zs.Offload(optimizer="disk", path="blocks://3"))


def test_a_scheme_is_taken_once_and_an_unknown_one_refused() -> None:
    with pytest.raises(zs.OptionError, match="tier 'blocks' exists already: take another name"):
        register_tier("blocks", Blocks)
    with pytest.raises(zs.OptionError, match=r"names a tier of your own, and registered: blocks: call "):
        zs.Offload(optimizer="disk", path="s3://bucket")
