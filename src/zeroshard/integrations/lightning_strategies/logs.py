"""A run's numbers where Trainer's loggers put them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zeroshard as zs

from ..attached import run_of

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class StatsLogging(_Base):  # type: ignore[misc]
    """Among a trainer's callbacks, lets its loggers have `run.stats()`: memory by kind, bytes and seconds
    waited since the log before, of rank 0. It logs as often as the trainer does."""

    _before: zs.Stats | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """After a step that is logged."""
        run, before = run_of(pl_module), self._before
        every = trainer.log_every_n_steps
        if run is None or not trainer.loggers or not every or trainer.global_step % every:
            return
        now = run.stats()
        if now.steps == (before.steps if before is not None else 0):
            return  # gradients are being accumulated
        since = now - before if before is not None and now.steps > before.steps else now
        self._before = now
        told = {f"zeroshard/{name}": value for name, value in since.scalars().items()}
        for logger in trainer.loggers:
            logger.log_metrics(told, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
