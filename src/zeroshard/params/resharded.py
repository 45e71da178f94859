"""Unsharded parameters whose unit is not computing, and what happens to code that uses one all the same.

An unsharded parameter's memory is its gather group's, which lends it to other units as soon as nobody
computes with it. What is recomputed in backward may use an unsharded parameter without a call of its module:
a checkpointed method that says `self.weight`, a closure that took it in forward, a `torch.autograd.Function`
that kept it on its context. So an unsharded parameter is of another class between the entries of its unit,
and torch asks that class before it computes with it. It hands out an alias: a view of the unsharded
parameter, so that its gradient goes there, over a copy that lives as long as anything made of it. Who uses
it twice gets the same copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from zeroshard.errors import StateError

# What says nothing of values, or is set.
_TOLD = {
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "is_floating_point",
    "is_complex", "is_same_size", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
    "untyped_storage", "__hash__", "__len__", "__repr__", "__format__",
}  # fmt: skip
_VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}


class Away(nn.Parameter):
    """An unsharded parameter of a unit that is not computing. Its `_lender` says where its values are."""

    _lender: Lender

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = tuple(args), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if _tells(func):
                return func(*given[0], **given[1])
            args, kwargs = tree_map_only(Away, _alias, given)
            aliases = [
                new for new, old in zip(_flat((args, kwargs)), _flat(given), strict=True) if new is not old
            ]
            before = [alias._version for alias in aliases]
            result = func(*args, **kwargs)
            if [alias._version for alias in aliases] != before:
                name = next(
                    unsharded_param._lender.name
                    for unsharded_param in _flat(given)
                    if isinstance(unsharded_param, Away)
                )
                raise StateError(
                    f"`{name}` was written outside of the forward of its unit, where modules hold copies: "
                    "what is written there is lost. Write parameters in the loop, before or after the model "
                    "is called."
                )
            return result


def _tells(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _VALUES
    return name in _TOLD or name in ("__set__", "__delete__")


def _flat(value: Any) -> list[Any]:
    return tree_leaves(value)


_copies: dict[int, StorageWeakRef] = {}  # of memory that lives, or did at the last look
_look_at = 64


def copy_of(tensor: Tensor) -> tuple[Tensor, StorageWeakRef]:
    """A copy of what lies in a gather group's memory, known as such as long as anybody uses it."""
    global _look_at
    if len(_copies) >= _look_at:
        for key in [key for key, known in _copies.items() if known.expired()]:
            del _copies[key]
        _look_at = 2 * len(_copies) + 64
    copy = tensor.clone(memory_format=torch.contiguous_format)
    known = StorageWeakRef(copy.untyped_storage())
    _copies[known.cdata] = known  # no other memory is called the same while this is held
    return copy, known


class Lender:
    """Brings the values of one unsharded parameter. `bring`: makes its gather group whole, or says why it
    cannot be; then `whole` has them, until others get the memory. Held by the unsharded parameter, so it
    holds nobody that leads back to it."""

    def __init__(self, name: str, bring: Callable[[], int], whole: Callable[[], Tensor]) -> None:
        self.name, self._bring, self._whole = name, bring, whole
        self._copy: tuple[int, StorageWeakRef] | None = None

    @torch.no_grad()
    def value(self, unsharded_param: Tensor) -> Tensor:
        epoch = self._bring()
        if self._copy is not None and self._copy[0] == epoch:
            storage = torch.UntypedStorage._new_with_weak_ptr(self._copy[1].cdata)
            if storage is not None:
                flat = torch.empty(0, dtype=unsharded_param.dtype, device=unsharded_param.device).set_(
                    storage
                )
                return flat.view(unsharded_param.size())
        with torch.inference_mode(False):
            copy, known = copy_of(self._whole())
        self._copy = epoch, known
        return copy


def _alias(unsharded_param: Away) -> Tensor:
    value, blank = unsharded_param._lender.value(unsharded_param), unsharded_param.data
    unsharded_param.data = value
    try:
        return unsharded_param.view_as(unsharded_param)
    finally:
        unsharded_param.data = blank


def is_copied(tensor: Tensor) -> bool:
    """Whether it was made of the memory of such a copy."""
    try:
        return bool(_copies) and tensor.untyped_storage()._cdata in _copies
    except RuntimeError:  # a wrapper without memory of its own
        return False


def lend(unsharded_param: nn.Parameter, lender: Lender) -> None:
    """From now on it can be away."""
    vars(unsharded_param)["_lender"] = lender
