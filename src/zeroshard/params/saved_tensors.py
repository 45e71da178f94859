"""Saves tensors for backward that lie in a gathered unit's buffer.

[Note: released units in backward] Between forward and backward a stage-3 gather group gives its buffer back.
What autograd saved out of it (a weight, or a view of one) is therefore saved as a `SavedView`: gather group,
offset, size, stride. Unpacking gathers the group again, into whichever buffer the pool lends. The unsharded
parameters meanwhile show a NaN of the right shape, so that a use at a wrong moment is visible instead of
silently stale.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from zeroshard.errors import StateError

from .gather_group import BufferPool, GatherGroup
from .resharded import copy_of, is_copied
from .sharded_param import ShardedParam


class SavedView(NamedTuple):
    """What stands for a saved tensor that lives in a gather group's buffer. `itself`: it is an unsharded
    parameter. `param`: whose memory it is, and `version` that one's count of changes, if it counts."""

    gather_group: GatherGroup
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    itself: bool
    param: ShardedParam
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor, gather_group: GatherGroup) -> SavedView:
        params, offset = gather_group.params, int(tensor.storage_offset())
        param = params[bisect(gather_group.pack.full_offsets, offset) - 1]
        if not tensor.numel():  # several may begin there
            param = next((other for other in params if other.unsharded_param is tensor), param)
        itself, version = param.unsharded_param is tensor, param.unsharded_param._version
        known = version if tensor._version == version else None
        return cls(gather_group, offset, tensor.size(), tensor.stride(), itself, param, known)

    def restore(self) -> Tensor:
        """The tensor again, in the buffer that the group has now."""
        with DisableTorchFunctionSubclass():  # it may be `Away`
            version = self.param.unsharded_param._version
        if self.version is not None and self.version != version:
            raise _changed_since(self.param.name)
        # A backward that builds a graph (a gradient penalty) saves what it computes with, without our hooks:
        # it gets a copy that outlives the buffer. Autograd ties the copy to the unsharded parameter.
        builds_graph = torch.is_grad_enabled()
        if self.itself and not builds_graph:
            return self.param.unsharded_param
        buffer = self.gather_group.full
        assert buffer is not None
        with torch.no_grad():
            view = torch.as_strided(buffer, self.size, self.stride, self.offset)
            return copy_of(view)[0] if builds_graph else view


def _changed_since(name: str) -> StateError:
    return StateError(
        f"`{name}` has been modified by an inplace operation: optimizer.step(), or the loop by hand, has "
        "changed it after the forward that this backward belongs to, and its gradients would be wrong. Step "
        "after the backward, or call the model again before it."
    )


class SavedTensors:
    """Intercepts what autograd saves while units run: tensors in gathered buffers become `Saved`, all others
    pass through.

    Autograd applies only the innermost pair of saved-tensor hooks, and `torch.utils.checkpoint` brings its
    own. So ours is pushed wherever a foreign pair is on top, and hands it everything that is not ours.
    Checkpointing counts what it saves in the first pass and in the recomputation; both go through the same
    module hooks, so both counts leave out the same tensors.
    """

    def __init__(self, pool: BufferPool, ensure: Callable[[GatherGroup], None]) -> None:
        self._pool, self._ensure = pool, ensure
        self._pushed: list[bool] = []

    def watch(self) -> Callable[[], None]:
        """From now on go in front of every pair that others push, wherever they do: inside a unit's forward
        nobody calls us between theirs and what a unit saves. Returns how to end it."""
        _watching.add(self)
        vars(torch._C._autograd)[_PUSH] = _push_behind_ours
        return partial(_unwatch, ref(self))

    def push(self) -> None:
        """Make ours the pair on top, if gradients are being recorded."""
        needed = torch.is_grad_enabled()
        top = torch._C._autograd._top_saved_tensors_default_hooks(True) if needed else None
        owner = getattr(top[0], "__self__", None) if top is not None else None
        ours = owner is self or (isinstance(owner, _ComposedHooks) and owner.ours is self)
        needed = needed and not ours
        self._pushed.append(needed)
        if needed:
            pack = self.pack if top is None else _ComposedHooks(self, *top).pack
            _push(pack, self._unpack)

    def pop(self) -> None:
        if self._pushed.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def abandon(self) -> None:
        """A forward was interrupted: take off all that was pushed."""
        while self._pushed:
            self.pop()

    def lender_of(self, tensor: Tensor) -> GatherGroup | None:
        """The gather group whose memory it lies in."""
        try:
            owner = self._pool.lent.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # a wrapper without memory of its own, such as the DTensor of another unit
            return None
        return owner if owner is not None and isinstance(owner, GatherGroup) else None

    def pack(self, tensor: Tensor) -> SavedView | Tensor | tuple[Tensor, int]:
        gather_group = self.lender_of(tensor)
        if gather_group is not None:
            # A view in another dtype cannot be found again by offset; it is rare and small, so it is copied.
            same = tensor.dtype == gather_group.dtype
            return SavedView.of(tensor, gather_group) if same else tensor.clone()
        # What a node saves of its own output must not lead back to it: Python cannot see that cycle, and
        # a graph that no backward follows would never go. Autograd ties what it unpacks to the graph itself.
        return (tensor if tensor.is_leaf else tensor.detach()), tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:  # what most are, of many
            return self._unchanged(*packed)
        if isinstance(packed, SavedView):
            self._ensure(packed.gather_group)
            return packed.restore()
        if isinstance(packed, _OtherHooks):
            return packed.unpack(packed.value)
        assert isinstance(packed, Tensor)
        return packed

    @staticmethod
    def _unchanged(tensor: Tensor, version: int) -> Tensor:
        """What was saved. Autograd looks at its version itself where there are no hooks."""
        if tensor._version != version:
            raise StateError(
                f"one of the variables needed for gradient computation, a {tensor.type()} of shape "
                f"{tuple(tensor.shape)}, has been modified by an inplace operation: it is at version "
                f"{tensor._version}, not {version}. Find it with torch.autograd.set_detect_anomaly(True)."
            )
        return tensor


@dataclass(frozen=True)
class _OtherHooks:
    unpack: Callable[[Any], Tensor]
    value: Any


class _ComposedHooks:
    """Our pack in front of someone else's pair."""

    def __init__(
        self, ours: SavedTensors, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        self.ours, self._pack, self._unpack = ours, pack, unpack

    def pack(self, tensor: Tensor) -> Any:
        if self.ours.lender_of(tensor) is not None or is_copied(tensor):  # in the first forward it was lent
            saved = self.ours.pack(tensor)
            # Of what another's hooks save torch does not ask whether it has changed since, and a checkpoint
            # computes again with the weights as they are.
            return saved._replace(version=None) if isinstance(saved, SavedView) else saved
        return _OtherHooks(self._unpack, self._pack(tensor))


_push = torch._C._autograd._push_saved_tensors_default_hooks
_PUSH = _push.__name__
_watching: WeakSet[SavedTensors] = WeakSet()


def _push_behind_ours(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    for ours in list(_watching):
        pack, unpack = _ComposedHooks(ours, pack, unpack).pack, ours._unpack
    _push(pack, unpack)


def _unwatch(saved: ref[SavedTensors]) -> None:
    gone = saved()
    if gone is not None:
        _watching.discard(gone)
    if not _watching:
        vars(torch._C._autograd)[_PUSH] = _push
