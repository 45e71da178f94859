"""Hugging Face's Trainer: an unchanged script becomes sharded by one line before it.

    import zeroshard.integrations.hf as zhf

    zhf.enable(stage=3)

Trainers then shard their models: `Trainer`, `Seq2SeqTrainer`, and those of other libraries that are made from
them. `ZeroShardTrainer` does so alone, without that line: `ZeroShardTrainer(..., zeroshard={"stage": 3})`.
"""

from __future__ import annotations

import json
import logging
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

import zeroshard as zs
from zeroshard.integrations import accelerate as zsa

from .attached import run_of
from .options import check_options

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"zeroshard.integrations.hf needs the package {missing.name!r}: pip install 'zeroshard[hf]'",
        name=missing.name,
    ) from missing

from .hf_engines import leave_engines, merged, options_of, take_engines

log = logging.getLogger("zeroshard")

#: In a checkpoint of Trainer's: all that a sharded model and its optimizer need to go on.
FOLDER = zsa.FOLDER
#: Beside it: the rows of a step.
BATCH = "zeroshard_batch.json"
#: Rows of a dataset among which the longest are looked for.
LOOKED_AT = 256


class LogStats(TrainerCallback):  # type: ignore[misc]
    """Among a trainer's callbacks, lets its logs have `run.stats()`: memory by kind, bytes and seconds waited
    since the log before. So they are in whatever `report_to` names."""


class ZeroShardTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose model is sharded: with `zeroshard={"stage": 3, ...}`, the options of `zs.shard`, or
    else with those of `enable`.

    Before another trainer it shards that: `class Mine(ZeroShardTrainer, Seq2SeqTrainer)`.
    """

    zeroshard: Mapping[str, Any] | None = None

    def __init__(self, *args: Any, zeroshard: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        if zeroshard is not None:
            check_options(zeroshard)
            self.zeroshard = dict(zeroshard)
        super().__init__(*args, **keywords)

    def create_accelerator_and_postprocess(self) -> None:
        """Let the accelerator be one that shards."""
        super().create_accelerator_and_postprocess()
        if Trainer.create_accelerator_and_postprocess is _PLAIN:  # else it is, by `enable`
            self._adopt()

    def _adopt(self) -> None:
        options = self._chosen((self.zeroshard if self.zeroshard is not None else _enabled) or {})
        accelerator = self.accelerator
        if isinstance(accelerator, zsa.ZeroShardAccelerator):
            accelerator.take_options(options)
        else:
            zsa.adopt(accelerator, options)
        # TRL's references, rewards and teachers are prepared for evaluation, and nothing trains them.
        accelerator.trains = lambda model: model is self.model
        _let_trl_gather()

    def _chosen(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, with what the arguments of Trainer say: where state may rest on the host, the step
        itself clips, so that updates begin in backward."""
        chosen, limit = merged(options, options_of(self.args)), self.args.max_grad_norm
        on_host = chosen.get("offload") is not None or "limit" in chosen
        if on_host and not {"clip_norm", "plan"} & chosen.keys():
            chosen["clip_norm"] = limit or math.inf
        return chosen

    def _run(self) -> zs.Run | None:
        return run_of(cast(nn.Module, self.model))

    # ---- the loop ----

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: str | None) -> Any:
        """Shard, where a limit is planned for with the longest rows that are at hand."""
        asked = (max_steps, train_dataloader, resume)
        options = self.accelerator.zeroshard_options
        planned = "limit" in options and "batch" not in options
        batch = _longest(train_dataloader, self._train_batch_size) if planned else None
        if batch is None:
            return super()._prepare_for_training(*asked)
        try:
            self.accelerator.zeroshard_options = {**options, "batch": batch}
            return super()._prepare_for_training(*asked)
        except zs.PlanError as error:
            if "cannot be traced" not in str(error):
                raise
            log.warning("activations are not planned for: %s", error)
            self.accelerator.zeroshard_options = options
            return super()._prepare_for_training(*asked)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """The accelerator knows the norm of a sharded model."""
        return False if self._run() is not None else bool(super()._has_mixed_mesh_grads(model))

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        """With `LogStats` among the callbacks, what the run moved and waited since the last time, too."""
        run = self._run()
        if run is not None and any(isinstance(c, LogStats) for c in self.callback_handler.callbacks):
            now = run.stats()
            before, self._logged = getattr(self, "_logged", None), now
            since = now - before if before is not None and before.steps <= now.steps else now
            logs |= {f"zeroshard/{name}": value for name, value in since.scalars().items()}
        super().log(logs, *args, **keywords)

    # ---- states ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save whole weights, which `from_pretrained` reads. Every rank calls it."""
        run = self._run()
        if run is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        state = run.full_state_dict(None if self.args.save_on_each_node else 0)
        if self.args.should_save:
            self._save(folder, state_dict=state)
            self._name_dtype(folder, state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _name_dtype(self, folder: str, state: Mapping[str, Any]) -> None:
        """The precision of what was saved, where the configuration names that of the parameters in use."""
        config: Any = getattr(self.accelerator.unwrap_model(self.model), "config", None)
        floats = [value.dtype for value in state.values() if value.is_floating_point()]
        if floats and (Path(folder) / "config.json").exists() and hasattr(config, "save_pretrained"):
            config.dtype = str(floats[0]).removeprefix("torch.")
            config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The optimizer's state goes into a ZeroShard checkpoint, with the weights that it belongs to."""
        run = self._run()
        if run is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        run.save(Path(output_dir, FOLDER), overwrite=True)
        if run.rank == 0:
            Path(output_dir, BATCH).write_text(json.dumps(asdict(_Batch.of(self.args))), encoding="utf-8")
        with self.accelerator.saving_elsewhere():
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Take the weights, and go on with the batch of a step that the checkpoint was trained with: what
        was trained is skipped by counting steps."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if Path(resume_from_checkpoint, BATCH).exists() and not self.args.auto_find_batch_size:
            saved = _Batch(**json.loads(Path(resume_from_checkpoint, BATCH).read_text(encoding="utf-8")))
            self._keep_batch(saved, _Batch.of(self.args))

    def _keep_batch(self, saved: _Batch, now: _Batch) -> None:
        if now.ranks == saved.ranks or now.rows == saved.rows:
            return
        kept = now.for_rows(saved.rows)
        if kept is None and not self.args.ignore_data_skip:
            raise zs.OptionError(
                f"the checkpoint was trained with {saved.rows} rows in a step ({saved}), and {now.ranks} "
                f"ranks have no equal shares of them: pass ignore_data_skip=True to begin an epoch with "
                f"{now.rows} rows in a step ({now}), or a number of ranks that divides {saved.rows}."
            )
        if kept is None:
            log.warning("going on with %d rows in a step, after %d: %s", now.rows, saved.rows, now)
            return
        log.warning("a step keeps its %d rows: %s, after %s", saved.rows, kept, saved)
        self._train_batch_size = self.args.per_device_train_batch_size = kept.per_rank
        self.args.gradient_accumulation_steps = kept.accumulated

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Of a checkpoint of ours, or of one that a plain Trainer has saved, which rank 0 reads for all."""
        run = self._run()
        if run is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if Path(checkpoint, FOLDER).is_dir():
            run.load(Path(checkpoint, FOLDER))
        elif (file := Path(checkpoint, "optimizer.pt")).exists():
            state = _loaded(file)
            if state == zsa.ELSEWHERE:
                raise zs.CheckpointError(
                    f"{checkpoint} has no folder {FOLDER!r}, in which the state of its optimizer was. Put it "
                    "back; or remove optimizer.pt, which says so, and the optimizer begins afresh."
                )
            run.load_full_optimizer_state_dict(state if run.rank == 0 else None)
        if (file := Path(checkpoint, "scheduler.pt")).exists():
            self.lr_scheduler.load_state_dict(_loaded(file))


def _loaded(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _longest(loader: Any, each: int) -> Any:
    """A micro-batch of the longest among the first rows, or None where rows cannot be taken one by one. What
    is drawn at random meanwhile is drawn again."""
    rows: Any = getattr(loader, "dataset", None)
    if not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")):
        return None
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        first = [rows[at] for at in range(min(len(rows), LOOKED_AT))]
        return loader.collate_fn(sorted(first, key=_length, reverse=True)[:each])
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])


def _length(row: Any) -> int:
    """How much there is in a row: tokens, mostly."""
    values = row.values() if isinstance(row, Mapping) else row
    return sum(v.numel() if isinstance(v, torch.Tensor) else np.size(v) for v in values)


def _let_trl_gather() -> None:
    """TRL hands weights to vLLM one by one; where they are rows, it is to ask for whole tensors, as it does
    of FSDP2."""
    module: Any = sys.modules.get("trl.distributed")
    if module is None or hasattr(module, "_zeroshard"):
        return
    module._zeroshard = plain = module.DistributedBackend.__init__

    def __init__(self: Any, accelerator: Any) -> None:
        plain(self, accelerator)
        if isinstance(accelerator, zsa.ZeroShardAccelerator) and accelerator.num_processes > 1:
            self.fsdp_version = 2

    module.DistributedBackend.__init__ = __init__


@dataclass(frozen=True)
class _Batch:
    """How many rows a step is trained with."""

    ranks: int
    per_rank: int
    accumulated: int

    @classmethod
    def of(cls, args: Any) -> _Batch:
        return cls(args.world_size, args.train_batch_size, args.gradient_accumulation_steps)

    @property
    def rows(self) -> int:
        return self.ranks * self.per_rank * self.accumulated

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, per_device_train_batch_size={self.per_rank}, "
            f"gradient_accumulation_steps={self.accumulated}"
        )

    def for_rows(self, rows: int) -> _Batch | None:
        """On as many ranks, and no more rows of a rank at once."""
        share, left = divmod(rows, self.ranks)
        if left or not share:
            return None
        at_once = max(n for n in range(1, min(self.per_rank, share) + 1) if share % n == 0)
        return replace(self, per_rank=at_once, accumulated=share // at_once)


# ---- plain scripts ----

_PLAIN = Trainer.create_accelerator_and_postprocess
_enabled: dict[str, Any] | None = None


def enable(**options: Any) -> None:
    """Let every trainer, and every `Accelerator`, that is made from now on shard what it trains, with the
    options of `zs.shard`. Calling it again replaces the options."""
    global _enabled
    zsa.enable(**options)
    _enabled = options
    take_engines()
    Trainer.create_accelerator_and_postprocess = _begin


def disable() -> None:
    """Trainers and accelerators are plain ones again; those that were made stay as they are."""
    global _enabled
    zsa.disable()
    leave_engines()
    _enabled = None
    Trainer.create_accelerator_and_postprocess = _PLAIN


def _begin(self: Any) -> None:
    """A trainer of a class of the user's stays of that class."""
    kind = type(self)
    if not issubclass(kind, ZeroShardTrainer):
        space = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        bases = (ZeroShardTrainer,) if kind is Trainer else (ZeroShardTrainer, kind)
        self.__class__ = type(kind.__name__, bases, space)
    _PLAIN(self)
    self._adopt()
