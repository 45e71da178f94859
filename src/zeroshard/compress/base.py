"""Defines what a codec is: a pair of encode and decode over flat shards, with its state in the open; or, for
matrices, some means over the ranks (`MeanCodec`).

Tensors, by name: `values` is one rank's contribution to one shard, flat fp32; `code` is what travels in its
place, flat uint8 of `wire_bytes(numel)`; `out` is where the receiver wants the values, flat fp32; `state` is
what the sender keeps from step to step, one dict per shard. A codec itself holds only its settings, so it can
be compared, printed and shared.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from zeroshard.errors import OptionError
from zeroshard.kernels.codes import Parts
from zeroshard.sync_policies import Numerics

# Codes begin and end on such boundaries, and so do their parts, so that those of several shards can stand in
# one wire and a GPU moves sixteen bytes at a time.
ALIGNMENT = 16
SEEDS = 2**31  # `step` is less than that

Residual = Literal["float32", "bfloat16"]
RESIDUALS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_kinds: dict[str, type[Compression]] = {}


def padded(count: int) -> int:
    """`count` bytes, rounded up to the alignment of codes."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class Compression(ABC):
    """The root of all that `compress=` takes: frozen settings, and what they do to the numbers."""

    numerics: ClassVar[Numerics]
    #: How many times longer encoding and decoding take than a copy of what they read and write: on a GPU and
    #: on the CPU, as measured by benchmarks/parts/micro_codec.py. Plans multiply by it.
    slower_on_gpu: ClassVar[tuple[float, float]] = (1.0, 1.0)
    slower_on_cpu: ClassVar[tuple[float, float]] = (1.0, 1.0)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _kinds[cls.__name__] = cls

    @property
    def feedback(self) -> bool:
        """Whether what was not sent is kept in ``state["residual"]`` and sent later."""
        return False

    @property
    def draws(self) -> bool:
        """Whether a code depends on `step`, too. Of a codec that does not say, one must assume it."""
        return True

    @property
    def freezes(self) -> bool:
        """Whether Adam's second moments stay as they are once this is active; see `moments`."""
        return False

    def active(self, step: int) -> bool:
        """Whether step number `step`, counted from 0, travels through this. False: it is one of the warm-up,
        which travels as it is unless `early` says otherwise."""
        return True

    def settings(self) -> dict[str, Any]:
        """The codec as plain data, for plans and for the comparison of ranks; see `from_settings`."""
        if not is_dataclass(self):
            raise OptionError(
                f"codec {type(self).__name__} is no dataclass, so its settings are unknown; put "
                "@dataclass(frozen=True) above the class."
            )
        numerics = getattr(self, "numerics", None)
        if numerics not in get_args(Numerics):
            raise OptionError(
                f"codec {type(self).__name__} has numerics={numerics!r}: put into the class what it does to "
                f"the numbers, one of {', '.join(map(repr, get_args(Numerics)))}."
            )
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        inner = {name: v.settings() for name, v in values.items() if isinstance(v, Compression)}
        return {"kind": type(self).__name__, **values, **inner}


class Codec(Compression):
    """How gradients travel: turned into fewer bytes by the sender, and back by the receiver.

    A codec of your own is a frozen dataclass with three methods. This one sends 8-bit floats:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Float8(Codec):
    ...     numerics = "rounding"
    ...     def wire_bytes(self, numel):
    ...         return numel
    ...     def encode(self, values, code, state, step):
    ...         code.view(torch.float8_e5m2).copy_(values)
    ...     def decode(self, code, out, add):
    ...         values = code.view(torch.float8_e5m2).float()
    ...         out.add_(values) if add else out.copy_(values)
    >>> Float8().round_trip(torch.tensor([1.0, 1.1, -3.0]))
    tensor([ 1.,  1., -3.])

    With `feedback` true, `state["residual"]` is there to keep what was not sent, to be sent later. A value
    that is not finite must come out as NaN, so that every rank sees it in the same step, and must not enter
    the state. `step` differs from step to step, shard to shard and rank to rank: a seed.
    """

    @property
    def state_names(self) -> tuple[str, ...]:
        """The tensors of the state; each has the length of the shard."""
        return ("residual",) if self.feedback else ()

    @property
    def early(self) -> tuple[Codec, ...]:
        """The codecs of the warm-up, where it is not sent as it is; they work on this one's state."""
        return ()

    def at(self, step: int) -> Codec | None:
        """What step number `step` travels through; None: as it is."""
        return self if self.active(step) else None

    @property
    def residual_dtype(self) -> torch.dtype:
        """In which ``state["residual"]`` is kept; everything else of a state is fp32."""
        return torch.float32

    def _state_dtypes(self) -> dict[str, torch.dtype]:
        kept = {"residual": self.residual_dtype}
        return {name: kept.get(name, torch.float32) for name in self.state_names}

    def state(self, numel: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The state of a shard before the first step."""
        return {
            n: torch.zeros(numel, dtype=dtype, device=device) for n, dtype in self._state_dtypes().items()
        }

    def state_bytes(self, numel: int) -> int:
        """The bytes of `state`, without making it."""
        return numel * sum(dtype.itemsize for dtype in self._state_dtypes().values())

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """The exact size of the code of `numel` values, from that number alone."""

    @abstractmethod
    def encode(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        """Write all of `code`; change nothing else but `state`. The result depends on the arguments alone."""

    @abstractmethod
    def decode(self, code: Tensor, out: Tensor, add: bool) -> None:
        """Write the values into `out`, or add them to it."""

    def encode_shards(self, values: Tensor, code: Tensor, state: dict[str, Tensor], step: int) -> None:
        """`encode` for many equal shards, one a row of all tensors; `step` is the first one's, and counts
        on."""
        for number, (row, to) in enumerate(zip(values, code, strict=True)):
            own = {name: kept[number] for name, kept in state.items()}
            self.encode(row, to, own, (step + number) % SEEDS)

    def decode_parts(self, parts: Parts, out: Tensor) -> None:
        """Write what each part says into its row of `out`, or into a flat one the sum of all, in their order.
        What follows the code in a part is not looked at."""
        size, rows = self.wire_bytes(out.shape[-1]), out.dim() == 2
        for number, part in enumerate(parts):
            self.decode(part[:size], out[number] if rows else out, add=number > 0 and not rows)

    def round_trip(self, values: Tensor, step: int = 0) -> Tensor:
        """What arrives when `values` are sent once, with a state that is new."""
        code = torch.empty(self.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        out = torch.empty_like(values)
        self.encode(values, code, self.state(values.numel(), values.device), step)
        self.decode(code, out, add=False)
        return out


class MeanCodec(Compression):
    """How matrices travel as a few short vectors, each of which is averaged over the ranks before the next is
    made: so many exchanges.

    `matrix` is one rank's gradient, fp32 (rows, columns); `sent` are the vectors of all exchanges, flat fp32;
    `state` is what a rank keeps for a matrix from step to step. A codec of your own is a frozen dataclass.
    This one sends the sum of each row, and then what a row's first number differs from its mean:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class RowMeans(MeanCodec):
    ...     numerics = "approximate"
    ...     def lengths(self, shape):
    ...         return shape[0], shape[0]
    ...     def send(self, number, matrix, sent, state):
    ...         if number == 0:
    ...             torch.mean(matrix, 1, out=sent[0])
    ...         else:  # sent[0] is the mean of all ranks now
    ...             torch.sub(matrix[:, 0], sent[0], out=sent[1])
    ...     def expand(self, sent, start, stop, out):
    ...         out.copy_(sent[0][start:stop, None])
    ...         out[:, 0].add_(sent[1][start:stop])
    >>> RowMeans().round_trip(torch.tensor([[1.0, 3.0], [5.0, 5.0]]))
    tensor([[1., 2.],
            [5., 5.]])

    A value that is not finite must come out as NaN or infinity, so that every rank sees it in the same step,
    and must not enter the state.
    """

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape, as a matrix of shape[0] rows, becomes smaller; it travels as it is
        otherwise."""
        return len(shape) > 1 and 0 not in shape and sum(self.lengths(shape)) < math.prod(shape)

    @abstractmethod
    def lengths(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The numbers that travel in each exchange, of a tensor of this shape."""

    def state(self, shape: Sequence[int], device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The state of a matrix before the first step, flat. ``residual`` is a rank's own, and ranks'
        residuals may be averaged; everything else must be the same on all ranks."""
        return {}

    def state_bytes(self, shape: Sequence[int]) -> int:
        """The bytes of `state`, without making it."""
        return 0

    @abstractmethod
    def send(self, number: int, matrix: Tensor, sent: Sequence[Tensor], state: dict[str, Tensor]) -> None:
        """Write ``sent[number]``; those before it are means of all ranks. `matrix` may be changed, and stays
        from one exchange to the next."""

    def finish(self, sent: Sequence[Tensor], state: dict[str, Tensor]) -> None:
        """Prepare the state for the next step; all of `sent` are means."""

    @abstractmethod
    def expand(self, sent: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        """Write rows [start, stop) of the mean gradient into `out`."""

    def round_trip(self, matrix: Tensor) -> Tensor:
        """What arrives when one rank alone sends `matrix` once, with a state that is new."""
        rows = matrix.reshape(len(matrix), -1).float().clone()
        state, out = self.state(matrix.shape, matrix.device), torch.empty_like(rows)
        sent = [torch.empty(length, device=matrix.device) for length in self.lengths(matrix.shape)]
        for number in range(len(sent)):
            self.send(number, rows, sent, state)
        self.finish(sent, state)
        self.expand(sent, 0, len(rows), out)
        return out.view(matrix.shape)


def from_settings(settings: dict[str, Any]) -> Compression:
    """The codec that `Compression.settings` described. A class of your own must have been defined before."""
    given = {name: from_settings(v) if isinstance(v, dict) else v for name, v in settings.items()}
    kind = given.pop("kind", None)
    if kind not in _kinds:
        raise OptionError(
            f"codec kind {kind!r} is unknown; known are {', '.join(sorted(_kinds))}. "
            "Import the module that defines it first."
        )
    return _kinds[kind](**given)


def check(codec: Codec, values: Tensor, code: Tensor, name: str = "values") -> None:
    """Raise unless both are flat, of the right dtype and length, on one device, and `code` is aligned."""
    numel = values.numel()
    where = type(codec).__name__
    for what, tensor, dtype in ((name, values, torch.float32), ("code", code, torch.uint8)):
        if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
            raise OptionError(
                f"{where}: `{what}` is {tensor.dtype} of shape {tuple(tensor.shape)} and stride "
                f"{tensor.stride()}; a flat contiguous {dtype} tensor is needed."
            )
    if code.numel() != codec.wire_bytes(numel):
        raise OptionError(
            f"{where}: `code` holds {code.numel()} bytes; {numel} values take {codec.wire_bytes(numel)}."
        )
    if code.storage_offset() % ALIGNMENT:
        raise OptionError(
            f"{where}: `code` begins at byte {code.storage_offset()} of its storage; begin it at a multiple "
            f"of {ALIGNMENT}."
        )
    if code.device != values.device:
        raise OptionError(f"{where}: `code` is on {code.device} and `{name}` on {values.device}.")


def check_freeze(name: str, freeze: bool, warmup_steps: int) -> None:
    """Raise unless there is a warm-up in which second moments settle before they are frozen."""
    if freeze and not warmup_steps:
        raise OptionError(
            f"{name}(freeze=True) keeps Adam's second moments as the warm-up leaves them, and there is none: "
            f"pass {name}(freeze=True, warmup_steps=...), a fifth of the run for example."
        )


def check_residual(name: str, residual: Residual, feedback: bool) -> None:
    """Raise unless a residual is kept that can be of this dtype."""
    if residual != "float32" and not feedback:
        raise OptionError(
            f"{name}(residual={residual!r}) keeps nothing without feedback=True: drop one of them."
        )


@contextmanager
def wide_residual(state: dict[str, Tensor]) -> Iterator[Tensor]:
    """What is kept as fp32, to be changed in place; 16-bit state is rounded to nearest afterwards. (Which it
    is says the state, not the codec: a warm-up works on the state of the codec that follows it.)"""
    kept = state["residual"]
    wide = kept.float() if kept.dtype == torch.bfloat16 else kept
    yield wide
    if wide is not kept:
        kept.copy_(wide)


def check_warmup(name: str, codec: Codec, warmup: object, warmup_steps: int) -> None:
    """Raise unless the codec of a warm-up can work on the state of the one that follows, `codec`."""
    if warmup is None:
        return
    if not isinstance(warmup, Codec) or not warmup.active(0):
        raise OptionError(f"{name}(warmup={warmup!r}) must be a codec that needs no warm-up, e.g. zs.Int4().")
    if not set(warmup.state_names) <= set(codec.state_names):
        raise OptionError(
            f"{name}(warmup={warmup!r}): it keeps {', '.join(warmup.state_names)} from step to step, and "
            f"{name} keeps {', '.join(codec.state_names)}: take a codec that keeps no more, e.g. zs.Int4()."
        )
    if warmup.residual_dtype not in (torch.float32, codec.residual_dtype):
        raise OptionError(f"{name}(warmup={warmup!r}): the residual is that of {name}: pass residual= there.")
    if not warmup_steps:
        raise OptionError(
            f"{name}(warmup={warmup!r}) is for a warm-up, and there is none: pass warmup_steps=, too."
        )


def check_steps(name: str, steps: int, option: str = "warmup_steps") -> None:
    """Raise unless the length of a warm-up is one."""
    if steps < 0:
        raise OptionError(f"{name}({option}={steps}): 0 or more is needed.")
