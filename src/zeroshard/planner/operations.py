"""Counts what the operations of a traced step make and cost.

Parameters and buffers are fake tensors: shapes without memory. A matrix product counts by its arithmetic,
everything else by what it reads and writes. Views, and memory that is only asked for, cost nothing.

Operations that a GPU does in one kernel where the CPU does several are replaced, so that a trace on the CPU
saves what a GPU saves, and counts what such a kernel takes for itself. So is an LSTM layer, whose fake kernel
says nothing of what it keeps for its backward.

`Positions` finds how far positions reach that a model makes itself, so that longer micro-batches are refused.
Fake tensors have no values, and torch looks up any index in them. The greatest value of what `arange` made is
known without values, and follows through what is done to positions: views, casts, a number added, the count
of a mask. Token ids are values of the user's: nothing is known of them."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import transformer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.errors import PlanError


@contextmanager
def unread_masks(positions: bool) -> Iterator[None]:
    """Fakes have no values to look at. Torch's own transformer looks at a mask to see whether it is causal,
    which is then taken for any mask, for which attention takes no less memory. transformers looks at
    positions to see whether a row holds several sequences: only where `positions` are given."""
    replaced: list[tuple[Any, str, Any]] = [
        (transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True)
    ]
    masking = sys.modules.get("transformers.masking_utils")
    if not positions and hasattr(masking, "find_packed_sequence_indices"):
        replaced.append((masking, "find_packed_sequence_indices", lambda position_ids: None))
    with _replacing(replaced):
        yield


@contextmanager
def _replacing(replaced: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of modules, meanwhile others."""
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, function in replaced:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(replaced, before, strict=True):
            setattr(module, name, function)


class _LargestResult(FakeTensorMode):
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


class FakeTensors:
    """Made once for several traces of a model: of thousands of parameters, they are half of what a trace
    takes. Whoever traces computes in `mode`."""

    def __init__(self) -> None:
        self.mode = _LargestResult(allow_non_fake_inputs=True)
        self._made: dict[tuple[tuple[str, torch.dtype], ...], dict[str, Tensor]] = {}

    def of(self, model: nn.Module, compute: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """By their first names; parameters in the dtypes that are given for them, without gradients."""
        key = tuple(compute.items())
        if (known := self._made.get(key)) is not None:
            for fake in known.values():
                fake.grad = None
            return known
        fakes = self._made[key] = {}
        for name, parameter in model.named_parameters():
            fake = torch.empty(parameter.shape, dtype=compute.get(name, parameter.dtype), device="cpu")
            fakes[name] = fake.requires_grad_(parameter.requires_grad)
        for name, buffer in model.named_buffers():
            fakes[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        return fakes


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

    with _replacing([*places, (F, "scaled_dot_product_attention", attend)]):
        yield


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


LAYER = torch.ops.aten.mkldnn_rnn_layer.default  # what the CPU calls for each layer and direction
BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
PROBE_BYTES = 2**26  # a layer larger than this is reckoned, not tried
ON_GPU = 8  # values that a GPU keeps of each hidden one: four gates, the cell, what follows from it. Assumed
PAGE = 4096


def with_workspace(func: Any, args: Any, result: Any, gpu: bool) -> Any:
    """The result of a fake operation; of an LSTM layer with the memory that a real one keeps, and of its
    backward with a gradient for either bias, which the fake one gives twice."""
    if func is BACKWARD:
        return (*result[:4], torch.empty_like(result[4]), *result[5:])
    if func is not LAYER:
        return result
    size, dtype = RecurrentShape.of(args), args[0].dtype
    kept = size.values * ON_GPU * dtype.itemsize if gpu else size.on_cpu(dtype)
    return (*result[:3], result[3].new_empty(kept))


def products(func: Any, args: Any) -> int:
    """Operations of an LSTM layer's matrix products, in its backward twice as many; 0 for all else."""
    if func is not LAYER and func is not BACKWARD:
        return 0
    steps, rows, width, hidden = RecurrentShape.of(args)
    return 2 * steps * rows * 4 * hidden * (width + hidden) * (2 if func is BACKWARD else 1)


class RecurrentShape(tuple[int, int, int, int]):
    """Steps, rows, and the numbers of an input and of a hidden state."""

    def __new__(cls, steps: int, rows: int, width: int, hidden: int) -> RecurrentShape:
        return super().__new__(cls, (int(steps), int(rows), int(width), int(hidden)))

    @classmethod
    def of(cls, args: Any) -> RecurrentShape:
        """Of a layer that is called so."""
        steps, rows, width = args[0].shape
        return cls(steps, rows, width, args[5].shape[-1])

    @property
    def values(self) -> int:
        """Hidden values of all steps and rows."""
        return self[0] * self[1] * self[3]

    def on_cpu(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes, as the library says of a layer that is really run; a bound for a large one."""
        steps, rows, width, hidden = self
        weights = 4 * hidden * (width + hidden)
        if 4 * (weights + steps * rows * (width + hidden)) + self.bound > PROBE_BYTES:
            return self.bound
        return _tried(self, dtype)

    @property
    def bound(self) -> int:
        """Gates and states, lines and pages rounded up."""
        steps, rows, width, hidden = self
        line, widest = _line(hidden), _line(max(width, hidden))
        return 4 * (steps + 1) * rows * (10 * line + 6 * widest) + 16 * PAGE


def _line(numel: int) -> int:
    """Numbers of a row in memory: whole cache lines, and one more where rows would fall on one another."""
    return -(-numel // 16) * 16 + 16


@lru_cache(maxsize=256)
def _tried(size: RecurrentShape, dtype: torch.dtype) -> int:
    """By running the layer once on zeros."""
    steps, rows, width, hidden = size
    with _disable_current_modes(), torch.enable_grad():  # without gradients it keeps nothing
        shapes = ((4 * hidden, width), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,), (rows, hidden))
        *weights, state = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        inputs = torch.zeros(steps, rows, width, dtype=dtype, requires_grad=True)
        made = LAYER(inputs, *weights, state, state, False, [], 2, hidden, 1, True, False, False, True)
        return int(made[3].untyped_storage().nbytes())


# Beside its products, a row of attention costs what so many more keys would: over 2,048 keys the kernel
# reaches half the rate of one product, and with that the efficiency of products is the same at all widths;
# over 8,192 it reaches 4/5 (docs/log/planner.md). Of fewer keys nothing is known, and half is taken.
BESIDE = 2048
# Widths of heads that flash attention has kernels for; others run by the next.
HEADS = (32, 64, 96, 128, 192, 256)
_GATHERING = {torch.ops.aten.embedding.default, torch.ops.aten.index_select.default}  # read what they write


def cost(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Operations and bytes moved."""
    if "scaled_dot_product" in func.name():
        return _attention(func, args, kwargs), 0
    if recurrent := products(func, args):
        return recurrent, 0
    if func._overloadpacket is getattr(torch.ops.aten, "_grouped_mm", None):
        return grouped(args[0], args[1]), 0
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result)), 0
    if _is_free(func):
        return 0, 0
    made = sum(map(_extent, _tensors(result)))
    given = made if func in _GATHERING else sum(map(_extent, _tensors((args, kwargs))))
    return 0, made + given


def grouped(one: Tensor, other: Tensor) -> int:
    """Operations of the products of groups, as experts make them: each row of what has rows of all groups is
    in one product. Where both are matrices, what they share is divided."""
    return (
        2
        * int(one.shape[-2])
        * int(one.shape[-1])
        * int(other.shape[-1])
        * (int(one.shape[0]) if one.dim() == 3 and other.dim() == 3 else 1)
    )


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Operations of attention in one kernel: two products, in backward five. A causal one leaves out half.
    With what it does beside them; see `BESIDE`."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key = given["query"], given["key"]
    keys, width = int(key.shape[-2]), max(int(query.shape[-1]), 1)
    padded = next((head for head in HEADS if head >= width), width)
    one = 2 * int(query.numel()) // width * padded * (keys + min(keys, BESIDE))
    backward = "grad_out" in names or "grad_out_" in names
    return one * (5 if backward else 2) // (2 if given.get("is_causal") else 1)


def _is_free(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or "empty" in schema.name or func.namespace != "aten":
        return True
    return not schema.is_mutable and any(value.alias_info is not None for value in schema.returns)


def _extent(tensor: Tensor) -> int:
    """Bytes that are really there: an expanded tensor repeats few."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]


class OperationCost(TorchDispatchMode):
    """While active, sums what operations cost: `flops` and `moved`; `kernels`: how many cost anything."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int = 0
        self.moved: int = 0
        self.kernels: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flops, moved = cost(func, args, kwargs or {}, result)
        self.flops, self.moved = self.flops + flops, self.moved + moved
        self.kernels += bool(flops or moved)
        return result


class LiveBytes:
    """Bytes of the storages that live. Its own object, since finalizers hold it until the last storage is
    gone: a meter, and through it the model, must not live that long."""

    def __init__(self) -> None:
        self.bytes = 0
        self._known: dict[int, int] = {}

    def ignore(self, storage: UntypedStorage) -> None:
        """Leaves out the memory of a tensor, which the caller keeps, and of all views of it."""
        self._known[storage._cdata] = 0

    def meet(self, storage: UntypedStorage) -> bool:
        """Whether it is a new one."""
        if storage._cdata in self._known:
            return False
        self._known[storage._cdata] = storage.nbytes()
        self.bytes += storage.nbytes()
        weakref.finalize(storage, self._part, storage._cdata)
        return True

    def count(self, nbytes: int) -> None:
        """So much more lives that no storage stands for."""
        self.bytes += nbytes

    def _part(self, key: int) -> None:
        self.bytes -= self._known.pop(key, 0)


_aten = torch.ops.aten
_SAME = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.expand.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.t.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.clone.default,
    _aten.repeat.default,
    _aten._to_copy.default,
    _aten.lift_fresh_copy.default,
}
_RANGES: dict[
    Any, tuple[tuple[int | None, int], ...]
] = {  # where start, end and step stand, or what they are
    _aten.arange.default: ((None, 0), (0, 0), (None, 1)),
    _aten.arange.start: ((0, 0), (1, 0), (None, 1)),
    _aten.arange.start_step: ((0, 0), (1, 0), (2, 1)),
}


class Positions:
    """Of one trace. `named` finds the weight that a tensor is."""

    def __init__(self, named: Callable[[Tensor], str]) -> None:
        self._named = named
        self._greatest: Any = WeakIdKeyDictionary()

    def see(self, func: Any, args: Any, result: Any) -> None:
        """An operation that was called."""
        if func is _aten.embedding.default:
            self._look_up(args[0], args[1])
        elif func is _aten.index_select.default:
            self._look_up(args[0], args[2], args[1])
        elif func is _aten.index.Tensor:
            for dim, index in enumerate(args[1]):
                self._look_up(args[0], index, dim)
        elif func._schema.is_mutable:
            self._greatest.pop(args[0] if args else None, None)
        elif isinstance(result, Tensor) and not result.is_floating_point():
            greatest = self._reach(func, args, result)
            if greatest is not None:
                self._greatest[result] = greatest

    def _reach(self, func: Any, args: Any, result: Tensor) -> float | None:
        if func in _RANGES:
            return _last(
                *(default if at is None or at >= len(args) else args[at] for at, default in _RANGES[func])
            )
        if func is _aten.ne.Scalar:
            return 1
        known = self._greatest.get(args[0]) if args and isinstance(args[0], Tensor) else None
        if known is None:
            return None
        if func in _SAME:
            return float(known)
        if func is _aten.slice.Tensor:
            return float(known) if result.shape == args[0].shape else None
        if func is _aten.cumsum.default:
            return float(known) * args[0].shape[args[1]] if args[0].dim() else float(known)
        return self._combined(func, known, args)

    def _combined(self, func: Any, known: float, args: Any) -> float | None:
        """Of a sum or a product with a number, or with another tensor of which something is known."""
        if func not in (_aten.add.Tensor, _aten.add.Scalar, _aten.mul.Tensor, _aten.mul.Scalar):
            return None
        other = self._greatest.get(args[1]) if isinstance(args[1], Tensor) else args[1]
        if not isinstance(other, int | float) or other < 0 or len(args) > 2:
            return None
        return known + other if func in (_aten.add.Tensor, _aten.add.Scalar) else known * other

    def _look_up(self, table: Any, index: Any, dim: int = 0) -> None:
        greatest = self._greatest.get(index) if isinstance(index, Tensor) else None
        rows = table.shape[dim]
        if greatest is not None and greatest >= rows:
            name = self._named(table)
            where = f"`{name}`" if name else "a table"
            raise PlanError(
                f"the micro-batch is too long for the model: it looks up position {int(greatest):,} in "
                f"{where}, which has {rows:,} rows, numbered from 0. Give shorter "
                "sequences with batch=, or build the model with more positions."
            )


def _last(start: float, end: float, step: float) -> float:
    """The greatest of a range."""
    count = max(math.ceil((end - start) / step), 0)
    return max(start, start + (count - 1) * step) if count else 0.0


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of storages that operations make and that still live, and tells whoever listens of
    every rise."""

    def __init__(
        self,
        rise: Callable[[int], None],
        work: Callable[[int, int], None],
        gpu: bool,
        positions: Positions,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rise, self._work, self._gpu, self._positions = rise, work, gpu, positions
        self.alive = LiveBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = with_workspace(func, args, func(*args, **(kwargs or {})), self._gpu)
        self._work(*cost(func, args, kwargs or {}, result))
        self._positions.see(func, args, result)
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor) and self.alive.meet(tensor.untyped_storage()):
                self._rise(self.alive.bytes)
        if self._gpu and (passing := workspace(func, args)):
            self.alive.count(passing)
            self._rise(self.alive.bytes)
            self.alive.count(-passing)
        return result
