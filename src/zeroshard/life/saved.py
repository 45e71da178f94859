"""What autograd saves while gathered units compute; see [Note: released units in backward] in `param`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import StateError
from zeroshard.tier.pool import Pool

from .param import Bundle, Saved


class SavedTensors:
    """Intercepts what autograd saves while units run: tensors in gathered buffers become `Saved`, all others
    pass through.

    Autograd applies only the innermost pair of saved-tensor hooks, and `torch.utils.checkpoint` brings its
    own. So ours is pushed wherever a foreign pair is on top, and hands it everything that is not ours.
    Checkpointing counts what it saves in the first pass and in the recomputation; both go through the same
    module hooks, so both counts leave out the same tensors.
    """

    def __init__(self, pool: Pool, ensure: Callable[[Bundle], None]) -> None:
        self._pool, self._ensure = pool, ensure
        self._pushed: list[bool] = []

    def push(self) -> None:
        """Make ours the pair on top, if gradients are being recorded."""
        needed = torch.is_grad_enabled()
        top = torch._C._autograd._top_saved_tensors_default_hooks(True) if needed else None
        needed = needed and not (top is not None and self._is_ours(top[0]))
        self._pushed.append(needed)
        if needed:
            pack = self._pack if top is None else _Composed(self, *top).pack
            torch._C._autograd._push_saved_tensors_default_hooks(pack, self._unpack)

    def _is_ours(self, pack: Any) -> bool:
        owner = getattr(pack, "__self__", None)
        return owner is self or (isinstance(owner, _Composed) and owner.ours is self)

    def pop(self) -> None:
        if self._pushed.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def abandon(self) -> None:
        """A forward was interrupted: take off all that was pushed."""
        while self._pushed:
            self.pop()

    def home_of(self, tensor: Tensor) -> Bundle | None:
        try:
            owner = self._pool.lent.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # a wrapper without memory of its own, such as the DTensor of another unit
            return None
        return owner if isinstance(owner, Bundle) else None

    def _pack(self, tensor: Tensor) -> Any:
        bundle = self.home_of(tensor)
        if bundle is not None:
            return self.take(bundle, tensor)
        # What a node saves of its own output must not lead back to it: Python cannot see that cycle, and
        # a graph that no backward follows would never go. Autograd ties what it unpacks to the graph itself.
        return (tensor if tensor.is_leaf else tensor.detach()), tensor._version

    @staticmethod
    def take(bundle: Bundle, tensor: Tensor) -> Saved | Tensor:
        # A view in another dtype cannot be found again by offset; it is rare and small, so it is kept.
        return bundle.save(tensor) if tensor.dtype == bundle.dtype else tensor.clone()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Saved):
            self._ensure(packed.bundle)
            return packed.bundle.restore(packed)
        if isinstance(packed, _Foreign):
            return packed.unpack(packed.value)
        if isinstance(packed, Tensor):
            return packed
        # Autograd looks at this itself where there are no hooks.
        tensor, version = packed
        if tensor._version != version:
            raise StateError(
                f"one of the variables needed for gradient computation, a {tensor.type()} of shape "
                f"{tuple(tensor.shape)}, has been modified by an inplace operation: it is at version "
                f"{tensor._version}, not {version}. Find it with torch.autograd.set_detect_anomaly(True)."
            )
        return tensor  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Foreign:
    unpack: Callable[[Any], Tensor]
    value: Any


class _Composed:
    """Our pack in front of someone else's pair."""

    def __init__(
        self, ours: SavedTensors, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        self.ours, self._pack, self._unpack = ours, pack, unpack

    def pack(self, tensor: Tensor) -> Any:
        bundle = self.ours.home_of(tensor)
        if bundle is not None:
            saved = self.ours.take(bundle, tensor)
            # Of what another's hooks save torch does not ask whether it has changed since, and a checkpoint
            # computes again with the weights as they are.
            return saved._replace(version=None) if isinstance(saved, Saved) else saved
        return _Foreign(self._unpack, self._pack(tensor))
