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
    steps, rows, width = args[0].shape
    size = Shape(steps, rows, width, args[5].shape[-1])
    kept = size.values * ON_GPU * args[0].element_size() if gpu else size.on_cpu
    return (*result[:3], result[3].new_empty(kept))


class Shape(tuple[int, int, int, int]):
    """Steps, rows, and the numbers of an input and of a hidden state."""

    def __new__(cls, steps: int, rows: int, width: int, hidden: int) -> Shape:
        return super().__new__(cls, (int(steps), int(rows), int(width), int(hidden)))

    @property
    def values(self) -> int:
        """Hidden values of all steps and rows."""
        return self[0] * self[1] * self[3]

    @property
    def on_cpu(self) -> int:
        """Bytes, as the library says of a layer that is really run; a bound for a large one."""
        steps, rows, width, hidden = self
        weights = 4 * hidden * (width + hidden)
        if 4 * (weights + steps * rows * (width + hidden)) + self.bound > PROBE_BYTES:
            return self.bound
        return _tried(self)

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
def _tried(size: Shape) -> int:
    """By running the layer once on zeros."""
    steps, rows, width, hidden = size
    with _disable_current_modes(), torch.enable_grad():  # without gradients it keeps nothing
        state = torch.zeros(rows, hidden)
        weights = torch.zeros(4 * hidden, width), torch.zeros(4 * hidden, hidden)
        biases = torch.zeros(4 * hidden), torch.zeros(4 * hidden)
        inputs = torch.zeros(steps, rows, width, requires_grad=True)
        made = LAYER(
            inputs, *weights, *biases, state, state, False, [], 2, hidden, 1, True, False, False, True
        )
        return int(made[3].untyped_storage().nbytes())
