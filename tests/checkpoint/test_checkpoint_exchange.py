"""Weights out to and in from other formats; and files that bring code with them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import model, save_as
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zeroshard.checkpoint import (
    HeldRows,
    NoPeers,
    RunSnapshot,
    export,
    import_weights,
    load,
    read_manifest,
    save,
    verify,
)
from zeroshard.checkpoint.loading import CheckpointReader
from zeroshard.checkpoint.sources import tensors
from zeroshard.checkpoint.weights import Weights, open_weights
from zeroshard.errors import CheckpointError

WEIGHTS = {name: tensor for (kind, name), tensor in model().items() if kind in ("parameter", "buffer")}


def contents(path: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(path) as reader:
        return {entry.name: reader.whole(entry) for entry in reader.manifest.entries}


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    same = all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
    return one.keys() == other.keys() and same


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_as(tmp_path / "1", model(), world=3)
    return tmp_path / "1"


def test_one_file_without_an_index(checkpoint: Path, tmp_path: Path) -> None:
    done = export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert done.tensors == len(WEIGHTS)
    assert alike(load_file(tmp_path / "out" / "model.safetensors"), WEIGHTS)


def test_several_files_with_an_index(checkpoint: Path, tmp_path: Path) -> None:
    done = export(checkpoint, tmp_path / "out", max_shard_bytes=500)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert sorted(files) == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in WEIGHTS.values()) == done.bytes
    found = {}
    for name in files:
        part = load_file(tmp_path / "out" / name)
        assert all(index["weight_map"][key] == name for key in part)
        found |= part
    assert alike(found, WEIGHTS)
    assert alike(contents(import_weights(tmp_path / "out", tmp_path / "2").path), WEIGHTS)


def test_floats_are_converted_and_others_are_not(checkpoint: Path, tmp_path: Path) -> None:
    export(checkpoint, tmp_path / "out", dtype="bfloat16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["counts"].dtype == torch.int64
    assert torch.equal(found["embed.weight"], WEIGHTS["embed.weight"].bfloat16())


def test_exporting_refuses_what_it_cannot_do(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"exists and holds .* which an export does not consist of"):
        export(checkpoint, checkpoint)
    with pytest.raises(CheckpointError, match="'int8' is not one to export to"):
        export(checkpoint, tmp_path / "out", dtype="int8")
    (checkpoint / "rank-00001-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank-00001-of-00003"):
        export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path) == ["1"]


def test_rows_larger_than_a_chunk_are_exported_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.loading.CHUNK", 256)
    monkeypatch.setattr("zeroshard.checkpoint.staging.BLOCK", 96)
    wide = torch.randn(2, 1000)
    from zeroshard.checkpoint import save

    save(tmp_path / "1", RunSnapshot([HeldRows.of("w", "parameter", wide)]), NoPeers())
    parts = []
    export(tmp_path / "1", tmp_path / "out", progress=parts.append, dtype="float64")
    assert max(parts) <= 2 * 256
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], wide.double())
    assert verify(tmp_path / "1").ok


def grown_by(work: Callable[[], object]) -> int:
    """Bytes by which the peak of this process's resident memory lies above what it had before."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def made_as_read(name: str, rows: int) -> HeldRows:
    """A tensor of 4 KiB a row that is nowhere in memory."""

    def read(start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, dtype=torch.float32).view(-1, 1).expand(-1, 1024).contiguous()

    return HeldRows(name, "parameter", (rows, 1024), "float32", (0, rows), read, lambda start, rows: None)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """512 MiB in two tensors pass through less than 128 MiB of memory, whatever is done with them."""
    tensors = RunSnapshot([made_as_read("large", 96 << 10), made_as_read("small", 32 << 10)])
    peaks = {
        "save": grown_by(lambda: save(tmp_path / "1", tensors, NoPeers())),
        "verify": grown_by(lambda: verify(tmp_path / "1")),
        "export": grown_by(lambda: export(tmp_path / "1", tmp_path / "out", dtype="bfloat16")),
        "import": grown_by(lambda: import_weights(tmp_path / "out", tmp_path / "2")),
    }
    assert max(peaks.values()) < 128 << 20, peaks
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        rounded = torch.arange(40000.0, 40002.0).bfloat16()
        assert torch.equal(file.get_slice("large")[40000:40002, 7], rounded)


def test_importing_safetensors_and_loading_it(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    saved = import_weights(tmp_path / "w.safetensors", tmp_path / "0")
    assert alike(contents(saved.path), WEIGHTS)
    buffer = torch.zeros(7, dtype=torch.int64)
    state = HeldRows.of("embed.weight", "state:exp_avg", torch.zeros(50, 8))
    loaded = load(
        saved.path, RunSnapshot([HeldRows.of("counts", "buffer", buffer), state]), NoPeers(), strict=False
    )
    assert torch.equal(buffer, WEIGHTS["counts"])
    assert loaded.absent == (("state:exp_avg", "embed.weight"),)
    assert loaded.values == {"imported_from": "w.safetensors"}


@pytest.mark.parametrize("modern", [True, False])
def test_importing_a_state_dict_of_torch_save(tmp_path: Path, modern: bool) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pt", _use_new_zipfile_serialization=modern)
    assert alike(contents(import_weights(tmp_path / "w.pt", tmp_path / "0").path), WEIGHTS)


def test_a_state_dict_inside_others_is_taken_by_name(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "epoch": 3}, tmp_path / "one.pt")
    assert alike(contents(import_weights(tmp_path / "one.pt", tmp_path / "0").path), WEIGHTS)
    torch.save({"model": WEIGHTS, "optim": {"state": {0: {"exp_avg": torch.ones(2)}}}}, tmp_path / "two.pt")
    with pytest.raises(
        CheckpointError, match=r"several things: `model` \(7 tensors\), `optim` \(1 tensors\)"
    ):
        import_weights(tmp_path / "two.pt", tmp_path / "1")
    assert alike(contents(import_weights(tmp_path / "two.pt", tmp_path / "1", "model").path), WEIGHTS)
    with pytest.raises(CheckpointError, match="no tensor below `models`"):
        import_weights(tmp_path / "two.pt", tmp_path / "2", "models")


def test_a_prefix_is_dropped_from_names(tmp_path: Path) -> None:
    save_file({f"module.{name}": tensor for name, tensor in WEIGHTS.items()}, tmp_path / "w.safetensors")
    saved = import_weights(tmp_path / "w.safetensors", tmp_path / "0", "module.")
    assert alike(contents(saved.path), WEIGHTS)


def test_importing_folders_of_hugging_dtensor(tmp_path: Path) -> None:
    names = sorted(WEIGHTS)
    places = {name: f"pytorch_model-{number % 2 + 1:05d}-of-00002.bin" for number, name in enumerate(names)}
    folder = tmp_path / "hub"
    folder.mkdir()
    for file in set(places.values()):
        torch.save({name: WEIGHTS[name] for name in names if places[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text("{}")
    assert alike(contents(import_weights(folder, tmp_path / "0").path), WEIGHTS)
    places[names[0]] = "../secret.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match=r"`../secret.bin`, which is not one of its folder"):
        import_weights(folder, tmp_path / "1")


def test_importing_a_folder_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = {"model": WEIGHTS, "optim": {"lr": 0.1, "state": {"exp_avg": torch.ones(3)}}, "step": 3}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match=r"`optim` \(1 tensors\)"):
        import_weights(tmp_path / "dcp", tmp_path / "0")
    saved = import_weights(tmp_path / "dcp", tmp_path / "0", "model")
    assert alike(contents(saved.path), WEIGHTS)
    part = next((tmp_path / "dcp").glob("*.distcp"))
    os.truncate(part, 100)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp"):
        import_weights(tmp_path / "dcp", tmp_path / "1", "model")


def test_parts_of_a_tensor_in_two_dimensions_are_put_together() -> None:
    """Slices by rows and columns, as two-dimensional parallelism saves them."""
    from zeroshard.checkpoint.sources import DcpSlice, DcpTensor

    whole = torch.randn(6, 8)
    corners = [((0, 0), (4, 3)), ((0, 3), (4, 5)), ((4, 0), (2, 8))]
    parts = {at: whole[at[0] : at[0] + size[0], at[1] : at[1] + size[1]] for at, size in corners}
    tensor = DcpTensor(
        Path(), "w", (6, 8), torch.float32, tuple(DcpSlice(at, size, "", 0, 0) for at, size in corners), {}
    )
    tensor._load = lambda part: parts[part.offsets]  # type: ignore[method-assign, index, assignment]
    assert torch.equal(torch.cat([tensor.read(0, 1), tensor.read(1, 5), tensor.read(5, 6)]), whole)
    assert tensor.loaded == {}


def test_slices_of_a_distributed_checkpoint_are_kept_for_one_tensor_at_a_time(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = {name: torch.full((8, 4), value) for name, value in (("a", 1.0), ("b", 2.0))}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    readers = {path[0]: read.__self__ for path, _, _, read in tensors(tmp_path)}  # type: ignore[attr-defined]
    for name in ("a", "b"):
        readers[name].read(0, 4)
        assert list(readers["a"].loaded) == list(readers["b"].loaded) == [(name, 0)]


def test_rows_of_safetensors_are_read_into_one_place(tmp_path: Path) -> None:
    """Else what is freed between the rows that a model keeps stays in this process: it grew by 75 MiB where
    123 were kept."""
    save_file(
        {name: torch.full((1024, 512), value) for name, value in (("a", 1.0), ("b", 2.0))},
        tmp_path / "w.safetensors",
    )
    with ExitStack() as stack:
        stored = open_weights(Weights(tmp_path / "w.safetensors"), stack)
        places = set()
        for name, value in (("a", 1.0), ("b", 2.0)):
            for first, rows in stored[name].chunks(3, 1000):
                assert first == 3
                assert torch.equal(rows, torch.full((997, 512), value))
                places.add(rows.data_ptr())
        assert len(places) == 1


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_code_in_files_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    torch.save({"w": torch.ones(2), "bomb": Bomb(marker)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        import_weights(tmp_path / "w.pt", tmp_path / "0")
    (tmp_path / "old.bin").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        import_weights(tmp_path / "old.bin", tmp_path / "0")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({"a": Bomb(marker)}))
    with pytest.raises(CheckpointError, match=r"posix.mkdir has no business there"):
        import_weights(tmp_path / "dcp", tmp_path / "0")
    assert not marker.exists()


def test_sources_that_are_none(tmp_path: Path) -> None:
    save_as(tmp_path / "1", model())
    with pytest.raises(CheckpointError, match="already is a ZeroShard checkpoint"):
        import_weights(tmp_path / "1", tmp_path / "0")
    with pytest.raises(CheckpointError, match=r"/nothing does not exist\."):
        import_weights(tmp_path / "nothing", tmp_path / "0")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no weights .* It holds nothing"):
        import_weights(tmp_path / "empty", tmp_path / "0")
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="holds no tensors"):
        import_weights(tmp_path / "x.pt", tmp_path / "0")
    torch.save({"w": torch.ones(2, 2).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(CheckpointError, match="sparse"):
        import_weights(tmp_path / "sparse.pt", tmp_path / "0")
    assert not (tmp_path / "0").exists()


def test_a_damaged_source_is_not_half_imported(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    os.truncate(tmp_path / "w.safetensors", 900)
    with pytest.raises(CheckpointError, match=r"w.safetensors"):
        import_weights(tmp_path / "w.safetensors", tmp_path / "0")
    assert os.listdir(tmp_path) == ["w.safetensors"]
    assert not (tmp_path / "0").exists()


def test_manifests_know_who_made_them(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    manifest = read_manifest(import_weights(tmp_path / "w.safetensors", tmp_path / "0").path)
    assert manifest.versions["torch"] == str(torch.__version__)
    assert manifest.world == 1
