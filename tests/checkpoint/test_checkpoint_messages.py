"""What checkpoints say of what cannot be stored, and of files that are none or not what they should be, in
the words that are shown."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import blank, held, model, saved_once
from safetensors.torch import save_file
from test_checkpoint_hostile import rewrite

from zeroshard.checkpoint import HeldRows, NoPeers, RunSnapshot, export, import_weights, load, save
from zeroshard.checkpoint.tensor_file import header_of, read_into
from zeroshard.checkpoint.values import DEEPEST, joined, pack, unpack
from zeroshard.errors import CheckpointError

FILE = "rank-00000-of-00001.safetensors"


def row(name: str = "w", shape: tuple[int, ...] = (2,), dtype: str = "float32") -> HeldRows:
    nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
    return HeldRows(name, "parameter", shape, dtype, (0, 0), nothing, nothing)


def endless(depth: int) -> dict[str, Any]:
    return {"a": endless(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("things", "said"),
    [
        ([row(), row()], "`w` (parameter) is given twice."),
        ([row(dtype="float3")], "`w` (parameter) has dtype 'float3'; known are "),
        ([row(name="")], "a tensor named `` of kind 'parameter' cannot be stored: too long, or empty."),
        ([row(shape=(-1,))], "`w` (parameter) has the impossible shape (-1,)."),
    ],
)
def test_tensors_that_cannot_be_stored(things: list[HeldRows], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        save(tmp_path / "1", RunSnapshot(things), NoPeers())
    assert os.listdir(tmp_path) == []


def test_a_dtype_that_files_cannot_hold() -> None:
    said = r"tensors of torch.quint8 cannot be stored; a checkpoint holds .*\. Convert it first\."
    with pytest.raises(CheckpointError, match=said):
        HeldRows.of("w", "parameter", torch.empty(2, dtype=torch.uint8).view(torch.quint8))


def test_rows_that_the_tensor_does_not_have(tmp_path: Path) -> None:
    over = HeldRows("w", "parameter", (10, 2), "float32", (8, 12), lambda a, b: torch.ones(b - a, 2), print)
    with pytest.raises(
        CheckpointError, match=r"`w` \(parameter\) has 10 rows, and a rank says it holds others"
    ):
        save(tmp_path / "1", RunSnapshot([over]), NoPeers())


def test_a_manifest_that_could_not_be_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.manifest.LIMIT", 300)
    with pytest.raises(
        CheckpointError, match=r"the manifest would have \d+ bytes; at most 300 are read back"
    ):
        saved_once(tmp_path / "1")


def test_a_hidden_name(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"/\.1 is not a name for a checkpoint: it is empty or hidden\."
    ):
        saved_once(tmp_path / ".1")


def test_a_file_that_changes_behind_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zeroshard.checkpoint import saving

    real = saving.write_file

    def cut(folder: Path, *rest: Any) -> Any:
        wrote = real(folder, *rest)
        os.truncate(folder / FILE, 9)
        return wrote

    monkeypatch.setattr(saving, "write_file", cut)
    with pytest.raises(CheckpointError, match=rf"{FILE}, just written by its rank, .* as rank 0 sees it in "):
        saved_once(tmp_path / "1")


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"$float": "abc"}, "the manifest's values are malformed: could not convert string"),
        ({"$int": 3}, "the manifest's values hold a malformed `$int`."),
        ({"$eval": "1"}, "the manifest's values hold an unknown mark `$eval`."),
        (endless(DEEPEST + 4), f"the manifest's values are nested deeper than {DEEPEST} levels."),
    ],
)
def test_values_of_a_manifest(data: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        unpack(data, lambda name: torch.empty(0))


def test_values_that_cannot_be_packed() -> None:
    with pytest.raises(
        CheckpointError, match=f"is nested deeper than {DEEPEST} levels; or it contains itself"
    ):
        pack(endless(DEEPEST + 2))
    said = r"is a builtins.object, which a checkpoint cannot hold: it takes numbers, strings, bytes, None"
    with pytest.raises(CheckpointError, match=said):
        pack({"it": object()})


def test_plain_values_with_a_tensor() -> None:
    with pytest.raises(CheckpointError, match="plain values refer to the tensor `w`"):
        joined([{"key": {"name": {"$tensor": "w"}}}])


# ---------------------------------------------------------------------- damaged and made up


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved_once(tmp_path / "1")
    return tmp_path / "1"


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, RunSnapshot(held(blank(model()))), NoPeers())
    return str(caught.value)


def test_a_file_of_another_size(folder: Path) -> None:
    size = (folder / FILE).stat().st_size
    os.truncate(folder / FILE, 700)
    assert f"{FILE} has 700 bytes and was saved with {size}: truncated (it holds" in refusal(folder)


def test_values_without_their_tensor(folder: Path) -> None:
    rewrite(folder, lambda data: data.update(values={"x": {"$tensor": "gone"}}))
    assert "the values refer to the tensor `gone`, which is not stored." in refusal(folder)


def test_checksums_that_are_none(folder: Path) -> None:
    def spoil(data: dict[str, Any]) -> None:
        data["files"][0][2] = "notahexa"

    rewrite(folder, spoil)
    assert "has a checksum that is not hexadecimal." in refusal(folder)


def test_manifests_of_others(folder: Path) -> None:
    rewrite(folder, lambda data: data.update(world=-1))
    assert "has a world that is no count. It is damaged or was not written by ZeroShard." in refusal(folder)
    (folder / "manifest.json").write_text("{}")
    assert "manifest.json is not the manifest of a ZeroShard checkpoint." in refusal(folder)


def test_nothing_to_export(tmp_path: Path) -> None:
    save(tmp_path / "1", RunSnapshot([HeldRows.of("w", "state:exp_avg", torch.ones(2))]), NoPeers())
    with pytest.raises(CheckpointError, match="/1 holds no parameters, so there is nothing to export"):
        export(tmp_path / "1", tmp_path / "out")
    with pytest.raises(CheckpointError, match="max_shard_bytes=0 holds nothing; pass for example"):
        export(tmp_path / "1", tmp_path / "out", max_shard_bytes=0)


def test_no_room_to_export(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.durable_files.free_bytes", lambda path: 7)
    said = r"the disk has no room to export to .*/out: .* are needed and 7 B are free\."
    with pytest.raises(CheckpointError, match=said):
        export(folder, folder.parent / "out")


def test_a_name_that_files_keep_for_themselves() -> None:
    said = "a safetensors file cannot hold a tensor named `__metadata__` here: the name is taken"
    with pytest.raises(CheckpointError, match=said):
        header_of([("__metadata__", "float32", (2,))], {})


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    said = r"/f ends at byte 5 and 3 more are needed: truncated\."
    with open(tmp_path / "f", "rb") as file, pytest.raises(CheckpointError, match=said):
        read_into(file.fileno(), memoryview(bytearray(7)), 1, tmp_path / "f")


# ---------------------------------------------------------------------- files of other libraries


def header(table: object) -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("w.safetensors", b"1234", "has 4 bytes: too short for a safetensors file."),
        ("w.safetensors", header([]), "w.safetensors: the header is not an object."),
        (
            "w.safetensors",
            header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),
            "the header's entry for `w` is malformed or points outside the file.",
        ),
        ("model.safetensors.index.json", b"{}", "has no weight_map, so it is not an index."),
    ],
)
def test_sources_that_are_not_what_they_should_be(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        import_weights(tmp_path / "in", tmp_path / "out")


def test_an_index_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.sources.HEADER_LIMIT", 8)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="has 18 bytes; an index has at most 8"):
        import_weights(tmp_path, tmp_path / "out")


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, listdir = tmp_path / "in", os.listdir

    def refuse(path: Path) -> list[str]:
        if path != source:
            return listdir(path)
        raise PermissionError(13, "Permission denied")

    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "w.safetensors")
    monkeypatch.setattr("zeroshard.checkpoint.sources.os.listdir", refuse)
    with pytest.raises(CheckpointError, match=rf"{source} cannot be read: Permission denied\."):
        import_weights(source, tmp_path / "out")


def test_state_dicts_that_cannot_be_imported(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 2).to_sparse()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="`w` is sparse or quantized, which cannot be imported"):
        import_weights(tmp_path / "w.pt", tmp_path / "out")
    deep: Any = torch.ones(2)
    for _ in range(40):
        deep = {"a": deep}
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "twice.pt")
    with pytest.raises(CheckpointError, match=r"/twice\.pt names `b` twice\."):
        import_weights(tmp_path / "twice.pt", tmp_path / "out", "a")
    torch.save(deep, tmp_path / "deep.pt")
    with pytest.raises(CheckpointError, match="the state dict is nested deeper than 32 levels"):
        import_weights(tmp_path / "deep.pt", tmp_path / "out")


def changed(information: Any, **fields: object) -> None:
    for name, value in fields.items():
        object.__setattr__(information, name, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda info, _: changed(info, relative_path="../x"), "names a file outside its folder: `../x`."),
        (
            lambda info, _: changed(info, transform_descriptors=["zstd"]),
            "`w` is compressed or transformed by an extension of the writer. Save it without extensions",
        ),
        (lambda info, _: changed(info, length=1 << 30), "is truncated: it ends inside `w`."),
        (lambda info, _: changed(info, offset=3, length=50), "`w` cannot be read: "),
        (
            lambda _, record: changed(record, size=torch.Size([9])),
            "the parts of `w` do not make up its shape (9,).",
        ),
        (
            lambda _, record: changed(record.properties, dtype=torch.float64),
            "`w` is not what .metadata says it is.",
        ),
    ],
)
def test_folders_of_torch_that_are_not_what_they_should_be(
    change: Callable[[Any, Any], None], said: str, tmp_path: Path
) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(64)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    told = pickle.loads(path.read_bytes())
    change(next(iter(told.storage_data.values())), told.state_dict_metadata["w"])
    path.write_bytes(pickle.dumps(told))
    with pytest.raises(CheckpointError, match=re.escape(said)):
        import_weights(tmp_path / "dcp", tmp_path / "out")


def test_metadata_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.checkpoint.sources._LIMIT", 4)
    (tmp_path / ".metadata").write_bytes(b"12345")
    with pytest.raises(CheckpointError, match=r"\.metadata has more than 4 bytes"):
        import_weights(tmp_path, tmp_path / "out")
