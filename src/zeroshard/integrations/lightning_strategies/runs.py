"""What strategies of Trainer and of Fabric have in common: the run beside its model, options and precision,
what stands for rows in the dictionaries that Lightning saves. It imports no Lightning: there are two."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard as zs

from ..attached import OF_FROZEN, attach, attached, detach, run_of
from ..options import check_options

#: A method of the model by which the loop comes in, with what it calls there.
_STEP = "_zeroshard_step"
#: In what Lightning saves: where rows stood, and under which of the model's names.
_ROWS, _ADDED = "zeroshard_rows", "zeroshard_added"
_COMPUTE = {"bf16-mixed": ("bf16", "bfloat16"), "16-mixed": ("fp16", "float16")}
_PLAIN = ("32-true", "64-true", "bf16-true", "16-true")
#: Names with which strategies are registered, and their options.
REGISTERED: dict[str, dict[str, Any]] = {
    "zeroshard": {"stage": 3},
    **{f"zeroshard_{stage}": {"stage": stage} for stage in range(4)},
    **{f"zeroshard_{stage}_offload": {"stage": stage, "offload": "host"} for stage in (1, 2, 3)},
}


def register(registry: Any, strategy: type) -> None:
    """Let a strategy be asked for by names."""
    for name, options in REGISTERED.items():
        registry.register(name, strategy, f"ZeroShard: {options}", override=True, **options)


def forwarded(*wrappers: type) -> None:
    """Let Lightning's wrappers of optimizers call the optimizer's own methods, as they do for `step`: of a
    sharded model they are not its class's."""

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        self._optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self: Any, *args: Any, **kwargs: Any) -> None:
        self._optimizer.add_param_group(*args, **kwargs)

    for wrapper in wrappers:
        for method in (zero_grad, add_param_group):
            if method.__name__ not in vars(wrapper):
                setattr(wrapper, method.__name__, method)


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `zs.shard` as a strategy is given them: `offload="host"` for short."""
    taken = dict(options)
    if isinstance(taken.get("offload"), str):
        taken["offload"] = zs.Offload(taken["offload"])
    check_options(taken)
    return taken


def patience(timeout: timedelta | float | None) -> tuple[dict[str, timedelta], dict[str, float]]:
    """For the process group of Lightning's, as it takes it, and for `zs.shard`, which counts seconds. Ranks
    may take longer to start than to answer one another: a number is not for the first."""
    if timeout is None:
        return {}, {}
    if isinstance(timeout, timedelta):
        return {"timeout": timeout}, {"timeout": timeout.total_seconds()}
    return {}, {"timeout": timeout}


def constructed(
    strategy: Any,
    options: Mapping[str, Any],
    timeout: timedelta | float | None,
    cluster_environment: Any,
    whole_checkpoints: bool,
) -> dict[str, Any]:
    """Keep the options of `zs.shard` on a strategy; what is returned is for Lightning's own constructor."""
    span, seconds = patience(timeout)
    strategy.zeroshard_options = checked({**options, **seconds})
    strategy.whole_checkpoints = whole_checkpoints
    if cluster_environment is None and started_by_others():
        cluster_environment = strategy.environment()
    return {"cluster_environment": cluster_environment, **span}


def on_meta(model: nn.Module) -> bool:
    """Of a model with layers there nothing is moved: it is filled where it is sharded."""
    return any(p.is_meta for p in model.parameters())


def started_by_others() -> bool:
    """Whether a launcher has announced every rank as torchrun does, and is none that Lightning knows."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and "TORCHELASTIC_RUN_ID" not in os.environ


def with_precision(options: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The options, with the precision that Lightning was told."""
    asked = dict(options)
    if "plan" in asked:
        return asked
    if kind not in (*_COMPUTE, *_PLAIN):
        raise zs.OptionError(
            f"precision={kind!r} does not go with ZeroShard: pass one of {', '.join((*_COMPUTE, *_PLAIN))}."
        )
    named = zs.Options(precision=asked.get("precision")).precision
    if kind in _COMPUTE and "precision" not in asked:
        asked["precision"] = _COMPUTE[kind][0]
    elif named is not None and kind != "32-true" and named.compute != _COMPUTE.get(kind, ("", ""))[1]:
        raise zs.OptionError(
            f"precision={kind!r} of Lightning and precision={asked['precision']!r} of the strategy "
            "say different things: pass one of the two."
        )
    elif named is not None and kind == "32-true" and named.compute == "float16":
        raise zs.OptionError(
            f"precision={asked['precision']!r} needs a GradScaler, which Lightning makes where it is told: "
            'pass precision="16-mixed" to Trainer or Fabric instead.'
        )
    return asked


# ---- a run beside its model ----


def optimizers_of(model: nn.Module) -> tuple[Optimizer, ...]:
    """Those with which a model was sharded."""
    held = attached(model)
    return held.optimizers if held is not None else ()


def begin(
    model: nn.Module, optimizers: Sequence[Optimizer], options: Mapping[str, Any], by_parts: bool = False
) -> zs.Run:
    """Shard a model with its optimizers. One that nothing trains is sharded at stage 3, and whole below it.
    `by_parts`: the loop calls parts of the model."""
    chosen = dict(options)
    if not optimizers:
        at_most = 3 if chosen.get("stage", 3) == 3 or {"limit", "plan"} & chosen.keys() else 0
        chosen = {name: value for name, value in chosen.items() if name in OF_FROZEN} | {"stage": at_most}
    states = [(optimizer, optimizer.state_dict()) for optimizer in optimizers if optimizer.state]
    for optimizer, _ in states:  # it has trained the model before: what it has is divided with it
        optimizer.state.clear()
    try:
        run = zs.shard(model, list(optimizers) or None, **chosen)
    finally:
        for optimizer, state in states:
            optimizer.load_state_dict(state)
    attach(model, run, optimizers)
    vars(model)[_STEP] = _call
    zs.register_forward_method(model, _STEP)
    for part in _parts(model) if by_parts else ():
        zs.register_forward_method(part, "forward")
    return run


@contextmanager
def thawed(model: nn.Module) -> Iterator[None]:
    """For as long as a model is sharded: parameters that are frozen now, and train later, get a place for
    their gradients as all others do."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad and p.is_floating_point()]
    for name in frozen:
        model.get_parameter(name).requires_grad_(True)
    try:
        yield
    finally:
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """What a model's own code calls; of lists of modules, what is in them."""
    for part in model.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(part)
        else:
            yield part


def end(model: nn.Module) -> None:
    """Give back a plain model, whole on every rank. Every rank calls it."""
    if (run := run_of(model)) is not None:
        run.close()
        detach(model)
        vars(model).pop(_STEP, None)


class _Given:
    """A call, closed to those who look through arguments for tensors: what a step is given is cast where it
    enters the model's forward, so that targets of a loss keep their precision."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs


def _call(given: _Given) -> Any:
    return given.function(*given.args, **given.kwargs)


def entered(model: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A method that the loop calls in place of the model's forward."""
    if run_of(model) is None:
        return function(*args, **kwargs)
    return vars(model)[_STEP](_Given(function, args, kwargs))


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, float]:
    """Norms of gradients by name, and of all of them, as Lightning's own `grad_norm` gives them: of whole
    gradients, the same on every rank. Every rank calls it."""
    kind = float(norm_type)
    if kind <= 0:
        raise zs.OptionError(f"norm_type={norm_type!r}: pass a number above 0, or 'inf'.")
    run = run_of(module)
    if run is not None and run.options.clip_norm is not None:
        raise zs.StateError(
            "grad_norm() has no gradients to look at: with clip_norm=, and with offload, updates begin in "
            "backward. run_of(model).stats().norm is the norm of all of them, after the step."
        )
    found = {name: p.grad.detach().norm(kind) for name, p in module.named_parameters() if p.grad is not None}
    norms = {f"grad_{kind}_norm{group_separator}{name}": norm.item() for name, norm in found.items()}
    if norms:
        norms[f"grad_{kind}_norm_total"] = torch.tensor(list(norms.values())).norm(kind).item()
    return norms


# ---- what Lightning saves ----


class Shown:
    """The rows that were shown to Lightning and its callbacks when a checkpoint was put together, and are
    found again in what they have made of it."""

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self.rows = dict(rows)
        self._names = {id(value): name for name, value in rows.items() if isinstance(value, Tensor)}

    def name_of(self, key: str, value: object) -> str | None:
        """The model's name for a value."""
        if isinstance(value, Tensor):
            return self._names.get(id(value))
        return key if key in self.rows and self.rows[key] is value else None

    def among(self, value: object) -> bool:
        """Whether a dictionary has such rows."""
        return isinstance(value, dict) and any(id(one) in self._names for one in value.values())

    def put_away(self, checkpoint: dict[str, Any]) -> None:
        """Rows, by the names under which they come back."""
        for key, value in checkpoint.items():
            if self.among(value):
                names = {k: self.name_of(k, v) for k, v in value.items()}
                kept = {k: v for k, v in value.items() if names[k] is None}
                checkpoint[key] = {_ROWS: {k: n for k, n in names.items() if n is not None}, _ADDED: kept}

    def made_whole(self, checkpoint: dict[str, Any], whole: Mapping[str, Any]) -> None:
        """Whole tensors in place of rows."""
        for key, value in checkpoint.items():
            if self.among(value):
                names = {k: self.name_of(k, v) for k, v in value.items()}
                checkpoint[key] = {k: v if (n := names[k]) is None else whole[n] for k, v in value.items()}

    def brought_back(self, checkpoint: dict[str, Any]) -> None:
        """The opposite of `put_away`. A name that the model does not have is left for its own check."""
        for key, value in checkpoint.items():
            if isinstance(value, dict) and _ROWS in value:
                rows = {k: self.rows.get(name, Tensor()) for k, name in value[_ROWS].items()}
                checkpoint[key] = rows | value[_ADDED]

    def stands(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is nothing but these rows, each under its name."""
        return all(self.name_of(name, value) == name for name, value in state.items())


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a ZeroShard checkpoint lies there."""
    return Path(path, "manifest.json").is_file()


def refuse_remote(path: object) -> None:
    if "://" in str(path):
        raise zs.OptionError(
            f"{path}: each rank writes its rows into a folder that all ranks see, and this is none: "
            "pass whole_checkpoints=True to the strategy, so that rank 0 writes one file."
        )


def pickled(checkpoint: dict[str, Any]) -> torch.Tensor:
    """What Lightning keeps beside tensors of the run, as `torch.save` writes it."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpickled(held: torch.Tensor, weights_only: bool | None) -> dict[str, Any]:
    file = io.BytesIO(held.numpy().tobytes())
    return cast(dict[str, Any], torch.load(file, map_location="cpu", weights_only=bool(weights_only)))
