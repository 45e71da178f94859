"""What the kernel of an LSTM layer keeps for its backward. A fake one says nothing of it, and no other
operation returns memory whose size is the library's own business."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

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
    size, dtype = Shape.of(args), args[0].dtype
    kept = size.values * ON_GPU * dtype.itemsize if gpu else size.on_cpu(dtype)
    return (*result[:3], result[3].new_empty(kept))


def products(func: Any, args: Any) -> int:
    """Operations of an LSTM layer's matrix products, in its backward twice as many; 0 for all else."""
    if func is not LAYER and func is not BACKWARD:
        return 0
    steps, rows, width, hidden = Shape.of(args)
    return 2 * steps * rows * 4 * hidden * (width + hidden) * (2 if func is BACKWARD else 1)


class Shape(tuple[int, int, int, int]):
    """Steps, rows, and the numbers of an input and of a hidden state."""

    def __new__(cls, steps: int, rows: int, width: int, hidden: int) -> Shape:
        return super().__new__(cls, (int(steps), int(rows), int(width), int(hidden)))

    @classmethod
    def of(cls, args: Any) -> Shape:
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
def _tried(size: Shape, dtype: torch.dtype) -> int:
    """By running the layer once on zeros."""
    steps, rows, width, hidden = size
    with _disable_current_modes(), torch.enable_grad():  # without gradients it keeps nothing
        shapes = ((4 * hidden, width), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,), (rows, hidden))
        *weights, state = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        inputs = torch.zeros(steps, rows, width, dtype=dtype, requires_grad=True)
        made = LAYER(inputs, *weights, state, state, False, [], 2, hidden, 1, True, False, False, True)
        return int(made[3].untyped_storage().nbytes())
