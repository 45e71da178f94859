"""How much memory export, import and verify take, whatever the model.

python benchmarks/checkpoints/streaming.py --gigabytes 6 --out

A checkpoint is made without ever having it in memory; then `zeroshard export`, `import` and
`verify` run on it as processes of their own, whose peak of resident memory is measured. The half of the model
is one tensor.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import kept
import torch

from zeroshard.checkpoint import HeldRows, NoPeers, RunSnapshot, save

LIMIT = 2**30
WIDTH = 4096  # elements of a row


class Synthetic:
    """A tensor that is made as it is read: every row is its number."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.rows = name, rows

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, dtype=torch.float32).view(-1, 1).expand(-1, WIDTH).contiguous()

    def held(self) -> HeldRows:
        shape = (self.rows, WIDTH)
        return HeldRows(
            self.name, "parameter", shape, "float32", (0, self.rows), self.read, lambda at, rows: None
        )


def make(path: Path, total: int) -> None:
    rows = total // (4 * WIDTH)
    tensors = [Synthetic("embedding.weight", rows // 2)]
    tensors += [Synthetic(f"blocks.{i}.weight", rows // 20) for i in range(10)]
    save(path, RunSnapshot([tensor.held() for tensor in tensors], {"step": 1}), NoPeers())


# Resident memory from the program's start on; `ru_maxrss` would count that of the parent too.
CHILD = """
import sys
from pathlib import Path
from zeroshard.cli import main
code = main(sys.argv[1:])
status = Path("/proc/self/status").read_text()
print([line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")][0])
sys.exit(code)
"""


def command(words: Sequence[str]) -> dict[str, Any]:
    """Run `zeroshard` in a child; its seconds, processor seconds and peak of resident memory."""
    began, before = time.monotonic(), os.times()
    child = subprocess.run([sys.executable, "-c", CHILD, *words], stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise SystemExit(f"zeroshard {' '.join(words)} failed")
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {
        "command": " ".join(["zeroshard", words[0], *words[3:]]),
        "seconds": round(time.monotonic() - began, 1),
        "processor seconds": round(spent, 1),
        "peak of resident memory, MiB": int(child.stdout.split()[-1]) >> 10,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=6.0, help="of the model")
    parser.add_argument("--folder", type=Path, help="with three times the room (default: the temporary one)")
    parser.add_argument("--out", action="store_true", help="write benchmarks/results/streaming.json, .md")
    asked = parser.parse_args(arguments)
    model = f"{asked.gigabytes:g} GB in 11 tensors, half of it in one"
    facts = kept.facts("streaming: memory of export, import and verify", model)
    rows = []
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        checkpoint, weights, again = (str(Path(place, name)) for name in ("ckpt", "weights", "again"))
        make(Path(checkpoint), round(asked.gigabytes * 1e9))
        for words in (
            ["inspect", checkpoint],
            ["verify", checkpoint],
            ["export", checkpoint, weights],
            ["import", weights, again],
            ["export", checkpoint, f"{weights}-16", "--dtype", "bf16"],
        ):
            rows.append(command(words))
            print(rows[-1], flush=True)
    most = max(row["peak of resident memory, MiB"] for row in rows)
    found = {
        **facts,
        "limit": f"1 GiB: {'met' if most * 2**20 < LIMIT else 'MISSED'}, at most {most} MiB",
        "rows": rows,
    }
    text = kept.show(
        found, [*kept.table(rows), "", "`inspect` reads no weights: it is what torch takes alone."]
    )
    print(text)
    if asked.out:
        kept.keep("streaming", found, text)
    return int(most * 2**20 >= LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
