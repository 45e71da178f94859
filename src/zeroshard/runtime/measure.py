"""The figures of the machine at hand, measured once and kept in the user's cache folder.

Rates are what real work reaches (a block's forward and backward, an update by our own kernel, a reduction
between the ranks), so a measured machine's `efficiency` is a ratio of two measurements, not an assumption.
`zeroshard machine --again` measures anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.comm import Transport
from zeroshard.errors import OptionError
from zeroshard.kernels import AdamRows, AdamStep, ThreadTeam, update_rows, usable_cores
from zeroshard.machine import Machine
from zeroshard.planner.operations import OperationCost
from zeroshard.tiers import pinned

FORMAT = 10
MOST_MARGIN = 0.2  # of what is asked: more than that is not the allocator's
GOES = 4  # at what other programs make slower
PLACES = 4  # of staging memory: as many parts are in hand


def here(device: torch.device, again: bool = False) -> Machine:
    """This machine, from the cache or measured (under a second on a CPU; on a GPU some seconds, and up to
    2 GiB of it, which are given back)."""
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"{device} cannot be measured: ZeroShard runs on cpu and cuda. Name one of these.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"{device} cannot be measured: torch sees no GPU.")
    path = cache_folder() / f"machine-{_identity(device)}.json"
    if not again:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told.pop("format") == FORMAT:
                return Machine(**told)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # none, or one of another version: measured anew
    if device.type == "cuda":
        found = _measured_gpu(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        found = _measured_cpu()
    _keep(path, asdict(found))
    return found


def raise_margin(device: torch.device, margin: float) -> None:
    """A run has needed more beside what it asked of the allocator than was measured: plans that are made here
    from now on, with the same settings of the allocator, leave so much free."""
    path = cache_folder() / f"machine-{_identity(device)}.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["format"] == FORMAT and known["margin"] < margin:
            _keep(path, known | {"margin": min(margin, MOST_MARGIN)})
    except (OSError, ValueError, KeyError, TypeError):
        return  # nothing was kept


def allocator_settings() -> str:
    """What torch's allocator was told by the environment."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def cache_folder() -> Path:
    """Where measurements are kept: the user's cache folder, as the XDG convention has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroshard"


def _keep(path: Path, figures: dict[str, Any]) -> None:
    """Written whole or not at all. A machine whose cache cannot be written is measured every time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(figures | {"format": FORMAT}, indent=1), encoding="utf-8")
        draft.replace(path)
    except OSError:
        return


def _identity(device: torch.device) -> str:
    """What figures depend on: the hardware, the threads that may be used, torch, and on a GPU the settings of
    its allocator."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    text = f"{platform.node()} {name} {len(usable_cores())} {torch.get_num_threads()} {torch.__version__}"
    text += f" {allocator_settings()}" if device.type == "cuda" else ""
    return f"{device.type}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def link_between(transport: Transport, machine: Machine) -> Machine:
    """The machine with the rate between these ranks. Every rank calls it; rank 0's cache decides whether it
    is measured."""
    if transport.size == 1:
        return machine
    kind = f"{_identity(transport.device)}-{transport.name}-{transport.size}"
    path = cache_folder() / f"link-{kind}.json"
    known: Any = None
    if transport.rank == 0:
        try:
            known = float(json.loads(path.read_text(encoding="utf-8"))["bytes_per_second"])
        except (OSError, ValueError, KeyError, TypeError):
            known = None
    known = transport.exchange(known, "the speed of the link")[0]
    if known is None:
        known = _measured_link(transport)
        if transport.rank == 0:
            _keep(path, {"bytes_per_second": known})
    return replace(machine, link=float(known), network=float(known))


def disk_rate(folder: str, nbytes: int = 2**27) -> float:
    """Bytes a second of the disk under a folder, the slower of writing and reading, past the page cache."""
    block = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = perf_counter()
            for _ in range(nbytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            wrote = perf_counter() - start
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = perf_counter()
            while file.read(len(block)):
                pass
            return nbytes / max(wrote, perf_counter() - start)
    except OSError as error:
        raise OptionError(f"the disk of {folder} cannot be measured: {error.strerror}.") from error


def _measured_link(transport: Transport) -> float:
    """Bytes a second that a rank sends in a reduction, the slowest rank's."""
    shard = 2**18 if transport.device.type == "cpu" else 2**22
    transport_buffer = transport.allocate("measured link", shard * transport.size, torch.float32)
    out = torch.empty(shard, device=transport.device)

    def once() -> None:
        transport.fill(transport_buffer)
        work = transport.reduce("measure", "link", transport_buffer, [shard] * transport.size, out, 1.0)
        work.wait()
        if out.is_cuda:
            torch.cuda.synchronize(out.device)

    once()
    seconds = transport.max([_seconds(once, transport.device, 3)])[0]
    transport.fence()
    transport.free(transport_buffer)
    transport.counters.reset()
    return shard * 4 * (transport.size - 1) / max(seconds, 1e-9)


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """The fastest of some runs, on a GPU more of them: other programs only ever make it slower."""
    return min(_timed(work, device, repeats if device.type == "cpu" else 4 * repeats))


def _timed(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """The seconds of each run."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return times


def _lasting(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one of many runs in a row on a GPU: over a second it gets warm, and slower."""
    torch.cuda.synchronize(device)
    start = perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize(device)
    return (perf_counter() - start) / repeats


def _matmul_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b), device)


def _copy_rate(numel: int, device: torch.device) -> float:
    """Bytes read and written a second."""
    a, b = torch.ones(numel, device=device), torch.ones(numel, device=device)
    return 8 * numel / _seconds(lambda: b.copy_(a), device)


def _fused_rate(device: torch.device, numel: int = 2**20, count: int = 64) -> float:
    """Bytes a second that torch's fused Adam touches on the device, in parameters of usual size."""
    weights = [torch.zeros(numel, device=device, requires_grad=True) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights, fused=True)
    optimizer.step()
    return 28 * numel * count / _lasting(optimizer.step, device, 20)


def _update_rate(numel: int, count: int, threads: int, repeats: int, device: torch.device) -> float:
    """Bytes a second that the host's Adam touches, all threads together: 28 a parameter in bf16. As in a run,
    several parts are in hand, so that no thread waits for the end of one, each part has state of its own, and
    there are a few places for gradients and weights, which caches hold in part. Of several goes the fastest,
    as other programs slow it down; each is a mean, as updates last as long as a step."""
    parts = [AdamRows.zeros(numel) for _ in range(count)]
    places = pinned(2 * PLACES * 2 * numel, device).view(torch.bfloat16).view(2, PLACES, numel)
    step, team = AdamStep(lr=1e-3, step=1), ThreadTeam.open(threads)

    def carry(place: int) -> None:
        grad, weight = places[:, place]
        for rows in parts[place::PLACES]:
            update_rows(rows, grad, weight, step, team=team)

    def transfer_worker(place: int) -> None:
        for _ in range(repeats):
            carry(place)

    def together(work: Callable[[int], None]) -> float:
        with ThreadPoolExecutor(min(PLACES, count)) as pool:
            start = perf_counter()
            list(pool.map(work, range(min(PLACES, count))))
            return perf_counter() - start

    try:
        together(carry)  # the first touch of the memory is slow
        return 28 * numel * count * repeats / min(together(transfer_worker) for _ in range(GOES))
    finally:
        if team is not None:
            team.close()


class _BlockProbe(nn.Module):
    """A transformer block of plain parts: what rates are measured on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.norm = nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.mix(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class _MatmulRates:
    """Operations a second of the matrix products of a block: its time without what all else takes to read and
    write, and without gaps. `forward`, `backward` and `both`. On a GPU over so many rows that launching it is
    no part of the time."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device, memory_rate: float, gap: float
    ) -> None:
        layer = _BlockProbe(width).to(device, dtype)
        x = torch.randn(rows, width, width, device=device, dtype=dtype, requires_grad=True)

        def ahead() -> None:
            layer(x).sum()

        def both() -> None:
            layer(x).sum().backward()

        def taken(work: Callable[[], None]) -> tuple[int, float]:
            """Operations, and seconds of them."""
            work()
            with OperationCost() as cost:
                work()
            seconds = _lasting(work, device, 100) if device.type == "cuda" else _seconds(work, device)
            rest = cost.moved / memory_rate + cost.kernels * gap
            return cost.flops, max(seconds - rest, seconds / 2)

        (one, once), (all_of, whole) = taken(ahead), taken(both)
        self.forward, self.both = one / once, all_of / whole
        self.backward = (all_of - one) / max(whole - once, whole / 4)


class _SmallProbe:
    """A stack of blocks so small that calling their operations takes longer than running them."""

    def __init__(self, device: torch.device) -> None:
        self._layers = nn.Sequential(*(_BlockProbe(64) for _ in range(8))).to(device)
        self._x = torch.randn(1, 8, 64, device=device, requires_grad=True)
        self.device = device
        self.step()
        with OperationCost() as cost:
            self.step()
        self.kernels = cost.kernels

    def step(self) -> None:
        self._layers(self._x).sum().backward()

    def seconds(self, repeats: int = 25) -> float:
        """Of one step; half of them take longer. The fastest would be no measure: unlike kernels, Python is
        held up in real steps too."""
        return sorted(_timed(self.step, self.device, repeats))[repeats // 2]


def _drag(small: _SmallProbe, threads: int, numel: int = 2**26) -> float:
    """By which share operations are called more slowly while so many threads of the host update: a median of
    some goes, as both vary. The updates are large, so that next to none of it is Python's."""
    rows, team, step = AdamRows.zeros(numel), ThreadTeam.open(threads), AdamStep(lr=1e-3, step=1)
    grad, weight = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
    going = True

    def updates() -> None:
        while going:
            update_rows(rows, grad, weight, step, team=team)

    update_rows(rows, grad, weight, step, team=team)  # the first touch of the memory is slow
    shares = []
    try:
        for _ in range(GOES + 1):
            alone, going = small.seconds(), True
            thread = Thread(target=updates)
            thread.start()
            try:
                shares.append(small.seconds() / alone - 1.0)
            finally:
                going = False
                thread.join()
    finally:
        if team is not None:
            team.close()
    return max(sorted(shares)[len(shares) // 2], 0.0)


def _gap(device: torch.device, count: int = 500) -> float:
    """Seconds that the device takes for a kernel with next to no work, many of them waiting in line."""
    tiny = torch.zeros(16, device=device)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(3):
        torch.cuda._sleep(50_000_000)  # long enough for all of them to be launched meanwhile
        start.record()
        for _ in range(count):
            tiny.add_(1.0)
        stop.record()
        torch.cuda.synchronize(device)
        best = min(best, start.elapsed_time(stop) / 1e3 / count)
    return best


def _measured_cpu() -> Machine:
    device = torch.device("cpu")
    small = _SmallProbe(device)
    gap = small.seconds() / small.kernels
    full = _matmul_rate(512, torch.float32, device)
    copies = _copy_rate(2**22, device)
    wide, narrow = (
        _MatmulRates(2, 128, d, device, copies, gap).both for d in (torch.float32, torch.bfloat16)
    )
    return Machine(
        name="this CPU",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        half=narrow * full / wide,
        full=full,
        memory_rate=copies,
        pcie=copies / 2,
        link=copies / 2,
        network=copies / 2,
        host_rate=_update_rate(2**20, 1, len(usable_cores()), 2, device),
        node=max(len(usable_cores()), 1),
        cores=1,
        gap=gap,
        launch=0.0,
        drag=0.0,
        efficiency=min(wide / full, 1.0),
        latency=50e-6,
        source="measured",
        gpu=False,
    )


def _measured_gpu(device: torch.device) -> Machine:
    half = _matmul_rate(8192, torch.bfloat16, device)
    near = pinned(2**26, device)
    there = torch.empty(2**26, dtype=torch.uint8, device=device)
    pcie = 2**26 / _seconds(lambda: there.copy_(near, non_blocking=True), device)
    margin, workspace = _allocator(device)
    memory_rate = _copy_rate(2**27, device)
    count, small = max(torch.cuda.device_count(), 1), _SmallProbe(device)
    cores, gap = max(len(usable_cores()) // count, 1), _gap(device)
    rates = _MatmulRates(8, 2048, torch.bfloat16, device, memory_rate, gap)
    return Machine(
        name=torch.cuda.get_device_name(device),
        memory=torch.cuda.get_device_properties(device).total_memory,
        half=half,
        full=_matmul_rate(4096, torch.float32, device),
        memory_rate=memory_rate,
        pcie=pcie,
        link=_peer_rate(device) or pcie,
        update_rate=_fused_rate(device),
        host_rate=_update_rate(13 * 2**20, 12, max(cores * count - 2, 1), 12, device),
        node=count,
        cores=cores,
        gap=gap,
        launch=min(small.seconds() for _ in range(GOES)) / small.kernels,
        drag=_drag(small, max(cores * count - 2, 1)),
        efficiency=rates.forward / half,
        back_efficiency=rates.backward / half,
        margin=margin,
        workspace=workspace,
        allocator=allocator_settings(),
        source="measured",
    )


def _peer_rate(device: torch.device) -> float | None:
    """Bytes a second to another device of this node, where there is one."""
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    if not others:
        return None
    a = torch.empty(2**28, dtype=torch.uint8, device=device)
    b = torch.empty(2**28, dtype=torch.uint8, device=f"cuda:{others[0]}")
    return 2**28 / _seconds(lambda: b.copy_(a), device)


def _allocator(device: torch.device) -> tuple[float, int]:
    """What the caching allocator reserves beside what a training step asks of it, as a share; and what
    matrix products take for themselves, in bytes: cuBLAS once for the thread of forward and once for that of
    backward."""
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    small = torch.randn(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated(device)
    (small @ small).sum().backward()
    small.grad = None
    workspace = max(torch.cuda.memory_allocated(device) - before, 0)
    torch.cuda.reset_peak_memory_stats(device)
    resting = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    layers = nn.Sequential(*(_BlockProbe(1024) for _ in range(8))).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    for _ in range(3):
        layers(torch.randn(4, 1024, 1024, device=device, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    asked = torch.cuda.max_memory_allocated(device) - resting[0]
    reserved = torch.cuda.max_memory_reserved(device) - resting[1]
    return max(reserved / max(asked, 1) - 1.0, 0.0), workspace
