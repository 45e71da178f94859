"""Misuse is loud: every message that a user may meet, by what was done to deserve it. Here what is passed to
`shard()`; `test_misuse_later` has what comes after it."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import Any

import pytest
import torch
from misused import Net, backward
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import distribute_module
from torch.optim import SGD, AdamW

import zeroshard as zs
from zeroshard.runtime.plan_guard import ShardArguments
from zeroshard.testing import ranks

# ---------------------------------------------------------------------- what is passed to shard()


def test_optimizer_of_another_model() -> None:
    optimizer = AdamW(Net().parameters())
    with pytest.raises(zs.ModelError, match=r"4 of the 4 parameters of AdamW are not in the model\. Build"):
        zs.shard(Net(), optimizer)


def test_optimizer_built_before_the_model_was_changed() -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    model.blocks[0] = nn.Linear(3, 3)
    with pytest.raises(zs.ModelError, match=r"2 of the 4 parameters of AdamW are not in the model"):
        zs.shard(model, optimizer)


def test_optimizer_with_state() -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    backward(model)
    optimizer.step()
    said = r"AdamW has stepped already: it holds state for 4 parameters\. Call shard\(\) before the first"
    with pytest.raises(zs.ModelError, match=said):
        zs.shard(model, optimizer)
    adagrad = torch.optim.Adagrad(model.parameters())  # which has a state from the beginning
    adagrad.step()
    with pytest.raises(zs.ModelError, match="Adagrad has stepped already"):
        zs.shard(model, adagrad)


def test_optimizers_that_cannot_be_sharded() -> None:
    model = Net()
    with pytest.raises(zs.ModelError, match=r"LBFGS needs .* no stage gives it, .* use AdamW, SGD"):
        zs.shard(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(
        zs.OptionError, match=r'split="rows" gives Adafactor rows of a matrix, and it looks at'
    ):
        zs.shard(model, torch.optim.Adafactor(model.parameters()), split="rows")
    with pytest.raises(zs.ModelError, match=r"SparseAdam needs sparse gradients, .* use AdamW"):
        zs.shard(model, torch.optim.SparseAdam(model.parameters()))


def test_things_that_are_no_model_or_no_optimizer() -> None:
    with pytest.raises(zs.ModelError, match=r"shard\(\) takes a torch.nn.Module, not list"):
        zs.shard([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(zs.ModelError, match=r"shard\(\) takes torch optimizers, not dict"):
        zs.shard(Net(), [{"lr": 1}])  # type: ignore[list-item]
    with pytest.raises(zs.ModelError, match=r"shard\(\) takes torch optimizers, not float"):
        zs.shard(Net(), 0.1)  # type: ignore[arg-type]


def test_model_without_parameters() -> None:
    with pytest.raises(zs.ModelError, match=r"Tanh has no parameters to shard"):
        zs.shard(nn.Tanh())


def test_lazy_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that lazy modules are new
        model = nn.Sequential(nn.LazyLinear(3))
    said = r"`0.weight` is uninitialised \(a lazy module\)\. Run one forward pass before shard\(\)"
    with pytest.raises(zs.ModelError, match=said):
        zs.shard(model)


def shard_what_another_library_has_sharded() -> str:
    model = distribute_module(Net(), init_device_mesh("cpu", (2,)))
    with pytest.raises(zs.ModelError) as caught:
        zs.shard(model)
    return str(caught.value)


@pytest.mark.ranks
def test_model_of_dtensors() -> None:
    said = "this model holds DTensors: another library has sharded it. Pass a plain model."
    assert ranks(2).run(shard_what_another_library_has_sharded) == [said, said]


def shard_what_torch_has_sharded() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own use of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    zs.shard(Net()).close()  # joins the group
    wrapped = nn.Sequential(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))
    plain = Net()
    optimizer = ZeroRedundancyOptimizer(plain.parameters(), AdamW)
    said = []
    for model, own in ((wrapped, None), (plain, optimizer)):
        with pytest.raises(zs.ModelError) as caught:
            zs.shard(model, own)
        said.append(str(caught.value))
    return said


@pytest.mark.ranks
def test_wrappers_of_torch_that_shard_themselves() -> None:
    wrapped, optimizer = ranks(2).run(shard_what_torch_has_sharded)[1]
    assert wrapped.startswith("`0` is wrapped in torch's FullyShardedDataParallel, which has sharded its")
    assert optimizer.startswith("ZeroRedundancyOptimizer has given each rank parameters of its own, and")


def test_model_on_two_devices() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    with FakeTensorMode():
        model[1].weight = nn.Parameter(torch.empty(2, 2, device="cuda:0"))
    with pytest.raises(zs.ModelError, match=r"the model is on several devices \(cpu, cuda:0\): move it"):
        zs.shard(model)


# ---------------------------------------------------------------------- options


def test_unknown_option() -> None:
    with pytest.raises(zs.OptionError, match=r"shard\(\) has no option 'stages'\. Did you mean \"stage\"\?"):
        zs.shard(Net(), stages=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("limt", "limit"),
        ("host_limt", "host_limit"),
        ("inits", "init"),
        ("plann", "plan"),
        ("groups", "group"),
        ("optimiser", "optimizer"),
        ("stgae", "stage"),
    ],
)
def test_an_unknown_option_is_told_the_nearest_of_all_that_there_are(typed: str, meant: str) -> None:
    """Also where another one could not be without what was mistyped."""
    given: dict[str, Any] = {"batch": torch.ones(1, 2), typed: "1GiB"}
    with pytest.raises(zs.OptionError, match=rf'has no option {typed!r}\. Did you mean "{meant}"\?') as told:
        zs.shard(Net(), **given)
    known = str(told.value).split("Known: ")[1].rstrip(".").split(", ")
    parameters = signature(zs.shard).parameters.values()
    named = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} | set(
        ShardArguments.__annotations__
    )
    assert set(known) == named - {"model"}


def test_ranks_are_no_option() -> None:
    said = r"shard\(\) has no option 'ranks': it takes .* run --ranks 4 .*plan\(\.\.\., ranks=4\) says"
    with pytest.raises(zs.OptionError, match=said):
        zs.shard(Net(), ranks=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(("options", "said"), [
    ({"stage": 4}, r"stage=4 is not one of 0, 1, 2, 3"),
    ({"stage": True}, r"stage=True is not one of 0, 1, 2, 3"),
    ({"precision": "int8"}, r"precision='int8' is not a floating dtype"),
    ({"precision": 16}, r"precision=16 must be a Precision, or one of bf16, fp16, fp32"),
    ({"bucket_bytes": "many"}, r"bucket_bytes='many' is not a size"),
    ({"bucket_bytes": 0}, r"bucket_bytes=0 must be more than zero bytes"),
    ({"clip_norm": "1"}, r"clip_norm='1' must be above zero"),
    ({"prefetch": -1}, r"prefetch=-1 must be a number of units"),
    ({"split": "row"}, r"split='row' is not one of auto, rows, level, whole\. Did you mean \"rows\"\?"),
    ({"buffers": "none"}, r"buffers='none' is not one of broadcast, local"),
    ({"transport": "mpi"}, r"transport='mpi' is not one of auto, shm, gloo, nodes, nccl"),
    ({"units": "none", "recompute": True}, r'recompute=True recomputes units, and units="none" leaves none'),
    ({"units": "none", "recompute": "blocks.*"}, r'recompute pattern "blocks\.\*" matches none of the 0'),
    ({"stage": 2, "prefetch": 4}, r"prefetch=4 gathers parameters ahead of their use, and stage 2 keeps all"),
    ({"stage": 0, "split": "level"}, r'split="level" says how tensors are divided, and stage 0 divides none'),
    ({"precision": zs.Precision(keep="*")}, r"Precision\.keep=\('\*',\) keeps all 4 parameters in float32"),
    ({"transport": "nccl"}, r"transport 'nccl' needs a process group and there is none: start with `zeros"),
    ({"transport": "shm"}, r"transport 'shm' needs a process group and there is none"),
])  # fmt: skip
def test_options_that_cannot_take_effect(options: dict[str, Any], said: str) -> None:
    model = Net()
    before = dict(model.named_parameters())
    with pytest.raises(zs.OptionError, match=said):
        zs.shard(model, AdamW(model.parameters()), **options)
    assert all(p is before[n] for n, p in model.named_parameters())  # nothing was touched
    backward(model)


@pytest.mark.parametrize(("options", "why"), [
    ({"clip_norm": 1.0}, "gradients are clipped in its step"),
    ({"offload": zs.Offload()}, "what is offloaded here is its state"),
    ({"sync": zs.Delayed()}, "the ranks meet, or stay apart, in its step"),
    ({"sync": zs.Local(), "stage": 0}, "the ranks meet, or stay apart, in its step"),
])  # fmt: skip
def test_options_of_a_step_that_no_optimizer_makes(options: dict[str, Any], why: str) -> None:
    name = next(iter(options))
    said = rf"{name}= changes nothing without an optimizer: {why}.* Pass it, .* or drop {name}=\."
    for none in (None, []):
        with pytest.raises(zs.OptionError, match=said):
            zs.shard(Net(), none, **options)


def test_options_that_a_run_without_an_optimizer_has_a_use_for() -> None:
    """It evaluates, or has an optimizer that is built later."""
    for options in (
        {"offload": zs.Offload(optimizer="device", parameters="host")},
        {"precision": "bf16", "prefetch": 2},
        {"stage": 1, "prefetch": 1, "compress": zs.Int8()},
    ):
        model = Net()
        run = zs.shard(model, **options)  # type: ignore[arg-type]
        backward(model)
        run.close()


def nccl_without_gpus() -> str:
    with pytest.raises(zs.OptionError) as caught:
        zs.shard(Net(), transport="nccl")
    return str(caught.value)


@pytest.mark.ranks
def test_nccl_without_gpus() -> None:
    said = ranks(2).run(nccl_without_gpus)
    assert said[0] == said[1]
    assert said[0].startswith("transport 'nccl' needs a group with the nccl backend and one GPU per rank")


FROZEN = zs.TopK(warmup_steps=2, freeze=True)
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"recompute": "block.*"}, 'recompute pattern "block.*" matches none of the '),
    ({"gather": {"norm": zs.Int8()}}, 'gather: pattern "norm" matches no parameter.'),
    ({"compress": {"norm": zs.Int8()}}, 'compress: pattern "norm" matches no trainable parameter.'),
    (
        {"sync": zs.Adaptive([zs.EveryStep(), zs.EveryStep(compress={"norm": zs.Int8()})])},
        'compress: pattern "norm" matches no trainable parameter.',
    ),
    ({"compress": {"*": FROZEN}}, f"{FROZEN!r} keeps Adam's second moments, and SGD is neither Adam nor"),
    ({"stage": 0, "sync": zs.Local(rates=(1.0,) * 9)}, "Local.rates has 9 factors and there are "),
]


def refuse_what_does_not_fit() -> None:
    """Before anything is touched: what the ranks would have to give back is in shards on all of them."""
    for options, said in UNFIT:
        model = Net()
        optimizer, before = SGD(model.parameters()), dict(model.named_parameters())
        with pytest.raises(zs.OptionError) as caught:
            zs.shard(model, optimizer, **options)
        assert str(caught.value).startswith(said)
        assert all(p is before[n] for n, p in model.named_parameters())
        backward(model)
        optimizer.step()


@pytest.mark.ranks
def test_options_that_do_not_fit_the_model_are_refused_before_it_is_divided() -> None:
    ranks(2).run(refuse_what_does_not_fit)
    refuse_what_does_not_fit()


def test_environment_that_announces_a_group_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    said = r"announces a group of ranks \(torchrun: RANK=0, WORLD_SIZE=2\) but not MASTER_ADDR and MASTER_P"
    with pytest.raises(zs.OptionError, match=said):
        zs.shard(Net())


def test_every_error_is_a_zeroshard_error_and_the_builtin_one_expects() -> None:
    for kind in (zs.OptionError, zs.ModelError):
        assert issubclass(kind, zs.ZeroShardError)
        assert issubclass(kind, ValueError)
    for kind in (zs.StateError, zs.RankError):
        assert issubclass(kind, zs.ZeroShardError)
        assert issubclass(kind, RuntimeError)
