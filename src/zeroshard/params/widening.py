"""Lets modules compute in master precision inside a model that computes in a narrower one.

[Note: kept modules] A module is kept if all parameters in it are (`Precision.keep`). What it is given in the
narrow dtype is widened, and what it then returns in the wide one is narrowed, so that its surroundings see
one dtype: most of torch's kernels take only tensors of the same. Those of batch norms mix them for
themselves, with less memory, and are left to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from zeroshard.options import Precision


@dataclass(frozen=True)
class Widening:
    """See [Note: kept modules]."""

    precision: Precision | None

    def modules(self, model: nn.Module) -> Iterator[nn.Module]:
        """The outermost kept modules."""
        keep = self.precision.keep if self.precision is not None else ()
        names = {id(p): name for name, p in model.named_parameters() if p.is_floating_point()}
        kept = {key for key, name in names.items() if any(fnmatchcase(name, one) for one in keep)}
        return self._outermost(model, names.keys(), kept)

    def _outermost(self, module: nn.Module, known: Any, kept: set[int]) -> Iterator[nn.Module]:
        inside = {id(p) for p in module.parameters()} & known
        if inside and inside <= kept and has_forward(module):
            if not isinstance(module, _NormBase):
                yield module
        elif inside & kept:
            for child in module.children():
                yield from self._outermost(child, known, kept)

    def forward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A kept module's `forward` in place of its `plain` one."""
        assert self.precision is not None
        dtypes = getattr(torch, self.precision.compute), getattr(torch, self.precision.master)
        return partial(_widened, plain, *dtypes)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Lists of modules cannot."""
    return type(module).forward is not nn.Module.forward


def _widened(
    plain: Callable[..., Any], narrow: torch.dtype, wide: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    if not (_has(args, narrow) or _has(kwargs, narrow)):
        return plain(*args, **kwargs)
    result = plain(*cast(args, wide, narrow), **cast(kwargs, wide, narrow))
    return cast(result, narrow, wide)


def _has(value: Any, dtype: torch.dtype) -> bool:
    """Whether there is a tensor of this dtype among arguments."""
    if isinstance(value, Tensor):
        return value.dtype == dtype
    items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return any(_has(item, dtype) for item in items)


def cast(value: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """The floating tensors in arguments or results, or those of `only` one dtype, in another."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and only in (None, value.dtype) else value
    if isinstance(value, dict):
        return {key: cast(item, dtype, only) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast(item, dtype, only) for item in value)
    return value
