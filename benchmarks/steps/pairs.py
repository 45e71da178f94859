"""The two processes of a measured system: started, given turns, ended. See `rank` for what they do."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from environment import WORLD, environment
from provenance import ROOT
from rank import SAID, Assignment
from results import OTHER, Run
from torch import distributed as dist

HERE = Path(__file__).resolve().parent
WARMUP = 3
GRACE_S = 10.0
POLL_S = 0.05


def wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Until all ranks ended. Returns why they did not end well, or an empty string; leaves none running."""
    deadline, failed = time.monotonic() + timeout_s, ""
    try:
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > deadline:
                return failed or f"did not finish within {timeout_s:.0f} s"
            if not failed and (codes := [rank.poll() for rank in ranks if rank.poll()]):
                failed = f"a rank ended with status {codes[0]}"
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return failed or next(
        (f"a rank ended with status {rank.returncode}" for rank in ranks if rank.returncode), ""
    )


def last_words(logs: list[Path]) -> str:
    """The last line of the log that ends in an error: what a reader wants to know first."""
    ends = [lines[-1] for log in logs if (lines := log.read_text(errors="replace").strip().splitlines())]
    errors = [end for end in ends if "Error" in end]
    return (errors or ends or ["no output"])[0][:300]


class Pair:
    """One system in two fresh processes that meet at a store of this process.

    With `steps` they time that many and end by themselves. Without, they wait after their warm-up, and every
    `turn` makes them time some more, until `end`. `other`: the checkout whose package `…@other` uses.
    """

    def __init__(self, model: str, system: str, steps: int = 0, other: Path | None = None) -> None:
        self.system, self.failed = system, ""
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="compare-")
        self._answers = [Path(self._folder.name, f"rank{rank}.json") for rank in range(WORLD)]
        self._logs = [Path(self._folder.name, f"rank{rank}.log") for rank in range(WORLD)]
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._said: list[int] = []
        sources = other / "src" if other is not None and system.endswith(OTHER) else ROOT / "src"
        for rank in range(WORLD):
            self._start(model, rank, steps, environment(rank, sources))

    def _start(self, model: str, rank: int, steps: int, env: dict[str, str]) -> None:
        hears, says = os.pipe()
        system, port, answer = self.system.removesuffix(OTHER), self._store.port, str(self._answers[rank])
        told = Assignment(model, system, rank, WORLD, port, WARMUP, steps, time.monotonic(), answer, says)
        with self._logs[rank].open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "rank.py"), json.dumps(asdict(told))],
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(says,),
            )
        os.close(says)
        self._said.append(hears)
        self._ranks.append(process)

    def ready(self, timeout_s: float) -> bool:
        """Wait until both ranks have done what they were told: their warm-up, or a turn."""
        deadline, missing = time.monotonic() + timeout_s, set(self._said)
        while missing and not self.failed:
            heard, _, _ = select.select(list(missing), [], [], max(deadline - time.monotonic(), 0.0))
            if not heard:
                self.failed = f"did not finish within {timeout_s:.0f} s"
            for pipe in heard:
                if os.read(pipe, 1) != SAID:
                    self.failed = "a rank ended early"
                missing.discard(pipe)
        return not self.failed

    def turn(self, steps: int, timeout_s: float) -> bool:
        """One step to warm up, then so many timed ones."""
        for rank in self._ranks:
            assert rank.stdin is not None
            try:
                rank.stdin.write(f"{steps}\n".encode())
                rank.stdin.flush()
            except BrokenPipeError:
                self.failed = "a rank ended early"
        return self.ready(timeout_s)

    def end(self, repeat: int, timeout_s: float) -> Run:
        """Let the ranks end, and fetch their numbers."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        try:
            failed = wait(self._ranks, GRACE_S if self.failed else timeout_s) or self.failed
            if failed:
                return Run(self.system, repeat, error=f"{self.failed or failed}: {last_words(self._logs)}")
            answers = tuple(json.loads(answer.read_text()) for answer in self._answers)
            return Run(self.system, repeat, answers)
        finally:
            for pipe in self._said:
                os.close(pipe)
            self._folder.cleanup()
