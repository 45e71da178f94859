"""Builds the offloaded state of a run: which parameters share a group, and where it lies.

Builds what offloading needs: which parameters share a part, their state on the host or the disk, and the
sinks of their gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from zeroshard.comm import Transport
from zeroshard.errors import OptionError, TierError
from zeroshard.grads import EarlySink, KeepingSink, Sink
from zeroshard.kernels import StateRows, ThreadTeam, Workers, allocate, usable_cores
from zeroshard.layout.placement import Rest
from zeroshard.layout.prefetch import staging_bytes
from zeroshard.layout.specs import OffloadGroupSpec, ParamSpec
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.options import Options
from zeroshard.params.dtensor import ShardedDTensor
from zeroshard.params.gather_group import DiskRows, GatherGroup
from zeroshard.params.guarded import ParamGuard
from zeroshard.params.sharded_param import FrozenMaster, MasterRows, ShardedParam, ShardedTensors, SplitMaster
from zeroshard.params.units import ParamRef
from zeroshard.sync_policies import delays
from zeroshard.tiers import (
    DiskPage,
    DiskPager,
    PageSegment,
    StagingArena,
    TierCopies,
    WeightStream,
    open_storage,
    pinned,
)
from zeroshard.tiers.ledger import MemoryLedger

from .deferred import DeferredGrads, HostGradients
from .eligible import check_kernels, form_of, no_kernel, overlaps
from .group import DiskPlace, GradientSize, OffloadGroup, PagedMaster, StateForm
from .native_executor import NativeExecutor
from .python_executor import PythonExecutor
from .updates import HostUpdates
from .work import travels


@dataclass
class GroupDraft:
    """Parameters of one gather group and one optimizer group whose state lies together off the device, before
    they are `ShardedParam`s. Planned from sizes alone; then filled."""

    names: list[str]
    spans: list[tuple[int, int]]
    numel: int
    optimizer: Optimizer
    group: dict[str, Any]
    form: StateForm | None  # None: the optimizer keeps its own state
    rest: Rest
    overlapped: bool = True  # else the optimizer's step updates it
    deferred: bool = False  # or begins the update
    state: StateRows | None = None
    master: Tensor | None = None
    disk: DiskPlace | None = None
    targets: list[Tensor] = field(default_factory=list)

    def rest_at(self, paging: DiskPager, at: int, size: int) -> None:
        """Its state lies on the disk, from there on."""
        self.disk = DiskPlace(paging, DiskPage(f"`{self.names[0]}` … `{self.names[-1]}`", at, size))

    def fill(self, weights: Sequence[Tensor], master_dtype: torch.dtype) -> int:
        """Meet the weights that it updates, and take host memory for a state that rests there. Returns its
        bytes."""
        self.targets = [weight.view(-1) for weight in weights]
        if self.disk is not None:
            return 0
        if self.form is None:
            self.master = allocate(self.numel, [master_dtype])[0]
            return self.master.nbytes
        self.state = self.form.zeros(self.numel)
        self.master = self.state.master
        return sum(t.nbytes for t in vars(self.state).values() if t is not None)


def _steps(part: OffloadGroup) -> bool:
    """Whether the optimizer's step begins its update."""
    return part.reduced_grad is not None or part.deferred is not None


class OffloadSink(KeepingSink):
    """Hands the gradient of a part to the host's updates."""

    def __init__(self, host: OffloadedState, part: OffloadGroup) -> None:
        self._host, self._part = host, part

    def __call__(self, flat: Tensor, used: list[bool]) -> None:
        assert self._host.updates is not None
        self._host.updates.accept(self._part, flat, used)

    def make_room(self, shown: Tensor) -> None:
        assert self._host.updates is not None
        self._host.updates.make_room(self._part, shown)


class DelayedOffloadSink(OffloadSink, EarlySink):
    """The same of a part that holds its weights back."""

    @property
    def idle(self) -> bool:
        return self._part.update.done.is_set()


class OffloadedState:
    """Everything of one run that rests off the device."""

    def __init__(
        self,
        options: Options,
        optimizers: Sequence[Optimizer],
        rank: int,
        copies: TierCopies,
        ledger: MemoryLedger,
    ) -> None:
        assert options.offload is not None
        self.options, self.offload, self.rank = options, options.offload, rank
        self.copies, self.ledger = copies, ledger
        self.owner = {id(p): (o, g) for o in optimizers for g in o.param_groups for p in g["params"]}
        self.plots: list[GroupDraft] = []
        self.masters: dict[
            str, MasterRows
        ] = {}  # of parameters whose sharded parameter is not the master itself
        self.parts: list[OffloadGroup] = []
        self.paging: DiskPager | None = None
        self._streaming: WeightStream | None = None
        self._plots_of: defaultdict[str, list[GroupDraft]] = defaultdict(list)  # by gather group
        self._sharded_params: list[tuple[GroupDraft, list[Tensor]]] = []
        self.updates: HostUpdates | None = None
        self._guard: ParamGuard | None = None
        self.overlaps = overlaps(options)
        self.repeated: tuple[str, ...] = ()  # units whose backward runs twice
        check_kernels(self.offload, options, optimizers)

    # ------------------------------------------------------------------ state

    def plan(self, spec: OffloadGroupSpec, first: Parameter) -> None:
        """Take up an offload group. Before anything is made, so that all sizes are known when the first is.
        `first`: the first of its parameters."""
        optimizer, group = self.owner[id(first)]
        dtypes = getattr(torch, spec.compute), getattr(torch, spec.master)
        if spec.rest == "disk" and not spec.kernel:
            raise OptionError(no_kernel(spec.weights[0].name, optimizer, dtypes[1]))
        form = form_of(self.offload, optimizer, group, dtypes) if spec.kernel else None
        if form is not None and spec.paged:
            form = replace(form, weight=dtypes[0])
        names, spans = [w.name for w in spec.weights], list(spec.spans)
        deferred = self.options.defers and form is not None
        draft = GroupDraft(
            names, spans, spec.numel, optimizer, group, form, spec.rest, self.overlaps, deferred
        )
        self._plots_of[spec.gathered_by].append(draft)

    def repeat(self, repeatable: Sequence[str], repeated: Sequence[str]) -> None:
        """Know the units whose backward runs twice, and which could."""
        wanted = self.offload.repeat_backward
        if len(repeated) < wanted:
            raise OptionError(
                f"Offload(repeat_backward={wanted}): of {len(repeatable)} units the backward can run twice, "
                "those whose state rests off the device, all of it updated by the native kernels."
            )
        self.repeated = tuple(repeated)

    def open(self, transport: Transport) -> None:
        """Make the scratch file, if anything was planned to rest on the disk. A rank without room for it
        raises on all of them."""
        planned = [
            (draft, draft.form)
            for plots in self._plots_of.values()
            for draft in plots
            if draft.rest == "disk" and draft.form is not None
        ]
        if not planned:
            return
        assert self.offload.path is not None
        sizes = [form.nbytes(draft.numel) for draft, form in planned]
        problem, scratch = None, None
        try:
            scratch = open_storage(self.offload.path, sum(sizes))
        except TierError as error:
            problem = str(error)
        for rank, told in enumerate(transport.exchange(problem, "files of offload=")):
            if told is not None:
                raise TierError(str(told) if transport.size == 1 else f"rank {rank}: {told}")
        assert scratch is not None
        self.paging = DiskPager(scratch, min(self.offload.stages, len(planned) + 1), max(sizes))
        self.ledger.book("disk", scratch.nbytes)
        self.ledger.book("host", self.paging.nbytes)
        at = 0
        for (draft, _), size in zip(planned, sizes, strict=True):
            draft.rest_at(self.paging, at, size)
            at += size
        weights = [draft.numel * form.weight.itemsize for draft, form in planned if form.weight is not None]
        if weights:
            self._streaming = WeightStream(self.paging, self.copies, max(weights))
            self.ledger.book("staging", self._streaming.nbytes)

    def locals_of(self, gather_group: GatherGroup, param_refs: Sequence[ParamRef]) -> list[Tensor]:
        """Make the state of a gather group's trainable parameters; returns what the sharded parameters of all
        of its parameters are made of."""
        compute = gather_group.views()[0]
        index = {t.name: i for i, t in enumerate(param_refs)}
        result = list(compute)
        for draft in self._plots_of[gather_group.key]:
            weights = [compute[index[n]] for n in draft.names]
            self.ledger.book("host", draft.fill(weights, gather_group.own.master_dtype))
            for name, (at, n), weight in zip(draft.names, draft.spans, weights, strict=True):
                if draft.form is not None:
                    gather_group.own.updated_by_host.add(index[name])
                    if not draft.overlapped and not draft.deferred:
                        # Its gradient is on the host, and so must be its sharded parameter.
                        result[index[name]] = torch.tensor(math.nan).expand(weight.shape)
                        gather_group.own.written_through.add(index[name])
                if draft.master is not None:
                    result[index[name]] = draft.master[at : at + n].view(weight.shape)
                elif draft.disk is not None and draft.form is not None:
                    arrays = draft.form.arrays(draft.numel)
                    self.masters[name] = PagedMaster(draft.disk, arrays, at, weight)
                elif draft.state is not None and draft.state.remainder is not None:
                    self.masters[name] = SplitMaster(weight, draft.state.remainder[at : at + n])
            self.plots.append(draft)
        if gather_group.rests.rows == "disk":
            gather_group.read_from(self._source(gather_group, index))
        return result

    def keep_frozen(self, weights: Sequence[ParamSpec], computed: Mapping[str, Tensor]) -> None:
        """Make room for the fp32 values of what nothing updates. `computed`: the rows that this rank computes
        with, by name."""
        for name in (weight.name for weight in weights):
            rows = allocate(computed[name].numel(), [torch.float32])[0]
            self.ledger.book("host", rows.nbytes)
            self.masters[name] = FrozenMaster(computed[name], rows)

    def _source(self, gather_group: GatherGroup, index: dict[str, int]) -> DiskRows:
        """Where a gather group whose rows are on the disk reads them."""
        assert self._streaming is not None
        width, segments, members = gather_group.dtype.itemsize, [], []
        for draft in self._plots_of[gather_group.key]:
            assert draft.disk is not None
            starts = [at * width for at, _ in draft.spans]
            segments.append(PageSegment(draft.disk.page, draft.numel * width, starts))
            members.append([index[name] for name in draft.names])
        return DiskRows(self._streaming, segments, members)

    # ------------------------------------------------------------------ gradients and updates

    @property
    def updates_early(self) -> bool:
        """Whether any update may begin in backward."""
        return any(draft.form is not None and draft.overlapped for draft in self.plots)

    @property
    def steps_parts(self) -> bool:
        """Whether `optimizer.step()` has a kernel of ours update anything."""
        return any(map(_steps, self.parts))

    def sinks(
        self,
        params: dict[str, ShardedParam],
        grad_dtypes: dict[str, torch.dtype],
        sharded_tensors: ShardedTensors,
        counted: bool,
    ) -> dict[str, Sink]:
        """A sink for every plot, under the name of its first parameter; makes the parts and shows their
        state in the optimizer."""
        result: dict[str, Sink] = {}
        for draft in self.plots:
            members = [params[name] for name in draft.names]
            self._sharded_params.append((draft, [p.sharded_param for p in members]))
            dtype = grad_dtypes[draft.names[0]]
            reduced_grad = None
            if draft.form is None or not (draft.overlapped or draft.deferred):
                reduced_grad = self._reduced_grad(draft, members, dtype, sharded_tensors)
                result[draft.names[0]] = reduced_grad.accept
            if draft.form is None:
                continue
            counts = [counted or p.slot.split != "copy" for p in members]
            deferred = None
            if draft.deferred:
                read = sharded_tensors.mesh is not None and self.options.shards_params
                deferred = DeferredGrads(members, draft.spans, draft.numel, dtype, sharded_tensors, read)
            part = OffloadGroup(
                label=f"`{draft.names[0]}` … `{draft.names[-1]}`",
                params=members,
                spans=draft.spans,
                numel=draft.numel,
                group=draft.group,
                form=draft.form,
                state=draft.state,
                targets=draft.targets,
                grad_dtype=dtype,
                counted=counts,
                optimizer=draft.optimizer,
                disk=draft.disk,
                reduced_grad=reduced_grad,
                deferred=deferred,
            )
            part.show()
            self.parts.append(part)
            if reduced_grad is None:
                result[draft.names[0]] = self._sink(part)
        return result

    def _sink(self, part: OffloadGroup) -> Sink:
        """Weights on the disk show as soon as their page is written, so nothing of them can be held back."""
        if not delays(self.options.sync) or part.paged:
            return OffloadSink(self, part)
        nbytes = part.numel * part.weight_dtype.itemsize
        part.hold_back(pinned(nbytes, self.copies.device).view(part.weight_dtype))
        self.ledger.book("host", nbytes)
        return DelayedOffloadSink(self, part)

    def _reduced_grad(
        self,
        draft: GroupDraft,
        members: list[ShardedParam],
        dtype: torch.dtype,
        sharded_tensors: ShardedTensors,
    ) -> HostGradients:
        """Host memory for gradients that the loop sees."""
        flat = allocate(draft.numel, [dtype])[0]
        self.ledger.book("host", flat.nbytes)
        pairs = zip(members, draft.spans, strict=True)
        rows = [flat[at : at + n].view(p.local.shape) for p, (at, n) in pairs]
        grads = [
            sharded_tensors.show(row, p.slot, what="the gradient")
            for row, p in zip(rows, members, strict=True)
        ]
        return HostGradients(members, grads, flat)

    @contextmanager
    def stepped(self, update: ShardedOptimizer) -> Iterator[None]:
        """Around `optimizer.step()`: update what no update has begun for in backward, and hide its gradients
        from torch's own step."""
        mine = list(filter(_steps, self.parts_of(update.optimizer)))
        if not mine:
            yield
            return
        assert self.updates is not None
        self.updates.step(mine, update.shrinks)
        held = [(p.sharded_param, p.sharded_param.grad) for part in mine for p in part.params]
        for sharded_param, _ in held:
            sharded_param.grad = None
        try:
            yield
        finally:
            for sharded_param, grad in held:
                sharded_param.grad = grad

    def parts_of(self, optimizer: Optimizer | None) -> list[OffloadGroup]:
        """None: of all."""
        return [p for p in self.parts if optimizer is None or p.optimizer is optimizer]

    def state_bytes(self) -> int:
        """Bytes that `optimizer.state` has for parameters whose state rests off the device."""
        states = (
            draft.optimizer.state.get(sharded_param, {})
            for draft, sharded_params in self._sharded_params
            for sharded_param in sharded_params
        )
        return sum(t.nbytes for state in states for t in state.values() if isinstance(t, Tensor) and t.dim())

    def hidden_bytes(self) -> int:
        """Bytes of moments that `optimizer.state` does not show, as torch would hold them."""
        held = [part for part in self.parts if not part.visible]
        return sum(4 * len(part.moments) * sum(n for _, n in part.spans) for part in held)

    def shown_bytes(self) -> int:
        """Bytes of the parts' state that `optimizer.state` shows."""
        return sum(
            t.nbytes
            for part in self.parts
            for i in range(len(part.params))
            for t in part.shown(i).values()
            if t.dim()
        )

    @torch.no_grad()
    def take_loaded(self, optimizer: Optimizer, given: dict[str, Any]) -> None:
        """After `optimizer.load_state_dict(given)`: torch has put new groups and tensors in the optimizer;
        the host takes them over.

        From what was given: torch has cast its own copy to the dtype of the sharded parameters, and that of a
        split master is bf16.
        """
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        keys = [key for group in given["param_groups"] for key in group["params"]]
        sharded_params = [p for group in optimizer.param_groups for p in group["params"]]
        states = {
            id(sharded_param): given["state"].get(key, {})
            for key, sharded_param in zip(keys, sharded_params, strict=True)
        }
        for part in self.parts_of(optimizer):
            part.regroup(group_of[id(part.params[0].sharded_param)])
            part.load([states[id(param.sharded_param)] for param in part.params])
            part.show()

    def show_decoded(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """In `optimizer.state_dict()`: 8-bit moments as fp32, and what is on the disk; and no momentum before
        a first update, whose gradient becomes it, undampened."""
        places = {
            id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        for part in self.parts_of(optimizer):
            if not part.visible:
                moments = part.decoded()
                state_dict["state"] |= {
                    places[id(p.sharded_param)]: part.shown(i, moments) for i, p in enumerate(part.params)
                }
            if not part.form.update.begins_at_zero:
                for param, steps in zip(part.params, part.steps, strict=True):
                    if not steps:
                        state_dict["state"].pop(places[id(param.sharded_param)], None)

    def give_back(self, optimizer: Optimizer) -> None:
        """Leave in `optimizer.state` what torch's own step goes on with: fp32, and nothing for what never
        had an update."""
        for part in self.parts_of(optimizer):
            moments = part.decoded()
            for index, param in enumerate(part.params):
                optimizer.state.pop(param.sharded_param, None)
                if part.steps[index]:
                    optimizer.state[param.sharded_param] = {
                        key: value.to(param.unsharded_param.device, copy=True) if value.dim() else value
                        for key, value in part.shown(index, moments).items()
                    }

    def update_counts(self) -> dict[str, int]:
        """Steps by how the host's updates ran."""
        return dict(self.updates.counts) if self.updates is not None else {}

    def start(self) -> None:
        """Make the staging ring and the threads, sized by the parts."""
        if not self.parts:
            return
        staging = staging_bytes([part.stage_bytes for part in self.parts], self.offload.stages)
        self.ledger.book("staging", staging)
        cores = usable_cores()
        threads = self.offload.threads or max(1, len(cores) - 2)
        clip = self.options.clip_norm if self.options.clip_norm is not None else math.inf
        early = [part for part in self.parts if part.reduced_grad is None]
        if early:
            squares = torch.zeros(2 * len(early) + 1, device=self.copies.device)
            seen = pinned(4 * len(early), self.copies.device).view(torch.float32)
            self.ledger.book("buckets", squares.nbytes + seen.nbytes)
            totals, sizes = squares[:-1].view(2, -1)
            for at, part in enumerate(early):
                part.measure_in(GradientSize(totals[at], squares[-1], sizes[at : at + 1], seen[at : at + 1]))
        deferred = [part.deferred for part in self.parts if part.deferred is not None]
        norms = torch.zeros(sum(len(grads.params) for grads in deferred), device=self.copies.device)
        self.ledger.book("buckets", norms.nbytes)
        for grads, own in zip(deferred, norms.split([len(grads.params) for grads in deferred]), strict=True):
            grads.measure_in(own)
        team = ThreadTeam.open(threads)
        executor = None if team is None else self._executor_in(staging, team)
        if executor is None:
            arena = StagingArena(staging, self.copies.device)
            executor = PythonExecutor(arena, self.copies, team or Workers(threads), self.paging)
        self.updates = HostUpdates(self.parts, executor, clip, self.offload.undo)

    def _executor_in(self, staging: int, team: ThreadTeam) -> PythonExecutor | NativeExecutor | None:
        """Transfer workers in C, if all parts can go their way."""
        plain = all(p.held is None and p.reduced_grad is None and travels(p, self.copies) for p in self.parts)
        return NativeExecutor.open(pinned(staging, self.copies.device), self.copies, team) if plain else None

    def guard_params(self, before_use: Callable[[], None]) -> None:
        """What uses parameters after a step waits for the updates that the step has begun. Where torch does
        not tell of it, the step waits."""
        params = [p.sharded_param for part in self.parts if part.deferred is not None for p in part.params]
        if params and not all(isinstance(param, ShardedDTensor) for param in params):
            assert self.updates is not None
            self._guard = ParamGuard(before_use)
            self.updates.wait_in_step(not self._guard.take(params))

    def unguard(self) -> None:
        """Parameters are plain again."""
        if self._guard is not None:
            self._guard.give_back()

    def close(self) -> None:
        """The scratch file goes; nothing reads it any more. Parameters are plain again."""
        self.unguard()
        if self.paging is not None:
            self.paging.close()
