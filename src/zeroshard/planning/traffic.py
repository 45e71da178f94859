"""What one operation costs: arithmetic, or bytes through the device's memory.

A matrix product counts by its arithmetic, everything else by what it reads and writes. Views, and memory that
is only asked for, cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from .recurrent import products

# Beside its products, a row of attention costs what so many more keys would: over 2,048 keys the kernel
# reaches half the rate of one product, and with that the efficiency of products is the same at all widths;
# over 8,192 it reaches 4/5 (LOG.md). Of fewer keys than this nothing is known, and half is taken.
BESIDE = 2048
# Widths of heads that flash attention has kernels for; others run by the next.
HEADS = (32, 64, 96, 128, 192, 256)
_GATHERING = {torch.ops.aten.embedding.default, torch.ops.aten.index_select.default}  # read what they write


def cost(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Operations and bytes moved."""
    if "scaled_dot_product" in func.name():
        return _attention(func, args, kwargs), 0
    if recurrent := products(func, args):
        return recurrent, 0
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result)), 0
    if _is_free(func):
        return 0, 0
    made = sum(map(_extent, _tensors(result)))
    given = made if func in _GATHERING else sum(map(_extent, _tensors((args, kwargs))))
    return 0, made + given


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Operations of attention in one kernel: two products, in backward five. A causal one leaves out half.
    With what it does beside them; see `BESIDE`."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key = given["query"], given["key"]
    keys, width = int(key.shape[-2]), max(int(query.shape[-1]), 1)
    padded = next((head for head in HEADS if head >= width), width)
    one = 2 * int(query.numel()) // width * padded * (keys + min(keys, BESIDE))
    backward = "grad_out" in names or "grad_out_" in names
    return one * (5 if backward else 2) // (2 if given.get("is_causal") else 1)


def _is_free(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or "empty" in schema.name or func.namespace != "aten":
        return True
    return not schema.is_mutable and any(value.alias_info is not None for value in schema.returns)


def _extent(tensor: Tensor) -> int:
    """Bytes that are really there: an expanded tensor repeats few."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]


class Traffic(TorchDispatchMode):
    """While active, sums what operations cost: `flops` and `moved`; `kernels`: how many cost anything."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int = 0
        self.moved: int = 0
        self.kernels: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flops, moved = cost(func, args, kwargs or {}, result)
        self.flops, self.moved = self.flops + flops, self.moved + moved
        self.kernels += bool(flops or moved)
        return result
