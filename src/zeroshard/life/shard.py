"""The record of one sharded parameter, and how its rows show themselves to the user.

Tensors, and who owns them (one set per parameter):

- `home`   master dtype; this rank's rows as a DTensor, or all of it as a plain Parameter. Stands in the
  modules and in the optimizer outside of forward and backward. Lives as long as the run.
- `local`  the plain tensor inside `home`. The optimizer's update writes it. A view of the bundle's buffer
  where master and compute dtype agree, a buffer of its own otherwise.
- `leaf`   compute dtype, full shape. Stands in the modules while they compute; autograd accumulates into
  `leaf.grad`. Its memory belongs to the bundle.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from zeroshard.count.layout import Slot
from zeroshard.errors import StateError
from zeroshard.native import join, split

from .face import Writes, face_of
from .reading import Compares, Readings, Subject
from .units import Place, Tenant


class Faces:
    """Turns local rows into what the user sees: a DTensor with a global shape, or the plain tensor where it
    is whole.

    Why DTensor: `clip_grad_norm_`, GradScaler and `torch.linalg` then mean the whole tensor. Plain slices
    would silently clip by a local norm, and hang where one rank alone sees an inf.
    """

    def __init__(self, rank: int, mesh: DeviceMesh | None, transport: Compares | None = None) -> None:
        self.rank, self.mesh = rank, mesh
        self.writes = Writes()  # by the loop, into homes
        self.readings = Readings(transport)

    def show(self, local: Tensor, slot: Slot, writes: Writes | None = None, what: str = "") -> Tensor:
        """`what` of the parameter it is, if not itself."""
        if self.mesh is None:
            return local
        about = Subject(self.readings, (f"{what} of `{slot.name}`" if what else f"`{slot.name}`",))
        placement: Placement = Replicate() if slot.split == "copy" else Shard(0)
        shape, stride = torch.Size(slot.shape), torch.empty(slot.shape, device="meta").stride()
        own = _apart(local)
        if (
            own.device.type != self.mesh.device_type
        ):  # rows on the host: from_local would copy them to the GPU
            spec = DTensorSpec(self.mesh, (placement,), tensor_meta=TensorMeta(shape, stride, own.dtype))
            return face_of(DTensor(own, spec, requires_grad=False), writes, about)
        made = DTensor.from_local(own, self.mesh, [placement], run_check=False, shape=shape, stride=stride)
        return face_of(made, writes, about)

    @staticmethod
    def local(seen: Tensor) -> Tensor:
        """The plain tensor inside what the user sees."""
        return seen._local_tensor if isinstance(seen, DTensor) else seen


def mesh_over(group: Any, device: torch.device) -> DeviceMesh:
    """A one-dimensional mesh over the ranks of a process group."""
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return DeviceMesh.from_group(chosen, device.type)


class Master(Protocol):
    """The fp32 rows of a parameter whose home shows fewer bits or only a copy: a split master, or one on the
    disk. Elements are counted from this rank's first; what is read is flat, on the host or on the device."""

    on_disk: bool  # then the home may show NaN

    def read(self, start: int, stop: int) -> Tensor: ...

    def write(self, start: int, values: Tensor) -> None:
        """Flat fp32 values on any device; also into the home."""


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


class Param:
    """One parameter's tensors (named at the top of this file) and its place in the layout."""

    def __init__(
        self, tenant: Tenant, slot: Slot, leaf: nn.Parameter, local: Tensor, home: nn.Parameter
    ) -> None:
        self.name = tenant.name
        self.places: list[Place] = tenant.places
        self.original = tenant.parameter
        self.slot, self.leaf, self.local, self.home = slot, leaf, local, home
        self.master: Master | None = None  # where `local` is not the master itself
        self.one_count = False  # home and leaf are the same memory, and share torch's count of writes
        self.wide = local.dtype  # of masters in this run; with offload what no optimizer has is kept narrower

    @property
    def trainable(self) -> bool:
        return self.home.requires_grad

    @property
    def master_dtype(self) -> torch.dtype:
        return self.local.dtype if self.master is None else torch.float32

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
        self.master.write(0, rows.float().reshape(-1).contiguous())

    @property
    def narrow(self) -> bool:
        """Whether fewer bits of it are kept than an update needs."""
        return self.master_dtype != self.wide

    def stand(self, parameter: nn.Parameter) -> None:
        """Put `parameter` (the leaf or the home) wherever this parameter stands in the model."""
        for place in self.places:
            place.module._parameters[place.attribute] = parameter


def names_of(model: nn.Module, params: Iterable[Param]) -> dict[str, list[str]]:
    """By its own name, every name that a state dict of the model has for each parameter: tied weights and
    those of a module that stands in several places have several."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(f"{path}." if path else "")
    return {
        p.name: [path + place.attribute for place in p.places for path in paths.get(id(place.module), ())]
        for p in params
    }


class Retired(nn.Parameter):
    """What is left of a parameter that a DTensor has replaced. A list of parameters made before `shard()`
    would otherwise clip nothing, and keep the whole model in memory, without a word."""

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
    parameter.__class__ = Retired


def make_home(tenant: Tenant, slot: Slot, local: Tensor, faces: Faces) -> nn.Parameter:
    """The parameter that stands for these rows. The user's own object is kept wherever a plain tensor will
    do."""
    original = tenant.parameter
    if faces.mesh is None:
        same = original.data_ptr() == local.data_ptr()  # of two without elements too, wherever they are
        if not same or original.device != local.device or original.dtype != local.dtype or original.is_meta:
            original = _rebind(original, local)
        home = original
    else:
        home = nn.Parameter(faces.show(local, slot, faces.writes), requires_grad=original.requires_grad)
        if not slot.chunked:
            home.__dict__["full_tensor"] = partial(_no_chunks, slot.name)
    if home.is_floating_point():
        home.grad_dtype = None  # a 16-bit gradient of an fp32 master is what mixed precision keeps
    return home


def _no_chunks(name: str, **_: Any) -> Tensor:
    """`DTensor` would put rows that are no even chunks together wrongly."""
    raise StateError(
        f"full_tensor() of `{name}`: its rows are not divided as DTensor assumes (split= level or whole). "
        f'Use run.gathered({name!r}), or shard with split="rows".'
    )


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
