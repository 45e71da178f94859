"""The form of a part's state: which arrays it has, of which dtype, and where they lie next to one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zeroshard.native import AdamRows, SgdRows, allocate, moments8
from zeroshard.tier import grains

_PAGE, _LINE = 4096, 64


@dataclass(frozen=True)
class Array:
    """One array of a state that lies in one stretch of bytes."""

    dtype: torch.dtype
    numel: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype)


@dataclass(frozen=True)
class Form:
    """`splits`: the master is the weight and a remainder. `coded`: 8-bit moments. `extra`: AMSGrad's maximum,
    or SGD's momentum. `weight`: the dtype of the compute weights, where they rest beside the state: on the
    disk, in front of it, in whole blocks of direct I/O, so that a forward reads them alone."""

    kind: Literal["adam", "sgd"]
    splits: bool = False
    coded: bool = False
    extra: bool = False
    weight: torch.dtype | None = None

    def dtypes(self) -> dict[str, torch.dtype]:
        found = {"remainder": torch.int16} if self.splits else {"master": torch.float32}
        if self.kind == "sgd":
            return found | ({"momentum": torch.float32} if self.extra else {})
        found["exp_avg"] = torch.int8 if self.coded else torch.float32
        found["exp_avg_sq"] = torch.uint8 if self.coded else torch.float32
        if self.extra:
            found["max_exp_avg_sq"] = torch.float32
        return found | ({"scales": torch.float32} if self.coded else {})

    def arrays(self, numel: int) -> dict[str, Array]:
        """In one stretch, each beginning at another offset within a page, as in `native.pages` and for the
        same reason."""
        dtypes = self.dtypes()
        apart = _PAGE // len(dtypes) // _LINE * _LINE
        found, end = {}, 0
        if self.weight is not None:
            found["weight"] = Array(self.weight, numel, 0)
            end = grains(found["weight"].nbytes)
        for index, (name, dtype) in enumerate(dtypes.items()):
            count = moments8.scale_count(numel) if name == "scales" else numel
            array = found[name] = Array(dtype, count, end + (index * apart - end) % _PAGE)
            end = array.offset + array.nbytes
        return found

    def nbytes(self, numel: int) -> int:
        """Bytes of that stretch, in whole blocks of direct I/O."""
        return grains(max(a.offset + a.nbytes for a in self.arrays(numel).values())) if numel else 0

    def rows(self, tensors: Mapping[str, Tensor]) -> AdamRows | SgdRows:
        return AdamRows(**tensors) if self.kind == "adam" else SgdRows(**tensors)

    def over(self, memory: Tensor, numel: int) -> AdamRows | SgdRows:
        """The state in a stretch of bytes."""
        arrays = self.arrays(numel)
        return self.rows({name: arrays[name].of(memory) for name in self.dtypes()})

    def zeros(self, numel: int) -> AdamRows | SgdRows:
        """Fresh state in host memory."""
        dtypes = self.dtypes()
        scales = dtypes.pop("scales", None)
        tensors = dict(zip(dtypes, allocate(numel, list(dtypes.values())), strict=True))
        if scales is not None:
            tensors["scales"] = torch.zeros(moments8.scale_count(numel), dtype=scales)
        return self.rows(tensors)
