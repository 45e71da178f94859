"""The rows that are not zero, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.native.codes import touched
from zeroshard.policy import Numerics

from .base import Compression

_KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEAD = 24


@dataclass(frozen=True)
class Rows(Compression):
    """The rows that hold anything but zeros, with their places: for embeddings, whose gradient touches the
    rows of the batch's tokens only. Numerics: exact.

    A code has no fixed length: three int64 (bytes in use, rows, kind of number), the places as int32, the
    rows as they are. It takes at most `room`; 28 bytes and a row where one row was touched. Rows are added
    where the dense sum would add zeros, so sums are equal to the dense ones (a negative zero may become a
    positive one).

    >>> grad = torch.zeros(1000, 4)
    >>> grad[7] = 1.5
    >>> code = torch.empty(Rows().room(1000, 4, grad.dtype), dtype=torch.uint8)
    >>> Rows().encode(grad, code)
    48
    >>> Rows().decode(code, out := torch.empty(1000, 4), add=False)
    >>> torch.equal(out, grad)
    True
    """

    numerics: ClassVar[Numerics] = "exact"

    def room(self, rows: int, width: int, dtype: torch.dtype) -> int:
        """The bytes of a code when no row is zero."""
        return _HEAD + _places_bytes(rows) + rows * width * dtype.itemsize

    def encode(self, values: Tensor, code: Tensor) -> int:
        """Write the code of `values`, a matrix; return the bytes in use, its first int64."""
        if values.dim() != 2 or values.dtype not in _KINDS or not values.is_contiguous():
            raise OptionError(
                f"Rows: `values` is {values.dtype} of shape {tuple(values.shape)} and stride "
                f"{values.stride()}; a contiguous matrix of floating-point numbers is needed."
            )
        places = touched(values).nonzero().view(-1)
        count = len(places)
        used = self.room(count, values.shape[1], values.dtype)
        if used > code.numel():
            raise OptionError(f"Rows: {count} rows take {used} bytes, and `code` holds {code.numel()}.")
        head = torch.tensor([used, count, _KINDS.index(values.dtype)])
        code[:_HEAD].view(torch.int64).copy_(head)
        begin = _HEAD + _places_bytes(count)
        code[_HEAD:begin].zero_()
        code[_HEAD : _HEAD + 4 * count].view(torch.int32).copy_(places)
        rows = code[begin:used].view(values.dtype).view(count, values.shape[1])
        torch.index_select(values, 0, places, out=rows)
        return used

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        """Write the rows into the matrix `out` and zeros between them, or add them to it."""
        places, rows = self.read(code, out.shape[1])
        if not add:
            out.zero_()
        out.index_add_(0, places, rows.to(out.dtype))

    def read(self, code: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The places, in order, and the rows, as they lie in the code."""
        used, count, kind = code[:_HEAD].view(torch.int64).tolist()
        begin = _HEAD + _places_bytes(count)
        places = code[_HEAD : _HEAD + 4 * count].view(torch.int32)
        return places, code[begin:used].view(_KINDS[kind]).view(count, width)


def _places_bytes(count: int) -> int:
    return -(-4 * count // 8) * 8
