"""What is saved comes back bit for bit, at any other number of ranks, and other tools can read the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_ranks import ThreadPeers, all_good, blank, held, load_as, model, ranks, same, save_as
from safetensors import safe_open

from zeroshard.checkpoint import HeldRows, NoPeers, RunSnapshot, load, read_manifest, save, verify
from zeroshard.checkpoint.records import DTYPE, as_bytes
from zeroshard.errors import CheckpointError

pytestmark = pytest.mark.threads
DTYPES = sorted(DTYPE)


@pytest.mark.parametrize("writers", [1, 2, 3, 7])
@pytest.mark.parametrize("readers", [1, 2, 4, 7])
def test_any_world_size_reads_any_other(tmp_path: Path, writers: int, readers: int) -> None:
    full = model()
    save_as(tmp_path / "1", full, writers)
    target = blank(full)
    loaded = load_as(tmp_path / "1", target, readers)
    assert same(full, target)
    assert [item.world for item in loaded] == [writers] * readers
    assert [item.own for item in loaded] == [{"rank": r} if r < writers else None for r in range(readers)]
    assert loaded[0].values == {"step": 3}
    assert verify(tmp_path / "1").ok


def test_small_blocks_chunks_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows larger than a chunk, blocks of several rows, tensors cut over files: all edges at once."""
    monkeypatch.setattr("zeroshard.checkpoint.staging.BLOCK", 96)
    monkeypatch.setattr("zeroshard.checkpoint.staging.CHUNK", 200)
    monkeypatch.setattr("zeroshard.checkpoint.loading.CHUNK", 200)
    monkeypatch.setattr("zeroshard.checkpoint.ranges.FILE_LIMIT", 500)
    full = model()
    full["parameter", "wide"] = torch.randn(3, 300)
    save_as(tmp_path / "1", full, 2)
    assert len(read_manifest(tmp_path / "1").files) > 6
    for readers in (1, 3, 5):
        target = blank(full)
        load_as(tmp_path / "1", target, readers)
        assert same(full, target)
    assert verify(tmp_path / "1").ok


def test_copies_are_written_once_and_by_all(tmp_path: Path) -> None:
    full = {("parameter", "w"): torch.randn(4096, 256), ("parameter", "b"): torch.randn(64)}
    all_good(ranks(4, lambda peers: save(tmp_path / "1", RunSnapshot(held(full, copied=True)), peers)))
    manifest = read_manifest(tmp_path / "1")
    data = sum(tensor.nbytes for tensor in full.values())
    assert data <= manifest.bytes < data + 8192
    assert max(file.bytes for file in manifest.files) < data / 4 + 4096
    target = blank(full)
    load(tmp_path / "1", RunSnapshot(held(target)), NoPeers())
    assert same(full, target)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_and_the_safetensors_library_agrees(tmp_path: Path, name: str) -> None:
    raw = torch.randint(0, 2, (6 * 8,), dtype=torch.uint8)
    tensor = (raw.bool() if name == "bool" else raw.view(DTYPE[name])).reshape(-1, 2)
    save(
        tmp_path / "1",
        RunSnapshot([HeldRows.of("x", "parameter", tensor), HeldRows.of("s", "buffer", tensor[0, 0])]),
        NoPeers(),
    )
    target, scalar = torch.zeros_like(tensor), torch.zeros_like(tensor[0, 0])
    load(
        tmp_path / "1",
        RunSnapshot([HeldRows.of("x", "parameter", target), HeldRows.of("s", "buffer", scalar)]),
        NoPeers(),
    )
    assert bytes(as_bytes(target)) == bytes(as_bytes(tensor))
    assert bytes(as_bytes(scalar)) == bytes(as_bytes(tensor[0, 0]))
    with safe_open(tmp_path / "1" / "rank-00000-of-00001.safetensors", "pt") as file:
        stored = file.get_tensor(f"parameter:x[0:{len(tensor)}]")
        assert stored.dtype == tensor.dtype
        assert bytes(as_bytes(stored)) == bytes(as_bytes(tensor))
        assert file.get_tensor("buffer:s[0:1]").shape == ()


def test_the_safetensors_library_reads_all_of_a_file(tmp_path: Path) -> None:
    full = model()
    save_as(tmp_path / "1", full, 2)
    for rank in range(2):
        with safe_open(tmp_path / "1" / f"rank-{rank:05d}-of-00002.safetensors", "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                kind, _, rest = key.rpartition("[")[0].partition(":")
                kind, name = (
                    (f"{kind}:{rest.partition(':')[0]}", rest.partition(":")[2])
                    if kind == "state"
                    else (kind, rest)
                )
                start, stop = map(int, key.rpartition("[")[2][:-1].split(":"))
                whole = full[kind, name]
                assert torch.equal(file.get_tensor(key), whole[start:stop] if whole.dim() else whole)


def test_floats_may_change_dtype_and_it_is_told(tmp_path: Path) -> None:
    weights = torch.randn(9, 4)
    save(tmp_path / "1", RunSnapshot([HeldRows.of("w", "parameter", weights)]), NoPeers())
    target = torch.zeros(9, 4, dtype=torch.bfloat16)
    loaded = load(tmp_path / "1", RunSnapshot([HeldRows.of("w", "parameter", target)]), NoPeers())
    assert loaded.converted == (("parameter", "w"),)
    assert torch.equal(target, weights.bfloat16())
    with pytest.raises(CheckpointError, match=r"float32 there and .* int64 here"):
        load(
            tmp_path / "1",
            RunSnapshot([HeldRows.of("w", "parameter", torch.zeros(9, 4, dtype=torch.int64))]),
            NoPeers(),
        )


def test_reads_and_writes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No callback is asked for more than a chunk, whatever the tensor has."""
    for module in ("staging", "loading"):
        monkeypatch.setattr(f"zeroshard.checkpoint.{module}.CHUNK", 4096)
    monkeypatch.setattr("zeroshard.checkpoint.staging.BLOCK", 1024)
    tensor = torch.arange(64 * 1024, dtype=torch.float32).reshape(-1, 16)
    largest = []

    def read(start: int, stop: int) -> torch.Tensor:
        largest.append((stop - start) * 64)
        return tensor[start:stop]

    def write(start: int, rows: torch.Tensor) -> None:
        largest.append(rows.nbytes)
        assert torch.equal(rows, tensor[start : start + len(rows)])

    record = HeldRows("w", "parameter", tuple(tensor.shape), "float32", (0, len(tensor)), read, write)
    save(tmp_path / "1", RunSnapshot([record]), NoPeers())
    load(tmp_path / "1", RunSnapshot([record]), NoPeers())
    assert sum(largest) == 2 * tensor.nbytes
    assert max(largest) <= 4096


def test_only_wanted_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.staging.BLOCK", 1024)
    tensor = torch.randn(1000, 16)
    save(tmp_path / "1", RunSnapshot([HeldRows.of("w", "parameter", tensor)]), NoPeers())
    count = []
    from zeroshard.checkpoint import loading

    original = loading.read_into
    monkeypatch.setattr(
        loading, "read_into", lambda fd, view, *rest: (count.append(len(view)), original(fd, view, *rest))
    )
    part = torch.zeros(10, 16)
    load(tmp_path / "1", RunSnapshot([HeldRows.of("w", "parameter", part, 500, 1000)]), NoPeers())
    assert torch.equal(part, tensor[500:510])
    assert sum(count) <= 2 * 1024


def test_values_with_tensors_and_what_belongs_to_one_rank(tmp_path: Path) -> None:
    full = model()
    extra = {"ema": torch.randn(3, 3), "lr": (0.1, 0.2)}

    def work(peers: ThreadPeers) -> None:
        rank = peers.rank
        rng = torch.full((5,), rank, dtype=torch.uint8)
        records = [*held(full, rank, 2), HeldRows.of("rng", f"rank:{rank}", rng)]
        own = {"position": rank * 10, "cache": torch.tensor([rank])}
        save(tmp_path / "1", RunSnapshot(records, {"step": 9, "extra": extra}, own), peers)

    all_good(ranks(2, work))

    def back(peers: ThreadPeers) -> None:
        rank = peers.rank
        rng = torch.full((5,), 77, dtype=torch.uint8)
        records = [*held(blank(full), rank, 3), HeldRows.of("rng", f"rank:{rank}", rng)]
        loaded = load(tmp_path / "1", RunSnapshot(records), peers)
        assert loaded.values["step"] == 9
        assert loaded.values["extra"]["lr"] == (0.1, 0.2)
        assert torch.equal(loaded.values["extra"]["ema"], extra["ema"])
        assert loaded.unused == ()
        if rank < 2:
            assert loaded.own is not None
            assert loaded.own["position"] == rank * 10
            assert loaded.own["cache"].item() == rank
            assert rng.unique().tolist() == [rank]
        else:
            assert loaded.own is None
            assert loaded.absent == (("rank:2", "rng"),)
            assert rng.unique().tolist() == [77]

    all_good(ranks(3, back))


def test_a_tensor_may_be_named_by_its_owner_alone(tmp_path: Path) -> None:
    """Whole tensors dealt out to ranks: nobody else mentions them, and nothing is missing or left over."""
    tensors = [torch.randn(4), torch.randn(6)]
    all_good(
        ranks(
            2,
            lambda p: save(
                tmp_path / "1", RunSnapshot([HeldRows.of(f"w{p.rank}", "parameter", tensors[p.rank])]), p
            ),
        )
    )
    targets = [torch.zeros(4), torch.zeros(6)]
    all_good(
        ranks(
            2,
            lambda p: load(
                tmp_path / "1", RunSnapshot([HeldRows.of(f"w{p.rank}", "parameter", targets[p.rank])]), p
            ),
        )
    )
    assert all(map(torch.equal, tensors, targets))
