"""Whatever happens to a checkpoint or a save: an error with file, tensors and a way out; old ones intact."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import ThreadPeers, blank, held, load_as, model, ranks, same, save_as, saved_once

from zeroshard.checkpoint import (
    HeldRows,
    NoPeers,
    RunSnapshot,
    durable_files,
    latest,
    load,
    read_manifest,
    save,
    verify,
)
from zeroshard.errors import CheckpointError

pytestmark = pytest.mark.threads
FILE = "rank-00000-of-00001.safetensors"


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Two good checkpoints."""
    for step in (1, 2):
        saved_once(tmp_path / str(step), step)
    return tmp_path


def refusal(path: Path) -> str:
    """What loading says."""
    with pytest.raises(CheckpointError) as caught:
        load_as(path, blank(model()))
    return str(caught.value)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(bytes(data))


def intact(shelf: Path, step: int = 1) -> bool:
    target = blank(model())
    load_as(shelf / str(step), target)
    return verify(shelf / str(step)).ok and same(target, model(step))


def test_a_truncated_file(shelf: Path) -> None:
    os.truncate(shelf / "2" / FILE, 700)
    text = refusal(shelf / "2")
    assert f"{shelf}/2/{FILE} has 700 bytes" in text
    assert "truncated (it holds rows of `" in text
    assert f"The latest complete checkpoint besides it is {shelf}/1." in text
    assert latest(shelf) == shelf / "1"
    assert intact(shelf)


def test_one_flipped_bit_anywhere_is_found(shelf: Path) -> None:
    file = shelf / "2" / FILE
    size = file.stat().st_size
    for at in (3, 100, size // 2, size - 1):
        flip(file, at)
        text = refusal(shelf / "2")
        assert str(file) in text
        assert f"{shelf}/1" in text
        assert not verify(shelf / "2").ok
        flip(file, at)
    assert intact(shelf, 2)


def test_a_flipped_bit_in_data_names_tensor_and_rows(shelf: Path) -> None:
    entry = read_manifest(shelf / "2").by_name["model"]["embed.weight"]
    flip(shelf / "2" / FILE, entry.spans[0].offset + 5)
    assert "rows 0 to 50 of `embed.weight` (parameter) do not match their checksum" in refusal(shelf / "2")
    report = verify(shelf / "2")
    assert len(report.problems) == 1
    assert "embed.weight" in report.problems[0]


def test_damage_that_one_rank_meets_is_raised_on_all(tmp_path: Path) -> None:
    save_as(tmp_path / "1", model(), 2)
    entry = read_manifest(tmp_path / "1").by_name["model"]["embed.weight"]
    flip(tmp_path / "1" / "rank-00001-of-00002.safetensors", entry.spans[1].offset)
    full = blank(model())
    texts = {str(r) for r in ranks(2, lambda p: load(tmp_path / "1", RunSnapshot(held(full, p.rank, 2)), p))}
    assert len(texts) == 1
    assert "rank 1: " in texts.pop()


def test_a_missing_rank_file(tmp_path: Path) -> None:
    save_as(tmp_path / "1", model(), 2)
    (tmp_path / "1" / "rank-00001-of-00002.safetensors").unlink()
    text = refusal(tmp_path / "1")
    assert "rank-00001-of-00002.safetensors failed: it is not there" in text
    assert "it holds rows of `embed.weight` (parameter)" in text
    assert "There is no complete checkpoint besides it" in text
    assert latest(tmp_path) is None


def test_an_edited_manifest(shelf: Path) -> None:
    path = shelf / "2" / "manifest.json"
    path.write_text(path.read_text().replace("embed.weight", "embed.height"))
    text = refusal(shelf / "2")
    assert "manifest.json does not match its own checksum: it was edited or damaged" in text
    assert f"{shelf}/1" in text
    assert latest(shelf) == shelf / "1"


def test_a_newer_format(shelf: Path) -> None:
    path = shelf / "2" / "manifest.json"
    path.write_text(path.read_text().replace('"version":1', '"version":7'))
    assert "has format version 7, and this ZeroShard reads up to 1" in refusal(shelf / "2")
    assert latest(shelf) == shelf / "1"


def test_no_manifest(shelf: Path) -> None:
    (shelf / "2" / "manifest.json").unlink()
    text = refusal(shelf / "2")
    assert f"{shelf}/2 holds 1 rank files and no manifest.json, so its save did not finish." in text
    assert f"The latest complete checkpoint besides it is {shelf}/1." in text


def test_a_folder_of_checkpoints_is_not_one(shelf: Path) -> None:
    assert f"It holds checkpoints, for example {shelf}/2" in refusal(shelf)
    assert "is not a folder" in refusal(shelf / "nothing")


def test_a_checkpoint_of_another_model(shelf: Path) -> None:
    other = {
        ("parameter", "module." + name) if kind == "parameter" else (kind, name): tensor
        for (kind, name), tensor in model().items()
    }
    with pytest.raises(CheckpointError) as caught:
        load_as(shelf / "2", other)
    text = str(caught.value)
    assert "6 tensors are not in it: `module.embed.weight` (parameter), " in text
    assert "and 3 more" in text
    assert "it has `embed.weight`: did you mean that" in text
    assert "6 of its tensors are not in this run" in text
    assert "strict=False" in text


def test_another_shape_is_refused_even_when_not_strict_and_nothing_is_overwritten(shelf: Path) -> None:
    other = blank(model())
    other["parameter", "embed.weight"] = torch.zeros(51, 8)
    for strict in (True, False):
        with pytest.raises(
            CheckpointError, match=r"`embed.weight` \(parameter\) is \(50, 8\) float32 there and \(51, 8\)"
        ):
            load_as(shelf / "2", other, strict=strict)
    assert not any(tensor.any() for tensor in other.values())


def test_not_strict_loads_what_agrees(shelf: Path) -> None:
    some = {("parameter", "embed.weight"): torch.zeros(50, 8), ("parameter", "new"): torch.full((2,), 5.0)}
    loaded = load_as(shelf / "2", some, strict=False)[0]
    assert torch.equal(some["parameter", "embed.weight"], model(2)["parameter", "embed.weight"])
    assert some["parameter", "new"].tolist() == [5.0, 5.0]
    assert loaded.absent == (("parameter", "new"),)
    assert ("state:exp_avg", "embed.weight") in loaded.unused


def test_ranks_that_see_different_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved_once(tmp_path / name / "1", seed=ord(name))
    full = blank(model())
    results = ranks(2, lambda p: load(tmp_path / "ab"[p.rank] / "1", RunSnapshot(held(full, p.rank, 2)), p))
    assert all("ranks see different checkpoints" in str(result) for result in results)


# Saves that fail.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def big(megabytes: int) -> RunSnapshot:
    return RunSnapshot([HeldRows.of("w", "parameter", torch.zeros(megabytes << 18))])


def refused_save(path: Path, snapshot: RunSnapshot, keep: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(path, snapshot, NoPeers(), keep=keep)
    return str(caught.value)


def test_too_little_room_is_seen_before_writing(small_disk: Path) -> None:
    saved_once(small_disk / "1")
    text = refused_save(small_disk / "2", big(3))
    assert f"saving to {small_disk}/2 needs 3.0 MiB and" in text
    assert "are free there. Free space, save elsewhere, or pass keep= to remove old checkpoints." in text
    assert f"The latest complete checkpoint besides it is {small_disk}/1." in text
    assert os.listdir(small_disk) == ["1"]


def test_a_disk_that_fills_up(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_once(small_disk / "1", 1)
    monkeypatch.setattr(durable_files, "free_bytes", lambda path: 1 << 40)
    text = refused_save(small_disk / "1", big(3))
    assert "the disk is full" in text
    assert FILE in text
    assert "It was at `w` (parameter)." in text
    assert f"{small_disk}/1 is as it was." in text
    assert os.listdir(small_disk) == ["1"]
    assert intact(small_disk)


def test_no_room_for_the_manifest(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(durable_files, "write_file", full)
    assert "manifest.json failed: the disk is full" in refused_save(shelf / "3", RunSnapshot(held(model())))
    assert sorted(os.listdir(shelf)) == ["1", "2"]


def test_a_file_size_limit_is_a_full_disk_of_its_own(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def limited(fd: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.EFBIG, "File too large")
        return os.write(fd, data[:10])  # a short write, as disks give when they are nearly full

    monkeypatch.setattr(durable_files, "write", limited)
    assert "ulimit -f" in refused_save(shelf / "3", RunSnapshot(held(model())))
    assert sorted(os.listdir(shelf)) == ["1", "2"]


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_files, "write", lambda fd, data: os.write(fd, data[:1000]))
    saved_once(tmp_path / "1", 1)
    assert intact(tmp_path)


def test_a_read_only_folder(small_disk: Path) -> None:
    saved_once(small_disk / "1", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    text = refused_save(small_disk / "2", RunSnapshot(held(model())))
    assert "the file system is read-only" in text
    assert f"{small_disk}/1" in text
    assert intact(small_disk)


def test_a_folder_without_permission(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", denied)
    assert "this user may not write" in refused_save(shelf / "3", RunSnapshot(held(model())))


def removing(what: Callable[[], None]) -> HeldRows:
    """A tensor whose reading removes something."""
    tensor = torch.zeros(10)

    def read(start: int, stop: int) -> torch.Tensor:
        what()
        return tensor[start:stop]

    return HeldRows("w", "parameter", (10,), "float32", (0, 10), read, lambda start, rows: None)


def test_the_folder_is_removed_while_saving(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    saved_once(shelf / "1", 1)
    text = refused_save(shelf / "2", RunSnapshot([removing(lambda: shutil.rmtree(shelf))]))
    assert (
        "failed: it is not there; if it was a moment ago, something removed it" in text
        or "is missing" in text
    )
    save(shelf / "2", RunSnapshot(held(model())), NoPeers())
    assert latest(shelf) == shelf / "2"


def test_only_the_unfinished_part_is_removed_while_saving(shelf: Path) -> None:
    text = refused_save(shelf / "3", RunSnapshot([removing(lambda: shutil.rmtree(shelf / ".3.saving"))]))
    assert "Nothing was saved" in text
    assert sorted(os.listdir(shelf)) == ["1", "2"]


def test_an_error_in_one_ranks_memory_is_raised_on_all(tmp_path: Path) -> None:
    def broken(start: int, stop: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access")

    def work(peers: ThreadPeers) -> None:
        read = broken if peers.rank == 1 else (lambda start, stop: torch.zeros(stop - start))
        rows = (5 * peers.rank, 5 * peers.rank + 5)
        record = HeldRows("w", "parameter", (10,), "float32", rows, read, lambda start, got: None)
        save(tmp_path / "1", RunSnapshot([record]), peers)

    results = ranks(2, work)
    assert all("rank 1: writing failed with RuntimeError: CUDA error" in str(result) for result in results)
    assert os.listdir(tmp_path) == []


def test_an_object_among_the_values_is_refused_on_all_ranks(tmp_path: Path) -> None:
    results = ranks(2, lambda p: save(tmp_path / "1", RunSnapshot([], {"model": torch.nn.Linear}), p))
    assert all("`model` is a builtins.type" in str(result) for result in results)


def test_reading_too_little_is_noticed(tmp_path: Path) -> None:
    short = HeldRows(
        "w", "parameter", (4,), "float32", (0, 4), lambda a, b: torch.zeros(3), lambda start, rows: None
    )
    assert "`w` (parameter): reading rows 0 to 4 gave 12 bytes, expected 16" in refused_save(
        tmp_path / "1", RunSnapshot([short])
    )


def test_what_is_not_a_checkpoint_is_never_replaced(shelf: Path) -> None:
    assert "exists and holds 1, 2, which a checkpoint does not consist of" in refused_save(
        shelf, RunSnapshot(held(model()))
    )
    (shelf / "notes").write_text("mine")
    assert "is a file or a link" in refused_save(shelf / "notes", RunSnapshot(held(model())))
    (shelf / "link").symlink_to(shelf / "1")
    assert "is a file or a link" in refused_save(shelf / "link", RunSnapshot(held(model())))
    (shelf / "2" / "notes").write_text("mine")
    assert "holds notes" in refused_save(shelf / "2", RunSnapshot(held(model())))
    assert intact(shelf, 1)
    assert intact(shelf, 2)


def test_replacing_keeps_the_old_one_until_the_new_one_is_complete(shelf: Path) -> None:
    seen = []

    def look() -> None:
        seen.append(intact(shelf, 2))

    save(shelf / "2", RunSnapshot([removing(look)]), NoPeers())
    assert seen == [True]
    assert [entry.name for entry in read_manifest(shelf / "2").entries] == ["w"]
    assert sorted(os.listdir(shelf)) == ["1", "2"]


def test_the_manifest_is_json_that_others_can_read(shelf: Path) -> None:
    data = json.loads((shelf / "2" / "manifest.json").read_text())
    assert data["format"] == "zeroshard-checkpoint"
    assert data["step"] == 2
    assert {entry[1] for entry in data["entries"]} >= {"embed.weight", "scale"}


def test_a_rank_that_dies_leaves_the_others_an_error_and_no_checkpoint(shelf: Path) -> None:
    """A peer that stops answering ends the exchange on the others, and the path is free again."""

    def work(peers: ThreadPeers) -> None:
        if peers.rank == 1:
            peers.exchange({"value": {"held": [], "own": {}, "parts": {}}, "error": None}, "describing")
            peers.barrier.abort()
            return
        save(shelf / "3", RunSnapshot([HeldRows.of("w", "parameter", torch.zeros(3))]), peers)

    results = ranks(2, work)
    assert isinstance(results[0], threading.BrokenBarrierError)
    assert sorted(os.listdir(shelf)) == ["1", "2"]


def half(kilobytes: int = 700) -> RunSnapshot:
    return RunSnapshot([HeldRows.of("w", "parameter", torch.zeros(kilobytes << 8))])


def test_the_oldest_goes_first_where_there_is_no_room_for_one_more_than_is_kept(small_disk: Path) -> None:
    for number in range(1, 5):
        saved = save(small_disk / f"step-{number}", half(), NoPeers(), keep=2)
        assert [path.name for path in saved.removed] == ([f"step-{number - 2}"] if number > 2 else [])
        assert verify(small_disk / f"step-{number}").ok
    assert sorted(os.listdir(small_disk)) == ["step-3", "step-4"]


def test_the_newest_complete_checkpoint_never_goes_first(small_disk: Path) -> None:
    save(small_disk / "step-1", half(1100), NoPeers())
    text = refused_save(small_disk / "step-2", half(1100), keep=1)
    assert (
        "keep fewer: keep=1 takes room for 2, since the newest complete checkpoint is never removed" in text
    )
    assert os.listdir(small_disk) == ["step-1"]
    assert verify(small_disk / "step-1").ok


def test_what_is_incomplete_goes_before_the_newest_complete_one(small_disk: Path) -> None:
    save(small_disk / "step-1", half(), NoPeers())
    save(small_disk / "step-2", half(), NoPeers())
    (small_disk / "step-2" / FILE).write_bytes(b"")  # broken, and newer
    os.truncate(small_disk / "step-2" / FILE, 0)
    save(small_disk / "step-3", half(), NoPeers(), keep=1)
    assert os.listdir(small_disk) == ["step-3"]


def test_nothing_goes_where_that_would_not_make_room_enough(small_disk: Path) -> None:
    for number in range(1, 4):
        save(small_disk / f"step-{number}", half(400), NoPeers())
    assert "needs 1.9 MiB" in refused_save(small_disk / "step-4", half(1950), keep=2)
    assert sorted(os.listdir(small_disk)) == ["step-1", "step-2", "step-3"]
