"""Computes with lists of sharded DTensors, and gathers them, from the rows of each rank.

Torch finds out how a list is to be computed by looking at every output for every input, again for each new
list: seconds for a thousand tensors. Lists of rows need none of it: what `torch._foreach_*` makes is made of
each rank's rows, and the norms of rows are pending in the same way for all of them, which torch is asked for
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from zeroshard.layout.sharding import ShardSpec

_NORM = torch.ops.aten._foreach_norm.Scalar
_STACK = torch.ops.aten.stack.default
Seen = Sequence[Any]  # sharded DTensors
Made = list[tuple[Tensor, DTensorSpec]]  # this rank's part of each result, and what it is part of


def of_lists(func: Any, args: Any, kwargs: dict[str, Any], by_torch: Callable[[Any], DTensor]) -> Made | None:
    """What a function makes of lists, by each rank of what it has; none where it writes in place. None: it is
    torch's affair. `by_torch` computes the same of a shorter list."""
    if func is _NORM:
        return _norms(args, kwargs, by_torch) if _kinds(args[0]) is not None else None
    if func is _STACK:
        return _stacked(args, kwargs, by_torch)
    if not func._schema.name.startswith("aten::_foreach_"):
        return None
    return _by_element(func, args, kwargs)


def _by_element(func: Any, args: Any, kwargs: dict[str, Any]) -> Made | None:
    """Where all lists are of tensors that lie alike, one by one, and all else is numbers."""
    first, given = args[0], []
    kinds = _kinds(first)
    if kinds is None:
        return None
    for value in (*args[1:], *kwargs.values()):
        if type(value) is list and value and isinstance(value[0], Tensor):
            if value is not first and (_kinds(value) != kinds or not _same_shapes(first, value)):
                return None
        elif isinstance(value, Tensor) and (isinstance(value, DTensor) or value.numel() != 1):
            return None
    given = [_local(value) for value in args]
    made = func(*given, **{name: _local(value) for name, value in kwargs.items()})
    if made is None:  # written in place
        return []
    if any(one.shape != local.shape for one, local in zip(made, given[0], strict=True)):
        return None  # something of whole tensors
    return [(one, _spec_like(seen._spec, one.dtype)) for one, seen in zip(made, first, strict=True)]


def _norms(args: Any, kwargs: dict[str, Any], by_torch: Callable[[Any], DTensor]) -> Made:
    """A rank without a row of a tensor has what changes no norm."""
    first, *others = args
    order = others[0] if others else kwargs.get("ord", 2)
    neutral = 0.0 if order >= 0 else math.inf
    local = [seen._local_tensor for seen in first]
    for number, own in enumerate(local):
        if not own.numel() and first[number].numel():
            local[number] = own.new_full((1, *first[number].shape[1:]), neutral)
    norms = _NORM(local, *others, **kwargs)
    specs: dict[tuple[bool, torch.dtype], DTensorSpec] = {}
    made = []
    for seen, norm in zip(first, norms, strict=True):
        key = seen.division is None, norm.dtype
        if key not in specs:
            specs[key] = _spec_like(by_torch([seen])._spec, norm.dtype)
        made.append((norm, specs[key]))
    return made


def _stacked(args: Any, kwargs: dict[str, Any], by_torch: Callable[[Any], DTensor]) -> Made | None:
    """Numbers that are pending alike are so together; those that are not become as those are."""
    seen = args[0]
    specs = {id(one._spec): one._spec for one in seen if isinstance(one, DTensor)}
    pending = [spec for spec in specs.values() if any(p.is_partial() for p in spec.placements)]
    if not pending or any(not isinstance(one, DTensor) or one.dim() for one in seen):
        return None
    kinds = {spec.placements for spec in pending}
    whole = {number for number, spec in specs.items() if all(p.is_replicate() for p in spec.placements)}
    if len(kinds) > 1 or len(whole) + len(pending) < len(specs):
        return None
    one = next(one for one in seen if id(one._spec) not in whole)
    pair = by_torch([one, one])
    local = [
        by_torch([one, other])._local_tensor[1] if id(other._spec) in whole else other._local_tensor
        for other in seen
    ]
    made = _STACK(local, *args[1:], **kwargs)
    meta = TensorMeta(made.shape, made.stride(), made.dtype)
    return [(made, DTensorSpec(pair._spec.mesh, pair._spec.placements, tensor_meta=meta))]


def _kinds(seen: Seen) -> list[ShardSpec | None] | None:
    """How the rows of each are divided; None if some are no sharded DTensors, or lie in other ways."""
    found = []
    for one in seen:
        if not isinstance(one, DTensor):
            return None
        division: ShardSpec | None = getattr(one, "division", None)
        placements = one._spec.placements
        if len(placements) != 1 or not (division is not None or placements[0].is_replicate()):
            return None
        found.append(division)
    return found


def _same_shapes(some: Seen, others: Seen) -> bool:
    return all(one.shape == other.shape for one, other in zip(some, others, strict=True))


def _local(value: Any) -> Any:
    if type(value) is list:
        return [one._local_tensor if isinstance(one, DTensor) else one for one in value]
    return value


def _spec_like(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def gathered(dtensor: DTensor, division: ShardSpec) -> Tensor:
    """All rows of all ranks. Every rank calls it."""
    own: Tensor = dtensor._local_tensor.detach()
    mesh = dtensor.device_mesh
    sent = own.to(mesh.device_type).contiguous()
    if not dtensor.numel():
        return own.new_empty(dtensor.shape)
    if sent.is_complex():
        sent = torch.view_as_real(sent)
    elif sent.dtype == torch.bool:
        sent = sent.to(torch.uint8)
    if division.split == "whole":
        if division.owner != mesh.get_local_rank():
            sent = sent.new_empty((division.height, *sent.shape[1:]))
        found = collectives.broadcast(sent, division.owner, (mesh, 0))
    else:
        most = max(stop - start for start, stop in map(division.rows, range(division.world)))
        sent = torch.cat([sent, sent.new_zeros((most - sent.shape[0], *sent.shape[1:]))])
        spread = DTensor.from_local(sent, mesh, [Shard(0)], run_check=False)
        found = spread.redistribute(placements=[Replicate()]).to_local()  # of even chunks
        bounds = map(division.rows, range(division.world))
        parts = [found[r * most :][: stop - start] for r, (start, stop) in enumerate(bounds)]
        found = torch.cat(parts)
    if own.is_complex():
        found = torch.view_as_complex(found.contiguous())
    whole: Tensor = found.to(own.device, own.dtype)
    return whole
