"""A model on the meta device is filled part by part, and the process stays as small as what it holds. That is
resident memory, of which a count of tensors sees nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zeroshard as zs
from zeroshard.kernels import host_memory
from zeroshard.testing import Ranks

MIB = 2**20
WORLD = 2
GOES = 3


class Wide(nn.Module):
    """Matrices of 6 and 9 MiB: such sizes come from glibc's heap, and do not fit where a smaller one was. The
    norm between them leaves small objects there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.mix(self.norm(x))[..., : x.shape[-1]]))


def tower(width: int, blocks: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Wide(width) for _ in range(blocks))).requires_grad_(False)


def with_temporaries(module: nn.Module) -> None:
    """As many write it: drawn aside, scaled, copied."""
    for parameter in module.parameters(recurse=False):
        parameter.copy_(torch.randn(parameter.shape) * 0.02)


def resident(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


Init = Callable[[nn.Module], None] | None


def growth(init: Init, weights: str | None = None) -> tuple[int, int, int, int]:
    """Of resident memory: at most while sharding, and afterwards; then what is held, and the whole model."""
    zs.shard(tower(64, 2), stage=3, init=init).close()  # code and tables that are loaded at the first use
    model = tower(896, 10)
    nbytes = sum(p.nbytes for p in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    run = zs.shard(model, stage=3, init=init, weights=weights)
    most, after, held = resident("VmHWM") - before, resident("VmRSS") - before, run.stats().live["parameters"]
    run.close()
    return most, after, held, nbytes


def least_growth(init: Init, weights: str | None = None) -> list[tuple[int, int, int, int]]:
    """Of several goes, since what else happens in a process only ever adds. Each has a pool of its own: in a
    process that has worked, what was freed before hides the growth."""
    goes = []
    for _ in range(GOES):
        pool = Ranks(WORLD)
        try:
            goes.append(pool.run(growth, init, weights))
        finally:
            pool.stop()
    return min(goes, key=lambda ranks: max(most for most, *_ in ranks))


@pytest.mark.ranks
@pytest.mark.parametrize("init", [None, with_temporaries])
def test_resident_memory_is_the_share_and_one_module(init: Init) -> None:
    for most, after, held, nbytes in least_growth(init):
        assert held == pytest.approx(nbytes / WORLD, rel=0.01)
        unit = nbytes / 10
        assert most < held + 1.5 * unit, f"{most / MIB:.0f} MiB where {held / MIB:.0f} are held"
        assert after < held + 0.5 * unit, f"{after / MIB:.0f} MiB where {held / MIB:.0f} are held"


@pytest.mark.ranks
def test_resident_memory_while_files_are_read_is_the_share_and_one_module(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in tower(896, 10).named_parameters()}
    save_file({name: torch.full(shape, 0.5) for name, shape in shapes.items()}, tmp_path / "w.safetensors")
    for most, after, held, nbytes in least_growth(None, str(tmp_path / "w.safetensors")):
        unit = nbytes / 10
        assert most < held + 1.5 * unit, f"{most / MIB:.0f} MiB where {held / MIB:.0f} are held"
        assert after < held + 0.5 * unit, f"{after / MIB:.0f} MiB where {held / MIB:.0f} are held"


def test_nothing_is_trimmed_where_malloc_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    host_memory._trimmer.cache_clear()
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: object())
    host_memory.trim()
    assert host_memory._trimmer() is None
    host_memory._trimmer.cache_clear()
