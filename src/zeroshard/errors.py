"""The exception tree. Users catch `ZeroShardError`; each class also is the builtin that a reader would
expect."""


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
