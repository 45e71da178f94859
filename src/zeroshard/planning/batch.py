"""Micro-batches as shapes."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from zeroshard.errors import OptionError


def tokens(text: str) -> Tensor:
    """``"8x2048"``: eight sequences of 2048 token ids."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise OptionError(
            f'batch={text!r} is not a shape of token ids. Write it as "8x2048", or pass example inputs.'
        )
    return torch.zeros([int(part) for part in text.split("x")], dtype=torch.int64, device="meta")


def rows_of(batch: Any) -> int:
    """Dim 0 of its first tensor that has one; 0 where there is none."""
    tensors = (x for x in tree_flatten(batch)[0] if isinstance(x, Tensor) and x.dim() > 0)
    return next((int(tensor.shape[0]) for tensor in tensors), 0)


def with_rows(batch: Any, rows: int) -> Any:
    """The same batch with another number of rows, as shapes alone. Tensors whose dim 0 is not that of the
    first stay."""
    made = tokens(batch) if isinstance(batch, str) else batch
    height = rows_of(made)
    if height == 0:
        raise OptionError("a search for the largest micro-batch needs a batch with rows: a tensor in it.")

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = (rows, *value.shape[1:]) if value.dim() > 0 and value.shape[0] == height else value.shape
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return tree_map(one, made)
