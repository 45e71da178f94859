"""Fabric's strategy, for either of the packages in which Lightning comes: what it does around its DDP."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import zeroshard as zs

from ..attached import run_of
from .runs import (
    begin,
    constructed,
    end,
    entered,
    is_folder,
    on_meta,
    optimizers_of,
    pickled,
    refuse_remote,
    unpickled,
    with_precision,
)

#: In the `extra` of a checkpoint: what else was saved with the model and its optimizers.
FABRIC = "fabric"

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class Entry(nn.Module):
    """What Fabric calls for a sharded model: its forward, or a method that was marked as one. `waits` says
    whether the model is one that trains and has no optimizer yet."""

    def __init__(self, module: nn.Module, waits: Callable[[nn.Module], bool] | None = None) -> None:
        super().__init__()
        self.module, self._waits = module, waits

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Fabric lets a marked method stand in place of the forward, for one call. What it is given is left
        as it is: the forward that it calls casts its own inputs."""
        module = self.module
        standing = vars(module).get("forward")
        if "_redirection_through_forward" in getattr(standing, "__qualname__", ""):
            output = entered(module, cast(Callable[..., Any], standing), args, kwargs)
        else:
            output = module(*args, **kwargs)
        if self._waits is not None and self._waits(module):
            return tree_map_only(Tensor, self._watched, output)
        return output

    def _watched(self, value: Tensor) -> Tensor:
        watched: Tensor = _Watched.apply(value, self) if value.requires_grad else value  # type: ignore[no-untyped-call]
        return watched

    def refuse_unpaired(self) -> None:
        """In backward, `fabric.backward(loss)` or `loss.backward()`."""
        if self._waits is not None and self._waits(self.module):
            raise zs.StateError(
                f"{type(self.module).__name__} was set up without its optimizer, so nothing is sharded: "
                "fabric.setup(model, optimizer) takes them together, or "
                "fabric.setup_optimizers(optimizer), before the first backward."
            )


class _Watched(torch.autograd.Function):
    """An output of a model, in whose backward the model is to have its optimizer."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, entry: Entry) -> Tensor:
        ctx.entry = entry
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.entry.refuse_unpaired()
        return grads[0], None


def inner(module: nn.Module) -> nn.Module:
    """The model itself."""
    return module.module if isinstance(module, Entry) else module


class SyncControl(_Base):  # type: ignore[misc]
    """In front of Lightning's `_BackwardSyncControl`: gradients wait on their ranks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """`run.no_sync()`."""
        run = run_of(inner(module))
        return run.no_sync() if enabled and run is not None else nullcontext()


class FabricSharding(_Base):  # type: ignore[misc]
    """A strategy of `Fabric` that shards what it sets up: the arguments of `DDPStrategy` that say where ranks
    run, and the options of `zs.shard`. `whole_checkpoints=True`: checkpoints are one file."""

    #: Lightning's environment for processes that torchrun, or `zeroshard run`, has started.
    environment: Callable[[], Any]
    #: Of this module's class, and of Lightning's for such.
    sync_control: Callable[[], Any]

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = None,
        start_method: str = "popen",
        *,
        whole_checkpoints: bool = False,
        **options: Any,
    ) -> None:
        named = {"precision": precision} if isinstance(precision, (str, zs.Precision)) else {}
        theirs = constructed(self, {**options, **named}, timeout, cluster_environment, whole_checkpoints)
        self._sharded: list[nn.Module] = []
        self._unpaired: list[nn.Module] = []  # that train, and came without an optimizer
        self._norms: list[tuple[zs.Run, Tensor]] = []  # that the next step finds
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision=None if named else precision,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **theirs,
        )
        self._backward_sync_control = self.sync_control()

    # ---- setting up ----

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard a model with its optimizers."""
        self._begin(module, optimizers)
        return Entry(module), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """A model without an optimizer: sharded if nothing trains it, else waiting for its optimizer."""
        if any(p.requires_grad for p in module.parameters()):
            self._unpaired.append(module)
            return Entry(module, self._waits)
        if self.zeroshard_options.get("stage", 3) == 3:
            self._begin(module, [])
        return Entry(module)

    def _waits(self, module: nn.Module) -> bool:
        return _is_among(module, self._unpaired)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Shard the model that waits for this optimizer."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = next((m for m in self._unpaired if any(id(p) in own for p in m.parameters())), None)
        if found is None:
            raise zs.ModelError(
                f"this {type(optimizer).__name__} has no parameters of a model that waits for its optimizer: "
                "call fabric.setup(model, optimizer, ...) with all optimizers of the model at once."
            )
        self._begin(found, [optimizer])
        self._unpaired = [module for module in self._unpaired if module is not found]
        return optimizer

    def _begin(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        begin(module, optimizers, self._options())
        self._sharded.append(module)

    def module_to_device(self, module: nn.Module) -> None:
        """Move a model to where it computes, but for layers that are filled later."""
        if not on_meta(module):
            super().module_to_device(module)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make a model: on the meta device where it is to be empty."""
        if not empty_init:
            return cast(AbstractContextManager[Any], super().module_init_context(empty_init))
        stack = ExitStack()
        stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def close(self, module: nn.Module) -> None:
        """Let a model be plain again, whole on every rank. Every rank calls it."""
        end(inner(getattr(module, "_forward_module", module)))

    def _options(self) -> dict[str, Any]:
        return with_precision(self.zeroshard_options, str(getattr(self.precision, "precision", "32-true")))

    # ---- the loop ----

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step; norms that were asked for are known then."""
        output = super().optimizer_step(optimizer, **kwargs)
        for run, norm in self._norms:
            norm.fill_(run.stats().norm)
        self._norms.clear()
        return output

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm of the whole gradient, and return it. With `clip_norm=` the step clips, and the
        norm stands in what is returned once the step has been made."""
        run = run_of(inner(module))
        limit = run.options.clip_norm if run is not None else None
        if run is None or limit is None:
            norm = super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
            return cast(Tensor, norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if norm_type != 2 or max_norm not in (limit, math.inf):
            raise zs.OptionError(
                f"clip_gradients(…, max_norm={max_norm}, norm_type={norm_type}) does not agree with "
                f"clip_norm={limit}, by which the step itself clips: pass the same, or drop clip_norm=."
            )
        self._norms.append((run, torch.tensor(math.nan)))
        return self._norms[-1][1]

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the gradient."""
        run = run_of(inner(module))
        if run is not None and run.options.clip_norm is not None:
            raise zs.OptionError(
                "clip_gradients(…, clip_val=) has no gradients to clip: with clip_norm= updates begin in "
                "backward. Drop clip_norm=."
            )
        super().clip_gradients_value(module, optimizer, clip_val)

    # ---- checkpoints ----

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole state on rank 0, and `{}` elsewhere."""
        run = run_of(inner(module))
        state = super().get_module_state_dict(inner(module)) if run is None else run.full_state_dict()
        return cast(dict[str, Any], state)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load whole tensors, of which each rank takes its rows."""
        super().load_module_state_dict(inner(module), state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0, and `{}` elsewhere."""
        model = next((m for m in self._sharded if _is_among(optimizer, optimizers_of(m))), None)
        run = run_of(model) if model is not None else None
        if run is None:
            return cast(dict[str, Any], super().get_optimizer_state(optimizer))
        return run.full_optimizer_state_dict(optimizer)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Any] | None = None,
    ) -> None:
        """Save a folder into which each rank writes its rows, where the state has models with all of their
        optimizers; else, and with `whole_checkpoints=True`, one file as any strategy writes it."""
        path = self.broadcast(str(path))
        models = _models(state)
        complete = all(_is_among(o, state.values()) for m in models.values() for o in optimizers_of(m))
        trained = any(optimizers_of(model) for model in models.values())
        if self.whole_checkpoints or filter or not (trained and complete):
            if self.is_global_zero and _folders(path, models):
                shutil.rmtree(path)
            super().save_checkpoint(path, state, storage_options, filter)
            return
        refuse_remote(path)
        if self.is_global_zero and Path(path).is_file():
            Path(path).unlink()
        rest = self._convert_stateful_objects_in_state(_beside(state, models), filter={})
        for number, (key, model) in enumerate(models.items()):
            run = cast(zs.Run, run_of(model))
            extra = {FABRIC: pickled(rest)} if number == 0 else None
            run.save(_folder_of(path, key, models), extra=extra, overwrite=True)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Go on from a checkpoint: of a folder, each rank reads its rows."""
        path = self.broadcast(str(path))
        models = _models(state) if isinstance(state, dict) else {}
        if not _folders(path, models):
            if Path(path).is_dir() and any(is_folder(one) for one in (Path(path), *Path(path).iterdir())):
                raise zs.CheckpointError(
                    f"{path} is a folder with rows of models and optimizers: pass those that were saved, "
                    'set up by this Fabric: fabric.load(path, {"model": model, "optimizer": optimizer}).'
                )
            return cast(dict[str, Any], super().load_checkpoint(path, state, strict, weights_only))
        rest: dict[str, Any] = {}
        for key, model in models.items():
            extra = cast(zs.Run, run_of(model)).load(_folder_of(path, key, models), strict=strict)
            if FABRIC in extra:
                rest = unpickled(extra[FABRIC], weights_only)
        for key, value in _beside(state, models).items():
            if key not in rest:
                if strict:
                    raise KeyError(
                        f"{path} has nothing by the name of {key!r}: take it out, or pass strict=False."
                    )
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(key))
            else:
                state[key] = rest.pop(key)
        return rest


def _is_among(one: object, others: Iterable[object]) -> bool:
    return any(one is other for other in others)


def _models(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Those that are sharded, by their keys."""
    modules = {key: inner(value) for key, value in state.items() if isinstance(value, nn.Module)}
    return {key: module for key, module in modules.items() if run_of(module) is not None}


def _beside(state: Mapping[str, Any], models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What is saved beside models and their optimizers."""
    taken = [optimizer for model in models.values() for optimizer in optimizers_of(model)]
    return {key: value for key, value in state.items() if key not in models and not _is_among(value, taken)}


def _folder_of(path: str, key: str, models: Mapping[str, nn.Module]) -> Path:
    """Of the only model, or of one of several."""
    return Path(path) if len(models) == 1 else Path(path, key)


def _folders(path: str, models: Mapping[str, nn.Module]) -> bool:
    """Whether all of these models were saved there."""
    return bool(models) and all(is_folder(_folder_of(path, key, models)) for key in models)
