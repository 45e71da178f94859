"""Where ranks listen: on loopback where all are on one host, else where the other hosts reach them.

Hosts are network namespaces, joined by a cable of the kernel's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from zeroshard.comm import address
from zeroshard.comm.address import VARIABLE, interfaces, own_address, say_to_torch, settle
from zeroshard.comm.rendezvous import Rendezvous
from zeroshard.errors import RankError
from zeroshard.launch.join import announcement_in

pytestmark = pytest.mark.ranks

ENVIRON = {name: value for name, value in os.environ.items() if name != VARIABLE} | {
    "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    "OMP_NUM_THREADS": "1",
}
SCRIPT = """
import os, torch, torch.distributed as dist
from zeroshard.comm import connect
from zeroshard.launch.join import join

def listens():
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try: own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError: pass
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                yield fields[1].partition(":")[0]

join("cpu")
ones = torch.ones(1)
dist.all_reduce(ones)
transport = connect(torch.device("cpu"), "gloo")
total = transport.sum([1.0])
print(int(ones.item()), int(total[0]), *sorted(set(listens())))
transport.close()
"""
LOOP = "0100007F"  # as the kernel's tables have 127.0.0.1


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def outcomes(commands: list[list[str]], environs: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """What the processes ended with and said."""
    ranks = [
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON | environ
        )
        for words, environ in zip(commands, environs, strict=True)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
        return [(rank.returncode, out, errors) for rank, (out, errors) in zip(ranks, said, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def ranks_of(world: int, each: int, master: str) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % each),
            "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": master,
            "MASTER_PORT": port,
        }
        for rank in range(world)
    ]


def test_ranks_of_one_host_listen_on_loopback_alone() -> None:
    """Also where MASTER_ADDR is the host's address in the network."""
    outside = own_address("192.0.2.1") or "127.0.0.1"
    for code, out, errors in outcomes([[sys.executable, "-c", SCRIPT]] * 2, ranks_of(2, 2, outside)):
        assert code == 0, errors
        assert out.split() == ["2", "2", LOOP]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[str]]:
    """Two namespaces with a cable between them, 10.77.0.1 and 10.77.0.2, fd77::1 and fd77::2."""
    names = [f"zs-{os.getpid()}-{number}" for number in range(2)]
    ends = [f"zs{os.getpid() % 10**6}x{number}" for number in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "address", "add", f"fd77::{number}/64", "dev", end, "nodad")
            for link in ("lo", end):
                ip("-n", name, "link", "set", link, "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs network namespaces: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize(
    ("each", "own", "far"),
    [
        (1, "127.0.1.1", "10.77.0.1"),
        pytest.param(2, "127.0.0.1", "10.77.0.1", marks=pytest.mark.wide(4)),
        pytest.param(1, "10.77.0.1", "10.77.0.1", marks=pytest.mark.wide(4)),
        pytest.param(1, "::1", "fd77::1", marks=pytest.mark.wide(4)),
        pytest.param(2, "fd77::1", "fd77::1", marks=pytest.mark.wide(4)),
    ],
)
def test_ranks_of_several_hosts_meet_whatever_a_host_calls_itself(
    hosts: list[str], tmp_path: Path, each: int, own: str, far: str
) -> None:
    """Debian maps a host's own name to loopback."""
    for name, head in zip(hosts, (own, far), strict=True):
        lines = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n{head} head\n"
        (tmp_path / name).write_text(lines)
    commands = []
    for rank in range(2 * each):
        name = hosts[rank // each]
        enter = f'mount --bind {tmp_path / name} /etc/hosts && exec "$@"'
        words = ["ip", "netns", "exec", name, "sh", "-c", enter, "sh", sys.executable, "-c", SCRIPT]
        commands.append(words)
    found = outcomes(commands, ranks_of(2 * each, each, "head"))
    for rank, (code, out, errors) in enumerate(found):
        assert code == 0, errors
        assert out.split()[:2] == [str(2 * each)] * 2
        assert LOOP not in out
        anywhere = any(set(place) == {"0"} for place in out.split()[2:])
        assert anywhere is (rank == 0 and own in ("127.0.1.1", "127.0.0.1", "::1")), out


def settled(monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> list[object]:
    """What each of some ranks gets that take themselves for other hosts'."""
    store, found = dist.HashStore(), list[object](range(ranks))
    monkeypatch.setattr(address, "_machine", threading.get_ident)

    def body(rank: int) -> None:
        try:
            found[rank] = settle(Rendezvous(store, rank, ranks, 30.0))
        except RankError as error:
            found[rank] = error

    bodies = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
    for each in bodies:
        each.start()
    for each in bodies:
        each.join()
    return found


def refusal(found: list[object]) -> str:
    assert all(isinstance(each, RankError) for each in found), found
    assert len({str(each) for each in found}) == 1
    return str(found[0])


def test_hosts_that_do_not_reach_one_another_end_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "lo")
    assert settled(monkeypatch, 5) == ["127.0.0.1"] * 5
    monkeypatch.setattr(address, "_miss", lambda peer, told, places: f"cannot reach rank {peer}: closed")
    text = refusal(settled(monkeypatch))
    assert f"rank 0 on {socket.gethostname()} cannot reach rank 1: closed. Set {VARIABLE} on every" in text
    assert "rank 1 is on" in text
    monkeypatch.setenv(VARIABLE, "nope")
    assert f"has no interface 'nope' with an address, which {VARIABLE} names" in refusal(settled(monkeypatch))


def test_a_host_without_a_network_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(address, "_AFAR", ())
    text = refusal(settled(monkeypatch))
    assert "has no address by which the other hosts can reach it: only loopback leads to MASTER_ADDR" in text


def test_why_a_peer_is_not_reached() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        place = ["127.0.0.1", held.getsockname()[1], None]
        text = address._miss(1, [["a"], ["b"]], [place, place])
    assert text == f"cannot reach rank 1 on b at 127.0.0.1: Connection refused (port {place[1]})"


def test_every_rank_is_tried_by_some_and_none_by_many() -> None:
    told = [["", rank // 4] for rank in range(64)]
    tried = [address._some(rank, told) for rank in range(64)]
    assert max(map(len, tried)) <= 6
    assert {other for each in tried for other in each} == set(range(64))
    assert all(told[rank] != told[other] for rank, each in enumerate(tried) for other in each)


def test_torch_is_told_the_interface_unless_the_user_has_said_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_said", None)
    monkeypatch.setenv(VARIABLE, "eth7")
    say_to_torch("127.0.0.1")
    assert os.environ[VARIABLE] == "eth7"
    monkeypatch.delenv(VARIABLE)
    say_to_torch("127.0.0.1")
    assert (os.environ[VARIABLE], "127.0.0.1") in list(interfaces())
    monkeypatch.setenv(VARIABLE, os.environ[VARIABLE])  # what was said may be said anew
    say_to_torch(None)
    assert address._named_interface() is None


def test_localhost_is_one_host_except_in_a_cluster_that_calls_rank_0s_own_host_so() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for more, one in (({}, True), ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False)):
        group = announcement_in(environ | more)
        assert group is not None
        assert group.one_host is one
        assert group.meeting_point == ("127.0.0.1" if one else "localhost")
