"""`Plan`: a frozen answer to "will it fit, and how?". Complete, printable, JSON both ways, comparable. No
torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from rich.console import Console, Group
from rich.table import Table

from zeroshard.codec import from_settings
from zeroshard.config import Numerics, Options, Stage
from zeroshard.count.lending import Visit
from zeroshard.count.placement import Place, Placement
from zeroshard.errors import OptionError, PlanError
from zeroshard.fields import path_text
from zeroshard.sizes import show_apart, show_bytes, show_seconds

from .frozen import freeze

FORMAT = 2
Placing = Literal["device", "some on host", "state on host", "all on host", "some on disk", "state on disk"]
PLACINGS: tuple[Placing, ...] = get_args(Placing)
NAMES = 24  # the width that the table leaves for the names of plans
FILE_WIDTH = 160  # room for all of its columns


@dataclass(frozen=True)
class Candidate:
    """One way to run, and what it costs a rank.

    - `recompute`: how many units are recomputed, of `units`. `lean`: small buckets, nothing gathered ahead.
    - `device`: bytes at the fullest moment, which is `where`, made of `kinds`. `host`, `disk`: bytes of one
      rank there. `lasting`: what a run books, by the kinds of `run.stats()`.
    - `sent`: bytes that a rank sends in a step, by kind; `between`: of those, to other nodes.
      `seconds`: an estimate of the step's parts; `step`: of the whole.
    - `settings`: the options of `shard`, all of them, as plain data. `places`: where every unit rests (the
      fields of a `Place`), where that is decided unit by unit.
    """

    stage: Stage
    placing: Placing
    precision: str
    recompute: int
    units: int
    lean: bool
    device: int
    where: str
    kinds: dict[str, int]
    host: int
    sent: dict[str, int]
    seconds: dict[str, float]
    step: float
    fits: bool
    settings: dict[str, Any]
    lasting: dict[str, int] = field(default_factory=dict)
    disk: int = 0
    numerics: Numerics = "exact"
    places: Sequence[Sequence[Any]] = ()
    between: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self, "kinds", "sent", "seconds", "settings", "lasting", "places", "between")

    @property
    def placement(self) -> Placement | None:
        """Where every unit rests, where that is decided unit by unit."""
        return Placement(tuple(Place(*place) for place in self.places)) if self.places else None

    @property
    def label(self) -> str:
        words = [f"stage {self.stage}"]
        if self.placing != "device":
            words.append(self.placing)
        if self.recompute:
            some = "" if self.recompute == self.units else f" {self.recompute} of {self.units}"
            words.append(f"recompute{some}")
        if self.lean:
            words.append("lean")
        if self.precision:
            words.append(self.precision)
        return ", ".join(words)

    @property
    def moving_parts(self) -> int:
        """What can go wrong: fewer is better where two are equally fast."""
        placing = {"device": 0, "state on host": 2, "some on host": 3, "all on host": 4}.get(self.placing, 5)
        return self.stage + placing + bool(self.recompute) + self.lean

    @property
    def family(self) -> tuple[Any, ...]:
        """What it has in common with others that differ in how they save memory only."""
        return self.stage, self.placing, self.precision


@dataclass(frozen=True)
class Plan:
    """What was asked, what was chosen and why, and everything that was considered.

    `zs.shard(model, optimizer, plan=plan)` carries it out, or says why it cannot.

    - `weights`: every parameter's shape and dtype; `optimizer`: the rule of every parameter group;
      `batch`: shapes of the example inputs. What a run must have in common with the plan.
    - `unused`: trainable parameters that the traced step gave no gradient; no state is planned for them.
    - `visits`: how the traced step goes through the units, where it is not one after the other.
    - `shared`: the limit is for device and host tier together, which are one memory on the CPU.
    """

    model: str
    parameters: int
    ranks: int
    ranks_per_node: int
    limit: int
    host_limit: int | None
    disk_limit: int | None
    machine: str
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...] = ()
    imbalance: float = 0.0
    shared: bool = False
    weights: dict[str, str] = field(default_factory=dict)
    optimizer: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    visits: tuple[Visit, ...] = ()
    format: int = field(default=FORMAT, compare=False)

    def __post_init__(self) -> None:
        freeze(self, "weights")

    def options(self) -> dict[str, Any]:
        """The options of `shard` that carry the plan out."""
        return options_of(self.chosen)

    # ------------------------------------------------------------------ JSON

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise PlanError(
                    f"this plan has format {data['format']}, and this ZeroShard reads {FORMAT}: plan again."
                )
            data["chosen"] = Candidate(**data["chosen"])
            data["candidates"] = tuple(Candidate(**candidate) for candidate in data["candidates"])
            data["visits"] = tuple(
                Visit(**(one | {"needs": tuple(one["needs"])})) for one in data.get("visits", ())
            )
            for name in ("reasons", "optimizer", "batch", "unused"):
                data[name] = tuple(data.get(name, ()))
            return cls(**data)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"this is not a plan: {type(error).__name__}: {error}. `zeroshard plan … --json` writes one."
            ) from error

    def write(self, path: str | Path) -> None:
        Path(path_text(path, "Plan.write(path)")).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        path = path_text(path, "Plan.read(path)")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"the plan {path} cannot be read: {error.strerror}.") from error
        return cls.from_json(text)

    def diff(self, other: Plan) -> list[str]:
        """One line for every field that differs, deepest name first: ``chosen.stage: 2 → 3``. The other
        candidates are left out."""
        if not isinstance(other, Plan):
            raise OptionError(f"Plan.diff() takes a zs.Plan, not {type(other).__name__}.")
        mine, theirs = asdict(self), asdict(other)
        for data in (mine, theirs):
            del data["candidates"]
        return differences("", mine, theirs)

    # ------------------------------------------------------------------ for people

    def show(self, console: Console | None = None, every: bool = True) -> None:
        """Print the candidates, the choice and its reasons. `every=False`: of ways that differ in how they
        save memory only, the best one."""
        wide = None if sys.stdout.isatty() else FILE_WIDTH  # a file has no width of its own
        console = console or Console(highlight=False, width=wide)
        console.print(self._text(console.width, self.candidates if every else self._best()))

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=FILE_WIDTH, highlight=False)
        self.show(console)
        text = console.file
        assert isinstance(text, StringIO)
        return text.getvalue()

    def _best(self) -> list[Candidate]:
        """Of each family the fastest that fits, or the smallest; and the choice."""
        best: dict[tuple[Any, ...], Candidate] = {}
        for one in self.candidates:
            best[one.family] = min(
                one,
                best.get(one.family, one),
                key=lambda c: (c != self.chosen, not c.fits, c.step if c.fits else c.device),
            )
        return list(best.values())

    @property
    def title(self) -> str:
        limits = f"{show_bytes(self.limit)} per {'rank' if self.shared else 'device'}"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks:,} ranks"
        if self.host_limit is not None:
            limits += f", {show_bytes(self.host_limit)} of host memory per node"
        if self.disk_limit is not None:
            limits += f", {show_bytes(self.disk_limit)} of disk per node"
        return f"{self.model}: {self.parameters:,} parameters on {ranks} ({self.machine}), {limits}"

    def _text(self, width: int, shown: tuple[Candidate, ...] | list[Candidate]) -> Group:
        table = Table(title=self.title, title_justify="left", pad_edge=False)
        columns = self._columns(shown)
        # What tells least goes first, until there is room for the names of the plans.
        for name in ("numerics", "fullest at", "to other nodes", "sent"):
            taken = sum(max(len(name), *map(len, cells)) + 3 for name, cells in columns.items())
            if taken + NAMES > width:
                columns.pop(name, None)
        table.add_column("plan", justify="left")
        for name in columns:
            left = name in ("fits", "fullest at", "numerics")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for number, one in enumerate(shown):
            cells = (each[number] for each in columns.values())
            table.add_row(one.label, *cells, style="bold" if one == self.chosen else "")
        resting = [self.chosen.placement.line()] if self.chosen.placement is not None else []
        return Group(table, f"{self.chosen.label}: {made_of(self.chosen.kinds)}", *resting, *self.reasons)

    def _columns(self, shown: tuple[Candidate, ...] | list[Candidate]) -> dict[str, list[str]]:
        """All that the table has of each candidate beside its name. What no candidate has is left out."""
        disk, nodes = any(one.disk for one in shown), any(any(one.between.values()) for one in shown)
        return {
            "fits": ["chosen" if one == self.chosen else "yes" if one.fits else "no" for one in shown],
            "device": [show_apart(one.device, self.limit)[0] for one in shown],
            "host": [show_bytes(one.host) for one in shown],
            **({"disk": [show_bytes(one.disk) for one in shown]} if disk else {}),
            "sent": [show_bytes(sum(one.sent.values())) for one in shown],
            **({"to other nodes": [show_bytes(sum(one.between.values())) for one in shown]} if nodes else {}),
            "step, est.": [show_seconds(one.step) if one.step else "–" for one in shown],
            "fullest at": [one.where for one in shown],
            "numerics": [one.numerics for one in shown],
        }


def made_of(kinds: Mapping[str, int], least: int = 1) -> str:
    """``activations 1.2 GiB, gathered 300.0 MiB``, the largest first."""
    ordered = sorted(kinds.items(), key=lambda kind: -kind[1])
    return ", ".join(f"{kind} {show_bytes(size)}" for kind, size in ordered if size >= least)


# ---------------------------------------------------------------------- options as plain data


def to_plain(value: Any) -> Any:
    """An option as JSON knows it. Records carry their type's name, so that a union of types comes back as
    the right one; infinity is no number of JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {
            f.name: to_plain(getattr(value, f.name)) for f in fields(value)
        }
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return {"type": "float", "value": str(value)}
    return value


# Fields that records had in earlier plans, and that had one value only.
_GONE = {"Delayed": ("steps",)}


def from_plain(value: Any) -> Any:
    """The other way."""
    if isinstance(value, list | tuple):
        return tuple(from_plain(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    gone = ("type", *_GONE.get(str(kind), ()))
    made = {name: from_plain(item) for name, item in value.items() if name not in gone}
    if kind == "float":
        return float(made["value"])
    found = records().get(str(kind))
    if found is not None:
        return found(**made)
    try:
        return from_settings({"kind": kind, **made})
    except OptionError as error:
        raise PlanError(
            f"this plan has an option of type {kind!r}, which this ZeroShard does not know: {error}"
        ) from error


@cache
def records() -> dict[str, Any]:
    """Every type of record that stands somewhere in `Options`, by name, found from its annotations: an
    option that is added later is carried without a word here."""
    found: dict[str, Any] = {}
    left: list[Any] = [*get_type_hints(Options).values()]
    while left:
        hint = left.pop()
        left += get_args(hint)
        if is_dataclass(hint) and isinstance(hint, type) and hint.__name__ not in found:
            found[hint.__name__] = hint
            left += get_type_hints(hint).values()
    return found


def options_of(one: Candidate) -> dict[str, Any]:
    """The options of `shard` that carry a candidate out."""
    known = {f.name for f in fields(Options)}
    unknown = [name for name in one.settings if name not in known]
    if unknown:
        raise PlanError(
            f"this plan has an option {unknown[0]!r}, which this ZeroShard does not know: plan again, or "
            "install the version that made it."
        )
    return {name: from_plain(value) for name, value in one.settings.items()}


def settings_text(one: Candidate) -> str:
    """A candidate as a call of `shard`, with what differs from the defaults, to be copied."""
    given = _differing(Options(**options_of(one)))
    if not any(text.startswith("stage=") for text in given):
        given.insert(0, f"stage={one.stage}")
    lines = "".join(f"    {text},\n" for text in ("model", "optimizer", *given))
    return f"run = zs.shard(\n{lines})"


def _differing(record: Any) -> list[str]:
    """``name=value`` for every field that is not at its default."""
    told = []
    for f in fields(record):
        value = getattr(record, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if value != default:
            told.append(f"{f.name}={_typed(value)}")
    return told


def _typed(value: Any) -> str:
    """A value as a user types it."""
    if is_dataclass(value):
        return f"zs.{type(value).__name__}({', '.join(_differing(value))})"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_typed, value))}]"
    if isinstance(value, float) and math.isinf(value):
        return "math.inf"
    return repr(value)


def settings_of(options: Options) -> dict[str, Any]:
    """All options of `shard` as plain data, for a candidate."""
    plain: dict[str, Any] = to_plain(options)
    del plain["type"]
    return plain


def differences(path: str, mine: Any, theirs: Any) -> list[str]:
    """One line for everything in which two pieces of plain data differ."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        lines = []
        for key in dict.fromkeys([*mine, *theirs]):
            lines += differences(f"{path}.{key}" if path else str(key), mine.get(key), theirs.get(key))
        return lines
    return [] if mine == theirs else [f"{path}: {mine} → {theirs}"]
