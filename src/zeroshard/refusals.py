"""Models and optimizers that no run can take, and no plan can be made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from zeroshard.errors import ModelError, OptionError
from zeroshard.optim.frozen_moments import refuse_freezing
from zeroshard.optim.optimizer_kinds import refuse_unfit
from zeroshard.optim.probe import Findings, passes_on, try_out
from zeroshard.options import Options, Precision, check_patterns, codec_for, routes_of
from zeroshard.params.units import find_units, matching
from zeroshard.sync_policies import EveryStep, choices_of

MOST_PATTERNS = 4  # that a message lists
LOOKS_UP = (nn.Embedding, nn.EmbeddingBag)
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
ZERO = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"
WHOLE = (torch.optim.Adafactor, torch.optim.Muon)


def refuse_model(model: nn.Module, who: str) -> None:
    """`who`: whom it was given to, for the message."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{who} takes a torch.nn.Module, not {type(model).__name__}.")
    if next(model.parameters(), None) is None:
        raise ModelError(f"{type(model).__name__} has no parameters to shard.")
    for name, module in model.named_modules():
        if _made_by(module, FSDP):
            raise ModelError(
                f"`{name or 'the model'}` is wrapped in torch's FullyShardedDataParallel, which has sharded "
                "its parameters and gathers them itself. Pass the plain module and an optimizer of its "
                "parameters: stage 3 does the same."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"`{name or 'the model'}` is a TorchScript module, which takes no hooks. Pass the module "
                "that it was scripted from; torch.compile() of blocks works."
            )


def _made_by(thing: object, kind: str) -> bool:
    """Whether it is of a class of torch that need not have been imported."""
    return any(f"{base.__module__}.{base.__qualname__}" == kind for base in type(thing).__mro__)


def refuse_written(model: nn.Module, options: Options, ranks: int) -> None:
    """Layers that write their weights in forward, where no optimizer or peer would see it."""
    for name, module in model.named_modules():
        limit = getattr(module, "max_norm", None) if isinstance(module, LOOKS_UP) else None
        if limit is not None and (ranks > 1 or options.precision is not None):
            raise ModelError(
                f"`{name or 'the model'}` ({type(module).__name__}) has max_norm={limit}: its forward writes "
                "the rows that it looks up, and each rank looks up others. Drop max_norm, and scale the rows "
                "in the loop after optimizer.step()."
            )


def optimizers_of(given: Any) -> list[Any]:
    """What was passed as the optimizer, in a list, and without what a front end has wrapped around each."""
    return [_unwrapped(one) for one in (given if isinstance(given, (list, tuple)) else [given])]


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer itself, of a wrapper that has nothing of its own: its groups and state are those of
    `optimizer.optimizer`, as in `AcceleratedOptimizer`. Lookahead, say, has a state beside."""
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, Optimizer) or inner is optimizer:
        return optimizer
    same = [
        getattr(optimizer, name, None) is getattr(inner, name, None) for name in ("param_groups", "state")
    ]
    if not all(same):
        return optimizer
    if getattr(optimizer, "scaler", None) is not None:
        raise ModelError(
            f"{type(optimizer).__name__} has taken {type(inner).__name__}.step for its loss scaler, and "
            "would call it past zs.shard(). Call zs.shard(model, optimizer, ...) before "
            "accelerator.prepare(...), or let the run scale nothing: precision='bf16'."
        )
    if not passes_on(optimizer, inner):
        raise ModelError(
            f"{type(optimizer).__name__} does more in its step than {type(inner).__name__}, which it has "
            f"inside, and would see each rank's part alone. Pass {type(inner).__name__} itself, and let the "
            "loop call that."
        )
    return _unwrapped(inner)


def refuse_optimizers(model: nn.Module, optimizers: Sequence[Optimizer], who: str) -> None:
    """Those that are none, that have no meaning on shards, or that are another model's."""
    known = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            its = f"the class {optimizer.__name__}: make one of it" if isinstance(optimizer, type) else kind
            raise ModelError(f"{who} takes torch optimizers, not {its}.")
        if _made_by(optimizer, ZERO):
            raise ModelError(
                "ZeroRedundancyOptimizer has given each rank parameters of its own, and broadcasts them in "
                "its step. Pass an optimizer of the class that it was given, such as "
                "AdamW(model.parameters()): stage 1 shards its state."
            )
        refuse_unfit(optimizer)
        if not vars(optimizer).keys() >= {"param_groups", "state", "_optimizer_state_dict_pre_hooks"}:
            raise ModelError(
                f"{kind} has no groups and state of its own, but those of an optimizer that it is wrapped "
                "around, and does more than that. Pass the one inside, and let the loop call that."
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        strangers = sum(id(p) not in known for p in held)
        if strangers:
            raise ModelError(
                f"{strangers} of the {len(held)} parameters of {kind} are not in the model. Build the "
                "optimizer from model.parameters(), after the model is complete, and pass that very model."
            )


def refuse_tried(optimizers: Sequence[Optimizer], options: Options, ranks: int) -> list[tuple[str, Findings]]:
    """Optimizers that look past the parameter that they update, where other ranks have the others. Returns
    what was found of those that are not torch's, by name."""
    tried = []
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("torch.optim."):
            continue  # `refuse_unfit` knows them
        kind, found = type(optimizer).__name__, try_out(optimizer)
        if found.evaluates:
            raise ModelError(
                f"{kind} calls its closure in the midst of a step, and gradients are reduced before a step: "
                "no stage has them then. Use an optimizer that takes one gradient a step."
            )
        if ranks > 1 and options.shards_state and found.talks:
            raise ModelError(
                f"{kind} calls other processes in its step, and expects all parameters on each: at stage "
                f"{options.stage} each rank has a part of them. Pass stage=0, or its variant for one process."
            )
        if ranks > 1 and options.shards_state and found.across:
            own = [group for group in optimizer.param_groups if "fsdp_in_use" in group]
            instead = f", or {kind}(..., fsdp_in_use=True), which adds up over GPUs" if own else ""
            raise ModelError(
                f"{kind} looks at all parameters for the update of each (a norm, or a step size that it "
                f"finds), and at stage {options.stage} each of {ranks} ranks has a part of them: they would "
                f"train with different ones. Pass stage=0{instead}."
            )
        tried.append((kind, found))
    return tried


def refuse_options(model: nn.Module, optimizers: Sequence[Optimizer], options: Options) -> None:
    """Options that do not go with this model and these optimizers."""
    refuse_rows(optimizers, options)
    refuse_second_names(model, options)
    refuse_patterns(model, optimizers, options)
    refuse_precision(model, options.precision)


def refuse_rows(optimizers: Sequence[Optimizer], options: Options) -> None:
    """Rows asked for where torch's own optimizer is known to look at whole matrices."""
    for optimizer in optimizers if options.split == "rows" else ():
        if isinstance(optimizer, WHOLE):
            kind = type(optimizer).__name__
            raise OptionError(
                f'split="rows" gives {kind} rows of a matrix, and it looks at whole ones: it would be '
                "another optimizer on every number of ranks. Drop split=: each tensor then goes to one rank."
            )


def refuse_patterns(model: nn.Module, optimizers: Sequence[Optimizer], options: Options) -> None:
    """Patterns that name nothing, and codecs that do not go with the optimizer of what they name."""
    if not isinstance(options.recompute, bool):
        units = [unit.name for unit in find_units(model, options.units) if unit.name]
        matching(options.recompute, units, "recompute", "units")
    params = dict(model.named_parameters())
    trained = [name for name, p in params.items() if p.requires_grad]
    check_patterns(options.gather, params, "gather")
    check_patterns(options.compress, trained)
    for choice in choices_of(options.sync):
        if isinstance(choice, EveryStep):
            check_patterns(routes_of(choice.compress), trained)
    for optimizer in optimizers if options.compress else ():
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name in trained:
            codec = codec_for(options.compress, name, params[name].shape)
            if codec is not None and codec.freezes and id(params[name]) in held:
                refuse_freezing(codec, optimizer)


def refuse_second_names(model: nn.Module, options: Options) -> None:
    """Patterns of options that name a tied weight by another than its first name, by which it goes here."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    others = {name: first[id(p)] for name, p in every if name != first[id(p)]}
    patterns = [("Precision.keep", one) for one in (options.precision.keep if options.precision else ())]
    patterns += [("compress", one) for one, _ in options.compress]
    patterns += [("gather", one) for one, _ in options.gather]
    for what, pattern in patterns if others else ():
        found = next((name for name in others if fnmatchcase(name, pattern)), None)
        if found is not None and not any(fnmatchcase(name, pattern) for name in first.values()):
            raise OptionError(
                f'{what}: "{pattern}" names `{found}`, which is tied to `{others[found]}` and goes by that '
                f'name: write "{others[found]}".'
            )


def takes(model: nn.Module, precision: Precision) -> bool:
    """Whether the model can compute in it."""
    try:
        refuse_precision(model, precision)
    except OptionError:
        return False
    return True


def refuse_precision(model: nn.Module, precision: Precision | None) -> None:
    """Patterns that name no parameter; and batch statistics of another dtype than the weights beside them, of
    which torch would say in forward that it expected another scalar type."""
    if precision is None:
        return
    names = [name for name, p in model.named_parameters() if p.is_floating_point()]
    kept = set(matching(precision.keep, names, "Precision.keep", "parameters"))
    if kept == set(names) and precision.compute != precision.master:
        raise OptionError(
            f"Precision.keep={precision.keep!r} keeps all {len(names)} parameters in {precision.master}, and "
            f"none is left that computes in {precision.compute}: keep fewer, or drop precision=."
        )
    mixed = list(_mixed_statistics(model, precision, kept))
    if not mixed:
        return
    path, module, statistics, weights = mixed[0]
    told = f"`{path or 'the model'}` ({type(module).__name__}) has statistics in {statistics}"
    if statistics != precision.master:
        raise OptionError(
            f"{told} and would compute with weights in {weights}, which torch refuses. Cast that module "
            f"before shard(): .to(torch.{weights})."
        )
    keep = repr((*precision.keep, *(f"{found[0]}.*" if found[0] else "*" for found in mixed)))
    if len(mixed) > MOST_PATTERNS:
        keep = 'tuple(f"{n}.*" for n, m in model.named_modules() if hasattr(m, "running_mean"))'
        keep += f" + {precision.keep!r}" if precision.keep else ""
    raise OptionError(
        f"{told}, and precision= has its weights compute in {weights}, which torch refuses. Let them compute "
        f'in {statistics}: precision=zs.Precision("{precision.compute}", keep={keep}).'
    )


def _mixed_statistics(
    model: nn.Module, precision: Precision, kept: set[str]
) -> Iterator[tuple[str, nn.Module, str, str]]:
    """Modules whose running statistics and weights would differ: name, module, the two dtypes."""
    names = {id(p): name for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        mean, weight = module._buffers.get("running_mean"), module._parameters.get("weight")
        if (
            isinstance(module, _NormBase)
            and mean is not None
            and weight is not None
            and weight.is_floating_point()
        ):
            statistics = str(mean.dtype).removeprefix("torch.")
            weights = precision.master if names[id(weight)] in kept else precision.compute
            if statistics != weights:
                yield path, module, statistics, weights
