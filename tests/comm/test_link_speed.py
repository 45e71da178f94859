"""`zeroshard net`: what it measures on links of this host, and what it makes of links that are made up."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from comm_ranks import threads

from zeroshard import cli
from zeroshard.comm import Transport
from zeroshard.comm.link_speed import LinkSample, LinkSpeed, LinkSpeeds, _pairs, advise, measure

FAST, SLOW = 1e10, 1e7  # bytes a second


def links(rate: float, latency: float = 1e-4, nodes: tuple[int, ...] = (0, 1)) -> LinkSpeeds:
    samples = (LinkSample(64, latency), LinkSample(2**23, 2**23 / rate))
    pairs = tuple(LinkSpeed(a, b, nodes[a] == nodes[b], samples) for a, b in _pairs(len(nodes)))
    return LinkSpeeds("gloo", nodes, pairs, (LinkSample(2**23, 2**23 / rate),))


def test_a_fast_link_needs_nothing_special() -> None:
    advice = advise(links(FAST), 100e6, 1.0)
    assert advice.best.options == "stage=2"
    assert advice.best.numerics == "exact"
    assert "nothing to gain" in advice.reasons[-1]


def test_slower_links_give_up_more_of_the_numbers_step_by_step() -> None:
    order = ("exact", "rounding", "approximate")
    found = [advise(links(rate), 100e6, 1.0).best.numerics for rate in (1e10, 6e8, 3e8, 1e8, 1e7)]
    assert [order.index(numerics) for numerics in found] == sorted(order.index(n) for n in found)
    assert (found[0], found[-1]) == ("exact", "approximate")
    assert "rounding" in found


def test_the_bytes_are_those_of_the_ring() -> None:
    exact = advise(links(FAST, nodes=(0, 1, 2, 3)), 100e6, 1.0).ways[0]
    assert exact.sent == pytest.approx(2 * 4 * 100e6 * 3 / 4)
    assert exact.exchange == pytest.approx(exact.sent / FAST, rel=0.1)


def test_several_ranks_a_node_are_told_of_the_transport_for_it() -> None:
    ways = advise(links(SLOW, nodes=(0, 0, 1, 1)), 100e6, 1.0).ways
    hierarchical = next(way for way in ways if "nodes" in way.options)
    assert hierarchical.sent == pytest.approx(ways[0].sent / 2)
    assert not any("nodes" in way.options for way in advise(links(SLOW), 100e6, 1.0).ways)


def test_where_nothing_is_hidden_the_least_is_taken() -> None:
    advice = advise(links(1e5), 1e9, 0.1)
    assert advice.best == min(advice.ways, key=lambda way: way.exposed)
    assert "No way hides" in advice.reasons[-1]


def test_many_ranks_do_not_measure_every_pair() -> None:
    assert len(list(_pairs(8))) == 28
    assert len(list(_pairs(64))) == 128


@pytest.mark.threads
@pytest.mark.parametrize(("kind", "size"), [("shm", 2), ("gloo", 3), ("nodes", 4)])
def test_all_ranks_measure_the_same(kind: str, size: int) -> None:
    def body(transport: Transport) -> LinkSpeeds:
        return measure(transport, 0.001, (64, 4096))

    first, *others = threads(kind, size, body)
    for other in others:
        assert other == first
    assert len(first.pairs) == size * (size - 1) // 2
    for link in first.pairs:
        assert [sample.size for sample in link.samples] == [64, 4096]
        assert all(0 < sample.seconds < 1 for sample in link.samples)
    assert first.node_count == (2 if kind == "nodes" else 1)
    assert len(first.of(inside=False)) == (4 if kind == "nodes" else 0)


@pytest.mark.ranks
def test_it_starts_its_own_ranks_and_prints_json() -> None:
    command = [sys.executable, "-m", "zeroshard", "net", "--ranks", "2", "--seconds", "0.002", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["links"]["nodes"] == [0, 0]
    assert told["advice"]["best"] in told["advice"]["ways"]


@pytest.mark.ranks
def test_it_runs_under_a_launcher_and_looks_good() -> None:
    command = [sys.executable, "-m", "zeroshard", "run", "--ranks", "3", "-m", "zeroshard", "net"]
    done = subprocess.run([*command, "--seconds", "0.002"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for text in ("3 ranks on 1 node, over shm", "inside a node", "latency right of the diagonal", "Take:"):
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.ranks
def test_one_rank_has_no_links() -> None:
    command = [sys.executable, "-m", "zeroshard", "run", "--ranks", "1", "-m", "zeroshard", "net"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "OptionError: one rank has no links: start two or more." in done.stderr


def test_without_ranks_it_says_how_to_start_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["net"]) == 1
    assert "--ranks 2 or more" in capsys.readouterr().err
    assert cli.main(["net", "--ranks", "2", "--step", "0"]) == 1
    assert "--parameters, --step and --seconds must be above zero." in capsys.readouterr().err
