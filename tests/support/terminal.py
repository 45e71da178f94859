"""A terminal as far as the display needs one."""

from __future__ import annotations

import io
import re


class Terminal(io.StringIO):
    """Understands what the display writes, and nothing else: lines on the screen, a cursor, a scrollback."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.top = self.row = self.column = 0  # `top`: first line of `lines` that is on the screen
        self.writes = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes += bool(text)
        for code, number, final, char in re.findall(r"(\x1b\[\??([\d;]*)([A-Za-z]))|([^\x1b])", text):
            if code:
                self._control(number, final)
            else:
                self._put(char)
        return len(text)

    def _control(self, number: str, final: str) -> None:
        if final == "A":
            assert int(number) <= self.row - self.top, "the cursor would leave the screen"
            self.row -= int(number)
        elif final == "H":
            self.row, self.column = self.top, 0
        elif final == "K":
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif final == "J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
        else:
            assert final in "mhl", f"unknown control {final}"

    def _put(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.lines):
                self.lines.append("")
            self.top = max(self.top, self.row - self.rows + 1)
        else:
            assert self.column < self.columns, "a line is wider than the terminal"
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
            self.column += 1
