"""The wrapper: a model, whatever a loop does with torch's, and the run that it becomes.

[Note: when it divides] Torch's loops make their optimizers after the wrapping, and how a model is divided
depends on them. So the wrapper starts all ranks from the same values, as torch's does, and leaves the model
plain until the first forward that a backward may follow. Then it looks for the optimizers that hold the
model's parameters, wherever they were made, and calls `zs.shard`. One that is made later is known by its
first step: the run is closed, that step is made on whole tensors, and the next forward divides anew.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Never
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

import zeroshard as zs
from zeroshard.extend import keep_own_state, read_own_state

from .arguments import Asked, devices_of, group_of, ignored_by, refuse_hook, refuse_module
from .holders import Holders, with_inner
from .joining import Joining

#: Options of `zs.shard` that act on the state of optimizers, or count it.
_OF_THE_STEP = (
    *("clip_norm", "offload", "sync", "limit", "plan", "host_limit", "disk_limit"),
    "memory_limit_per_node",
)
#: Options that are no words.
_OBJECTS = ("group", "init", "batch", "loss")


class DistributedDataParallel(nn.Module):
    """Trains a model on several ranks, sharded, behind the interface of torch's wrapper. It takes torch's
    arguments, and those of `zs.shard` beside them (`stage=`, `precision=`, `offload=`, …).

    `.module` is the model, `.run` the handle that `zs.shard` returns. The first forward that trains divides
    the model, for the optimizers that hold its parameters by then, or the first to ask for `.run`.

    >>> import torch
    >>> from zeroshard.parallel import DistributedDataParallel
    >>> model = DistributedDataParallel(torch.nn.Linear(4, 2), stage=2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step(); optimizer.zero_grad()
    >>> model.run.close()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *further: Any,
        **keywords: Any,
    ) -> None:
        super().__init__()
        asked, fault = Asked(), None
        self.device_ids, self.output_device = None, None
        self.process_group: Any = None
        try:
            self.process_group = group_of(keywords)
            asked = Asked.of(further, keywords, dim)
            self.process_group = asked.options.get("group")
            refuse_module(module)
            self.device_ids, self.output_device = devices_of(module, device_ids, output_device)
        except Exception as error:
            fault = error
        self._options = asked.options
        self._run: zs.Run | None = None
        self._alone = False  # each rank has the whole state, and may be asked for it alone
        self._meet(module, fault)
        self.module, self.dim = module, dim
        self.require_backward_grad_sync = True
        for name, value in asked.flags.items():
            setattr(self, name, value)
        self._due = False  # a forward that trained may have changed buffers
        self._ignored = ignored_by(module)
        self._joining: Joining | None = None
        self._holders = Holders(module)
        self._share([*module.parameters(), *module.buffers()])
        _watch(self)

    # ------------------------------------------------------------------ the beginning

    def _meet(self, module: nn.Module, fault: Exception | None) -> None:
        """All ranks wrap the same model with the same options, or none does."""
        if not dist.is_initialized():
            if fault is not None:
                raise fault
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise zs.StateError(
                    "DistributedDataParallel() before the ranks have met: call "
                    "torch.distributed.init_process_group() first."
                )
            return
        told: list[Any] = [None] * dist.get_world_size(self.process_group)
        mine = {} if fault is not None else self._described(module)
        dist.all_gather_object(told, (None if fault is None else str(fault), mine), self.process_group)
        if fault is not None:
            raise fault
        for rank, (text, _) in enumerate(told):
            if text is not None:
                raise zs.RankError(
                    f"DistributedDataParallel() is refused on all {len(told)} ranks because of rank {rank}: "
                    f"{text}"
                )
        _refuse_unlike([described for _, described in told])

    def _described(self, module: nn.Module) -> dict[str, str]:
        tensors = (*module.named_parameters(), *module.named_buffers())
        shapes = {f"`{name}`": f"{tuple(t.shape)} {t.dtype}" for name, t in tensors}
        return shapes | {k: repr(v) for k, v in self._options.items() if k not in _OBJECTS}

    @torch.no_grad()
    def _share(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Values of one rank of the group to all."""
        group = self.process_group
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return
        whose = source if group is None else dist.get_global_rank(group, source)
        for tensor in tensors:
            if not tensor.is_meta and tensor.numel():
                flat = tensor.data.contiguous()
                dist.broadcast(flat, whose, group)
                if flat.data_ptr() != tensor.data_ptr():
                    tensor.data.copy_(flat)

    # ------------------------------------------------------------------ division

    @property
    def run(self) -> zs.Run:
        """The handle of the sharded model: `run.stats()`, `run.gathered()`, `run.save()` and the like. Every
        rank asks for it, if none has trained yet."""
        if self._run is None:
            self._divide()
        assert self._run is not None
        return self._run

    def _divide(self) -> None:
        """See [Note: when it divides]."""
        found = self._holders.optimizers()
        needs = self._counts_state()
        if not found and needs is not None:
            raise zs.StateError(
                f"{needs} acts on the state of optimizers, and none holds parameters of this model yet: make "
                "it before the first forward that trains; evaluate under torch.no_grad()."
            )
        states = [(optimizer, optimizer.state_dict()) for optimizer in found if optimizer.state]
        for optimizer, _ in states:
            optimizer.state.clear()
        try:
            self._holders.replaced(lambda: self._shard(found))
        finally:
            for optimizer, state in states:
                optimizer.load_state_dict(state)
        self._holders.know(found)

    def _shard(self, optimizers: list[Optimizer]) -> None:
        self._run = run = zs.shard(self.module, optimizers or None, **self._options)
        self._alone = run.options.stage in (1, 2) and run.size > 1 and keep_own_state(run)

    def _counts_state(self) -> str | None:
        return next((f"{name}=" for name in _OF_THE_STEP if self._options.get(name) is not None), None)

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: is it one of this model's that nobody knew?"""
        if self._run is None or self._holders.knows(optimizer) or not self._holders.holds(optimizer):
            return
        needs = "join()" if self._joining is not None else self._counts_state()
        if needs is not None:
            raise zs.StateError(
                f"this {type(optimizer).__name__} was made after the model was divided for others, and "
                f"{needs} depends on all of them: make every optimizer before the first forward that trains."
            )
        self._holders.replaced(self._run.close)
        self._run = None
        self._holders.adopt(optimizer)
        self._holders.late[:] = [optimizer]

    # ------------------------------------------------------------------ the loop

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward, with inputs on its device."""
        inputs, kwargs, factor = self._enter(inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        if self._joining is not None and torch.is_grad_enabled():
            self._joining.made(output, factor)
        return output

    @torch.compiler.disable
    def _enter(self, inputs: Any, kwargs: Any) -> tuple[Any, Any, float]:
        trains, factor = torch.is_grad_enabled(), 1.0
        if self.device_ids:
            to = partial(Tensor.to, device=self.device_ids[0], non_blocking=True)
            inputs, kwargs = tree_map_only(Tensor, to, (inputs, kwargs))
        due = bool(self.broadcast_buffers) and self._due
        if self._joining is not None and trains:
            factor = self._joining.forward((inputs, kwargs), self.require_backward_grad_sync, due)
        elif due:
            self._share_buffers(trains)
        self._due = trains and self.require_backward_grad_sync
        if trains and self._run is None:
            self._divide()
        return inputs, kwargs, factor

    def _share_buffers(self, trains: bool) -> None:
        """Those of rank 0 for all, when torch's wrapper does it: at the first forward after one that trained.
        With batch statistics of a training forward `zs.shard` does so itself."""
        shares = trains and self.module.training and self.require_backward_grad_sync and self._run is not None
        self._share([b for m, b in self._buffers_to_share() if not (shares and _has_statistics(m))])

    def _buffers_to_share(self) -> Iterator[tuple[nn.Module, Tensor]]:
        for path, module in self.module.named_modules():
            for name, buffer in module.named_buffers(path, recurse=False):
                if name not in self._ignored:
                    yield module, buffer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients wait on their ranks; the first backward outside of the block reduces them all."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            with self.run.no_sync():
                yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Ranks may have unlike numbers of batches inside of the block: one that has run out of them keeps
        the others company until all have. Every rank enters it, with its optimizers made."""
        if not enable or not dist.is_initialized() or self.run.size == 1:
            yield
            return
        options = self.run.options
        if options.stage == 3 and self.run.transport == "nccl":
            raise zs.StateError(
                "join() at stage 3 over NCCL: a rank that has run out of batches would have to gather every "
                "unit as the others do. Pass stage=2, or let all ranks draw equally many batches "
                "(DistributedSampler(drop_last=True))."
            )
        optimizers = [o for o in self._holders.divided_for() if len(with_inner([o])) == 1]
        self._joining = joining = Joining(
            self.module,
            options.shards_state,
            self.process_group,
            self._share,
            optimizers,
            divide_by_initial_world_size,
            throw_on_early_termination,
        )
        try:
            with joining.announced():
                yield
                joining.follow_others()
        finally:
            self._joining = None

    # ------------------------------------------------------------------ state

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """As torch's wrapper gives it: whole tensors, on the rank that calls it, under `module.`; in host
        memory. Where ranks do not have all of it (stage 3, `precision=`, `offload=`, `sync=`) every rank
        calls it; `run.full_state_dict(rank=0)` gives it to one of them, `run.save()` is for large models."""
        run = self._run
        if run is None or run.size == 1 or run.options.stage == 0 or keep_vars or args:
            return super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        try:
            whole = read_own_state(run) if self._alone else run.full_state_dict(rank=None)
        except zs.RankError as error:
            error.add_note(
                "model.state_dict() on one rank alone, of parameters that were loaded or written since the "
                "last step: call model.run.publish() on every rank before."
                if self._alone
                else "state_dict() of a sharded model is put together by all ranks: write state = "
                "model.state_dict() on every rank, and torch.save(state, path) on one."
            )
            raise
        result: Any = OrderedDict() if destination is None else destination
        result.update((f"{prefix}module.{name}", value) for name, value in whole.items())
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
        """As torch's wrapper does. Every rank calls it, as there."""
        told = super().load_state_dict(state_dict, *args, **keywords)
        if self._alone:
            self.run.publish()
        return told

    # ------------------------------------------------------------------ what else torch's has

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> Never:
        """Refused: what gradients travel through is a codec."""
        raise refuse_hook(hook)

    def _set_static_graph(self) -> None:
        """Libraries call it; nothing has to be known of the graph."""
        self.static_graph = True


def _has_statistics(module: nn.Module) -> bool:
    return bool(getattr(module, "track_running_stats", False))


def _refuse_unlike(described: Sequence[Mapping[str, str]]) -> None:
    """The same text on every rank."""
    for name in dict.fromkeys(name for each in described for name in each):
        texts = [each.get(name, "missing") for each in described]
        if len(set(texts)) > 1:
            shown = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
            raise zs.RankError(
                f"DistributedDataParallel(): ranks disagree about {name}: {shown}. Every rank must wrap the "
                "same model with the same options."
            )


_wrappers: WeakSet[DistributedDataParallel] = WeakSet()
_handles: list[Any] = []


def _watch(wrapper: DistributedDataParallel) -> None:
    """Torch tells of every optimizer's steps, once there is a wrapper to learn of them."""
    _wrappers.add(wrapper)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_stepping))


def _stepping(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for wrapper in list(_wrappers):
        wrapper.stepping(optimizer)
