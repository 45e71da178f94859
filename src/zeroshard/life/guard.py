"""What a background save may still be reading when training is about to change it.

State has owners, which change it at moments of their own: a host update during backward, a codec when it
encodes. An owner waits for the copy of what is its own alone, and that is copied next. What has no owner is
changed by `optimizer.step()` only.
"""

from __future__ import annotations

from typing import Protocol


class Reader(Protocol):
    """Copies state beside training."""

    def copied(self) -> None:
        """Return once it has copied everything."""

    def copied_of(self, owner: Guarded | None) -> None:
        """Return once it has copied what `owner` changes; None: what has no owner."""


class Guarded:
    """An owner of state that goes into checkpoints."""

    _reader: Reader | None = None

    def read_by(self, reader: Reader) -> None:
        """Begins to be read."""
        self._reader = reader

    def let_read(self) -> Reader | None:
        """Who has to be waited for before the next change; asked once."""
        reader, self._reader = self._reader, None
        return reader

    def before_change(self) -> None:
        """Wait for whoever still reads it. Its owner calls this before it changes anything."""
        reader = self.let_read()
        if reader is not None:
            reader.copied_of(self)
