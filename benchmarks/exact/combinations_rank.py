"""What each rank does with a combination: the training loop of a user, with everything that happens in it."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from combinations_case import CLIPS, CODED, PLANNED, STEPS, Case, Leg
from combinations_model import (
    DEVICE,
    batch,
    empty_of,
    file_of,
    late_group,
    model_of,
    optimizers_of,
    options_of,
    schedules_of,
    set_frozen,
    skipped_block,
    unseen,
)
from combinations_plain import (
    LATE_STEP,
    PLAIN_LIMIT,
    SCALE,
    Trained,
    clip,
    halve_rates,
    happen_between,
    may_close,
    penalty,
    weights_of,
    write,
)
from torch import Tensor

import zeroshard as zs

# Whole state dicts are read back only where weights have no second half and lie in memory.
RELOADED = ("none", "host", "parameters on host", "int8 moments", "no undo")


def refusal(case: Case) -> str | None:
    """The text with which `zs.shard` refuses a combination, if it does."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = model_of(case)
            optimizers = optimizers_of(case, model)
            run = zs.shard(
                model, optimizers if len(optimizers) > 1 else optimizers[0], **options_of(case, Path(folder))
            )
        except zs.ZeroShardError as error:
            return f"{type(error).__name__}: {error}"
        run.close()
        return None


def train(legs: list[Leg], shared: Path) -> list[Trained]:
    """Trains the legs at once, a step of each in turn: runs of one process must not touch one another."""
    logging.getLogger("zeroshard").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="grad and param do not obey")  # torch's, of its own strides
    with tempfile.TemporaryDirectory() as own:
        loops = [Loop(leg, shared / str(n), Path(own, str(n))) for n, leg in enumerate(legs)]
        for step in range(legs[0].first, legs[0].end):
            for loop in loops:
                loop.step(step)
        return [loop.end() for loop in loops]


class Loop:
    """The leg of a training on this rank. `run` is None from where the case closes it."""

    def __init__(self, leg: Leg, checkpoint: Path, folder: Path) -> None:
        folder.mkdir()
        case = leg.case
        self.leg, self.case, self.checkpoint, self.found = leg, case, checkpoint, Trained()
        self.moving = checkpoint.with_suffix(".moving")
        self.rank = dist.get_rank() if case.world > 1 else 0
        self.model, fill = empty_of(case) if case.start == "meta" else (model_of(case), None)
        self.optimizers = optimizers_of(case, self.model)
        early = case.schedule in ("before", "one cycle")
        self.schedules = schedules_of(case, self.optimizers) if early else []
        options: dict[str, Any] = {"init": fill, **options_of(case, folder)}
        if case.file:
            options = {**options, "init": None, "weights": file_of(case, folder)}
        self.run: zs.Run | None = self.planned(options) if case.offload == PLANNED else self.shard(options)
        if not early:
            self.schedules = schedules_of(case, self.optimizers)
        if case.method:
            zs.register_forward_method(self.model, "training_step")
        scaled = case.precision == "fp16"
        self.scalers = [torch.amp.GradScaler(DEVICE, init_scale=SCALE, growth_interval=10**6)] * scaled
        self.saved = False
        if leg.first:
            for step in range(leg.first):
                set_frozen(case, self.model, step)
            self.run.load(self.moving, schedulers=self.schedules, scalers=self.scalers)

    def shard(self, options: dict[str, Any]) -> zs.Run:
        owners = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        return zs.shard(self.model, owners, **options)

    def planned(self, options: dict[str, Any]) -> zs.Run:
        """Within the case's limit, or the next of which a plan can be made."""
        case = self.case
        assert case.limit is not None
        limit = case.limit * sum(p.numel() for p in self.model.parameters())
        asked = {"batch": batch(case, 0, case.world - 1, 0), "loss": lambda out: out["loss"]}
        while True:
            try:
                return self.shard({**options, **asked, "limit": int(limit), "micro_batches": case.accumulate})
            except zs.PlanError:
                limit *= 1.3

    def close(self) -> None:
        if self.run is not None:
            if self.case.offload == PLANNED:
                self.check_plan(self.run.stats())
            self.run.close()
            self.run = None

    @staticmethod
    def check_plan(stats: zs.Stats) -> None:
        """Of what lasts no more was there than planned. (Gathered units and activations may be more: events
        keep the model whole, or evaluate.)"""
        lasting = ("parameters", "gradients", "state", "buckets", "host", "disk")
        over = {k: (stats.peak[k], stats.planned[k]) for k in lasting if stats.peak[k] > stats.planned[k]}
        assert not over, f"bytes beyond the plan, actual and planned: {over}"

    def end(self) -> Trained:
        if self.leg.end < STEPS and self.run is not None:
            self.run.save(self.moving, schedulers=self.schedules, scalers=self.scalers)
        self.close()
        self.found.weights = weights_of(self.model)
        return self.found

    def step(self, step: int) -> None:
        case = self.case
        if case.zero_at == "start":
            self.zero()
        for event in case.events.get(step, ()):
            self.happen(event, step)
        set_frozen(case, self.model, step)
        if case.late_group and step == LATE_STEP:
            self.optimizers[0].add_param_group(late_group(self.model))
        skipped = case.has("skip step", step)
        by_hand = bool(self.scalers) or case.clip in ("plain", "value") or len(self.optimizers) > 1
        if case.closure and self.run is not None and not by_hand and not skipped:
            self.optimizers[0].step(lambda: self.backward(step))
        else:
            self.backward(step)
            if not skipped:
                self.update(step)
        if case.zero_at == "end" or (skipped and (case.zero_at == "start" or case.offload != "none")):
            self.zero()
        if not skipped:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, where a scaler or a closure takes the step
                for schedule in self.schedules:
                    schedule.step()

    def zero(self) -> None:
        if self.case.zero == "of the model":
            self.model.zero_grad()
        for optimizer in self.optimizers if self.case.zero != "of the model" else ():
            optimizer.zero_grad(set_to_none=self.case.zero == "to none")
        if self.case.late_group:
            self.model.zero_grad()  # the late group's parameters are in no optimizer yet

    def backward(self, step: int) -> float:
        case, losses = self.case, list[float]()
        micro_batches = case.micro_batches(step)
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            quiet = case.no_sync and not last and self.run is not None
            with self.run.no_sync() if quiet and self.run else contextlib.nullcontext():
                call = self.model.training_step if case.method else self.model
                loss = call(batch(case, step, self.rank, micro), skipped_block(case, step))["loss"]
                losses.append(loss.item())
                if case.zero_at == "middle" and micro == 0:
                    self.zero()
                if case.has("evaluate in a step", step) and micro == 0 and quiet:
                    self.evaluated()
                self.follow(loss / micro_batches, step, last)
        self.found.losses.append(sum(losses) / len(losses))
        return losses[-1]

    def follow(self, loss: Tensor, step: int, last: bool) -> None:
        """The backward, or two of them, with what the loop adds to the loss."""
        case = self.case
        added = penalty(self.model) if last and case.has("penalty", step) else None
        if added is not None:
            loss = loss + added
        if last and case.has("overflow", step) and self.rank == step % case.world:
            loss = loss * math.inf
        for scaler in self.scalers:
            loss = scaler.scale(loss)
        if last and case.has("two losses", step):
            (loss * 0.25).backward(retain_graph=True)
            loss = loss * 0.75
        loss.backward()

    def update(self, step: int) -> None:
        events = self.case.events.get(step, ())
        for scaler in self.scalers:
            for optimizer in self.optimizers:
                scaler.unscale_(optimizer)
        if "evaluate between" in events and "overflow" not in events:
            self.found.evaluations.append(self.evaluated())
        if "overflow" not in events:
            happen_between(events, self.model, self.optimizers)
        limit = CLIPS.get(self.case.clip) if self.run is None else None
        clip(self.case, self.model, PLAIN_LIMIT if self.case.clip == "plain" else limit)
        for optimizer in self.optimizers:
            if self.scalers:
                self.scalers[0].step(optimizer)
            else:
                optimizer.step()
                if "step twice" in events:
                    optimizer.step()
        for scaler in self.scalers:
            scaler.update()

    def evaluated(self) -> float:
        with torch.no_grad():
            return float(self.model(unseen(self.case))["loss"])

    def happen(self, event: str, step: int) -> None:
        """What comes before a step, with or without a run."""
        if event == "close" and may_close(self.case, step):
            self.close()
        elif event == "evaluate":
            self.model.eval()
            self.found.evaluations.append(self.evaluated())
            self.model.train()
        elif event == "infer":
            with torch.inference_mode():
                self.found.evaluations.append(self.model(unseen(self.case))["loss"].item())
        elif event == "state dict":
            self.model.state_dict()
        elif event == "optimizer state dict":
            for optimizer in self.optimizers:
                optimizer.state_dict()
        elif event == "reload state dicts":
            self.reload()
        elif event == "halve rate":
            halve_rates(self.optimizers)
        elif event == "raise in forward":
            self.model.raises = True
            with contextlib.suppress(ValueError):
                self.model(batch(self.case, step, self.rank, 0))
            self.model.raises = False
        elif self.run is not None:
            self.happen_to(self.run, event)
        elif event == "write gathered":
            write(dict(self.model.named_parameters()))
        elif event == "kept full":
            self.found.evaluations.append(self.evaluated())

    def happen_to(self, run: zs.Run, event: str) -> None:
        """What only a run can do."""
        if event == "gather":
            with run.gathered() as weights:
                assert all(bool(torch.isfinite(w).all()) for w in weights.values())
        elif event == "write gathered":
            with run.gathered("norm.weight", "blocks.0.down.weight", write=True) as weights:
                write(weights)
        elif event == "save":
            run.save(self.checkpoint, schedulers=self.schedules, scalers=self.scalers)
            self.saved = True
        elif event == "save in background":
            run.save(
                self.checkpoint,
                schedulers=self.schedules,
                scalers=self.scalers,
                background=True,
                overwrite=True,
            )
            self.saved = True
        elif event.startswith("full"):
            self.give_and_take(run, event)
        elif event == "load" and self.saved:
            run.load(self.checkpoint, schedulers=self.schedules, scalers=self.scalers)
        elif event == "kept full":
            with run.kept_full():
                values = [self.evaluated() for _ in range(1 + self.rank)]  # ranks need not keep in step
            self.found.evaluations.append(values[-1])
        elif event == "stats":
            run.stats()
        elif event == "publish":
            run.publish()
        elif event == "deep copy":
            with run.gathered():
                template = copy.deepcopy(self.model).to(DEVICE)
            with torch.no_grad():
                template(unseen(self.case))

    def give_and_take(self, run: zs.Run, event: str) -> None:
        """The whole state, on one rank or on all, goes in again and changes nothing."""
        rank = self.case.world - 1 if event == "full state of one" else None
        if event != "full optimizer state":
            run.load_full_state_dict(run.full_state_dict(rank), rank)
        for optimizer in self.optimizers if event == "full optimizer state" else ():
            run.load_full_optimizer_state_dict(
                run.full_optimizer_state_dict(optimizer, rank), optimizer, rank
            )

    def reload(self) -> None:
        """What comes out goes in again, and changes nothing."""
        state = copy.deepcopy(self.model.state_dict())
        if self.case.offload in RELOADED:
            self.model.load_state_dict(state)
        for optimizer in self.optimizers if self.case.offload not in CODED else ():
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
