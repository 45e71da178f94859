"""Parses command lines. One that makes no sense is answered in one line, which names what is wrong."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argparse parser that names a mistyped option before one that is missing because of that."""

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """An option that the command does not have ends the program, with the nearest one that it does."""
        for word in self._options_among(words):
            if word not in self._option_string_actions:
                names = {name.lstrip("-"): name for name in self._option_string_actions}
                close = difflib.get_close_matches(word.lstrip("-"), names, n=1)
                hint = f" Did you mean {names[close[0]]}?" if close else ""
                self.error(f"there is no option {word}.{hint}")

    def _options_among(self, words: Sequence[str]) -> list[str]:
        """The options that were typed: no values of others, and nothing that is passed on to a script."""
        passes_on = any(action.nargs == argparse.REMAINDER for action in self._actions)
        found, rest = [], iter(words)
        for word in rest:
            if word == "--" or (passes_on and not word.startswith("-")):
                break
            if word.startswith("-") and not word[1:2].isdigit():
                name, joined, _ = word.partition("=")
                found.append(name)
                action = self._option_string_actions.get(name)
                if action is not None and action.nargs is None and not joined:
                    next(rest, None)  # its value
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, f"{self.prog}: {message}{'' if message[-1] in '.?' else '.'} `{self.prog} --help` says more.\n"
        )
