"""Joins ranks with a GPU each: NCCL's collectives on a stream of their own; small agreements go over gloo.

- **stage**: device memory that NCCL reads or writes where the caller's shards are uneven or in several
  places. All operations run one after another on one stream, so one stage per dtype serves them all; it grows
  to the largest. Large tensors that all ranks own equally much of are gathered past it, to their place.
- fp32 and fp64 wires use NCCL's reduce-scatter. It would add 16-bit wires in 16 bits, so those go by all-to-
  all and are added here in fp32, in rank order: the same bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from zeroshard.kernels import sum_in_order
from zeroshard.layout.sharding import RankLengths
from zeroshard.layout.specs import TransportTraits

from .diagnosis import exits
from .diagnosis.operation_order import OperationOrder
from .diagnosis.waits import LONG, StoreWatch
from .gloo import GlooTransport
from .targets import GatherTargets, totals_of
from .transport import HEAD, Cuts, Land, Spans, Transport, TransportBuffer, Work, parts_of, slices

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Torch 2.13 renamed it and warns about the old name; 2.11 knows only that.
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class NcclTransport(Transport):
    """NCCL between GPUs, through the caller's group. `wait` orders streams and does not block the host."""

    name = "nccl"
    traits = TransportTraits(overlaps=True, staged=True, keeps_order=True)

    def __init__(
        self,
        store: Store,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: float = 600.0,
        watch: StoreWatch | None = None,
    ) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        self._group = group
        self._side = GlooTransport(store, self.rank, self.size, torch.device("cpu"), timeout, watch)
        self._stream = torch.cuda.Stream(device)
        self._stages: dict[torch.dtype, torch.Tensor] = {}
        self._open = _Open()
        self._order = OperationOrder(store, self.rank, self.size)
        self._reads_host = False
        self._side.guard(self._open.overdue, partial(exits.give_up, self.rank))
        exits.listen(self)

    # Buffers

    def allocate(self, key: str, numel: int, dtype: torch.dtype) -> TransportBuffer:
        return TransportBuffer(key, torch.zeros(numel, dtype=dtype, device=self.device))

    def over(self, key: str, memory: torch.Tensor) -> TransportBuffer:
        self._reads_host = True
        return super().over(key, memory)

    def free(self, transport_buffer: TransportBuffer) -> None:
        self.fill(transport_buffer)
        transport_buffer.let_go()

    def fill(self, transport_buffer: TransportBuffer) -> None:
        event = transport_buffer.state.get("used")
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _stage(self, dtype: torch.dtype, *sizes: int) -> list[torch.Tensor]:
        """Consecutive parts of the stage. Ask once per operation, inside the stream that uses it."""
        total = sum(sizes)
        held = self._stages.get(dtype)
        if held is None or held.numel() < total:
            held = self._stages[dtype] = torch.empty(total, dtype=dtype, device=self.device)
        return slices(held, sizes)

    # Traffic

    def reduce(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        shards: Sequence[int],
        out: torch.Tensor,
        scale: float,
    ) -> Work:
        with self._next(kind, key):
            if wire.mine.dtype.itemsize == 2:
                self._add_here(wire.mine, shards, out, scale)
            else:
                self._scatter(wire.mine, shards, out, scale)
            self._count_reduce(kind, shards, wire.mine.element_size())
            return self._started(kind, key, wire)

    def _scatter(self, wire: torch.Tensor, shards: Sequence[int], out: torch.Tensor, scale: float) -> None:
        lengths = RankLengths.of(shards)
        each, even = lengths.most, lengths.even
        if each == 0:
            return
        direct = even and out.dtype == wire.dtype
        mine, source = self._stage(wire.dtype, 0 if direct else each, 0 if even else each * self.size)
        if even:
            source = wire[: each * self.size]
        else:
            padded, runs = source.view(self.size, each), [run for run in lengths.runs if run.each]
            sent = [wire[lengths.starts[run.start] :][: len(run) * run.each] for run in runs]
            torch._foreach_copy_(
                [padded[run.start : run.stop, : run.each] for run in runs],
                [part.view(-1, run.each) for part, run in zip(sent, runs, strict=True)],
            )
        _reduce_scatter(_real(out if direct else mine), _real(source), group=self._group)
        if direct:
            out.mul_(scale)
        else:
            out.copy_(mine[: shards[self.rank]].mul_(scale))

    def _add_here(self, wire: torch.Tensor, shards: Sequence[int], out: torch.Tensor, scale: float) -> None:
        mine, sent = shards[self.rank], wire[: RankLengths.of(shards).total]
        (reduced_grad,) = self._stage(wire.dtype, mine * self.size)
        dist.all_to_all_single(reduced_grad, sent, [mine] * self.size, list(shards), group=self._group)
        if mine == 0:
            return
        direct = out.dtype == torch.float32
        total = out if direct else self._stage(torch.float32, mine)[0]
        if self.device.type != "cuda" or not sum_in_order(reduced_grad, total, scale):
            # A launch for each rank: at a thousand of them Python takes longer than the step.
            first, *rest = slices(reduced_grad, [mine] * self.size)
            total.copy_(first)
            for shard in rest:
                total.add_(shard)
            total.mul_(scale)
        if not direct:
            out.copy_(total)

    def all_to_all(
        self,
        kind: str,
        key: str,
        wire: TransportBuffer,
        offers: Spans,
        takes: Spans,
        land: Land,
        varies: bool = False,
    ) -> Work:
        with self._next(kind, key):
            offered = parts_of(wire.mine, offers)
            sent, received = [n for _, n in offers], [n for _, n in takes]
            if varies:
                sent, received = self._swap_lengths(offered)
                offered = [part[:length] for part, length in zip(offered, sent, strict=True)]
            # Parts begin at multiples of 16 bytes, so that they can be seen as numbers.
            room = self._stage(torch.uint8, *(-(-length // 16) * 16 for length in received))
            parts = [part[:length] for part, length in zip(room, received, strict=True)]
            dist.all_to_all(parts, offered, group=self._group)
            with torch.no_grad():
                land(parts)
            self._count_all_to_all(kind, sent, received)
            return self._started(kind, key, wire)

    def _swap_lengths(self, offered: list[torch.Tensor]) -> tuple[list[int], list[int]]:
        """The lengths of what goes to and comes from each rank. Waits for the device: NCCL must know them."""
        none = torch.zeros(HEAD, dtype=torch.uint8, device=self.device)
        mine = torch.stack([part[:HEAD] if part.numel() else none for part in offered]).view(torch.int64)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self._group)
        return mine.flatten().tolist(), theirs.flatten().tolist()

    def gather(
        self, kind: str, key: str, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> Work:
        totals = totals_of(cuts, out)
        with self._next(kind, key):
            if any(totals):
                self._fetch(source, cuts, out)
            self._count_gather(kind, totals, source.mine.element_size())
            return self._started(kind, key, source)

    def _fetch(self, source: TransportBuffer, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]) -> None:
        """In one launch: large even slots straight to their place, the others to the stage. Rows on the host
        pass through the stage."""
        straight = out.straight if isinstance(out, GatherTargets) else {}
        each = out.each if isinstance(out, GatherTargets) else max(totals_of(cuts, out))
        parts = [source.mine[at : at + numel] for at, numel in cuts[self.rank]]
        own = [parts[slot] for slot in straight]
        others = [part for slot, part in enumerate(parts) if slot not in straight]
        on_host = bool(source.state.get("host"))
        sizes = [part.numel() for part in own] if on_host else []
        mine, reduced_grad, *near = self._stage(source.mine.dtype, each, each * self.size, *sizes)
        places = _places(out, self.rank, cuts)
        packed = [
            mine[places[slot] :][: part.numel()] for slot, part in enumerate(parts) if slot not in straight
        ]
        if on_host:
            for to, part in zip([*near, *packed], [*own, *others], strict=True):
                to.copy_(part, non_blocking=True)
        elif len(others) == 1 and others[0].numel() == each:
            mine = others[0]
        elif others:
            torch._foreach_copy_(packed, others)
        staged = ([reduced_grad], [mine]) if each else ([], [])
        self._bring([*straight.values(), *staged[0]], [*(near if on_host else own), *staged[1]])
        self._copy_out(reduced_grad, each, cuts, out)

    def _bring(self, whole: list[torch.Tensor], mine: list[torch.Tensor]) -> None:
        """Shards of all ranks, one after another, for each of some tensors."""
        work = self._group.allgather_into_tensor_coalesced(list(map(_real, whole)), list(map(_real, mine)))
        if work is not None:
            work.wait()

    def _copy_out(
        self, reduced_grad: torch.Tensor, each: int, cuts: Cuts, out: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        targets: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        if isinstance(out, GatherTargets):
            targets, parts = out.in_turn(reduced_grad)
        else:
            for rank, tensors in enumerate(out):
                if len(tensors) > 0:
                    lengths = [numel for _, numel in cuts[rank]]
                    targets += tensors
                    parts += slices(reduced_grad[rank * each : (rank + 1) * each], lengths)
        if targets:
            shaped = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
            with torch.no_grad():
                torch._foreach_copy_(targets, shaped)

    def _next(self, kind: str, key: str) -> torch.cuda.StreamContext:
        """Run what follows on the transport's stream, after what the caller has queued so far."""
        self._order.add(f"{kind} [{key}]")
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def _started(self, kind: str, key: str, transport_buffer: TransportBuffer) -> Work:
        event = torch.cuda.Event()
        event.record(self._stream)
        transport_buffer.state["used"] = event
        self._open.add(f"its {kind} [{key}]", event)
        return _OnDevice(event, self.device)

    def open(self) -> None:
        return None

    def fence(self) -> None:
        self._side.beat()
        # Only this rank's own reads of the rows have to be over: NCCL hands peers copies.
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        if self._reads_host:
            self._stream.synchronize()  # what the host writes next waits for no stream

    def broadcast(self, key: str, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        near = [tensor.detach() for tensor in tensors if tensor.device == self.device]
        self._side.broadcast(key, [tensor for tensor in tensors if tensor.device != self.device], source)
        root = dist.get_global_rank(self._group, source)
        for tensor in near:
            flat = tensor.contiguous()
            dist.broadcast(flat, root, group=self._group)
            if self.rank != source and flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat)
        self._count_broadcast(near, source)

    # Small agreements

    def barrier(self, what: str) -> None:
        self._side.barrier(what)

    def compare(self, what: str, place: str) -> None:
        self._side.compare(what, place)

    def max(self, values: Sequence[float], what: str = "a small max") -> list[float]:
        return self._side.max(values, what)

    def sum(self, values: Sequence[float], what: str = "a small sum") -> list[float]:
        return self._side.sum(values, what)

    def exchange(self, value: object, what: str = "an exchange") -> list[object]:
        return self._side.exchange(value, what)

    # The end

    def report(self, text: str) -> None:
        self._side.report(text)

    def cause(self) -> str | None:
        return self._side.cause()

    def close(self) -> None:
        exits.unlisten(self)
        self._order.close()
        self._side.close()
        self._stages.clear()


def _places(out: Sequence[Sequence[torch.Tensor]], rank: int, cuts: Cuts) -> list[int]:
    """Where a rank's segments begin in its shard on the stage."""
    if isinstance(out, GatherTargets):
        return out.staged(rank)
    return [0, *accumulate(numel for _, numel in cuts[rank])]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """As NCCL takes it, which knows no complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class _OnDevice:
    """An operation on the transport's stream."""

    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def poll(self) -> bool:
        return cast(bool, self._event.query())

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Open:
    """The operations that the device has not finished, oldest first."""

    def __init__(self) -> None:
        self._open: deque[tuple[str, torch.cuda.Event, float]] = deque()
        self._lock = threading.Lock()

    def add(self, label: str, event: torch.cuda.Event) -> None:
        with self._lock:
            self._open.append((label, event, time.monotonic()))
            # Two looks for each one added: the queue is as long as the device is behind.
            for _ in range(2):
                if self._open and self._open[0][1].query():
                    self._open.popleft()

    def overdue(self) -> tuple[str, float] | None:
        """What the device has been busy with for `LONG` seconds or more. Called by the guard's thread."""
        with self._lock:
            while self._open and self._open[0][1].query():
                self._open.popleft()
            if not self._open or time.monotonic() - self._open[0][2] < LONG:
                return None
            return self._open[0][0], time.monotonic() - self._open[0][2]
