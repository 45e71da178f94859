"""Trainer's strategy, for either of the packages in which Lightning comes: what it does around its DDP."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer

import zeroshard as zs

from ..attached import run_of
from . import averages
from .runs import (
    Shown,
    begin,
    constructed,
    end,
    entered,
    is_folder,
    on_meta,
    pickled,
    refuse_remote,
    thawed,
    unpickled,
    with_precision,
)

log = logging.getLogger("zeroshard")

#: In the `extra` of a checkpoint: all that Lightning keeps beside weights and optimizers, as it pickles it.
LIGHTNING = "lightning"
_FIT = "fit"
#: Lightning's class for what `configure_optimizers` has not made.
_NONE = "_MockOptimizer"
_OPTIMIZERS = "optimizer_states"
#: What stands for the state of an optimizer until it is written.
_ELSEWHERE = "zeroshard_optimizer"

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class TrainerSharding(_Base):  # type: ignore[misc]
    """A strategy of `Trainer` that shards what it trains: the arguments of `DDPStrategy` that say where ranks
    run, and the options of `zs.shard`.

    `whole_checkpoints=True`: checkpoints are one file, as other strategies write and read them, instead of a
    folder into which each rank writes its rows.
    """

    #: Lightning's environment for processes that torchrun, or `zeroshard run`, has started.
    environment: Callable[[], Any]

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = None,
        start_method: str = "popen",
        *,
        whole_checkpoints: bool = False,
        **options: Any,
    ) -> None:
        theirs = constructed(self, options, timeout, cluster_environment, whole_checkpoints)
        self._shown: Shown | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **theirs,
        )

    @property
    def run(self) -> zs.Run | None:
        """The run of the model that Trainer has now; it stays after `fit`, until `close` or the next one."""
        return run_of(self.lightning_module) if self.lightning_module is not None else None

    def close(self) -> None:
        """Let the model be plain again, whole on every rank. Every rank calls it."""
        end(self.lightning_module)
        if self._layer_sync is not None:
            self.model = self._layer_sync.revert(self.lightning_module)

    # ---- setting up ----

    def setup_environment(self) -> None:
        """Let the ranks meet. A model that is trained anew is plain before hooks of users see it."""
        super().setup_environment()
        if self._fits(self.lightning_module.trainer) and self.run is not None:
            self.close()

    def setup(self, trainer: Any) -> None:
        """Shard the model with the optimizers that it configures, or alone where it is not trained."""
        self.accelerator.setup(trainer)
        fits, module = self._fits(trainer), self.lightning_module
        if self.run is None:
            if fits and self._layer_sync is not None:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
        if self.run is None:
            made = [one for one in self.optimizers if fits and type(one).__name__ != _NONE]
            with thawed(module) if fits and averages.finetunes(trainer) else nullcontext():
                begin(module, made, self._options(trainer, made), not module.automatic_optimization)
        self.setup_precision_plugin()
        if fits:
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
            self.precision_plugin.clip_grad_by_value = self._clip_by_value
            averages.follow(trainer, cast(zs.Run, self.run), self._is_loaded)

    def model_to_device(self) -> None:
        """Move the model to where it computes, but for layers that are filled later."""
        if not on_meta(self.model):
            super().model_to_device()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Make a model's layers: on the meta device where they are to be empty."""
        if empty_init:
            with torch.device("meta"), self.precision_plugin.tensor_init_context():
                yield
        else:
            with super().tensor_init_context(empty_init):
                yield

    def configure_ddp(self) -> None:
        """Nothing is wrapped."""

    def _fits(self, trainer: Any) -> bool:
        return bool(trainer.state.fn == _FIT)

    def _options(self, trainer: Any, optimizers: list[Optimizer]) -> dict[str, Any]:
        """The options, with what Trainer was told: its precision, and the limit of the norm where updates on
        the host are to begin in backward."""
        plugin = self.precision_plugin
        options = with_precision(self.zeroshard_options, str(getattr(plugin, "precision", "32-true")))
        on_host = options.get("offload") is not None or "limit" in options
        clips, by = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if on_host and len(optimizers) == 1 and not {"clip_norm", "plan"} & options.keys():
            if self.lightning_module.automatic_optimization and not (clips and by == "value"):
                options["clip_norm"] = float(clips) if clips else math.inf
        return options

    # ---- the loop ----

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Where it has the loop in itself, with backward and steps, the parts of the model are called as a
        loop calls them."""
        if not self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        return entered(self.lightning_module, super().training_step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return entered(self.lightning_module, super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return entered(self.lightning_module, super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return entered(self.lightning_module, super().predict_step, args, kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients wait on their ranks: `run.no_sync()`."""
        if self.run is None:
            yield
        else:
            with self.run.no_sync():
                yield

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm of the whole gradient; with `clip_norm=` the step does it."""
        limit = self.run.options.clip_norm if self.run is not None else None
        if limit is None:
            torch.nn.utils.clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)
        elif limit != clip_val:
            raise zs.OptionError(
                f"gradient_clip_val={clip_val} does not agree with clip_norm={limit}, by which the step "
                "itself clips: pass the same, or drop clip_norm=."
            )

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        if self.run is not None and self.run.options.clip_norm is not None:
            raise zs.OptionError(
                'gradient_clip_algorithm="value" has no gradients to clip: with clip_norm= updates begin in '
                "backward. Drop clip_norm=."
            )
        torch.nn.utils.clip_grad_value_(self.precision_plugin.main_params(optimizer), clip_val)

    # ---- checkpoints ----

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The rows of this rank, for hooks that look at names; what is written of them is decided then."""
        module = self.lightning_module
        if self.run is None:
            return cast(dict[str, Any], super().lightning_module_state_dict())
        self._shown = Shown(module.state_dict())
        return dict(self._shown.rows)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Where it is found; of what stands for no optimizer, as Lightning has it."""
        if self.run is None or type(getattr(optimizer, "_optimizer", optimizer)).__name__ == _NONE:
            return cast(dict[str, Any], super().optimizer_state(optimizer))
        return {_ELSEWHERE: self._number(optimizer)}

    def _number(self, optimizer: Optimizer) -> int:
        plain = getattr(optimizer, "_optimizer", optimizer)
        return next(number for number, one in enumerate(self.optimizers) if one is plain)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder into which each rank writes its rows; or, of weights alone and with
        `whole_checkpoints=True`, one file as any strategy writes it."""
        run, shown = self.run, self._shown
        if run is None or shown is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._has_failed():
            log.error("no checkpoint is written to %s: it takes all ranks, and this one has failed", filepath)
            return
        path = self.broadcast(filepath)  # of its own type, which a CheckpointIO of the user's may look at
        self._shown = None
        hidden = Path(path).name.startswith(".")  # of the tuner, which goes back to it and removes it
        if self.whole_checkpoints or hidden or _OPTIMIZERS not in checkpoint:
            whole = run.full_state_dict()
            if run.rank == 0:
                shown.made_whole(checkpoint, whole)
            for number, state in enumerate(checkpoint.get(_OPTIMIZERS, ())):
                if _ELSEWHERE in state:
                    optimizer = self.optimizers[state[_ELSEWHERE]]
                    checkpoint[_OPTIMIZERS][number] = run.full_optimizer_state_dict(optimizer)
            if self.is_global_zero and is_folder(path):
                shutil.rmtree(path)
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        refuse_remote(path)
        if self.is_global_zero and Path(path).is_file():
            Path(path).unlink()
        shown.put_away(checkpoint)
        run.save(path, extra={LIGHTNING: pickled(checkpoint)}, overwrite=True)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; not where this one has failed, and others do not come."""
        if not self._has_failed():
            super().barrier(*args, **kwargs)

    def _has_failed(self) -> bool:
        trainer = getattr(self.lightning_module, "_trainer", None)
        return bool(self.world_size > 1 and trainer is not None and trainer.state.status == "interrupted")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint: of a folder, weights and optimizers are taken at once."""
        path = self.broadcast(str(checkpoint_path))
        run, self._shown = self.run, None
        if run is None or not is_folder(path):
            return cast(dict[str, Any], super().load_checkpoint(checkpoint_path, weights_only))
        strict = bool(self.lightning_module.strict_loading) and self._fits(self.lightning_module.trainer)
        extra = run.load(path, strict=strict)
        if LIGHTNING not in extra:
            raise zs.CheckpointError(
                f"{path} was not saved by Trainer, which goes on from its own checkpoints only: "
                "run_of(model).load(path) takes its weights and the state of its optimizers."
            )
        checkpoint = unpickled(extra[LIGHTNING], weights_only)
        self._shown = Shown(run.model.state_dict())
        self._shown.brought_back(checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load whole weights, of which each rank takes its rows; what a folder had is loaded already."""
        state, shown, module = checkpoint["state_dict"], self._shown, self.lightning_module
        if shown is None or not shown.stands(state):
            if shown is None or not averages.keeps_current(module, checkpoint):
                module.load_state_dict(state, strict=strict)
            return
        missing, unknown = shown.rows.keys() - state.keys(), state.keys() - shown.rows.keys()
        if strict and (missing or unknown):
            module.load_state_dict(state, strict=True)

    def _is_loaded(self, state: dict[str, Any]) -> bool:
        """Whether a state is that which the model has, from the folder of a checkpoint."""
        return self._shown is not None and self._shown.stands(state)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load whole states, of which each rank takes its rows; what a folder had is loaded already."""
        for optimizer, state in zip(self.optimizers, checkpoint[_OPTIMIZERS], strict=False):
            if _ELSEWHERE not in state:
                optimizer.load_state_dict(state)

    # ---- the end ----

    def teardown(self) -> None:
        """Leave the model sharded, with all that it has: what follows, another stage or a save, goes on with
        it. A script's own processes get it whole, since they end here."""
        run, trainer = self.run, getattr(self.lightning_module, "_trainer", None)
        if run is None:
            super().teardown()
            return
        if self._start_method != "popen" and trainer is not None and trainer.state.status != "interrupted":
            self.close()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
