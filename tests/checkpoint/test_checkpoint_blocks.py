"""Blocks: checksums as zlib has them, threads side by side, rows that are read straight into their place."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import zlib
from pathlib import Path

import pytest
import torch

from zeroshard.checkpoint import (
    HeldRows,
    NoPeers,
    RunSnapshot,
    Saver,
    durable_files,
    load,
    read_manifest,
    save,
    staging,
)
from zeroshard.errors import CheckpointError
from zeroshard.kernels import checksum, copy_crc32, crc32, library

ROWS, WIDTH = 301, 96  # of float32: 384 bytes a row, ten rows a block below


@pytest.mark.parametrize("small", [1, 1 << 14])
def test_checksums_are_those_of_zlib(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(checksum, "_SMALL", small)
    draw = random.Random(3)
    for count in [0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 1000, 16384, 99_999]:
        data = memoryview(bytearray(draw.randbytes(count + 5)))[5:]
        before = draw.getrandbits(32)
        assert crc32(data, before) == zlib.crc32(data, before), count
        assert crc32(data) == zlib.crc32(data), count
        assert crc32(memoryview(bytes(data))) == zlib.crc32(data), "memory that must not be written"


@pytest.mark.parametrize("kernels", [True, False])
def test_a_copy_is_summed_on_the_way(monkeypatch: pytest.MonkeyPatch, kernels: bool) -> None:
    monkeypatch.setattr(checksum, "_SMALL", 1)
    if not kernels:
        monkeypatch.setattr(library, "kernels", lambda: None)
    draw = random.Random(4)
    room = memoryview(bytearray(120_000))
    for count in [0, 1, 15, 63, 64, 65, 127, 129, 1000, 16384, 99_999]:
        data = memoryview(bytearray(draw.randbytes(count + 5)))[5:]
        at = draw.randrange(1, 4096)
        room[:] = bytes(len(room))
        assert copy_crc32(room[at : at + count], data) == zlib.crc32(data), count
        assert room[at : at + count] == data, count
        assert not any(room[:at]), "bytes before it are left alone"
        assert not any(room[at + count :]), "and those behind it"
        assert copy_crc32(room[:count], memoryview(bytes(data))) == zlib.crc32(data), "read-only memory"


def pages(count: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, count * durable_files.PAGE))
    memory[:] = random.Random(5).randbytes(len(memory))
    return memory


@pytest.mark.parametrize("obstacle", ["none", "no such flag", "larger pages", "cut short"])
@pytest.mark.parametrize("size", [1, durable_files.PAGE, 5 * durable_files.PAGE - 7, 5 * durable_files.PAGE])
def test_pages_are_written_whatever_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str, size: int
) -> None:
    """Past the page cache, or through it from where that fails; never more than asked for."""
    monkeypatch.setattr(durable_files, "DIRECT", 2 * durable_files.PAGE)
    real, control = durable_files.write_at, fcntl.fcntl

    def switch(fd: int, command: int, flags: int = 0) -> int:
        if obstacle == "no such flag" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return control(fd, command, flags)

    def write(fd: int, data: memoryview, offset: int) -> int:
        if control(fd, fcntl.F_GETFL) & os.O_DIRECT:
            if offset % durable_files.PAGE or (obstacle == "larger pages" and offset):
                raise OSError(errno.EINVAL, "not aligned")
            if obstacle == "cut short" and offset and len(data) > durable_files.PAGE:
                return real(fd, data[: durable_files.PAGE], offset) - 96
        return real(fd, data, offset)

    monkeypatch.setattr(fcntl, "fcntl", switch)
    monkeypatch.setattr(durable_files, "write_at", write)
    data = pages(5)
    durable_files.write_pages(tmp_path / "file", data, size)
    assert (tmp_path / "file").read_bytes() == data[:size]


def test_other_errors_of_direct_writes_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(durable_files, "write_at", write)
    with pytest.raises(OSError, match="full"):
        durable_files.write_pages(tmp_path / "file", pages(1), 10)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(staging, "BLOCK", 4096)
    # Large enough for several blocks, small enough for several chunks; nothing is gathered.
    monkeypatch.setattr(staging, "CHUNK", 40_960)
    monkeypatch.setattr("zeroshard.checkpoint.loading.CHUNK", 40_960)
    monkeypatch.setattr("zeroshard.checkpoint.tensor_file._GATHER", 1024)


def records(whole: torch.Tensor) -> list[HeldRows]:
    return [HeldRows.of("small", "parameter", torch.arange(3.0)), HeldRows.of("w", "parameter", whole)]


def written(folder: Path) -> torch.Tensor:
    whole = torch.randn(ROWS, WIDTH)
    save(folder, RunSnapshot(records(whole)), NoPeers())
    return whole


@pytest.mark.usefixtures("threads")
def test_a_background_save_writes_the_same_bytes(tmp_path: Path) -> None:
    whole = torch.randn(ROWS, WIDTH)
    whole = torch.cat([whole, whole.t().contiguous().view(ROWS, WIDTH)]).t()  # rows that are not contiguous
    held = [*records(whole), HeldRows.of("half", "parameter", torch.randn(7).half())]
    save(tmp_path / "1", RunSnapshot(held), NoPeers())
    saver = Saver(NoPeers())
    saver.save(tmp_path / "2", RunSnapshot(held), background=True)
    saver.wait()
    name = "rank-00000-of-00001.safetensors"
    assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    one, two = (read_manifest(tmp_path / folder) for folder in "12")
    assert (one.files, one.entries) == (two.files, two.entries)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [(0, ROWS), (0, 10), (10, 30), (5, 8), (7, 294), (290, 301), (300, 301)])
def test_any_rows_arrive(tmp_path: Path, rows: tuple[int, int]) -> None:
    """Those of whole blocks straight into their memory, the others through a buffer."""
    whole = written(tmp_path / "c")
    mine = torch.full((rows[1] - rows[0], WIDTH), torch.nan)
    around = torch.full((ROWS + 2, WIDTH), torch.nan)
    inside = around[rows[0] + 1 : rows[1] + 1]
    for target in (mine, inside):
        small = torch.empty(3)
        held = [
            HeldRows.of("small", "parameter", small),
            HeldRows.of("w", "parameter", target, rows[0], ROWS),
        ]
        load(tmp_path / "c", RunSnapshot(held), NoPeers())
        assert torch.equal(target, whole[slice(*rows)])
        assert torch.equal(small, torch.arange(3.0))
    assert around.isnan().any(1).sum() == ROWS + 2 - len(mine), "rows of somebody else were written"


@pytest.mark.usefixtures("threads")
def test_a_flipped_bit_is_found_in_its_block(tmp_path: Path) -> None:
    written(tmp_path / "c")
    manifest = read_manifest(tmp_path / "c")
    entry = next(e for e in manifest.entries if e.name == "w")
    path = tmp_path / "c" / manifest.files[0].name
    with open(path, "r+b") as file:
        file.seek(entry.spans[0].offset + 57 * entry.row_bytes)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    held = [
        HeldRows.of("small", "parameter", torch.empty(3)),
        HeldRows.of("w", "parameter", torch.empty(ROWS, WIDTH)),
    ]
    with pytest.raises(CheckpointError, match=r"rows 50 to 60 of `w` \(parameter\) do not match"):
        load(tmp_path / "c", RunSnapshot(held), NoPeers())


@pytest.mark.usefixtures("threads")
def test_a_full_disk_is_told_from_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = durable_files.write_at

    def write(fd: int, data: memoryview, offset: int) -> int:
        if offset > 60_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(durable_files, "write_at", write)
    with pytest.raises(CheckpointError, match=r"No space left|full"):
        written(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
