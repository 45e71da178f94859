"""When a rank fails or goes another way, every rank ends soon, with the same words that name the cause."""

from __future__ import annotations

import re
import sys
import threading
import time

import pytest
import torch
from comm_ranks import threads

from zeroshard.comm import GlooTransport, ShmTransport, Transport, connect, control, link
from zeroshard.comm.diagnosis import exits
from zeroshard.comm.diagnosis import waits as watch
from zeroshard.comm.stuck import marked, read
from zeroshard.errors import OptionError, RankError

pytestmark = pytest.mark.threads


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PATIENCE", 0.6)
    monkeypatch.setattr(watch, "PATIENCE", 0.6)
    monkeypatch.setattr(link, "LONG", 0.4)
    monkeypatch.setattr(link, "_LOOK", 0.1)
    monkeypatch.setattr(watch, "_LOOK", 0.1)


def one_text(found: list[object]) -> str:
    assert all(isinstance(error, RankError) for error in found), found
    texts = {str(error) for error in found}
    assert len(texts) == 1, texts
    return texts.pop()


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_different_agreements_are_refused_at_once(kind: str) -> None:
    def body(transport: Transport) -> object:
        if transport.rank == 0:
            return transport.barrier("a")
        return transport.max([1.0]) if transport.rank == 1 else transport.exchange(1, "run.close()")

    text = one_text(threads(kind, 3, body, fails=True))
    assert "rank 0 waits for barrier 'a'; rank 1 waits for a small max; rank 2 waits for run.close()." in text


@pytest.mark.parametrize("kind", ["shm", "gloo", "nodes"])
def test_what_torch_is_asked_for_is_compared(kind: str) -> None:
    """Over messages by neighbours: some rank has another on its left."""

    def body(transport: Transport) -> None:
        for turn, what in enumerate(("norm of `a`", "", "norm of `b`", "norm of `c`")):
            transport.compare("" if turn == transport.rank else what, f"rank_{transport.rank}.py:7")
        transport.compare("norm of `d`" if transport.rank < 3 else "sum of `d`", "train.py:8")

    found = [error for error in threads(kind, 4, body, fails=True) if error is not None]
    assert len(found) >= 2
    for error in found:
        assert isinstance(error, RankError)
        assert "waits for all ranks to compute norm of `d` (called at train.py:8)" in str(error)
        assert "rank 3 waits for all ranks to compute sum of `d` (called at train.py:8)" in str(error)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_what_torch_is_asked_for_is_no_other_agreement(kind: str) -> None:
    def body(transport: Transport) -> None:
        transport.compare("", "train.py:8") if transport.rank else transport.barrier("a save")

    text = one_text(threads(kind, 2, body, fails=True))
    assert "rank 0 waits for barrier 'a save'; rank 1 waits for all ranks to compute with tensors" in text


def test_who_did_not_come_hears_so_from_the_first_that_tells() -> None:
    """Rank 2 waited in vain, rank 0 heard of it from rank 2, and rank 1 looks at rank 0's note first."""
    told = marked("rank 2 waited in vain, and rank 1 did not come", [1])
    heard = threading.Event()

    def body(transport: Transport) -> str | None:
        assert isinstance(transport, ShmTransport)
        if transport.rank == 2:
            transport.control.leave(told)
        if transport.rank == 0:
            with pytest.raises(RankError, match=r"rank 1 did not come$"):
                transport.barrier("a")
            heard.set()
        heard.wait(60)
        return transport.control.blamed()

    assert threads("shm", 3, body)[1] == read(told)[0]


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_small_sums_of_different_lengths_are_refused(kind: str) -> None:
    text = one_text(threads(kind, 2, lambda transport: transport.sum([1.0] * transport.rank), fails=True))
    assert "[0, 1] values by rank" in text


@pytest.mark.parametrize("late", [0.0, 1.5], ids=["at once", "after a long wait"])
@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_a_mismatch_names_what_every_rank_waits_for(kind: str, late: float) -> None:
    """Also where rank 0 has said already that it waits for the transport buffer."""

    def body(transport: Transport) -> None:
        time.sleep(late * transport.rank)
        wires = [transport.allocate(f"bucket {n}", 4, torch.float32) for n in range(2)]
        wire = wires[transport.rank]
        transport.reduce("gradients", wire.key, wire, [2, 2], torch.empty(2), 1.0).wait()

    text = one_text(threads(kind, 2, body, fails=True))
    plain = re.sub(r" \(called at test_comm_failures.py:\d+\)", "", text)
    assert "rank 0 waits for its gradients [bucket 0]; rank 1 waits for its gradients [bucket 1]" in plain
    assert (plain != text) is (kind == "gloo")
    assert "check branches" in text


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_a_slow_peer_is_no_mismatch(kind: str) -> None:
    def body(transport: Transport) -> float:
        if transport.rank == 1:
            time.sleep(1.8)
        return transport.sum([1.0])[0]

    assert threads(kind, 2, body) == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_a_note_reaches_every_waiting_rank(kind: str) -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 2:
            time.sleep(0.3)
            transport.report(exits.describe(2, ValueError("bad batch\nmore")))
            return
        transport.barrier("after the step")

    found = threads(kind, 3, body, fails=True)
    assert one_text(found[:2]) == "rank 2 failed: ValueError: bad batch"


def test_a_rank_that_closed_its_transport_is_named() -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 0:
            transport.barrier("after the step")

    found = threads("shm", 2, body, fails=True)
    assert "had ended or closed its run when rank 0 waited for barrier 'after the step'" in str(found[0])
    assert "rank 1 (pid " in str(found[0])
    assert "none of them stands under `if run.rank == 0:`" in str(found[0])


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_a_wait_has_an_end(kind: str) -> None:
    over = threading.Event()

    def body(transport: Transport) -> None:
        transport.barrier("both are here")  # the limit is for one wait, not for setting up
        if transport.rank == 1:
            over.wait(300)
            return
        waits = transport._link if isinstance(transport, GlooTransport) else transport.control
        waits.timeout = 1.0
        try:
            transport.barrier("after the step")
        finally:
            over.set()

    found = threads(kind, 2, body, fails=True)
    assert isinstance(found[0], RankError)
    text = str(found[0])
    assert re.match(r"rank 0 waited \d+ s for barrier 'after the step'", text)
    assert re.search(
        r", and rank 1 \(pid \d+ on \S+\) did not come in that time, which shard\(timeout=", text
    )
    assert re.search(r'rank 1 is here:\n(.*\n)* .*test_comm_failures.py", line \d+, in body\n', text)


def test_bulk_traffic_is_posted_by_a_thread_that_ends_with_its_transport() -> None:
    """A caller that starts a reduction goes on at once, though gloo is busy; see [Note: the post]."""
    size, posts, before = 1 << 16, set[threading.Thread](), set(threading.enumerate())

    def body(transport: Transport) -> tuple[float, list[float]]:
        assert isinstance(transport, GlooTransport)
        wire = transport.allocate("wire", 2 * size, torch.float32)
        wire.mine.fill_(1.0 + transport.rank)
        out, busy = torch.zeros(size), threading.Event()
        posts.update(thread for thread in threading.enumerate() if thread.name == "zeroshard post")
        transport._link._post.put(lambda: busy.wait(300) and None)
        work = transport.reduce("reduce", "wire", wire, [size, size], out, 1.0)
        agreed = transport.sum([1.0])  # letters go past what is being posted
        assert not out.any()
        busy.set()
        work.wait()
        return out.mean().item(), agreed

    assert threads("gloo", 2, body) == [(3.0, [2.0])] * 2
    assert posts - before
    for thread in posts - before:
        thread.join(120)
        assert not thread.is_alive()


def test_no_thread_is_inside_gloo_after_a_transport_is_closed() -> None:
    """One that comes back at the interpreter's end would abort: see [Note: threads inside torch]."""

    def body(transport: Transport) -> list[bool]:
        assert isinstance(transport, GlooTransport)
        transport.report("rank 0 failed: a reason")  # a thread for each peer
        threads_of_it = transport._link.threads
        assert len(threads_of_it) == 3
        transport.close()
        return [thread.is_alive() for thread in threads_of_it]

    assert threads("gloo", 2, body) == [[False] * 3] * 2


def test_a_thread_that_is_stuck_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PARTING", 0.2)
    end = threading.Event()
    stuck = threading.Thread(target=end.wait, args=(300,), daemon=True)
    stuck.start()
    watch.part_from([stuck, threading.current_thread()])
    assert stuck.is_alive(), "nobody waited for its end"
    end.set()
    watch.part_from([stuck])
    stuck.join(120)


def test_what_gloo_refuses_is_raised_where_it_is_waited_for() -> None:
    def body(transport: Transport) -> None:
        assert isinstance(transport, GlooTransport)
        wire = transport.allocate("wire", 64, torch.float32)
        transport.barrier("both are here")
        transport._link.notes.break_connections()
        transport.reduce("reduce", "wire", wire, [32, 32], torch.zeros(32), 1.0).wait()

    found = threads("gloo", 2, body, fails=True)
    for error in found:
        assert isinstance(error, RankError)
        assert re.search(r"its reduce \[wire\]", str(error))


def test_waits_on_a_device_are_given_up_too() -> None:
    def body(transport: Transport) -> list[str]:
        assert isinstance(transport, GlooTransport)
        told: list[str] = []
        label = f"its gradients [bucket {transport.rank}]"
        transport.guard(lambda: None if told else (label, 1.0), told.append)
        deadline = time.monotonic() + 120
        while not told and time.monotonic() < deadline:
            time.sleep(0.05)
        return told

    found = threads("gloo", 2, body)
    assert found[0] == found[1]
    assert (
        "rank 0 waits for its gradients [bucket 0]; rank 1 waits for its gradients [bucket 1]" in found[0][0]
    )


def test_a_failing_process_tells_its_transports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Listener:
        rank = 4

        def __init__(self) -> None:
            self.texts: list[str] = []
            self.known: str | None = None

        def report(self, text: str) -> None:
            self.texts.append(text)

        def cause(self) -> str | None:
            return self.known

        def close(self) -> None:
            self.texts.append("closed")

    shown: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: shown.append(args[1]))
    monkeypatch.setattr(exits, "_installed", False)
    listener = Listener()
    exits.listen(listener)
    error = ValueError("no rows")
    sys.excepthook(ValueError, error, None)
    assert listener.texts == ["rank 4 failed: ValueError: no rows"]
    assert shown == [error]
    assert capsys.readouterr().err == ""
    listener.known = "rank 1 (pid 7) died"
    sys.excepthook(RuntimeError, RuntimeError("Connection closed by peer"), None)
    assert listener.texts[1:] == ["rank 1 (pid 7) died"], "the peers hear of the first cause"
    assert "zeroshard: before this error on rank 4, rank 1 (pid 7) died" in capsys.readouterr().err
    exits._close_all()
    assert listener.texts.pop() == "closed"
    exits.unlisten(listener)
    sys.excepthook(ValueError, error, None)
    assert len(listener.texts) == 2


def test_an_error_is_described_by_its_first_line() -> None:
    assert exits.describe(3, KeyError("x")) == "rank 3 failed: KeyError: 'x'"
    assert exits.describe(3, ValueError()) == "rank 3 failed: ValueError"
    assert exits.describe(3, RankError("rank 1 failed: it did")) == "rank 1 failed: it did"


def test_transports_that_cannot_work_are_refused() -> None:
    cpu = torch.device("cpu")
    assert connect(cpu).name == "local"
    assert connect(cpu, "local").size == 1
    with pytest.raises(OptionError, match="'ucc': one of auto, shm, gloo, nodes, nccl, local"):
        connect(cpu, "ucc")
    with pytest.raises(
        OptionError, match="needs a process group and there is none: start with `zeroshard run"
    ):
        connect(cpu, "shm")
