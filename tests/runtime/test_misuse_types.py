"""A value of the wrong type ends in an error of ours that says what to pass, before any work is done."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import zeroshard as zs
from zeroshard import search
from zeroshard.machine import GPUS, Machine, machine

NEEDED: dict[type, dict[str, Any]] = {
    zs.Adaptive: {"choices": [zs.EveryStep(), zs.Delayed()]},
    zs.Weights: {"path": "weights"},
    Machine: {f.name: getattr(GPUS["H100"], f.name) for f in dataclasses.fields(Machine)},
}
RECORDS = [
    kind
    for name in zs.__all__
    if isinstance(kind := getattr(zs, name), type)
    and dataclasses.is_dataclass(kind)
    and kind not in (zs.Plan, zs.Stats)  # results, not options
] + [Machine]
WRONG = ["no", 3, 1.5, None, [1], ["a"], (), {}, True, math.nan, b"x", torch.ones(2), Path("x"), object]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_of_every_option_is_checked(kind: type) -> None:
    """Whatever is put there is refused by name, or taken; what is taken can be hashed and compared."""
    refused = []
    for field in dataclasses.fields(kind):
        for value in WRONG:
            try:
                made = kind(**{**NEEDED.get(kind, {}), field.name: value})
            except zs.OptionError as error:
                refused.append((field.name, str(error)))
            else:
                assert made == dataclasses.replace(made)
                hash(made)
                assert field.type != "bool" or getattr(made, field.name) is value is True
    assert all(field in said or kind.__name__ in said for field, said in refused)
    assert len(refused) >= 8 * len(dataclasses.fields(kind))


@pytest.mark.parametrize(("make", "said"), [
    (lambda: zs.Offload(undo="no"), r"^Offload\(undo='no'\): pass True or False\.$"),
    (lambda: zs.Offload(threads=True), r"^Offload\(threads=True\): pass a whole number or None\.$"),
    (lambda: zs.Offload(stages=None), r"Offload\.stages=None must be a whole number, 2 or more"),
    (lambda: zs.Offload("disk", path=3), r"^Offload\.path: 3 is no path; pass a text such as"),
    (lambda: zs.Offload("disk", path=b"x"), r"^Offload\.path: b'x' is no path"),
    (lambda: zs.Options(node_cache="no"), r"^node_cache='no': pass True or False\.$"),
    (lambda: zs.Options(clip_norm=True), r"clip_norm=True must be above zero"),
    (lambda: zs.Options(stage=torch.ones(2)), r"stage=tensor\(.*\) is not one of 0, 1, 2, 3"),
    (lambda: zs.Precision(None), r"Precision\.compute=None is not a floating dtype"),
    (lambda: zs.Precision(master=None), r"Precision\.master=None is not a floating dtype"),
    (lambda: zs.Adaptive([zs.EveryStep(), zs.Delayed()], window=4.0), r"window=4\.0\): pass a whole number"),
    (lambda: zs.Int8(residual=["float32"]), r"^Int8\(residual=\['float32'\]\): pass 'float32' or 'bfloat16'"),
    (lambda: zs.TopK(ratio="1%"), r"^TopK\(ratio='1%'\): pass a number\.$"),
    (lambda: zs.LowRank(True), r"^LowRank\(rank=True\): pass a whole number\.$"),
    (lambda: machine("H100", network=None), r"^Machine\(network=None\): pass a number\.$"),
    (lambda: machine("H100", cores="8"), r"^Machine\(cores='8'\): pass a whole number\.$"),
])  # fmt: skip
def test_what_the_error_says(make: Any, said: str) -> None:
    with pytest.raises(zs.OptionError, match=said):
        make()


def test_a_family_of_models_that_is_none() -> None:
    with pytest.raises(zs.OptionError, match=r"largest_model\(3\) takes a function of a size"):
        search.largest_model(3, ranks=1, limit="1GiB")  # type: ignore[arg-type]


def test_lists_and_paths_are_taken() -> None:
    assert zs.Precision(keep=["*norm*"]).keep == ("*norm*",)
    assert zs.Local(rates=[1, 0.5]).rates == (1, 0.5)
    assert zs.Offload("disk", path=Path("/tmp") / "x").path == "/tmp/x"


# ---------------------------------------------------------------------- calls


@pytest.fixture
def run() -> Iterator[zs.Run]:
    model = nn.Linear(3, 3)
    made = zs.shard(model, AdamW(model.parameters()))
    yield made
    made.close()


@pytest.mark.parametrize("given", [3, None, b"x", [1], True, ""])
def test_what_is_no_path(run: zs.Run, given: Any) -> None:
    plan = zs.plan(run.model, ranks=1, limit="1GiB")
    calls = [run.save, run.load, zs.latest, plan.write, zs.Plan.read]
    for call in [*calls, run.resume] if given is not None else calls:
        with pytest.raises(
            zs.OptionError, match=r"^[\w.]+\(\w+\): .* is no path; pass a text such as \"ckpt/10"
        ):
            call(given)


@pytest.mark.parametrize(("call", "said"), [
    (lambda run: run.gathered(3).__enter__(), r"run\.gathered\(3\): .* texts or patterns, one after another"),
    (lambda run: run.gathered(["bias"]).__enter__(), r"\(\['bias'\]\): .* run\.gathered\(\*names"),
    (lambda run: run.gathered(write="no").__enter__(), r"^write='no': pass True or False"),
    (lambda run: run.save("x", background="no"), r"^background='no': pass True or False"),
    (lambda run: run.load("x", strict=None), r"^strict=None: pass True or False"),
    (lambda run: run.resume("x", strict=1), r"^strict=1: pass True or False"),
    (lambda run: zs.plan(run.model, ranks=1, limit="1GiB").diff(3), r"diff\(\) takes a zs\.Plan, not int"),
])  # fmt: skip
def test_arguments_of_a_run(run: zs.Run, call: Any, said: str) -> None:
    with pytest.raises(zs.OptionError, match=said):
        call(run)


def test_waiting_for_a_text(run: zs.Run, tmp_path: Path) -> None:
    pending = run.save(tmp_path / "1", background=True)
    with pytest.raises(zs.OptionError, match=r"wait\(timeout='5'\): pass a number of seconds, or None"):
        pending.wait("5")  # type: ignore[call-arg, union-attr]
    assert pending.wait(60.0).path == tmp_path / "1"  # type: ignore[call-arg, union-attr]


def test_keeping_true_checkpoints(run: zs.Run, tmp_path: Path) -> None:
    with pytest.raises(zs.CheckpointError, match=r"keep=True is no number of checkpoints to keep; pass 1 or"):
        run.save(tmp_path / "1", keep=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "said"), [
    ({"init": 3}, r"init=3 must be a function that fills a module on the meta device"),
    ({"group": "world"}, r"group='world' is no process group of torch\.distributed that this rank is in"),
    ({"limit": "1GiB", "nodes": "2"}, r"nodes='2' must be a number of nodes, 1 or more"),
    ({"limit": "1GiB", "ranks_per_node": 1.5}, r"ranks_per_node=1\.5 must be a number of ranks-per-node"),
    ({"limit": "1GiB", "micro_batches": True}, r"micro_batches=True must be a number of micro-batches"),
    ({"limit": "1GiB", "disk_path": 3}, r"disk_path: 3 is no path"),
    ({"limit": "1GiB", "loss": "mse"}, r"loss='mse' must be a function that makes the loss"),
    ({"limit": "1GiB", "loss": torch.mean}, r"loss= without batch=: it is called with the model's output"),
    ({"limit": [1]}, r"limit=\[1\] is not a size"),
])  # fmt: skip
def test_arguments_of_shard(given: dict[str, Any], said: str) -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    with pytest.raises(zs.OptionError, match=said):
        zs.shard(model, AdamW(model.parameters()), **given)
    assert model.weight is weight
    if "limit" in given:
        with pytest.raises(zs.OptionError, match=said):
            zs.plan(model, ranks=1, **given)


# ---------------------------------------------------------------------- what torch would say otherwise


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(x))
        return out


def test_a_tied_weight_by_its_second_name() -> None:
    model = Tied()
    before = model.embed.weight.detach().clone()
    run = zs.shard(model, AdamW(model.parameters()))
    with run.gathered("head.weight", write=True) as whole:
        assert list(whole) == ["head.weight"]
        assert torch.equal(whole["head.weight"], before)
        assert model.embed.weight is whole["head.weight"]
        with torch.no_grad():
            whole["head.weight"].mul_(2)
    with run.gathered("head.*") as whole:
        assert list(whole) == ["head.weight", "head.bias"]
        assert torch.equal(whole["head.weight"], 2 * before)
    with run.gathered("embed.weight", "head.weight") as whole:
        assert whole["embed.weight"] is whole["head.weight"]
    with run.gathered() as whole:
        assert list(whole) == ["embed.weight", "head.bias"]
    run.close()


@pytest.mark.parametrize("given", [
    {"precision": zs.Precision(keep="head.weight")},
    {"compress": {"*.bias": None, "head.w*": zs.Int8()}},
    {"gather": {"head.weight": zs.Int8()}},
])  # fmt: skip
def test_options_for_a_tied_weight_go_by_its_first_name(given: dict[str, Any]) -> None:
    said = r": \"head\.w.*\" names `head\.weight`, which is tied to .* write \"embed\.weight\"\.$"
    with pytest.raises(zs.OptionError, match=said):
        zs.shard(Tied(), **given)
    with pytest.raises(zs.OptionError, match=said):
        zs.plan(Tied(), ranks=2, limit="1GiB", **given)


def normed(count: int = 1) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(count)]
    return nn.Sequential(*blocks)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_statistics_beside_weights_of_sixteen_bits(precision: str) -> None:
    model = normed()
    said = r"`0\.1` \(BatchNorm1d\) has statistics in float32, .* in float32: precision=zs\.Precision\("
    for refused in (lambda: zs.shard(model, precision=precision), lambda: zs.plan(
        model, ranks=1, limit="1GiB", precisions=(None, precision)
    )):  # fmt: skip
        with pytest.raises(zs.OptionError, match=said) as caught:
            refused()
    typed = str(caught.value).rpartition("precision=")[2].removesuffix(".")
    run = zs.shard(model, AdamW(model.parameters()), precision=eval(typed))
    model(torch.randn(4, 3)).float().sum().backward()
    assert model[0][1].running_mean.dtype == torch.float32
    assert model[0][1].running_mean.any()
    run.close()


def test_many_batch_statistics_and_those_of_a_cast_model() -> None:
    model = normed(5)
    with pytest.raises(zs.OptionError, match=r"keep=tuple\(f\"\{n\}\.\*\" for n, m in model\.named_modules"):
        zs.shard(model, precision="bf16")
    model[0][1].bfloat16()  # as is all right where it computes so
    keep = tuple(f"{n}.*" for n, m in model.named_modules() if hasattr(m, "running_mean"))
    said = (
        r"`0\.1` \(BatchNorm1d\) has statistics in bfloat16 .* Cast that module before shard\(\): \.to\(torch"
    )
    with pytest.raises(zs.OptionError, match=said):
        zs.shard(model, precision=zs.Precision(keep=keep))
    zs.shard(model, precision=zs.Precision(keep=keep[1:])).close()


def test_a_pattern_to_keep_that_names_nothing() -> None:
    with pytest.raises(
        zs.OptionError, match=r'Precision\.keep pattern "\*norm\*" matches none of the 2 param'
    ):
        zs.shard(nn.Linear(2, 2), precision=zs.Precision(keep="*norm*"))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_that_names_its_inputs(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    """Torch skips inputs that it cannot reach without a word: parameters are refused, and after a backward
    to something else the step says, once, that it has no gradient."""
    model = nn.Linear(3, 1)
    optimizer = AdamW(model.parameters())
    run = zs.shard(model, optimizer, stage=stage)
    with pytest.raises(zs.StateError, match=r"backward\(inputs=\.\.\.\) asks for the gradient of `weight`"):
        model(torch.ones(2, 3)).sum().backward(inputs=list(model.parameters()))
    with caplog.at_level(logging.WARNING, "zeroshard"):
        for _ in range(2):
            batch = torch.ones(2, 3, requires_grad=True)
            model(batch).sum().backward(inputs=[batch])
            optimizer.step()
        assert [record.message.partition(": since")[0] for record in caplog.records] == [
            "rank 0: optimizer.step() without a gradient"
        ]
        assert "Call loss.backward() without inputs=[...]" in caplog.text
    run.close()


def test_a_step_with_gradients_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({}, {"offload": zs.Offload(threads=1), "clip_norm": 1.0}, {"sync": zs.Delayed()}):
        model = nn.Linear(3, 1)
        optimizer = AdamW(model.parameters())
        run = zs.shard(model, optimizer, **options)
        with caplog.at_level(logging.WARNING, "zeroshard"):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        run.close()
    assert not caplog.records
