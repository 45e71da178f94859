"""Counts what is written into sharded parameters, by whatever name, and tells who has to know before."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeroshard.errors import StateError


class WriteVersions:
    """What is written into the sharded DTensors that hold this one, by whatever name: sharded parameters,
    and views of them."""

    def __init__(self) -> None:
        self.count = 0
        self.settings = 0  # how often `requires_grad` was set, or a hook registered
        self.before: Callable[[bool], None] | None = None  # told whether it is the first since `looked`
        self.before_reads: Callable[[], None] | None = None
        self.touched: set[int] = set()  # where the rows lie that were written since `looked`
        self._begun = False

    def ask(self, before: Callable[[bool], None], before_reads: Callable[[], None]) -> None:
        """Call these from now on before somebody writes, or computes with the values."""
        self.before, self.before_reads = before, before_reads

    def coming(self, rows: torch.Tensor) -> None:
        """Somebody is about to write. Peers may still read the rows in place."""
        if self.before is not None:
            self.before(not self._begun)
        self._begun = True
        self.count += 1
        self.touched.add(place_of(rows))

    def read(self) -> None:
        """Somebody is about to compute with the values."""
        if self.before_reads is not None:
            self.before_reads()

    def looked(self) -> int:
        self._begun = False
        self.touched.clear()
        return self.count


def place_of(rows: torch.Tensor) -> int:
    """The same for rows and for all views of them: each sharded parameter has a storage of its own."""
    return rows.untyped_storage().data_ptr()


class CopiedView(WriteVersions):
    """The versions of rows by number (`p[0]`), which look like a view and are a copy: writing them raises."""

    def ask(self, before: Callable[[bool], None], before_reads: Callable[[], None]) -> None:
        """Call these from now on before somebody writes, or computes with the values."""
        self.before, self.before_reads = before, before_reads

    def coming(self, rows: torch.Tensor) -> None:
        raise StateError(
            "rows of a sharded parameter or gradient cannot be written by number (p[i].zero_()): they are on "
            "several ranks, and p[i] is a copy. Write parameters inside `with run.gathered(write=True):` and "
            "gradients as a whole: p.grad = p.grad * mask."
        )


COPY = CopiedView()
