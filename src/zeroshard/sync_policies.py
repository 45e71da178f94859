"""How often the ranks meet: the `sync=` options of `shard`. Frozen records, no torch; `sync/` acts on them.

`EveryStep` is exact, as a choice with a codec as exact as its codec. `Delayed` and `Local` are
``approximate``: they train by other mathematics, which their docstrings say, and no planner picks them
unasked. `Adaptive` is as exact as the least exact of its choices: what it may use, the user has named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zeroshard.errors import OptionError
from zeroshard.field_checks import check_fields

Numerics = Literal["exact", "rounding", "approximate"]


def least_exact(found: Iterable[Numerics]) -> Numerics:
    """What several options do to the numbers together.

    >>> least_exact(["exact", "rounding"])
    'rounding'
    """
    every = set(found)
    return "approximate" if "approximate" in every else "rounding" if "rounding" in every else "exact"


@dataclass(frozen=True)
class EveryStep:
    """Every update uses the gradient of all ranks of the same step. Exact, and the default.

    `compress`: as a choice of `Adaptive`, the codec (or mapping from name patterns to codecs) that gradients
    travel through while it is in force, in place of `shard`'s.
    """

    compress: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.compress, Mapping):
            object.__setattr__(self, "compress", tuple(self.compress.items()))
        if not all(codec is None or _is_codec(codec) for codec in self._codecs):
            raise OptionError(
                f"EveryStep(compress={self.compress!r}): pass a codec such as zs.Int8(), or a mapping from "
                'name patterns to codecs such as {"*norm*": None, "*": zs.Int8()}.'
            )

    @property
    def _codecs(self) -> list[Any]:
        """One for all, or those of a mapping."""
        pairs = self.compress if isinstance(self.compress, tuple) else [(None, self.compress)]
        return [pair[-1] if isinstance(pair, tuple) and len(pair) == 2 else pair for pair in pairs]

    def __repr__(self) -> str:
        return "EveryStep()" if self.compress is None else f"EveryStep(compress={self.compress!r})"

    @property
    def numerics(self) -> Numerics:
        """The codec's, or of several the least exact one's."""
        return least_exact(codec.numerics for codec in self._codecs if codec is not None)


@dataclass(frozen=True)
class Delayed:
    """The gradient of step t is applied by `optimizer.step()` of step t+1 (delayed parameter update).

    After the backward of step t, `p.grad` is the reduced gradient of step t-1, so clipping and the update
    work as ever, one step behind; in the first step `p.grad` is None and the update does nothing. The
    reduction of each bucket has from its send in one backward to the same place in the next: a whole step. At
    stage 0 that is all that travels, so that a link which is busy for a whole step is hidden; from stage 1 on
    new parameters travel beside forward, as ever. Costs a wire of the whole gradient and one more shard a
    rank, at stage 0 two more copies of the gradient. One backward a step: accumulate under
    `run.no_sync()`. With `offload=` and `clip_norm=` the host's update begins in the forward of the step that
    applies it, for one more copy of a rank's rows in host memory.

    `warmup_steps`: so many updates at first use the gradient of their own step, exactly as `EveryStep` does:
    early in training a gradient ages fastest. The step after them is the one whose update does nothing.

    Where a step is not time enough for the link, see `Local`.
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup_steps < 0:
            raise OptionError(f"Delayed(warmup_steps={self.warmup_steps}): 0 or more is needed.")

    @property
    def numerics(self) -> Numerics:
        return "approximate"


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of `Local`: momentum over what a round of local steps changed.

    With ``delta = anchor - mean over ranks``, per element: ``m = momentum * m + delta`` and
    ``anchor -= lr * (delta + momentum * m)``: torch's SGD(nesterov=True) on `delta`. ``Nesterov(1.0, 0.0)``
    is plain averaging.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_number("Nesterov.lr", self.lr, above=0.0)
        if not 0.0 <= _number("Nesterov.momentum", self.momentum) < 1.0:
            raise OptionError(f"Nesterov.momentum={self.momentum!r} must be at least 0 and below 1.")


@dataclass(frozen=True)
class Local:
    """Each rank updates its own copy with its own gradients; every `steps` steps the ranks meet (local SGD,
    DiLoCo).

    - `steps`: of the optimizer given last to `shard`, between two meetings. The bytes of stage 0 are divided
      by it.
    - `outer`: what is done with the mean of the ranks' parameters.
    - `fragments`: the model is cut into so many, which meet in turn instead of all at once: each every
      `steps` steps, so the traffic of a round is spread over it.
    - `rates`: per rank, a factor on the learning rate of its local steps, e.g. for ranks whose batches are
      smaller.

    Stage 0 only: every rank needs all parameters for steps of its own.
    """

    steps: int = 16
    outer: Nesterov = field(default_factory=Nesterov)
    fragments: int = 1
    rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "fragments"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"Local.{name}={value!r} must be a whole number, 1 or more.")
        if self.fragments > self.steps:
            raise OptionError(
                f"Local(steps={self.steps}, fragments={self.fragments}): at most one fragment a step, so "
                f"fragments={self.steps} or fewer."
            )
        if not isinstance(self.outer, Nesterov):
            raise OptionError(f"Local.outer={self.outer!r} must be a zs.Nesterov(...).")
        if self.rates is not None:
            if not isinstance(self.rates, (list, tuple)):
                raise OptionError(f"Local.rates={self.rates!r} must be a factor a rank, as (1.0, 0.5).")
            rates = tuple(_check_number("Local.rates", rate, above=0.0) for rate in self.rates)
            object.__setattr__(self, "rates", rates)

    @property
    def numerics(self) -> Numerics:
        return "approximate"


Choice = EveryStep | Delayed | Local


@dataclass(frozen=True)
class Adaptive:
    """Moves between the listed choices by what it measures, on all ranks at once, and says each move and why.

    - `choices`: sync policies, the most faithful first. It begins with the first. Codecs can be chosen among,
      too: ``EveryStep(compress=Int8())``. Each codec has buffers and state of its own, and so has each
      `Local`. Nothing is used that is not listed: name `Local` where ranks may train apart.
    - `window`: steps that are measured before it decides; the first after a change is left out. Choices that
      come close are measured in up to five windows, in turn. Once it has settled, windows grow up to eight
      times as long, so that measuring costs next to nothing, and the runner-up is measured at ever longer
      intervals.
    - `gain`: a choice must make steps shorter by this share to be preferred to one that stands before it, or
      to the one in force.
    - `unrest`: while the gradient's norm changes by more than this factor within `window` steps, only the
      first choice is used: other mathematics is for when training is calm.

    The numbers are agreed upon between the ranks (the slowest rank counts), and the decision is a function of
    them alone.
    """

    choices: tuple[Choice, ...] = ()
    window: int = 8
    gain: float = 0.05
    unrest: float = 4.0

    def __post_init__(self) -> None:
        choices: Any = tuple(self.choices) if isinstance(self.choices, (list, tuple)) else ()
        object.__setattr__(self, "choices", choices)
        if len(choices) < 2 or len(set(choices)) < len(choices):
            raise OptionError(
                "Adaptive(choices=[...]) needs two different choices or more, the most faithful first, e.g. "
                "Adaptive(choices=[EveryStep(), Local(steps=8)])."
            )
        for choice in choices:
            if not isinstance(choice, (EveryStep, Delayed, Local)):
                raise OptionError(
                    f"Adaptive: {choice!r} is no choice; list EveryStep(), Delayed(), Local(...), or for a "
                    "codec EveryStep(compress=...)."
                )
            if isinstance(choice, Delayed) and choice.warmup_steps:
                raise OptionError(
                    f"Adaptive: {choice!r} warms up, and which choice is in force is for Adaptive to say: "
                    "list EveryStep() first, with which it begins, and Delayed()."
                )
        check_fields(self)
        if self.window < 3:
            raise OptionError(f"Adaptive.window={self.window!r} must be 3 steps or more.")
        _check_number("Adaptive.gain", self.gain, above=0.0)
        _check_number("Adaptive.unrest", self.unrest, above=1.0)

    @property
    def numerics(self) -> Numerics:
        """Of the least exact choice. Which one is in force depends on times, so two runs may differ by it."""
        return least_exact(choice.numerics for choice in self.choices)


Sync = Choice | Adaptive


def choices_of(sync: Sync) -> tuple[Choice, ...]:
    """What a run may follow: the choices of `Adaptive`, or the one policy."""
    return sync.choices if isinstance(sync, Adaptive) else (sync,)


def local_steps(sync: Sync) -> bool:
    """Whether ranks may train apart."""
    return any(isinstance(choice, Local) for choice in choices_of(sync))


def reunites(sync: Sync) -> bool:
    """Whether ranks may take steps together after they have trained apart."""
    return local_steps(sync) and not all(isinstance(choice, Local) for choice in choices_of(sync))


def delays(sync: Sync) -> bool:
    """Whether gradients may be applied a step late."""
    return any(isinstance(choice, Delayed) for choice in choices_of(sync))


def codec_choices(sync: Sync) -> bool:
    """Whether codecs are chosen among."""
    return any(isinstance(choice, EveryStep) and choice.compress is not None for choice in choices_of(sync))


def check_sync(sync: object, stage: int) -> None:
    """Whether `sync` is a policy and works at this stage; an error that names what does otherwise."""
    if not isinstance(sync, (EveryStep, Delayed, Local, Adaptive)):
        known = "zs.EveryStep(), zs.Delayed(), zs.Local(...) or zs.Adaptive(...)"
        raise OptionError(f"sync={sync!r} is no policy; pass {known}.")
    if isinstance(sync, EveryStep) and sync.compress is not None:
        raise OptionError(
            "sync=EveryStep(compress=...) is a choice of Adaptive; for one codec throughout pass "
            "shard(..., compress=...)."
        )
    if stage > 0 and local_steps(sync):
        raise OptionError(
            "sync=Local(...) needs stage=0, where every rank holds all parameters, and this is stage "
            f"{stage}: a rank that owns rows only cannot take steps alone. Pass stage=0, or at stages 1 to 3 "
            "sync=Delayed()."
        )


def _is_codec(value: object) -> bool:
    """Codecs stand above this file: known by what they can say of themselves."""
    return hasattr(value, "settings") and not isinstance(value, type)


def _number(what: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise OptionError(f"{what}={value!r} must be a number.")
    return float(value)


def _check_number(what: str, value: object, above: float) -> float:
    if not _number(what, value) > above:
        raise OptionError(f"{what}={value!r} must be above {above:g}.")
    return float(value)  # type: ignore[arg-type]
