"""Builds what offloading needs: which parameters share a part, their state on the host, and the sinks of
their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from .config import Offload, Options
from .errors import OptionError
from .grad import Sink
from .host import HostUpdates
from .landing import HostGradients
from .layout import ALIGN, Slot, aligned, buckets
from .native import AdamRows, SgdRows, Workers, allocate, usable_cores
from .native.abi import BLOCK
from .param import Bundle
from .part import Part
from .pool import Ledger
from .shard import Faces, Param
from .tier import Copies, Ring
from .units import Tenant

FAST = (Adam, AdamW, SGD)  # optimizers that the native kernels run


@dataclass
class Plot:
    """Parameters of one bundle and one optimizer group whose state lies together on the host, before they
    are `Param`s."""

    names: list[str]
    spans: list[tuple[int, int]]
    numel: int
    optimizer: Optimizer
    group: dict[str, Any]
    state: AdamRows | SgdRows | None  # None: the optimizer keeps its own
    master: Tensor | None
    targets: list[Tensor]


class Host:
    """Everything of one run that is placed on the host."""

    def __init__(
        self, options: Options, optimizers: Sequence[Optimizer], rank: int, copies: Copies, ledger: Ledger
    ) -> None:
        assert options.offload is not None
        self.options, self.offload, self.rank, self.copies, self.ledger = (
            options,
            options.offload,
            rank,
            copies,
            ledger,
        )
        # A parameter that was not used is left out of its part's update, so it must not share a block of
        # 8-bit moments.
        self.align = BLOCK if options.offload.moments == "int8" else ALIGN
        self.owner = {id(p): (o, g) for o in optimizers for g in o.param_groups for p in g["params"]}
        self.plots: list[Plot] = []
        self.remainders: dict[str, Tensor] = {}  # of split masters, by parameter
        self.parts: list[Part] = []
        self._optimizer_of: dict[int, Optimizer] = {}  # by id(part)
        self.updates: HostUpdates | None = None
        _check(self.offload, options, optimizers)

    # ------------------------------------------------------------------ state

    def locals_of(self, bundle: Bundle, tenants: Sequence[Tenant]) -> list[Tensor]:
        """Make the host state of a bundle's trainable parameters; returns the master rows of all of its
        parameters."""
        compute = bundle.compute_views()
        slots = dict(zip((t.name for t in tenants), bundle.pack.slots, strict=True))
        index = {t.name: i for i, t in enumerate(tenants)}
        result = list(compute)
        groups: dict[int, list[Tenant]] = {}
        for tenant in tenants:
            if tenant.parameter.requires_grad and id(tenant.parameter) in self.owner:
                groups.setdefault(id(self.owner[id(tenant.parameter)][1]), []).append(tenant)
        for members in groups.values():
            sizes = [(t.name, t.parameter.numel() * bundle.dtype.itemsize) for t in members]
            for names in buckets(sizes, self.offload.stage_bytes):
                optimizer, group = self.owner[id(tenants[index[names[0]]].parameter)]
                plot = self._plot(
                    names,
                    [slots[n] for n in names],
                    [compute[index[n]] for n in names],
                    optimizer,
                    group,
                    bundle,
                )
                for name, (at, n) in zip(names, plot.spans, strict=True):
                    if plot.state is not None:
                        bundle.updated_by_host.add(index[name])
                    if plot.master is not None:
                        result[index[name]] = plot.master[at : at + n].view(compute[index[name]].shape)
                    elif plot.state is not None and plot.state.remainder is not None:
                        self.remainders[name] = plot.state.remainder[at : at + n]
                self.plots.append(plot)
        return result

    def _plot(
        self,
        names: list[str],
        slots: list[Slot],
        targets: list[Tensor],
        optimizer: Optimizer,
        group: dict[str, Any],
        bundle: Bundle,
    ) -> Plot:
        spans, at = [], 0
        for slot in slots:
            spans.append((at, slot.held(self.rank)))
            at += aligned(slot.held(self.rank), self.align)
        fast = self.is_fast(optimizer, bundle.master_dtype)
        splits = (
            fast and self.offload.master == "split" and bundle.dtype == torch.bfloat16
        )  # not what precision.keep names
        state: AdamRows | SgdRows | None = None
        if fast:
            state = self._state(at, optimizer, group, splits)
            master = state.master
        else:
            master = allocate(at, [bundle.master_dtype])[0]
        self.ledger.book(
            "host",
            sum(t.nbytes for t in (vars(state).values() if state is not None else [master]) if t is not None),
        )
        return Plot(names, spans, at, optimizer, group, state, master, [t.view(-1) for t in targets])

    def is_fast(self, optimizer: Optimizer, master: torch.dtype) -> bool:
        """Whether the native kernels run this optimizer, overlapped. It needs `clip_norm`, which promises
        one step per backward."""
        return (
            self.options.clip_norm is not None
            and type(optimizer) in FAST
            and master == torch.float32
            and not _scaled(self.options)
        )

    def _state(
        self, numel: int, optimizer: Optimizer, group: dict[str, Any], splits: bool
    ) -> AdamRows | SgdRows:
        if type(optimizer) is SGD:
            dtypes = [torch.int16 if splits else torch.float32] + [torch.float32] * bool(group["momentum"])
            first, *rest = allocate(numel, dtypes)
            return SgdRows(None if splits else first, first if splits else None, rest[0] if rest else None)
        return AdamRows.zeros(
            numel,
            master="split" if splits else "fp32",
            amsgrad=bool(group["amsgrad"]),
            moments="int8" if self.offload.moments == "int8" else "fp32",
        )

    # ------------------------------------------------------------------ gradients and updates

    def sinks(
        self, params: dict[str, Param], grad_dtypes: dict[str, torch.dtype], faces: Faces, counted: bool
    ) -> dict[str, Sink]:
        """A sink for every plot, under the name of its first parameter; makes the parts and shows their
        state in the optimizer."""
        result: dict[str, Sink] = {}
        for plot in self.plots:
            members = [params[name] for name in plot.names]
            dtype = grad_dtypes[plot.names[0]]
            if plot.state is None:
                flat = allocate(plot.numel, [dtype])[0]
                self.ledger.book("host", flat.nbytes)
                rows = [
                    flat[at : at + n].view(p.local.shape)
                    for p, (at, n) in zip(members, plot.spans, strict=True)
                ]
                grads = [faces.show(row, p.slot) for row, p in zip(rows, members, strict=True)]
                result[plot.names[0]] = HostGradients(members, grads, flat).accept
                continue
            counts = [counted or p.slot.split != "copy" for p in members]
            part = Part(
                f"`{plot.names[0]}` … `{plot.names[-1]}`",
                members,
                plot.spans,
                plot.numel,
                plot.group,
                plot.state,
                plot.targets,
                dtype,
                counts,
            )
            self._show_state(plot, part)
            self.parts.append(part)
            self._optimizer_of[id(part)] = plot.optimizer
            result[plot.names[0]] = lambda flat, used, part=part: self._accept(part, flat, used)  # type: ignore[misc]
        return result

    def _accept(self, part: Part, flat: Tensor, used: list[bool]) -> None:
        assert self.updates is not None
        self.updates.accept(part, flat, used)

    @staticmethod
    def _show_state(plot: Plot, part: Part) -> None:
        """`optimizer.state` shows the host's tensors themselves, so that state dicts and inspection work
        as ever."""
        part.shown_steps = [torch.zeros(()) for _ in part.params]
        for index, param in enumerate(part.params):
            plot.optimizer.state[param.home] = part.shown(index)

    def parts_of(self, optimizer: Optimizer) -> list[Part]:
        return [part for part in self.parts if self._optimizer_of[id(part)] is optimizer]

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
        """In `optimizer.state_dict()`: 8-bit moments as fp32."""
        places = {
            id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
        }
        for part in self.parts_of(optimizer):
            if part.coded:
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

    def start(self) -> None:
        """Make the staging ring and the threads, sized by the parts."""
        if not self.parts:
            return
        largest = max(part.stage_bytes for part in self.parts)
        ring = Ring(min(self.offload.stages, len(self.parts) + 1), largest, self.copies.device)
        self.ledger.book("staging", ring.nbytes)
        cores = usable_cores()
        threads = self.offload.threads or max(1, len(cores) - 2)
        clip = self.options.clip_norm if self.options.clip_norm is not None else math.inf
        self.updates = HostUpdates(self.parts, ring, self.copies, Workers(threads), clip, self.offload.undo)


def _scaled(options: Options) -> bool:
    """fp16 gradients are unscaled by GradScaler between backward and step, so nothing can be updated
    before."""
    return options.precision is not None and options.precision.compute == "float16"


def _check(offload: Offload, options: Options, optimizers: Sequence[Optimizer]) -> None:
    """Options that could not take effect."""
    wanted = [
        word
        for word, asked in (
            ('master="split"', offload.master == "split"),
            ('moments="int8"', offload.moments == "int8"),
        )
        if asked
    ]
    if not wanted:
        return
    what, kinds = f"Offload({' and '.join(wanted)})", {type(o) for o in optimizers}
    if options.clip_norm is None:
        raise OptionError(
            f"{what} is done by the overlapped host update, which needs clip_norm= (math.inf to clip "
            "nothing)."
        )
    if _scaled(options):
        raise OptionError(
            f"{what} is done by the overlapped host update, which fp16 with its loss scaling rules out: pass "
            'precision="bf16".'
        )
    if not kinds & set(FAST):
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no optimizer"
        raise OptionError(
            f"{what} is done by the overlapped host update, which knows Adam, AdamW and SGD; this run has "
            f"{names}."
        )
    if offload.moments == "int8" and not kinds & {Adam, AdamW}:
        raise OptionError(
            'Offload(moments="int8") is for Adam and AdamW, and this run has SGD alone: drop it.'
        )
    precision = options.precision
    if offload.master == "split" and (
        precision is None or (precision.compute, precision.master) != ("bfloat16", "float32")
    ):
        compute = precision.compute if precision is not None else "the model's own dtype"
        raise OptionError(
            'Offload(master="split") needs bf16 compute weights and an fp32 master; this run computes in '
            f"{compute}. "
            'Pass precision="bf16", or master="plain".'
        )
