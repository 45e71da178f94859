"""What the fields of an option may hold, by their annotations: one check for all of them. No torch."""

from __future__ import annotations

import os
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from zeroshard.errors import OptionError

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", NoneType: "None"}


def check_fields(record: object, name: str | None = None) -> None:
    """Raise unless each field whose annotation names plain types (bool, int, float, str, None) or literals
    holds one of them; what else there is has checks of its own. Call it where texts such as ``"25MiB"``
    have become what the annotation says. `name`: of the record in the message; empty: of the field alone.

    >>> from zeroshard.options import Offload
    >>> Offload(undo="no")
    Traceback (most recent call last):
    zeroshard.errors.OptionError: Offload(undo='no'): pass True or False.
    """
    kind: Any = type(record)
    name = kind.__name__ if name is None else name
    for field, allowed in _plain_fields(kind).items():
        value = getattr(record, field)
        if not any(_holds(value, one) for one in allowed):
            told = " or ".join(_WORDS[one] if isinstance(one, type) else repr(one) for one in allowed)
            shown = f"{name}({field}={value!r})" if name else f"{field}={value!r}"
            raise OptionError(f"{shown}: pass {told}.")


@cache
def _plain_fields(kind: Any) -> dict[str, tuple[Any, ...]]:
    """By field, the types and literals that it may hold, where these are all plain."""
    hints = get_type_hints(kind)
    found = {field.name: _alternatives(hints[field.name]) for field in fields(kind)}
    return {
        name: parts
        for name, parts in found.items()
        if all(one in _WORDS for one in parts if not isinstance(one, str))
    }


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, UnionType):
        return tuple(one for part in get_args(hint) for one in _alternatives(part))
    return get_args(hint) if get_origin(hint) is Literal else (hint,)


def _holds(value: object, allowed: Any) -> bool:
    if not isinstance(allowed, type):
        return isinstance(value, str) and value == allowed
    if isinstance(value, bool):
        return allowed is bool
    return isinstance(value, (int, float) if allowed is float else allowed)


def check_flag(value: object, what: str) -> None:
    """Raise unless an argument of a call is True or False: any text counts as true."""
    if not isinstance(value, bool):
        raise OptionError(f"{what}={value!r}: pass True or False.")


def path_text(value: Any, what: str) -> str:
    """A path as a text; anything that is none is an error that begins with `what`, the call or the option."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise OptionError(f'{what}: {value!r} is no path; pass a text such as "ckpt/1000" or a pathlib.Path.')
    return text
