"""Updates that transfer workers in C carry, in a run: threads, failures, gradients, saves, forks,
interrupts."""

from __future__ import annotations

import contextlib
import gc
import math
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_values import built
from offload_loop import batch, make_model
from test_transfer import until
from torch import Tensor

import zeroshard as zs
from zeroshard.checkpoint.staging import FileImage
from zeroshard.errors import TierError
from zeroshard.kernels import HostTask, TransferWorkers
from zeroshard.offload.native_executor import NativeExecutor
from zeroshard.offload.python_executor import PythonExecutor
from zeroshard.offload.updates import BACKLOG
from zeroshard.offload.work import HostUpdate

pytestmark = built


def transfer_workers(name: str = "zeroshard-post") -> int:
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += path.read_text().strip() == name
    return found


def offloaded(**options: Any) -> tuple[Any, torch.optim.Optimizer, zs.Run]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    offload = zs.Offload(stage_bytes=4096, threads=2)
    return model, optimizer, zs.shard(model, optimizer, **{"offload": offload, "clip_norm": 4.0} | options)


def mail_of(run: zs.Run) -> NativeExecutor:
    assert run._runtime.host is not None
    assert run._runtime.host.updates is not None
    found = run._runtime.host.updates.executor
    assert isinstance(found, NativeExecutor)
    return found


def test_a_run_has_transfer_workers_and_no_thread_that_wants_the_interpreter() -> None:
    before, threads = transfer_workers(), set(threading.enumerate())
    model, optimizer, run = offloaded()
    until(lambda: transfer_workers() == before + 4)
    model(batch(0, 0)).backward()
    optimizer.step()
    assert set(threading.enumerate()) <= threads
    assert mail_of(run).copies.native
    run.close()
    run.close()
    until(lambda: transfer_workers() == before)


def test_a_run_that_is_never_closed_leaves_no_transfer_worker_behind() -> None:
    before, members = transfer_workers(), transfer_workers("zeroshard-team")
    model, optimizer, run = offloaded(clip_norm=math.inf)
    for step in range(3):
        model(batch(step, 0)).backward()
        optimizer.step()
    assert transfer_workers() == before + 4
    del model, optimizer, run
    gc.collect()
    until(lambda: transfer_workers() == before)
    until(lambda: transfer_workers("zeroshard-team") == members)


def test_what_failed_on_the_way_is_raised_in_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, run = offloaded(clip_norm=math.inf)
    with monkeypatch.context() as patch:
        patch.setattr(TransferWorkers, "error", 719)
        with pytest.raises(TierError, match=r"a part failed: CUDA answered a copy .* with error 719"):
            model(batch(0, 0)).backward()
    optimizer.zero_grad()
    model(batch(0, 0)).backward()
    optimizer.step()
    run.close()


SAID = r"the host update of `.* failed: MemoryError: no room for the copy"


def failing(*_: object) -> None:
    raise MemoryError("no room for the copy")


def test_a_part_that_a_save_could_not_copy_is_named() -> None:
    model, _, run = offloaded(clip_norm=math.inf)
    mail, saving = mail_of(run), SimpleNamespace(copied_of=failing)
    mail._send_later(None, run._runtime.host.parts[0], saving, None)  # type: ignore[arg-type, union-attr]
    with pytest.raises(TierError, match=SAID):
        model(batch(0, 0)).backward()


def test_a_part_that_threads_of_python_could_not_update_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    coded = zs.Offload(stage_bytes=4096, threads=2, moments="int8")
    model, optimizer, run = offloaded(offload=coded, clip_norm=math.inf)
    monkeypatch.setattr(PythonExecutor, "_update", failing)

    def train() -> None:
        for step in range(3):
            model(batch(step, 0)).backward()
            optimizer.step()

    for use in (train, run.close):
        with pytest.raises(TierError, match=SAID):
            use()


@pytest.mark.parametrize("clip", [math.inf, 1e9, 1e-3])
def test_gradients_go_with_their_updates(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward waits for all parts, and then nobody needs their gradients."""
    flats, submit = list[Any](), NativeExecutor.submit

    def submitted(self: NativeExecutor, job: HostUpdate, backlog: int | None = None) -> None:
        flats.append(weakref.ref(job.flat))
        submit(self, job, backlog)

    monkeypatch.setattr(NativeExecutor, "submit", submitted)
    model, optimizer, run = offloaded(clip_norm=clip)
    for step in range(3):
        model(batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(mail_of(run), NativeExecutor)
    model(batch(3, 0))
    assert len(flats) > 3
    assert not any(flat() is not None for flat in flats)
    run.close()


def test_who_waits_in_another_thread_takes_no_gradient_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a background save does: while it looks at what is under way, the training thread adds to that."""
    model, optimizer, run = offloaded(clip_norm=math.inf)
    mail, held, looking = mail_of(run), list[HostTask](), threading.Event()

    class Slow:
        """Done, and in another thread half a second goes by until that is known."""

        def is_set(self) -> bool:
            if threading.current_thread() is not threading.main_thread():
                looking.set()
                time.sleep(0.5)
            return True

        def wait(self, timeout: float) -> bool:
            return True

    with monkeypatch.context() as patched:
        patched.setattr(TransferWorkers, "send", lambda self, host_task, backlog=None: held.append(host_task))
        mail._under_way = [(Slow(), None)]  # type: ignore[list-item]
        other = threading.Thread(target=mail.wait_for, args=(Slow(),))
        other.start()
        assert looking.wait(300)
        model(batch(0, 0)).backward()
        other.join()
        kept = [sent.host_task for sent, _ in mail._under_way]
    assert len(held) > 3
    assert kept == held
    for host_task in held:
        mail._post.send(host_task)
    optimizer.step()
    run.close()


def test_two_steps_without_a_forward_between_are_updates_in_order() -> None:
    """Torch allows a second backward of the same graph where no weight is read in it."""
    for _ in range(5):
        torch.manual_seed(0)
        model, x = torch.nn.Linear(256, 256), torch.randn(4, 256)
        plain = torch.nn.Linear(256, 256)
        plain.load_state_dict(model.state_dict())
        optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain))
        run = zs.shard(model, optimizer, offload=zs.Offload(), clip_norm=math.inf)
        for m, o in ((model, optimizer), (plain, other)):
            loss = m(x).sum()
            for last in (False, False, True):
                loss.backward(retain_graph=not last)
                o.step()
                o.zero_grad()
        run.close()
        torch.testing.assert_close(model.weight, plain.weight, rtol=0, atol=1e-6)


def test_an_update_that_was_interrupted_before_it_began_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renew = HostTask.renew

    def weights(interrupted: bool) -> list[Tensor]:
        model, optimizer, run = offloaded(clip_norm=1e9)
        for step in range(4):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if interrupted:
            calls = iter(range(100))

            def fails(*given: Any) -> None:
                if next(calls) == 2:
                    raise KeyboardInterrupt
                renew(*given)

            with monkeypatch.context() as patched:
                patched.setattr(HostTask, "renew", fails)
                with pytest.raises(KeyboardInterrupt):
                    model(batch(4, 0)).backward()
            optimizer.zero_grad()
        model(batch(5, 0)).backward()
        optimizer.step()
        run.close()
        return [p.detach().clone() for p in model.parameters()]

    for found, wanted in zip(weights(True), weights(False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5)  # those that had begun: to rounding


def test_gradients_that_wait_for_a_save_count_towards_the_backlog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flats, most, submit, fill = list[Any](), 0, NativeExecutor.submit, FileImage.fill

    def submitted(self: NativeExecutor, job: HostUpdate, backlog: int | None = None) -> None:
        nonlocal most
        flats.append(weakref.ref(job.flat))
        submit(self, job, backlog)
        most = max(most, sum(flat() is not None for flat in flats))

    def slowly(*given: Any) -> None:
        time.sleep(0.01)
        fill(*given)

    monkeypatch.setattr(NativeExecutor, "submit", submitted)
    monkeypatch.setattr(FileImage, "fill", slowly)
    offload = zs.Offload(stage_bytes=1024, threads=1, undo=False)
    model, optimizer, run = offloaded(clip_norm=math.inf, offload=offload)
    assert run._runtime.host is not None
    parts = len(run._runtime.host.parts)
    for step in range(3):
        model(batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.save(tmp_path / str(step), background=True)
    run.close()
    assert parts > 14
    assert most <= 2 * BACKLOG + 4, "at the gate, due, and with couriers"


FORKS = """
import os, sys
sys.path.insert(0, {tests!r})
import torch, zeroshard as zs
from offload_loop import batch, make_model
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
run = zs.shard(model, optimizer, offload=zs.Offload(stage_bytes=4096, threads=2), clip_norm=1e9)
for step in range(3):
    model(batch(step, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
child = os.fork()
if child == 0:
    {child}
    sys.exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
model(batch(3, 0)).backward()
optimizer.step()
run.close()
print("child", code)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("child", ["pass", "del run, model, optimizer; import gc; gc.collect()"])
def test_a_forked_child_leaves_the_transfer_workers_to_its_parent(child: str) -> None:
    script = FORKS.format(tests=str(Path(__file__).parents[1] / "support"), child=child)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "child 0"), done.stderr
