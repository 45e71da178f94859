"""The comparison benchmark: it runs, its check on losses can tell, and its bars judge as they say."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch.distributed  # noqa: F401  # before `pure` forgets what is imported in it

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PEERS = ("deepspeed", "torchao", "psutil", "triton", "transformers")


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "steps" / "compare.py"), "--no-rehearsal", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def pure(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules that start nothing; neighbours of a script, not a package, so forgotten afterwards."""
    names = ("rank", "results", "bars", "report", "pairs", "turns")
    with mock.patch.dict(sys.modules):
        for name in names:
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(BENCHMARKS / "steps")
        modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
        yield SimpleNamespace(**modules)


def numbers(step_ms: float, losses: list[float]) -> dict[str, object]:
    return {"step_ms": step_ms, "startup_s": 1.0, "peak_rss": 1, "pss": 1, "cpu_share": 1.0, "losses": losses}


def pair(pure: SimpleNamespace, system: str, step_ms: float, losses: list[float], repeat: int = 0) -> object:
    """A run whose second rank is a little slower."""
    return pure.results.Run(system, repeat, (numbers(step_ms - 1, losses), numbers(step_ms, losses)))


def defined(path: Path) -> set[str]:
    """Names that a file defines or imports at its top level."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }
    return names


@pytest.mark.parametrize(
    "path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_what_a_script_imports_of_its_neighbours_is_there(path: Path) -> None:
    """Of the benchmarks and of the tests' helpers; scripts of hours are not run by tests."""
    folders = (path.parent, BENCHMARKS / "shared", ROOT / "tests" / "support", ROOT / "examples")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            assert module is not None, "scripts are no package"
            if importlib.util.find_spec(module.partition(".")[0]) or module.partition(".")[0] in PEERS:
                continue
            found = [folder / f"{module}.py" for folder in folders if (folder / f"{module}.py").exists()]
            assert found, f"{path.name} imports {module}, which is not there"
            if isinstance(node, ast.ImportFrom):
                missing = {alias.name for alias in node.names} - set().union(*map(defined, found))
                assert not missing, f"{path.name} imports {missing} of {module}, which has no such names"


@pytest.mark.parametrize(
    "path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_what_a_script_imports_of_the_package_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "zeroshard":
            spec = importlib.util.find_spec(node.module)
            assert spec is not None, node.module
            assert spec.origin is not None
            missing = {alias.name for alias in node.names} - defined(Path(spec.origin))
            gone = [name for name in missing if importlib.util.find_spec(f"{node.module}.{name}") is None]
            assert not gone, f"{path.name} imports {gone} of {node.module}, which has no such names"


@pytest.fixture
def shrink(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    names = ("combinations_case", "combinations_shrink")
    with mock.patch.dict(sys.modules):
        monkeypatch.syspath_prepend(BENCHMARKS / "exact")
        case, shrink = map(importlib.import_module, names)
        yield SimpleNamespace(**(vars(case) | vars(shrink)))


@pytest.mark.parametrize("seed", range(40))
def test_a_combination_that_fails_is_shrunk_to_what_it_takes(seed: int, shrink: SimpleNamespace) -> None:
    """The fault is known here: every feature that it does not need goes, and its own stay."""
    case = shrink.allowed(shrink.draw(seed))
    faults: dict[str, Callable[[Any], bool]] = {
        "stage 2 and up on two ranks": lambda c: c.stage >= 2 and c.world >= 2,
        "an event": lambda c: any("save" in names for names in c.events.values()),
        "a precision with a tier": lambda c: c.precision != "none" and c.offload != "none",
        "anything": lambda c: True,
    }
    sizes = {"stage 2 and up on two ranks": 3, "an event": 1, "a precision with a tier": 2, "anything": 0}
    for name, fails in faults.items():
        if not fails(case):
            continue
        tried: list[str] = []

        def failing(other: Any, fails: Callable[[Any], bool] = fails, tried: list[str] = tried) -> bool:
            tried.append(shrink.to_text(other))
            assert shrink.allowed(other) == other
            return fails(other)

        found = shrink.shrunk(case, failing)
        assert fails(found)
        assert shrink.weight(found) <= sizes[name], (name, found)
        assert len(set(tried)) == len(tried), "none is tried twice"
        assert shrink.to_text(shrink.from_text(shrink.to_text(found))) == shrink.to_text(found)
    assert shrink.shrunk(case, lambda other: True, lambda: False) == case, "no time, nothing tried"
    with pytest.raises(ValueError, match="a case has the fields"):
        shrink.from_text('{"seed": 1}')


@pytest.mark.ranks
def test_smoke_two_systems(tmp_path: Path) -> None:
    out = tmp_path / "results" / "smoke.json"
    done = compare(
        *("--model", "tiny", "--systems", "none", "ddp", "--turns", "2", "--steps", "1", "--out", str(out))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    rows = {row["system"]: row for row in record["rows"]}
    assert [row["status"] for row in rows.values()] == ["ok", "ok"]
    assert all(row["step_ms"]["median"] > 0 and row["startup_s"]["median"] > 0 for row in rows.values())
    assert rows["none"]["loss_gap"] == 0.0, "the same model and data must give the same first loss"
    assert record["control_loss_gap"] > 1e-3, "the check could not tell a system that does not communicate"
    assert record["model"]["parameters"] == 34_688
    assert all(record[fact] for fact in ("commit", "hardware", "command", "date"))
    assert record["versions"]["torch"] != "not installed"
    assert [len(run["ranks"]) for run in record["runs"]] == [2, 2]
    assert len(record["runs"][0]["ranks"][0]["losses"]) == 5
    steps = {
        run["system"]: [max(t) for t in zip(*(r["turns_ms"] for r in run["ranks"]), strict=True)]
        for run in record["runs"]
    }
    assert [len(turns) for turns in steps.values()] == [2, 2]
    ratio = statistics.mean(ddp / none for none, ddp in zip(steps["none"], steps["ddp"], strict=True))
    assert f" | {ratio:.2f} (" in next(
        line for line in out.with_suffix(".md").read_text().splitlines() if line.startswith("| ddp | ")
    )


@pytest.mark.ranks
def test_pair_that_does_not_end_is_a_failed_row(tmp_path: Path) -> None:
    out = tmp_path / "late.json"
    done = compare(
        *("--model", "tiny", "--systems", "ddp", "--repeats", "1", "--timeout", "0.1", "--out", str(out))
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["status"] == "FAILED"
    assert "did not finish within" in row["note"]


def test_medians_of_the_slower_rank(pure: SimpleNamespace) -> None:
    runs = [pair(pure, "ddp", step, [2.0, 1.5], repeat) for repeat, step in enumerate((90.0, 130.0, 100.0))]
    (row,) = pure.results.summarise(["ddp"], runs, {})
    assert (row.step_ms.median, row.step_ms.low, row.step_ms.high) == (100.0, 90.0, 130.0)


def taking_turns(pure: SimpleNamespace, system: str, turns: list[float], session: int = 0) -> object:
    """A run by turns; each rank is the slower one in some."""
    quick, slow = (
        [step - (n % 2) for n, step in enumerate(turns)],
        [step - (n + 1) % 2 for n, step in enumerate(turns)],
    )
    ranks = (numbers(0.0, [2.0]) | {"turns_ms": quick}, numbers(0.0, [2.0]) | {"turns_ms": slow})
    return pure.results.Run(system, session, ranks)


def test_turns_are_compared_within_their_round(pure: SimpleNamespace) -> None:
    """The machine gets slower by the round, more than the systems differ; one round is an accident."""
    drift = [100.0, 200.0, 300.0, 400.0, 500.0]
    runs = [
        taking_turns(pure, "ddp", drift),
        taking_turns(pure, "zro", [1.1 * step for step in drift]),
        taking_turns(pure, "zs-2", [85.0, 172.0, 252.0, 3000.0, 440.0]),
        taking_turns(pure, "zs-2", [90.0], session=1),
        taking_turns(pure, "none", [1.0], session=1),
    ]
    paired = pure.results.Paired(runs)
    assert paired.ratio("zs-2", "ddp") == pure.results.Quartiles(0.86, 0.85, 0.88)
    assert paired.ratio("ddp", "none") is None, "they never took turns with one another"
    assert paired.ratio("zs-2", "none").median == 90.0
    systems = ["ddp", "zro", "zs-2", "none"]
    rows = pure.results.summarise(systems, runs, {})
    verdicts = pure.bars.judge(pure.bars.bars_for("gpt-27m", systems), rows, paired)
    beside = next(v for v in verdicts if v.bar.references == ("ddp", "zro"))
    assert (beside.ratio, beside.word, beside.note) == (0.86, "pass", "ddp, quartiles 0.85-0.88")
    assert not pure.results.Paired([pair(pure, "ddp", 100.0, [2.0])])


def test_groups_hold_the_systems_of_each_bar(pure: SimpleNamespace) -> None:
    systems = ["none", "ddp", "zro", "fsdp2-zero3", "deepspeed-3", "zs-1", "zs-2", "zs-3", "ps"]
    bars = pure.bars.bars_for("gpt-124m", systems)
    assert pure.turns.groups(systems, bars, 9) == [systems]
    found = pure.turns.groups(systems, bars, 4)
    assert all(len(group) <= 4 for group in found)
    for bar in bars:
        wanted = {bar.subject, *bar.references} & set(systems)
        assert bar.metric == "startup_s" or any(wanted <= set(group) for group in found), bar
    assert any("ps" in group for group in found), "no bar speaks of it, but it was asked for"
    assert pure.turns.at_once(27_000_000, 24 * 2**30) >= 12
    assert pure.turns.at_once(124_000_000, 24 * 2**30) == 4


def test_a_clock_times_what_it_is_told(pure: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    now, met = [0.0], list[float]()
    monkeypatch.setattr(
        pure.rank, "time", SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0] / 2)
    )

    def step(batch: int) -> float:
        now[0] += 1e-3 * batch
        return batch

    clock = pure.rank.Clock(step, lambda index: 10 * (index + 1), lambda: met.append(now[0]))
    clock.warm_up()
    clock.time(2)
    clock.warm_up()
    clock.time(1)
    assert clock.losses == [10, 20, 30, 40, 50]
    assert clock.steps_ms == pytest.approx([20, 30, 50])
    assert clock.turns_ms == pytest.approx([25, 50])
    assert met == pytest.approx([0.01, 0.1]), "before each window, and never in one"
    assert clock.cpu_share == pytest.approx(0.5)


def test_wrong_losses_make_a_row_invalid_and_no_reference(pure: SimpleNamespace) -> None:
    runs = [
        pair(pure, "none", 80.0, [2.0, 1.0]),
        pair(pure, "ddp", 100.0, [2.0, 1.5]),
        pair(pure, "zro", 10.0, [2.0, 1.502]),
        pair(pure, "zs-2", 85.0, [2.0, 1.5001]),
        pair(pure, "zs-1", 85.0, [2.0, float("nan")]),
    ]
    systems = ["none", "ddp", "zro", "zs-1", "zs-2"]
    rows = pure.results.summarise(systems, runs, {})
    assert [row.status for row in rows] == ["ok", "ok", "INVALID", "INVALID", "ok"]
    verdicts = {str(v.bar): v for v in pure.bars.judge(pure.bars.bars_for("gpt-27m", systems), rows)}
    stage2 = verdicts["step of zs-2 at most 0.9 x best of ddp, zro"]
    assert stage2.ratio == pytest.approx(0.85)
    assert (stage2.word, stage2.note) == ("pass", "without zro")
    assert verdicts["step of zs-1 at most 0.9 x best of ddp, zro"].word == "not judged"


def test_missing_peer_is_reported(pure: SimpleNamespace) -> None:
    systems = ["ddp", "fsdp2-zero3", "deepspeed-3", "zs-3"]
    runs = [
        pair(pure, name, step, [2.0])
        for name, step in (("ddp", 100.0), ("fsdp2-zero3", 200.0), ("zs-3", 120.0))
    ]
    rows = pure.results.summarise(systems, runs, {"deepspeed-3": "deepspeed is not installed"})
    assert rows[2].status == "MISSING"
    verdicts = pure.bars.judge(pure.bars.bars_for("gpt-27m", systems), rows)
    half = next(v for v in verdicts if v.bar.factor == 0.5)
    assert (half.word, half.ratio, half.note) == ("FAIL", 0.6, "without deepspeed-3")
    comparison = pure.report.Comparison({"title": "t"}, rows, runs, verdicts, None)
    assert "deepspeed-3: MISSING, deepspeed is not installed" in comparison.remarks()
    assert "| deepspeed-3 (MISSING) |" in pure.report.markdown(comparison)
    assert comparison.failed() == []


def test_bars_are_those_of_the_model(pure: SimpleNamespace) -> None:
    stages = ["zs-0", "zs-1", "zs-2", "zs-3", "zs-3-gloo"]
    small = pure.bars.bars_for("small-2000", stages)
    assert [(bar.subject, bar.factor, bar.references) for bar in small] == [
        (stage, 1.1, ("ddp",)) for stage in stages[:4]
    ]
    assert ("zs-3-gloo", 0.7) in {(bar.subject, bar.factor) for bar in pure.bars.bars_for("gpt-124m", stages)}
    assert pure.bars.bars_for("gpt-27m", ["ddp"]) == ()


def test_codec_benchmark_measures_and_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS / "parts")
    bench = importlib.import_module("micro_codec")
    for name in ("micro_codec", "provenance"):  # (torch, which it imports, must stay)
        sys.modules.pop(name)
    rows = bench.measure(5000, "cpu", 1, 1, busy=True)
    assert len(rows) == 1 + 3 * len(bench.CODECS)
    assert all(row["gb_per_s_thread"] > 0 for row in rows)
    lost = bench.losses(10_000)
    int8 = [figures for name, figures in lost.items() if name.startswith("Int8(")]
    assert min(figures["fewer_bytes"] for figures in int8) >= 3.9
    assert 0.0 < lost["Cast(dtype='bfloat16')"]["relative_error"] < 2**-8
    assert bench.table(rows, lost).count("Int8(") == 3
    slow = {"codec": "Int8(…)", "work": "encode", "threads": 1, "gb_per_s_thread": 0.5}
    gpu = {"codec": "Int4(…)", "work": "add", "threads": 1, "memory_gb_per_s": 2e3, "memory_over_copy": 0.7}
    assert bench.missed([slow], "cpu", None) == [
        "Int8(…) encode, 1 threads: 0.50 GB/s a thread, 1.0 are asked for"
    ]
    assert bench.missed([gpu], "cuda", None) == []
    assert bench.missed([gpu], "cuda", 4.8) == [
        "Int4(…) add, 1 threads: 42% of the memory's bandwidth, 60% are asked for"
    ]


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the benchmarks under a name of its own: the tests have a `models`, too."""
    spec = importlib.util.spec_from_file_location(f"benchmarks.{Path(name).name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_spans_are_drawn_where_and_as_long_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = loaded("links/spans", monkeypatch)
    of_steps = [("forward", 0.0, 0.5), ("wait reduce", 0.5, 0.75), ("host", 0.25, 0.75)]
    panel = spans.Panel("one", of_steps, [(0.5, 10), (0.75, 5)])
    root = ElementTree.fromstring(spans.draw("title & more", [panel], seconds=1.0))
    left, scale = spans.LEFT, spans.WIDTH - spans.LEFT - 20
    found = {
        str(rect[0].text).split()[0]: (float(rect.attrib["x"]), float(rect.attrib["width"]))
        for rect in root
        if len(rect)
    }
    assert found["forward"] == pytest.approx((left, 0.5 * scale), abs=0.1)
    assert found["wait"] == pytest.approx((left + 0.5 * scale, 0.25 * scale), abs=0.1)
    assert found["host"] == pytest.approx((left + 0.25 * scale, 0.5 * scale), abs=0.1)
    bars = next(path.attrib["d"] for path in root if path.tag.endswith("path"))
    link = [float(tall) for tall in re.findall(r"v-([\d.]+)h", bars)]
    assert len(link) == 2
    assert link[0] == pytest.approx(2 * link[1], rel=0.02), "twice the bytes, twice as tall"


def test_a_paced_model_takes_its_time_in_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = loaded("shared/models", monkeypatch).WORKLOADS["paced-2m"]
    model, batch, seconds = workload.build(), workload.batches(0)(0), workload.seconds
    model(*batch).backward()
    started = time.perf_counter()
    loss = model(*batch)
    middle = time.perf_counter()
    loss.backward()
    assert middle - started >= seconds / 3
    assert time.perf_counter() - middle >= 2 * seconds / 3


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`links.py`, whose neighbour `models` has a namesake among the tests."""
    with mock.patch.dict(sys.modules):
        for name in ("links", "links_rank", "models", "systems"):
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(BENCHMARKS / "links")
        yield importlib.import_module("links")


def test_rows_measured_again_stand_in_place_of_the_old_ones(links: ModuleType) -> None:
    def row(step_ms: float, note: str = "") -> dict[str, object]:
        return {"step_ms": step_ms, "losses": [1.0], "sent": 0.0, "waited": 0.0, "note": note}

    rows = {name: row(50.0 + n) for n, name in enumerate(("zs-0-local32", "ddp", "zs-0"))}
    rows["zs-1"] = row(1.0)  # another model: it counts for nothing
    rows["zs-1"]["losses"] = [2.0]
    result = {
        "rows": {**rows, links.ADAPTIVE: row(90.0, "settled on that")},
        "problem": "",
        "load_average": 0.1,
    }
    links.check(result)
    assert links.missed(result)
    newer = {"rows": {links.ADAPTIVE: row(53.0, "settled on this")}, "problem": "", "load_average": 0.2}
    again = links.replace_rows(result, newer, "abc")
    links.check(again)
    assert again["rows"][links.ADAPTIVE]["note"] == "1.06 x zs-0-local32; settled on this"
    assert {name: again["rows"][name] for name in rows} == rows
    assert not links.missed(again)
    assert again["again"] == [{"rows": [links.ADAPTIVE], "commit": "abc", "load": 0.2}]
    links.check(again)
    assert again["rows"][links.ADAPTIVE]["note"] == "1.06 x zs-0-local32; settled on this", "said once"
    assert links.replace_rows(result, {**newer, "problem": "not done"}, "abc") is result
