"""The exception tree. Users catch `ZeroShardError`; each class also is the builtin that a reader would
expect."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ZeroShardError(Exception):
    """Base of everything that ZeroShard raises on purpose."""


class OptionError(ZeroShardError, ValueError):
    """An option is unknown, contradicts another, or could not take effect."""


class ModelError(ZeroShardError, ValueError):
    """The model or the optimizer handed to `shard` cannot be sharded as asked."""


class StateError(ZeroShardError, RuntimeError):
    """A call came at a moment when it has no meaning (a step inside `no_sync`, use after `close`)."""


class PlanError(ZeroShardError, ValueError):
    """No plan fits the limits, or a plan does not fit the model it is applied to."""


class CheckpointError(ZeroShardError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or of another model."""


class RankError(ZeroShardError, RuntimeError):
    """Ranks disagree, or one of them failed or stopped answering."""


class TierError(ZeroShardError, RuntimeError):
    """Host memory or disk could not hold, read or write what was placed there."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to an error: ``' Did you mean "blocks.*"?'`` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""
