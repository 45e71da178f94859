"""Running statistics of norms, which a forward adds to and its recomputation must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def keeps_statistics(module: nn.Module) -> bool:
    return any(isinstance(norm, _NormBase) and norm.track_running_stats for norm in module.modules())


@contextmanager
def still(module: nn.Module) -> Iterator[None]:
    """Norms compute as ever, and leave their statistics as they are: with a momentum of zero, and nothing to
    count in. To give them no statistics would not do, since autograd then saves other tensors."""
    norms = [norm for norm in module.modules() if isinstance(norm, _NormBase) and norm.track_running_stats]
    before = [(norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]
    for norm in norms:
        norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, count
