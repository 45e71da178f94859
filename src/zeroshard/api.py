"""`shard()` and the handle that it returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .checkpoint import Alone, Peers
from .comm import NodesTransport, Transport, connect
from .comm.talk import Talk
from .config import Options
from .count.placement import Placement
from .errors import StateError
from .fields import check_flag
from .life.grad import LocalGradients
from .life.shard import Faces, Param, mesh_over, names_of
from .life.units import called_by, matching
from .planning.plan import Plan
from .planning.promise import Promise, ShardKeys
from .planning.unfit import refuse_written
from .run import agree
from .run.admission import Asked, admit, device_of
from .run.build import Builder, Init
from .run.closing import end, refuse_close
from .run.hooks import Hooks
from .run.keeper import Keeper
from .run.kept import Kept
from .run.resting import resting
from .run.runtime import Runtime
from .stats import Stats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("zeroshard")

#: Size of a bucket where ranks share memory and none was asked for: small enough to stay in the caches
#: between being filled and being summed.
CACHED_BUCKET = 6 * 2**20


def shard(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    group: ProcessGroup | None = None,
    init: Init | None = None,
    **options: Unpack[ShardKeys],
) -> Run:
    """Shard a model and its optimizer over the ranks, in place. The training loop stays plain PyTorch.

    - `stage`: 0 data parallel, 1 + optimizer state sharded, 2 + gradients, 3 + parameters (default 3).
    - `precision`: None (as the model is), ``"bf16"``, ``"fp16"`` or a `Precision`.
    - `units`: ``"auto"`` (the repeated blocks), ``"none"``, or patterns of module names gathered together,
      e.g. ``"blocks.*"``.
    - `bucket_bytes`: gradients travel in buckets of this size (default ``"25MiB"``; ``"6MiB"`` where ranks
      share memory, so that a bucket is still in the caches when it is summed).
    - `prefetch`: how many units ahead parameters are gathered at stage 3 (default 1).
    - `recompute`: True, or patterns of units, to recompute activations in backward instead of keeping them.
    - `split`: how tensors are divided: ``"rows"``, ``"whole"`` (each tensor on one rank, for optimizers that
      need matrices), or ``"auto"``, which knows torch's element-wise optimizers and treats all others as
      needing whole tensors. ``"level"``: ``"auto"`` with rows dealt so that all ranks hold the same.
    - `buffers`: ``"broadcast"`` buffers that forward changes (batch statistics) from rank 0, or keep them
      ``"local"``.
    - `offload`: an `Offload(...)`, which says what rests in host memory or on a disk (default: nothing).
    - `clip_norm`: gradients are clipped by their global norm, as `clip_grad_norm_` does it, before each step;
      updates on the host then begin in backward (`math.inf`: the norm is measured, nothing clipped).
    - `sync`: how often the ranks meet: `EveryStep()` (exact, the default), `Delayed()`, `Local(...)`,
      `Adaptive(...)`.
    - `compress`: a codec through which gradients travel (`Int8()`), or a mapping from name patterns to
      codecs or None; the first that matches counts. `gather`: the same for parameters on their way.
    - `transport`: ``"auto"``, ``"shm"``, ``"gloo"``, ``"nccl"``, or ``"nodes"``: ``"shm"`` inside nodes and
      ``"gloo"`` between them; `ranks_per_node`: ranks of a node, if not those on one host.
    - `node_cache`: at stage 3 parameters cross between nodes once a step, and stay inside the node meanwhile.
    - `group`: the process group to shard over (default: all ranks; joined if the environment announces one).
    - `init`: fills a module with parameters or buffers on the meta device (default: its `reset_parameters`).
    - `limit`: in place of the above, bytes of one device (``"20GiB"``): the fastest way that fits is chosen,
      shown, and kept to. With `host_limit`, `disk_limit` (of a node), `batch` (example inputs, the largest),
      `loss`, or `memory_limit_per_node`; see `plan`.
    - `plan`: a `Plan` to repeat exactly.

    >>> import torch, zeroshard as zs
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> run = zs.shard(model, optimizer, stage=2)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step(); optimizer.zero_grad()
    >>> run.close()
    """
    asked = admit(model, optimizer, init, dict(options), group)
    device = device_of(model)
    transport = _connected(asked, device, group)
    with ExitStack() as begun:
        begun.callback(transport.close)
        begun.push(partial(agree.tell_failure, transport))
        optimizers = asked.optimizers
        _agree(model, asked, transport)
        promise = asked.wish.promise(model, optimizers, asked.options, transport)
        chosen = promise.options if promise is not None else _suited(asked, transport)
        _equalise(model, transport)
        mesh = mesh_over(group, device) if transport.size > 1 and chosen.stage > 0 else None
        placement = resting(model, optimizers, chosen, transport, promise)
        faces = Faces(transport.rank, mesh, transport)
        builder = Builder(model, optimizers, chosen, transport, faces, device, placement)
        begun.callback(builder.give_up)
        if promise is not None:
            begun.callback(promise.release)
            promise.hold(model, builder.ledger)
        runtime = builder.build(init)
        hooks = Hooks(model, runtime)
        begun.callback(hooks.remove)
        hooks.install(_recomputed(runtime, chosen))
        _take_buffers(model, runtime)
        transport.barrier("the end of shard()")
        begun.pop_all()  # it stands, on all ranks: nothing is undone
    return Run(model, runtime, hooks, Keeper(model, runtime, partial(_peers, group, transport)), promise)


def _peers(group: ProcessGroup | None, transport: Transport) -> Peers:
    """The ranks as checkpoints see them."""
    return Talk.over(group, transport.cause) if transport.size > 1 else Alone()


def _agree(model: nn.Module, asked: Asked, transport: Transport) -> None:
    """All ranks ask for the same, and for what as many ranks can do."""
    agree.compare(transport, agree.describe(model, asked.optimizers, asked.options, asked.wish.told))
    refuse_written(model, asked.options, transport.size)


def _connected(asked: Asked, device: torch.device, group: ProcessGroup | None) -> Transport:
    """The transport that was asked for, or that other options need."""
    options = asked.options
    per_node = options.ranks_per_node or asked.wish.asked.get("ranks_per_node")
    name = "nodes" if options.node_cache else options.transport
    return connect(device, name, group, ranks_per_node=per_node)


def _suited(asked: Asked, transport: Transport) -> Options:
    """What depends on the transport, where nothing was asked for: ranks of a node, the size of buckets."""
    options = asked.options
    if isinstance(transport, NodesTransport):
        return replace(options, ranks_per_node=transport.ranks_per_node)
    if transport.name == "shm" and "bucket_bytes" not in asked.given:
        return replace(options, bucket_bytes=CACHED_BUCKET)
    return options


def _take_buffers(model: nn.Module, runtime: Runtime) -> None:
    """Buffers that forward changes are broadcast from rank 0, unless they stay local."""
    if runtime.transport.size > 1 and runtime.options.buffers == "broadcast":
        runtime.buffers = [
            b
            for m in model.modules()
            if getattr(m, "track_running_stats", False)
            for b in m._buffers.values()
            if b is not None
        ]
        runtime.pace.take_buffers(runtime.buffers)


def _equalise(model: nn.Module, transport: Transport) -> None:
    """Start from the same values everywhere: where ranks differ, rank 0's are taken, and the first such
    tensor is named."""
    if transport.size == 1:
        return
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    names = agree.differing_values(transport, tensors)
    if names:
        if transport.rank == 0:
            log.warning(
                "initial values differ between ranks (%d tensors, first `%s`); rank 0's are used",
                len(names),
                names[0],
            )
        with torch.no_grad():
            transport.broadcast("initial values", [tensors[name].data for name in names])


def _recomputed(runtime: Runtime, options: Options) -> list[str]:
    names = [unit.name for unit in runtime.units if unit.name]
    if isinstance(options.recompute, bool):
        return names if options.recompute else []
    return matching(options.recompute, names, "recompute", "units")


class Run(Kept):
    """Handle of a sharded model. It has no forward, backward or step: those stay the model's, the loss's
    and the optimizer's. How it is saved and goes on: `Kept`."""

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        hooks: Hooks,
        keeper: Keeper,
        promise: Promise | None = None,
    ) -> None:
        super().__init__(keeper)
        self.model, self._runtime, self._hooks = model, runtime, hooks
        self._promise = promise
        self._units = {unit.label: sum(p.slot.numel for p in unit.params) for unit in runtime.units}
        self._gathered = 0  # blocks of `gathered` that are open
        self._last: Stats | None = None  # of a run that is closed
        if promise is not None:
            promise.watch(runtime.ledger, self._measured)
            hooks.after_step, hooks.on_inputs = promise.stepped, promise.entered

    @property
    def plan(self) -> Plan | None:
        """The plan that this run keeps to, where it was given a limit or a plan."""
        return self._promise.plan if self._promise is not None else None

    @property
    def rank(self) -> int:
        return self._runtime.transport.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._runtime.transport.size

    @property
    def options(self) -> Options:
        return self._runtime.options

    @property
    def transport(self) -> str:
        """Which transport was chosen: local, shm, gloo, nodes or nccl."""
        return self._runtime.transport.name

    @property
    def units(self) -> dict[str, int]:
        """The units found, with the number of parameters (elements) in each."""
        return dict(self._units)

    @property
    def placement(self) -> Placement:
        """The tier that each unit's state and parameters rest in; `print(run.placement.table())`."""
        return self._runtime.placement

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication; the first backward outside of the block reduces them
        all.

        Costs memory for a whole gradient on every rank meanwhile. Without it, accumulation works too: each
        backward is reduced. `zero_grad()` of optimizers, the model and its modules drops what was
        accumulated; `p.grad = None` by hand does not, since nobody sees it and `p.grad` is not yet it.
        """
        before, self._runtime.sync = self._runtime.sync, False
        try:
            yield
        finally:
            self._runtime.sync = before

    def synchronise(self) -> None:
        """Let ranks that train apart (`sync=Local(...)`) meet now, e.g. before `save`. Every rank calls it,
        after a step. Does nothing where the ranks are equal already."""
        runtime = self._open()
        if runtime.pace.untimely() is not None:
            runtime.before_change()
            runtime.pace.meet()
            runtime.changed(runtime.params)

    @contextmanager
    def gathered(self, *names: str, write: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """The named parameters (patterns allowed; none: all) as whole plain tensors in master precision,
        standing in the model. A tied weight can be asked for by any of its names.

        Every rank calls it. With `write=True`, what is in them at the end becomes the model's; every rank
        must write the same, and where they did not, nothing is written.
        """
        runtime = self._open()
        check_flag(write, "write")
        runtime.settle()
        called = called_by(names, names_of(self.model, runtime.params))
        chosen = [p for p in runtime.params if p.name in called]
        whole = {
            p.name: nn.Parameter(runtime.collect(p.read_master(), p.slot).to(p.wide), p.trainable)
            for p in chosen
        }
        self._gathered += 1
        for param in chosen:
            param.stand(whole[param.name])
        try:
            yield {asked: whole[name] for name, every in called.items() for asked in every}
            if write:
                self._write_back(chosen, whole)
        finally:
            self._gathered -= 1
            for param in chosen:
                param.stand(param.home)

    @torch.no_grad()
    def _write_back(self, params: list[Param], whole: dict[str, nn.Parameter]) -> None:
        runtime = self._open()
        if not runtime.pace.apart:  # else ranks have parameters of their own
            agree.refuse_unlike(runtime.transport, {name: p.data for name, p in whole.items()})
        runtime.before_change()
        runtime.transport.fence()
        for param in params:
            start, stop = param.slot.rows(self.rank)
            value = whole[param.name].data
            param.write_master(value[start:stop] if param.slot.shape else value)
        runtime.changed(params)

    @contextmanager
    def kept_full(self) -> Iterator[None]:
        """Gather the whole model once and keep it until the end of the block: forward passes inside need no
        communication.

        For generation where ranks stop at different lengths. Every rank enters the block.
        """
        with self._open().kept_full():
            yield

    def publish(self) -> None:
        """Say that parameters were written by hand (`p.data.clamp_()`), so that the next forward uses
        them. Every rank calls it."""
        runtime = self._open()
        runtime.notice()
        runtime.changed()
        runtime.publish()

    def stats(self) -> Stats:
        """Bytes moved and held, seconds waited; see `Stats`. Of a closed run: those before it was closed."""
        if self._last is not None:
            return self._last
        measured = self._measured()
        return self._promise.complete(measured) if self._promise is not None else measured

    def reset_peak(self) -> None:
        """Let `stats().peak` be the most from now on: of one step, or of an evaluation."""
        self._runtime.ledger.forget_peak()
        if isinstance(self._runtime.gradients, LocalGradients):
            self._runtime.gradients.most = 0

    def _measured(self) -> Stats:
        runtime = self._runtime
        counters = runtime.transport.counters.snapshot()
        state = sum(update.state_bytes() for update in runtime.updates)
        live, peak = dict(runtime.ledger.live), dict(runtime.ledger.peak)
        # What the overlapped update works on is booked already; the rest is the optimizer's own.
        hosted = runtime.host.state_bytes() if runtime.host is not None else 0
        booked = runtime.host.shown_bytes() if runtime.host is not None else 0
        hidden = runtime.host.hidden_bytes() if runtime.host is not None else 0
        for kind, more in (("state", state - hosted), ("host", hosted - booked)):
            live[kind] += more
            peak[kind] += more
        gradients = runtime.gradients
        if self.size == 1 and isinstance(gradients, LocalGradients):
            live["gradients"] += (now := gradients.live())
            peak["gradients"] = max(peak["gradients"], gradients.most, now)
        return Stats(
            steps=runtime.steps.made,
            sent=counters.sent,
            received=counters.received,
            waited=counters.waited,
            live=live,
            peak=peak,
            data_parallel=self._data_parallel_bytes(state + hidden),
            norm=runtime.clipping.norm,
            updates=runtime.host.update_counts() if runtime.host is not None else {},
            sync=runtime.pace.label,
            switches=runtime.pace.report(),
            uncompressed={kind: n + counters.spared.get(kind, 0) for kind, n in counters.sent.items()},
            error=runtime.gradients.errors(),
            between=counters.between,
        )

    def _data_parallel_bytes(self, state: int) -> int:
        """What every rank would hold without sharding. The optimizer's state is scaled up from the rows
        that are here."""
        runtime = self._runtime
        whole = sum(p.slot.numel for p in runtime.params if p.trainable)
        held = sum(p.slot.held(self.rank) for p in runtime.params if p.trainable)
        weights = sum(p.slot.numel * p.leaf.element_size() for p in runtime.params)
        masters = [p for p in runtime.params if p.master_dtype != p.leaf.dtype]
        weights += sum(p.slot.numel * p.master_dtype.itemsize for p in masters)
        grads = sum(p.slot.numel * p.leaf.element_size() for p in runtime.params if p.trainable)
        return weights + grads + (state * whole // held if held else 0)

    def close(self) -> None:
        """Give back a plain model and plain optimizers, whole on every rank, with the gradients they have: a
        step afterwards is the one that the run would have made, but for `clip_norm`. Every rank calls it.

        Of the run only `stats()` remains, as they were. Gradients under `no_sync` that were not reduced are
        an error, and so is a backward through what was computed before.
        """
        runtime = self._runtime
        if runtime.closed:
            return
        refuse_close(runtime, gathered=self._gathered > 0)
        self._last = self.stats()
        self._keeper.close()
        end(runtime, self._hooks)
        if self._promise is not None:
            self._promise.release()

    def _open(self) -> Runtime:
        if self._runtime.closed:
            raise StateError("this run is closed; call zs.shard() again to train on.")
        return self._runtime

    def __repr__(self) -> str:
        state = f"stage {self.options.stage}, rank {self.rank} of {self.size}, {self.transport}"
        shown = "closed" if self._runtime.closed else state
        return f"<zeroshard.Run {type(self.model).__name__}: {shown}>"
