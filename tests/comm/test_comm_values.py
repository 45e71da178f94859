"""What arrives: every transport against the plain sum and the plain copy, bit for bit."""

from __future__ import annotations

import pytest
import torch
from comm_ranks import threads

from zeroshard.comm import GatherRequest, Transport, gloo, targets
from zeroshard.comm.sums import _sum_by_chunks, sum_shards

pytestmark = pytest.mark.threads

SIZES = [("local", 1), ("shm", 2), ("shm", 3), ("shm", 4), ("gloo", 2), ("gloo", 3), ("gloo", 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHARDS = {1: [[7]], 2: [[4, 4], [9, 3], [0, 5]], 3: [[5, 0, 7], [0, 0, 3]], 4: [[6, 1, 0, 100], [0, 0, 0, 0]]}


def wires(size: int, numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]


def reference(parts: list[torch.Tensor], scale: float) -> torch.Tensor:
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total * scale


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_reduce_is_the_sum_in_rank_order(kind: str, size: int) -> None:
    def body(transport: Transport) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for number, shards in enumerate(SHARDS[size]):
            for dtype in DTYPES:
                data = wires(size, sum(shards), dtype, number)
                key = f"{number} {dtype}"
                wire = transport.allocate(key, sum(shards), dtype)
                at = sum(shards[: transport.rank])
                mine = slice(at, at + shards[transport.rank])
                for out_dtype in (dtype, torch.float32, None):
                    transport.fill(wire)
                    wire.mine.copy_(data[transport.rank])
                    own = wire.mine[mine]
                    out = own if out_dtype is None else torch.full_like(own, 7.0, dtype=out_dtype)
                    work = transport.reduce("gradients", key, wire, shards, out, 1 / 3)
                    work.wait()
                    work.wait()
                    assert work.poll()
                    expected = reference([part[mine] for part in data], 1 / 3)
                    found.append((out.clone(), expected.to(out.dtype)))
        return found

    for found in threads(kind, size, body):
        for got, expected in found:
            assert torch.equal(got, expected)


def test_shm_and_gloo_and_two_runs_agree_bit_for_bit() -> None:
    shards = [70_001, 3, 200_000]

    def body(transport: Transport) -> torch.Tensor:
        wire = transport.allocate("wire", sum(shards), torch.bfloat16)
        wire.mine.copy_(wires(3, sum(shards), torch.bfloat16, 5)[transport.rank])
        out = torch.empty(shards[transport.rank])
        transport.reduce("gradients", "wire", wire, shards, out, 1 / 3).wait()
        return out

    runs = [torch.cat(threads(kind, 3, body)) for kind in ("shm", "shm", "gloo", "gloo")]
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_over_nodes_adds_node_by_node(dtype: torch.dtype) -> None:
    """Two ranks a node. 16-bit sums of a node are halved and rounded, and travel so."""
    narrow = dtype.itemsize == 2

    def body(transport: Transport) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for number, shards in enumerate(SHARDS[4]):
            data = wires(4, sum(shards), dtype, number)
            wire = transport.allocate(f"{number}", sum(shards), dtype)
            at = sum(shards[: transport.rank])
            mine = slice(at, at + shards[transport.rank])
            first = 0.5 if narrow else 1.0
            nodes = [reference([data[n][mine], data[n + 1][mine]], first).to(dtype) for n in (0, 2)]
            expected = reference(nodes, (1 / 3) / first)
            for _ in range(3):
                transport.fill(wire)
                wire.mine.copy_(data[transport.rank])
                out = torch.empty(shards[transport.rank], dtype=torch.float32 if narrow else dtype)
                transport.reduce("gradients", f"{number}", wire, shards, out, 1 / 3).wait()
                found.append((out, expected.to(out.dtype)))
        return found

    for found in threads("nodes", 4, body):
        for got, expected in found:
            assert torch.equal(got, expected)


@pytest.mark.parametrize(("kind", "size"), [*SIZES, ("nodes", 4)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("dtype", "alone"), [(torch.bfloat16, targets.ALONE), (torch.bfloat16, 8), (torch.float32, 8)]
)
def test_gather_brings_every_segment(
    kind: str, size: int, own: bool, dtype: torch.dtype, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "ALONE", alone)  # segments of so many bytes travel by themselves
    # Rank r has 3 * r + 2 elements in up to three segments with gaps; the last rank of several has none.
    cuts = [[(0, 2)], [(1, 2), (4, 0), (3, 1)], [(2, 6), (0, 2)], []][:size]

    def body(transport: Transport) -> list[list[torch.Tensor]]:
        rank = transport.rank
        source = transport.allocate("rows", 3 * rank + 2, torch.float32)
        source.mine.copy_(torch.arange(3.0 * rank + 2) + 100 * rank)
        transport.open()
        out = [[torch.zeros(1, numel, dtype=dtype) for _, numel in segments] for segments in cuts]
        if not own:
            out[rank] = []
        transport.gather("parameters", "rows", source, cuts, out).wait()
        transport.fence()
        return out

    for rank, out in enumerate(threads(kind, size, body)):
        for other, segments in enumerate(cuts):
            if other == rank and not own:
                assert out[other] == []
                continue
            rows = torch.arange(3.0 * other + 2) + 100 * other
            expected = [rows[at : at + numel].view(1, -1).to(dtype) for at, numel in segments]
            assert all(torch.equal(got, want) for got, want in zip(out[other], expected, strict=True))


@pytest.mark.parametrize(("kind", "size"), [*SIZES, ("nodes", 4)])
def test_many_gathers_at_once_are_each_of_them(kind: str, size: int) -> None:
    """Over several epochs: what arrives, beside this rank's own rows, and what is counted."""
    numels = {"a": 3, "b": 0, "c": 40}

    def body(transport: Transport) -> list[torch.Tensor]:
        rank, fetches = transport.rank, []
        for number, (key, numel) in enumerate(numels.items()):
            source = transport.allocate(key, numel * size, DTYPES[number])
            cuts = [[(r * numel, numel)] if numel else [] for r in range(size)]
            out = [[source.mine[at : at + n] for at, n in cut] for cut in cuts]
            out[rank] = []
            fetches.append(GatherRequest(key, source, cuts, out))
        for epoch in range(6):  # the last three come one by one
            transport.fence()
            for fetch in fetches:
                for at, n in fetch.cuts[rank]:
                    fetch.source.mine[at : at + n] = 10.0 * rank + epoch
            transport.open()
            if epoch < 3:
                transport.gather_all("all", fetches)
                seen = [fetch.source.mine.clone() for fetch in fetches]
            else:
                for work in [transport.gather("each", *fetch) for fetch in fetches]:
                    work.wait()
        transport.fence()
        for counted in (transport.counters.sent, transport.counters.received):
            assert counted.get("all", 0) == counted.get("each", 0)
        return seen

    for seen in threads(kind, size, body):
        for found, numel in zip(seen, numels.values(), strict=True):
            assert torch.equal(found.float(), torch.arange(float(size)).repeat_interleave(numel) * 10 + 2)


def test_gathers_into_the_same_tensors_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer rows come by the same way, into any of more tensors than ways are kept for."""
    made = []
    monkeypatch.setattr(
        gloo, "GatherMessages", lambda *given: made.append(given[0]) or targets.GatherMessages(*given)
    )
    cuts, most = [[(0, 3), (4, 2)], [(1, 3), (5, 1)]], gloo._PASSAGES

    def body(transport: Transport) -> list[torch.Tensor]:
        source = transport.allocate("rows", 6, torch.float32)
        places = [[[torch.zeros(n) for _, n in segments] for segments in cuts] for _ in range(most + 1)]
        seen = []
        for turn in range(3 * most + 1):
            transport.fence()
            source.mine.copy_(torch.arange(6.0) + 100 * turn + 10 * transport.rank)
            transport.open()
            out = places[turn % most if turn < 3 * most else most]
            transport.gather("parameters", "rows", source, cuts, out).wait()
            seen.append(torch.cat([part for rank in out for part in rank]))
        transport.fence()
        return seen

    for seen in threads("gloo", 2, body):
        rows = torch.tensor([0.0, 1, 2, 4, 5, 11, 12, 13, 15])
        assert all(torch.equal(got, rows + 100 * turn) for turn, got in enumerate(seen))
    assert len(made) == 2 * (most + 1)


@pytest.mark.parametrize(("kind", "size"), [("shm", 3), ("gloo", 3), ("nodes", 4)])
def test_rows_change_between_fence_and_open(kind: str, size: int) -> None:
    """Over many epochs no rank ever reads a peer's rows of another epoch."""

    def body(transport: Transport) -> None:
        source = transport.allocate("rows", 1000, torch.float32)
        cuts = [[(0, 1000)]] * size
        for epoch in range(40):
            transport.fence()
            source.mine.fill_(100.0 * transport.rank + epoch)
            transport.open()
            out = [[torch.empty(1000)] if rank != transport.rank else [] for rank in range(size)]
            transport.gather("parameters", "rows", source, cuts, out).wait()
            for rank, tensors in enumerate(out):
                for tensor in tensors:
                    assert bool((tensor == 100.0 * rank + epoch).all()), (rank, epoch)

    threads(kind, size, body)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_operations_in_flight_do_not_mix(kind: str) -> None:
    shards = [3, 5]

    def body(transport: Transport) -> None:
        wires = [transport.allocate(f"wire {n}", 8, torch.float32) for n in range(4)]
        order = [0, 1, 2, 3] if transport.rank == 0 else [2, 0, 3, 1]
        for turn in range(20):
            works = {}
            outs = {n: torch.empty(shards[transport.rank]) for n in order}
            for n in order:
                transport.fill(wires[n])
                wires[n].mine.fill_(float(10 * n + turn))
                works[n] = transport.reduce("gradients", f"wire {n}", wires[n], shards, outs[n], 1.0)
            for n in reversed(order):
                works[n].wait()
                assert outs[n].tolist() == [2.0 * (10 * n + turn)] * shards[transport.rank]

    threads(kind, 2, body)


@pytest.mark.parametrize(("kind", "size"), [*SIZES, ("nodes", 4)])
def test_small_agreements(kind: str, size: int) -> None:
    def body(transport: Transport) -> None:
        rank = transport.rank
        assert transport.max([rank, -rank, 0.5]) == [size - 1, 0.0, 0.5]
        assert transport.sum([rank, 0.1]) == [sum(range(size)), sum([0.1] * size)]
        assert transport.max([]) == []
        assert transport.exchange({"rank": rank, "rows": (1, None)}) == [
            {"rank": other, "rows": [1, None]} for other in range(size)
        ]
        long = transport.exchange("x" * (200_000 * rank))
        assert [len(str(text)) for text in long] == [200_000 * other for other in range(size)]
        for turn in range(20):
            transport.barrier(f"turn {turn}")

    threads(kind, size, body)


@pytest.mark.parametrize(("kind", "size"), [("local", 1), ("shm", 3), ("gloo", 3), ("nodes", 4)])
def test_broadcast_overwrites_all_kinds_of_tensors(kind: str, size: int) -> None:
    def tensors(rank: int) -> list[torch.Tensor]:
        base = torch.arange(24.0) + 1000 * rank
        return [
            torch.tensor(float(rank)),
            base.view(4, 6).t(),
            torch.nn.Parameter(base.clone()),
            torch.full((3_000_001,), rank, dtype=torch.int32),
            torch.empty(0),
            torch.tensor([rank == 1] * 5),
            base.bfloat16()[::2],
        ]

    def body(transport: Transport) -> None:
        source = size - 1
        for turn in range(3):
            mine = tensors(transport.rank)
            transport.broadcast(f"turn {turn}", mine, source)
            for got, want in zip(mine, tensors(source), strict=True):
                assert torch.equal(got, want)

    threads(kind, size, body)


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_may_overwrite_any_operand(position: int, dtype: torch.dtype) -> None:
    sources = wires(4, 200_003, dtype, 1)
    expected = reference(sources, 0.25).to(dtype)
    plain = [source.clone() for source in sources]
    sum_shards(sources[position], sources, 0.25)
    assert torch.equal(sources[position], expected)
    _sum_by_chunks(plain[position], plain, 0.25)
    assert torch.equal(plain[position], expected)


def test_a_sum_keeps_nan_and_infinity() -> None:
    sources = [
        torch.tensor([float("nan"), float("inf"), float("inf"), 1.0]),
        torch.tensor([1.0, 1.0, -float("inf"), 2.0]),
    ]
    out = torch.empty(4)
    sum_shards(out, sources, 0.5)
    assert torch.equal(out.isnan(), torch.tensor([True, False, True, False]))
    assert out[1:4:2].tolist() == [float("inf"), 1.5]
