"""Operations that a GPU does in one kernel where the CPU does several, so that a trace on the CPU saves what
a GPU saves; and what such a kernel takes for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD = 8  # flash attention takes heads of a multiple of so many numbers


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Meanwhile RMS norms, dropout and attention with dropout are those of a GPU. By replacing the functions:
    a mode would not reach what is recomputed in backward."""
    places = ((torch, "rms_norm", _rms_norm), (F, "rms_norm", _rms_norm), (F, "dropout", _dropout))
    attention = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Its dropout keeps two numbers, and no mask; heads are padded to a multiple of eight numbers."""
        kwargs.pop("dropout_p", None)
        size, masked = value.shape[-1], (args or (kwargs.get("attn_mask"),))[0] is not None
        spare = -size % HEAD if query.element_size() == 2 and not masked else 0
        if spare:
            query, key, value = (F.pad(each, (0, spare)) for each in (query, key, value))
        found = attention(
            query, key, value, *args[:1], *(() if len(args) < 2 else (0.0, *args[2:])), **kwargs
        )
        return found[..., :size] if spare else found

    replaced = [*places, (F, "scaled_dot_product_attention", attend)]
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, function in replaced:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(replaced, before, strict=True):
            setattr(module, name, function)


def workspace(func: Any, args: Any) -> int:
    """Bytes that a GPU's kernel takes while it runs. The backward of flash attention sums the gradient of the
    queries in fp32."""
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 4 * int(args[1].numel())
    return 0


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    result: Tensor = _RmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return torch.dropout(input, p, training)


class _RmsNorm(torch.autograd.Function):
    """Saves its input and a number for each row."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        scale = input.new_empty(input.shape[: input.dim() - dims], dtype=torch.float32)
        ctx.save_for_backward(input, weight, scale)
        return input * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        return grad * input, None if weight is None else torch.empty_like(weight), None
