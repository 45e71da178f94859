"""Chooses the address at which a rank listens: loopback where all ranks are on one host, else one that the
others can reach.

Gloo takes what the host's own name means, which is the network's address on one host and loopback on many
(Debian writes ``127.0.1.1`` into `/etc/hosts`). The route to `MASTER_ADDR` is the one that the launcher
has proved: this rank came to the store over it. A rank for which that is loopback, as rank 0 where the name
is its own, takes the route to a peer that has another. Then every rank tries to reach some of the others, and
all learn what came of it: gloo would wait for half an hour."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from zeroshard.errors import RankError

from .rendezvous import Rendezvous

VARIABLE = "GLOO_SOCKET_IFNAME"
REACH = 10.0  # seconds for a connection to a peer
_LOOPBACKS = ("127.0.0.1", "::1")
# Reserved for documentation: what leads there leads to the world. Nothing is sent.
_AFAR = ("192.0.2.1", "2001:db8::1")
_said: str | None = None  # what `say_to_torch` wrote into the environment


def settle(meeting: Rendezvous) -> str | None:
    """The address of this rank, which the others can reach, or None where nothing is known of this host's.
    Collective; raises the same RankError on all ranks."""
    named = _named_interface()
    addresses = [address for name, address in interfaces() if name == named]
    route = addresses[0] if addresses else own_address(os.environ.get("MASTER_ADDR", ""))
    trouble = None
    if named is not None and not addresses and any(True for _ in interfaces()):
        trouble = f"has no interface {named!r} with an address, which {VARIABLE} names"
    told: list[Any] = meeting.share("where", [socket.gethostname(), _machine(), route, trouble])
    _refuse(told, [item[3] for item in told])
    routes = {rank: cast("str | None", item[2]) for rank, item in enumerate(told)}
    if len({item[1] for item in told}) == 1:
        return route if named is not None else next(filter(_binds, _LOOPBACKS), None)
    mine = route if named is not None or not _is_loop(route) else _towards(meeting.rank, told, routes)
    return _tried(meeting, told, mine)


def say_to_torch(address: str | None) -> None:
    """Groups that torch makes from now on, for gloo, listen on the interface with this address. What the user
    has said stays."""
    global _said
    if address is None or _named_interface() is not None:
        return
    found = next((name for name, held in interfaces() if held == address), None)
    if found is not None:
        os.environ[VARIABLE] = _said = found


def own_address(name: str) -> str | None:
    """This host's end of the route to a host: one of the network, if any of the host's addresses is."""
    found = []
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, place in socket.getaddrinfo(name or None, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # of a datagram: only the route is looked up
                found.append(str(probe.getsockname()[0]))
    return next((address for address in found if not _is_loop(address)), found[0] if found else None)


def interfaces() -> Iterator[tuple[str, str]]:
    """Interfaces of this host and their addresses, in the kernel's order. Nothing where libc has no list of
    the form that Linux has."""
    libc = ctypes.CDLL(None)
    head = ctypes.POINTER(_Interface)()
    if not os.path.isdir("/proc/self") or libc.getifaddrs(ctypes.byref(head)) != 0:
        return
    try:
        at = head
        while at:
            address = _text_of(at.contents.address)
            if address is not None:
                yield cast(bytes, at.contents.name).decode(), address
            at = at.contents.next
    finally:
        libc.freeifaddrs(head)


class _Interface(ctypes.Structure):
    """`struct ifaddrs` as far as it is read."""


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _text_of(sockaddr: int | None) -> str | None:
    if not sockaddr:
        return None
    family = ctypes.c_ushort.from_address(sockaddr).value
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 8, 16))
    return None


def _named_interface() -> str | None:
    """The first that the user has named for gloo."""
    named = os.environ.get(VARIABLE)
    return named.partition(",")[0] if named and named != _said else None


def _machine() -> str:
    """What ranks have in common that reach one another over loopback."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _is_loop(address: str | None) -> bool:
    return address is None or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _binds(address: str) -> bool:
    with suppress(OSError), _listening(address):
        return True
    return False


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=128)


def _towards(rank: int, told: Sequence[Any], routes: dict[int, str | None]) -> str | None:
    """The address that the peers of other hosts are most likely to reach."""
    others = [r for r, item in enumerate(told) if item[1] != told[rank][1]]
    ways = [routes[other] for other in others if not _is_loop(routes[other])] or list(_AFAR)
    found = map(own_address, cast("list[str]", ways))
    return next((address for address in found if not _is_loop(address)), None)


def _tried(meeting: Rendezvous, told: Sequence[Any], address: str | None) -> str:
    """The address, once every rank has been reached by some of the others."""
    trouble, listener = None, None
    try:
        if address is None:
            raise OSError(f"only loopback leads to MASTER_ADDR ({os.environ.get('MASTER_ADDR', 'not set')})")
        listener = _listening(address)
    except OSError as error:
        trouble = f"has no address by which the other hosts can reach it: {error}"
    port = listener.getsockname()[1] if listener is not None else 0
    try:
        places: list[Any] = meeting.share("listens", [address, port, trouble])
        _refuse(told, [item[2] for item in places])
        missed = next(filter(None, (_miss(r, told, places) for r in _some(meeting.rank, told))), None)
        _refuse(told, cast("list[str | None]", meeting.share("reached", missed)))
    finally:
        if listener is not None:
            listener.close()
    return cast(str, address)


def _some(rank: int, told: Sequence[Any]) -> list[int]:
    """Ranks of other hosts that are 1, 2, 4, … places on: all are tried by some, and none by many."""
    size = len(told)
    near = [(rank + (1 << n)) % size for n in range((size - 1).bit_length())]
    return [other for other in near if told[other][1] != told[rank][1]]


def _miss(peer: int, told: Sequence[Any], places: Sequence[Any]) -> str | None:
    """Why a peer cannot be reached, if it cannot."""
    address, port, _ = places[peer]
    try:
        socket.create_connection((address, port), REACH).close()
    except OSError as error:
        why = error.strerror or error
        return f"cannot reach rank {peer} on {told[peer][0]} at {address}: {why} (port {port})"
    return None


def _refuse(told: Sequence[Any], troubles: Sequence[str | None]) -> None:
    """The first trouble, on all ranks."""
    for rank, trouble in enumerate(troubles):
        if trouble is not None:
            places = "; ".join(f"rank {r} is on {item[0]} ({item[2]})" for r, item in enumerate(told[:8]))
            raise RankError(
                f"rank {rank} on {told[rank][0]} {trouble}. Set {VARIABLE} on every host to the interface "
                f"that leads to the other hosts (see `ip address`). By the route to MASTER_ADDR, {places}"
            )
