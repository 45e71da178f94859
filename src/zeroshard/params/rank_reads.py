"""Compares what ranks read off sharded tensors, before torch communicates.

A norm, `full_tensor()` or a clipped gradient is a collective of torch, which pairs what ranks ask for by its
order alone: two ranks that read the norms of different parameters would both get a mixture of the two, and
one that clips while another gathers would hang. So before torch's collective the ranks tell one another over
their transport what it is for, once for each call. There, too, a rank that does not come is noticed as ever.

Whether a call communicates is torch's own affair. Where that does not follow from how the tensors lie, it is
known when torch begins to; to listen for that costs some 0.1 ms, and more for lists of thousands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol
from weakref import ref
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = {"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"}
_NO_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group"}
_WORDS = {
    "linalg_vector_norm": "norm",
    "_foreach_norm": "norm",
    "_amp_foreach_non_finite_check_and_unscale_": "unscale_",
    "_local_scalar_dense": "item",
}
_MOST = 1 << 16  # names that are kept of one tensor: a loop may add to it for ever
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

# Of tensors, as messages have them; or the name of one parameter, of which there are thousands.
Names = tuple[str, ...] | str | Callable[[], tuple[str, ...]]


class ComparesRanks(Protocol):
    """A transport."""

    def compare(self, what: str, place: str) -> None: ...


class ReadSubject:
    """What a tensor that the user holds is about: the rows that it was made of, and `made`, how, while ranks
    still hold parts of its values. What else was computed is not in it: ranks may differ in that."""

    __slots__ = ("_left", "_names", "made", "readings")

    def __init__(self, readings: RankReads, names: Names, made: str = "") -> None:
        self.readings, self.made, self._names = readings, made, names
        self._left: dict[str, ReadSubject] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of all rows. Empty if there are some among them that this library does not know."""
        if isinstance(self._names, str):
            return (f"`{self._names}`",)
        if not isinstance(self._names, tuple):
            self._names = self._names()
        return self._names

    def by(self, word: str) -> ReadSubject:
        """As it is left pending by an operation. Made once: there may be thousands in one call."""
        if self.made:
            return self
        if self._left is None:
            self._left = {}
        found = self._left.get(word)
        if found is None:
            found = self._left[word] = ReadSubject(self.readings, self.names, word)
        return found

    def text(self, word: str) -> str:
        """What is asked for by an operation; empty if that has no name."""
        if not self.names:
            return ""
        first, *rest = self.names
        listed = first
        if rest:
            digest = crc32("\n".join(self.names).encode())
            listed = f"{first} … {rest[-1]} ({len(self.names)} tensors, {digest:08x})"
        return f"{self.made or word} of {listed}"


def joined(subjects: Sequence[ReadSubject | None]) -> ReadSubject | None:
    """Of several tensors. Their names are put together when somebody asks for them."""
    known = [subject for subject in subjects if subject is not None]
    if not known:
        return None
    for subject in known:
        if not isinstance(subject._names, tuple):
            subject.names  # noqa: B018 (or a loop that adds to a list would make a chain without end)
    return ReadSubject(known[0].readings, partial(_all_names, subjects), known[0].made)


def _all_names(subjects: Sequence[ReadSubject | None]) -> tuple[str, ...]:
    each = [() if subject is None else subject.names for subject in subjects]
    names = tuple(chain.from_iterable(each))
    return names if all(each) and len(names) <= _MOST else ()


@cache
def word_for(func: Any) -> str:
    """An operation's name in messages."""
    name: str = func._schema.name.partition("::")[2]
    return _WORDS.get(name, name.removeprefix("_foreach_"))


class RankReads:
    """The reads of one run."""

    def __init__(self, transport: ComparesRanks | None = None) -> None:
        # Weak: sharded parameters hold this, and may outlive the run.
        self._transport = None if transport is None else ref(transport)

    def compare(self, subject: ReadSubject, word: str) -> None:
        """Torch is about to communicate."""
        transport = None if self._transport is None else self._transport()
        if transport is not None:
            transport.compare(subject.text(word), _place())

    def heeded(self, subject: ReadSubject, word: str) -> AbstractContextManager[object]:
        """Compare if torch communicates inside."""
        return nullcontext() if self._transport is None else _ReadMode(partial(self.compare, subject, word))

    def close(self) -> None:
        """The run has ended: what is read from now on is torch's own affair."""
        self._transport = None


class _ReadMode(TorchDispatchMode):
    """Sees what torch does to plain tensors, collectives among it, before it is done."""

    supports_higher_order_operators = True

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: Callable[[], None] | None = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then this sees what it is made of
        if self._before is not None and _communicates(func):
            before, self._before = self._before, None
            before()
        return func(*args, **(kwargs or {}))


def _communicates(func: Any) -> bool:
    if getattr(func, "namespace", "") not in _NAMESPACES:
        return False
    return func._schema.name.partition("::")[2] not in _NO_COLLECTIVES


def _place() -> str:
    """Where the user's program asks for it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def number_in(dtensor: torch.Tensor) -> Any:
    """The element of a tensor with one. `torch.tensor([norm, ...])` asks for it with Python's dispatch
    switched off, and a DTensor has no memory behind it that could be read instead."""
    off = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        off = off.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off):
        return dtensor.item()
