"""A sharded parameter: its rows, its unsharded form, and how the rows show themselves to the user.

Tensors, and who owns them (one set per parameter):

- `sharded_param`   master dtype; this rank's rows as a DTensor, or all of it as a plain Parameter. Stands in
  the modules and in the optimizer outside of forward and backward. Lives as long as the run.
- `local`  the plain tensor inside `sharded_param`. The optimizer's update writes it. A view of the gather
  group's buffer where master and compute dtype agree, a buffer of its own otherwise.
- `unsharded_param`   compute dtype, full shape. Stands in the modules while they compute; autograd
  accumulates into `unsharded_param.grad`. Its memory belongs to the gather group.

[Note: sums of micro-batches] What several backward passes leave on an unsharded parameter without
synchronisation is added up in `sum_dtype`, the wider one of what the unsharded parameter computes in and
what travels: sums in bf16 lose what fp32 on the way was asked for. An unsharded parameter whose sums are
wider takes gradients as they come (`grad_dtype`): autograd then adds the next one to what is there, in
place.

[Note: owners of state] A background save may still be reading what training is about to change. State has
owners (`GuardedState`), which change it at moments of their own: a host update during backward, a codec when
it encodes. An owner waits for the copy of what is its own alone, and that is copied next. What has no owner
is changed by `optimizer.step()` only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from zeroshard.errors import StateError
from zeroshard.kernels import join, split
from zeroshard.layout.sharding import ShardSpec

from .dispatch_rules import renew
from .dtensor import dtensor_of, parameter_of
from .rank_reads import ComparesRanks, RankReads, ReadSubject
from .units import ParamRef
from .write_versions import WriteVersions


class BackgroundReader(Protocol):
    """Copies state beside training."""

    def copied(self) -> None:
        """Return once it has copied everything."""

    def copied_of(self, owner: GuardedState | None) -> None:
        """Return once it has copied what `owner` changes; None: what has no owner."""


class GuardedState:
    """An owner of state that goes into checkpoints."""

    _reader: BackgroundReader | None = None

    def read_by(self, reader: BackgroundReader) -> None:
        """Begins to be read."""
        self._reader = reader

    def let_read(self) -> BackgroundReader | None:
        """Who has to be waited for before the next change; asked once."""
        reader, self._reader = self._reader, None
        return reader

    def before_change(self) -> None:
        """Wait for whoever still reads it. Its owner calls this before it changes anything."""
        reader = self.let_read()
        if reader is not None:
            reader.copied_of(self)


class ShardedTensors:
    """Turns local rows into what the user sees: a DTensor with a global shape, or the plain tensor where it
    is whole.

    Why DTensor: `clip_grad_norm_`, GradScaler and `torch.linalg` then mean the whole tensor. Plain slices
    would silently clip by a local norm, and hang where one rank alone sees an inf.
    """

    def __init__(self, rank: int, mesh: DeviceMesh | None, transport: ComparesRanks | None = None) -> None:
        self.rank, self.mesh = rank, mesh
        self.writes = WriteVersions()  # by the loop, into sharded parameters
        self.readings = RankReads(transport)
        self._specs: dict[tuple[tuple[int, ...], torch.dtype, bool], DTensorSpec] = {}
        renew()

    def show(
        self, local: Tensor, slot: ShardSpec, writes: WriteVersions | None = None, what: str = ""
    ) -> Tensor:
        """`what` of the parameter it is, if not itself."""
        if self.mesh is None:
            return local
        about = ReadSubject(self.readings, (f"{what} of `{slot.name}`",) if what else slot.name)
        # A handle has no memory of its own.
        own = _apart(local) if type(local) is Tensor else local
        return dtensor_of(own, self._spec_of(slot, own.dtype), writes, about, slot.division)

    def _spec_of(self, slot: ShardSpec, dtype: torch.dtype) -> DTensorSpec:
        """One for all that are alike: models have thousands."""
        assert self.mesh is not None
        key = slot.shape, dtype, slot.split == "copy"
        spec = self._specs.get(key)
        if spec is None:
            placement: Placement = Replicate() if slot.split == "copy" else Shard(0)
            stride = torch.empty(slot.shape, device="meta").stride()
            meta = TensorMeta(torch.Size(slot.shape), stride, dtype)
            spec = self._specs[key] = DTensorSpec(self.mesh, (placement,), tensor_meta=meta)
        return spec

    @staticmethod
    def local(seen: Tensor) -> Tensor:
        """The plain tensor inside what the user sees."""
        return seen._local_tensor if isinstance(seen, DTensor) else seen

    @staticmethod
    def rows_of(seen: Tensor) -> tuple[int, int, int, int] | None:
        """Whose rows they are, of how many ranks, from which to before which, where that is known; also what
        was read from a file."""
        told = getattr(seen, "rows_of", None) if isinstance(seen, DTensor) else None
        return None if told is None else tuple(told)

    @staticmethod
    def divided(seen: Tensor) -> bool:
        """Whether each rank has rows of it."""
        return isinstance(seen, DTensor) and any(p.is_shard() for p in seen._spec.placements)


def mesh_over(group: Any, device: torch.device) -> DeviceMesh:
    """A one-dimensional mesh over the ranks of a process group."""
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return DeviceMesh.from_group(chosen, device.type)


class MasterRows(Protocol):
    """The fp32 rows of a parameter whose sharded parameter shows fewer bits or only a copy: a split master,
    or one on the disk. Elements are counted from this rank's first; what is read is flat, on the host or on
    the device."""

    on_disk: bool  # then the sharded parameter may show NaN

    def read(self, start: int, stop: int) -> Tensor: ...

    def write(self, start: int, values: Tensor) -> None:
        """Flat fp32 values on any device; also into the sharded parameter."""


class SplitMaster:
    """A bf16 weight and its 16-bit remainder, on the host or beside the weight. What is read is where the
    remainder is."""

    on_disk = False

    def __init__(self, weight: Tensor, remainder: Tensor) -> None:
        self._weight, self._remainder = weight.view(-1), remainder.view(-1)

    def read(self, start: int, stop: int) -> Tensor:
        rest = self._remainder[start:stop]
        return join(self._weight[start:stop].to(rest.device), rest)

    def write(self, start: int, values: Tensor) -> None:
        halves = [half[start : start + values.numel()] for half in (self._weight, self._remainder)]
        here = values.device  # split where the values are, and move half as many bytes
        weight, rest = (
            half if half.device == here else torch.empty_like(half, device=here) for half in halves
        )
        split(values, (weight, rest))
        for half, made in zip(halves, (weight, rest), strict=True):
            if made is not half:
                half.copy_(made)


class FrozenMaster:
    """fp32 rows in host memory of a parameter that nothing updates, beside the rows that it computes with."""

    on_disk = False

    def __init__(self, weight: Tensor, rows: Tensor) -> None:
        self._weight, self._rows = weight.view(-1), rows

    def read(self, start: int, stop: int) -> Tensor:
        return self._rows[start:stop]

    def finer(self, weight: Tensor) -> Tensor:
        """What is kept of rows that show fewer bits: all bits, where they show what is here."""
        shown = weight.detach().reshape(-1).to(self._rows.device)
        return torch.where(self._rows.to(shown.dtype) == shown, self._rows, shown.float())

    def write(self, start: int, values: Tensor) -> None:
        for rows in (self._weight, self._rows):
            rows[start : start + values.numel()].copy_(values)


class ShardedParam:
    """One parameter's tensors (named at the top of this file) and its place in the layout."""

    __slots__ = (
        *("name", "places", "original", "slot", "unsharded_param", "local", "sharded_param", "master"),
        *("wide", "one_count", "sum_dtype", "__weakref__"),
    )

    def __init__(
        self,
        param_ref: ParamRef,
        slot: ShardSpec,
        unsharded_param: nn.Parameter,
        local: Tensor,
        sharded_param: nn.Parameter,
        master: MasterRows | None,
        wide: torch.dtype,
    ) -> None:
        """`master`: where `local` is not it. `wide`: the dtype of masters in this run."""
        self.name, self.places, self.original = param_ref.name, param_ref.places, param_ref.parameter
        self.slot, self.unsharded_param, self.local = slot, unsharded_param, local
        self.sharded_param, self.master, self.wide = sharded_param, master, wide
        # Both are the same memory, and share torch's count of writes.
        self.one_count = False
        self.sum_dtype = unsharded_param.dtype  # see [Note: sums of micro-batches]

    @property
    def trainable(self) -> bool:
        return self.sharded_param.requires_grad

    @property
    def master_dtype(self) -> torch.dtype:
        return self.local.dtype if self.master is None else torch.float32

    def add_up_in(self, travels: torch.dtype) -> None:
        """Know what the gradient travels in; see [Note: sums of micro-batches]."""
        if travels.itemsize > self.unsharded_param.dtype.itemsize:
            self.sum_dtype, self.unsharded_param.grad_dtype = travels, None

    def widen_sum(self) -> None:
        """More gradients will be added to the one that the unsharded parameter has."""
        grad = self.unsharded_param.grad
        if grad is not None and grad.dtype != self.sum_dtype:
            self.unsharded_param.grad = grad.detach().to(self.sum_dtype)

    def take_grad(self) -> Tensor | None:
        """The gradient that autograd left on the unsharded parameter, which lets it go. It is dense, as what
        travels is: so one rank trains with the same optimizers as several."""
        param = self.unsharded_param
        if type(param) is nn.Parameter:
            grad, param.grad = param.grad, None
        else:
            with DisableTorchFunctionSubclass():  # it may be `Away`
                grad, param.grad = param.grad, None
        return grad.to_dense() if grad is not None and grad.is_sparse else grad

    def share_count(self) -> None:
        """Let a plain sharded parameter that is its unsharded parameter's own memory have one count of writes
        with it; see `VersionCounters` in `runtime/param_writes.py`."""
        both = (self.sharded_param, self.unsharded_param)
        places = [(t.data_ptr(), t.device, t.dtype, t.shape, t.stride()) for t in both]
        if type(self.sharded_param) is nn.Parameter and places[0] == places[1]:
            trains = self.unsharded_param.requires_grad
            self.unsharded_param = nn.Parameter(self.sharded_param.detach(), requires_grad=trains)
            self.one_count = True

    def keep_whole_grad(self, grad: Tensor) -> None:
        """Add a gradient of the whole tensor to the one that the unsharded parameter has."""
        with torch.no_grad():
            mine, before = grad.to(self.unsharded_param.device, self.sum_dtype), self.unsharded_param.grad
            self.unsharded_param.grad = mine.clone() if before is None else before + mine

    def add_grad(self, grad: Tensor) -> None:
        """Add to the gradient that the sharded parameter shows, which may become its memory."""
        shown = self.sharded_param.grad
        self.sharded_param.grad = grad if shown is None else shown.add_(grad)

    @torch.no_grad()
    def read_master(self) -> Tensor:
        """This rank's rows in master precision."""
        if self.master is None:
            return self.local
        return self.master.read(0, self.local.numel()).view(self.local.shape)

    @torch.no_grad()
    def write_master(self, rows: Tensor) -> None:
        if self.master is None:
            self.local.copy_(rows)
            return
        if isinstance(self.master, FrozenMaster) and rows.dtype == self.local.dtype:
            rows = self.master.finer(rows)  # a state dict shows these, and so does what was written by hand
        self.master.write(0, rows.float().reshape(-1).contiguous())

    @property
    def narrow(self) -> bool:
        """Whether an update would find fewer bits of it than it needs."""
        return self.master_dtype != self.wide or isinstance(self.master, FrozenMaster)

    def stand(self, parameter: nn.Parameter) -> None:
        """Put `parameter` (the unsharded parameter or the sharded parameter) wherever this parameter
        stands in the model."""
        for place in self.places:
            place.module._parameters[place.attribute] = parameter


def names_of(model: nn.Module, params: Iterable[ShardedParam]) -> dict[str, list[str]]:
    """By its own name, every name that a state dict of the model has for each parameter: tied weights and
    those of a module that stands in several places have several."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(f"{path}." if path else "")
    return {
        p.name: [path + place.attribute for place in p.places for path in paths.get(id(place.module), ())]
        for p in params
    }


class ReplacedParam(nn.Parameter):
    """The class that a parameter gets once a DTensor has replaced it: any use raises. Otherwise a list of
    parameters made before `shard()` would silently clip nothing, and keep the whole model in memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise StateError(
            "this parameter was taken from the model before zs.shard(), which has replaced it. Take it again "
            "after shard(): model.parameters(); and pass every optimizer to shard()."
        )


def retire(parameter: nn.Parameter) -> None:
    """Let a parameter's memory go, and make any use of it an error."""
    parameter.data = parameter.data.new_empty(0)
    parameter.grad = None
    parameter.__class__ = ReplacedParam


def make_sharded_param(
    param_ref: ParamRef, slot: ShardSpec, local: Tensor, sharded_tensors: ShardedTensors
) -> nn.Parameter:
    """The parameter that stands for these rows. The user's own object is kept wherever a plain tensor will
    do."""
    original = param_ref.parameter
    if sharded_tensors.mesh is None:
        same = original.data_ptr() == local.data_ptr()  # of two without elements too, wherever they are
        if not same or original.device != local.device or original.dtype != local.dtype or original.is_meta:
            original = _rebind(original, local)
        sharded_param = original
    else:
        shown = sharded_tensors.show(local, slot, sharded_tensors.writes)
        sharded_param = parameter_of(shown, original.requires_grad)
    if sharded_param.is_floating_point():
        sharded_param.grad_dtype = None  # a 16-bit gradient of an fp32 master is what mixed precision keeps
    return sharded_param


def _apart(view: Tensor) -> Tensor:
    """The same memory under a storage that begins and ends with the view. `copy.deepcopy` fails for a DTensor
    over a view that begins elsewhere, and `torch.save` would write the whole buffer for each of its rows."""
    if view.numel() == 0:
        return torch.empty_like(view)
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.nbytes]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.size(), view.stride())


def _rebind(parameter: nn.Parameter, local: Tensor) -> nn.Parameter:
    """The same Parameter object over other memory (a meta parameter cannot be rebound: it gets a
    successor). Through `.data`: torch's count of writes is then its own, and not that of the whole buffer."""
    if parameter.is_meta or parameter.dtype != local.dtype or parameter.device != local.device:
        successor = type(parameter)(local.data, requires_grad=parameter.requires_grad)
        return successor
    parameter.data = local
    return parameter
