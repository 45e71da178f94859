"""The tiers change no number: state and parameters on the host, on the disk, or some of each on all three.

What runs here is a part of `benchmarks/exact/offload_exact.py`, which runs all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from offload_loop import THREE_SPIKES, Case, Trained, furthest, parts, plain_once, thirds, trained

import zeroshard as zs
from zeroshard.layout import memory
from zeroshard.testing import assert_same_bits
from zeroshard.tiers import disk

CLOSE = 1e-6
SHORT = Case(steps=THREE_SPIKES)
TWICE = Case(steps=THREE_SPIKES, accumulate=2)


def ways(result: Trained) -> dict[str, int]:
    assert result.stats is not None
    return result.stats.updates


# ---------------------------------------------------------------------- one rank

TIERS: dict[str, dict[str, Any]] = {
    "disk": {"optimizer": "disk"},
    "disk, parameters on the host": {"optimizer": "disk", "parameters": "host"},
    "disk, parameters too": {"optimizer": "disk", "parameters": "disk"},
}
MASTERS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "fp32": (None, {}),
    "split": ("bf16", {"master": "split"}),
    "int8": ("bf16", {"moments": "int8"}),
}


@pytest.mark.wide(3)
@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("tier", TIERS)
def test_the_disk_has_the_bits_of_the_host(tier: str, master: str, disk_folder: Path) -> None:
    """Delayed at random, against the host waited for at every part."""
    precision, given = MASTERS[master]
    waited = trained(1, SHORT, 3, parts(**given), precision, "waited")
    offload = parts(path=str(disk_folder), **TIERS[tier], **given)
    result = trained(1, SHORT, 3, offload, precision, "delayed", 1)
    assert_same_bits(result.weights, waited.weights)
    assert result.losses == waited.losses
    assert ways(result) == ways(waited)
    if master == "fp32":
        distance, name = furthest(waited.weights, plain_once(SHORT).weights)
        assert distance <= CLOSE, name
        assert all(ways(waited).values()), "early, late and undone have all occurred"


@pytest.mark.parametrize("parameters", ["device", "auto"])
def test_auto_over_all_three_tiers(
    parameters: str, disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State on the device is updated by torch's own AdamW, whose last bit is not the kernel's: equal to plain
    PyTorch as the others are, and to itself with every delay."""
    for owner in (memory, disk):
        monkeypatch.setattr(owner, "BLOCKS", 2)  # else they alone take more than the model
    offload = thirds({"stage": 3}, 1, parameters, path=str(disk_folder), stage_bytes=4096, threads=2)
    waited = trained(1, TWICE, 3, offload, None, "waited")
    spread = {rests[parameters == "auto"] for rests in waited.rests}
    assert spread == {"device", "host", "disk"}, "state, or parameters, which come first"
    result = trained(1, TWICE, 3, offload, None, "delayed", 1)
    assert_same_bits(result.weights, waited.weights)
    assert result.losses == waited.losses
    distance, name = furthest(waited.weights, plain_once(TWICE).weights)
    assert distance <= CLOSE, name
    assert all(ways(waited).values())


# ---------------------------------------------------------------------- two ranks


@pytest.mark.wide(2)
@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "tier"), [(0, "disk"), (2, "auto"), (3, "disk"), (3, "auto")])
def test_two_ranks(stage: int, tier: str, disk_folder: Path) -> None:
    given: dict[str, Any] = {"path": str(disk_folder), "stage_bytes": 4096, "threads": 2}
    offload = zs.Offload("disk", **given) if tier == "disk" else thirds({"stage": stage}, 2, **given)
    result = trained(2, SHORT, stage, offload, None, "delayed", 1)
    distance, name = furthest(result.weights, plain_once(SHORT, 2).weights)
    assert distance <= CLOSE, name
    assert all(ways(result).values())
    if tier == "disk":
        assert_same_bits(result.weights, trained(2, SHORT, stage, parts(), None, "waited").weights)
    else:
        assert {state for state, _ in result.rests} == {"device", "host", "disk"}
