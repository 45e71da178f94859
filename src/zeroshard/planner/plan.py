"""Holds a plan: a frozen answer to "will it fit, and how?", printable and comparable. No torch.

A plan is plain data that does not change: dictionaries that refuse to, and tuples in place of lists. Read
from a file, every field is looked at, and what does not fit is said in words."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from rich.console import Console, Group
from rich.table import Table

from zeroshard.compress.base import from_settings
from zeroshard.errors import OptionError, PlanError
from zeroshard.field_checks import check_flag, path_text
from zeroshard.layout.placement import Placement, UnitPlacement
from zeroshard.layout.prefetch import UnitVisit
from zeroshard.options import Options, Precision, Stage
from zeroshard.output_file import write_file
from zeroshard.sizes import show_apart, show_bytes, show_seconds
from zeroshard.sync_policies import Numerics


class FrozenDict(dict[str, Any]):
    """A dictionary as it was made. `dict(it)` and `it | other` are ones that can be changed.

    >>> FrozenDict(stage=3)["stage"] = 2
    Traceback (most recent call last):
    TypeError: a plan does not change; make another with zs.plan(), or pass options to zs.shard()
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a plan does not change; make another with zs.plan(), or pass options to zs.shard()")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return FrozenDict({name: frozen(item) for name, item in value.items()})
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def freeze(record: object, *names: str) -> None:
    """Fields of a frozen dataclass, in its `__post_init__`."""
    for name in names:
        object.__setattr__(record, name, frozen(getattr(record, name)))


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "null"}


class Unfit(Exception):
    """A field holds what it cannot; a caller says what the data was to be."""


def record(kind: Any, data: Any, where: str = "", own: Mapping[str, Any] | None = None) -> Any:
    """A record of `kind` from an object of JSON; `where` it stands. Numbers below zero do not fit, nor do
    infinite ones. `own`: fields that the caller has made."""
    at = f"{where}." if where else ""
    if not isinstance(data, Mapping):
        raise Unfit(f"{where or 'it'} is {_shown(data)}, and must be an object of JSON")
    hints, made = _hints(kind), dict(own or {})
    for name in data:
        if name not in hints:
            raise Unfit(f"{at}{name} is no field of a {kind.__name__}")
    for item in fields(kind):
        if item.name in made:
            continue
        if item.name in data:
            made[item.name] = fitting(hints[item.name], data[item.name], f"{at}{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise Unfit(f"{at}{item.name} is missing")
    return kind(**made)


def fitting(hint: Any, value: Any, where: str) -> Any:
    """The value as the annotation has it: lists as tuples, objects as records."""
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        return fitting(next(part for part in parts if part is not NoneType), value, where)
    if is_dataclass(hint):
        return record(hint, value, where)
    if kind is not None and kind is not Literal and issubclass(kind, Mapping):
        if not isinstance(value, Mapping):
            raise Unfit(f"{where} is {_shown(value)}, and must be an object of JSON")
        return {name: fitting(parts[1], item, f"{where}.{name}") for name, item in value.items()}
    if kind is not None and kind is not Literal and issubclass(kind, Sequence):
        if not isinstance(value, list):
            raise Unfit(f"{where} is {_shown(value)}, and must be a list")
        return tuple(fitting(parts[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if not _holds(hint, value):
        told = " or ".join(repr(part) for part in parts) if kind is Literal else _WORDS[hint]
        raise Unfit(f"{where} is {_shown(value)}, and must be {told}")
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _holds(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(type(value) is type(part) and value == part for part in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    if not isinstance(value, (int, float) if hint is float else hint):
        return False
    return not isinstance(value, int | float) or (math.isfinite(value) and value >= 0)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


FORMAT = 2
Placing = Literal["device", "some on host", "state on host", "all on host", "some on disk", "state on disk"]
PLACINGS: tuple[Placing, ...] = get_args(Placing)
NAMES = 24  # the width that the table leaves for the names of plans
FILE_WIDTH = 160  # room for all of its columns
_WRITES = "`zeroshard plan … --json` writes one."


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
    def asked(self) -> int:
        """Bytes of the device but for the allocator's margin."""
        return self.device - self.kinds.get("margin", 0)

    def with_margin(self, margin: float, limit: int) -> Candidate:
        """The same with another margin, as a share of what is asked."""
        beside = int(self.asked * margin)
        device = self.asked + beside
        return replace(
            self, device=device, kinds={**self.kinds, "margin": beside}, fits=self.fits and device <= limit
        )

    @property
    def placement(self) -> Placement | None:
        """Where every unit rests, where that is decided unit by unit."""
        return Placement(tuple(UnitPlacement(*place) for place in self.places)) if self.places else None

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
        if self.splits:
            words.append("split master")
        if self.holds_on_host:
            words.append("gradients on host")
        if self.repeats:
            words.append(f"backward of {self.repeats} twice")
        if self.precision:
            words.append(self.precision)
        return ", ".join(words)

    @property
    def splits(self) -> bool:
        """Whether masters are the weights and 16 bits more."""
        return (self.settings.get("offload") or {}).get("master") == "split"

    @property
    def repeats(self) -> int:
        """Of how many units the backward runs twice."""
        return int((self.settings.get("offload") or {}).get("repeat_backward", 0))

    @property
    def holds_on_host(self) -> bool:
        """Whether gradients wait for the loop's clipping and step on the host."""
        undo = (self.settings.get("offload") or {}).get("undo", True)
        return self.placing != "device" and not undo and self.settings.get("clip_norm") is None

    @property
    def moving_parts(self) -> int:
        """What can go wrong: fewer is better where two are equally fast."""
        placing = {"device": 0, "state on host": 2, "some on host": 3, "all on host": 4}.get(self.placing, 5)
        told = (self.recompute, self.lean, self.splits, self.holds_on_host, self.repeats)
        return self.stage + placing + sum(map(bool, told))

    @property
    def family(self) -> tuple[Any, ...]:
        """What it has in common with others that differ in how they save memory only."""
        return self.stage, self.placing, self.precision


@dataclass(frozen=True)
class Rate:
    """Of one synchronised micro-batch: `items` of all ranks, which are `what`; `flops` of one rank, those of
    attention left out; `peak`: operations a second of its device; `assumed`: sentences about the times."""

    items: int
    what: str
    flops: int
    peak: float
    assumed: tuple[str, ...]


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
    visits: tuple[UnitVisit, ...] = ()
    format: int = field(default=FORMAT, compare=False)

    def __post_init__(self) -> None:
        freeze(self, "weights")

    def options(self) -> dict[str, Any]:
        """The options of `shard` that carry the plan out."""
        return options_of(self.chosen)

    def refitted(self, margin: float) -> Plan:
        """The same with the fastest of its candidates that fits where the device takes `margin` (0.04: 4 %)
        beside what is asked of its allocator. Raises `PlanError` where none does."""
        if not isinstance(margin, int | float) or isinstance(margin, bool) or not 0 <= margin < math.inf:
            raise OptionError(f"refitted(margin={margin!r}) takes a share, such as 0.04 for 4 %.")
        made = tuple(one.with_margin(margin, self.limit) for one in self.candidates)
        fitting = [one for one in made if one.fits]
        if not fitting:
            needs, has = show_apart(min(one.device for one in made), self.limit)
            raise PlanError(
                f"no candidate of this plan fits {has} with a margin of {margin:.1%}: the smallest needs "
                f"{needs}. Plan again with a larger limit."
            )
        chosen = min(fitting, key=lambda one: (one.step, one.device))
        why = f"{chosen.label} is the fastest that fits with a margin of {margin:.1%}."
        return replace(self, chosen=chosen, candidates=made, reasons=(why,))

    # ------------------------------------------------------------------ JSON

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls._of(text, "this")

    @classmethod
    def _of(cls, text: str, which: str) -> Plan:
        """`which` plan it is, for errors."""
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}".rstrip(".")
            raise PlanError(f"{which} is not a plan: {why}. {_WRITES}") from error
        found = data.get("format") if isinstance(data, Mapping) else None
        if type(found) is not int:
            raise PlanError(f"{which} is not a plan: it has no format. {_WRITES}")
        if found != FORMAT:
            raise PlanError(
                f"{which} plan has format {found}, and this ZeroShard reads {FORMAT}: plan again."
            )
        try:
            made: Plan = record(cls, data)
            made._check()
        except Unfit as error:
            raise PlanError(f"{which} is not a plan that can be used: {error}. {_WRITES}") from error
        return made

    def _check(self) -> None:
        """What goes beyond single fields."""
        for name in ("ranks", "ranks_per_node", "parameters", "limit"):
            if getattr(self, name) < 1:
                raise Unfit(f"{name} is {getattr(self, name)}, and must be at least 1")
        if not self.candidates:
            raise Unfit("candidates are none, and there must be one at least: what is chosen")
        _check_ways({"chosen": self.chosen})
        _check_ways({f"candidates[{number}]": one for number, one in enumerate(self.candidates)})

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write it as JSON. What exists at `path` and differs is replaced with `overwrite` only."""
        name = path_text(path, "Plan.write(path)")
        check_flag(overwrite, "overwrite")
        try:
            write_file(name, self.to_json() + "\n", overwrite)
        except FileExistsError as error:
            raise PlanError(
                f"{name} exists and is not this plan, so it stays as it is: name another file, or pass "
                "overwrite=True."
            ) from error
        except OSError as error:
            raise PlanError(f"the plan cannot be written to {name}: {error.strerror}.") from error

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        path = path_text(path, "Plan.read(path)")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"the plan {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise PlanError(f"{path} is not a plan: it holds no text. {_WRITES}") from error
        return cls._of(text, f"{path}: this")

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


def _check_ways(ways: Mapping[str, Candidate]) -> None:
    """That candidates from a file can be carried out; by where they stand in it."""
    names = [f.name for f in fields(UnitPlacement)]
    for where, one in ways.items():
        for at, place in enumerate(one.places):
            if len(place) > len(names):
                raise Unfit(f"{where}.places[{at}] has {len(place)} parts, and a place has {len(names)}")
            record(UnitPlacement, dict(zip(names, place, strict=False)), f"{where}.places[{at}]")
        try:
            options = Options(**options_of(one))
        except PlanError:
            raise
        except (OptionError, TypeError, ValueError, KeyError) as error:
            raise Unfit(f"{where}.settings cannot be options: {str(error).rstrip('.')}") from error
        if options.stage != one.stage:
            raise Unfit(f"{where}.settings has stage {options.stage}, and the candidate {one.stage}")


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
            told.append(f"{f.name}={typed(value)}")
    return told


def typed(value: Any) -> str:
    """A value as a user types it."""
    if isinstance(value, Precision):
        named = [f'"{name}"' for name in ("bf16", "fp16") if value == Precision(name)]
        if named:
            return named[0]
    if is_dataclass(value):
        return f"zs.{type(value).__name__}({', '.join(_differing(value))})"
    if isinstance(value, tuple):
        return f"[{', '.join(map(typed, value))}]"
    if isinstance(value, float) and math.isinf(value):
        return "math.inf"
    return repr(value)


def settings_of(options: Options) -> dict[str, Any]:
    """All options of `shard` as plain data, for a candidate. Where no backward runs twice, that is not said:
    as in plans from before there was such an option."""
    plain: dict[str, Any] = to_plain(options)
    del plain["type"]
    if plain["offload"] is not None and not plain["offload"]["repeat_backward"]:
        del plain["offload"]["repeat_backward"]
    return plain


def differences(path: str, mine: Any, theirs: Any) -> list[str]:
    """One line for everything in which two shards of plain data differ."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        lines = []
        for key in dict.fromkeys([*mine, *theirs]):
            lines += differences(f"{path}.{key}" if path else str(key), mine.get(key), theirs.get(key))
        return lines
    return [] if mine == theirs else [f"{path}: {mine} → {theirs}"]
