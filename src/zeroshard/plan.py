"""`Plan`: a frozen answer to "will it fit, and how?". Complete, printable, JSON both ways, comparable. No
torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.table import Table

from .config import Numerics, Offload, Precision, Stage, show_bytes
from .errors import PlanError

FORMAT = 1
Placing = Literal["device", "state on host", "all on host"]


@dataclass(frozen=True)
class Candidate:
    """One way to run, and what it costs a rank.

    - `device`: bytes at the fullest moment, which is `where`, made of `kinds`. `host`: bytes of host memory
      of one rank.
    - `sent`: bytes that a rank sends in a step, by kind. `seconds`: an estimate of the step's parts;
      `step`: of the whole.
    """

    stage: Stage
    placing: Placing
    recompute: bool
    device: int
    where: str
    kinds: dict[str, int]
    host: int
    sent: dict[str, int]
    seconds: dict[str, float]
    step: float
    fits: bool
    numerics: Numerics = "exact"

    @property
    def label(self) -> str:
        extra = [self.placing] if self.placing != "device" else []
        return ", ".join([f"stage {self.stage}", *extra, *(["recompute"] if self.recompute else [])])

    @property
    def moving_parts(self) -> int:
        """What can go wrong: fewer is better where two are equally fast."""
        return (
            self.stage + 2 * ("device", "state on host", "all on host").index(self.placing) + self.recompute
        )


@dataclass(frozen=True)
class Plan:
    """What was asked, what was chosen and why, and everything that was considered.

    `zs.shard(model, optimizer, **plan.options())` runs it.
    """

    model: str
    parameters: int
    ranks: int
    limit: int
    host_limit: int | None
    machine: str
    settings: dict[str, Any]  # of `shard`, the stage apart
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    reasons: tuple[str, ...] = ()
    imbalance: float = 0.0
    format: int = field(default=FORMAT, compare=False)

    def options(self) -> dict[str, Any]:
        """The options of `shard` that carry the plan out."""
        made = dict(self.settings)
        if isinstance(made.get("precision"), dict):
            made["precision"] = Precision(**made["precision"] | {"keep": tuple(made["precision"]["keep"])})
        if isinstance(made.get("offload"), dict):
            made["offload"] = Offload(**made["offload"])
        return made | {"stage": self.chosen.stage}

    # ------------------------------------------------------------------ JSON

    def __post_init__(self) -> None:
        # Tuples become lists in JSON: so from the start, and a plan equals itself read back.
        object.__setattr__(self, "settings", json.loads(json.dumps(self.settings)))

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
            data["reasons"] = tuple(data["reasons"])
            return cls(**data)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"this is not a plan: {type(error).__name__}: {error}. `zeroshard plan … --json` writes one."
            ) from error

    def write(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def diff(self, other: Plan) -> list[str]:
        """One line for every field that differs, deepest name first: ``chosen.stage: 2 → 3``. The other
        candidates are left out."""
        mine, theirs = asdict(self), asdict(other)
        for data in (mine, theirs):
            del data["candidates"]
        return _differences("", mine, theirs)

    # ------------------------------------------------------------------ for people

    def show(self, console: Console | None = None) -> None:
        """Print the candidates, the choice and its reasons."""
        console = console or Console(highlight=False)
        console.print(self._text(console.width >= 120))

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=140, highlight=False)
        self.show(console)
        text = console.file
        assert isinstance(text, StringIO)
        return text.getvalue()

    def _text(self, wide: bool) -> Group:
        limits = f"{show_bytes(self.limit)} per device"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks:,} ranks"
        if self.host_limit is not None:
            limits += f", {show_bytes(self.host_limit)} of host memory per node"
        title = f"{self.model}: {self.parameters:,} parameters on {ranks} ({self.machine}), {limits}"
        table = Table(title=title, title_justify="left", pad_edge=False)
        for name in (
            "plan",
            "fits",
            "device",
            "host",
            "sent",
            "step, est.",
            *(["fullest at", "numerics"] if wide else []),
        ):
            table.add_column(
                name,
                justify="left" if name in ("plan", "fits", "fullest at", "numerics") else "right",
                no_wrap=name != "plan",
            )
        for one in self.candidates:
            mark = "chosen" if one == self.chosen else "yes" if one.fits else "no"
            table.add_row(
                one.label,
                mark,
                show_bytes(one.device),
                show_bytes(one.host),
                show_bytes(sum(one.sent.values())),
                f"{one.step:.3g} s" if one.step else "–",
                *([one.where, one.numerics] if wide else []),
                style="bold" if mark == "chosen" else "",
            )
        made_of = ", ".join(
            f"{kind} {show_bytes(size)}"
            for kind, size in sorted(self.chosen.kinds.items(), key=lambda k: -k[1])
            if size
        )
        return Group(table, f"{self.chosen.label}: {made_of}", *self.reasons)


def _differences(path: str, mine: Any, theirs: Any) -> list[str]:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        lines = []
        for key in dict.fromkeys([*mine, *theirs]):
            lines += _differences(f"{path}.{key}" if path else str(key), mine.get(key), theirs.get(key))
        return lines
    return [] if mine == theirs else [f"{path}: {mine} → {theirs}"]
