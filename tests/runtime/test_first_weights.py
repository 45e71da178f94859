"""`shard(weights=...)`: the first values of a model are read from files, by rows, as if the model had been
built and loaded whole before."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW

import zeroshard as zs
from zeroshard.testing import ranks

Files = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.relu(self.up(self.norm(x)))
        return x + self.scale * self.down(hidden)


class Model(nn.Module):
    """Tied weights, a tensor without dims, saved buffers and one that is not saved."""

    angles: Tensor
    count: Tensor

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.batch = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3.0))
        self.register_buffer("angles", torch.linspace(0, 1, width), persistent=False)

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.linspace(0, 1, len(self.angles)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.batch(self.embed(tokens)) + self.angles + self.count
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def trained_elsewhere(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(5)
    model = Model()
    model.batch.running_mean = torch.randn(10)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.count):
            tensor.copy_((tensor + 0.3 * torch.randn_like(tensor)).to(dtype))
    return model


def stored(model: nn.Module, dtype: torch.dtype = torch.float32) -> Files:
    """As `save_pretrained` stores it: a tied weight once."""
    state = {name: t.detach().clone() for name, t in model.state_dict().items() if name != "head.weight"}
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}


def hugging_face(folder: Path, tensors: Files, count: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names, places = sorted(tensors), {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        held = {name: tensors[name] for name in names[number::count]}
        save_file(held, folder / file)
        places |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def on_meta(dtype: torch.dtype = torch.float32) -> Model:
    with torch.device("meta"):
        return Model().to(dtype)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, world: int = 1) -> Files:
    torch.manual_seed(0)
    for _ in range(2):
        tokens = torch.randint(7, (8,))
        mine = tokens.chunk(world)[rank]
        loss = nn.functional.cross_entropy(model(mine).float(), mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {}


def trained(build: Any, weights: Any, options: dict[str, Any]) -> Files:
    model = build()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, weights=weights, buffers="local", **options)
    model.batch.eval()
    steps(model, optimizer, run.rank, run.size)
    run.close()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(found: Files, expected: Files) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


BF16 = zs.Precision("bfloat16", keep=("batch.*",))
DISK = "a folder"  # in place of the path, which a test knows
SETUPS: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 1},
    {"stage": 0},
    {"stage": 3, "precision": BF16},
    {"stage": 3, "precision": BF16, "offload": {"optimizer": "device", "master": "split"}},
    {"stage": 2, "precision": BF16, "offload": {"optimizer": "device", "master": "split"}},
    {
        "stage": 2,
        "precision": BF16,
        "offload": {"optimizer": "host", "master": "split"},
        "clip_norm": math.inf,
    },
    {"stage": 3, "precision": BF16, "offload": {"optimizer": "host"}},
    {"stage": 3, "precision": BF16, "offload": {"optimizer": "host", "parameters": "host"}},
    {"stage": 3, "split": "whole"},
]
ALONE: list[dict[str, Any]] = [
    {"stage": 3, "precision": BF16, "offload": {"optimizer": "disk", "path": DISK}, "clip_norm": 1.0},
    {
        "stage": 3,
        "precision": BF16,
        "offload": {"optimizer": "disk", "parameters": "disk", "path": DISK},
        "clip_norm": 1.0,
    },
]


def opened(options: dict[str, Any], folder: str) -> dict[str, Any]:
    if "offload" not in options:
        return options
    given = {key: folder if value == DISK else value for key, value in options["offload"].items()}
    return options | {"offload": zs.Offload(**given)}


def compared(folder: str, setups: list[dict[str, Any]], builds: list[Any]) -> None:
    """From files onto the meta device, or over a model that has other values: as from a loaded model."""
    disk = str(Path(folder).parent)
    for options in setups:
        options = opened(options, disk)
        expected = trained(trained_elsewhere, None, options)
        for build in builds:
            same(trained(build, folder, options), expected)


@pytest.mark.ranks
def test_values_are_those_of_a_model_that_was_loaded(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "hf", stored(trained_elsewhere()))
    ranks(2).run(compared, str(folder), SETUPS[1::2], [on_meta])
    ranks(2).run(compared, str(folder), SETUPS[:1], [on_meta, Model])
    compared(str(folder), [*SETUPS[1::3], *ALONE], [on_meta, Model])


def test_dtypes_become_the_masters(tmp_path: Path) -> None:
    """bf16 files of an fp32 model; fp32 files of a bf16 model whose master is fp32 keep all their bits."""
    folder = hugging_face(tmp_path, stored(trained_elsewhere(), torch.bfloat16))
    run = zs.shard(model := on_meta(), weights=folder, precision=BF16)
    run.close()
    for name, tensor in load_file(folder / "model-00001-of-00003.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor.float()), name
    source = stored(trained_elsewhere())
    save_file(source, tmp_path / "fp32.safetensors")
    model = on_meta(torch.bfloat16)
    model.batch.float()
    run = zs.shard(
        model,
        AdamW(model.parameters()),
        weights=tmp_path / "fp32.safetensors",
        precision=BF16,
    )
    with run.gathered("blocks.0.up.weight") as whole:
        assert torch.equal(whole["blocks.0.up.weight"], source["blocks.0.up.weight"])
    run.close()


def test_other_formats(tmp_path: Path) -> None:
    source = trained_elsewhere()
    expected = source.state_dict()
    torch.save({"model": stored(source)}, tmp_path / "one.pt")
    save_file({f"net.{n}": t for n, t in stored(source).items()}, tmp_path / "prefixed.safetensors")
    run = zs.shard(source)
    run.save(tmp_path / "ours")
    run.close()
    prefixed = zs.Weights(tmp_path / "prefixed.safetensors", prefix="net")
    for weights in (tmp_path / "one.pt", prefixed, str(tmp_path / "ours")):
        run = zs.shard(model := on_meta(), weights=weights)
        run.close()
        same(model.state_dict(), expected)
        assert torch.equal(model.angles, source.angles)
        assert model.head.weight is model.embed.weight


def test_all_that_does_not_fit_is_listed_before_anything_is_taken(tmp_path: Path) -> None:
    files = stored(trained_elsewhere())
    del files["blocks.1.up.bias"]
    files["blocks.1.up.extra"] = torch.ones(2)
    files["blocks.2.scale"] = torch.ones(2)
    files["count"] = torch.tensor(3)
    folder = hugging_face(tmp_path, files)
    model = on_meta()
    told = re.escape(
        f"the weights in {folder} do not fit the model. 1 missing in the files: `blocks.1.up.bias`; "
        "1 unexpected: `blocks.1.up.extra`; 2 unlike: "
    )
    unlike = r"`blocks.2.scale` is \(2,\) float32 in the files and \(\) float32 in the model"
    hint = re.escape(f'weights=zs.Weights("{folder}", ...); missing="blocks.1.up.*" leaves the first to be')
    with pytest.raises(zs.CheckpointError, match=told) as caught:
        zs.shard(model, weights=folder)
    assert re.search(unlike, str(caught.value))
    assert "`count` is () int64 in the files and () float32 in the model" in str(caught.value)
    assert re.search(hint, str(caught.value))
    assert str(caught.value).endswith('unused="blocks.1.up.*" leaves the first unread. Nothing was changed.')
    assert all(p.is_meta for p in model.parameters())


def test_a_new_head_may_be_missing(tmp_path: Path) -> None:
    files = {f"old.{n}" if n.startswith("embed") else n: t for n, t in stored(trained_elsewhere()).items()}
    save_file(files, tmp_path / "w.safetensors")
    given = zs.Weights(tmp_path / "w.safetensors", missing="embed.*", unused=("old.*",))
    run = zs.shard(model := on_meta(), weights=given)
    run.close()
    assert not model.embed.weight.isnan().any()
    assert torch.equal(model.blocks[0].up.weight, files["blocks.0.up.weight"])  # type: ignore[union-attr]
    kept = Model()
    before = kept.embed.weight.detach().clone()
    zs.shard(kept, weights=given).close()
    assert torch.equal(kept.embed.weight, before)


def test_what_is_no_weights() -> None:
    with pytest.raises(zs.CheckpointError, match=r"absent does not exist. Pass a folder or a file on this"):
        zs.shard(Model(), weights="absent")
    with pytest.raises(zs.OptionError, match=r"zs.Weights\(...\), and got a dict. A state dict in memory is"):
        zs.shard(Model(), weights={})  # type: ignore[arg-type]
    with pytest.raises(zs.OptionError, match=r'Weights\(missing=3\): pass patterns of names, such as "head'):
        zs.Weights("x", missing=3)  # type: ignore[arg-type]


def apart(folder: str, alike: bool) -> str:
    rank = dist.get_rank()
    path = Path(folder) / f"{rank}.safetensors"
    files = stored(trained_elsewhere(), torch.bfloat16 if rank and alike else torch.float32)
    if rank and not alike:
        del files["blocks.0.scale"]
    save_file(files, path)
    try:
        zs.shard(on_meta(), weights=path)
    except zs.ZeroShardError as error:
        return str(error)
    return "nothing"


@pytest.mark.ranks
def test_ranks_with_other_files(tmp_path: Path) -> None:
    for text in ranks(2).run(apart, str(tmp_path), True):
        assert "ranks disagree about the weights: tensors in their files have other names, shapes" in text
    for text in ranks(2).run(apart, str(tmp_path), False):
        assert "1 missing in the files: `blocks.0.scale`" in text


def test_a_base_of_transformers_fills_a_model_with_a_head(tmp_path: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    library = pytest.importorskip("transformers")
    config = library.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    base = library.LlamaModel(config)
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    full = library.LlamaForCausalLM(config)
    full.save_pretrained(tmp_path / "full")
    tokens = torch.arange(8).view(2, 4)
    for kind, path, expected in (
        (library.LlamaForCausalLM, "full", full),
        (library.LlamaForCausalLM, zs.Weights(tmp_path / "base", missing="lm_head.*"), base),
        (library.LlamaModel, zs.Weights(tmp_path / "full", unused="lm_head.*"), full.model),
    ):
        with torch.device("meta"):
            model = kind(config)
        run = zs.shard(model, weights=path if isinstance(path, zs.Weights) else tmp_path / path)
        run.close()
        body = model.model if expected is base else model
        with torch.no_grad():
            assert torch.equal(body.eval()(tokens)[0], expected.eval()(tokens)[0])
