"""Bytes as people write and read them. No torch in this file."""

from __future__ import annotations

import re

from zeroshard.errors import OptionError

_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?b?)\s*", re.IGNORECASE)
_SCALE = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(value: int | str, what: str) -> int:
    """A number of bytes from an int or a text.

    >>> parse_bytes("25MiB", "bucket_bytes")
    26214400
    """
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        match = _BYTES.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise OptionError(
                f'{what}={value!r} is not a size. Write bytes as an int, or a text such as "25MiB" or '
                '"1.5GB".'
            )
        number = int(float(match[1]) * _SCALE[match[2].lower().removesuffix("b")])
    if number <= 0:
        raise OptionError(f"{what}={value!r} must be more than zero bytes.")
    return number


def show_bytes(number: float) -> str:
    """Bytes for people: ``'25.0 MiB'``."""
    scale, unit = _unit(number)
    return f"{number / scale:.{0 if scale == 1 else 1}f} {unit}"


def show_apart(number: int, other: int) -> tuple[str, str]:
    """Two sizes that a message compares, with as many digits as it takes to tell them apart.

    >>> show_apart(2**30, 2**30 + 9 * 2**20)
    ('1.00 GiB', '1.01 GiB')
    """
    scale, unit = _unit(max(number, other))
    for digits in range(1, 5):
        texts = f"{number / scale:.{digits}f}", f"{other / scale:.{digits}f}"
        if number == other or (texts[0] != texts[1] and digits == 1):
            return show_bytes(number), show_bytes(other)
        if texts[0] != texts[1]:
            return f"{texts[0]} {unit}", f"{texts[1]} {unit}"
    return f"{number:,} bytes", f"{other:,} bytes"


def _unit(number: float) -> tuple[int, str]:
    """The unit that a size is shown in."""
    power = 0
    while abs(number) >= 1024**power * 1023.95 and power < 4:
        power += 1
    return 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def show_seconds(seconds: float) -> str:
    """
    >>> show_seconds(0.01234), show_seconds(4518.2)
    ('0.0123 s', '4,518 s')
    """
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:.3g} s"
