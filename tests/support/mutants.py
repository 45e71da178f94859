"""Mutants: checkpoints, and files of other libraries, that an enemy or a bad disk has changed.

Each is handed to everything that reads it. What comes out is a result or a `CheckpointError`; any other
exception ends the test, with the mutant's number. Nothing is written outside of the folder given.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from zeroshard import cli
from zeroshard.checkpoint import (
    HeldRows,
    NoPeers,
    RunSnapshot,
    export,
    import_weights,
    latest,
    load,
    save,
    verify,
)
from zeroshard.checkpoint.manifest import decode
from zeroshard.checkpoint.sources import open_source
from zeroshard.checkpoint.tensor_file import parse_header
from zeroshard.errors import CheckpointError

FILE = "rank-00000-of-00001.safetensors"
POISON = (
    None, True, -1, 0, 1, 1 << 31, 1 << 59, 1 << 63, 1 << 200, 0.5, 1e308, "", "x", "../../x",
    "\ud800", "0" * 64, [], {}, [[]], [0], [0, 1 << 58],
    {"$tensor": "x"}, {"$pairs": [[[], 0]]}, {"$bytes": "é"}, [[[[[[[]]]]]]],
)  # fmt: skip


@dataclass
class Tried:
    """How many mutants there were, and how many of them the first check refused."""

    mutants: int = 0
    refused: int = 0

    @property
    def accepted(self) -> int:
        return self.mutants - self.refused


class Fuzz(Exception):
    """Something else than our own error came out."""


def attempt(number: int, work: Callable[[], object]) -> bool:
    """Whether `work` succeeded; a `CheckpointError` is as good."""
    try:
        work()
    except CheckpointError:
        return False
    except Exception as error:
        raise Fuzz(f"mutant {number}: {type(error).__name__}: {error}") from error
    return True


def signed(text: bytes) -> bytes:
    """A manifest with a right checksum, whatever it says."""
    start = text.find(b'{"checksum":"') + 13
    if start < 13 or len(text) < start + 8:
        return text
    zeroed = text[:start] + b"00000000" + text[start + 8 :]
    return text[:start] + b"%08x" % zlib.crc32(zeroed) + text[start + 8 :]


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    found = []
    todo = [tree]
    while todo:
        item = todo.pop()
        pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, child in pairs:
            found.append((item, key))
            todo.append(child)
    return found


def poisoned(tree: Any, chance: random.Random) -> Any:
    """A copy of a tree with one to three of its nodes replaced, removed or doubled."""
    tree = json.loads(json.dumps(tree))
    for _ in range(chance.randint(1, 3)):
        places = nodes(tree)
        if not places:
            return tree
        container, key = chance.choice(places)
        way = chance.random()
        if way < 0.7:
            container[key] = copy.deepcopy(chance.choice(POISON))
        elif way < 0.85:
            del container[key]
        elif isinstance(container, list):
            container.insert(key, container[key])
    return tree


def scrambled(text: bytes, chance: random.Random) -> bytes:
    """The text with a few bytes changed, inserted, removed, or its end cut off."""
    data = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data)) if data else 0
        way = chance.random()
        if way < 0.4 and data:
            data[at] = chance.randrange(256)
        elif way < 0.6:
            data[at:at] = chance.choice([b"9", b"-", b"[", b"}", b'"', b"\x00", b"1e9", b"\\ud800"])
        elif way < 0.8:
            del data[at : at + chance.randint(1, 9)]
        else:
            del data[at:]
    return bytes(data)


# ---------------------------------------------------------------------- our own files


def small(folder: Path) -> tuple[bytes, RunSnapshot]:
    tensors = [
        HeldRows.of("w", "parameter", torch.ones(5, 2)),
        HeldRows.of("s", "state:step", torch.ones(())),
    ]
    values = {
        "step": 4,
        "options": {"stage": 2, "offload": {"type": "Offload"}},
        "plan": "{}",
        "extra": {"t": torch.ones(3), "nan": float("nan"), "pairs": {1: (2,)}, "raw": b"x"},
    }
    save(folder, RunSnapshot(tensors, values, {"seed": 1}), NoPeers())
    return (folder / "manifest.json").read_bytes(), RunSnapshot(tensors)


def mutated_manifest(text: bytes, tree: Any, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return signed(scrambled(text, chance))
    data = poisoned(tree, chance)
    line = json.dumps(data).replace('{"checksum": "', '{"checksum":"', 1)
    return signed(line.encode())


def fuzz_manifests(folder: Path, count: int, seed: int) -> Tried:
    """Loaded, verified, listed, inspected and exported."""
    chance, tried = random.Random(seed), Tried()
    text, targets = small(folder / "1")
    tree = json.loads(text)
    before = sorted(os.listdir(folder))
    for number in range(count):
        tried.mutants += 1
        mutant = mutated_manifest(text, tree, chance)
        if not attempt(number, lambda mutant=mutant: decode(mutant, "mutant")):
            tried.refused += 1
            continue
        (folder / "1" / "manifest.json").write_bytes(mutant)
        attempt(number, lambda: load(folder / "1", targets, NoPeers(), strict=False))
        attempt(number, lambda: verify(folder / "1"))
        attempt(number, lambda: latest(folder))
        if tried.accepted <= count // 200:  # these write, or print tables
            if attempt(number, lambda: export(folder / "1", folder / "out")):
                for name in os.listdir(folder / "out"):
                    os.unlink(folder / "out" / name)
                os.rmdir(folder / "out")
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                attempt(number, lambda: cli.main(["inspect", str(folder / "1")]))
                attempt(number, lambda: cli.main(["inspect", str(folder / "1"), "--plan"]))
    assert sorted(os.listdir(folder)) == before
    assert sorted(os.listdir(folder / "1")) == ["manifest.json", FILE]
    return tried


def fuzz_headers(folder: Path, count: int, seed: int) -> Tried:
    """Read as a source of weights, and imported."""
    chance, tried = random.Random(seed), Tried()
    small(folder / "1")
    data = (folder / "1" / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    tree = json.loads(header)
    path = folder / "mutant.safetensors"
    for number in range(count):
        tried.mutants += 1
        mutant = scrambled(header, chance) if number % 2 else json.dumps(poisoned(tree, chance)).encode()
        odd = chance.choice([0, 1, 1 << 40, (1 << 64) - 1, len(mutant) + 9])
        held_lock = len(mutant) if chance.random() < 0.95 else odd
        raw = struct.pack("<Q", held_lock) + mutant
        if not attempt(number, lambda raw=raw: parse_header(raw, len(raw) + len(body), path)):
            tried.refused += 1
            continue
        path.write_bytes(raw + body)
        attempt(number, lambda: read_all(path))
        if tried.accepted <= 50:
            attempt(number, lambda: import_weights(path, folder / "out"))
    assert set(os.listdir(folder)) == {"1", "mutant.safetensors", "out"}
    return tried


def read_all(source: Path) -> None:
    with open_source(source) as found:
        for item in found:
            item.read(0, item.shape[0] if item.shape else 1)


# ---------------------------------------------------------------------- files of other libraries


def fuzz_sources(folder: Path, count: int, seed: int) -> Tried:
    """State dicts of torch.save, metadata of torch.distributed.checkpoint, indexes of Hugging Face."""
    chance, tried = random.Random(seed), Tried()
    weights = {"w": torch.arange(10.0).view(5, 2), "b": torch.ones(3, dtype=torch.bfloat16)}
    torch.save(weights, folder / "w.pt")
    with warnings.catch_warnings(action="ignore"):  # it says that there is no process group
        dcp.save({"model": weights}, checkpoint_id=folder / "dcp", no_dist=True)
    save(folder / "1", RunSnapshot([HeldRows.of(n, "parameter", t) for n, t in weights.items()]), NoPeers())
    export(folder / "1", folder / "hf", max_shard_bytes=45)
    victims = [
        (folder / "w.pt", folder / "w.pt"),
        (folder / "dcp" / ".metadata", folder / "dcp"),
        (folder / "dcp" / "__0_0.distcp", folder / "dcp"),
        (folder / "hf" / "model.safetensors.index.json", folder / "hf"),
    ]
    good = [victim.read_bytes() for victim, _ in victims]
    for number in range(count):
        which = number % len(victims)
        victim, source = victims[which]
        tried.mutants += 1
        victim.write_bytes(scrambled(good[which], chance))
        if not attempt(number, lambda source=source: read_all(source)):
            tried.refused += 1
        victim.write_bytes(good[which])
    for _, source in victims:  # the tools change nothing by themselves
        read_all(source)
    assert set(os.listdir(folder)) == {"w.pt", "dcp", "1", "hf"}
    return tried


def peak_bytes() -> int:
    """The most memory that this process has had."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
