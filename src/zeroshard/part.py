"""A part: the optimizer state of one bucket on the host, and how far its update has come.

Tensors of a part (P elements: one bucket's rows on this rank, padded):

- `flat`    gradient dtype, on the device: the reduced gradient, kept until the global norm is known.
- `stage`   pinned bytes from the ring: the gradient on its way out, and in its place the new weight on its
  way back.
- `state`   on the host, not pinned: fp32 master (or the 16-bit remainder of a split one) and moments.
- `targets` compute dtype, on the device or the host: this rank's rows of each parameter, which the next
  forward uses.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .native import AdamRows, AdamStep, SgdRows, SgdStep, moments8
from .shard import Faces, Param
from .tier import Mark


@dataclass(frozen=True)
class Stretch:
    """Neighbouring parameters of a part that have had equally many updates: elements start..stop and the
    numbers of the step."""

    start: int
    stop: int
    step: AdamStep | SgdStep


@dataclass
class Part:
    """One bucket's update: where its gradient, state and weights are, and how far it has come."""

    label: str
    params: list[Param]
    spans: list[tuple[int, int]]  # offset and length of each parameter's rows in the flat gradient
    numel: int
    group: dict[str, Any]  # the optimizer's, for its hyperparameters
    state: AdamRows | SgdRows
    targets: list[Tensor]  # flat
    grad_dtype: torch.dtype
    counted: list[bool]  # whether this rank counts the parameter towards the global norm
    flat: Tensor | None = None
    squares: Tensor | None = None
    used: list[bool] = field(default_factory=list)
    taken: list[Stretch] | None = None  # the update under way or done since the last step
    ready: Mark = field(default_factory=Mark)
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.done.set()
        ends = [at for at, _ in self.spans[1:]] + [self.numel]
        self.gaps = [
            (at + n, end) for (at, n), end in zip(self.spans, ends, strict=True) if at + n < end
        ]  # padding
        self.steps = [0] * len(self.params)  # updates that each parameter has had
        self._shares: dict[tuple[int, int], AdamRows | SgdRows] = {}
        self.shown_steps: list[Tensor] = []  # the same, as `optimizer.state` shows it

    def share(self, start: int, stop: int) -> AdamRows | SgdRows:
        """The state of some elements; cut once, as the same shares are asked for every step."""
        found = self._shares.get((start, stop))
        if found is None:
            found = self._shares[start, stop] = self.state.rows(start, stop)
        return found

    def shown(self, index: int, moments: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """One parameter's state as torch's optimizer names it. 8-bit moments are shown where they come
        decoded."""
        at, n = self.spans[index]
        found = {"step": self.shown_steps[index]} if isinstance(self.state, AdamRows) else {}
        flat = moments if moments is not None else {} if self.coded else self._moments()
        return found | {
            key: tensor[at : at + n].view(self.params[index].local.shape) for key, tensor in flat.items()
        }

    def _moments(self) -> dict[str, Tensor]:
        names = {
            "exp_avg": "exp_avg",
            "exp_avg_sq": "exp_avg_sq",
            "max_exp_avg_sq": "max_exp_avg_sq",
            "momentum": "momentum_buffer",
        }
        found = {shown: getattr(self.state, name, None) for name, shown in names.items()}
        return {shown: tensor for shown, tensor in found.items() if tensor is not None}

    def decoded(self) -> dict[str, Tensor]:
        """The moments in fp32, flat; the state's own memory unless they are 8-bit."""
        if not self.coded:
            return self._moments()
        assert isinstance(self.state, AdamRows)
        assert self.state.scales is not None
        pair = moments8.decode(self.state.exp_avg, self.state.exp_avg_sq, self.state.scales)
        return dict(zip(("exp_avg", "exp_avg_sq"), (t.reshape(-1) for t in pair), strict=True))

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what was loaded for each parameter; what is missing was never updated."""
        flat = {key: torch.zeros_like(tensor) for key, tensor in self.decoded().items()}
        for index, ((at, n), state) in enumerate(zip(self.spans, states, strict=True)):
            for key, tensor in flat.items():
                if isinstance(state.get(key), Tensor):
                    tensor[at : at + n].copy_(Faces.local(state[key]).reshape(-1))
            # SGD keeps no count; whether there was a first step is all that it needs.
            self.steps[index] = int(state.get("step", isinstance(state.get("momentum_buffer"), Tensor)))
            self.shown_steps[index].fill_(self.steps[index])
        if self.coded:
            assert isinstance(self.state, AdamRows)
            assert self.state.scales is not None
            codes = moments8.encode(flat["exp_avg"], flat["exp_avg_sq"], max(self.steps))
            for stored, code in zip(
                (self.state.exp_avg, self.state.exp_avg_sq, self.state.scales), codes, strict=True
            ):
                stored.copy_(code)
        else:
            for key, tensor in self._moments().items():
                tensor.copy_(flat[key])

    @property
    def coded(self) -> bool:
        return isinstance(self.state, AdamRows) and self.state.scales is not None

    @property
    def splits(self) -> bool:
        return self.state.master is None

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.targets[0].dtype

    @property
    def stage_bytes(self) -> int:
        """The weight takes the gradient's place, except where both are read (split master) or their sizes
        differ."""
        return self.numel * self.grad_dtype.itemsize + (
            0 if self.in_place else self.numel * self.weight_dtype.itemsize
        )

    @property
    def in_place(self) -> bool:
        return not self.splits and self.grad_dtype.itemsize == self.weight_dtype.itemsize
