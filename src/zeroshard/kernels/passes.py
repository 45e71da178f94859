"""Passes over host tensors: sums and casts in one pass, with the same bits on every rank, and copies of many
tensors by one call. Torch spends a microsecond on each tensor, which is most of the cost where parameters are
small."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.kernels import checks, fallback, library

# Below, one thread is faster than to wake torch's others.
SMALL = 1 << 20


class SumSpan(NamedTuple):
    """A part of flat tensors of one length, and where else one of them has it: from element `first` on."""

    start: int
    numel: int
    elsewhere: torch.Tensor | None = None
    first: int = 0


def sum_shards(out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """`out` = `scale` × (((s0 + s1) + s2) + …), rounded once to the dtype of `out`.

    Added in fp32, or in fp64 where `out` or a source is fp64. Dtypes may differ. `out` may be one of the
    sources, but must not overlap one in part."""
    checks.flat("sum_shards", "out", out, checks.ALL_FLOATS)
    if not sources:
        raise OptionError("sum_shards: `sources` is empty; at least one tensor is needed")
    for index, source in enumerate(sources):
        checks.flat("sum_shards", f"sources[{index}]", source, checks.ALL_FLOATS, out.numel())
    doubles = any(tensor.dtype == torch.float64 for tensor in (out, *sources))
    kernels = library.kernels()
    if kernels is None:
        fallback.sum_shards(out, sources, scale, torch.float64 if doubles else torch.float32)
        return
    count = len(sources)
    addresses = (ctypes.c_void_p * count)(*(source.data_ptr() for source in sources))
    kinds = (ctypes.c_int32 * count)(*(library.KINDS[source.dtype] for source in sources))
    record = library.SumRecord(
        out.numel(),
        out.data_ptr(),
        ctypes.addressof(addresses),
        ctypes.addressof(kinds),
        count,
        library.KINDS[out.dtype],
        doubles,
        scale,
    )
    kernels.sum(ctypes.byref(record))


def sum_spans(
    out: torch.Tensor, sources: Sequence[torch.Tensor], scale: float, place: int, spans: Sequence[SumSpan]
) -> None:
    """As `sum_shards`, span by span, with one source, number `place`, that lies elsewhere in some of them.
    Needs the kernels; the tensors have been looked at by whoever made the spans."""
    kernels = library.kernels()
    assert kernels is not None
    count, width, out_width = len(sources), sources[0].element_size(), out.element_size()
    starts, out_start = [source.data_ptr() for source in sources], out.data_ptr()
    kinds = (ctypes.c_int32 * count)(*(library.KINDS[source.dtype] for source in sources))
    doubles = any(tensor.dtype == torch.float64 for tensor in (out, *sources))
    addresses = (ctypes.c_void_p * count)()
    fixed = (
        ctypes.addressof(addresses),
        ctypes.addressof(kinds),
        count,
        library.KINDS[out.dtype],
        doubles,
        scale,
    )
    for start, numel, elsewhere, first in spans:
        addresses[:] = [address + start * width for address in starts]
        if elsewhere is not None:
            addresses[place] = elsewhere.data_ptr() + first * width
        kernels.sum(ctypes.byref(library.SumRecord(numel, out_start + start * out_width, *fixed)))


def _pair(to: torch.Tensor, source: torch.Tensor, scale: float, doubles: bool) -> library.PairRecord:
    kinds = library.KINDS[to.dtype], library.KINDS[source.dtype]
    return library.PairRecord(to.numel(), to.data_ptr(), source.data_ptr(), *kinds, doubles, scale)


def accumulate(to: torch.Tensor, source: torch.Tensor, scale: float = 1.0) -> None:
    """`to` += `scale` × `source`, in fp32 (fp64 where one of them is), rounded once to the dtype of `to`."""
    checks.flat("accumulate", "to", to, checks.ALL_FLOATS)
    checks.flat("accumulate", "source", source, checks.ALL_FLOATS, to.numel())
    doubles = torch.float64 in (to.dtype, source.dtype)
    kernels = library.kernels()
    if kernels is None:
        fallback.accumulate(to, source, scale, torch.float64 if doubles else torch.float32)
    else:
        kernels.accumulate(ctypes.byref(_pair(to, source, scale, doubles)))


def cast(to: torch.Tensor, source: torch.Tensor) -> None:
    """`to` = `source` in the dtype of `to`, rounded to nearest, ties to even."""
    checks.flat("cast", "to", to, checks.ALL_FLOATS)
    checks.flat("cast", "source", source, checks.ALL_FLOATS, to.numel())
    kernels = library.kernels()
    if kernels is None:
        with torch.no_grad():
            to.copy_(source)
    else:
        kernels.cast(ctypes.byref(_pair(to, source, 1.0, False)))


class TensorCopies:
    """Copies between two lists of tensors, one of which changes from call to call; torch does them where not
    all are in the CPU's memory.

    `to` are flat and contiguous, or have two dimensions of which the last is contiguous: then their rows take
    consecutive parts of the source. Sources are contiguous, and as long as their targets; or longer, and
    `shifts` says how many elements of each come before what is copied.

    >>> moves = TensorCopies(to=[torch.zeros(4)], source=[torch.zeros(4)])
    >>> moves.run(to=[target := torch.zeros(4)], source=[torch.arange(4.0)])
    >>> target
    tensor([0., 1., 2., 3.])
    """

    def __init__(
        self,
        to: Sequence[Tensor],
        source: Sequence[Tensor],
        device: torch.device | None = None,
        shifts: Sequence[int] | None = None,
        past: bool = False,
    ) -> None:
        """`device`: of the sources to come, where those given only stand for them. `past`: long copies go
        past the caches, since another core is to read them."""
        count = len(to)
        pairs = list(zip(to, source, strict=True))
        self.nbytes = sum(target.nbytes for target in to)
        self._dtypes = [target.dtype for target in to]
        self._plain = all(
            target.device.type == "cpu"
            and target.device == (device or of.device)
            and target.dtype == of.dtype
            and (target.dim() < 2 or target.stride(-1) == 1)
            for target, of in pairs
        )
        rows = [(1, target.numel()) if target.dim() < 2 else tuple(target.shape) for target in to]
        sizes = [target.element_size() for target in to]
        steps = [
            target.stride(0) * size if target.dim() == 2 else 0
            for target, size in zip(to, sizes, strict=True)
        ]
        self._to = _addresses(to)
        self._source = _addresses(source)
        self._shifts, self._past = shifts, past
        # Of sources that the kernel copies, which have the dtypes of their targets.
        self._skips = shifts and [shift * size for shift, size in zip(shifts, sizes, strict=True)]
        self._bytes = (ctypes.c_int64 * count)(*(n * size for (_, n), size in zip(rows, sizes, strict=True)))
        self._times = (ctypes.c_int64 * count)(*(times for times, _ in rows))
        self._step = (ctypes.c_int64 * count)(*steps)
        self._count = count
        self._fit = self._plain and self._fits(source)

    def run(self, to: Sequence[Tensor], source: Sequence[Tensor], moved: str = "both") -> None:
        """Copy. Targets are laid out as those given first; `moved` says whose addresses may differ from
        theirs and from those of the last call: ``to``, ``source``, ``both`` or ``neither``."""
        kernels = library.kernels()
        if moved in ("to", "both"):
            self._to = _addresses(to)
        if moved in ("source", "both"):
            self._source = _addresses(source, self._skips)
            self._fit = self._plain and self._fits(source)
        alone = self.nbytes < SMALL or torch.get_num_threads() == 1
        if kernels is None or not alone or not self._fit:
            with torch.no_grad():
                torch._foreach_copy_(list(to), self._shaped(to, source))
            return
        address = ctypes.addressof
        kernels.move(
            ctypes.byref(
                library.CopiesRecord(
                    self._count,
                    address(self._to),
                    address(self._source),
                    address(self._bytes),
                    address(self._times),
                    address(self._step),
                    self._past,
                )
            )
        )

    def _shaped(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> list[Tensor]:
        if self._shifts is None:
            return [of.reshape(t.shape) for t, of in zip(to, source, strict=True)]
        shifted = zip(to, source, self._shifts, strict=True)
        return [of if of.shape == t.shape else _part(of, t, shift) for t, of, shift in shifted]

    def _fits(self, source: Sequence[Tensor]) -> bool:
        return all(map(Tensor.is_contiguous, source)) and [of.dtype for of in source] == self._dtypes


def _part(source: Tensor, like: Tensor, shift: int) -> Tensor:
    """What lies so many elements behind the beginning, in one call: there may be a part for each band."""
    flat = source if source.is_contiguous() else source.contiguous()
    steps = (like.shape[-1], 1)[-like.dim() :]
    return flat.as_strided(like.shape, steps, flat.storage_offset() + shift)


def _addresses(
    tensors: Sequence[Tensor], skips: Sequence[int] | None = None
) -> ctypes.Array[ctypes.c_void_p]:
    found: Iterable[int] = map(Tensor.data_ptr, tensors)
    if skips is not None:
        found = map(add, found, skips)
    return (ctypes.c_void_p * len(tensors))(*found)
