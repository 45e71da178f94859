"""Every tier × stage × number of ranks × accumulation × master, against the plain order and against PyTorch.

    python benchmarks/exact/offload_exact.py --path /scratch --out          # all of it, some minutes
    python benchmarks/exact/offload_exact.py --quick --path /scratch        # a few cells
    python benchmarks/exact/offload_exact.py --device cuda --path /scratch  # real streams; two ranks share it

Each cell trains 50 steps, in some of which clipping is active: expected, unexpected (the update is taken
back), and after a calm step. It is run overlapped with random delays in copies, requests of the disk and
updates, and once more with every part waited for as soon as it begins. What must hold:

- `bits`: the delayed run has the bits of the waited one. State on the host or the disk: of the waited run
  with everything in host memory. `auto`: of its own waited run, because state on the device is updated by
  torch, which rounds its last bit otherwise than the kernel.
- `torch`: in fp32 no weight is further than 1e-6 from plain PyTorch's AdamW with `clip_grad_norm_`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks/shared", "src", "tests/support")]

import provenance  # noqa: E402
import torch  # noqa: E402
from offload_loop import Case, Pace, Trained, furthest, offloaded, plain, repeatable, thirds  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.testing import ranks  # noqa: E402

CLOSE = 1e-6
TIERS = ("host", "disk", "disk, parameters too", "auto")
MASTERS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "fp32": (None, {}),
    "bf16, split master": ("bf16", {"master": "split"}),
}
SMALL = {"stage_bytes": 4096, "threads": 2}
plain_once = cache(plain)


@dataclass
class Cell:
    """One combination, and what was found."""

    tier: str
    stage: int
    world: int
    accumulate: int
    master: str
    bits: bool = False
    distance: float | None = None
    updates: dict[str, int] = field(default_factory=dict)
    rests: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        clipped = all(self.updates.values()) and bool(self.updates)
        spread = self.tier != "auto" or len(self.rests) == 3
        return self.bits and clipped and spread and (self.distance is None or self.distance <= CLOSE)


def train(world: int, case: Case, options: dict[str, Any], sync_strategy: Pace, seed: int = 0) -> Trained:
    if world == 1:
        return offloaded(case, options, sync_strategy, seed)
    told: list[Trained] = ranks(world).run(offloaded, case, options, sync_strategy, seed)
    if not same(told[0], told[1]):
        raise AssertionError("the ranks differ from one another")
    return told[0]


def same(one: Trained, other: Trained) -> bool:
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def options_of(cell: Cell, path: str, tier: str) -> dict[str, Any]:
    precision, given = MASTERS[cell.master]
    options: dict[str, Any] = {"stage": cell.stage, "precision": precision}
    given = {**SMALL, **given, **({} if tier == "host" else {"path": path})}
    if tier == "auto":
        offload = thirds(options, cell.world, **given)
    elif tier == "host":
        offload = zs.Offload(**given)
    else:
        offload = zs.Offload("disk", parameters="device" if tier == "disk" else "disk", **given)
    return options | {"offload": offload}


@cache
def waited(place: tuple[Any, ...], device: str, path: str) -> Trained:
    """The plain order: nothing overlaps. `place`: the first fields of a cell."""
    cell = Cell(*place)
    case = Case(accumulate=cell.accumulate, device=device)
    return train(cell.world, case, options_of(cell, path, cell.tier), "waited")


def prepare(device: str) -> None:
    torch.set_num_threads(1)
    repeatable(device)


def check(cell: Cell, path: str, device: str, seed: int) -> Cell:
    """The cell with what was found."""
    begun, case = time.perf_counter(), Case(accumulate=cell.accumulate, device=device)
    result = train(cell.world, case, options_of(cell, path, cell.tier), "delayed", seed)
    against = "auto" if cell.tier == "auto" else "host"
    place = against, cell.stage, cell.world, cell.accumulate, cell.master
    reference = waited(place, device, path)
    cell.bits = same(result, reference) and result.losses == reference.losses
    if cell.master == "fp32":
        cell.distance = furthest(result.weights, plain_once(case, cell.world).weights)[0]
    assert result.stats is not None
    cell.updates = result.stats.updates
    cell.rests = sorted({state for state, _ in result.rests})
    cell.seconds = round(time.perf_counter() - begun, 2)
    return cell


def cells(quick: bool, worlds: list[int]) -> list[Cell]:
    made = []
    product = itertools.product(TIERS, (0, 1, 2, 3), worlds, (1, 2), MASTERS)
    for tier, stage, world, accumulate, master in product:
        if tier == "disk, parameters too" and world > 1:
            continue  # one rank alone reads parameters from the disk
        made.append(Cell(tier, stage, world, accumulate, master))
    return made[:: len(made) // 6] if quick else made


def table(done: list[Cell]) -> str:
    lines = [
        "| state rests on | master | ranks | stage | accumulated | bits | furthest from torch | early, late, "
        "undone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in done:
        far = "" if cell.distance is None else f"{cell.distance:.1e}"
        bits = "equal" if cell.bits else "**differ**"
        counts = ", ".join(map(str, cell.updates.values()))
        place = f"{cell.tier} | {cell.master} | {cell.world} | {cell.stage} | {cell.accumulate}"
        lines.append(f"| {place} | {bits} | {far} | {counts} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path("."), help="a folder on a disk")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, a process each")
    parser.add_argument("--out", action="store_true", help="write results/DEVICE-offload-exact")
    options = parser.parse_args()
    asked = [
        (cell, str(options.path.resolve()), options.device, number)
        for number, cell in enumerate(cells(options.quick, options.ranks))
    ]
    done = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=prepare, initargs=(options.device,)) as pool:
        for cell in pool.map(check, *zip(*asked, strict=True)):
            done.append(cell)
            print("ok  " if cell.holds else "FAIL", cell, flush=True)
    failed = [cell for cell in done if not cell.holds]
    verdict = f"{len(done) - len(failed)} of {len(done)} cells hold."
    print(table(done), verdict, sep="\n\n")
    if options.out:
        name = provenance.RESULTS / f"{options.device}-offload-exact"
        head = provenance.preamble("Offload is exact", "the small GPT of `tests/support/offload_loop.py`")
        about = f"50 steps each, random delays in copies, disk requests and updates. {verdict}"
        name.with_suffix(".md").write_text("\n".join([*head, about, "", table(done)]) + "\n")
        name.with_suffix(".json").write_text(json.dumps([asdict(cell) for cell in done], indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
