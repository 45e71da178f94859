"""The systems under comparison: each turns a plain model into something that trains, in its documented way.

A system is a function `model -> Trainer`, called on every rank with the group initialised (gloo). It imports
what it needs by itself: the time of an import belongs to the start-up of the system that asks for it.
Each peer runs on its defaults, except for settings documented to save it work; the reasons stand beside them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from models import Batch
from torch import Tensor, nn

LEARNING_RATE = 3e-4


def nothing() -> None:
    """The `close` of a system that keeps nothing open."""


@dataclass(frozen=True)
class Trainer:
    """`step` does forward, backward and update on one batch and returns the loss of this rank."""

    step: Callable[[Batch], Tensor]
    close: Callable[[], None] = nothing
    stats: Callable[[], object] = nothing


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of every row; fused is 3 to 4 times as fast as the default on the CPU."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], Tensor]:
    """The loop that a user writes for one process."""

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def none(model: nn.Module) -> Trainer:
    """The bound: each rank trains alone. No system that communicates can do the same work in less time."""
    return Trainer(plain_loop(model, adamw(model)))


def data_parallel(model: nn.Module) -> nn.Module:
    """DDP; gradients as views of its buckets saves it one copy of each."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def ddp(model: nn.Module) -> Trainer:
    """Plain data parallelism."""
    wrapped = data_parallel(model)
    return Trainer(plain_loop(wrapped, adamw(wrapped)))


def zro(model: nn.Module) -> Trainer:
    """ZeroRedundancyOptimizer over DDP: stage 1 as torch has it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = data_parallel(model)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,  # one broadcast per rank instead of one per parameter
        lr=LEARNING_RATE,
        fused=True,
    )
    return Trainer(plain_loop(wrapped, optimizer))


def fsdp2(model: nn.Module, *, reshard: bool) -> Trainer:
    """`fully_shard` on each block and on the rest.

    The root keeps torch's default for ZeRO-3 (not resharded after forward, since backward begins with it).
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)
    return Trainer(plain_loop(model, adamw(model)))


def deepspeed(model: nn.Module, *, stage: int) -> Trainer:
    """DeepSpeed's engine on its CPU accelerator, with torch's fused AdamW as client optimizer."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["DEEPSPEED_LOG_LEVEL"] = "error"
    import deepspeed as ds

    zero: dict[str, object] = {"stage": stage}
    if stage < 3:
        zero["compute_grad_norm"] = False  # nothing here clips; its stage 3 cannot leave the norm out
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only used to derive an average that nothing here reads
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # its default, 1.0, would train another model than the other rows do
        "steps_per_print": 1 << 30,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own CPU kernel is not compiled; torch's is as fast
        "zero_optimization": zero,
    }
    engine, *_ = ds.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(step, engine.destroy)


def parameter_server(model: nn.Module) -> Trainer:
    """Gradients to rank 0, parameters back; see `parameter_server.py`."""
    from parameter_server import ParameterServer

    server = ParameterServer(model, adamw)

    def step(batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        server.step(loss)
        return loss.detach()

    return Trainer(step)


def zeroshard(
    model: nn.Module, *, stage: int, transport: str, whole: bool = True, **options: object
) -> Trainer:
    """`zs.shard` and the plain loop. Without `whole` the model is left in rows at the end: to make it whole
    takes several round trips a tensor, which is long on a slow link."""
    import zeroshard as zs

    optimizer = adamw(model)
    run = zs.shard(model, optimizer, stage=stage, transport=transport, **options)  # type: ignore[arg-type]
    close = run.close if whole else run._runtime.transport.close
    return Trainer(plain_loop(model, optimizer), close, run.stats)


SYSTEMS: dict[str, Callable[[nn.Module], Trainer]] = {
    "none": none,
    "ddp": ddp,
    "ps": parameter_server,
    "zro": zro,
    "fsdp2-zero2": partial(fsdp2, reshard=False),
    "fsdp2-zero3": partial(fsdp2, reshard=True),
    **{f"deepspeed-{stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    **{f"zs-{stage}": partial(zeroshard, stage=stage, transport="shm") for stage in (0, 1, 2, 3)},
    **{f"zs-{stage}-gloo": partial(zeroshard, stage=stage, transport="gloo") for stage in (2, 3)},
}


def why_missing(system: str) -> str | None:
    """Why this installation cannot run a system, or None if it can. Asked before any process starts."""
    if system.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed: pip install -e '.[peers]'"
    return None
