"""Parameters and buffers of a model as fake tensors: shapes without memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import transformer

__all__ = ["Fakes", "unread_masks"]


@contextmanager
def unread_masks() -> Iterator[None]:
    """Torch's own transformer looks at a mask's values to see whether it is causal, and fakes have none: it
    is then taken for any mask, for which attention takes no less memory."""
    module: Any = transformer
    own = module._detect_is_causal_mask
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        module._detect_is_causal_mask = own


class _Largest(FakeTensorMode):
    """Where values decide how many elements a result has (`nonzero`, `x[mask]`, `masked_select`), it has all
    that there can be: fakes have no values, and more rows take no less memory. `bounded`: whether it came to
    that."""

    bounded = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func not in (aten.nonzero.default, aten.masked_select.default):
            return super().dispatch(func, types, args, kwargs)
        self.bounded = True
        first = args[0]
        with self:
            if func is aten.nonzero.default:
                return torch.empty(first.numel(), first.dim(), dtype=torch.int64, device=first.device)
            return first.new_empty(torch.broadcast_shapes(first.shape, args[1].shape).numel())


class Fakes:
    """Made once for several traces of a model: of thousands of parameters, they are half of what a trace
    takes. Whoever traces computes in `mode`."""

    def __init__(self) -> None:
        self.mode = _Largest(allow_non_fake_inputs=True)
        self._made: dict[tuple[tuple[str, torch.dtype], ...], dict[str, Tensor]] = {}

    def of(self, model: nn.Module, compute: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """By their first names; parameters in the dtypes that are given for them, without gradients."""
        key = tuple(compute.items())
        if key not in self._made:
            self._made[key] = self._make(model, compute)
        made = self._made[key]
        for fake in made.values():
            fake.grad = None
        return made

    def _make(self, model: nn.Module, compute: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            fake = torch.empty(parameter.shape, dtype=compute.get(name, parameter.dtype), device="cpu")
            made[name] = fake.requires_grad_(parameter.requires_grad)
        for name, buffer in model.named_buffers():
            made[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        return made
