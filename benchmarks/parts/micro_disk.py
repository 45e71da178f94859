"""Times the disk tier beside plain direct I/O on the same file: every byte read once and written once, as a
step does with state that rests on the disk.

    python benchmarks/parts/micro_disk.py --path /scratch --gib 4 --json disk.json

`tier` is `tier.paging` at work: pages fetched ahead into few frames, each stored again when it has come.
`plain` are threads that read a block and write it back, with nothing else to do; the best of several numbers
of threads is the yardstick. `read` and `write` alone tell what the disk does one way. The ways take turns in
every round. Bytes a second count both directions.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from zeroshard.tiers import DiskPage, DiskPager, ScratchFile

BLOCK = 4 << 20
THREADS = (4, 8, 16)
Way = Callable[[], int]


def plain(scratch: ScratchFile, threads: int, reads: bool, writes: bool) -> Way:
    """`threads` threads that take blocks in turn. Returns the bytes moved."""
    blocks = range(0, scratch.nbytes, BLOCK)

    def run() -> int:
        turn = count()

        def work() -> None:
            with mmap.mmap(-1, BLOCK) as memory:
                view = memoryview(memory)
                while (index := next(turn)) < len(blocks):
                    part = view[: min(BLOCK, scratch.nbytes - blocks[index])]
                    if reads:
                        scratch.read(part, blocks[index])
                    if writes:
                        scratch.write(part, blocks[index])
                    part.release()
                view.release()

        pool = [threading.Thread(target=work) for _ in range(threads)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        return scratch.nbytes * (reads + writes)

    return run


def tier(paging: DiskPager, pages: list[DiskPage], ahead: int) -> Way:
    """The order of a step: some pages on their way in, one here, the last ones on their way out."""

    def run() -> int:
        coming = iter(pages)
        for _ in range(ahead):
            paging.fetch(next(coming))
        for page in pages:
            paging.memory(page)
            paging.store(page)
            following = next(coming, None)
            if following is not None:
                paging.fetch(following)
        for page in pages:
            paging.settle(page)
        return 2 * sum(page.nbytes for page in pages)

    return run


def measure(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """GB/s of every way in every round; they take turns, each round beginning with another."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begun = time.perf_counter()
            moved = ways[name]()
            if turn:  # the first puts the blocks where they stay
                found[name].append(moved / (time.perf_counter() - begun) / 1e9)
    return found


def table(found: dict[str, list[float]]) -> tuple[str, float]:
    """Markdown, and the ratio that counts: the medians of the tier and of the best plain way."""
    middle = {name: statistics.median(speeds) for name, speeds in found.items()}
    best = max(value for name, value in middle.items() if name.startswith("plain"))
    lines = ["| way | GB/s, median | min to max | ÷ best plain |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {middle[name]:.2f} | {min(all_):.2f} to {max(all_):.2f} | {middle[name] / best:.2f} |"
        for name, all_ in found.items()
    ]
    return "\n".join(lines), middle["tier"] / best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=Path("."), help="a folder on the disk")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the file")
    parser.add_argument("--page-mib", type=int, default=256, help="state of one part")
    parser.add_argument("--berths", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every number here")
    options = parser.parse_args()
    size = options.page_mib << 20
    number = max(2, round(options.gib * 2**30 / size))
    scratch = ScratchFile(options.path, number * size)
    print(f"{number} pages of {options.page_mib} MiB, direct I/O: {scratch.direct}", flush=True)
    paging = DiskPager(scratch, options.frames, size)
    pages = [DiskPage(f"page {i}", i * size, size) for i in range(number)]
    ways: dict[str, Way] = {"tier": tier(paging, pages, min(2, number))}
    ways |= {f"plain, {n} threads": plain(scratch, n, True, True) for n in THREADS}
    ways |= {"read, 8 threads": plain(scratch, 8, True, False)}
    ways |= {"write, 8 threads": plain(scratch, 8, False, True)}
    found = measure(ways, options.rounds)
    text, ratio = table(found)
    print(text)
    if options.json:
        facts = {
            "command": sys.argv,
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "machine": platform.platform(),
            "direct": scratch.direct,
            "pages": number,
            "page_mib": options.page_mib,
            "gb_per_s": found,
            "ratio": ratio,
            "text": text,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    paging.close()


if __name__ == "__main__":
    main()
