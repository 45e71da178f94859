"""What is known of an optimizer before it steps: whether it works on rows, which kernel knows it, and what
it keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from zeroshard.errors import ModelError, StateError
from zeroshard.kernels import host_update_of, is_registered
from zeroshard.layout.specs import OptimizerRule

# Optimizers of torch that treat every element alone, so that they may work on any rows. All others get whole
# tensors.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Rprop",
        "ASGD",
    )
)


def rows_suffice(optimizer: Optimizer) -> bool:
    """Whether the optimizer gives the same result on any slice of rows as on the whole tensor. One that the
    host updates does."""
    kind = type(optimizer)
    return kind in ELEMENTWISE or getattr(kind, "elementwise", False) is True or is_registered(optimizer)


def rule_of(optimizer: Optimizer) -> OptimizerRule:
    """What a division of its parameters depends on. What it keeps of them is not said: nothing steps."""
    kernel = host_update_of(optimizer) is not None
    return OptimizerRule(type(optimizer).__name__, 0, rows_suffice(optimizer), kernel=kernel)


def unstepped(optimizer: Optimizer) -> bool:
    """Whether its state is that of its beginning: Adagrad makes it when it is built."""
    if type(optimizer) is not torch.optim.Adagrad:
        return False
    counts = [state.get("step") for state in optimizer.state.values()]
    return all(isinstance(n, Tensor) and (n.is_meta or not n.item()) for n in counts)


def refuse_unfit(optimizer: Optimizer) -> None:
    """Optimizers that look across parameters, or want sparse gradients, have no meaning on shards."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            "LBFGS needs inner products over all parameters and several passes a step, which no stage gives "
            "it, not even on one rank. Train in one process without zs.shard(), or use AdamW, SGD or another "
            "optimizer of one pass."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ModelError("SparseAdam needs sparse gradients, and reduced gradients are dense: use AdamW.")


class ElsewhereState(dict[str, Any]):
    """Stands for the state of a parameter that lies whole on another rank. It is empty, and who asks for an
    entry is told where that is."""

    def __init__(self, optimizer: str, name: str, owner: int) -> None:
        super().__init__()
        self._about = optimizer, name, owner

    def __missing__(self, key: str) -> Any:
        optimizer, name, owner = self._about
        raise StateError(
            f"`{key}` of `{name}` is on rank {owner} alone: {optimizer} needs whole tensors, so each lies on "
            "one rank. run.full_optimizer_state_dict(), which every rank calls, gives the state of all."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def state_bytes(optimizer: Optimizer) -> int:
    """Of all tensors in its state that are more than a number."""
    tensors = [value for value in tree_leaves(list(optimizer.state.values())) if isinstance(value, Tensor)]
    return sum(map(_bytes, (tensor for tensor in tensors if tensor.dim() > 0)))


def _bytes(tensor: Tensor) -> int:
    """Of a dense tensor, or of the parts of a sparse one."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    ends, places = (
        (tensor.crow_indices(), tensor.col_indices())
        if by_rows
        else (tensor.ccol_indices(), tensor.row_indices())
    )
    return ends.nbytes + places.nbytes + tensor.values().nbytes
