"""For tests of sharded training: ranks that outlive a test, ranks as threads, assertions on numbers, bytes.

    from zeroshard.testing import assert_same_bits, ranks

    def train(stage):                       # a module-level function: it travels by name
        ...
        with run.gathered() as whole:
            return {name: p.detach().clone() for name, p in whole.items()}

    def test_stages_agree():
        plain, sharded = ranks(2).run(train, 0)[0], ranks(2).run(train, 3)[0]
        assert_same_bits(sharded, plain)

`ranks(n)` starts n processes once; a call then costs its own time and not that of importing torch. Processes
meet through a file and talk over the loopback interface: no port is fixed, so sessions can run side by side.
"""

from __future__ import annotations

from .memory import PeakBytes, assert_bytes, tensor_bytes
from .numbers import assert_losses, assert_same_bits, ulps
from .processes import Outcome, RankFailure, Ranks, ranks
from .threads import run_threads

__all__ = [
    "Outcome",
    "PeakBytes",
    "RankFailure",
    "Ranks",
    "assert_bytes",
    "assert_losses",
    "assert_same_bits",
    "ranks",
    "run_threads",
    "tensor_bytes",
    "ulps",
]
