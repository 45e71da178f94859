"""Decides in which tier every unit's optimizer state and parameters rest. Integers only.

`auto` fills the device first, then the host, then the disk. Parameters come before state: they are used in
every forward and backward, state once a step. Units come in forward order, because the updates of the first
units are the hardest to hide: their gradients land last, and their weights are needed first. A unit that
does not fit does not keep a smaller one behind it out, so nothing is offloaded that would have fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from zeroshard.errors import PlanError
from zeroshard.options import Tier
from zeroshard.sizes import show_apart, show_bytes

Rest = Literal["device", "host", "disk"]
RESTS: tuple[Rest, ...] = ("device", "host", "disk")  # nearest first


@dataclass(frozen=True)
class TierBytes:
    """How much something takes in each tier that it might rest in."""

    device: int
    host: int
    disk: int

    def at(self, rest: Rest) -> int:
        return {"device": self.device, "host": self.host, "disk": self.disk}[rest]


@dataclass(frozen=True)
class UnitDemand:
    """What one unit needs on one rank. `unit` is its label; `state` is master weights and moments,
    `parameters` the compute weights."""

    unit: str
    state: TierBytes
    parameters: TierBytes


@dataclass(frozen=True)
class TierBudget:
    """What one rank may take of each tier for parameters and state. None: any amount; 0: nothing."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    def at(self, rest: Rest) -> int | None:
        return {"device": self.device, "host": self.host, "disk": self.disk}[rest]


@dataclass(frozen=True)
class OffloadBuffers:
    """What offloading itself takes, as soon as one unit needs it.

    - `streaming`: device bytes that streamed parameters pass through.
    - `staging`: host bytes of the ring between device and host, where state is off the device.
    - `frames`: host bytes that state on the disk passes through; `blocks`: that parameters do.
    """

    streaming: int = 0
    staging: int = 0
    frames: int = 0
    blocks: int = 0

    def needed(self, places: Sequence[UnitPlacement]) -> dict[Rest, int]:
        streams = any(place.parameters != "device" for place in places)
        stages = any(place.optimizer != "device" for place in places)
        pages = any(place.optimizer == "disk" for place in places)
        reads = any(place.parameters == "disk" for place in places)
        return {
            "device": self.streaming * streams,
            "host": self.staging * stages + self.frames * pages + self.blocks * reads,
            "disk": 0,
        }


@dataclass(frozen=True)
class UnitPlacement:
    """Where one unit rests, and what it takes there: zero where the options name the tier, so that nothing
    was reckoned."""

    unit: str
    optimizer: Rest
    parameters: Rest
    state_bytes: int = 0
    parameter_bytes: int = 0


@dataclass(frozen=True)
class Placement:
    """Where every unit rests, in forward order, on one rank."""

    places: tuple[UnitPlacement, ...]

    @classmethod
    def uniform(cls, units: Sequence[str], optimizer: Rest, parameters: Rest = "device") -> Placement:
        return cls(tuple(UnitPlacement(unit, optimizer, parameters) for unit in units))

    @cached_property
    def _by_unit(self) -> dict[str, UnitPlacement]:
        return {place.unit: place for place in self.places}

    def __getitem__(self, unit: str) -> UnitPlacement:
        return self._by_unit[unit]

    def __iter__(self) -> Iterator[UnitPlacement]:
        return iter(self.places)

    def has(self, rest: Rest) -> bool:
        """Whether any state or parameter rests there."""
        return any(rest in (place.optimizer, place.parameters) for place in self.places)

    def line(self) -> str:
        """For example ``state: device 5 units, 1.2 GiB; disk 3 units, 2.0 GiB · parameters: …``"""
        told = []
        for what, tiers, sizes in (
            ("state", [p.optimizer for p in self.places], [p.state_bytes for p in self.places]),
            ("parameters", [p.parameters for p in self.places], [p.parameter_bytes for p in self.places]),
        ):
            parts = []
            for rest in RESTS:
                count = tiers.count(rest)
                if count:
                    size = sum(s for s, t in zip(sizes, tiers, strict=True) if t == rest)
                    weight = f", {show_bytes(size)}" if size else ""
                    parts.append(f"{rest} {count} unit{'s' * (count > 1)}{weight}")
            told.append(f"{what}: {'; '.join(parts)}")
        return " · ".join(told)

    def table(self) -> str:
        """One line for each run of neighbouring units that rest alike; with sizes, where those were
        reckoned."""
        rows = []
        for (optimizer, parameters), group in groupby(self.places, lambda p: (p.optimizer, p.parameters)):
            members = list(group)
            name = members[0].unit if len(members) == 1 else f"{members[0].unit} … {members[-1].unit}"
            state, weights = sum(p.state_bytes for p in members), sum(p.parameter_bytes for p in members)
            rows.append(
                (name, str(len(members)), parameters, show_bytes(weights), optimizer, show_bytes(state))
            )
        lines: list[tuple[str, ...]] = [("units", "", "parameters", "", "state", ""), *rows]
        if not any(place.state_bytes or place.parameter_bytes for place in self.places):
            lines = [(line[0], line[1], line[2], line[4]) for line in lines]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


@dataclass(frozen=True)
class TierRequest:
    """What was asked for: a tier by name, or ``auto``, and the tiers that may be used for each."""

    optimizer: Tier = "auto"
    parameters: Tier = "auto"
    parameter_rests: tuple[Rest, ...] = RESTS

    def rests(self, what: Literal["optimizer", "parameters"]) -> tuple[Rest, ...]:
        wanted: Tier = self.optimizer if what == "optimizer" else self.parameters
        if wanted != "auto":
            return (wanted,)
        return self.parameter_rests if what == "parameters" else RESTS


ANYWHERE, UNBUFFERED = TierRequest(), OffloadBuffers()


def arrange(
    demands: Sequence[UnitDemand],
    budget: TierBudget,
    request: TierRequest = ANYWHERE,
    buffering: OffloadBuffers = UNBUFFERED,
) -> Placement:
    """Give every unit its tiers. Raises `PlanError` where no tier has room.

    >>> units = [UnitDemand(f"blocks.{i}", TierBytes(12, 12, 12), TierBytes(2, 2, 2)) for i in range(3)]
    >>> arrange(units, TierBudget(device=20, host=12)).line()
    'state: device 1 unit, 12 B; host 1 unit, 12 B; disk 1 unit, 12 B · parameters: device 3 units, 6 B'
    """
    taken: dict[Rest, int] = dict.fromkeys(RESTS, 0)
    while True:  # what offloading takes is known when it is known who is offloaded: two or three rounds
        places = _filled(demands, budget, request, taken)
        needed = buffering.needed(places)
        if all(needed[rest] <= taken[rest] for rest in RESTS):
            return Placement(tuple(places))
        taken = {rest: max(taken[rest], needed[rest]) for rest in RESTS}


def _filled(
    demands: Sequence[UnitDemand], budget: TierBudget, request: TierRequest, taken: dict[Rest, int]
) -> list[UnitPlacement]:
    room: dict[Rest, int | None] = {}
    for rest in RESTS:
        limit = budget.at(rest)
        room[rest] = None if limit is None else limit - taken[rest]
    weights = [
        _settle(d.unit, "parameters", d.parameters, request.rests("parameters"), room) for d in demands
    ]
    places = []
    for demand, parameters in zip(demands, weights, strict=True):
        rests = request.rests("optimizer")
        if request.optimizer == "auto":  # state is never nearer than the weights that it is for
            rests = rests[RESTS.index(parameters) :]
        state = _settle(demand.unit, "optimizer state", demand.state, rests, room)
        places.append(
            UnitPlacement(
                demand.unit, state, parameters, demand.state.at(state), demand.parameters.at(parameters)
            )
        )
    return places


def _settle(
    unit: str, what: str, size: TierBytes, rests: Sequence[Rest], room: dict[Rest, int | None]
) -> Rest:
    """The nearest tier with room, which is then taken."""
    for rest in rests:
        left = room[rest]
        if left is None:
            return rest
        if size.at(rest) <= left:
            room[rest] = left - size.at(rest)
            return rest
    over = {rest: max(room[rest] or 0, 0) for rest in rests}
    left_over = ", ".join(f"{rest} {show_apart(n, size.at(rest))[0]}" for rest, n in over.items())
    further = {
        "device": "pass a larger device_bytes=, or let it rest further away",
        "host": "pass a larger host_bytes=, or path= of a disk",
        "disk": "pass path= of a disk with more room",
    }["host" if rests[-1] == "disk" and room["disk"] == 0 else rests[-1]]  # without a disk it has no room
    takes, _ = show_apart(size.at(rests[-1]), over[rests[-1]])
    raise PlanError(f"`{unit}` has {takes} of {what}, and what is left is {left_over}: {further}.")
