"""Wrappers of others, around a model or an optimizer, before `shard()` and after it; and words of others."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from misused import Net, backward
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import zeroshard as zs
from zeroshard.testing import ranks

WORLD, STAGES = 2, [0, 1, 2, 3]


class Passing(Optimizer):
    """Passes everything on, as AcceleratedOptimizer does."""

    def __init__(self, optimizer: Optimizer, scaler: object = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Ahead(Passing):
    """Has a state of its own, as Lookahead does."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.own: Any = defaultdict(dict)

    @property
    def state(self) -> Any:
        return self.own


def train(stage: int | None, wrapped: bool, in_ddp: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model: nn.Module = Net()
    plain = model
    if in_ddp:
        model = DistributedDataParallel(model)
    optimizer: Optimizer = AdamW(model.parameters(), lr=1e-2)
    if wrapped:
        optimizer = Passing(Passing(optimizer))
    run = None if stage is None else zs.shard(model, optimizer, stage=stage)
    for step in range(3):
        rng = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 3, generator=rng)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if run is not None:
        assert run.stats().steps == 3
        run.close()
    return [p.detach() for p in plain.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_wrapped_models_and_optimizers(stage: int) -> None:
    expected = ranks(WORLD).run(train, None, False, True)
    for wrapped, in_ddp in ((True, False), (False, True), (True, True)):
        for got, plain in zip(ranks(WORLD).run(train, stage, wrapped, in_ddp), expected, strict=True):
            for ours, theirs in zip(got, plain, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_wrappers_of_more() -> None:
    model = Net()
    with pytest.raises(zs.ModelError, match=r"Passing has taken AdamW\.step for its loss scaler, and would"):
        zs.shard(model, Passing(AdamW(model.parameters()), scaler=object()))
    run = zs.shard(model, [Passing(AdamW(model.parameters()))])
    assert type(run._runtime.updates[0].optimizer) is AdamW
    run.close()
    from zeroshard.refusals import optimizers_of

    ahead = Ahead(AdamW(model.parameters()))
    assert optimizers_of(ahead) == [ahead]


def wrap_after(stage: int) -> list[str]:
    model = Net()
    run = zs.shard(model, AdamW(model.parameters()), stage=stage)
    texts = []
    for part in (model, model.blocks[0]):
        with pytest.raises(
            zs.StateError, match=r"DistributedDataParallel around a sharded model: zs"
        ) as told:
            DistributedDataParallel(part)
        texts.append(str(told.value))
    backward(model)
    run.close()
    DistributedDataParallel(model)
    return texts


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_a_wrapper_around_a_sharded_model(stage: int) -> None:
    texts = ranks(WORLD).run(wrap_after, stage)
    assert len({text for each in texts for text in each}) == 1


def accelerated(stage: int) -> list[Tensor]:
    import os
    import warnings

    accelerate = pytest.importorskip("accelerate")
    warnings.simplefilter("ignore")
    rank = str(dist.get_rank())
    os.environ |= {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the group is there already
    try:
        accelerator = accelerate.Accelerator(cpu=True)
        torch.manual_seed(0)
        model = Net()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        run = zs.shard(model, optimizer, stage=stage)
        prepared, stepper = accelerator.prepare(model, optimizer)
        assert prepared is model
        for step in range(3):
            rng = torch.Generator().manual_seed(10 * step + dist.get_rank())
            accelerator.backward(prepared(torch.randn(4, 3, generator=rng)).square().sum())
            stepper.step()
            stepper.zero_grad()
        run.close()
    finally:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        warnings.simplefilter("error")
    return [p.detach() for p in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_accelerate_passes_a_sharded_model_over(stage: int) -> None:
    pytest.importorskip("accelerate")
    expected = ranks(WORLD).run(train, stage, False, False)
    for got, plain in zip(ranks(WORLD).run(accelerated, stage), expected, strict=True):
        assert all(map(torch.equal, got, plain))


def test_words_of_others() -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    config: Any = {"stage": 2}
    with pytest.raises(zs.ModelError, match=r"shard\(\) takes the model first: write zs\.shard\(model, opt"):
        zs.shard(optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(zs.OptionError, match=r"and a dict beside them: pass options by name, .*stage=2\)"):
        zs.shard(model, optimizer, config)
    with pytest.raises(zs.OptionError, match=r"and a dict beside them: pass options by name, .*stage=2\)"):
        zs.shard(model, config)
    with pytest.raises(zs.OptionError, match=r"and a int beside them: pass options by name, .*stage=3\)"):
        zs.shard(model, optimizer, 3)  # type: ignore[arg-type]
    with pytest.raises(zs.OptionError, match=r"pass several optimizers in a list, zs\.shard\(model, \[first"):
        zs.shard(model, optimizer, optimizer)  # type: ignore[arg-type]
    with pytest.raises(
        zs.OptionError, match=r"shard\(\) takes no settings=: pass what is in it by name, zs\.s"
    ):
        zs.shard(model, optimizer, settings=config)  # type: ignore[call-arg]
    handle: Any = zs.shard(model, optimizer)
    with pytest.raises(zs.StateError, match=r"zs\.shard\(\) returns one handle, and changes the model and"):
        _, _ = handle
    with pytest.raises(zs.StateError, match=r"a Run is not called: call the model itself"):
        handle(torch.ones(1, 3))
    for name, words in {
        "backward": "type loss.backward()", "step": "type optimizer.step()", "module": "type model, which",
        "parameters": "type model.parameters(...)", "gather": "known are ",
    }.items():  # fmt: skip
        with pytest.raises(AttributeError) as caught:
            getattr(handle, name)
        assert words in str(caught.value)
    assert not hasattr(handle, "module")
    handle.close()
