"""The bars that ZeroShard holds itself to, as data, and the judging of a table against them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from results import OTHER, Paired, Row

Metric = Literal["step_ms", "startup_s"]


@dataclass(frozen=True)
class Bar:
    """`subject` takes at most `factor` times the best of `references`. A goal is wanted, not required."""

    subject: str
    factor: float
    references: tuple[str, ...]
    metric: Metric = "step_ms"
    goal: bool = False

    def __str__(self) -> str:
        what = "start-up" if self.metric == "startup_s" else "step"
        best = self.references[0] if len(self.references) == 1 else f"best of {', '.join(self.references)}"
        return f"{what} of {self.subject} at most {self.factor:g} x {best}"


@dataclass(frozen=True)
class Verdict:
    """`ratio` is None where the subject or every reference has no valid number; then nothing passed."""

    bar: Bar
    ratio: float | None
    passed: bool
    note: str = ""

    @property
    def word(self) -> str:
        if self.ratio is None:
            return "not judged"
        return "pass" if self.passed else ("short of goal" if self.bar.goal else "FAIL")


STAGES = ("zs-0", "zs-1", "zs-2", "zs-3")
SHARDING_PEERS = ("fsdp2-zero3", "deepspeed-3")
FSDP2 = ("fsdp2-zero2", "fsdp2-zero3")

GPT_BARS = (
    *(Bar(stage, 0.9, ("ddp", "zro")) for stage in STAGES[:3]),
    Bar("zs-3", 0.5, SHARDING_PEERS),
    Bar("zs-3", 1.2, ("zs-2",)),
    Bar("zs-3-gloo", 0.7, SHARDING_PEERS),
    *(Bar(stage, 1.0, FSDP2, metric="startup_s") for stage in STAGES),
    *(Bar(stage, 1.15, ("none",), goal=True) for stage in STAGES),
)
SMALL_BARS = tuple(Bar(stage, 1.1, ("ddp",)) for stage in STAGES)


def bars_for(model: str, systems: list[str]) -> tuple[Bar, ...]:
    """The bars of the systems asked for.

    Many small parameters are judged on the cost per parameter, the GPTs on all else.
    """
    bars = SMALL_BARS if model.startswith("small") else GPT_BARS
    both = [name for name in systems if f"{name}{OTHER}" in systems]
    bars += tuple(Bar(name, 1.0, (f"{name}{OTHER}",), goal=True) for name in both)
    return tuple(bar for bar in bars if bar.subject in systems)


def _median(row: Row | None, metric: Metric) -> float | None:
    """The number that counts: that of a row which trained the right model."""
    if row is None or row.status != "ok":
        return None
    spread = row.step_ms if metric == "step_ms" else row.startup_s
    return None if spread is None else spread.median


def ratio_to(
    rows: list[Row], system: str, reference: str, metric: Metric = "step_ms", paired: Paired | None = None
) -> float | None:
    """One system's number over that of another, where both are valid; of systems that took turns, the median
    of the ratios of their steps within a round."""
    by_name = {row.system: row for row in rows}
    mine, other = _median(by_name.get(system), metric), _median(by_name.get(reference), metric)
    if mine is None or other is None:
        return None
    if paired and metric == "step_ms":
        found = paired.ratio(system, reference)
        return None if found is None else found.median
    return mine / other


def judge(bars: tuple[Bar, ...], rows: list[Row], paired: Paired | None = None) -> list[Verdict]:
    """One verdict per bar, against its best reference, with a note of those that could not take part. Systems
    that take turns start beside one another, the later the slower, so that start-up is judged without turns.
    """
    by_name = {row.system: row for row in rows}
    verdicts = []
    for bar in bars:
        if paired and bar.metric == "startup_s":
            continue
        ratios = {name: ratio_to(rows, bar.subject, name, bar.metric, paired) for name in bar.references}
        absent = [name for name, value in ratios.items() if value is None]
        valid = {name: value for name, value in ratios.items() if value is not None}
        notes = [f"without {', '.join(absent)}"] if absent else []
        if _median(by_name.get(bar.subject), bar.metric) is None:
            verdicts.append(Verdict(bar, None, False, f"{bar.subject} has no valid number"))
        elif not valid:
            verdicts.append(Verdict(bar, None, False, ", ".join(notes)))
        else:
            best = max(valid, key=lambda name: valid[name])
            if paired and bar.metric == "step_ms" and (found := paired.ratio(bar.subject, best)):
                notes.insert(0, f"{best}, quartiles {found.low:.2f}-{found.high:.2f}")
            verdicts.append(Verdict(bar, valid[best], valid[best] <= bar.factor, ", ".join(notes)))
    return verdicts
