"""Checkpoints made by an enemy: only our own error comes out, nothing is written, memory stays bounded."""

from __future__ import annotations

import json
import os
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_ranks import blank, held, model, saved_once
from mutants import FILE, fuzz_headers, fuzz_manifests, fuzz_sources, signed

from zeroshard.checkpoint import (
    NoPeers,
    RunSnapshot,
    clean,
    export,
    import_weights,
    latest,
    load,
    read_manifest,
    verify,
)
from zeroshard.checkpoint.manifest import LIMIT
from zeroshard.checkpoint.tensor_file import HEADER_LIMIT
from zeroshard.errors import CheckpointError


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and sign it again."""
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    head = {key: data.pop(key) for key in ("checksum", "format", "version", "serial", "saved_at", "step")}
    text = json.dumps(head, separators=(",", ":"))[:-1] + ",\n" + json.dumps(data)[1:]
    (folder / "manifest.json").write_bytes(signed(text.encode()))


def refusal(folder: Path) -> str:
    """What loading says; verifying and exporting must refuse as well."""
    assert not verify(folder).ok
    with pytest.raises(CheckpointError):
        export(folder, folder.parent / "out")
    with pytest.raises(CheckpointError) as caught:
        load(folder, RunSnapshot(held(blank(model()))), NoPeers())
    assert not (folder.parent / "out").exists()
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved_once(tmp_path / "1")
    return tmp_path / "1"


@pytest.mark.parametrize(
    "name", ["../../secret", "/etc/passwd", "rank-00000-of-00001.safetensors\0", "..", "", "a/b"]
)
def test_names_that_lead_elsewhere(folder: Path, name: str) -> None:
    rewrite(folder, lambda data: data["files"][0].__setitem__(0, name))
    assert "which is not one of a checkpoint" in refusal(folder)


@pytest.mark.parametrize(
    "shape",
    [[1 << 59, 1 << 59], [-1], [1 << 70], [50.0, 8], ["50", 8], [50, True], [1] * 40, [1 << 50, 1 << 30, 0]],
)
def test_absurd_shapes(folder: Path, shape: list[Any]) -> None:
    rewrite(folder, lambda data: data["entries"][0].__setitem__(2, shape))
    assert "embed.weight" in refusal(folder)


@pytest.mark.parametrize("offset", [-8, 1 << 59, 1 << 80, 1.5, None])
def test_absurd_offsets(folder: Path, offset: Any) -> None:
    rewrite(folder, lambda data: data["entries"][0][4][0].__setitem__(3, offset))
    assert "embed.weight" in refusal(folder)


def test_a_tensor_that_held_locks_more_memory_than_there_is(folder: Path) -> None:
    """A terabyte of zeros is a few kilobytes on disk, with right checksums."""
    terabyte, block = 1 << 40, 1 << 26
    header = b'{"value:x[0:%d]":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % ((terabyte,) * 3)
    file = folder / FILE
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + terabyte)
    zeros = f"{zlib.crc32(bytes(block)):08x}"

    def change(data: dict[str, Any]) -> None:
        data["block"] = block
        sums = zeros * (terabyte // block)
        data["entries"] = [["value", "x", [terabyte], "uint8", [[0, terabyte, 0, 8 + len(header), sums]]]]
        data["files"] = [
            [FILE, 8 + len(header) + terabyte, f"{zlib.crc32(struct.pack('<Q', len(header)) + header):08x}"]
        ]
        data["values"] = {"x": [{"$tensor": "x"}] * 1000}

    rewrite(folder, change)
    with pytest.raises(CheckpointError, match="does not fit into memory"):
        load(folder, RunSnapshot([]), NoPeers())


def test_a_header_of_ten_gigabytes(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", 10_000_000_000))
    os.truncate(file, 10_000_000_100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="claims a header of 10000000000 bytes"):
        import_weights(file, tmp_path / "out")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    assert not (tmp_path / "out").exists()


def test_a_header_of_ten_gigabytes_in_a_rank_file(folder: Path) -> None:
    file = folder / FILE
    with open(file, "r+b") as open_file:
        open_file.write(struct.pack("<Q", 10_000_000_000))
    assert "claims a header" in refusal(folder)
    os.truncate(file, 10_000_000_100)
    rewrite(folder, lambda data: data["files"][0].__setitem__(1, 10_000_000_100))
    assert f"headers may have {HEADER_LIMIT}" in refusal(folder)


def test_manifests_that_would_eat_memory(folder: Path) -> None:
    path = folder / "manifest.json"
    os.truncate(path, LIMIT + 1)
    assert "a manifest has at most" in refusal(folder)
    path.write_bytes(b"[" + b"{}," * 5_000_000 + b"0]")
    assert "lists and objects" in refusal(folder)
    path.write_bytes(b"[" * 500_000)
    assert "nested too deeply" in refusal(folder)
    path.write_bytes(b'{"a":' + b"9" * 100_000 + b"}")
    assert "not valid JSON" in refusal(folder)
    path.write_bytes(b'{"a":NaN}')
    assert "NaN is not JSON" in refusal(folder)


def test_entries_are_parsed_a_few_lines_at_a_time_and_wherever_lines_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "manifest.json"
    raw, good = path.read_bytes(), read_manifest(folder)
    monkeypatch.setattr("zeroshard.checkpoint.manifest._BATCH", 1)
    assert read_manifest(folder) == good
    path.write_bytes(signed(raw.replace(b",[[0,", b",\n[[0,")))
    assert read_manifest(folder).entries == good.entries
    ends = {
        b'],"entries":{"a":[1': "is not valid JSON",
        b',"x"': "malformed tensor",
        b',\n"x"': "malformed tensor",
    }
    for end, said in ends.items():
        path.write_bytes(signed(raw[: -len(b"\n]}\n")] + end + b"\n]}\n"))
        assert said in refusal(folder)


def test_links_pipes_and_folders_in_place_of_files(folder: Path, tmp_path: Path) -> None:
    file, secret = folder / FILE, tmp_path / "secret"
    os.rename(file, secret)
    file.symlink_to(secret)
    assert "it is a link, and files of a checkpoint must not be links" in refusal(folder)
    file.unlink()
    os.mkfifo(file)
    assert "is not a regular file" in refusal(folder)
    file.unlink()
    file.mkdir()
    assert FILE in refusal(folder)
    manifest = folder / "manifest.json"
    os.rename(manifest, tmp_path / "elsewhere")
    manifest.symlink_to(tmp_path / "elsewhere")
    assert "it is a link" in refusal(folder)
    assert latest(tmp_path) is None


def test_a_save_never_writes_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / ".1.saving").symlink_to(outside)
    (tmp_path / "shelf" / f".x.removing-{'0' * 16}").symlink_to(outside)
    (outside / "precious").write_text("mine")
    saved_once(tmp_path / "shelf" / "1")
    clean(tmp_path / "shelf")
    assert os.listdir(outside) == ["precious"]


def test_names_with_control_characters_are_shown_escaped(folder: Path) -> None:
    evil = "\x1b[2J" + "x" * 100_000
    rewrite(folder, lambda data: data["entries"][0].__setitem__(1, evil))
    text = refusal(folder)
    assert "\x1b" not in text
    assert len(text) < 3000


# Ten thousand mutants; `benchmarks/checkpoints/fuzz.py` tries as many as one likes.


def test_six_thousand_mutated_manifests(tmp_path: Path) -> None:
    tried = fuzz_manifests(tmp_path, 6000, 20)
    assert tried.accepted > 100, "the mutations are too coarse to reach the code behind the checks"


def test_four_thousand_mutated_headers(tmp_path: Path) -> None:
    tried = fuzz_headers(tmp_path, 4000, 21)
    assert tried.accepted > 100, "the mutations are too coarse to reach the code behind the checks"


def test_mutated_files_of_other_libraries(tmp_path: Path) -> None:
    tried = fuzz_sources(tmp_path, 200, 22)
    assert tried.refused > 50
    assert tried.accepted > 5


def test_a_mutated_rank_file_under_a_manifest_that_vouches_for_it(folder: Path) -> None:
    """Header and manifest must agree even when the header's checksum is right."""
    file = folder / FILE
    data = file.read_bytes().replace(b'"shape":[50,8]', b'"shape":[8,50]')
    file.write_bytes(data)
    length = 8 + int.from_bytes(data[:8], "little")
    rewrite(folder, lambda tree: tree["files"][0].__setitem__(2, f"{zlib.crc32(data[:length]):08x}"))
    assert "the header and the manifest disagree about `embed.weight`" in refusal(folder)


def test_what_is_good_still_loads_after_signing_it_again(folder: Path) -> None:
    """The tools of this file change nothing by themselves."""
    rewrite(folder, lambda data: None)
    assert verify(folder).ok
    assert read_manifest(folder).head.step == 0
