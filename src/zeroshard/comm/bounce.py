"""Shows tensors as host bytes, and broadcasts through a small buffer that every rank can read.

Broadcasts are set-up traffic, where memory counts more than speed: two halves of `HALF` bytes, one being
written while the other is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zeroshard.kernels import raw

HALF = 1 << 22


def room(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes that the buffer of a broadcast needs: two halves for what is large, the exact size for small
    statistics, which travel in every step."""
    total = sum(tensor.nbytes for tensor in tensors)
    return total if total <= HALF else 2 * HALF


def is_large(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether this is a model's worth, which travels once: the bounce buffer need not be kept for it, as it
    is for a few statistics that travel every step."""
    return sum(tensor.nbytes for tensor in tensors) > 2 * HALF


def host_bytes(tensor: torch.Tensor, keep: bool) -> torch.Tensor:
    """A flat byte view of `tensor`, or of a host copy where it is elsewhere or gappy (filled if `keep`)."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        plain = torch.empty(tensor.shape, dtype=tensor.dtype)
        tensor = plain.copy_(tensor) if keep else plain
    return raw(tensor)


def land(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Bring bytes that came from elsewhere into `tensor`, unless `flat` is its own memory."""
    tensor = tensor.detach()
    if tensor.numel() > 0 and tensor.data_ptr() != flat.data_ptr():
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def broadcast(
    tensors: Sequence[torch.Tensor], bounce: torch.Tensor, sends: bool, move: Callable[[int, int], object]
) -> None:
    """Pass `tensors` through `bounce`, of `room(tensors)` bytes or more.

    `move(start, stop)` returns when every rank's `bounce[start:stop]` is that of the sender. All ranks
    call it alike, and it returns on none before all have come to it.
    """
    half, used = 0, 0
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    reduced_grads: list[tuple[torch.Tensor, torch.Tensor]] = []

    def turn() -> None:
        buffers, parts = [buffer for buffer, _ in moves], [part for _, part in moves]
        if sends and moves:
            torch._foreach_copy_(buffers, parts)
        move(half * HALF, half * HALF + used)
        if moves and not sends:
            torch._foreach_copy_(parts, buffers)
        for tensor, flat in reduced_grads:
            land(tensor, flat)
        moves.clear()
        reduced_grads.clear()

    for tensor in tensors:
        flat, at = host_bytes(tensor, keep=sends), 0
        while at < flat.numel():
            count = min(HALF - used, flat.numel() - at)
            start = half * HALF + used
            moves.append((bounce[start : start + count], flat[at : at + count]))
            at, used = at + count, used + count
            if used == HALF:
                turn()
                half, used = 1 - half, 0
        if not sends:
            reduced_grads.append((tensor, flat))
    turn()
