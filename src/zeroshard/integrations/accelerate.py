"""Hugging Face Accelerate: its loop stays, and what it prepares is sharded.

    from zeroshard.integrations.accelerate import ZeroShardAccelerator

    accelerator = ZeroShardAccelerator(stage=3, mixed_precision="bf16", gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Or `enable(stage=3)` before a script that makes a plain `Accelerator`. `prepare` shards each model with its
optimizers in place, where Accelerate would wrap it in DDP.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs

from .attached import OF_FROZEN, AttachedRun, attach, attached, run_of
from .options import check_options

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DynamoBackend, convert_outputs_to_fp32
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"zeroshard.integrations.accelerate needs the package {missing.name!r}: "
        "pip install 'zeroshard[accelerate]'",
        name=missing.name,
    ) from missing

#: In the folder of a saved state: the checkpoint of the first sharded model; the next are `zeroshard_1`, ….
FOLDER = "zeroshard"
_COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}
#: What stands in Accelerate's files where the state of a sharded optimizer would be.
ELSEWHERE = {"in the folder": FOLDER}
_ENGINES = {
    "deepspeed_plugin": ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED"),
    "deepspeed_plugins": ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED"),
    "fsdp_plugin": ("FSDP", "ACCELERATE_USE_FSDP"),
    "megatron_lm_plugin": ("Megatron-LM", "ACCELERATE_USE_MEGATRON_LM"),
}


class _Elsewhere(dict[str, Tensor]):
    """The weights of a sharded model among those that `save_state` is about to write: they have a checkpoint
    of their own."""


class AcceleratedShardedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer of a sharded model, as Accelerate's loops use it."""

    def __init__(self, optimizer: Optimizer, scaler: object, run: zs.Run) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self._run, self._norms = run, list[Tensor]()
        self.saved_elsewhere = False

    def norm_to_come(self) -> Tensor:
        """A number that the next step fills in: the norm that it finds."""
        self._norms.append(torch.tensor(math.nan))
        return self._norms[-1]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step as Accelerate does: where gradients are complete."""
        super().step(closure)
        for norm in self._norms:
            norm.fill_(self._run.stats().norm)
        self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, but while `save_state` has put it into a checkpoint."""
        return dict(ELSEWHERE) if self.saved_elsewhere else self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what an optimizer, sharded or not, has given."""
        if state_dict != ELSEWHERE:
            super().load_state_dict(state_dict)


class ZeroShardAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` that shards what it prepares. It takes the arguments of `Accelerator` and the options
    of `zs.shard`; `mixed_precision="bf16"` is `precision="bf16"`, with an fp32 master.

    A model and its optimizers go into one call of `prepare`, as many of both as there are. A model that
    nothing trains is sharded at stage 3, and stays whole below it.
    """

    step: int  # Accelerate's: micro-batches so far

    def __init__(self, *args: Any, **keywords: Any) -> None:
        theirs = inspect.signature(_PLAIN_INIT).parameters
        options = {name: value for name, value in keywords.items() if name not in theirs}
        check_options(options)
        refuse_other_engines(keywords)
        super().__init__(*args, **{name: value for name, value in keywords.items() if name in theirs})
        self.take_options(options)

    def take_options(self, options: Mapping[str, Any]) -> None:
        """Begin to shard with these; told once, before anything is prepared."""
        check_options(options)
        self.zeroshard_options = dict(options)
        self._unpaired: list[nn.Module] = []  # trainable models that came without an optimizer
        self._saving = False
        #: Whether a model that is prepared for evaluation is one that is trained elsewhere in the script.
        self.trains: Callable[[nn.Module], bool] = lambda model: True
        if self.state.mixed_precision == "fp16" and self.device.type == "cpu":
            # Accelerate alone would compute in fp32 here, unasked.
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")
        self._asked()

    # ---- preparing ----

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard each model with its optimizers, and prepare all else as Accelerate does."""
        if device_placement is None or len(device_placement) == len(args):
            self._shard_pairs(args, device_placement or [self.device_placement] * len(args))
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A model without an optimizer: sharded if nothing trains it, else waiting for its optimizer."""
        if evaluation_mode and not self.trains(model):
            model.requires_grad_(False)
            evaluation_mode = False
        prepared = evaluation_mode or getattr(model, "_is_accelerate_prepared", False)
        if not prepared and any(p.requires_grad for p in model.parameters()):
            if not any(other is model for other in self._unpaired):
                self._unpaired.append(model)
                self._models.append(model)
            return self._placed(model, device_placement)
        asked = self._asked()
        if not prepared and asked.get("stage", 3) == 3 and not {"limit", "plan"} & asked.keys():
            options = {name: value for name, value in asked.items() if name in OF_FROZEN}
            self._shard(self._placed(model, device_placement), [], options)
        return cast(nn.Module, super().prepare_model(model, device_placement, evaluation_mode=True))

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Wrap an optimizer, so that it steps where gradients are complete."""
        held = next(
            (h for h in map(attached, self._models) if h and _is_among(optimizer, h.optimizers)), None
        )
        if held is None or held.run is None:
            return cast(Optimizer, super().prepare_optimizer(optimizer, device_placement))
        wrapped = AcceleratedShardedOptimizer(optimizer, self.scaler, held.run)
        self._optimizers.append(wrapped)
        return wrapped

    def _shard_pairs(self, given: Sequence[Any], placements: Sequence[bool | None]) -> None:
        """Shard the models among what is given with the optimizers that are, and those that came before."""
        optimizers = [one for one in given if isinstance(one, Optimizer) and not _prepared(one)]
        placed = {id(one): place for one, place in zip(given, placements, strict=True)}
        known = [one for one in (*given, *self._models) if isinstance(one, nn.Module)]  # those that wait, too
        models = list({id(model): model for model in known}.values())
        whose: dict[int, list[Optimizer]] = {}
        for optimizer in optimizers:
            params = {id(p) for group in optimizer.param_groups for p in group["params"]}
            owners = [model for model in models if any(id(p) in params for p in model.parameters())]
            _refuse_owners(optimizer, owners)
            for model in owners:
                whose.setdefault(id(model), []).append(optimizer)
        for model in models:
            if id(model) in whose:
                self._shard(self._placed(model, placed.get(id(model))), whose[id(model)], self._asked())
        self._unpaired = [model for model in self._unpaired if run_of(model) is None]

    def _placed(self, model: nn.Module, device_placement: bool | None) -> nn.Module:
        wanted = self.device_placement if device_placement is None else device_placement
        on_meta = any(p.is_meta for p in model.parameters())
        return model.to(self.device) if wanted and not on_meta else model

    def _shard(self, model: nn.Module, optimizers: list[Optimizer], options: dict[str, Any]) -> None:
        self._drop_autocast(model)
        dynamo = self.state.dynamo_plugin
        if dynamo.backend != DynamoBackend.NO:
            self._compile(model, dynamo)
        run = zs.shard(model, optimizers or None, **options)
        if run.options.precision is not None:
            self._return_fp32(model)
        attach(model, run, optimizers)
        model._is_accelerate_prepared = True  # type: ignore[assignment]

    def _asked(self) -> dict[str, Any]:
        """The options for `zs.shard`, the precision that Accelerate was told among them."""
        options, kind = dict(self.zeroshard_options), self.state.mixed_precision
        if "plan" in options:
            return options
        named = zs.Options(precision=options.get("precision")).precision
        if kind not in (*_COMPUTE, "no"):
            raise zs.OptionError(
                f'mixed_precision="{kind}" does not go with ZeroShard: pass "bf16", "fp16" or "no".'
            )
        if kind in _COMPUTE and "precision" not in options:
            options["precision"] = kind
        elif kind in _COMPUTE and (named is None or named.compute != _COMPUTE[kind]):
            raise zs.OptionError(
                f'mixed_precision="{kind}" and precision={options["precision"]!r} contradict each other: '
                "drop one of them."
            )
        elif kind == "no" and named is not None and named.compute == "float16":
            raise zs.OptionError(
                f"precision={options['precision']!r} needs a GradScaler, which Accelerate makes where it is "
                'told: pass mixed_precision="fp16" (fp16=True to a Trainer).'
            )
        return options

    def _compile(self, model: nn.Module, dynamo: Any) -> None:
        """Compile in place: hooks of units stay outside of the graphs."""
        keywords = dynamo.to_kwargs()
        blocks = [
            m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(b) for b in m}) == 1
        ]
        if getattr(dynamo, "use_regional_compilation", False) and blocks:
            for block in (block for each in blocks for block in each):
                block.compile(**keywords)
        else:
            model.compile(**keywords)

    def _return_fp32(self, model: nn.Module) -> None:
        """What the model returns is fp32, as under Accelerate's autocast."""
        forward = model.forward
        vars(model)["_original_forward"] = forward
        if hasattr(forward, "__func__"):
            model.forward = MethodType(convert_outputs_to_fp32(forward.__func__), model)
        else:
            model.forward = convert_outputs_to_fp32(forward)

    def _drop_autocast(self, model: nn.Module) -> None:
        """An evaluation before the training has put autocast around its forward."""
        if "_original_forward" in vars(model):
            vars(model).pop("forward", None)
            original = vars(model).pop("_original_forward")
            if model.forward != original:
                model.forward = original

    # ---- the loop ----

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """Backward as Accelerate does it, once every model has its optimizer."""
        if self._unpaired:
            raise zs.StateError(
                f"{type(self._unpaired[0]).__name__} was prepared without its optimizer, so nothing is "
                "sharded: accelerator.prepare(model, optimizer) takes them together, or the optimizer in a "
                "later call, before the first backward."
            )
        super().backward(loss, **keywords)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients wait on their ranks: `run.no_sync()`."""
        run = run_of(model)
        with super().no_sync(model) if run is None else run.no_sync():
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip by the norm of the whole gradient, and return it. With `clip_norm=` the step clips, and the
        norm stands in what is returned once the step has been made."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        held = self._clipped_in_step(params)
        if held is None or held.run is None:
            norm = super().clip_grad_norm_(params, max_norm, norm_type)
            return cast(Tensor, norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        limit = held.run.options.clip_norm
        if norm_type != 2 or max_norm not in (limit, math.inf):
            raise zs.OptionError(
                f"clip_grad_norm_(…, {max_norm}, norm_type={norm_type}) does not agree with "
                f"clip_norm={limit}, by which the step itself clips: pass the same, or drop clip_norm=."
            )
        sharded = [o for o in self._optimizers if isinstance(o, AcceleratedShardedOptimizer)]
        return next(o for o in sharded if _is_among(o.optimizer, held.optimizers)).norm_to_come()

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Each element of the gradient, clipped by a value."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._clipped_in_step(params) is not None:
            raise zs.OptionError(
                "clip_grad_value_() has no gradients to clip: with clip_norm= updates begin in backward. "
                "Drop clip_norm=."
            )
        super().clip_grad_value_(params, clip_value)

    def _clipped_in_step(self, params: Sequence[Tensor]) -> AttachedRun | None:
        for held in map(attached, self._models):
            if held is not None and held.run is not None and held.run.options.clip_norm is not None:
                if any(id(p) in held.params for p in params):
                    return held
        return None

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Refused where ranks would get different numbers of batches."""
        if any(isinstance(one, nn.Module) and run_of(one) is not None for one in joinables):
            if not (self.even_batches if even_batches is None else even_batches):
                raise zs.OptionError(
                    "join_uneven_inputs(even_batches=False) needs DDP's own join, which a sharded model does "
                    "not have: leave even_batches=True, so that all ranks get equally many batches."
                )
            yield
        else:
            with super().join_uneven_inputs(joinables, even_batches):
                yield

    # ---- states ----

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state on rank 0, in host memory, and `{}` elsewhere. Every rank calls it."""
        run = run_of(model)
        if run is None:
            return cast(dict[str, Any], super().get_state_dict(model, unwrap))
        return _Elsewhere() if self._saving else run.full_state_dict()

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **keywords: Any
    ) -> str:
        """Save all that training needs. What is sharded goes into ZeroShard checkpoints inside of the folder,
        which load at another number of ranks and another stage."""
        self._saving = True
        self._save_model_state_pre_hook[FOLDER] = self._save_runs  # behind the user's own
        try:
            with self.saving_elsewhere():
                return cast(str, super().save_state(output_dir, safe_serialization, **keywords))
        finally:
            del self._save_model_state_pre_hook[FOLDER]
            self._saving = False

    @contextmanager
    def saving_elsewhere(self) -> Iterator[None]:
        """States of sharded optimizers are in checkpoints: what others save is a word that says so."""
        sharded = [o for o in self._optimizers if isinstance(o, AcceleratedShardedOptimizer)]
        for optimizer in sharded:
            optimizer.saved_elsewhere = True
        try:
            yield
        finally:
            for optimizer in sharded:
                optimizer.saved_elsewhere = False

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **keywords: Any
    ) -> None:
        """Go on from a saved state: one of ours, or one that Accelerate saved without sharding."""
        self._loaded_step: int | None = None
        self._load_model_state_pre_hook[FOLDER] = self._load_runs
        try:
            super().load_state(input_dir, load_kwargs, **keywords)
        finally:
            del self._load_model_state_pre_hook[FOLDER]
        if self._loaded_step is not None:  # Accelerate finds it for ranks that there were then
            self.step = self._loaded_step

    def _save_runs(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        weights[:] = [state for state in weights if not isinstance(state, _Elsewhere)]
        for number, run in enumerate(self._runs()):
            run.save(_numbered(folder, number), extra={"step": self.step})

    def _load_runs(self, models: list[nn.Module], folder: str) -> None:
        runs = self._runs()
        if runs and _numbered(folder, 0).exists():
            for number, run in enumerate(runs):
                self._loaded_step = run.load(_numbered(folder, number))["step"]
            models[:] = [model for model in models if run_of(model) is None]
        elif runs:  # saved without sharding: each rank takes its rows of whole tensors
            for number, model in enumerate(models):
                model.load_state_dict(_whole_weights(Path(folder), number))
            models.clear()

    def _runs(self) -> list[zs.Run]:
        return [run for run in map(run_of, self._models) if run is not None]


def _numbered(folder: str, number: int) -> Path:
    return Path(folder, f"{FOLDER}_{number}" if number else FOLDER)


def _whole_weights(folder: Path, number: int) -> dict[str, Any]:
    """The weights of one model in a folder that Accelerate has written, where DDP's names have a prefix."""
    ending = f"_{number}" if number else ""
    if (file := folder / f"model{ending}.safetensors").exists():
        state = load_file(file)
    else:
        state = torch.load(folder / f"pytorch_model{ending}.bin", map_location="cpu", weights_only=True)
    if all(name.startswith("module.") for name in state):
        return {name.removeprefix("module."): value for name, value in state.items()}
    return state


def _is_among(one: object, others: Iterable[object]) -> bool:
    return any(one is other for other in others)


def _prepared(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_is_accelerate_prepared", False))


def _refuse_owners(optimizer: Optimizer, owners: Sequence[nn.Module]) -> None:
    """An optimizer of several models, or of one that was sharded without it."""
    if len(owners) > 1:
        names = " and ".join(type(model).__name__ for model in owners)
        raise zs.ModelError(
            f"one {type(optimizer).__name__} has parameters of {names}, and a run has one model: make them "
            "parts of one nn.Module, or make an optimizer for each."
        )
    if owners and run_of(owners[0]) is not None:
        raise zs.ModelError(
            f"{type(owners[0]).__name__} is sharded already, with other optimizers than this "
            f"{type(optimizer).__name__}. Pass all of them to one call of prepare(), or call "
            "run_of(model).close() and make the optimizer afterwards."
        )


def refuse_other_engines(keywords: Mapping[str, Any]) -> None:
    """Another library that would shard, asked for in the call or by `accelerate launch`."""
    for keyword, (engine, variable) in _ENGINES.items():
        if keywords.get(keyword) is not None or os.environ.get(variable, "false").lower() in ("true", "1"):
            raise zs.OptionError(
                f"this Accelerator is told to use {engine} ({keyword}=, or the file of `accelerate launch`), "
                "and ZeroShard shards in its place: take it out, and pass stage= and offload= instead."
            )


# ---- plain scripts ----

_PLAIN_INIT = Accelerator.__init__
_enabled: dict[str, Any] | None = None


def enable(**options: Any) -> None:
    """Let every `Accelerator` that is made from now on shard what it prepares, with the options of
    `zs.shard`. Calling it again replaces the options."""
    global _enabled
    check_options(options)
    _enabled = options
    Accelerator.__init__ = _begin


def disable() -> None:
    """Accelerators are plain ones again; those that were made stay as they are."""
    global _enabled
    _enabled = None
    Accelerator.__init__ = _PLAIN_INIT


def _begin(self: Any, *args: Any, **keywords: Any) -> None:
    ours = isinstance(self, ZeroShardAccelerator)
    if not ours:
        refuse_other_engines(keywords)
    _PLAIN_INIT(self, *args, **keywords)
    if not ours and _enabled is not None:
        adopt(self, _enabled)


def adopt(accelerator: Any, options: Mapping[str, Any]) -> None:
    """Make an accelerator one that shards; one of a class of the user's stays of that class."""
    kind = type(accelerator)
    if kind is Accelerator:
        accelerator.__class__ = ZeroShardAccelerator
    else:
        accelerator.__class__ = type(
            kind.__name__, (ZeroShardAccelerator, kind), {"__module__": kind.__module__}
        )
    accelerator.take_options(options)
