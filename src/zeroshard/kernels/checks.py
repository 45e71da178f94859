"""Every tensor is checked before its address is handed out: past this point a mistake is a crash, not an
error."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.errors import OptionError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ALL_FLOATS = (*FLOATS, torch.float64)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def flat(
    where: str, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], numel: int | None = None
) -> None:
    """Raise unless `tensor` is a contiguous one-dimensional CPU tensor of one of `dtypes` and of `numel`
    elements."""
    problem = ""
    if tensor.device.type != "cpu":
        problem = f"is on {tensor.device}; host kernels need CPU memory: copy it to host staging first"
    elif tensor.dtype not in dtypes:
        problem = f"is {_names([tensor.dtype])}; {_names(dtypes)} is needed"
    elif tensor.dim() != 1 or not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        problem = (
            f"has shape {shape} and stride {stride}; a flat contiguous tensor is needed: pass a flat view"
        )
    elif numel is not None and tensor.numel() != numel:
        problem = f"holds {tensor.numel()} elements; {numel} are needed"
    if problem:
        raise OptionError(f"{where}: `{name}` {problem}")


def matrix(
    where: str,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, int],
    step: int | None = None,
) -> None:
    """Raise unless `tensor` is a CPU tensor of this dtype and shape with contiguous rows, `step` apart."""
    flat(where, name, tensor[0], (dtype,), shape[1])
    if tensor.shape[0] != shape[0] or step not in (None, tensor.stride(0)):
        raise OptionError(
            f"{where}: `{name}` has shape {tuple(tensor.shape)} and stride {tuple(tensor.stride())}; rows "
            f"{step} apart, of shape {shape}, are needed"
        )


def rows(where: str, numel: int, start: int, stop: int | None) -> tuple[int, int]:
    """The range start..stop of `numel` rows, checked."""
    last = numel if stop is None else stop
    if not 0 <= start <= last <= numel:
        raise OptionError(f"{where}: rows {start}:{last} do not lie within the {numel} there are")
    return start, last


def numbers(where: str, **values: float) -> None:
    """Raise on a negative, infinite or NaN hyper-parameter."""
    for name, value in values.items():
        if not 0.0 <= value < float("inf"):
            raise OptionError(f"{where}: {name}={value} must be a finite number of at least 0")
