"""What one rank writes to another over messages: a head of one size, with a label, the length of what is
told, and as much of that as fits. The rest follows."""

from __future__ import annotations

import struct

__all__ = ["LETTER", "head_of", "opened", "room_beside"]

LETTER = 1024  # bytes of a head
_LABEL = 400
_LENGTHS = struct.Struct("qq")


def head_of(label: str, payload: bytes) -> bytes:
    """What a letter begins with."""
    name = _name(label)
    head = _LENGTHS.pack(len(name), len(payload)) + name + payload[: room_beside(label)]
    return head.ljust(LETTER, b"\0")


def room_beside(label: str) -> int:
    """How many bytes of the payload the head has room for."""
    return LETTER - _LENGTHS.size - len(_name(label))


def opened(head: bytes) -> tuple[str, int, bytes]:
    """A letter's label, the length of its payload, and what of that came with the head."""
    length, total = _LENGTHS.unpack_from(head)
    body = head[_LENGTHS.size :]
    return body[:length].decode(errors="replace"), total, body[length:][:total]


def _name(label: str) -> bytes:
    return label.encode()[:_LABEL]
