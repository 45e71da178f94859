"""How many steps a run has made: what all of its optimizers do with one backward is one step."""

from __future__ import annotations


class Steps:
    """Counts at the first optimizer that follows a backward, and at any that comes again without one."""

    def __init__(self) -> None:
        self.made = 0
        self._landed = True  # gradients have come that no optimizer has seen
        self._seen: set[int] = set()  # ids of optimizers: a closed run holds none

    def landed(self) -> None:
        self._landed = True

    def count(self, optimizer: object) -> None:
        if self._landed or id(optimizer) in self._seen:
            self.made += 1
            self._landed = False
            self._seen.clear()
        self._seen.add(id(optimizer))
