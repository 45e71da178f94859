"""The command line: one registry, clear refusals, and an answer at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard import cli
from zeroshard.cli import run as run_command

SRC = Path(__file__).parents[2] / "src"


def test_every_module_beside_it_is_a_command() -> None:
    assert "run" in cli.commands()
    for name in cli.commands():
        command = cli.load(name)
        assert cli.headline(command).endswith("."), (
            f"the docstring of `zeroshard {name}` must open with a sentence"
        )
        assert callable(command.configure)
        assert callable(command.run)


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_the_overview_lists_all(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.commands())
    assert cli.headline(run_command) in text


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zeroshard {cli.version()}\n"


def test_a_typing_error_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rnu"]) == 2
    assert "there is no command 'rnu'. Did you mean 'run'? Commands: " in capsys.readouterr().err
    assert cli.main(["qqqq"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_a_script_in_place_of_a_command_gets_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert cli.main(["train.py"]) == 2
    assert "to start ranks of it: zeroshard run --ranks 2 train.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--ranks", "2", "missing.py"], "OptionError: there is no script 'missing.py' in "),
        (["run", "--ranks", "0", "missing.py"], "OptionError: --ranks must be at least 1, not 0"),
        (["run", "--ranks=-1", "x.py", "--lr"], "OptionError: --ranks must be at least 1, not -1"),
        (["verify", "--", "--missing"], "CheckpointError: "),
    ],
)
def test_errors_of_ours_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 1
    text = capsys.readouterr().err
    assert text.startswith(f"zeroshard: {message}")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("run", "the following arguments are required: --ranks, target."),
        ("run --ranks 2", "the following arguments are required: target."),
        ("run x.py --lr 3", "the following arguments are required: --ranks."),  # that is the script's
        ("run --rank 2 x.py", "there is no option --rank. Did you mean --ranks?"),
        ("run --ranks 2 --tiemout=3 x.py", "there is no option --tiemout. Did you mean --timeout?"),
        ("run -q x.py", "there is no option -q."),
        ("run --ranks --rank x.py", "argument --ranks: expected one argument."),
        ("plan --rank 2", "there is no option --rank. Did you mean --ranks?"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_in_one_line(
    typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(typed.split())
    assert stop.value.code == 2
    name = f"zeroshard {typed.split()[0]}"
    assert capsys.readouterr().err == f"{name}: {message} `{name} --help` says more.\n"


@pytest.mark.ranks
def test_the_command_line_needs_no_torch() -> None:
    """`zeroshard --help` answers at once: torch takes a second to import, so commands do it when they run."""
    code = (
        "import contextlib, io, sys\n"
        "from zeroshard.cli import commands, main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as said:\n"
        "    main(['--help']), main(['--version'])\n"
        "    for command in commands():\n"
        "        with contextlib.suppress(SystemExit):\n"
        "            main([command, '--help'])\n"
        "assert said.getvalue().count('usage:') == 1 + len(commands())\n"
        "import zeroshard.launch.launcher, zeroshard.launch.join\n"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert in_a_fresh_process(code) == "[]\n"


@pytest.mark.ranks
def test_public_names_come_at_their_first_use_and_stay() -> None:
    """Also where a module of the same name deeper inside was imported before."""
    code = (
        "import types, zeroshard, zeroshard.planner.plan, zeroshard.params.sharded_param\n"
        "from zeroshard.api import Run\n"
        "from zeroshard import *\n"
        "assert zeroshard.Run is Run and zeroshard.checkpoint.latest is latest\n"
        "assert callable(plan) and plan is zeroshard.plan and callable(shard) and shard is zeroshard.shard\n"
        "assert set(zeroshard.__all__) <= set(globals())\n"
        "shown = {name for name in dir(zeroshard) if not name.startswith('__')}\n"
        "assert shown == set(zeroshard.__all__), shown\n"
        "assert {'__doc__', '__file__', '__version__'} <= set(dir(zeroshard))\n"
        "assert not [n for n in zeroshard.__all__ if isinstance(getattr(zeroshard, n), types.ModuleType)]\n"
        "try:\n    zeroshard.shrad\n"
        "except AttributeError as error:\n    print(error)"
    )
    assert in_a_fresh_process(code) == "module 'zeroshard' has no attribute 'shrad'\n"


def in_a_fresh_process(code: str) -> str:
    """What it prints."""
    environ = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environ, check=False
    )
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_python_dash_m_is_the_same_command() -> None:
    environ = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-m", "zeroshard", "--version"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environ,
    )
    assert (done.returncode, done.stdout) == (0, f"zeroshard {cli.version()}\n")
