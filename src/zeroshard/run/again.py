"""A unit's forward, computed again in backward from what it was given.

What it leaves behind must be left once: running statistics of norms stay as the first forward made them. And
what it was given must still be there: a forward that writes its inputs in place would begin with what it
wrote. Torch finds that out in backward, and does not say whose forward it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from zeroshard.errors import StateError


def recomputed(module: nn.Module, label: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a unit that keeps nothing but its inputs for backward."""
    kept = partial(checkpoint, forward, use_reentrant=False)
    if any(_tracks(norm) for norm in module.modules()):
        kept = partial(kept, context_fn=lambda: (nullcontext(), still(module)))

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kept(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and not t.is_inference()]
        before = [tensor._version for tensor in given]
        output = kept(*args, **kwargs)
        if [tensor._version for tensor in given] != before:
            raise StateError(
                f"the forward of {label} writes a tensor that it was given, in place, and recomputation "
                "would begin with what it wrote. Write to a copy there (x = x + y), or leave the unit out of "
                "recompute=."
            )
        return output

    return run


def _tracks(norm: nn.Module) -> bool:
    return isinstance(norm, _NormBase) and norm.track_running_stats


@contextmanager
def still(module: nn.Module) -> Iterator[None]:
    """Norms compute as ever, and leave their statistics as they are: with a momentum of zero, and nothing to
    count in. To give them no statistics would not do, since autograd then saves other tensors."""
    norms = [norm for norm in module.modules() if isinstance(norm, _NormBase) and _tracks(norm)]
    before = [(norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]
    for norm in norms:
        norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, count
