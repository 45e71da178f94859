"""`shard()` and the handle that it returns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import iscoroutinefunction, isgeneratorfunction
from os import PathLike
from typing import TYPE_CHECKING, Never, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.checkpoint import NoPeers, SavePeers, Weights
from zeroshard.collector import collector_paused
from zeroshard.comm import NodesTransport, Transport, connect
from zeroshard.comm.store_exchange import StoreExchange
from zeroshard.errors import OptionError, PlanError, StateError, did_you_mean
from zeroshard.field_checks import check_flag
from zeroshard.launch.join import patience
from zeroshard.layout.placement import Placement
from zeroshard.options import Options
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors, mesh_over, names_of
from zeroshard.params.units import called_by, matching
from zeroshard.planner.plan import Plan
from zeroshard.planner.signatures import rules_of
from zeroshard.refusals import refuse_tried, refuse_written
from zeroshard.runtime import rank_agreement
from zeroshard.runtime.admission import ShardRequest, admit
from zeroshard.runtime.build import Init, RuntimeBuilder
from zeroshard.runtime.closing import end, refuse_close
from zeroshard.runtime.devices import device_for, tell_of_idle_gpus
from zeroshard.runtime.first_values import FirstValues
from zeroshard.runtime.hooks import Hooks, hooks_of
from zeroshard.runtime.placement import resting
from zeroshard.runtime.plan_guard import PlanGuard, ShardArguments
from zeroshard.runtime.runtime import Runtime
from zeroshard.runtime.saves import CheckpointKeeper, CheckpointMethods
from zeroshard.runtime.stats import Stats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("zeroshard")

#: Size of a bucket where ranks share memory and none was asked for: small enough to stay in the caches
#: between being filled and being summed.
CACHED_BUCKET = 6 * 2**20


def shard(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *misplaced: Never,
    group: ProcessGroup | None = None,
    init: Init | None = None,
    weights: str | PathLike[str] | Weights | None = None,
    device: str | torch.device | None = None,
    timeout: float | None = None,
    **options: Unpack[ShardArguments],
) -> Run:
    """Shard a model and its optimizer over the ranks, in place. The training loop stays plain PyTorch.

    - `stage`: 0 data parallel, 1 + optimizer state sharded, 2 + gradients, 3 + parameters (default 3).
    - `precision`: None (as the model is), ``"bf16"``, ``"fp16"`` or a `Precision`.
    - `units`: ``"auto"`` (the repeated blocks), ``"none"``, or patterns of module names: ``"blocks.*"``.
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
    - `weights`: a folder or a file whose tensors become the model's first values (safetensors, with the index
      of Hugging Face or without, or a checkpoint); each rank reads its own rows. `Weights(...)` says more.
    - `device`: where to compute (``"cuda"``), when the model is elsewhere: it moves unit by unit, and its own
      values are let go as they do. With `limit=` a model on the CPU goes to a GPU where there is one, unless
      `batch` is on the CPU, too.
    - `timeout`: seconds after which a rank that waits in vain ends the job, naming who did not come (default:
      ``zeroshard run --stuck-after``, or 600).
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
    asked = admit(model, optimizer, init, dict(options), group, misplaced, timeout, weights, device)
    return _sharded(model, asked, group, init, patience(timeout))


def _sharded(
    model: nn.Module, asked: ShardRequest, group: ProcessGroup | None, init: Init | None, timeout: float
) -> Run:
    """Divides the model; where anything fails, what was begun is taken back."""
    there = device_for(model, asked.device, asked.request.asked)
    transport = _connected(asked, there, group, timeout)
    with ExitStack() as begun:
        begun.callback(transport.close)
        begun.push(partial(rank_agreement.tell_failure, transport))
        if transport.rank == 0:
            tell_of_idle_gpus(there, asked.device, transport.size)
        optimizers = asked.optimizers
        _agree(model, asked, transport)
        first = FirstValues.of(model, asked.weights, there, transport)
        begun.callback(first.close)
        guard = asked.request.guard(model, optimizers, asked.options, transport)
        chosen = guard.options if guard is not None else _suited(asked, transport)
        _try_out(optimizers, chosen, transport)
        _equalise(model, transport, first)
        mesh = mesh_over(group, there) if transport.size > 1 and chosen.stage > 0 else None
        placement = resting(model, optimizers, chosen, transport, guard)
        sharded_tensors = ShardedTensors(transport.rank, mesh, transport)
        builder = RuntimeBuilder(
            model, optimizers, chosen, transport, sharded_tensors, there, placement, first
        )
        begun.push(builder.give_up)
        if guard is not None:
            begun.callback(guard.release)
            guard.hold(model, builder.ledger)
        with collector_paused():
            with transport.allocating():
                runtime = builder.build(init)
            first.close()
            hooks = Hooks(model, runtime)
            begun.callback(hooks.remove)
            hooks.install(_recomputed(runtime, chosen))
        transport.barrier("the end of shard()")
        begun.pop_all()  # it stands, on all ranks: nothing is undone
    builder.conclude()
    return Run(
        model, runtime, hooks, CheckpointKeeper(model, runtime, partial(_peers, group, transport)), guard
    )


def register_forward_method(model: nn.Module, *methods: str) -> None:
    """Say that the loop calls methods of a sharded model, or of a part of it, in place of `forward`:
    ``"training_step"``, ``"encode"``, ``"predict"``. They then begin as the forward of the model does: inputs
    are cast, batch statistics broadcast, and the parameters of the module itself are whole in them.

    Of a part of the model that the loop calls itself, ``"forward"`` can be named, too. A model of
    transformers may generate without it.

    >>> import torch, zeroshard as zs
    >>> class Net(torch.nn.Linear):
    ...     def encode(self, x):
    ...         return x @ self.weight.T
    >>> model = Net(4, 2)
    >>> run = zs.shard(model)
    >>> zs.register_forward_method(model, "encode")
    >>> model.encode(torch.ones(1, 4)).sum().backward()
    >>> run.close()
    """
    hooks = hooks_of(model)
    if hooks is None:
        raise StateError(
            f"register_forward_method(): this {type(model).__name__} is no part of a sharded model: call "
            "run = zs.shard(model, ...) first, and name the methods after it."
        )
    for name in methods:
        method = getattr(model, name, None)
        if not callable(method):
            near = did_you_mean(name, [known for known in dir(type(model)) if not known.startswith("_")])
            raise OptionError(
                f"register_forward_method(): {type(model).__name__} has no method {name!r}.{near}"
            )
        if isgeneratorfunction(method) or iscoroutinefunction(method):
            raise OptionError(
                f"register_forward_method(): {type(model).__name__}.{name} is a generator or a coroutine, "
                "which runs after it has returned: register what it calls for each of its results."
            )
        hooks.register(model, name)


def _peers(group: ProcessGroup | None, transport: Transport) -> SavePeers:
    """The ranks as checkpoints see them."""
    return StoreExchange.over(group, transport.cause) if transport.size > 1 else NoPeers()


def _agree(model: nn.Module, asked: ShardRequest, transport: Transport) -> None:
    """All ranks ask for the same, and for what as many ranks can do."""
    rank_agreement.compare(
        transport, rank_agreement.describe(model, asked.optimizers, asked.options, asked.request.told)
    )
    refuse_written(model, asked.options, transport.size)


def _try_out(optimizers: list[Optimizer], options: Options, transport: Transport) -> None:
    """Optimizers that are not torch's, before anything is divided: what they look at, and what they draw."""
    tried = refuse_tried(optimizers, options, transport.size)
    if transport.rank > 0:
        return
    for kind, found in tried:
        if found.nests:
            log.warning(
                "%s keeps tensors in %s, which run.save() refuses: it takes entries of the state that are "
                "tensors themselves. run.full_optimizer_state_dict() gives all of it, for torch.save().",
                kind,
                found.nests,
            )
    draws = [kind for kind, found in tried if found.draws]
    if draws and transport.size > 1:
        log.warning(
            "%s draws random numbers in its step: %s",
            draws[0],
            "each rank draws for its own parameters, so that runs on other numbers of ranks differ"
            if options.shards_state
            else "seed all ranks alike (torch.manual_seed) and let them draw as much, or their parameters "
            "drift apart",
        )


def _connected(
    asked: ShardRequest, device: torch.device, group: ProcessGroup | None, timeout: float
) -> Transport:
    """The transport that was asked for, or that other options need."""
    options = asked.options
    per_node = options.ranks_per_node or asked.request.asked.get("ranks_per_node")
    name = "nodes" if options.node_cache else options.transport
    return connect(device, name, group, timeout, per_node)


def _suited(asked: ShardRequest, transport: Transport) -> Options:
    """What depends on the transport, where nothing was asked for: ranks of a node, the size of buckets."""
    options = asked.options
    if isinstance(transport, NodesTransport):
        return replace(options, ranks_per_node=transport.ranks_per_node)
    if transport.name == "shm" and "bucket_bytes" not in asked.given:
        return replace(options, bucket_bytes=CACHED_BUCKET)
    return options


def _equalise(model: nn.Module, transport: Transport, first: FirstValues) -> None:
    """Start from the same values everywhere: where ranks differ, rank 0's are taken, and the first such
    tensor is named."""
    if transport.size == 1:
        return
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {name: tensor for name, tensor in tensors.items() if not first.stored(tensor)}
    names = rank_agreement.differing_values(transport, tensors)
    if names:
        if transport.rank == 0:
            log.warning(
                "initial values differ between ranks (%d tensors, first `%s`); rank 0's are used",
                len(names),
                names[0],
            )
        _broadcast_from_first([tensors[name].data for name in names], transport)


@torch.no_grad()
def _broadcast_from_first(values: list[Tensor], transport: Transport) -> None:
    """Rank 0's values, one at a time where they are on another device than the transport's."""
    here = transport.device
    if all(value.device.type == here.type for value in values):
        transport.broadcast("initial values", values)
        return
    for value in values:
        copy = value.to(here)
        transport.broadcast("initial values", [copy])
        value.copy_(copy)


def _recomputed(runtime: Runtime, options: Options) -> list[str]:
    names = [unit.name for unit in runtime.units if unit.name]
    if isinstance(options.recompute, bool):
        return names if options.recompute else []
    return matching(options.recompute, names, "recompute", "units")


_THE_MODELS = ("train", "eval", "parameters", "named_parameters", "state_dict", "load_state_dict")
_INSTEAD = {
    "backward": "loss.backward()",
    "step": "optimizer.step()",
    "zero_grad": "optimizer.zero_grad()",
    "module": "model, which is what it was",
    "optimizer": "optimizer, the one that was passed to zs.shard()",
    "save_checkpoint": "run.save(folder)",
    "load_checkpoint": "run.resume(folder)",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_(model.parameters(), ...)",
} | {name: f"model.{name}(...)" for name in ("forward", *_THE_MODELS)}


def _offered(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


class Run(CheckpointMethods):
    """Handle of a sharded model. It has no forward, backward or step: those stay the model's, the loss's
    and the optimizer's. How it is saved and goes on: `Kept`."""

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        hooks: Hooks,
        keeper: CheckpointKeeper,
        guard: PlanGuard | None = None,
    ) -> None:
        super().__init__(keeper)
        self.model, self._runtime, self._hooks = model, runtime, hooks
        self._guard = guard
        self._units = {unit.label: sum(p.slot.numel for p in unit.params) for unit in runtime.units}
        self._to_come: int | None = None
        self._gathered = 0  # blocks of `gathered` that are open
        self._last: Stats | None = None  # of a run that is closed
        if guard is not None:
            guard.watch(runtime.ledger, self._measured)
            hooks.entries.watch(guard.entered, guard.stepped)

    @property
    def plan(self) -> Plan | None:
        """The plan that this run keeps to, where it was given a limit or a plan."""
        return self._guard.plan if self._guard is not None else None

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

        Costs memory for a whole gradient on every rank meanwhile; with `Precision(reduce="float32")` it is
        added up in fp32. Without it, accumulation works too: each backward is reduced. `zero_grad()` of
        optimizers, the model and its modules drops what was accumulated; `p.grad = None` by hand does not,
        since nobody sees it and `p.grad` is not yet it.
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
        if runtime.sync_strategy.untimely() is not None:
            runtime.before_change()
            runtime.sync_strategy.meet()
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
                param.stand(param.sharded_param)

    @torch.no_grad()
    def _write_back(self, params: list[ShardedParam], whole: dict[str, nn.Parameter]) -> None:
        runtime = self._open()
        if not runtime.sync_strategy.apart:  # else ranks have parameters of their own
            rank_agreement.refuse_unlike(runtime.transport, {name: p.data for name, p in whole.items()})
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
        return self._guard.complete(measured) if self._guard is not None else measured

    def reset_peak(self) -> None:
        """Let `stats().peak` be the most from now on: of one step, or of an evaluation."""
        self._runtime.ledger.forget_peak()
        self._runtime.gradients.forget_peak()

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
        live["gradients"] += (now := gradients.live_bytes())
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
            sync=runtime.sync_strategy.label,
            switches=runtime.sync_strategy.report(),
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
        weights = sum(p.slot.numel * p.unsharded_param.element_size() for p in runtime.params)
        masters = [p for p in runtime.params if p.master_dtype != p.unsharded_param.dtype]
        weights += sum(p.slot.numel * p.master_dtype.itemsize for p in masters)
        grads = sum(p.slot.numel * p.unsharded_param.element_size() for p in runtime.params if p.trainable)
        return weights + grads + (state * whole // held if held and state else self._state_to_come())

    def _state_to_come(self) -> int:
        """Bytes of the optimizers' state, whole, before their first step has made it."""
        if self._to_come is not None:
            return self._to_come
        runtime, total = self._runtime, 0
        optimizers = [update.optimizer for update in runtime.updates]
        try:
            rules = iter(rules_of(optimizers))
        except PlanError:  # of an optimizer that only its own step can tell of
            self._to_come = 0
            return 0
        params = {id(p.sharded_param): p for p in runtime.params}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                moments = next(rules).moments
                of = [
                    params[id(sharded_param)]
                    for sharded_param in group["params"]
                    if id(sharded_param) in params
                ]
                total += sum(moments * p.slot.numel * p.master_dtype.itemsize for p in of if p.trainable)
        self._to_come = total
        return total

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
        if self._guard is not None:
            self._guard.release()

    def _open(self) -> Runtime:
        if self._runtime.closed:
            raise StateError("this run is closed; call zs.shard() again to train on.")
        return self._runtime

    if not TYPE_CHECKING:  # checkers say so themselves

        def __iter__(self) -> Iterator[object]:
            raise StateError(
                "zs.shard() returns one handle, and changes the model and the optimizer in place: write "
                "run = zs.shard(model, optimizer, ...), and go on with the same model and optimizer."
            )

        def __call__(self, *args: object, **kwargs: object) -> object:
            raise StateError("a Run is not called: call the model itself, output = model(x).")

        def __getattr__(self, name: str) -> object:
            """Words of other libraries' handles."""
            instead = _INSTEAD.get(name)
            said = f"type {instead}" if instead else f"known are {', '.join(_offered(type(self)))}"
            raise AttributeError(f"a Run has no attribute {name!r}: {said}.")

    def __repr__(self) -> str:
        state = f"stage {self.options.stage}, rank {self.rank} of {self.size}, {self.transport}"
        shown = "closed" if self._runtime.closed else state
        return f"<zeroshard.Run {type(self.model).__name__}: {shown}>"
