"""Where a result came from: the commit, the machine, the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def commit() -> str:
    """The commit of this checkout, and whether its sources were changed since."""
    changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")


def git(*arguments: str) -> str:
    """What git answers about this checkout, or "unknown" outside of one."""
    answer = subprocess.run(["git", *arguments], cwd=HERE.parent, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def version(package: str) -> str:
    """The installed version, or that there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def hardware() -> str:
    """Processor, cores and memory in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB"
