"""Whether two runs gave the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def ulps(got: Tensor, want: Tensor) -> int:
    """The largest distance of two tensors, counted in floating-point numbers; NaNs of equal bits agree."""
    if got.shape != want.shape or got.dtype != want.dtype:
        sides = f"{tuple(got.shape)} {got.dtype} and {tuple(want.shape)} {want.dtype}"
        raise AssertionError(f"tensors of {sides} cannot be compared")
    if got.numel() == 0:
        return 0
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    first, second = (_ordered(t.detach().contiguous().view(width)) for t in (got, want))
    return int((first - second).abs().max())


def _ordered(bits: Tensor) -> Tensor:
    """Bit patterns as integers in the order of the numbers they stand for; both zeros are 0."""
    wide = bits.to(torch.int64)
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)


def assert_same_bits(got: Mapping[str, Tensor], want: Mapping[str, Tensor], within: int = 0) -> None:
    """The same names and, tensor by tensor, the same numbers, at most `within` ulps apart."""
    missing = sorted(set(got) ^ set(want))
    if missing:
        raise AssertionError(f"names on one side only: {', '.join(missing[:5])}")
    apart = {name: ulps(got[name], value) for name, value in want.items()}
    bad = {name: distance for name, distance in apart.items() if distance > within}
    if bad:
        shown = "; ".join(
            f"`{name}` by {distance} ulps, {(got[name] - want[name]).abs().max():.3g} in value"
            for name, distance in list(bad.items())[:5]
        )
        raise AssertionError(f"{len(bad)} of {len(apart)} tensors differ by more than {within} ulps: {shown}")


def assert_losses(got: Sequence[float], want: Sequence[float], relative: float) -> float:
    """Every loss within `relative` of the wanted one. Returns the largest relative difference."""
    if len(got) != len(want) or not got:
        raise AssertionError(f"{len(got)} losses cannot be compared with {len(want)}")
    gaps = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(got, want, strict=True)]
    worst = max(range(len(gaps)), key=lambda i: gaps[i] if gaps[i] == gaps[i] else float("inf"))
    if not gaps[worst] <= relative:
        both = f"loss {worst} is {got[worst]!r} and should be {want[worst]!r}"
        raise AssertionError(f"{both}: off by {gaps[worst]:.3g}, allowed {relative:.3g}")
    return gaps[worst]
