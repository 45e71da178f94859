"""Times one AdamW step on the host: bf16 gradient in, fp32 master and moments updated, bf16 weight out.

    python benchmarks/parts/micro_host_update.py --threads 1 2 --json host_update.json

Nanoseconds a parameter, interleaved round by round, medians and minima. The yardstick `copy` moves the same
28 bytes a parameter (14 read, 14 written) with the same threads: the faster of memmove and torch's copy.
`torch fused` is torch._fused_adamw_ with the two casts that a bf16 gradient and weight need, in the same
memory as ours and in plain torch tensors; `DeepSpeed` is its CPUAdam with the copy of the weight, where it is
installed and builds."""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from zeroshard.kernels import AdamRows, AdamStep, Workers, allocate, split, update_rows, usable_cores
from zeroshard.kernels import library as native_loader

BYTES = 28
GRAIN = 1 << 20
STEP = AdamStep(lr=1e-4, step=10, weight_decay=0.1)
Case = Callable[[], object]


def fill(master: torch.Tensor, grad: torch.Tensor) -> None:
    """Values as in training; zeros would let the processor skip work."""
    for start in range(0, master.numel(), GRAIN):
        master[start : start + GRAIN].normal_(std=0.02)
        grad[start : start + GRAIN].copy_(torch.randn(grad[start : start + GRAIN].numel()) * 1e-3)


def plain_rows(numel: int) -> AdamRows:
    """State in tensors as torch makes them."""
    return AdamRows(torch.zeros(numel), torch.zeros(numel), torch.zeros(numel))


def ours(state: AdamRows, workers: Workers, grad: torch.Tensor) -> Case:
    """Our update over all workers, in chunks."""
    numel = state.numel
    (weight,) = allocate(numel, [torch.bfloat16])
    values = torch.randn(numel) * 0.02
    if state.master is not None:
        state.master.copy_(values)
    else:
        for to, half in zip((weight, state.remainder), split(values), strict=True):
            to.copy_(half)  # type: ignore[union-attr]

    def chunk(start: int, stop: int) -> None:
        update_rows(state, grad[start:stop], weight[start:stop], STEP, start=start, stop=stop)

    return lambda: workers.spread(numel, GRAIN, chunk)


def copies(numel: int, workers: Workers) -> dict[str, Case]:
    """A plain copy of the bytes that the update reads and writes, by two means."""
    half = BYTES // 2
    to, source = allocate(numel * half, [torch.uint8, torch.uint8])
    source.fill_(1)

    def memmove(start: int, stop: int) -> None:
        ctypes.memmove(to.data_ptr() + start * half, source.data_ptr() + start * half, (stop - start) * half)

    def torch_copy(start: int, stop: int) -> None:
        to[start * half : stop * half].copy_(source[start * half : stop * half])

    return {
        "copy (memmove)": lambda: workers.spread(numel, GRAIN, memmove),
        "copy (torch)": lambda: workers.spread(numel, GRAIN, torch_copy),
    }


def torch_fused(numel: int, grad: torch.Tensor, placed: bool) -> Case:
    """torch's fused kernel with its own threads, plus the casts around it."""
    dtypes = [torch.float32] * 4
    made = allocate(numel, dtypes) if placed else [torch.zeros(numel, dtype=dtype) for dtype in dtypes]
    master, exp_avg, exp_avg_sq, wide = made
    master.normal_(std=0.02)
    weight = torch.zeros(numel, dtype=torch.bfloat16)
    count = torch.tensor(10.0)

    def run() -> None:
        wide.copy_(grad)
        torch._fused_adamw_(
            [master],
            [wide],
            [exp_avg],
            [exp_avg_sq],
            [],
            [count],
            lr=STEP.lr,
            beta1=STEP.beta1,
            beta2=STEP.beta2,
            weight_decay=STEP.weight_decay,
            eps=STEP.eps,
            amsgrad=False,
            maximize=False,
        )
        weight.copy_(master)

    return run


def deepspeed_adam(numel: int, grad: torch.Tensor) -> Case | None:
    """DeepSpeed's CPUAdam; None, with the reason on stderr, where it cannot be had."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        master = torch.nn.Parameter(torch.randn(numel) * 0.02)
        optimizer = DeepSpeedCPUAdam([master], lr=STEP.lr, weight_decay=STEP.weight_decay)
    except Exception as error:  # any failure of a peer to import or build is a missing row, not ours
        print(f"DeepSpeed: not measured: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    weight = torch.zeros(numel, dtype=torch.bfloat16)
    master.grad = torch.zeros(numel)

    def run() -> None:
        assert master.grad is not None
        master.grad.copy_(grad)
        optimizer.step()
        weight.copy_(master.data)

    return run


def measure(
    cases: dict[str, Case], rounds: int, numel: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Nanoseconds a parameter of every case in every round; the cases take turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, case in cases.items():
            started = clock()
            case()
            if turn:  # the first touches the memory
                times[name].append((clock() - started) / numel * 1e9)
    return times


def compare(numel: int, threads: int, rounds: int, peers: bool, busy: bool) -> dict[str, list[float]]:
    """All cases with one number of threads."""
    torch.set_num_threads(threads)
    workers = Workers(threads)
    (grad,) = allocate(numel, [torch.bfloat16])
    fill(torch.empty(numel), grad)
    cases = copies(numel, workers)
    cases["zeroshard"] = ours(AdamRows.zeros(numel), workers, grad)
    cases["zeroshard, torch's memory"] = ours(plain_rows(numel), workers, grad)
    cases["zeroshard, split master"] = ours(AdamRows.zeros(numel, master="split"), workers, grad)
    cases["zeroshard, 8-bit moments"] = ours(AdamRows.zeros(numel, moments="int8"), workers, grad)
    cases["torch fused + casts, our memory"] = torch_fused(numel, grad, placed=True)
    cases["torch fused + casts"] = torch_fused(numel, grad, placed=False)
    if peers and (case := deepspeed_adam(numel, grad)) is not None:
        cases["DeepSpeed CPUAdam + casts"] = case
    try:
        clock = (lambda: time.process_time() / threads) if busy else time.perf_counter
        return measure(cases, rounds, numel, clock)
    finally:
        workers.close()


def table(times: dict[str, list[float]], threads: int) -> str:
    """The ratio is that of the minima, which a busy machine disturbs least."""
    yardstick = min(min(times["copy (memmove)"]), min(times["copy (torch)"]))
    lines = [f"| {threads} threads, ns a parameter | median | min | min ÷ copy |", "|---|---|---|---|"]
    for name, found in times.items():
        least = min(found)
        lines.append(f"| {name} | {statistics.median(found):.3f} | {least:.3f} | {least / yardstick:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, max(1, len(usable_cores()))])
    parser.add_argument("--numel", type=int, default=32 << 20, help="parameters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", action="store_true", help="also DeepSpeed, which builds its kernel first")
    parser.add_argument(
        "--busy", action="store_true", help="processor time, where others use the machine too"
    )
    parser.add_argument("--json", type=Path, help="write every number here")
    options = parser.parse_args()
    kernels = native_loader.kernels()
    level = "torch fallback" if kernels is None else kernels.limit()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, kernels: {level}")
    raw = {}
    for threads in options.threads:
        raw[threads] = compare(options.numel, threads, options.rounds, options.peers, options.busy)
        print(table(raw[threads], threads), flush=True)
    if options.json:
        facts = {
            "command": sys.argv,
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "machine": platform.platform(),
            "cores": len(usable_cores()),
            "kernels": level,
            "clock": "processor" if options.busy else "wall",
            "numel": options.numel,
            "ns_per_parameter": raw,
            "text": "\n\n".join(table(times, threads) for threads, times in raw.items()),
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
