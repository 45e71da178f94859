"""The offload table of one GPU: a case that fails or runs out of time is a row that says so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with mock.patch.dict(sys.modules):
        for name in ("offload", "offload_cases"):
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(GPU)
        yield importlib.import_module("offload")


def measured(table: ModuleType, folder: Path, text: str, limit: float = 20) -> dict[str, object]:
    """The row of a script of our own."""
    (folder / "case.py").write_text(text)
    case = sys.modules["offload_cases"].Case("a case", "holds", 20, script=("case.py",))
    with mock.patch.object(table, "HERE", folder / "gpu"):
        row: dict[str, object] = table.measure("own", case, "/nowhere", limit, folder)
    return row


STEP = 'print("STEP " + \'{"step_s": 2.0, "times": [2.0], "losses": [1.0]}\', flush=True)\n'


def test_a_case_that_fails(table: ModuleType, tmp_path: Path) -> None:
    row = measured(table, tmp_path, STEP + 'raise MemoryError("CUDA out of memory: 3 GiB")')
    assert row["error"] == "MemoryError: CUDA out of memory: 3 GiB"
    assert row["step_s"] == 2.0, "what it had by then"
    row = measured(table, tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert row["error"] == "killed, most likely for want of host memory"


def test_a_case_that_takes_too_long(table: ModuleType, tmp_path: Path) -> None:
    row = measured(table, tmp_path, STEP + "import time\ntime.sleep(3600)", limit=1.5)
    assert row["error"] == "out of time after 1.5 s"


def test_rows_are_told_with_their_ratio_or_their_error(table: ModuleType) -> None:
    figures = {"gpu_peak_gib": 30.0, "VmHWM": 63.0, "params_b": 6.74, "tok_s": 8000.0, "losses": [10.5]}
    plain = {"title": "plain", "bar": "–", "against": "", "step_s": 1.6, **figures}
    split = {"title": "split", "bar": "≤ 1.3", "against": "plain-7b", "step_s": 2.0, **figures}
    broken = {"title": "20 B", "bar": "trains", "against": "", "error": "out of memory"}
    rows = {"plain-7b": plain, "split-7b": split, "20b": broken}
    text = table.report({"device": "H200", "torch": "2", "commit": "c", "command": "x", "rows": rows})
    assert "| split | ≤ 1.3 | 2.000 | 1.250 | 8000 | 30.00 | 63.00 | 10.04 | agree |" in text
    assert "| 20 B | trains | **out of memory** |" in text


def test_every_case_can_be_tried_on_the_cpu(table: ModuleType) -> None:
    cases = sys.modules["offload_cases"]
    for name, case in cases.CASES.items():
        small = cases.dry(case)
        assert small.seconds <= 60, name
        assert small.script == case.small if case.script else small.size == "tiny"
        command = table.command_of(small, "/disk", Path("out.json"))
        assert not any("{" in word for word in command), "the disk's folder is filled in"
