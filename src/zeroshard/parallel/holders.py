"""Who else holds a model's parameters: optimizers, wherever they were made, and lists of a loop."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

_NOW = "_zeroshard_now"


class Holders:
    """Those of one model. Parameters that a loop took from it go on to mean what stands there now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stood: list[tuple[ref[Tensor], str]] = []  # what has stood in the model, and its names
        self.known: list[ref[Optimizer]] = []  # optimizers that it was divided for
        self.late: list[Optimizer] = []  # that shall be among the next

    def replaced(self, change: Callable[[], None]) -> None:
        """Make a change that may put other parameters into the model."""
        held = {id(old) for old, _ in self._alive()}
        self._stood += [(ref(p), name) for name, p in self._module.named_parameters() if id(p) not in held]
        change()
        now = dict(self._module.named_parameters())
        alive = self._alive()
        for old, name in alive:
            if old is not now[name]:
                if not isinstance(old, _StandIn):
                    old.__class__ = _stand_in_of(type(old))
                vars(old)[_NOW] = now[name]
        self._stood = [(ref(old), name) for old, name in alive]

    def _alive(self) -> list[tuple[Tensor, str]]:
        return [(old, name) for each, name in self._stood if (old := each()) is not None]

    def _places(self) -> dict[int, int]:
        """Maps the id of each parameter that is or was in the model to its number in `named_parameters()`."""
        numbers = {name: number for number, (name, _) in enumerate(self._module.named_parameters())}
        places = {id(p): numbers[name] for name, p in self._module.named_parameters()}
        return places | {id(old): numbers[name] for old, name in self._alive()}

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether it has any parameter of the model."""
        places = self._places()
        return any(id(p) in places for group in optimizer.param_groups for p in group["params"])

    def knows(self, optimizer: Optimizer) -> bool:
        return any(known() is optimizer for known in self.known)

    def divided_for(self) -> list[Optimizer]:
        return [optimizer for known in self.known if (optimizer := known()) is not None]

    def know(self, optimizers: Sequence[Optimizer]) -> None:
        """The model is divided for these."""
        self.known = [ref(optimizer) for optimizer in with_inner(optimizers)]
        self.late = []

    def optimizers(self) -> list[Optimizer]:
        """All that hold parameters of the model, in its order; not those that another one wraps."""
        gc.collect()  # what nobody can use any more is none
        places = self._places()
        found: dict[int, tuple[int, Optimizer]] = {}
        for thing in (*gc.get_objects(), *self.late):
            if issubclass(type(thing), Optimizer) and _complete(thing):
                held = [places.get(id(p)) for group in thing.param_groups for p in group["params"]]
                known = [place for place in held if place is not None]
                if known:
                    found[id(thing)] = min(known), thing
        inner = {id(one) for _, each in found.values() for one in with_inner([each])[1:]}
        outer = [each for key, each in found.items() if key not in inner]
        chosen = [optimizer for _, optimizer in sorted(outer, key=lambda each: each[0])]
        for optimizer in chosen:
            self.adopt(optimizer)
        return chosen

    def adopt(self, optimizer: Optimizer) -> None:
        """Let it hold what stands in the model where it holds what stood there."""
        now = dict(self._module.named_parameters())
        places = {id(old): now[name] for old, name in self._alive()}
        for group in optimizer.param_groups:
            group["params"] = [places.get(id(p), p) for p in group["params"]]


def _complete(optimizer: Any) -> bool:
    """Whether its constructor has come to an end, as far as one can see."""
    try:
        return isinstance(optimizer.param_groups, list)
    except AttributeError:
        return False


def with_inner(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Optimizers, and behind them those that they wrap."""
    found = list(optimizers)
    for optimizer in found:
        inside = [value for value in vars(optimizer).values() if issubclass(type(value), Optimizer)]
        found += [one for one in inside if not any(one is known for known in found)]
    return found


class _StandIn:
    """A parameter that was in the model, and means the one that is there now."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(_StandIn, _now, (args, kwargs or {}))
        return func(*args, **kwargs)


def _now(old: Any) -> Any:
    return vars(old)[_NOW]


_classes: dict[type, type] = {}


def _stand_in_of(kind: type) -> type:
    """A class whose objects are laid out as those of `kind`, and stand in for others."""
    if kind not in _classes:
        _classes[kind] = type("StandIn", (_StandIn, kind), {"__slots__": ()} if _slots(kind) else {})
    return _classes[kind]


def _slots(kind: type) -> bool:
    return any("__slots__" in vars(base) and vars(base)["__slots__"] for base in kind.__mro__)
