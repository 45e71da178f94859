"""A Keras model as a tree of torch modules that `zs.shard` can divide.

Keras keeps its weights in variables, and the torch modules that its layers are do not know of one another.
So each layer with weights gets a holder: a module that owns the parameters of the layer's variables, has
those of its sublayers as children, and whose forward is the layer's call. Variables then read what stands in
their holder: the whole weight while the layer computes, this rank's rows otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.ops.operation import any_symbolic_tensors
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zeroshard as zs

from .updates import plain_class, standing_in


class Holder(nn.Module):
    """Parameters of one layer, and the holders of its sublayers."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.call = layer.forward
        self.variables = list[Any]()
        self.penalties = dict[int, Tensor]()

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """The layer's own, and what its regularizers make of its weights while these are whole."""
        for variable in self.variables:
            if variable.regularizer is not None and variable.trainable:
                self.penalties[id(variable)] = variable.regularizer(variable)
        return self.call(*args, **keywords)


@cache
def _kind(name: str) -> type[Holder]:
    """Messages and units name layers by their class."""
    return type(name, (Holder,), {})


class Placed:
    """What the variables of a sharded model are, beside their own class."""

    _zeroshard: Holding

    @property
    def _value(self) -> Any:
        return self._zeroshard.standing

    @_value.setter
    def _value(self, value: Any) -> None:
        raise zs.StateError(
            f"the value of {self.path} was replaced, and it is sharded: use variable.assign(value)."  # type: ignore[attr-defined]
        )

    def _direct_assign(self, value: Tensor) -> None:
        self._zeroshard.write(value)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        whole = self._zeroshard.read().detach().cpu()
        half = whole.dtype == torch.bfloat16
        array: np.ndarray[Any, Any] = (whole.float() if half else whole).numpy()
        return array.astype(dtype) if dtype is not None else array.copy()


class Holding:
    """Where the value of a variable stands: as parameter `attribute` of a module, which the run knows as
    `name`. Until the model is sharded there is no run."""

    def __init__(self, module: nn.Module, attribute: str, name: str) -> None:
        self.module, self.attribute, self.name = module, attribute, name
        self.run: zs.Run | None = None
        self.saved: dict[str, Tensor] | None = None  # whole values while a file is written

    @property
    def standing(self) -> Any:
        return self.module._parameters[self.attribute]

    @property
    def _divided(self) -> bool:
        return isinstance(self.standing, DTensor)

    @torch.no_grad()
    def read(self) -> Tensor:
        """The whole value. Every rank reads it, but while a file is written."""
        if self.saved is not None:
            return self.saved[self.name]
        if self.run is None or not self._divided:
            return self.standing.detach()  # type: ignore[no-any-return]
        with self.run.gathered(self.name) as whole:
            return whole[self.name].detach().clone()

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        """The whole value, the same on every rank."""
        if self.run is None or not self._divided:
            self.standing.copy_(value)
            if self.run is not None:
                self.run.publish()
            return
        with self.run.gathered(self.name, write=True) as whole:
            whole[self.name].copy_(value)


class Tree:
    """The holders of one model, and everything that was changed for them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.holdings: dict[int, Holding] = {}  # by id of the variable
        self.variables: list[Any] = []
        self._layers: list[Any] = []
        self._holders: dict[int, Holder] = {}
        self.root = self._grown(model)
        names = {id(p): name for name, p in self.root.named_parameters()}
        for holding in self.holdings.values():
            holding.name = names[id(holding.standing)]

    def _grown(self, layer: Any) -> Holder:
        """The holder of a layer with all below it; a layer that is used twice has one."""
        known = self._holders.get(id(layer))
        if known is not None:
            return known
        made = self._holders[id(layer)] = _kind(type(layer).__name__)(layer)
        self._layers.append(layer)
        inner = getattr(layer, "module", None)
        if isinstance(inner, nn.Module) and type(layer).__name__ == "TorchModuleWrapper":
            made.add_module("module", inner)
            self._hold_inside(layer, inner)
        else:
            for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
                if variable.trainable or any(variable is own for own in layer._trainable_variables):
                    self._hold(made, variable)
        for sublayer in layer._layers:
            if _has_weights(sublayer):
                child = self._grown(sublayer)
                made.add_module(_free(made, sublayer.name), child)
        return made

    def _hold(self, holder: Holder, variable: Any) -> None:
        holder.variables.append(variable)
        if id(variable) in self.holdings:  # tied: stands here, too
            holder.register_parameter(_free(holder, variable.name), self.holdings[id(variable)].standing)
            return
        attribute = _free(holder, variable.name)
        holder.register_parameter(attribute, variable._value)
        self._note(variable, Holding(holder, attribute, ""))

    def _hold_inside(self, layer: Any, inner: nn.Module) -> None:
        """The parameters of a torch module that stands in a Keras model."""
        places = {
            id(parameter): (module, attribute)
            for module in inner.modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        }
        for variable in layer._trainable_variables:
            if id(variable._value) in places:
                self._note(variable, Holding(*places[id(variable._value)], ""))

    def _note(self, variable: Any, holding: Holding) -> None:
        self.holdings[id(variable)] = holding
        self.variables.append(variable)

    def units(self) -> list[str]:
        """What is gathered together: repeated blocks, or else the layers of the model."""
        return list(_units(self.root, ""))

    def stand(self) -> None:
        """From now on variables read what stands in their holders, and layers call them."""
        for variable in self.variables:
            vars(variable).pop("_value", None)
            variable._zeroshard = self.holdings[id(variable)]
            variable.__class__ = standing_in(type(variable), Placed)
        for layer in self._layers:
            holder = self._holders[id(layer)]
            vars(layer)["forward"] = _entered(holder)
        list_anew(self.model)

    def begin(self, run: zs.Run) -> None:
        """The holders are sharded."""
        for holding in self.holdings.values():
            holding.run = run

    def fall(self) -> None:
        """The model is plain again; its run is closed."""
        for variable in self.variables:
            value = self.holdings[id(variable)].standing
            variable.__class__ = plain_class(type(variable))
            del variable._zeroshard
            variable._value = value
        for layer in self._layers:
            del vars(layer)["forward"]
        list_anew(self.model)

    def penalties(self) -> dict[int, Tensor]:
        """By id of the variable: what regularizers made of the weights in the last forward."""
        return {key: value for holder in self._holders.values() for key, value in holder.penalties.items()}


def list_anew(model: Any) -> None:
    """The parameters that Keras lists for torch, of a model and all that it is made of."""
    for module in model.modules():
        if isinstance(module, keras.layers.Layer):
            module._track_variables()


def track_plain(layer: Any) -> bool:
    """Keras lists a layer's parameters for torch; those of sharded models are their holders'. Whether there
    are such."""
    variables = layer.variables
    plain = {variable.path: variable.value for variable in variables if not isinstance(variable, Placed)}
    if len(plain) < len(variables):
        layer._torch_params = nn.ParameterDict(plain)
    return len(plain) < len(variables)


def _entered(holder: Holder) -> Callable[..., Any]:
    """A layer's forward: through its holder, but where only shapes are asked for."""

    def forward(*args: Any, **keywords: Any) -> Any:
        if in_stateless_scope() or any_symbolic_tensors(args, keywords):
            return holder.call(*args, **keywords)
        return holder(*args, **keywords)

    return forward


def _has_weights(layer: Any) -> bool:
    return any(layer._trainable_variables for layer in layer._flatten_layers())


def _free(module: nn.Module, name: str) -> str:
    """A name for a part of a module that no other has, of letters that patterns and paths have no use for."""
    plain = re.sub(r"\W", "_", name) or "part"
    taken = {*module._parameters, *module._modules, *dir(module)}
    return next(one for one in _numbered(plain) if one not in taken)


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 0
    while True:
        number += 1
        yield f"{name}_{number}"


def _units(holder: nn.Module, path: str) -> Iterator[str]:
    for name, child in holder.named_children():
        full = f"{path}.{name}" if path else name
        blocks = list(_blocks(child, full))
        yield from blocks or [full]


def _blocks(holder: nn.Module, path: str) -> Iterator[str]:
    """Composite layers that stand beside others of their class, anywhere inside."""
    children = dict(holder.named_children())
    kinds = Counter(type(child) for child in children.values())
    for name, child in children.items():
        composite = next(child.children(), None) is not None
        if composite and kinds[type(child)] > 1:
            yield f"{path}.{name}"
        else:
            yield from _blocks(child, f"{path}.{name}")
