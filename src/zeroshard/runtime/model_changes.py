"""Notices what is done to a model after `shard()`: new parameters, hooks, moves.

Gradient hooks on parameters would not be called, and modules with parameters that are not the run's would
not be trained: both are refused.

Front ends call `model.to()` and its like as a matter of course, for the device that the model is on and the
dtype that it has: then nothing happens, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import cycle
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import StateError
from zeroshard.params.dtensor import ShardedDTensor
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors

_learns = attrgetter("requires_grad")
_early, _late = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class LateHooks:
    """Finds hooks that were registered after `shard()`, which refuses those that were there before."""

    def __init__(self, sharded_tensors: ShardedTensors, params: Sequence[ShardedParam], size: int) -> None:
        self._writes, self._names = sharded_tensors.writes, [param.name for param in params]
        self._sharded_params = [param.sharded_param for param in params]
        self._ours = size > 1  # sharded parameters of several ranks have one: see `hooks`
        self._tell = all(isinstance(sharded_param, ShardedDTensor) for sharded_param in self._sharded_params)
        self.seen = -1  # settings at the last look, where all sharded parameters tell of them

    def refuse(self) -> None:
        settings = self._writes.settings
        pairs = zip(map(_early, self._sharded_params), map(_late, self._sharded_params), strict=True)
        hooked = [bool(late) or (early is not None and len(early) > self._ours) for early, late in pairs]
        if any(hooked):
            name = self._names[hooked.index(True)]
            raise StateError(
                f"`{name}` has a gradient hook, registered after zs.shard(), which would not be called: "
                "autograd sees other tensors. Remove it, and change gradients in the loop, between "
                "backward() and step()."
            )
        self.seen = settings if self._tell else -1


class LateParams:
    """Parameters that were not in the model when it was sharded: no rank adds up their gradients, so that
    they would differ from rank to rank.

    `put` hears of whatever is put into any module of the process; only then is the model looked through."""

    def __init__(self, model: nn.Module) -> None:
        # Torch holds this as long as the model lives: so it must not hold the model, nor its parameters.
        self._modules = {id(module) for module in model.modules()}
        self._changed, self._frozen = False, list[nn.Parameter]()
        self.due = False  # there is something to look at

    def put(self, module: nn.Module, name: str, what: object) -> None:
        self._changed = self._changed or id(module) in self._modules
        self.due = self.due or self._changed

    def refuse(self, model: nn.Module, params: Sequence[ShardedParam]) -> None:
        """Those that would train, and are not among `params`. Frozen ones are the same as they were put
        there."""
        if not self._changed and not any(map(_learns, self._frozen)):
            return
        self._frozen.clear()
        sharded = {id(param.sharded_param) for param in params}
        # What is assigned where a sharded parameter stood is found by its unit, which says more of it.
        places = {(id(place.module), place.attribute) for param in params for place in param.places}
        for path, module in model.named_modules():
            self._modules.add(id(module))
            for attribute, parameter in module._parameters.items():
                if parameter is None or id(parameter) in sharded or (id(module), attribute) in places:
                    continue
                self._frozen.append(parameter)
                if parameter.requires_grad:
                    raise StateError(
                        f"`{path}{'.' if path else ''}{attribute}` was not in the model when zs.shard() was "
                        "called, and the ranks would not add up its gradients: they would train different "
                        "models. Call run.close(), complete the model and the optimizer, and shard again; or "
                        "freeze it (requires_grad_(False))."
                    )
        self._changed, self.due = False, bool(self._frozen)


#: What `Module.to()` and the like apply to each tensor.
Applied = Callable[[Tensor], Any]


class ModuleMoves:
    """Answers for `Module._apply` of the modules of a sharded model."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params
        # Memory that is given out again has what stood there: no two probes in a row have the same.
        self._values = cycle(range(1, 100))

    @cached_property
    def _devices(self) -> dict[int, torch.device]:
        """By id of a sharded parameter; few loops ever ask."""
        return {id(param.sharded_param): param.unsharded_param.device for param in self._params}

    def apply(self, module: nn.Module, fn: Applied, recurse: bool = True) -> nn.Module:
        """`module` as it is, where `fn` would change nothing; parameters are rows of shared buffers, which
        cannot be moved or cast alone."""
        seen = set[tuple[object, ...]]()
        # A sharded parameter may rest in host memory: the model is where it computes.
        devices = self._devices
        for name, tensor in _tensors(module, recurse):
            device = devices.get(id(tensor), tensor.device)
            if (kind := (device, tensor.dtype, tensor.dim(), tensor.is_floating_point())) in seen:
                continue
            seen.add(kind)
            if (becomes := _change(fn, device, tensor, next(self._values))) is not None:
                now = _text(tensor.dtype, device)
                raise StateError(
                    f"model.to(), .cuda(), .cpu(), .half() and the like change nothing after zs.shard(), and "
                    f"`{name}` of {type(module).__name__}, {now}, would become {becomes}: parameters are "
                    "rows of shared buffers. Move or cast the model before shard(); to compute in another "
                    "dtype pass shard(..., precision=...), whose keep= leaves modules as they are; after "
                    "run.close() the model is a plain one."
                )
        return module


def _tensors(module: nn.Module, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def _change(fn: Applied, device: torch.device, like: Tensor, value: int) -> str | None:
    """What becomes of a small tensor like this one; None if it stays what it is."""
    with torch.inference_mode(False), torch.no_grad():
        probe = torch.full((2,) * like.dim(), value, dtype=like.dtype, device=device)
        version = probe._version
        try:
            result = fn(probe)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if not isinstance(result, Tensor):
            return repr(result)
        if result.dtype != like.dtype or result.device != device:
            return _text(result.dtype, result.device)
        shares = probe.is_shared() and not probe.is_cuda
        if shares or probe._version != version or result.is_meta or not _alike(result, probe):
            return f"{_text(like.dtype, device)} with other values, strides or memory"
        return None


def _alike(result: Tensor, probe: Tensor) -> bool:
    """Whether `result` has the values and strides of `probe`, as a copy by `.to("cpu:0")` has."""
    return result is probe or (result.stride() == probe.stride() and torch.equal(result, probe))


def _text(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"
