"""The disk tier in a loop: composed with what loops do, refused before training where it cannot be, nothing
left behind by a kill, and failures of its threads raised in the training thread."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from offload_case import batch, make_model, thirds
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import assert_same_bits, ranks
from zeroshard.tier import Scratch, folder, scratch
from zeroshard.tier.folder import filesystem_of
from zeroshard.tier.scratch import sweep

STEPS = 8
Options = dict[str, Any]


def on_disk(path: Path, **given: Any) -> zs.Offload:
    return zs.Offload("disk", path=str(path), stage_bytes=4096, threads=2, **given)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def tiers(path: Path) -> list[zs.Offload]:
    """State alone, and parameters too."""
    return [on_disk(path), on_disk(path, parameters="disk")]


# ---------------------------------------------------------------------- loops


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_state_dict_has_what_is_on_the_disk(
    precision: str | None, clip_norm: float | None, disk_folder: Path
) -> None:
    """Of the model or of one module; homes themselves may show NaN. It loads back."""
    for offload in tiers(disk_folder):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = zs.shard(model, optimizer, offload=offload, precision=precision, clip_norm=clip_norm)
        model(batch(0, 0)).backward()
        optimizer.step()
        with run.gathered() as whole:
            expected = {name: p.detach().clone() for name, p in whole.items()}
        found = model.state_dict()
        assert_same_bits({name: found[name] for name in expected}, expected)
        for place, module in model.named_modules():
            for name, value in module.state_dict(prefix=f"{place}." if place else "").items():
                assert torch.equal(value, found[name])
        model.load_state_dict({name: 2 * value for name, value in found.items()})
        run.close()
        assert_same_bits(weights(model), {name: 2 * value for name, value in expected.items()})


def scaled_loop(offload: zs.Offload | None) -> tuple[dict[str, Tensor], list[float]]:
    """fp16 with GradScaler and plain clipping; the scale of the second step is too large."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = zs.shard(model, optimizer, precision="fp16", offload=offload)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scales = []
    for step in range(STEPS):
        if step == 1:
            scaler.update(2.0**40)
        scaler.scale(model(batch(step, 0))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        scaler.step(optimizer)
        scaler.update(2.0**10 if step == 1 else None)
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    run.close()
    return weights(model), scales


def test_fp16_with_a_grad_scaler(disk_folder: Path) -> None:
    """The scaler and the loop see gradients on the host; the kernels update from there."""
    want, scales = scaled_loop(None)
    for offload in tiers(disk_folder):
        got, found = scaled_loop(offload)
        assert found == scales, "the step that overflowed was skipped"
        assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 1e-6


@pytest.mark.parametrize("make", ["adamw", "momentum"])
def test_plain_clipping_and_a_scheduler(make: str, disk_folder: Path) -> None:
    """No clip_norm: `p.grad` is there for the loop to see, change and replace."""

    def trained(offload: zs.Offload | None) -> dict[str, Tensor]:
        model = make_model()
        kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        }
        optimizer = kinds[make](model.parameters())
        run = zs.shard(model, optimizer, offload=offload) if offload is not None else None
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS)
        for step in range(STEPS):
            model(batch(step, 0), 1 if step == 3 else None).backward()
            model(batch(step, 1), 1 if step == 3 else None).backward()  # accumulates without no_sync
            nn.utils.clip_grad_norm_(model.parameters(), 0.8)
            if step == 4:  # another tensor in the gradient's place
                model.head.weight.grad = model.head.weight.grad * 0.5  # type: ignore[operator]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if run is not None:
            run.close()
        return weights(model)

    want = trained(None)
    for offload in tiers(disk_folder):
        got = trained(offload)
        assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 1e-6


@pytest.mark.parametrize("tier", [0, 1, 2], ids=["state", "parameters too", "auto"])
@pytest.mark.parametrize("master", ["plain", "split"])
def test_reading_writing_and_evaluating_between_steps(tier: int, master: Any, disk_folder: Path) -> None:
    """`gathered` shows the master bit for bit, what is written is used, evaluation changes nothing; as on the
    host."""

    def trained(offload: zs.Offload) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = zs.shard(model, optimizer, precision="bf16", offload=offload, clip_norm=4.0)
        seen: list[float] = []
        for step in range(4):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(float(model(batch(99, 0))))
            if step == 1:
                with run.gathered("head.weight", "blocks.2.*", write=True) as whole:
                    seen.append(float(whole["blocks.2.up.weight"].detach().double().sum()))
                    whole["head.weight"].data.fill_(1 / 3)
                with run.gathered("head.*") as whole:
                    assert torch.equal(whole["head.weight"], torch.full((41, 20), 1 / 3)), "to the last bit"
        state = optimizer.state_dict()["state"]
        told = {f"{i}.{k}": v.clone() for i, s in state.items() for k, v in s.items() if v.dim()}
        run.close()
        return weights(model), seen, told

    options: Options = {"precision": "bf16"}
    if tier == 2:
        given = {"path": str(disk_folder), "stage_bytes": 4096, "threads": 2, "master": master}
        offload = thirds(options, 1, **given)
    else:
        offload = on_disk(disk_folder, master=master, parameters=("device", "disk")[tier])
    got = trained(offload)
    want = trained(zs.Offload(stage_bytes=4096, threads=2, master=master))
    assert got[2].keys() == want[2].keys()
    if tier < 2:
        assert_same_bits(got[0], want[0])
        assert got[1] == want[1]
        assert_same_bits(got[2], want[2])
    else:  # torch's own AdamW has the device's part of it
        assert max(float((got[0][name] - want[0][name]).abs().max()) for name in want[0]) <= 2e-3
        assert max(abs(a - b) for a, b in zip(got[1], want[1], strict=True)) <= 5e-2


@pytest.mark.parametrize("parameters", ["device", "disk"])
def test_a_checkpoint_of_the_disk_goes_on_anywhere(parameters: Any, disk_folder: Path) -> None:
    def steps(run: zs.Run, model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 3):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()

    ends = []
    for there in (True, False):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        disk = on_disk(disk_folder, parameters=parameters)
        run = zs.shard(model, optimizer, offload=disk, clip_norm=4.0)
        steps(run, model, optimizer, 0)
        run.save(disk_folder / f"kept-{there}")
        if there:
            steps(run, model, optimizer, 3)
            run.close()
        else:
            run.close()
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            host = zs.Offload(stage_bytes=4096, threads=2)
            run = zs.shard(model, optimizer, offload=host, clip_norm=4.0)
            run.load(disk_folder / f"kept-{there}")
            steps(run, model, optimizer, 3)
            run.close()
        ends.append(weights(model))
    assert_same_bits(ends[1], ends[0])


def test_parameters_without_an_update_stay_on_the_host(disk_folder: Path) -> None:
    """A unit with a frozen parameter streams from memory; the others from the disk."""
    ends = []
    for offload in (None, on_disk(disk_folder, parameters="disk")):
        model = make_model()
        model.blocks[1].up.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        run = zs.shard(model, optimizer, offload=offload, clip_norm=4.0)
        for step in range(3):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.close()
        ends.append(weights(model))
    assert max(float((ends[0][n] - ends[1][n]).abs().max()) for n in ends[0]) <= 1e-6


# ---------------------------------------------------------------------- refused before training


def sharded(offload: zs.Offload, **options: Any) -> zs.Run:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zs.shard(model, optimizer, offload=offload, **{"clip_norm": 1.0} | options)


def test_a_missing_folder(tmp_path: Path) -> None:
    told = r"needs 2\d\d\.\d KiB a rank, and .*/absent does not exist.*mkdir"
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
        patch.object(folder.os, "access", return_value=False),
        pytest.raises(zs.TierError, match="cannot be written by this user: pass another path="),
    ):
        sharded(on_disk(disk_folder))


def test_a_full_disk_told_by_its_free_bytes(disk_folder: Path) -> None:
    told = r"needs 2\d\d\.\d KiB \(\d+ bytes\) a rank, and .* has 9\.8 KiB free: make room"
    with patch.object(folder, "free_bytes", return_value=10_000), pytest.raises(zs.TierError, match=told):
        sharded(on_disk(disk_folder))


def test_a_disk_that_is_full_after_all(disk_folder: Path) -> None:
    """Free bytes that others take meanwhile, or that a quota withholds: the blocks are reserved before
    training."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        patch.object(scratch.os, "posix_fallocate", side_effect=full),
        pytest.raises(zs.TierError, match="free: make room there, pass path= of another disk"),
    ):
        sharded(on_disk(disk_folder))
    other = OSError(errno.EIO, "Input/output error")
    with (
        patch.object(scratch.os, "posix_fallocate", side_effect=other),
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
    assert "is for one rank, and these are 2" in told[0]


def test_a_disk_without_direct_io_is_told(disk_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with patch.object(Scratch, "_go_direct", return_value=False), caplog.at_level(logging.WARNING):
        run = sharded(on_disk(disk_folder))
    run.close()
    assert "has no direct I/O: the disk tier goes through the page cache" in caplog.text


# ---------------------------------------------------------------------- nothing left behind

SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from offload_case import batch, make_model
import zeroshard as zs
from zeroshard.tier import scratch
def started():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = zs.Offload("disk", path={path!r}, stage_bytes=4096, threads=1)
    return model, optimizer, zs.shard(model, optimizer, offload=offload, clip_norm=1.0)
one = started()
print(len(os.listdir({path!r})), flush=True)
del os.O_TMPFILE  # a file system that can take the name away from no open file
scratch.os.unlink = lambda name: (_ for _ in ()).throw(OSError("busy"))
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
    text = SCRIPT.format(tests=str(Path(__file__).parent), path=str(disk_folder))
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n", "no name"
    assert process.stdout.readline() == "1\n"
    assert sweep(str(disk_folder)) == [], "its owner lives"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert len(list(disk_folder.iterdir())) == 1
    sharded(on_disk(disk_folder)).close()
    assert list(disk_folder.iterdir()) == []


def test_a_file_that_keeps_its_name_goes_when_it_is_closed(disk_folder: Path) -> None:
    with patch.object(scratch.os, "unlink", side_effect=OSError("busy")), ExitStack() as stack:
        nameless = scratch.os.O_TMPFILE
        del scratch.os.O_TMPFILE
        stack.callback(setattr, scratch.os, "O_TMPFILE", nameless)
        kept = Scratch(disk_folder, 8192)
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
    real, left = getattr(Scratch, what), [calls]

    def failing(self: Scratch, memory: memoryview, offset: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "the roof is on fire")
        real(self, memory, offset)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Scratch, what, failing))
        caught = stack.enter_context(pytest.raises(zs.TierError, match="the roof is on fire"))
        for step in range(40):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert re.search(r"`(blocks\.\d|tokens|norm|head)[\w.]*` … `", str(caught.value)), "which parameters"
    with pytest.raises(zs.TierError, match="the roof is on fire"):
        run.close()
    end = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.05)
    assert not set(threading.enumerate()) - before
