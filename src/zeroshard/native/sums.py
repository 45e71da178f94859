"""Sums and casts of flat host tensors, each in one pass and the same bits on every rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zeroshard.errors import OptionError

from . import abi, checks, fallback, loader


class Span(NamedTuple):
    """A part of flat tensors of one length, and where else one of them has it: from element `first` on."""

    start: int
    numel: int
    elsewhere: torch.Tensor | None = None
    first: int = 0


def sum_pieces(out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """`out` = `scale` × (((s0 + s1) + s2) + …), rounded once to the dtype of `out`.

    Added in fp32, or in fp64 where `out` or a source is fp64. Dtypes may differ. `out` may be one of the
    sources, but must not overlap one in part."""
    checks.flat("sum_pieces", "out", out, checks.ALL_FLOATS)
    if not sources:
        raise OptionError("sum_pieces: `sources` is empty; at least one tensor is needed")
    for index, source in enumerate(sources):
        checks.flat("sum_pieces", f"sources[{index}]", source, checks.ALL_FLOATS, out.numel())
    doubles = any(tensor.dtype == torch.float64 for tensor in (out, *sources))
    kernels = loader.kernels()
    if kernels is None:
        fallback.sum_pieces(out, sources, scale, torch.float64 if doubles else torch.float32)
        return
    count = len(sources)
    addresses = (ctypes.c_void_p * count)(*(source.data_ptr() for source in sources))
    kinds = (ctypes.c_int32 * count)(*(abi.KINDS[source.dtype] for source in sources))
    record = abi.Sum(
        out.numel(),
        out.data_ptr(),
        ctypes.addressof(addresses),
        ctypes.addressof(kinds),
        count,
        abi.KINDS[out.dtype],
        doubles,
        scale,
    )
    kernels.sum(ctypes.byref(record))


def sum_spans(
    out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float, place: int, spans: Sequence[Span]
) -> None:
    """As `sum_pieces`, span by span, with one source, number `place`, that lies elsewhere in some of them.
    Needs the kernels; the tensors have been looked at by whoever made the spans."""
    kernels = loader.kernels()
    assert kernels is not None
    count, width, out_width = len(sources), sources[0].element_size(), out.element_size()
    starts, out_start = [source.data_ptr() for source in sources], out.data_ptr()
    kinds = (ctypes.c_int32 * count)(*(abi.KINDS[source.dtype] for source in sources))
    doubles = any(tensor.dtype == torch.float64 for tensor in (out, *sources))
    addresses = (ctypes.c_void_p * count)()
    fixed = ctypes.addressof(addresses), ctypes.addressof(kinds), count, abi.KINDS[out.dtype], doubles, scale
    for start, numel, elsewhere, first in spans:
        addresses[:] = [address + start * width for address in starts]
        if elsewhere is not None:
            addresses[place] = elsewhere.data_ptr() + first * width
        kernels.sum(ctypes.byref(abi.Sum(numel, out_start + start * out_width, *fixed)))


def _pair(to: torch.Tensor, source: torch.Tensor, scale: float, doubles: bool) -> abi.Pair:
    kinds = abi.KINDS[to.dtype], abi.KINDS[source.dtype]
    return abi.Pair(to.numel(), to.data_ptr(), source.data_ptr(), *kinds, doubles, scale)


def accumulate(to: torch.Tensor, source: torch.Tensor, scale: float = 1.0) -> None:
    """`to` += `scale` × `source`, in fp32 (fp64 where one of them is), rounded once to the dtype of `to`."""
    checks.flat("accumulate", "to", to, checks.ALL_FLOATS)
    checks.flat("accumulate", "source", source, checks.ALL_FLOATS, to.numel())
    doubles = torch.float64 in (to.dtype, source.dtype)
    kernels = loader.kernels()
    if kernels is None:
        fallback.accumulate(to, source, scale, torch.float64 if doubles else torch.float32)
    else:
        kernels.accumulate(ctypes.byref(_pair(to, source, scale, doubles)))


def cast(to: torch.Tensor, source: torch.Tensor) -> None:
    """`to` = `source` in the dtype of `to`, rounded to nearest, ties to even."""
    checks.flat("cast", "to", to, checks.ALL_FLOATS)
    checks.flat("cast", "source", source, checks.ALL_FLOATS, to.numel())
    kernels = loader.kernels()
    if kernels is None:
        with torch.no_grad():
            to.copy_(source)
    else:
        kernels.cast(ctypes.byref(_pair(to, source, 1.0, False)))
