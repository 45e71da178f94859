"""Which samples of a batch are this rank's, and how much its loss then weighs.

[Note: shares] All ranks draw the same batches, in the order in which one process would, and each takes its
rows: rank r of N those from ⌊nr/N⌋ to ⌊n(r+1)/N⌋. The gradient of the batch is the mean of the ranks'
gradients, so that of a rank with m of n samples is taken mN/n times. Losses whose denominator is not the
number of samples (masks, sums, means by weight) get that of the whole batch. A rank without a sample
computes with the batch's first one, and with a weight of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .world import World


@dataclass(frozen=True)
class Share:
    """This rank's samples of a batch of `total`: from `start` to `stop`."""

    total: int
    start: int
    stop: int
    ranks: int

    @staticmethod
    def of(total: int, world: World) -> Share:
        start, stop = (total * rank // world.size for rank in (world.rank, world.rank + 1))
        return Share(total, start, stop, world.size)

    @property
    def empty(self) -> bool:
        return self.start == self.stop

    @property
    def part(self) -> float:
        """Of the batch's samples."""
        return (self.stop - self.start) / self.total

    @property
    def weight(self) -> float:
        """What the gradient counts, where the mean over ranks is taken."""
        return self.part * self.ranks

    @property
    def counts(self) -> list[int]:
        """Samples of every rank."""
        ends = [self.total * rank // self.ranks for rank in range(self.ranks + 1)]
        return [stop - start for start, stop in pairwise(ends)]

    @property
    def rows(self) -> slice:
        """What is computed with."""
        return slice(0, 1) if self.empty else slice(self.start, self.stop)

    @property
    def count(self) -> int:
        return max(self.stop - self.start, 1)


class Shares:
    """The share of the batch that is under way; None where every rank has all of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now: Share | None = None
        self.summed = False  # gradients in fp16: taken as often as one process would, and added up later

    @property
    def weight(self) -> float:
        """What a gradient counts of the share under way."""
        if self.now is None:
            return 1.0
        return self.now.part if self.summed else self.now.weight

    def weighed(self, loss: Any) -> Any:
        """A loss whose gradient counts as its samples do."""
        if self.weight == 1 or not isinstance(loss, Tensor) or not loss.requires_grad:
            return loss
        return _Weighed.apply(loss, self.weight)  # type: ignore[no-untyped-call]

    def take(self, batch: Any) -> Any:
        """This rank's rows of a batch: nested tuples, lists and dicts of arrays or tensors, or None."""
        total = first_length(batch)
        if total is None or total == 0 or self.world.size == 1:
            self.now = None
            return batch
        self.now = Share.of(total, self.world)
        return rows_of(batch, self.now.rows, total)

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This rank's rows of every batch."""
        for batch in batches:
            yield self.take(batch)


def first_length(batch: Any) -> int | None:
    """The number of samples, by the first array."""
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if isinstance(batch, (tuple, list)):
        return next((n for n in map(first_length, batch) if n is not None), None)
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else None


def rows_of(batch: Any, rows: slice, total: int) -> Any:
    """The same rows of every array that has one for each sample."""
    if isinstance(batch, dict):
        return type(batch)((name, rows_of(value, rows, total)) for name, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(rows_of(value, rows, total) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(rows_of(value, rows, total) for value in batch)
    shape = getattr(batch, "shape", None)
    return batch[rows] if shape is not None and len(shape) and int(shape[0]) == total else batch


class _Weighed(torch.autograd.Function):
    """A loss as it is, whose gradient is taken `weight` times."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.weight, None


class Losses:
    """Reductions of Keras's losses that give, with the samples of a rank, its part of the batch's loss."""

    def __init__(self, shares: Shares, reduce: Callable[..., Any], mask: Callable[..., Any]) -> None:
        self._shares, self._reduce, self._mask = shares, reduce, mask

    def _common(self, own: Tensor, share: Share) -> Tensor:
        """A denominator of all ranks, as large as this rank's would be by its number of samples."""
        whole = own.detach().clone()
        if share.empty:
            whole.zero_()
        return self._shares.world.sum(whole) * max(share.part, 1 / share.total)

    def apply_mask(self, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        made = self._mask(sample_weight, mask, dtype, reduction)
        share = self._shares.now
        if share is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return made
        if mask.device.type == "meta":
            return made
        valid = mask.to(made.dtype).sum()
        # Keras has divided by the rank's own number of valid entries.
        return made * torch.where(valid > 0, valid / self._common(valid, share).clamp_min(1e-30), 0.0)

    def reduce_values(
        self, values: Any, sample_weight: Any = None, reduction: str = "sum_over_batch_size"
    ) -> Any:
        loss = self._reduce(values, sample_weight, reduction)
        share = self._shares.now
        if share is None or not isinstance(loss, Tensor) or loss.device.type == "meta" or loss.dim() > 0:
            return loss
        if reduction == "sum" and values.dim() > 0:
            loss = loss / max(share.part, 1 / share.total)
        elif reduction == "mean_with_sample_weight" and sample_weight is not None and values.dim() > 0:
            own = sample_weight.sum().to(loss.dtype)
            loss = loss * torch.where(own != 0, own / self._common(own, share), 0.0)
        return self._shares.weighed(loss)


class Noise:
    """Random functions of Keras that draw for the whole batch and give this rank's rows, so that noise is
    that of one process, and no two ranks have the same."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def _whole(self, length: Any) -> tuple[int, slice] | None:
        """For so many rows here: how many there are in all, and which are these."""
        share = self._shares.now
        if share is None or not isinstance(length, int) or length % share.count or length == 0:
            return None
        each = length // share.count
        return share.total * each, slice(share.rows.start * each, share.rows.stop * each)

    def shaped(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """`uniform(shape, ...)` and the like."""

        def drawn(shape: Any, *args: Any, **keywords: Any) -> Any:
            found = self._whole(shape[0]) if len(shape) else None
            if found is None:
                return draw(shape, *args, **keywords)
            return draw((found[0], *shape[1:]), *args, **keywords)[found[1]]

        return drawn

    def dropped(self, dropout: Callable[..., Any]) -> Callable[..., Any]:
        """`dropout(inputs, rate, noise_shape, seed)`."""

        def drawn(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
            found = self._whole(inputs.shape[0]) if inputs.dim() and inputs.device.type != "meta" else None
            if found is None:
                return dropout(inputs, rate, noise_shape=noise_shape, seed=seed)
            ones = torch.ones((found[0], *inputs.shape[1:]), dtype=inputs.dtype, device=inputs.device)
            if noise_shape is not None and noise_shape[0] == inputs.shape[0]:
                noise_shape = (found[0], *noise_shape[1:])
            return inputs * dropout(ones, rate, noise_shape=noise_shape, seed=seed)[found[1]]

        return drawn


class _Summed(torch.autograd.Function):
    """The sum over all ranks, through which gradients of all ranks come back."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.sum(own.detach().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.world.sum(grads[0].contiguous().clone()), None


class Moments:
    """Means and variances that batch normalisation takes over a batch: of all ranks' samples."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def _sum(self, own: Tensor, share: Share) -> Tensor:
        made: Tensor = _Summed.apply(own * 0 if share.empty else own, self._shares.world)  # type: ignore[no-untyped-call]
        return made

    def of(self, moments: Callable[..., Any]) -> Callable[..., Any]:
        """`BatchNormalization._moments`."""

        def taken(layer: Any, inputs: Any, mask: Any) -> Any:
            share = self._shares.now
            if share is None or not isinstance(inputs, Tensor) or inputs.device.type == "meta":
                return moments(layer, inputs, mask)
            axes = list(layer._reduction_axes)
            values = inputs.float() if inputs.dtype == torch.float16 else inputs
            if mask is not None:
                return self._masked(values, mask, axes, share)
            count = values.numel() // values.mean(dim=axes).numel() // share.count * share.total
            both = torch.stack([values.sum(dim=axes), values.square().sum(dim=axes)])
            mean, square = self._sum(both, share) / count
            return mean.to(inputs.dtype), (square - mean.square()).to(inputs.dtype)

        return taken

    def _masked(self, values: Tensor, mask: Tensor, axes: list[int], share: Share) -> tuple[Tensor, Tensor]:
        shown = mask.unsqueeze(-1).expand_as(values).bool()
        nothing = torch.zeros_like(values)
        weights = self._sum(shown.to(values.dtype).sum(axes, keepdim=True), share) + 1e-7
        mean = self._sum(torch.where(shown, values, nothing).sum(axes, keepdim=True), share) / weights
        squares = torch.where(shown, values - mean, nothing).square().sum(axes, keepdim=True)
        return mean.squeeze(), (self._sum(squares, share) / weights).squeeze()
