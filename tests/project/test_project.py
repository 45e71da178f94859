"""What surrounds the code: versions agree, public names are documented, no text names what it must not."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import zeroshard

ROOT = Path(__file__).parents[2]
# Written so that this file does not match itself.
FORBIDDEN = {
    "a path of somebody's machine": re.compile(r"/(?:home|root|Users)/\w|/work" + r"/\w"),
    "a plan in place of its execution": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
    "a merge that did not end": re.compile(r"^(?:<{7} |>{7} )", re.MULTILINE),
}
BINARY = {".png", ".gif", ".svg", ".pt", ".safetensors", ".whl"}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked() -> list[Path]:
    """The text files under version control, or an explanation why there are none."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of tracked files")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path.suffix not in BINARY]


def test_no_file_holds_what_does_not_belong_there() -> None:
    paths = tracked()
    assert len(paths) > 10
    faults = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        for what, pattern in FORBIDDEN.items():
            if match := pattern.search(text):
                line = text[: match.start()].count("\n") + 1
                faults.append(f"{path.relative_to(ROOT)}:{line}: {what}: {match[0]!r}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "text", ["open('/home" + "/me/x')", "cd /work" + "/main", "# TO" + "DO later", "<" * 7 + " HEAD"]
)
def test_the_words_are_found(text: str) -> None:
    assert any(pattern.search(text) for pattern in FORBIDDEN.values())


def test_the_version_is_the_same_everywhere() -> None:
    assert "version" in project()["dynamic"]  # pyproject.toml and the wheel have it of the package
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(zeroshard.__version__)}\b", changes, re.MULTILINE)


def test_a_report_asks_for_the_machine_and_the_plan() -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "report.md").read_text(encoding="utf-8")
    assert all(word in text for word in ("zeroshard machine", "zeroshard plan", "zeroshard --version"))
    assert (ROOT / "src/zeroshard/cli/machine.py").exists()


def test_security_says_what_files_and_ports_may_do() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert re.findall(r"^- \*\*(Checkpoints|Plans)\*\*", text, re.MULTILINE) == ["Checkpoints", "Plans"]
    assert "## Ports" in text


def test_the_readme_is_the_package_description() -> None:
    there = (ROOT / "README.md").exists()
    assert project().get("readme") == ("README.md" if there else None), "pyproject.toml: readme = 'README.md'"


def test_constraints_satisfy_the_requirements() -> None:
    pin = re.search(
        r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    floor = re.search(r"torch>=(\d+)\.(\d+)", str(project()["dependencies"]))
    assert pin
    assert floor
    assert tuple(map(int, pin.groups())) >= tuple(map(int, floor.groups()))


def test_every_public_name_is_documented() -> None:
    assert zeroshard.__all__
    silent = [name for name in zeroshard.__all__ if not documented(getattr(zeroshard, name))]
    assert not silent, f"public names without a docstring: {silent}"


def documented(thing: object) -> bool:
    """Whether a class or function has a docstring of its own; a dataclass's generated one does not count."""
    text = inspect.getdoc(thing) or ""
    name = getattr(thing, "__name__", "")
    return bool(text.strip()) and not text.startswith(f"{name}(")


def test_every_module_says_what_it_is() -> None:
    files = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]
    silent = [
        str(path.relative_to(ROOT))
        for path in files
        if not path.read_text().lstrip().startswith(('"""', 'r"""'))
    ]
    assert not silent


def test_the_console_script_exists() -> None:
    scripts = project()["scripts"]
    assert isinstance(scripts, dict)
    module, _, function = scripts["zeroshard"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def inner_pytest(folder: Path, code: str, *words: str, what: str = "test_inner.py") -> str:
    """Runs pytest on some code under a copy of this suite's conftest, and returns what it printed."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    (folder / "test_inner.py").write_text(textwrap.dedent(code))
    config = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    arguments = [sys.executable, "-m", "pytest", *config, *words, str(folder / what)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.ranks
def test_a_process_that_is_left_behind_fails_its_test(tmp_path: Path) -> None:
    text = inner_pytest(
        tmp_path,
        """
        import pathlib, subprocess, sys, pytest
        sys.modules["conftest"]._PATIENCE = 0.5
        @pytest.mark.ranks
        def test_careless():
            child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; exit"], stdout=subprocess.PIPE)
            pathlib.Path(__file__).with_name("pid").write_bytes(child.stdout.readline())
            child.stdout.close()
            child.wait()
        """,
    )
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert "this test left processes behind: [" in text
    assert "sleep 600" in text
    assert "processes left over after all tests" in text


@pytest.mark.ranks
def test_fast_layers_come_first(tmp_path: Path) -> None:
    code = "import pytest\n" + "".join(
        f"@pytest.mark.{name}\ndef test_{name}(): assert True\n"
        for name in ("cuda", "ranks", "slow", "threads")
    )
    text = inner_pytest(tmp_path, code, "--collect-only", "-q", "--wide")
    assert re.findall(r"::test_(\w+)", text) == ["slow", "threads", "ranks", "cuda"]


@pytest.mark.ranks
def test_sessions_share_tests_out(tmp_path: Path) -> None:
    """What a session that comes later finds taken it leaves out, and runs the rest."""
    code = """
        import pytest
        def test_pure(): assert True
        @pytest.mark.ranks
        def test_one(): assert True
        @pytest.mark.ranks
        def test_two(): assert False
        """
    folder = tmp_path / "share"
    folder.mkdir()
    share = (f"--share={folder}",)  # with a space pytest would take the folder for what to run
    assert "1 failed, 1 passed, 1 deselected" in inner_pytest(tmp_path, code, "-m", "ranks", *share)
    assert re.search(r"=+ 1 passed in", inner_pytest(tmp_path, code, *share))
    assert "no tests ran" in inner_pytest(tmp_path, code, *share)
    told = [path.read_text().split() for path in folder.glob("*.seconds")]
    assert sorted(words[2:] for words in told) == [[], ["test_inner.py"], ["test_inner.py"]]


@pytest.mark.ranks
def test_sessions_are_forked_from_one_that_has_collected(tmp_path: Path) -> None:
    """The first is told of failures in the others, whose output is in logs; each case runs once."""
    code = """
        import os, pathlib, pytest
        pathlib.Path(__file__).with_name(f"collected-{os.getpid()}").touch()
        def test_pure(): assert False, "it ran in the second session"
        @pytest.mark.ranks
        def test_one():
            began = pathlib.Path(__file__).with_name("share") / "test_inner-pure"
            while not began.exists(): pass
        """
    folder = tmp_path / "share"
    folder.mkdir()
    text = inner_pytest(tmp_path, code, f"--share={folder}", "--sessions=3")
    assert len(list(tmp_path.glob("collected-*"))) == 1
    logs = {path.name: path.read_text() for path in folder.glob("*.log")}
    assert logs.keys() == {"session-1.log", "session-2.log"}
    assert "it ran in the second session" in logs["session-1.log"]
    told = "".join((text, *logs.values()))
    assert (len(re.findall("1 passed in", told)), len(re.findall("1 failed in", told))) == (1, 1)
    records = [line.split() for path in folder.glob("*.seconds") for line in path.read_text().splitlines()]
    assert [name for _, _, name in records] == ["test_inner.py"] * 2


@pytest.mark.ranks
def test_what_another_session_has_taken_may_lie_in_another_folder(tmp_path: Path) -> None:
    """Each folder that a session leaves out is left in good order for the next one."""
    share = tmp_path / "share"
    share.mkdir()
    for folder in "ab":
        (tmp_path / "all" / folder).mkdir(parents=True)
        for name in (f"{folder}_mine", f"{folder}_theirs"):
            (tmp_path / "all" / folder / f"test_{name}.py").write_text("def test_it(): assert True\n")
        (share / f"test_{folder}_theirs-pure").touch()
    text = inner_pytest(tmp_path, "", f"--share={share}", what="all")
    assert re.search(r"=+ 2 passed in", text), text


@pytest.mark.parametrize("wrong", ["check", "format"])
def test_lint_is_rules_and_format(wrong: str, tmp_path: Path) -> None:
    """Both are run, and either ends in failure."""
    found = re.search(
        r"^lint\(\) \{\n.*?^\}\n", (ROOT / "do").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found
    ruff = tmp_path / "bin" / "ruff"
    ruff.parent.mkdir()
    ruff.write_text(f'#!/bin/sh\necho "$@"\n[ "$1" != {wrong} ]\n')
    ruff.chmod(0o755)
    script = f"set -euo pipefail\nVENV={tmp_path}\n{found[0]}lint"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "check .\nformat --check .\n")


def test_chores_are_documented_where_they_are() -> None:
    """`./do help` prints every chore that the script knows."""
    script = (ROOT / "do").read_text(encoding="utf-8")
    known = set(re.findall(r"^    (?:(\w+)(?: \| (\w+))?)\)$", script, re.MULTILINE))
    names = {name for pair in known for name in pair if name}
    helped = subprocess.run([ROOT / "do", "help"], capture_output=True, text=True, check=True).stdout
    assert {"setup", "demo", "test", "lint", "types", "bench", "docs", "build", "fuzz", "clean"} <= names
    assert all(f"./do {name}" in helped for name in names - {"help"})
