"""Where the disk tier cannot work: refused before training, nothing left behind by a kill, and failures of
its threads raised in the training thread."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from offload_loop import batch, make_model, on_disk

import zeroshard as zs
from zeroshard.testing import ranks
from zeroshard.tiers import ScratchFile, scratch_file
from zeroshard.tiers.scratch_file import filesystem_of, sweep

Options = dict[str, Any]


# ---------------------------------------------------------------------- refused before training


def sharded(offload: zs.Offload, **options: Any) -> zs.Run:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zs.shard(model, optimizer, offload=offload, **{"clip_norm": 1.0} | options)


def test_a_missing_folder(tmp_path: Path) -> None:
    told = r"needs 2\d\d\.\d KiB a rank, and .*/absent does not exist: create it \(mkdir -p .*/absent\), or"
    with pytest.raises(zs.TierError, match=told):
        sharded(on_disk(tmp_path / "absent"))
    (tmp_path / "file").write_text("")
    with pytest.raises(zs.TierError, match=r"/file is not a folder: pass path="):
        sharded(on_disk(tmp_path / "file"))


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or filesystem_of("/dev/shm") != "tmpfs", reason="no tmpfs")
def test_a_ram_disk() -> None:
    with pytest.raises(zs.TierError, match=r"/dev/shm is on a RAM disk \(tmpfs\).*optimizer=\"host\""):
        sharded(on_disk(Path("/dev/shm")))


def test_a_mount_table_names_the_file_system(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
        "23 22 0:5 / /fast\\040disk rw shared:1 - tmpfs tmpfs rw\n"
        "24 22 0:6 / /fast rw - xfs /dev/sdb rw\n"
    )
    for path, kind in (("/fast disk/x", "tmpfs"), ("/fast/x", "xfs"), ("/faster", "ext4"), ("/", "ext4")):
        assert filesystem_of(path, str(table)) == kind
    assert filesystem_of("/", str(tmp_path / "none")) == ""


def test_a_folder_that_cannot_be_written(disk_folder: Path) -> None:
    with (
        patch.object(scratch_file.os, "access", return_value=False),
        pytest.raises(zs.TierError, match="cannot be written by this user: pass another path="),
    ):
        sharded(on_disk(disk_folder))


def test_a_folder_that_cannot_be_listed(disk_folder: Path) -> None:
    """Of another user, as a rule: then nothing can be written there either."""
    with (
        patch.object(scratch_file.os, "scandir", side_effect=PermissionError(errno.EACCES, "no")),
        patch.object(scratch_file.os, "access", return_value=False),
        pytest.raises(zs.TierError, match="cannot be written by this user: pass another path="),
    ):
        sharded(on_disk(disk_folder))


def test_a_full_disk_told_by_its_free_bytes(disk_folder: Path) -> None:
    told = r"needs 2\d\d\.\d KiB \(\d+ bytes\) a rank, and .* has 9\.8 KiB free: make room"
    with (
        patch.object(scratch_file, "free_bytes", return_value=10_000),
        pytest.raises(zs.TierError, match=told),
    ):
        sharded(on_disk(disk_folder))


def test_a_disk_that_is_full_after_all(disk_folder: Path) -> None:
    """Free bytes that others take meanwhile, or that a quota withholds: the blocks are reserved before
    training."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        patch.object(scratch_file.os, "posix_fallocate", side_effect=full),
        pytest.raises(zs.TierError, match="free: make room there, pass path= of another disk"),
    ):
        sharded(on_disk(disk_folder))
    other = OSError(errno.EIO, "Input/output error")
    with (
        patch.object(scratch_file.os, "posix_fallocate", side_effect=other),
        pytest.raises(zs.TierError, match=r"no scratch file could be made in .*Input/output error"),
    ):
        sharded(on_disk(disk_folder))


def full_on_rank_one(path: str) -> str:
    import torch.distributed as dist

    offload = zs.Offload("disk", path=path if dist.get_rank() == 0 else f"{path}/absent")
    with pytest.raises(zs.TierError) as caught:
        sharded(offload)
    return str(caught.value)


@pytest.mark.ranks
def test_a_rank_without_room_raises_on_all(disk_folder: Path) -> None:
    told = ranks(2).run(full_on_rank_one, str(disk_folder))
    assert told[0] == told[1]
    assert re.match(r"rank 1: .*absent does not exist", told[0])


UNFIT: list[tuple[Options, Options, str]] = [
    ({"optimizer": torch.optim.RMSprop}, {}, r"for `tokens\.weight` they know Adam, .*RMSprop"),
    ({}, {"precision": zs.Precision("float64", "float64")}, r"its master is torch\.float64, not fp32"),
]


@pytest.mark.parametrize(("made", "options", "message"), UNFIT)
def test_updates_that_the_kernels_do_not_know(
    made: Options, options: Options, message: str, disk_folder: Path
) -> None:
    model = make_model()
    optimizer = made.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-3)
    with pytest.raises(zs.OptionError, match=message):
        zs.shard(model, optimizer, offload=on_disk(disk_folder), **options)


def parameters_of_two(path: str) -> str:
    with pytest.raises(zs.OptionError) as caught:
        sharded(zs.Offload("disk", parameters="disk", path=path), stage=3)
    return str(caught.value)


@pytest.mark.ranks
def test_parameters_on_the_disk_are_for_one_rank(disk_folder: Path) -> None:
    told = ranks(2).run(parameters_of_two, str(disk_folder))
    assert told[0] == told[1]
    assert "is for one rank, and these are 2: peers read rows from memory." in told[0]


def test_a_disk_without_direct_io_is_told(disk_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with patch.object(ScratchFile, "_go_direct", return_value=False), caplog.at_level(logging.WARNING):
        run = sharded(on_disk(disk_folder))
    run.close()
    assert "has no direct I/O: the disk tier goes through the page cache" in caplog.text


# ---------------------------------------------------------------------- nothing left behind

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from offload_loop import batch, make_model
import zeroshard as zs
from zeroshard.tiers import scratch_file
def started():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = zs.Offload("disk", path={path!r}, stage_bytes=4096, threads=1)
    return model, optimizer, zs.shard(model, optimizer, offload=offload, clip_norm=1.0)
one = started()
print(len(os.listdir({path!r})), flush=True)
del os.O_TMPFILE  # a file system that can take the name away from no open file
scratch_file.os.unlink = lambda name: (_ for _ in ()).throw(OSError("busy"))
other = started()
for step in range(1000000):
    for model, optimizer, _ in (one, other):
        model(batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if step == 2:
        print(len(os.listdir({path!r})), flush=True)
"""


def test_a_killed_run_leaves_nothing_that_the_next_start_does_not_remove(disk_folder: Path) -> None:
    """A file without a name goes with its process. One that had to keep its name is removed by the next
    start, and by no other before."""
    text = SCRIPT.format(tests=str(Path(__file__).parents[1] / "support"), path=str(disk_folder))
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n", "no name"
    assert process.stdout.readline() == "1\n"
    assert sweep(str(disk_folder)) == [], "its owner lives"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=300)
    process.stdout.close()
    assert len(list(disk_folder.iterdir())) == 1
    sharded(on_disk(disk_folder)).close()
    assert list(disk_folder.iterdir()) == []


def test_a_file_that_keeps_its_name_goes_when_it_is_closed(disk_folder: Path) -> None:
    with patch.object(scratch_file.os, "unlink", side_effect=OSError("busy")), ExitStack() as stack:
        nameless = scratch_file.os.O_TMPFILE
        del scratch_file.os.O_TMPFILE
        stack.callback(setattr, scratch_file.os, "O_TMPFILE", nameless)
        kept = ScratchFile(disk_folder, 8192)
    assert [path.suffix for path in disk_folder.iterdir()] == [".scratch"]
    kept.close()
    assert list(disk_folder.iterdir()) == []


def test_close_gives_the_disk_back(disk_folder: Path) -> None:
    run = sharded(on_disk(disk_folder))
    paging = run._runtime.host.paging  # type: ignore[union-attr]
    assert paging is not None
    descriptor = paging.scratch.fd
    os.fstat(descriptor)
    run.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# ---------------------------------------------------------------------- failures of its threads


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("parameters", ["device", "disk"])
@pytest.mark.parametrize("calls", [3, 60])
def test_a_disk_that_fails_while_training(what: str, parameters: Any, calls: int, disk_folder: Path) -> None:
    """Raised in the training thread, with the names of the parameters; and `close` ends all threads."""
    import threading

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = set(threading.enumerate())
    offload = on_disk(disk_folder, parameters=parameters)
    run = zs.shard(model, optimizer, offload=offload, clip_norm=1.0)
    real, left = getattr(ScratchFile, what), [calls]

    def failing(self: ScratchFile, memory: memoryview, offset: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "the roof is on fire")
        real(self, memory, offset)

    with ExitStack() as stack:
        stack.enter_context(patch.object(ScratchFile, what, failing))
        caught = stack.enter_context(pytest.raises(zs.TierError, match="the roof is on fire"))
        for step in range(40):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert re.search(r"`(blocks\.\d|tokens|norm|head)[\w.]*` … `", str(caught.value)), "which parameters"
    with pytest.raises(zs.TierError, match="the roof is on fire"):
        run.close()
    end = time.monotonic() + 120
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.05)
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_disk_that_fails_while_parameters_are_looked_at(what: str, disk_folder: Path) -> None:
    run = sharded(on_disk(disk_folder))
    failing = patch.object(ScratchFile, what, side_effect=OSError(errno.EIO, "the roof is on fire"))
    told = r"the disk tier failed at `[\w.]+` … `[\w.]+`: OSError: .*the roof is on fire"
    with failing, pytest.raises(zs.TierError, match=told), run.gathered("head.weight", write=True):
        pass
    run.close()


class Unfilled(torch.nn.Module):
    """Nothing can be put in its place on the meta device, and `shard` finds that out unit by unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.empty(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ self.weight


def test_a_run_that_cannot_be_built_leaves_no_thread_and_can_be_tried_again(
    disk_folder: Path,
) -> None:
    import threading

    with torch.device("meta"):
        model = Unfilled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = set(threading.enumerate())
    with pytest.raises(zs.ModelError, match=r"`weight` is on the meta device"):
        zs.shard(model, optimizer, offload=on_disk(disk_folder), clip_norm=1.0)
    assert set(threading.enumerate()) <= before

    def fill(module: torch.nn.Module) -> None:
        for tensor in module._parameters.values():
            tensor.fill_(0.5)  # type: ignore[union-attr]

    run = zs.shard(model, optimizer, init=fill, offload=on_disk(disk_folder), clip_norm=1.0)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    run.close()
    assert model.weight.shape == (8, 8)
