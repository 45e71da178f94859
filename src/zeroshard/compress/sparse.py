"""Sends some of the values: rows that are not zero, exactly (`Rows`), or the largest values (`TopK`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.field_checks import check_fields
from zeroshard.kernels.codes import largest, touched
from zeroshard.sync_policies import Numerics

from .base import (
    RESIDUALS,
    Codec,
    Compression,
    Residual,
    check,
    check_freeze,
    check_residual,
    check_steps,
    check_warmup,
    padded,
    wide_residual,
)
from .blocks import MAGNITUDE

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

    @property
    def draws(self) -> bool:
        return False

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


_INFINITE = 255 << 23  # the bits of infinity
MOST = 2**31 - 1  # values of a shard


@dataclass(frozen=True)
class TopK(Codec):
    """The largest `ratio` of the values of a shard, exactly: 50 × fewer bytes at 1 %. Numerics: approximate.

    Each travels as an int32 place and an fp32 value. Of equal magnitudes the first go; the number that goes
    is fixed. What was not sent is kept and sent later (error feedback; 4 bytes a parameter of state).

    `momentum`: momentum correction for plain SGD (as in Deep Gradient Compression): give the momentum here
    and none to the optimizer. A rank then keeps a velocity of its own (4 more bytes a parameter), feeds that
    into the residual, and clears both where a value was sent, so that late values do not carry stale
    momentum. Leave it at 0 for Adam and its like.

    `warmup_steps`: so many steps at first travel as they are, or through the codec `warmup`. `ramp_steps`: in
    so many steps after them the share falls to `ratio`, by quarters: 25 %, 6.2 %, 1.6 % (on the way to 1 %, a
    fifth of the bytes that these steps would take as they are; the wire has room for the first).

    `freeze`: Adam's second moments stay as the warm-up leaves them; without it they see rare spikes of all
    that waited. For Adam and AdamW; 4 more bytes a parameter, divided as the optimizer's state is.

    `residual`: "bfloat16" keeps what was not sent in half the memory, rounded once a step.

    Biases and norms are few and do not bear waiting: give them another codec by a pattern.

    >>> TopK(ratio=0.4).round_trip(torch.tensor([1.0, -3.0, 2.0, 0.5, -2.0]))
    tensor([ 0., -3.,  2.,  0.,  0.])
    """

    ratio: float = 0.01
    momentum: float = 0.0
    warmup_steps: int = 0
    freeze: bool = False
    ramp_steps: int = 0
    warmup: Codec | None = None
    residual: Residual = "float32"
    numerics: ClassVar[Numerics] = "approximate"
    slower_on_gpu = (38.8, 1.5)
    slower_on_cpu = (6.2, 2.1)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < self.ratio <= 0.5:
            per_cent = f" One per cent is TopK(0.01), not TopK({self.ratio!r})." if self.ratio >= 1 else ""
            raise OptionError(
                f"TopK(ratio={self.ratio!r}): a share above 0 and up to 0.5 is needed: of more, values and "
                f"their places are longer than all values alone.{per_cent}"
            )
        if not 0.0 <= self.momentum < 1.0:
            raise OptionError(f"TopK(momentum={self.momentum!r}) must be at least 0 and below 1.")
        check_residual("TopK", self.residual, True)
        check_steps("TopK", self.warmup_steps)
        check_freeze("TopK", self.freeze, self.warmup_steps)
        check_warmup("TopK", self, self.warmup, self.warmup_steps)
        check_steps("TopK", self.ramp_steps, "ramp_steps")
        if self.ramp_steps and not self.ramp:
            raise OptionError(
                f"TopK(ratio={self.ratio!r}, ramp_steps={self.ramp_steps}): a ramp begins at a quarter of "
                "the values, and that is no more than this: drop ramp_steps=."
            )

    @property
    def feedback(self) -> bool:
        return True

    @property
    def draws(self) -> bool:
        return False

    @property
    def freezes(self) -> bool:
        return self.freeze

    def active(self, step: int) -> bool:
        return step >= self.warmup_steps

    @cached_property
    def ramp(self) -> tuple[TopK, ...]:
        """With larger shares, one after another, each for an equal part of `ramp_steps`."""
        shares = takewhile(lambda share: share > self.ratio, (0.25**n for n in count(1)))
        return tuple(TopK(share, self.momentum) for share in shares) if self.ramp_steps else ()

    @property
    def early(self) -> tuple[Codec, ...]:
        return self.ramp if self.warmup is None else (self.warmup, *self.ramp)

    def at(self, step: int) -> Codec | None:
        late = step - self.warmup_steps
        if late < 0:
            return self.warmup
        return self.ramp[late * len(self.ramp) // self.ramp_steps] if late < self.ramp_steps else self

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("residual", "momentum") if self.momentum else ("residual",)

    @property
    def residual_dtype(self) -> torch.dtype:
        return RESIDUALS[self.residual]

    def count(self, numel: int) -> int:
        """How many of `numel` values travel."""
        return min(numel, max(1, round(self.ratio * numel)))

    def wire_bytes(self, numel: int) -> int:
        return padded(8 * self.count(numel))

    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        check(self, values, code)
        if not values.numel():
            return
        if values.numel() > MOST:
            raise OptionError(
                f"TopK sends places in 32 bits, and a rank's piece here has {values.numel():,} values: use "
                'more ranks, or another codec by a pattern: {"embedding*": zs.Rows(), "*": zs.TopK()}.'
            )
        with wide_residual(state) as residual:
            self._encode(values, code, residual, state)

    def _encode(self, values: Tensor, code: Tensor, residual: Tensor, state: dict[str, Tensor]) -> None:
        count = self.count(values.numel())
        places, chosen = self._parts(code, count)
        code[8 * count :].zero_()
        if values.device.type == "cpu" and largest(
            values, residual, state.get("momentum"), self.momentum, places, chosen
        ):
            return
        grown = values + state["momentum"] * self.momentum if self.momentum else values
        wanted = residual + grown
        sent = _largest(wanted, count)
        places.copy_(_places(sent, count))
        torch.index_select(wanted, 0, places, out=chosen)
        finite = wanted.isfinite()
        torch.where(finite, wanted.masked_fill(sent, 0.0), residual, out=residual)
        if self.momentum:
            kept = state["momentum"]
            torch.where(finite, grown.masked_fill(sent, 0.0), kept, out=kept)

    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        check(self, out, code, "out")
        count = self.count(out.numel())
        if not add:
            out.zero_()
        out.index_add_(0, *self._parts(code, count))

    @staticmethod
    def _parts(code: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Places and values."""
        return code[: 4 * count].view(torch.int32), code[4 * count : 8 * count].view(torch.float32)


def _largest(values: Tensor, count: int) -> Tensor:
    """Marks the `count` largest magnitudes; of equal ones the first. What is not finite counts as largest,
    all of it as equal: a NaN's bits may differ from one way of computing it to another."""
    size = (values.view(torch.int32) & MAGNITUDE).clamp_(max=_INFINITE)
    least = size.topk(count).values[-1]
    above, ties = size > least, size == least
    return above | (ties & (ties.cumsum(0) <= count - above.sum()))


def _places(chosen: Tensor, count: int) -> Tensor:
    """The places that are marked, in order. (`nonzero` would make a GPU's stream wait for the host.)"""
    rank = torch.where(chosen, chosen.cumsum(0) - 1, count)
    places = torch.empty(count + 1, dtype=torch.int64, device=chosen.device)
    return places.scatter_(0, rank, torch.arange(chosen.numel(), device=chosen.device))[:count]
