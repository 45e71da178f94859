"""Lightning's own tests of strategies and checkpoints, with our strategies in place of its own.

    python benchmarks/quality/lightning_tests.py SOURCES --out      # results/lightning-own-tests.md

`SOURCES` is a checkout of Lightning at the tag nearest to the release that is installed; its tests want
`jsonargparse` and `pytest-timeout`, too. They run with `ZEROSHARD_STAGE` set, which puts `ZeroShardStrategy`
and `ZeroShardFabricStrategy` where Lightning would take DDP, or one device (`whole_checkpoints=True`, since
the tests read files); what fails runs again without. Nothing of Lightning's is kept here. `--folder` keeps
what pytest wrote; what is there already is taken as it is. A failure that this file does not know the reason
of fails the benchmark."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from provenance import RESULTS, preamble

STAGE = "ZEROSHARD_STAGE"
FILES = (
    *(f"tests_pytorch/strategies/test_{name}.py" for name in ("common", "ddp", "custom_strategy")),
    *(f"tests_{package}/strategies/test_ddp_integration.py" for package in ("pytorch", "fabric")),
    "tests_fabric/strategies/test_ddp.py",
    *(f"tests_pytorch/checkpointing/test_{name}.py" for name in ("trainer_checkpoint", "torch_saving")),
    *(
        f"tests_pytorch/checkpointing/test_{n}.py"
        for n in ("checkpoint_callback_frequency", "model_checkpoint")
    ),
    *(f"tests_pytorch/callbacks/test_{name}.py" for name in ("weight_averaging", "stochastic_weight_avg")),
    *(f"tests_pytorch/models/test_{name}.py" for name in ("restore", "hooks")),
    "tests_pytorch/trainer/optimization",
    "tests_pytorch/core/test_lightning_optimizer.py",
    "tests_fabric/test_fabric.py",
)
#: Why a test fails with ours: by its name, what it says, and what it asks for.
REASONS = (
    ("test_ddp_kwargs_from_registry", "", "arguments of torch's wrapper, under DDP's names"),
    (r"test_setup_module\[", "", "counts calls of torch's DistributedDataParallel"),
    ("", r"you must call `.launch\(\)`", "Fabric without `launch()`, which any strategy of ranks asks for"),
    ("", "LBFGS needs inner products", "LBFGS, which is refused by name"),
    ("test_model_torch_save$", "cannot be pickled", "`torch.save(model)` after `fit`: refused by name"),
    ("closure_with_different_frequencies", "", "a mock for `Adam.step`, given what Adam does not take"),
    (
        "manual_optimization_and_accumulated",
        "",
        "mocks for an optimizer's methods, looked for in place",
    ),
    (
        "hook_system_fit_no_val_and_resume|test_callbacks_state_fit_ckpt_path",
        "",
        "a checkpoint loaded before `on_fit_start`; here after, as with Lightning's FSDP and DeepSpeed",
    ),
)


def pytest_configure(config: Any) -> None:
    """Pytest calls it, told of this file by `-p`: our strategies take the names and places of DDP."""
    if STAGE not in os.environ:
        return
    import lightning.fabric.connector as fabric_connector
    import lightning.pytorch.trainer.connectors.accelerator_connector as trainer_connector
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    from zeroshard.integrations.lightning import ZeroShardFabricStrategy, ZeroShardStrategy

    ours = {"stage": int(os.environ[STAGE]), "whole_checkpoints": True}
    for registry, kind in (
        (StrategyRegistry, ZeroShardStrategy),
        (STRATEGY_REGISTRY, ZeroShardFabricStrategy),
    ):
        for name in [name for name in registry if name.startswith("ddp")]:
            start = "spawn" if "spawn" in name else "fork" if re.search("fork|notebook", name) else "popen"
            registry.register(name, kind, "", override=True, start_method=start, **ours)

    def chosen(plain: Any) -> Any:
        def choose(self: Any) -> Any:
            strategy = plain(self)
            single = type(strategy).__name__ == "SingleDeviceStrategy" and strategy.root_device.type == "cpu"
            return "ddp" if single else strategy

        return choose

    for connector in (fabric_connector._Connector, trainer_connector._AcceleratorConnector):
        connector._choose_strategy = chosen(connector._choose_strategy)


@dataclass
class Told:
    """What pytest says of one half."""

    counts: Counter[str]
    failures: dict[str, str]  # by test: its message


def run(sources: Path, folder: Path, stage: int | None, tests: Sequence[str] = FILES) -> Told:
    """One half. A report that is there is read, and then those of tests that ran again."""
    name = "plain" if stage is None else f"stage-{stage}"
    report = folder / f"{name}.xml"
    if not report.exists():
        paths = [str(Path(__file__).parent), "."]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        environ |= {} if stage is None else {STAGE: str(stage)}
        pytest = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-q", "-c", "../pyproject.toml"]
        quiet = [
            "--rootdir=..",
            "-o",
            "addopts=",
            "--disable-warnings",
            "--timeout=600",
            f"--junitxml={report}",
        ]
        subprocess.run([*pytest, *quiet, *tests], cwd=sources / "tests", env=environ, check=False)
    outcomes: dict[str, tuple[str, str]] = {}
    for file in (report, *sorted(folder.glob(f"{name}-*.xml"))):
        outcomes |= outcomes_in(file)
    counts = Counter(kind for kind, _ in outcomes.values())
    return Told(counts, {test: text for test, (kind, text) in outcomes.items() if kind == "failed"})


def outcomes_in(file: Path) -> dict[str, tuple[str, str]]:
    found = {}
    for case in ET.parse(file).iter("testcase"):
        kind, text = "passed", ""
        for part in case:
            if part.tag in ("failure", "error"):
                kind, text = "failed", part.get("message", "")
            elif part.tag == "skipped":
                kind = "skipped"
        module = str(case.get("classname")).removeprefix("tests.").replace(".", "/")
        found[f"{module}.py::{case.get('name')}"] = kind, text
    return found


def reason_of(test: str, text: str) -> str:
    for pattern, message, reason in REASONS:
        if re.search(pattern, test) and re.search(message, text):
            return reason
    return "unknown"


def report_of(halves: dict[str, Told], sources: Path) -> tuple[list[str], list[str]]:
    """Lines of the result, and failures that nobody has explained."""
    ours, plain = halves.values()
    lines = preamble("Lightning's own tests, with our strategies", "the small models of Lightning's tests")
    names = ("lightning", "torch", "torchmetrics", "pytest")
    lines += [f"- {', '.join(f'{name} {importlib.metadata.version(name)}' for name in names)}"]
    tag = ["git", "-C", str(sources), "describe", "--tags"]
    lines += [
        f"- tests of Lightning's sources at {tag_of(tag)}, on CPUs",
        "",
        "| | passed | failed | skipped |",
    ]
    lines += ["|---|---|---|---|"]
    for name, told in halves.items():
        lines.append(
            f"| {name} | {told.counts['passed']} | {told.counts['failed']} | {told.counts['skipped']} |"
        )
    lines += [
        "",
        "What is skipped wants GPUs, or packages that are not there. Tests that fail with ours alone:",
        "",
    ]
    grouped: dict[str, list[str]] = {}
    for test, text in ours.failures.items():
        if test not in plain.failures:
            grouped.setdefault(reason_of(test, text), []).append(test)
    lines += ["| tests | what they ask for |", "|---|---|"]
    for reason, tests in sorted(grouped.items(), key=lambda each: -len(each[1])):
        lines.append(f"| {len(tests)}, as `{tests[0].rpartition('::')[2].partition('[')[0]}` | {reason} |")
    return lines, grouped.get("unknown", [])


def tag_of(command: list[str]) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "the tag that the folder is named after"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path)
    parser.add_argument("--folder", type=Path, help="where pytest's reports go; SOURCES without it")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--out", action="store_true")
    arguments = parser.parse_args()
    folder = (arguments.folder or arguments.sources).resolve()
    ours = run(arguments.sources, folder, arguments.stage)
    halves = {f"stage {arguments.stage}": ours}
    halves["plain, of those that failed"] = run(arguments.sources, folder, None, list(ours.failures))
    lines, unknown = report_of(halves, arguments.sources)
    print("\n".join(lines))
    if arguments.out:
        (RESULTS / "lightning-own-tests.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
