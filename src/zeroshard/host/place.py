"""Builds what offloading needs: which parameters share a part, their state on the host or the disk, and the
sinks of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.codec import Compression
from zeroshard.comm import Transport
from zeroshard.config import Options
from zeroshard.count.layout import ALIGN, Slot, aligned, buckets
from zeroshard.count.lending import staging_bytes
from zeroshard.count.placement import Place, Rest
from zeroshard.errors import OptionError, TierError
from zeroshard.life.bucket import EarlySink, Sink
from zeroshard.life.param import Bundle, OnDiskRows
from zeroshard.life.shard import Faces, Master, Param, SplitMaster
from zeroshard.life.step import Update, rows_suffice
from zeroshard.life.units import Tenant
from zeroshard.native import AdamRows, SgdRows, Team, Workers, allocate, usable_cores
from zeroshard.native.abi import BLOCK
from zeroshard.policy import delays
from zeroshard.routes import bucket_limit, codec_for
from zeroshard.tier import Arena, Copies, Page, Paging, Scratch, Streaming, Stretch, pinned
from zeroshard.tier.pool import Ledger

from .crew import Crew
from .eligible import check_kernels, form_of, no_kernel, overlaps
from .form import Form
from .landing import HostGradients
from .mail import Mail
from .part import OnDisk, PagedMaster, Part
from .updates import HostUpdates
from .ways import travels


@dataclass
class Plot:
    """Parameters of one bundle and one optimizer group whose state lies together off the device, before they
    are `Param`s. Planned from sizes alone; then filled."""

    names: list[str]
    spans: list[tuple[int, int]]
    numel: int
    optimizer: Optimizer
    group: dict[str, Any]
    form: Form | None  # None: the optimizer keeps its own state
    rest: Rest
    overlapped: bool = True  # else the optimizer's step updates it
    state: AdamRows | SgdRows | None = None
    master: Tensor | None = None
    disk: OnDisk | None = None
    targets: list[Tensor] = field(default_factory=list)


class PartSink(EarlySink):
    """Hands the gradient of a part that holds its weights back to the host's updates."""

    def __init__(self, host: Host, part: Part) -> None:
        self._host, self._part = host, part

    def __call__(self, flat: Tensor, used: list[bool]) -> None:
        self._host.accept(self._part, flat, used)

    @property
    def idle(self) -> bool:
        return self._part.done.is_set()

    def wait(self) -> None:
        assert self._host.updates is not None
        self._host.updates.wait(self._part)


class Host:
    """Everything of one run that rests off the device."""

    def __init__(
        self, options: Options, optimizers: Sequence[Optimizer], rank: int, copies: Copies, ledger: Ledger
    ) -> None:
        assert options.offload is not None
        self.options, self.offload, self.rank = options, options.offload, rank
        self.copies, self.ledger = copies, ledger
        # A parameter that was not used is left out of its part's update, so it must not share a block of
        # 8-bit moments.
        self.align = BLOCK if options.offload.moments == "int8" else ALIGN
        self.owner = {id(p): (o, g) for o in optimizers for g in o.param_groups for p in g["params"]}
        self.stretch: dict[str, int] = {}  # of every trainable parameter; see `layout.stretches`
        self.plots: list[Plot] = []
        self.rows_of: dict[str, Rest] = {}  # where each bundle's rows rest
        self.masters: dict[str, Master] = {}  # of parameters whose home is not the master itself
        self.parts: list[Part] = []
        self.paging: Paging | None = None
        self._streaming: Streaming | None = None
        self._plots_of: dict[str, list[Plot]] = {}  # by bundle
        self._homes: list[tuple[Plot, list[Tensor]]] = []
        self._optimizer_of: dict[int, Optimizer] = {}  # by id(part)
        self.updates: HostUpdates | None = None
        self.overlaps = overlaps(options)
        check_kernels(self.offload, options, optimizers)

    # ------------------------------------------------------------------ state

    def splits(self, tenants: Sequence[Tenant], dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
        """Whether the master of a bundle is split where it rests on the device, beside its weights. It is
        joined there for a chunk of parameters at a time, so their optimizers must be element-wise."""
        owners = [self.owner[id(t.parameter)][0] for t in tenants if id(t.parameter) in self.owner]
        return (
            self.offload.master == "split"
            and dtypes == (torch.bfloat16, torch.float32)
            and all(map(rows_suffice, owners))
        )

    def plan(
        self,
        key: str,
        tenants: Sequence[Tenant],
        slots: dict[str, Slot],
        dtypes: tuple[torch.dtype, torch.dtype],
        place: Place,
    ) -> None:
        """Decide which parameters of a bundle share a part. Before anything is made, so that all sizes are
        known when the first is."""
        planned, rest = self._plots_of.setdefault(key, []), place.optimizer
        groups: dict[tuple[int, Compression | None], list[Tenant]] = {}
        for tenant in tenants:
            if tenant.parameter.requires_grad and id(tenant.parameter) in self.owner:
                codec = codec_for(self.options.compress, tenant.name, tenant.parameter.shape)
                groups.setdefault((id(self.owner[id(tenant.parameter)][1]), codec), []).append(tenant)
        # Weights rest on the disk with their state; where some of a bundle have none, all are on the host.
        beside = place.parameters == "disk" and sum(map(len, groups.values())) == len(tenants)
        self.rows_of[key] = "disk" if beside else "host" if place.parameters == "disk" else place.parameters
        for (_, codec), members in groups.items():
            optimizer, group = self.owner[id(members[0].parameter)]
            form = form_of(self.offload, optimizer, group, dtypes)
            if form is None and rest == "disk":
                raise OptionError(no_kernel(members[0].name, optimizer, dtypes[1]))
            if form is not None and beside:
                form = replace(form, weight=dtypes[0])
            if rest == "host" and not self.overlaps:
                form = None  # torch's own step runs there as well
            sizes = [(t.name, t.parameter.numel() * dtypes[0].itemsize) for t in members]
            for names in buckets(sizes, bucket_limit(codec, self.offload.stage_bytes), self.stretch):
                spans, at = [], 0
                for name in names:
                    held = slots[name].held(self.rank)
                    spans.append((at, held))
                    at += aligned(held, self.align)
                planned.append(Plot(names, spans, at, optimizer, group, form, rest, self.overlaps))

    def open(self, transport: Transport) -> None:
        """Make the scratch file, if anything was planned to rest on the disk. A rank without room for it
        raises on all of them."""
        planned = [
            (plot, plot.form)
            for plots in self._plots_of.values()
            for plot in plots
            if plot.rest == "disk" and plot.form is not None
        ]
        if not planned:
            return
        assert self.offload.path is not None
        sizes = [form.nbytes(plot.numel) for plot, form in planned]
        problem, scratch = None, None
        try:
            scratch = Scratch(self.offload.path, sum(sizes))
        except TierError as error:
            problem = str(error)
        for rank, told in enumerate(transport.exchange(problem, "files of offload=")):
            if told is not None:
                raise TierError(str(told) if transport.size == 1 else f"rank {rank}: {told}")
        assert scratch is not None
        self.paging = Paging(scratch, min(self.offload.stages, len(planned) + 1), max(sizes))
        self.ledger.book("disk", scratch.nbytes)
        self.ledger.book("host", self.paging.nbytes)
        at = 0
        for (plot, _), size in zip(planned, sizes, strict=True):
            plot.disk = OnDisk(self.paging, Page(f"`{plot.names[0]}` … `{plot.names[-1]}`", at, size))
            at += size
        weights = [plot.numel * form.weight.itemsize for plot, form in planned if form.weight is not None]
        if weights:
            self._streaming = Streaming(self.paging, self.copies, max(weights))
            self.ledger.book("staging", self._streaming.nbytes)

    def locals_of(self, bundle: Bundle, tenants: Sequence[Tenant]) -> list[Tensor]:
        """Make the state of a bundle's trainable parameters; returns what the homes of all of its parameters
        are made of."""
        compute = bundle.compute_views()
        index = {t.name: i for i, t in enumerate(tenants)}
        result = list(compute)
        for plot in self._plots_of[bundle.key]:
            weights = [compute[index[n]] for n in plot.names]
            plot.targets = [weight.view(-1) for weight in weights]
            self._fill(plot, bundle.master_dtype)
            for name, (at, n), weight in zip(plot.names, plot.spans, weights, strict=True):
                if plot.form is not None:
                    bundle.updated_by_host.add(index[name])
                    if not plot.overlapped:  # its gradient is on the host, and so must be its home
                        result[index[name]] = torch.tensor(math.nan).expand(weight.shape)
                        bundle.written_through.add(index[name])
                if plot.master is not None:
                    result[index[name]] = plot.master[at : at + n].view(weight.shape)
                elif plot.disk is not None and plot.form is not None:
                    arrays = plot.form.arrays(plot.numel)
                    self.masters[name] = PagedMaster(plot.disk, arrays, at, weight)
                elif plot.state is not None and plot.state.remainder is not None:
                    self.masters[name] = SplitMaster(weight, plot.state.remainder[at : at + n])
            self.plots.append(plot)
        if bundle.rests.rows == "disk":
            bundle.source = self._source(bundle, index)
        return result

    def _source(self, bundle: Bundle, index: dict[str, int]) -> OnDiskRows:
        """Where a bundle whose rows are on the disk reads them."""
        assert self._streaming is not None
        width, stretches, members = bundle.dtype.itemsize, [], []
        for plot in self._plots_of[bundle.key]:
            assert plot.disk is not None
            starts = [at * width for at, _ in plot.spans]
            stretches.append(Stretch(plot.disk.page, plot.numel * width, starts))
            members.append([index[name] for name in plot.names])
        return OnDiskRows(self._streaming, stretches, members)

    def _fill(self, plot: Plot, master_dtype: torch.dtype) -> None:
        """Memory for a plot that rests in host memory."""
        if plot.disk is not None:
            return
        if plot.form is None:
            plot.master = allocate(plot.numel, [master_dtype])[0]
            self.ledger.book("host", plot.master.nbytes)
            return
        plot.state = plot.form.zeros(plot.numel)
        plot.master = plot.state.master
        self.ledger.book("host", sum(t.nbytes for t in vars(plot.state).values() if t is not None))

    # ------------------------------------------------------------------ gradients and updates

    @property
    def updates_early(self) -> bool:
        """Whether any update may begin in backward."""
        return any(plot.form is not None and plot.overlapped for plot in self.plots)

    @property
    def steps_parts(self) -> bool:
        """Whether `optimizer.step()` has a kernel of ours update anything."""
        return any(part.landing is not None for part in self.parts)

    def sinks(
        self, params: dict[str, Param], grad_dtypes: dict[str, torch.dtype], faces: Faces, counted: bool
    ) -> dict[str, Sink]:
        """A sink for every plot, under the name of its first parameter; makes the parts and shows their
        state in the optimizer."""
        result: dict[str, Sink] = {}
        for plot in self.plots:
            members = [params[name] for name in plot.names]
            self._homes.append((plot, [p.home for p in members]))
            dtype = grad_dtypes[plot.names[0]]
            landing = None
            if plot.form is None or not plot.overlapped:
                landing = self._landing(plot, members, dtype, faces)
                result[plot.names[0]] = landing.accept
            if plot.form is None:
                continue
            counts = [counted or p.slot.split != "copy" for p in members]
            part = Part(
                label=f"`{plot.names[0]}` … `{plot.names[-1]}`",
                params=members,
                spans=plot.spans,
                numel=plot.numel,
                group=plot.group,
                form=plot.form,
                state=plot.state,
                targets=plot.targets,
                grad_dtype=dtype,
                counted=counts,
                optimizer=plot.optimizer,
                disk=plot.disk,
                landing=landing,
            )
            self._show_state(plot, part)
            self.parts.append(part)
            self._optimizer_of[id(part)] = plot.optimizer
            if landing is None:
                result[plot.names[0]] = self._sink(part)
        return result

    def _sink(self, part: Part) -> Sink:
        """Weights on the disk show as soon as their page is written, so nothing of them can be held back."""
        if not delays(self.options.sync) or part.paged:
            return partial(self.accept, part)
        nbytes = part.numel * part.weight_dtype.itemsize
        part.held = pinned(nbytes, self.copies.device).view(part.weight_dtype)
        self.ledger.book("host", nbytes)
        return PartSink(self, part)

    def _landing(self, plot: Plot, members: list[Param], dtype: torch.dtype, faces: Faces) -> HostGradients:
        """Host memory for gradients that the loop sees."""
        flat = allocate(plot.numel, [dtype])[0]
        self.ledger.book("host", flat.nbytes)
        pairs = zip(members, plot.spans, strict=True)
        rows = [flat[at : at + n].view(p.local.shape) for p, (at, n) in pairs]
        grads = [faces.show(row, p.slot, what="the gradient") for row, p in zip(rows, members, strict=True)]
        return HostGradients(members, grads, flat)

    @contextmanager
    def stepped(self, update: Update) -> Iterator[None]:
        """Around `optimizer.step()`: update what no update has begun for in backward, and hide its gradients
        from torch's own step."""
        mine = [part for part in self.parts_of(update.optimizer) if part.landing is not None]
        if not mine:
            yield
            return
        assert self.updates is not None
        self.updates.step(mine, update.shrinks)
        held = [(p.home, p.home.grad) for part in mine for p in part.params]
        for home, _ in held:
            home.grad = None
        try:
            yield
        finally:
            for home, grad in held:
                home.grad = grad

    def accept(self, part: Part, flat: Tensor, used: list[bool]) -> None:
        """The reduced gradient of a part has landed."""
        assert self.updates is not None
        self.updates.accept(part, flat, used)

    @staticmethod
    def _show_state(plot: Plot, part: Part) -> None:
        """`optimizer.state` shows the host's tensors themselves, so that state dicts and inspection work
        as ever."""
        part.shown_steps = [torch.zeros(()) for _ in part.params]
        for index, param in enumerate(part.params):
            plot.optimizer.state[param.home] = part.shown(index)

    def parts_of(self, optimizer: Optimizer | None) -> list[Part]:
        """None: of all."""
        return [p for p in self.parts if optimizer is None or self._optimizer_of[id(p)] is optimizer]

    def state_bytes(self) -> int:
        """Bytes that `optimizer.state` has for parameters whose state rests off the device."""
        states = (plot.optimizer.state.get(home, {}) for plot, homes in self._homes for home in homes)
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

        From what was given: torch has cast its own copy to the dtype of the homes, and that of a split master
        is bf16.
        """
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        keys = [key for group in given["param_groups"] for key in group["params"]]
        homes = [p for group in optimizer.param_groups for p in group["params"]]
        states = {id(home): given["state"].get(key, {}) for key, home in zip(keys, homes, strict=True)}
        for part in self.parts_of(optimizer):
            part.group = group_of[id(part.params[0].home)]
            part.load([states[id(param.home)] for param in part.params])
            for index, param in enumerate(part.params):
                optimizer.state[param.home] = part.shown(index)

    def show_decoded(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """In `optimizer.state_dict()`: 8-bit moments as fp32, and what is on the disk."""
        places = {
            id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        for part in self.parts_of(optimizer):
            if not part.visible:
                moments = part.decoded()
                state_dict["state"] |= {
                    places[id(p.home)]: part.shown(i, moments) for i, p in enumerate(part.params)
                }

    def give_back(self, optimizer: Optimizer) -> None:
        """Leave in `optimizer.state` what torch's own step goes on with: fp32, and nothing for what never
        had an update."""
        for part in self.parts_of(optimizer):
            moments = part.decoded()
            for index, param in enumerate(part.params):
                optimizer.state.pop(param.home, None)
                if part.steps[index]:
                    optimizer.state[param.home] = {
                        key: value.to(param.leaf.device, copy=True) if value.dim() else value
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
        early = [part for part in self.parts if part.landing is None and math.isfinite(clip)]
        if early:
            squares = torch.zeros(len(early) + 1, device=self.copies.device)
            self.ledger.book("buckets", squares.nbytes)
            for number, part in enumerate(early):
                part.room = squares[number], squares[-1]
        crew = self._mail(staging, team) if (team := Team.open(threads)) is not None else None
        if crew is None:
            arena = Arena(staging, self.copies.device)
            crew = Crew(arena, self.copies, team or Workers(threads), self.paging)
        self.updates = HostUpdates(self.parts, crew, clip, self.offload.undo)

    def _mail(self, staging: int, team: Team) -> Crew | Mail | None:
        """Couriers in C, if all parts can go their way."""
        plain = all(p.held is None and p.landing is None and travels(p, self.copies) for p in self.parts)
        return Mail.open(pinned(staging, self.copies.device), self.copies, team) if plain else None

    def close(self) -> None:
        """The scratch file goes; nothing reads it any more."""
        if self.paging is not None:
            self.paging.close()
