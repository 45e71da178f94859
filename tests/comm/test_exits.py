"""A rank that waits for the others to come to `shard` learns that one has ended, or waits elsewhere."""

from __future__ import annotations

import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from zeroshard.comm.connect import _ended, end_early, was_in_shard
from zeroshard.comm.diagnosis.exits import ExitRegistry
from zeroshard.comm.diagnosis.stacks import StackProbe
from zeroshard.comm.rendezvous import Rendezvous
from zeroshard.errors import RankError
from zeroshard.launch import join as environment
from zeroshard.launch import rank as leaving
from zeroshard.launch.join import Announcement
from zeroshard.testing import run_threads

TIMEOUT = 120.0


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    store = HashStore()
    rolls = [ExitRegistry(store, rank) for rank in range(2)]
    met = Rendezvous(store, 0, 2, TIMEOUT, rolls[0].ended)
    Rendezvous(store, 1, 2, TIMEOUT).store.set("place/1", "7")
    rolls[1].close()
    assert met.share("place", 3) == [3, 7]  # it came, and ended afterwards
    with pytest.raises(
        RankError, match=r"rank 1 has ended, and others wait for it in `shard`\. Every rank must"
    ):
        met.share("control", 3)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with pytest.raises(
        RankError, match=r"rank 1 did not come to 'place' within 0 s of rank 0\. Every rank must call `shard`"
    ):
        Rendezvous(HashStore(), 0, 2, 0.05).share("place", None)


def test_a_store_that_is_gone() -> None:
    def gone(*_: object) -> None:
        raise RuntimeError("Broken pipe")

    met = Rendezvous(HashStore(), 0, 2, TIMEOUT)
    met.store = SimpleNamespace(set=gone)  # type: ignore[assignment]
    with pytest.raises(
        RankError, match=r"rank 0 lost the store while it waited for 'place': Broken pipe\. The process that"
    ):
        met.share("place", None)


def test_the_first_word_about_an_end_stays() -> None:
    store = HashStore()
    roll = ExitRegistry(store, 1)
    assert roll.ended(1) is None
    roll.report("rank 1 failed: ValueError: the data were bad")
    roll.close()
    with pytest.raises(RankError, match=r"^rank 1 failed: ValueError: the data were bad$"):
        Rendezvous(store, 0, 2, TIMEOUT, roll.ended).share("place", None)


def test_a_rank_in_shard_tells_its_other_transports_where_it_is() -> None:
    store = HashStore()
    places: list[StackProbe] = []

    def join() -> None:
        places.append(StackProbe())
        Rendezvous(store, 0, 2, TIMEOUT).share("place", None)

    waiting = threading.Thread(target=join)
    waiting.start()
    told, deadline = None, time.monotonic() + TIMEOUT
    while told is None and time.monotonic() < deadline:
        time.sleep(0.05)
        told = places[0].collective(0.2) if places else None
    store.set("place/1", "null")
    waiting.join()
    assert told is not None
    assert told.startswith("the others to come to `shard` (called at test_exits.py:")
    assert places[0].collective(0.0) is None


def test_a_rank_that_ends_before_its_first_shard_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["zeroshard.comm.connect"], "_registries", {})
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    served = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    group = Announcement("torchrun", 0, 3, 0, 3, "127.0.0.1", port, served=True)
    with pytest.raises(RankError, match=r"ranks 1-2 of 3 \(torchrun\) did not join within 0 s"):
        environment.meet(group, torch.device("cpu"), timedelta(milliseconds=200))
    leaving.tell_own_end(replace(group, rank=2))  # no `shard` here, and no group: over the announced store
    with pytest.raises(
        RankError, match=r"^rank 2 of 3 \(torchrun\) came to the end of the script without `shard`"
    ):
        environment.meet(group, torch.device("cpu"), timedelta(seconds=TIMEOUT))
    assert served.num_keys() > 0


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        ("/usr/bin/python3\0/usr/bin/torchrun\0--nproc-per-node\x002\0train.py", True),
        ("python\0-m\0torch.distributed.run\0train.py", True),
        ("slurmstepd: [77.0]", True),
        ("/opt/bin/prted\0--prtemca", True),
        ("bash\0-c\0python prepare.py; python train.py", False),
        ("python\0train.py\0--name\0first\0--launcher\0torchrun", False),
        ("", False),
    ],
)
def test_only_a_process_that_a_launcher_started_speaks_for_its_rank(command: str, is_one: bool) -> None:
    assert leaving._is_launcher(command) is is_one


def test_a_process_that_no_launcher_started_is_silent() -> None:
    group = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert not leaving.speak_at_the_end(group)
    assert not leaving.speak_at_the_end({"RANK": "1"})
    assert not leaving.speak_at_the_end({})


def hear_of_an_early_end() -> str | None:
    """In a group that the script made itself, the second rank ends and the first asks for it."""
    if dist.get_rank() == 1:
        end_early()
    dist.barrier()
    return _ended(None)(1) if dist.get_rank() == 0 else None


def test_a_rank_that_came_to_no_shard_of_a_group_of_its_own_is_named() -> None:
    told = run_threads(2, hear_of_an_early_end)[0]
    assert told is not None
    assert told.startswith("rank 1 has ended, and others wait for it in `shard`")
    assert was_in_shard()
