"""Builds the runtime of one `shard()`: buffers, sharded parameters, units and buckets, as its layout says.

How the model is divided (who owns which rows, what is gathered, reduced and updated together, in which order,
and how large each buffer is) is decided in `layout`, once; here it is looked up.

A meta parameter is materialised module by module, its rows are kept and the rest is let go at once: no rank
ever holds a whole model that it does not keep, nor do its pages stay with the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm import LocalTransport, Transport, TransportBuffer
from zeroshard.compress import Codec, MeanCodec, Rows
from zeroshard.errors import ModelError, OptionError
from zeroshard.grads import (
    AllReduceBucket,
    Bucket,
    CodecWorkspace,
    CodedBucket,
    MeanBucket,
    OwnBucket,
    PackedBucket,
    ReducedBucket,
    Reducer,
    Sink,
    SparseBucket,
)
from zeroshard.kernels import trim
from zeroshard.layout.division import RingSpec
from zeroshard.layout.memory import MemoryModel
from zeroshard.layout.placement import Placement
from zeroshard.layout.specs import BucketSpec, GatherGroupSpec
from zeroshard.offload.build import OffloadedState
from zeroshard.optim.frozen_moments import FrozenMoments
from zeroshard.optim.optimizer_kinds import rule_of
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.options import Options, routes_of
from zeroshard.params.gather_group import BufferPool, GatherGroup, GatherGroupPlacement
from zeroshard.params.sharded_param import (
    MasterRows,
    ShardedParam,
    ShardedTensors,
    make_sharded_param,
    retire,
)
from zeroshard.params.units import ParamRef, Unit, find_units, unit_specs
from zeroshard.sync import (
    AdaptiveSync,
    DelayedSync,
    LocalSync,
    SyncStrategy,
)
from zeroshard.sync_policies import Adaptive, Choice, Delayed, EveryStep, Local, choices_of
from zeroshard.tiers import TierCopies
from zeroshard.tiers.ledger import MemoryLedger

from .first_values import FirstValues
from .optimizer_state import renew_state
from .runtime import Runtime
from .undo import ShardUndo, TakenValue
from .unit import RunningUnit, unsharded_param_of


def torch_dtype(name: str) -> torch.dtype:
    """A dtype of a layout, in which it is a word."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class BucketBuilder:
    """Makes the buckets of a layout. All ranks make the same ones in the same order: the transport's buffers
    depend on it."""

    def __init__(
        self, layout: MemoryModel, transport: Transport, device: torch.device, ledger: MemoryLedger
    ) -> None:
        self.layout, self.transport, self.device, self.ledger = layout, transport, device, ledger
        self.workspace: CodecWorkspace | None = None

    def buckets(
        self,
        params: Mapping[str, ShardedParam],
        sharded_tensors: ShardedTensors,
        sinks: Mapping[str, Sink],
    ) -> list[Bucket]:
        """`sinks`: by the name of a bucket's first parameter, where its gradients go."""
        wires: dict[int, TransportBuffer] = {}
        if self.transport.size > 1:
            for ring in self.layout.rings:
                wires |= self._wires(ring)
            self._make_workspace(wires)
        buckets: list[Bucket] = []
        for number, spec in enumerate(self.layout.buckets):
            members = [params[w.name] for w in spec.weights]
            if self.transport.size == 1:
                bucket = self._own_bucket(number, spec, members)
            else:
                bucket = self._bucket(number, spec, members, wires.get(number))
                bucket.make_reduced_grad(
                    self.layout.options.stage, self.layout.behind, sharded_tensors, self.ledger
                )
            if spec.weights[0].name in sinks:
                bucket.hand_to(sinks[spec.weights[0].name])
            buckets.append(bucket)
        return buckets

    def _own_bucket(self, number: int, spec: BucketSpec, params: list[ShardedParam]) -> Bucket:
        """Of one rank, or of ranks that train apart."""
        dtype, behind = torch_dtype(spec.landed), self.layout.behind
        if spec.part is None:
            return OwnBucket(number, params, dtype, behind)
        return PackedBucket(number, params, dtype, behind, spec.part.spans, spec.part.numel)

    def _wires(self, ring: RingSpec) -> dict[int, TransportBuffer]:
        """By number of a bucket, the wire that it takes."""
        dtype, rank = torch_dtype(ring.dtype), self.transport.rank
        wires = [self.transport.allocate(f"{ring.key} {i}", room, dtype) for i, room in enumerate(ring.rooms)]
        # Stage 1 shows a shard of a wire that is elsewhere, stage 0 a copy.
        shown = ring.shown and (self.layout.options.stage == 1 or wires[0].mine.device == self.device)
        self.ledger.book("gradients" if shown else "buckets", sum(wire.mine.nbytes for wire in wires))
        if ring.codec is None:  # make room for what peers send
            most: dict[int, int] = {}
            for turn, number in zip(ring.turns, ring.buckets, strict=True):
                most[turn] = max(most.get(turn, 0), self.layout.buckets[number].pack.shard(rank))
            received = [self.transport.receive(wires[turn], numel) for turn, numel in most.items()]
            self.ledger.book("buckets", sum(received))
        return {number: wires[turn] for turn, number in zip(ring.turns, ring.buckets, strict=True)}

    def _make_workspace(self, wires: Mapping[int, TransportBuffer]) -> None:
        """Memory that the coded buckets share."""
        specs = self.layout.buckets
        codecs = {spec.codec for spec in specs if spec.codec is not None}
        coded = [wires[number].mine for number, spec in enumerate(specs) if isinstance(spec.codec, Codec)]
        away = max((wire.numel() for wire in coded if wire.device != self.device), default=0)
        if codecs:
            self.workspace = CodecWorkspace(self.device, codecs, (*self.layout.scratch, away), self.ledger)

    def _bucket(
        self, number: int, spec: BucketSpec, params: list[ShardedParam], wire: TransportBuffer | None
    ) -> ReducedBucket:
        codec, transport, pack = spec.codec, self.transport, spec.pack
        dtypes = torch_dtype(spec.wire), torch_dtype(spec.landed)
        if isinstance(codec, MeanCodec):
            return MeanBucket(number, pack, params, transport, dtypes, self.device, codec)
        assert wire is not None
        if codec is None:
            kind = AllReduceBucket if self.layout.behind and self.layout.options.stage == 0 else ReducedBucket
            return kind(number, pack, params, wire, transport, dtypes, self.device)
        assert self.workspace is not None
        if isinstance(codec, Rows):
            return SparseBucket(number, pack, params, wire, transport, dtypes, self.workspace, codec)
        assert isinstance(codec, Codec)
        return CodedBucket(number, pack, params, wire, transport, dtypes, self.workspace, codec)


Init = Callable[[nn.Module], None]
Way = list[tuple[Init, nn.Module]]

_LOOSE = 4 * 2**20  # bytes made on the way, after which memory that was freed is given back
_MUCH = 32 * 2**20  # bytes of the model's own, the same


class RuntimeBuilder:
    """Makes the runtime of one `shard()`. All ranks run it in the same order: the transport's buffers
    depend on it."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: Options,
        transport: Transport,
        sharded_tensors: ShardedTensors,
        device: torch.device,
        placement: Placement,
        first: FirstValues,
    ) -> None:
        self.model, self.optimizers, self.options = model, list(optimizers), options
        self.transport, self.device, self.placement = transport, device, placement
        self.first = first
        self._undo = ShardUndo(model, self.optimizers)
        self.ledger = MemoryLedger()
        self.sharded_tensors = sharded_tensors
        self.copies = TierCopies(device)
        self.host: OffloadedState | None = None
        if options.offload is not None:
            _check_offload(options, transport)
            self.host = OffloadedState(options, self.optimizers, transport.rank, self.copies, self.ledger)
        pool = BufferPool(device, self.ledger)
        self.runtime = Runtime(
            options, transport, self.sharded_tensors, pool, self.ledger, placement, self.host
        )

    def build(self, init: Init | None) -> Runtime:
        units = find_units(self.model, self.options.units)
        self._undo.begin(units, self.first.buffers)
        self.layout = self._divide(units)
        if self.host is not None:
            parameters = {t.name: t.parameter for unit in units for t in unit.param_refs}
            for spec in self.layout.parts:
                self.host.plan(spec, parameters[spec.weights[0].name])
            self.host.repeat(self.layout.repeatable, self.layout.repeated)
            self.host.open(self.transport)
        fresh = _Materializer(self.model, self.first, init, self.transport)
        specs: dict[str, list[GatherGroupSpec]] = {unit.name: [] for unit in units}
        for gather_group in self.layout.gather_groups:
            specs[gather_group.unit].append(gather_group)
        live = [self._running_unit(unit, specs[unit.name], fresh) for unit in units]
        fresh.fill_buffers(self.model)
        self.first.fill_buffers(self.model)
        fresh.give_back()
        self.runtime.adopt_units(live)
        params = self.runtime.params
        successors = {id(p.original): p.sharded_param for p in params}
        for optimizer in self.optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            update = ShardedOptimizer(
                optimizer, [p for p in params if id(p.original) in held], self.sharded_tensors
            )
            update.adopt(successors)
            renew_state(update)
            self.runtime.updates.append(update)
        for param in params:
            param.stand(param.sharded_param)
        for param in params:
            param.add_up_in(torch_dtype(self.layout.tensors.grad_dtypes[param.name][0]))
        self.runtime.adopt_strategy(self._sync_strategy(params))
        if self.host is not None:
            self.host.start()
            self.runtime.adopt_offload_groups(self.host.parts)
        return self.runtime

    def conclude(self) -> None:
        """It stands on all ranks: what it has replaced goes."""
        for param in self.runtime.params:
            if param.original is not param.sharded_param:
                retire(param.original)
            del param.original

    def give_up(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Building has failed: put back what was taken, end the threads that were begun, and let the scratch
        file go."""
        if self.host is not None:
            if self.host.updates is not None:
                self.host.updates.close()
            self.host.unguard()
        try:
            self._undo.undo(error)
        finally:
            if self.host is not None:
                self.host.close()

    # ------------------------------------------------------------------ layout

    def _divide(self, units: list[Unit]) -> MemoryModel:
        """The one division of the model, in which all that is built here is looked up."""
        groups = [(o, group) for o in self.optimizers for group in o.param_groups]
        rules = {id(p): number for number, (_, group) in enumerate(groups) for p in group["params"]}
        transport = self.transport
        return MemoryModel(
            unit_specs(self.model, units, rules),
            self.options,
            transport.size,
            tuple(rule_of(optimizer) for optimizer, _ in groups),
            transport.rank,
            transport.traits,
            self.placement,
        )

    def _running_unit(self, unit: Unit, specs: list[GatherGroupSpec], fresh: _Materializer) -> RunningUnit:
        refs = {param_ref.name: param_ref for param_ref in unit.param_refs}
        return RunningUnit(
            unit, [self._gather_group(s, [refs[w.name] for w in s.weights], fresh) for s in specs]
        )

    def _gather_group(
        self, spec: GatherGroupSpec, param_refs: list[ParamRef], fresh: _Materializer
    ) -> GatherGroup:
        layout, pack, transport = self.layout, spec.pack, self.transport
        rests = GatherGroupPlacement(spec.keeps, spec.state, spec.rows, spec.splits)
        gather_group = GatherGroup(
            spec.key,
            pack,
            (torch_dtype(spec.compute), torch_dtype(spec.master)),
            rests,
            transport,
            self.runtime.pool,
            self.ledger,
            self.copies,
            spec.codec,
        )
        full = gather_group.full_views(gather_group.full) if gather_group.full is not None else None
        compute, local = gather_group.views()
        if self.host is not None and rests.state != "device":
            local = self.host.locals_of(gather_group, param_refs)
            gather_group.own.use_locals(local)
            computed = {ref.name: rows for ref, rows in zip(param_refs, compute, strict=True)}
            self.host.keep_frozen(layout.frozen_masters(spec), computed)
        masters: dict[str, MasterRows] = dict(self.host.masters) if self.host is not None else {}
        masters |= zip((t.name for t in param_refs), gather_group.own.split_masters(), strict=False)
        for index, param_ref in enumerate(param_refs):
            slot = pack.slots[index]
            targets = (
                full[index] if full is not None else None,
                compute[index] if full is None and rests.rows != "disk" else None,
                local[index] if local[index].data_ptr() != compute[index].data_ptr() else None,
            )
            _store(fresh, param_ref, slot.rows(transport.rank), targets, masters.get(param_ref.name))
            here = slot.rows(transport.rank) == (0, slot.height)  # all of it
            self._taking(param_ref, targets[0], local[index] if here else None, masters.get(param_ref.name))
            unsharded_param = unsharded_param_of(
                full[index] if full is not None else gather_group.blank(index),
                param_ref.parameter.requires_grad,
            )
            sharded_param = make_sharded_param(param_ref, slot, local[index], self.sharded_tensors)
            param = ShardedParam(
                param_ref,
                slot,
                unsharded_param,
                local[index],
                sharded_param,
                masters.get(param_ref.name),
                gather_group.own.master_dtype,
            )
            gather_group.params.append(param)
            if rests.state == "device" and not rests.splits:  # else it is not torch alone that writes it
                param.share_count()
            fresh.done(param_ref, sharded_param)
        return gather_group

    def _taking(
        self, param_ref: ParamRef, whole: Tensor | None, local: Tensor | None, master: MasterRows | None
    ) -> None:
        """Its values are about to be let go. Those that files gave are not the user's own."""
        read = self.first.stored(param_ref.parameter)
        self._undo.taking(TakenValue(param_ref, None if read else whole, None if read else local, master))

    # ------------------------------------------------------------------ the sync strategy

    def _sync_strategy(self, params: list[ShardedParam]) -> SyncStrategy:
        """The policy at work. A choice of policies shares what it can: one set of buckets for all that
        reduce every step through the same codecs."""
        sync = self.options.sync
        sync_strategies: dict[Choice, SyncStrategy] = {}
        sets: dict[object, list[Choice]] = {}
        for choice in choices_of(sync):
            if isinstance(choice, Local):
                sync_strategies[choice] = self._local_sync_strategy(choice, params)
            else:
                own = choice.compress if isinstance(choice, EveryStep) and self.transport.size > 1 else None
                sets.setdefault(own, []).append(choice)
        for codecs, members in sets.items():
            options = self.options if codecs is None else replace(self.options, compress=routes_of(codecs))
            layout = self.layout.reducing(options, any(isinstance(m, Delayed) for m in members))
            gradients = self._gradients(params, layout, self.transport)
            delayed = next((choice for choice in members if isinstance(choice, Delayed)), None)
            strategy = (
                SyncStrategy(gradients)
                if delayed is None
                else DelayedSync(delayed, gradients, self.transport.rank)
            )
            sync_strategies |= dict.fromkeys(members, strategy)
        if isinstance(sync, Adaptive):
            return AdaptiveSync(sync, sync_strategies, self.transport, self.runtime.updates)
        return sync_strategies[sync]

    def _local_sync_strategy(self, policy: Local, params: list[ShardedParam]) -> LocalSync:
        apart = LocalTransport(self.device)  # gradients stay on their ranks
        gradients = self._gradients(params, self.layout.reducing(self.options, False), apart)
        sync_strategy = LocalSync(policy, gradients, self.transport, self.runtime.updates)
        sync_strategy.divide([p for p in params if p.trainable], self.options.bucket_bytes, self.ledger)
        return sync_strategy

    # ------------------------------------------------------------------ gradients

    def _gradients(self, params: list[ShardedParam], layout: MemoryModel, transport: Transport) -> Reducer:
        """A set of buckets, and what counts the arrivals for them."""
        by_name = {p.name: p for p in params}
        sinks: dict[str, Sink] = {}
        if self.host is not None:
            counted = transport.rank == 0 or layout.options.stage == 0
            dtypes = {name: self._landed(name) for name in layout.tensors.trainable}
            sinks = self.host.sinks(by_name, dtypes, self.sharded_tensors, counted)
        builder = BucketBuilder(layout, transport, self.device, self.ledger)
        buckets = builder.buckets(by_name, self.sharded_tensors, sinks)
        gradients = Reducer(buckets, transport, layout.behind, builder.workspace)
        if builder.workspace is not None:
            self._hold_moments(builder.workspace, layout)
        return gradients

    def _landed(self, name: str) -> torch.dtype:
        """What a parameter's `p.grad` is."""
        return torch_dtype(self.layout.tensors.grad_dtypes[name][1])

    def _hold_moments(self, workspace: CodecWorkspace, layout: MemoryModel) -> None:
        """Tell the updates of codecs that freeze second moments."""
        for update in self.runtime.updates:
            found = {id(p.sharded_param): layout.codecs.get(p.name) for p in update.params.values()}
            codecs = {key: codec for key, codec in found.items() if codec is not None and codec.freezes}
            if codecs:
                update.freeze(FrozenMoments(update.optimizer, codecs, workspace))


@torch.no_grad()
def _store(
    fresh: _Materializer,
    param_ref: ParamRef,
    own: tuple[int, int],
    targets: tuple[Tensor | None, Tensor | None, Tensor | None],
    master: MasterRows | None,
) -> None:
    """Write the first value of a parameter, chunk by chunk: all rows where it stays whole, else rows [start,
    stop) alone. `targets`: the whole tensor, the rows in compute dtype, and those in master dtype."""
    shape = param_ref.parameter.shape
    start, stop = own if shape else (0, 1)
    whole, *rest = targets
    row = math.prod(shape[1:])
    first, last = (0, shape[0] if shape else 1) if whole is not None else (start, stop)
    for at, rows in fresh.chunks(param_ref, first, last):
        if whole is not None:
            _lines(whole)[at : at + len(rows)].copy_(rows)
        begin, end = max(at, start), min(at + len(rows), stop)
        if begin >= end:
            continue
        mine = rows[begin - at : end - at]
        for target in rest:
            # Where a master is split it writes the weight, too, last: half way between two values of bf16
            # `split` does not round as `copy_` does.
            if target is not None and (target is rest[0] or master is None):
                _lines(target)[begin - start : end - start].copy_(mine)
        if master is not None:
            master.write((begin - start) * row, mine.float().reshape(-1).contiguous())


def _lines(tensor: Tensor) -> Tensor:
    """A tensor by rows: one without dims has one."""
    return tensor if tensor.dim() else tensor.view(1)


def _check_offload(options: Options, transport: Transport) -> None:
    assert options.offload is not None
    if options.offload.repeat_backward and transport.size > 1:
        raise OptionError(
            f"Offload(repeat_backward={options.offload.repeat_backward}) is for one rank, and these are "
            f"{transport.size}: on several, each keeps its own rows of the gradients alone. Drop it."
        )
    rests = options.offload.parameters
    if rests in ("host", "disk") and transport.size > 1 and not options.shards_params:
        raise OptionError(
            f'Offload(parameters="{rests}") streams parameters unit by unit, which stage {options.stage} '
            "does not: pass stage=3."
        )
    if rests == "disk" and transport.size > 1:
        raise OptionError(
            f'Offload(parameters="disk") is for one rank, and these are {transport.size}: peers read '
            'rows from memory. Pass parameters="host"; the optimizer state may be on the disk.'
        )


class _Materializer:
    """Values of parameters and buffers: the user's own, or made on the spot for those on the meta device.

    All ranks must draw the same random numbers, so that rows fit together: the draws start from a seed that
    rank 0 drew.
    """

    def __init__(self, model: nn.Module, first: FirstValues, init: Init | None, transport: Transport) -> None:
        self.device, self.init, self.first = first.device, init, first
        self._values: dict[int, Tensor] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._ways = dict(_ways(model))
        self._loose = 0  # bytes made since freed memory was given back
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            seed = int(torch.randint(2**31, ()).item()) if transport.rank == 0 else 0
            self._seed = int(transport.max([float(seed)])[0])
            self._count = 0

    def value(self, param_ref: ParamRef) -> Tensor:
        if not param_ref.parameter.is_meta:
            return param_ref.parameter.detach()
        if id(param_ref.parameter) not in self._values:
            self._make(param_ref)
        return self._values[id(param_ref.parameter)]

    def chunks(self, param_ref: ParamRef, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of its value; what comes from files is read no earlier."""
        parameter = param_ref.parameter
        value = None if self.first.stored(parameter) else self.value(param_ref)
        return self.first.chunks(parameter, value, start, stop)

    def done(self, param_ref: ParamRef, sharded_param: nn.Parameter) -> None:
        """Its rows are where they rest, and `sharded_param` shows them."""
        self._values.pop(id(param_ref.parameter), None)
        if param_ref.parameter is not sharded_param:
            if param_ref.parameter.device.type == "cpu":
                self._loose += param_ref.parameter.nbytes
            self.first.release(param_ref.parameter)
            if self._loose >= _MUCH:
                self.give_back()

    def give_back(self) -> None:
        """What was freed of what was made here: the system gets it, and not this process's next tensors."""
        if self._loose:
            trim()
            self._loose = 0

    def fill_buffers(self, model: nn.Module) -> None:
        """Those of modules that have no parameters of their own, such as the phases of rotary embeddings."""
        for path, module in model.named_modules():
            left = self._blank_buffers(module)
            if left:
                self._fill(module, f"{path}.{left[0]}" if path else left[0])

    def _blank_buffers(self, module: nn.Module) -> list[str]:
        """Names of its buffers on the meta device, but for those in files."""
        buffers = {name: b for name, b in module._buffers.items() if b is not None}
        return [name for name, b in buffers.items() if b.is_meta and not self.first.stored(b)]

    def _make(self, param_ref: ParamRef) -> None:
        """Give the module real memory for its own parameters and buffers, initialise them, and put the
        meta ones back."""
        if self._loose >= _LOOSE:
            self.give_back()  # not later: what this module takes would come on top
        module = param_ref.places[0].module
        metas = {
            name: p
            for name, p in module._parameters.items()
            if p is not None and p.is_meta and not self.first.stored(p)
        }
        if self.device.type == "cpu":
            self._loose += sum(p.nbytes for p in metas.values())
        for name, p in metas.items():
            blank = torch.empty_like(p, device=self.device)
            if id(module) in self._ways and blank.is_floating_point():
                blank.fill_(math.nan)
            module._parameters[name] = nn.Parameter(blank, requires_grad=p.requires_grad)
        try:
            self._fill(module, param_ref.name)
            for name, p in metas.items():
                made = module._parameters[name]
                assert made is not None
                self._values[id(p)] = made.detach()
        finally:  # where it fails, shard() can be called again with what was missing
            module._parameters.update(metas)

    def _fill(self, module: nn.Module, first: str) -> None:
        """Initialise the module, whose tensor `first` is on the meta device, its buffers in real memory."""
        metas = self._blank_buffers(module)
        for name in metas:
            fresh = torch.zeros_like(module._buffers[name], device=self.device)  # type: ignore[arg-type]
            module._buffers[name] = fresh.fill_(math.nan) if fresh.is_floating_point() else fresh
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(self._seed + self._count)
            self._count += 1
            self._initialise(module, first)
        for name in metas:
            buffer = module._buffers[name]
            if buffer is not None and buffer.numel() and bool(buffer.isnan().all()):
                path = self._names.get(id(module), "")
                raise ModelError(
                    f"buffer `{path}{'.' if path else ''}{name}` was on the meta device, and what fills "
                    f"`{path or 'the model'}` ({type(module).__name__}) has not written it: let "
                    "reset_parameters() or shard(..., init=...) fill buffers, too."
                )

    def _refuse_unwritten(self, module: nn.Module) -> None:
        """A parameter that the model's own way leaves as it is."""
        for name, made in module._parameters.items():
            if made is None or made.is_meta or not made.numel() or not made.is_floating_point():
                continue
            if bool(made.isnan().all()):
                path = self._names.get(id(module), "")
                raise ModelError(
                    f"`{path}{'.' if path else ''}{name}` is on the meta device, and neither _init_weights() "
                    f"of the model nor reset_parameters() of {type(module).__name__} writes it: pass "
                    "shard(..., init=function_of_a_module)."
                )

    def _initialise(self, module: nn.Module, first: str) -> None:
        reset = getattr(module, "reset_parameters", None)
        if self.init is not None:
            self.init(module)
        elif id(module) in self._ways:
            if callable(reset):
                reset()
            for fill, part in self._ways[id(module)]:  # what is not made yet is on the meta device
                fill(part)
            self._refuse_unwritten(module)
        elif callable(reset):
            reset()
        else:
            path = self._names.get(id(module), "")
            raise ModelError(
                f"`{first}` is on the meta device, and `{path or 'the model'}` "
                f"({type(module).__name__}) has no reset_parameters() to fill it. Give the class one, or "
                "pass shard(..., init=function_of_a_module)."
            )


def _ways(model: nn.Module) -> Iterator[tuple[int, Way]]:
    """By id of a module: who fills it in a model of transformers. That is `_init_weights` of the model, or of
    the one inside that it belongs to, called with the module, and after that with all that it is a part of:
    an attention, say, gives its projections other values than they have alone."""
    todo: list[tuple[nn.Module, Init | None, Way]] = [(model, None, [])]
    while todo:
        module, own, above = todo.pop()
        its = getattr(module, "_init_weights", None)
        if callable(its) and hasattr(module, "config"):
            own = its
        way: Way = [] if own is None else [(own, module), *above]
        if way:
            yield id(module), way
        todo += [(child, own, way) for child in module.children()]
