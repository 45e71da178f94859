"""Times encode and decode of every codec.

    python benchmarks/parts/micro_codec.py --threads 1 2 --out     # results/cpu-codec.json and .md
    python benchmarks/parts/micro_codec.py --device cuda --out

GB/s are gigabytes of fp32 values encoded, or decoded, a second; on the CPU for each thread. `memory` is what
a codec has to read and write, at least, over what a plain copy moves in the same time (on a GPU the bars are
judged against the bandwidth that the maker states, if --peak gives it in TB/s). Codecs and the copy take
turns, round by round; the best round counts, which a busy machine disturbs least, and the median is in the
JSON. `--busy` takes processor time in place of wall time, where others use the machine too. `error` is the
norm of what one sending of normally distributed values loses, over the norm of the values."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from provenance import RESULTS, command, commit, hardware, preamble, version

from zeroshard.compress import Cast, Codec, Int4, Int8, OneBit, Ternary, TopK, TwoBit
from zeroshard.kernels import library

CODECS: tuple[Codec, ...] = (
    Cast("bfloat16"),
    Cast("float16"),
    Int8(),
    Int8(feedback=True),
    Int8(stochastic=True),
    Int4(feedback=False),
    Int4(),
    TwoBit(),
    Ternary(),
    OneBit(),
    TopK(0.01),
    TopK(0.01, momentum=0.9),
)
BARS = {"Int8": 1.0, "TopK": 0.3}  # GB/s a thread on the CPU
GPU_BAR, ON_GPU = 0.6, (Cast, Int8, Int4)  # of the memory's bandwidth
Row = dict[str, Any]
Clock = Callable[[Callable[[], object]], float]


def traffic(codec: Codec, numel: int, work: str) -> int:
    """The bytes that must be read and written."""
    values = 4 * numel
    if work == "encode":
        return values + 2 * codec.state_bytes(numel) + codec.wire_bytes(numel)
    sparse = isinstance(codec, TopK)
    if work == "decode":
        return values + codec.wire_bytes(numel)
    return codec.wire_bytes(numel) + 2 * (codec.wire_bytes(numel) // 2 if sparse else values)


def on_cpu(busy: bool, threads: int) -> Clock:
    """Seconds of one call; of processor time, shared among the threads, if `busy`."""

    def clock(work: Callable[[], object]) -> float:
        read = time.process_time if busy else time.perf_counter
        started = read()
        work()
        return (read() - started) / (threads if busy else 1)

    return clock


def on_gpu(work: Callable[[], object]) -> float:
    """Seconds of one call among ten, on the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e4


def cases(numel: int, device: str) -> dict[tuple[str, str], tuple[Callable[[], object], int]]:
    """(codec, work) → the call and the bytes that it has to move."""
    values, out = torch.randn(numel, device=device) * 1e-3, torch.zeros(numel, device=device)
    found: dict[tuple[str, str], tuple[Callable[[], object], int]] = {}
    found["copy", "copy"] = (lambda: out.copy_(values), 8 * numel)

    def add(codec: Codec) -> None:
        code = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
        state = codec.state(numel, device)
        codec.encode(values, code, state, 0)
        calls: dict[str, Callable[[], object]] = {
            "encode": lambda: codec.encode(values, code, state, 1),
            "decode": lambda: codec.decode(code, out, add=False),
            "add": lambda: codec.decode(code, out, add=True),
        }
        for work, call in calls.items():
            found[repr(codec), work] = (call, traffic(codec, numel, work))

    for codec in CODECS:
        add(codec)
    return found


def measure(numel: int, device: str, threads: int, rounds: int, busy: bool) -> list[Row]:
    """A row for every codec and work, with the share of the copy's bandwidth."""
    torch.set_num_threads(threads)
    clock = on_gpu if device == "cuda" else on_cpu(busy, threads)
    work = cases(numel, device)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for turn in range(rounds + 1):
        for key, (call, _) in work.items():
            took = clock(call)
            if turn:  # the first compiles and touches memory
                times[key].append(took)
    copied = work["copy", "copy"][1] / min(times["copy", "copy"])
    rows = []
    for key, (_, moved) in work.items():
        best = min(times[key])
        rows.append(
            {
                "codec": key[0],
                "work": key[1],
                "threads": threads,
                "gb_per_s_thread": 4 * numel / best / 1e9 / threads,
                "median_gb_per_s_thread": 4 * numel / statistics.median(times[key]) / 1e9 / threads,
                "memory_gb_per_s": moved / best / 1e9,
                "memory_over_copy": moved / best / copied,
            }
        )
    return rows


def losses(numel: int = 1 << 20) -> dict[str, dict[str, float]]:
    """How many times fewer bytes than fp32, and how much of normally distributed values one sending loses."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    found = {}
    for codec in CODECS:
        error = (codec.round_trip(values) - values).norm() / values.norm()
        found[repr(codec)] = {
            "fewer_bytes": 4 * numel / codec.wire_bytes(numel),
            "relative_error": float(error),
            "state_bytes_per_value": codec.state_bytes(numel) / numel,
        }
    return found


def missed(rows: list[Row], device: str, peak: float | None) -> list[str]:
    """The bars that were not reached, in words."""
    faults = []
    for row in rows:
        kind = str(row["codec"]).partition("(")[0]
        name = f"{row['codec']} {row['work']}, {row['threads']} threads"
        if device == "cpu" and row["gb_per_s_thread"] < BARS.get(kind, 0.0):
            faults.append(f"{name}: {row['gb_per_s_thread']:.2f} GB/s a thread, {BARS[kind]} are asked for")
        if device == "cuda" and kind in {codec.__name__ for codec in ON_GPU}:
            share = row["memory_gb_per_s"] / (1e3 * peak) if peak else row["memory_over_copy"]
            if share < GPU_BAR:
                faults.append(f"{name}: {share:.0%} of the memory's bandwidth, {GPU_BAR:.0%} are asked for")
    return faults


def table(rows: list[Row], lost: dict[str, dict[str, float]]) -> str:
    """Markdown, a line for each codec and number of threads."""
    lines = [
        "| codec | × fewer bytes | error | threads | encode, GB/s (memory ÷ copy) | decode | decode, add |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((row["codec"], row["threads"]) for row in rows if row["work"] != "copy")
    for codec, threads in keys:
        cells = [
            f"{row['gb_per_s_thread']:.2f} ({row['memory_over_copy']:.2f})"
            for row in rows
            if (row["codec"], row["threads"]) == (codec, threads)
        ]
        facts = f"{lost[codec]['fewer_bytes']:.2f} | {lost[codec]['relative_error']:.1e}"
        lines.append(f"| `{codec}` | {facts} | {threads} | {' | '.join(cells)} |")
    lines.append("")
    for row in (row for row in rows if row["work"] == "copy"):
        lines.append(f"Copy, threads {row['threads']}: {row['memory_gb_per_s']:.1f} GB/s read and written.")
    return "\n".join(lines)


def write(path: Path, facts: dict[str, Any], text: str) -> None:
    """The raw numbers, and the table beside them."""
    path.write_text(json.dumps(facts, indent=1) + "\n")
    head = preamble("Codecs", f"{facts['numel']:,} values", hardware=facts["hardware"])
    about = f"{facts['clock']}, torch {facts['torch']}, kernels: {facts['kernels']}."
    path.with_suffix(".md").write_text("\n".join([*head, about, "", text]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--numel", type=int, help="values; 16 Mi on the CPU and 256 Mi on a GPU unless given")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", action="store_true", help="processor time: others use the machine too")
    parser.add_argument("--peak", type=float, help="TB/s that the maker of the GPU states")
    parser.add_argument("--check", action="store_true", help="a bar that is missed is an exit status of 1")
    parser.add_argument("--out", nargs="?", const="", help="write a result file; its name may be given")
    options = parser.parse_args()
    device = options.device
    numel = options.numel or (16 << 20 if device == "cpu" else 256 << 20)
    rows = []
    for threads in options.threads if device == "cpu" else [1]:
        rows += measure(numel, device, threads, options.rounds, options.busy)
    faults = missed(rows, device, options.peak)
    lost = losses()
    kernels = library.kernels()
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "command": command(),
        "commit": commit(),
        "hardware": hardware() if device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "kernels": "torch fallback" if kernels is None else kernels.limit(),
        "clock": "processor time" if options.busy and device == "cpu" else "wall time",
        "numel": numel,
        "losses": lost,
        "rows": rows,
        "missed": faults,
    }
    words = [f"MISSED {fault}" for fault in faults] or ["All bars are reached."]
    text = "\n".join([table(rows, lost), "", *words])
    print(text)
    if options.out is not None:
        write(Path(options.out or RESULTS / f"{device}-codec.json"), facts, text)
    sys.exit(bool(faults and options.check))


if __name__ == "__main__":
    main()
