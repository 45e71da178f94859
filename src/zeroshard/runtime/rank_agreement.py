"""Compares the ranks before anything is sharded.

What can differ between ranks is exchanged once, and a difference is raised on every rank with the same text:
a rank that raises alone is a hang elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm import Transport
from zeroshard.comm.diagnosis.exits import describe as line_of
from zeroshard.comm.refusal import raise_together, told_of
from zeroshard.errors import RankError
from zeroshard.kernels import host_update_of, is_registered
from zeroshard.options import Options

_ADVICE = {
    "model": "Every rank must build the same model; check code that depends on the rank.",
    "order of the parameters": "Every rank must build the same model, its parts in the same order.",
    "optimizer": "Every rank must build the same optimizer; check code that depends on the rank.",
    "options": "Every rank must call shard() with the same options.",
    "software": "Every rank must run the same versions.",
}
# Of a checksum: integers as wide as an element, elements that are summed at a time, what tells places apart.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PART, _ODD, _WRAP = 1 << 20, 0x9E3779B1, 1 << 62


def describe(
    model: nn.Module, optimizers: list[Optimizer], options: Options, asked: dict[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """All that must be the same on every rank, as topic → item → text. `asked`: what a plan is asked for."""
    parameters = {
        f"`{n}`": _tensor_text(p) + ("" if p.requires_grad else ", frozen")
        for n, p in model.named_parameters()
    }
    buffers = {f"buffer `{n}`": _tensor_text(b) for n, b in model.named_buffers()}
    names = {id(p): n for n, p in model.named_parameters()}
    groups = {}
    for number, optimizer in enumerate(optimizers):
        groups[f"optimizer {number}"] = type(optimizer).__name__
        if is_registered(optimizer) and (update := host_update_of(optimizer)) is not None:
            groups[f"the host's update of optimizer {number}"] = update.__name__
        for index, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number} group {index}"
            held = [names.get(id(p), "?") for p in group["params"]]
            groups[where] = _listed(held)
            for key, value in group.items():
                plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                if key != "params" and isinstance(plain, (int, float, bool, str, tuple, type(None))):
                    groups[f"{where}: {key}"] = repr(plain)
    return {
        "model": parameters | buffers,
        "order of the parameters": {"it": _listed(list(names.values()))},
        "optimizer": groups,
        "options": {name: repr(getattr(options, name)) for name in options.__dataclass_fields__}
        | (asked or {}),
        "software": {"torch": torch.__version__.split("+")[0]},
    }


def compare(transport: Transport, mine: dict[str, dict[str, str]]) -> None:
    """Raise on every rank, with the same text, the first difference between the ranks' descriptions."""
    digest = _digest(json.dumps(mine))
    if len(set(map(str, transport.exchange(digest, "shard()")))) == 1:
        return
    everyone: list[Any] = transport.exchange(mine, "shard()")
    for topic in mine:
        items = dict.fromkeys(item for told in everyone for item in told[topic])
        for item in items:
            texts = [told[topic].get(item, "missing") for told in everyone]
            if len(set(texts)) > 1:
                raise RankError(
                    f"ranks disagree about the {topic}: {item} is {_by_rank(texts)}. {_ADVICE[topic]}"
                )
    raise RankError("ranks disagree about the order of buffers. Every rank must build the same model.")


def together(transport: Transport, what: str, look: Callable[[], None]) -> None:
    """Take a look that may find a fault on one rank alone; it is then raised on all, by `what` they call.
    Every rank calls it."""
    mine: Exception | None = None
    try:
        look()
    except Exception as error:
        mine = error
    raise_together(what, transport.exchange(told_of(mine), what), mine)


def tell_failure(transport: Transport, kind: object, error: BaseException | None, trace: object) -> None:
    """At the end of a `with` block in which ranks work together: if this rank has failed, its peers are told
    why. A `RankError` is passed on: not every transport tells all ranks of a failure itself."""
    if error is not None:
        transport.report(line_of(transport.rank, error))


def differing_values(transport: Transport, tensors: dict[str, Tensor]) -> list[str]:
    """Names of tensors whose values are not the same on all ranks, by a checksum of their bits."""
    places: dict[torch.device, Tensor] = {}  # not kept: up to 8 MiB of a device
    mine = [_checksum(t, places) for t in tensors.values()]
    rows: list[Any] = transport.exchange(mine, "the first values of shard()")
    return [name for name, sums in zip(tensors, zip(*rows, strict=True), strict=True) if len(set(sums)) > 1]


def refuse_unlike(transport: Transport, written: dict[str, Tensor]) -> None:
    """Raise on every rank, with the same text, where ranks have written different values by hand."""
    names = differing_values(transport, written) if transport.size > 1 else []
    if names:
        others = f", and {len(names) - 1} more differ" if len(names) > 1 else ""
        raise RankError(
            f"run.gathered(write=True): ranks have written different values into `{names[0]}`{others}. Each "
            "rank keeps its own rows of what it wrote, so every rank must write the same: write on all of "
            "them, not on rank 0 alone, or call torch.distributed.broadcast(whole[name].data, 0) inside the "
            "block. Nothing was changed."
        )


def _checksum(tensor: Tensor, places: dict[torch.device, Tensor]) -> int:
    """Every value counts with its place: a buffer may be a random order, the same numbers on all ranks."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_BITS.get(flat.element_size(), torch.int64))
    weights, total = places.get(bits.device), 0
    if weights is None or len(weights) < min(len(bits), _PART):
        # No longer than it takes: a small model would wait longer for a million numbers than for all else.
        count = min(1 << (len(bits) - 1).bit_length(), _PART)
        weights = places[bits.device] = torch.arange(count, device=bits.device) * _ODD + 1
    sums = [part.to(torch.int64, copy=True).mul_(weights[: part.numel()]).sum() for part in bits.split(_PART)]
    for number in torch.stack(sums).tolist():
        total = (total * _ODD + number) % _WRAP
    return total


def _tensor_text(tensor: Tensor) -> str:
    where = ", meta" if tensor.is_meta else ""  # a rank that has no values fills them in, with others' help
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{where}"


def _listed(names: list[str]) -> str:
    """Short, and different for different lists."""
    shown = f"`{names[0]}` … `{names[-1]}`" if names else "nothing"
    return f"{shown} ({len(names)} parameters, checksum {_digest(','.join(names))[:6]})"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _by_rank(texts: list[str]) -> str:
    """``(1000, 768) on ranks 0-6 and (1001, 768) on rank 7``, the commonest first."""
    parts = []
    for text, _ in Counter(texts).most_common():
        ranks = [rank for rank, other in enumerate(texts) if other == text]
        shown = ", ".join(map(str, ranks))
        if len(ranks) > 1 and ranks[-1] - ranks[0] + 1 == len(ranks):
            shown = f"{ranks[0]}-{ranks[-1]}"
        parts.append(f"{text} on rank{'s' if len(ranks) > 1 else ''} {shown}")
    return " and ".join(parts)
