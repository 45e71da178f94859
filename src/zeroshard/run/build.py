"""From a plain model and its optimizers to a runtime: layout, buffers, homes and leaves, unit by unit.

A meta parameter is materialised module by module, its rows are kept and the rest is let go at once: no rank
ever holds a whole model that it does not keep, nor do its pages stay with the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.codec import Codec
from zeroshard.comm import Transport
from zeroshard.config import Options
from zeroshard.count.layout import ALIGN, Pack, Slot, slots_by_name, stretches
from zeroshard.count.lending import small_units
from zeroshard.count.placement import Placement
from zeroshard.errors import ModelError, OptionError
from zeroshard.host.place import Host
from zeroshard.life.bucket import Sink
from zeroshard.life.grad import Gradients, LocalBucket, LocalGradients
from zeroshard.life.moments import HeldMoments
from zeroshard.life.param import Bundle, Rests
from zeroshard.life.shard import Faces, Master, Param, make_home, retire
from zeroshard.life.step import Update, rows_suffice
from zeroshard.life.units import Tenant, Unit, find_units
from zeroshard.native import trim
from zeroshard.policy import Adaptive, Choice, Delayed, EveryStep, Local, choices_of
from zeroshard.routes import gather_codec, routes_of
from zeroshard.sync import AdaptivePace, DelayedGradients, DelayedLocalGradients, DelayedPace, LocalPace, Pace
from zeroshard.tier import Copies
from zeroshard.tier.pool import Ledger, Pool

from .live import LiveUnit, leaf_of, share_count
from .runtime import Runtime
from .state import renew_state
from .wiring import Wiring, sort_of

Init = Callable[[nn.Module], None]

_LOOSE = 4 * 2**20  # bytes made on the way, after which memory that was freed is given back


class Builder:
    """Makes the runtime of one `shard()`. All ranks run it in the same order: the transport's regions
    depend on it."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: Options,
        transport: Transport,
        faces: Faces,
        device: torch.device,
        placement: Placement,
    ) -> None:
        self.model, self.optimizers, self.options = model, list(optimizers), options
        self.transport, self.device, self.placement = transport, device, placement
        self.ledger = Ledger()
        self.faces = faces
        self.copies = Copies(device)
        self.runtime = Runtime(options, transport, self.faces, Pool(device, self.ledger), self.ledger)
        self.runtime.placement = placement
        self.host: Host | None = None
        self._small = frozenset[str]()  # units that stay whole at stage 3; see [Note: small units]
        if options.offload is not None:
            _check_offload(options, transport)
            self.host = self.runtime.host = Host(
                options, self.optimizers, transport.rank, self.copies, self.ledger
            )

    def build(self, init: Init | None) -> Runtime:
        units = find_units(self.model, self.options.units)
        tenants = [tenant for unit in units for tenant in unit.tenants]
        slots = self._slots(tenants)
        if self.options.shards_params and not self.options.gather:
            self._small = small_units({unit.name: self._sizes(unit) for unit in units})
        if self.host is not None:
            self.host.stretch = self._stretches(units)
            for unit in units:
                place = self.placement[unit.label]
                if place.optimizer != "device":
                    for key, dtypes, group in self._groups(unit):
                        self.host.plan(key, group, slots, dtypes, place)
            self.host.open(self.transport)
        fresh = _Materialiser(self.model, self.device, init, self.transport)
        live = [LiveUnit(unit, self._bundles(unit, slots, fresh)) for unit in units]
        fresh.fill_buffers(self.model)
        fresh.give_back()
        self.runtime.adopt_units(live)
        params = self.runtime.params
        successors = {id(p.original): p.home for p in params}
        for optimizer in self.optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            update = Update(optimizer, [p for p in params if id(p.original) in held], self.faces)
            update.adopt(successors)
            renew_state(update)
            self.runtime.updates.append(update)
        for param in params:
            param.stand(param.home)
            if param.original is not param.home:
                retire(param.original)
            del param.original
        self.runtime.pace = self._pace(params)
        coded = [bundle.coded for bundle in self.runtime.bundles]
        self.runtime.pace.beliefs = [
            private for rows in coded if rows is not None for private in rows.private()
        ]
        if self.host is not None:
            self.host.start()
            self.runtime.adopt_parts(self.host.parts)
        return self.runtime

    def give_up(self) -> None:
        """Building has failed: end the threads that were begun, and let the scratch file go."""
        if self.host is not None:
            if self.host.updates is not None:
                self.host.updates.close()
            self.host.close()

    # ------------------------------------------------------------------ layout

    def _slots(self, tenants: list[Tenant]) -> dict[str, Slot]:
        """A slot per parameter: rows, or whole tensors where its optimizer needs them."""
        whole = {
            id(p)
            for o in self.optimizers
            if self._needs_whole(o)
            for g in o.param_groups
            for p in g["params"]
        }
        names = {t.name for t in tenants if id(t.parameter) in whole or self.options.split == "whole"}
        shapes = [(t.name, tuple(t.parameter.shape)) for t in tenants]
        return slots_by_name(shapes, names, self.transport.size, self.options.rows)

    def _stretches(self, units: list[Unit]) -> dict[str, int]:
        owner = {id(t.parameter): (t.name, unit.name) for unit in units for t in unit.tenants}
        return stretches(owner[id(p)] for p in self.model.parameters() if p.requires_grad)

    def _needs_whole(self, optimizer: Optimizer) -> bool:
        return self.options.split != "rows" and not rows_suffice(optimizer)

    def _dtypes(self, tenant: Tenant) -> tuple[torch.dtype, torch.dtype]:
        """Compute and master dtype of a parameter."""
        own, precision = tenant.parameter.dtype, self.options.precision
        if precision is None or not own.is_floating_point:
            return own, own
        master = getattr(torch, precision.master)
        keeps = any(fnmatchcase(tenant.name, pattern) for pattern in precision.keep)
        return (master if keeps else getattr(torch, precision.compute)), master

    def _groups(self, unit: Unit) -> list[tuple[str, tuple[torch.dtype, torch.dtype], list[Tenant]]]:
        """The parameters of each bundle of a unit, with its key and dtypes."""
        groups: dict[tuple[tuple[torch.dtype, torch.dtype], Codec | None], list[Tenant]] = {}
        for tenant in unit.tenants:
            codec = gather_codec(self.options.gather, tenant.name)
            groups.setdefault((self._dtypes(tenant), codec), []).append(tenant)
        return [
            (f"{unit.label}/{number}", dtypes, tenants)
            for number, ((dtypes, _), tenants) in enumerate(groups.items())
        ]

    def _sizes(self, unit: Unit) -> list[int]:
        """The bytes of its parameters as it computes with them."""
        return [tenant.parameter.numel() * self._dtypes(tenant)[0].itemsize for tenant in unit.tenants]

    def _bundles(self, unit: Unit, slots: dict[str, Slot], fresh: _Materialiser) -> list[Bundle]:
        return [
            self._bundle(key, tenants, slots, dtypes, self._rests(unit, key, dtypes, tenants), fresh)
            for key, dtypes, tenants in self._groups(unit)
        ]

    def _bundle(
        self,
        key: str,
        tenants: list[Tenant],
        slots: dict[str, Slot],
        dtypes: tuple[torch.dtype, torch.dtype],
        rests: Rests,
        fresh: _Materialiser,
    ) -> Bundle:
        pack = Pack(tuple(slots[t.name] for t in tenants), self.transport.size)
        transport = self.transport
        bundle = Bundle(
            key,
            pack,
            dtypes,
            rests,
            transport,
            self.runtime.pool,
            self.ledger,
            self.copies,
            gather_codec(self.options.gather, tenants[0].name),
        )
        full = bundle.full_views(bundle.full) if bundle.full is not None else None
        compute, local = bundle.compute_views(), bundle.local_views()
        if self.host is not None and rests.state != "device":
            local = self.host.locals_of(bundle, tenants)
            bundle.use_locals(local)
        masters: dict[str, Master] = dict(self.host.masters) if self.host is not None else {}
        masters |= zip((t.name for t in tenants), bundle.split_masters(), strict=False)
        for index, tenant in enumerate(tenants):
            value, slot = fresh.value(tenant), pack.slots[index]
            start, stop = slot.rows(transport.rank)
            rows = value[start:stop] if slot.shape else value
            with torch.no_grad():
                if full is not None:
                    full[index].copy_(value)
                elif rests.rows != "disk":
                    compute[index].copy_(rows)
                if tenant.name in masters:
                    # The weight too: where a value lies half way between two of bf16, `split` does not round
                    # as `copy_` does.
                    masters[tenant.name].write(0, rows.float().reshape(-1).contiguous())
                elif local[index].data_ptr() != compute[index].data_ptr():
                    local[index].copy_(rows)
            leaf = leaf_of(
                full[index] if full is not None else bundle.blank(index), tenant.parameter.requires_grad
            )
            home = make_home(tenant, slot, local[index], self.faces)
            bundle.params.append(Param(tenant, slot, leaf, local[index], home))
            bundle.params[-1].master = masters.get(tenant.name)
            bundle.params[-1].wide = bundle.master_dtype
            if rests.state == "device" and not rests.splits:  # else it is not torch alone that writes it
                share_count(bundle.params[-1])
            fresh.done(tenant)
        return bundle

    def _rests(
        self, unit: Unit, key: str, dtypes: tuple[torch.dtype, torch.dtype], tenants: list[Tenant]
    ) -> Rests:
        place = self.placement[unit.label]
        rows = self.host.rows_of.get(key, place.parameters) if self.host is not None else place.parameters
        streamed = rows != "device"
        whole = not self.options.shards_params or self.transport.size == 1 or unit.name in self._small
        resident = whole and not streamed
        near = not streamed and place.optimizer == "device"
        splits = near and self.host is not None and self.host.splits(tenants, dtypes)
        return Rests(resident, place.optimizer, rows, splits)

    # ------------------------------------------------------------------ the pace

    def _pace(self, params: list[Param]) -> Pace:
        """The policy at work. A choice of policies shares what it can: one set of buckets for all that
        reduce every step through the same codecs."""
        sync = self.options.sync
        paces: dict[Choice, Pace] = {}
        sets: dict[object, list[Choice]] = {}
        for choice in choices_of(sync):
            if isinstance(choice, Local):
                paces[choice] = self._local_pace(choice, params)
            else:
                own = choice.compress if isinstance(choice, EveryStep) and self.transport.size > 1 else None
                sets.setdefault(own, []).append(choice)
        for codecs, members in sets.items():
            options = self.options if codecs is None else replace(self.options, compress=routes_of(codecs))
            gradients = self._gradients(params, options, any(isinstance(m, Delayed) for m in members))
            if isinstance(gradients, (DelayedGradients, DelayedLocalGradients)):
                policy = next(m for m in members if isinstance(m, Delayed))
                paces |= dict.fromkeys(members, DelayedPace(policy, gradients, self.transport.rank))
            else:
                paces |= dict.fromkeys(members, Pace(gradients))
        if isinstance(sync, Adaptive):
            return AdaptivePace(sync, paces, self.transport, self.runtime.updates)
        return paces[sync]

    def _local_pace(self, policy: Local, params: list[Param]) -> LocalPace:
        trained = [p for p in params if p.trainable]
        gradients = LocalGradients(trained, [sort_of(p, self.options).landed for p in trained])
        pace = LocalPace(policy, gradients, self.transport, self.runtime.updates)
        pace.divide(trained, self.options.bucket_bytes, self.ledger)
        return pace

    # ------------------------------------------------------------------ gradients

    def _gradients(self, params: list[Param], options: Options, delays: bool) -> Gradients | LocalGradients:
        """A set of buckets, and what counts the arrivals for them."""
        order = {id(p): n for n, p in enumerate(self.model.parameters())}
        trainable = sorted((p for p in params if p.trainable), key=lambda p: -order[id(p.home)])
        dtypes = {p.name: sort_of(p, options).dtypes for p in trainable}
        by_name = {p.name: p for p in params}
        sinks: dict[str, Sink] = {}
        if self.host is not None:
            counted = self.transport.rank == 0 or options.stage == 0
            sinks = self.host.sinks(
                by_name, {name: landed for name, (_, landed) in dtypes.items()}, self.faces, counted
            )
        plots = self.host.plots if self.host is not None else []
        if self.transport.size == 1:
            local = [
                LocalBucket(
                    [by_name[n] for n in plot.names],
                    plot.spans,
                    plot.numel,
                    dtypes[plot.names[0]][1],
                    sinks[plot.names[0]],
                )
                for plot in plots
            ]
            kind = DelayedLocalGradients if delays else LocalGradients
            return kind(trainable, [dtypes[p.name][1] for p in trainable], local)
        align = self.host.align if self.host is not None else ALIGN
        wiring = Wiring(options, self.transport, self.device, self.ledger, delays, align)
        made = wiring.buckets(trainable, [[by_name[n] for n in plot.names] for plot in plots])
        for bucket in made:
            bucket.sink = sinks.get(bucket.params[0].name)
        reduced = DelayedGradients if delays else Gradients
        gradients = reduced(made, self.transport, self.faces, options.stage, self.ledger)
        gradients.desk = wiring.desk
        self._hold_moments(gradients, options)
        return gradients

    def _hold_moments(self, gradients: Gradients, options: Options) -> None:
        """Tell the updates of codecs that freeze second moments."""
        for update in self.runtime.updates:
            found = {id(p.home): sort_of(p, options).codec for p in update.params.values()}
            codecs = {key: codec for key, codec in found.items() if codec is not None and codec.freezes}
            if codecs:
                assert gradients.desk is not None
                update.held = HeldMoments(update.optimizer, codecs, gradients.desk)


def _check_offload(options: Options, transport: Transport) -> None:
    assert options.offload is not None
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


class _Materialiser:
    """Values of parameters and buffers: the user's own, or made on the spot for those on the meta device.

    All ranks must draw the same random numbers, so that rows fit together: the draws start from a seed that
    rank 0 drew.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, init: Init | None, transport: Transport
    ) -> None:
        self.device, self.init = device, init
        self._values: dict[int, Tensor] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._loose = 0  # bytes made since freed memory was given back
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            seed = int(torch.randint(2**31, ()).item()) if transport.rank == 0 else 0
            self._seed = int(transport.max([float(seed)])[0])
            self._count = 0

    def value(self, tenant: Tenant) -> Tensor:
        if not tenant.parameter.is_meta:
            return tenant.parameter.detach()
        if id(tenant.parameter) not in self._values:
            self._make(tenant)
        return self._values[id(tenant.parameter)]

    def done(self, tenant: Tenant) -> None:
        self._values.pop(id(tenant.parameter), None)

    def give_back(self) -> None:
        """What was freed of what was made here: the system gets it, and not this process's next tensors."""
        if self._loose:
            trim()
            self._loose = 0

    def fill_buffers(self, model: nn.Module) -> None:
        """Those of modules that have no parameters of their own, such as the phases of rotary embeddings."""
        for path, module in model.named_modules():
            left = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
            if left:
                self._fill(module, f"{path}.{left[0]}" if path else left[0])

    def _make(self, tenant: Tenant) -> None:
        """Give the module real memory for its own parameters and buffers, initialise them, and put the
        meta ones back."""
        if self._loose >= _LOOSE:
            self.give_back()  # not later: what this module takes would come on top
        module = tenant.places[0].module
        metas = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
        if self.device.type == "cpu":
            self._loose += sum(p.nbytes for p in metas.values())
        for name, p in metas.items():
            module._parameters[name] = nn.Parameter(
                torch.empty_like(p, device=self.device), requires_grad=p.requires_grad
            )
        try:
            self._fill(module, tenant.name)
            for name, p in metas.items():
                made = module._parameters[name]
                assert made is not None
                self._values[id(p)] = made.detach()
        finally:  # where it fails, shard() can be called again with what was missing
            module._parameters.update(metas)

    def _fill(self, module: nn.Module, first: str) -> None:
        """Initialise the module, whose tensor `first` is on the meta device, its buffers in real memory."""
        metas = [name for name, b in module._buffers.items() if b is not None and b.is_meta]
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

    def _initialise(self, module: nn.Module, first: str) -> None:
        reset = getattr(module, "reset_parameters", None)
        if self.init is not None:
            self.init(module)
        elif callable(reset):
            reset()
        else:
            path = self._names.get(id(module), "")
            raise ModelError(
                f"`{first}` is on the meta device, and `{path or 'the model'}` "
                f"({type(module).__name__}) has no reset_parameters() to fill it. Give the class one, or "
                "pass shard(..., init=function_of_a_module)."
            )
