"""What the processes of a measured system find in their environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from provenance import ROOT

WORLD = 2


def environment(rank: int, sources: Path = ROOT / "src") -> dict[str, str]:
    """What `torchrun` would announce, one thread, and this checkout first on the path.

    Bytecode may be written: the peers have theirs since they were installed, and a checkout gets it from its
    rehearsal. Where it is forbidden, compiling our sources would count as our start-up, and theirs not.
    """
    inherited = os.environ.get("PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(sources), *([inherited] if inherited else [])]),
        # DeepSpeed compiles a small extension on first use and looks for ninja on the path.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # Peers call functions that torch deprecates, once per collective: printing that is not their work.
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }
