"""The command `zeroshard`. Each module of this package is a command, and its docstring is the help.

Such a module has `configure(parser)` and `run(arguments) -> int`, and imports nothing slow when it is
imported. A name that Python reserves takes an underscore: `import_.py` is `zeroshard import`. Names with a
leading underscore are no commands.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from zeroshard.extend import ZeroShardError

from ._parser import Parser

__all__ = ["Command", "commands", "main"]

_USAGE = 2


class Command(Protocol):
    """What a module of this package offers."""

    __doc__: str | None

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Does it, and returns the exit code."""


def commands() -> list[str]:
    """The names of all commands, which are those of the modules beside this one."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.rstrip("_") for name in names if not name.startswith("_"))


def load(name: str) -> Command:
    """The module of a command."""
    files = {module.name.rstrip("_"): module.name for module in pkgutil.iter_modules(__path__)}
    return cast(Command, importlib.import_module(f"{__name__}.{files[name]}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. The exit code is 2 where the command line makes no sense, 1 for an error of ours."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"zeroshard {version()}")
        return 0
    if words[0] not in commands():
        print(f"zeroshard: {unknown(words[0])}", file=sys.stderr)
        return _USAGE
    command = load(words[0])
    parser = Parser(
        f"zeroshard {words[0]}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.configure(parser)
    parser.refuse_unknown(words[1:])
    arguments = parser.parse_args(words[1:])
    try:
        return command.run(arguments)
    except ZeroShardError as error:
        print(f"zeroshard: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def overview() -> str:
    """All commands with the first sentence of their help."""
    lines = ["usage: zeroshard COMMAND …", ""]
    lines += [f"  {name:<10}{headline(load(name))}" for name in commands()]
    return "\n".join([*lines, "", "`zeroshard COMMAND --help` says more about one."])


def headline(command: Command) -> str:
    """The first line of a command's help."""
    return (command.__doc__ or "").strip().split("\n", 1)[0]


def unknown(word: str) -> str:
    """What to say about a first word that is no command."""
    if Path(word).suffix == ".py" and Path(word).exists():
        return f"{word!r} is a script; to start ranks of it: zeroshard run --ranks 2 {word}"
    close = difflib.get_close_matches(word, commands(), n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"there is no command {word!r}. {hint}Commands: {', '.join(commands())}"


def version() -> str:
    """The package's version."""
    import zeroshard

    return zeroshard.__version__
