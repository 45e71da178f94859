"""Finds the modules whose parameters are gathered together: repeated blocks, or what patterns name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from zeroshard.errors import ModelError, OptionError, did_you_mean
from zeroshard.layout.specs import ROOT, ParamSpec, UnitSpec


@dataclass
class ParamPlace:
    """Where a parameter stands: `module._parameters[attribute]`."""

    module: nn.Module
    attribute: str


@dataclass
class ParamRef:
    """One distinct parameter of the model, under its first name, with every place where it stands (tied
    weights: several)."""

    name: str
    parameter: nn.Parameter
    places: list[ParamPlace] = field(default_factory=list)


@dataclass
class Unit:
    """A module whose parameters are gathered and released together. The root's name is the empty string."""

    name: str
    module: nn.Module
    param_refs: list[ParamRef] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.name or ROOT


def find_units(model: nn.Module, wanted: tuple[str, ...] | Literal["auto", "none"]) -> list[Unit]:
    """The units of `model` in registration order, the root first. Each parameter is in exactly one.

    A parameter inside one unit belongs to it; one that several units share (tied weights) belongs to the
    root.
    """
    if wanted == "auto":
        names = _repeated(model)
    elif wanted == "none":
        names = []
    else:
        known = [name for name, _ in model.named_modules() if name]
        _refuse_parameters(model, wanted)
        names = matching(wanted, known, "unit", "modules", by_level=True)
    modules = dict(model.named_modules())
    names = [name for name in names if name in modules]  # a module that stands twice has one
    units = {"": Unit("", model), **{name: Unit(name, modules[name]) for name in names}}
    for param_ref, owners in _param_refs(model, set(names)):
        units[owners.pop() if len(owners) == 1 else ""].param_refs.append(param_ref)
    return [unit for unit in units.values() if unit.param_refs or not unit.name]


def unit_specs(
    model: nn.Module, units: Sequence[Unit], rules: Mapping[int, int], missing: int = -1
) -> tuple[UnitSpec, ...]:
    """The units as shapes. `rules`: by id of a parameter, the number of the rule that updates it; of all
    others it is `missing`."""
    numbers = {id(p): number for number, p in enumerate(model.parameters())}
    return tuple(
        UnitSpec(
            unit.name,
            tuple(
                ParamSpec(
                    t.name,
                    tuple(t.parameter.shape),
                    str(t.parameter.dtype).removeprefix("torch."),
                    t.parameter.requires_grad,
                    numbers[id(t.parameter)],
                    rules.get(id(t.parameter), missing),
                )
                for t in unit.param_refs
            ),
        )
        for unit in units
    )


def _refuse_parameters(model: nn.Module, wanted: tuple[str, ...]) -> None:
    """Units are modules; a parameter's name is one for that in which it stands."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for pattern in wanted:
        if pattern in names:
            module, _, attribute = pattern.rpartition(".")
            advice = f'write "{module}"' if module else "what no unit holds is the root's"
            raise OptionError(
                f'unit pattern "{pattern}" names a parameter, `{attribute}` of '
                f"{f'`{module}`' if module else 'the model itself'}, and units are modules: {advice}."
            )


def matching(
    wanted: Iterable[str], known: list[str], what: str, plural: str, by_level: bool = False
) -> list[str]:
    """The known names that match any pattern, in their own order; a pattern that matches nothing is an
    error. With `by_level` a star does not reach over a dot: ``blocks.*`` is not ``blocks.3.norm``."""
    hit: set[str] = set()
    for pattern in wanted:
        dots = pattern.count(".") if by_level else None
        found = [name for name in known if fnmatchcase(name, pattern) and dots in (None, name.count("."))]
        if not found:
            families = Counter(_family(name) for name in known)
            near = did_you_mean(pattern, families)
            if near:
                near = near.removesuffix("?") + f" ({families[near.split(chr(34))[1]]} {plural})?"
            raise OptionError(f'{what} pattern "{pattern}" matches none of the {len(known)} {plural}.{near}')
        hit.update(found)
    return [name for name in known if name in hit]


def called_by(wanted: Sequence[str], names: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The parameters that patterns name (none: all), each with the names to give it: its own, and of its
    other `names` (tied weights) those that were asked for as such, or without its own."""
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise OptionError(
                f"run.gathered({pattern!r}): parameters are named by texts or patterns, one after another: "
                'run.gathered("head.weight", "blocks.0.*"), or run.gathered(*names).'
            )
    others = {other: name for name, every in names.items() for other in every if other not in names}
    hit = set(matching(wanted or ("*",), [*names, *others], "parameter", "parameters"))
    called = {name: [name] if name in hit else list[str]() for name in names}
    for other, name in others.items():
        if other in hit and (other in wanted or name not in hit):
            called[name].append(other)
    return {name: given for name, given in called.items() if given}


def _family(name: str) -> str:
    """``blocks.3`` → ``blocks.*``: what a user would have typed."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _param_refs(model: nn.Module, units: set[str]) -> list[tuple[ParamRef, set[str]]]:
    """Every distinct parameter with the set of units in which it stands."""
    found: dict[int, tuple[ParamRef, set[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ModelError(
                    f"`{name}` is uninitialised (a lazy module). Run one forward pass before shard()."
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise ModelError(
                    f"`{name}` has gradient hooks, which would not be called: autograd will see other "
                    "tensors. Change gradients in the loop, between backward() and step()."
                )
            param_ref, owners = found.setdefault(id(parameter), (ParamRef(name, parameter), set()))
            if not any(place.module is module and place.attribute == attribute for place in param_ref.places):
                param_ref.places.append(ParamPlace(module, attribute))
            owners.add(unit_of(path, units))
    return list(found.values())


def unit_of(path: str, units: set[str]) -> str:
    """The innermost unit that holds the module at `path`, or a parameter of that name."""
    while path and path not in units:
        path = path.rpartition(".")[0]
    return path


def _repeated(model: nn.Module) -> list[str]:
    """The outermost modules that stand beside others of their class: transformer blocks, residual blocks,
    layers of a list.

    Composite modules first (a block has children; a sequence in a list of sequences is one too, unless it
    holds blocks). A model of plain layers, such as a VGG, falls back to the children of its lists and
    sequences, so that one large layer does not force the whole model into one unit.
    """
    return _blocks(model, "") or _layers(model, "")


def _blocks(module: nn.Module, path: str) -> list[str]:
    children = _children(module, path)
    kinds = Counter(type(child) for _, child in children)
    result = []
    for name, child in children:
        inner = _blocks(child, name)
        sequence = _is_list(module) and isinstance(child, nn.Sequential) and not inner
        result += [name] if kinds[type(child)] > 1 and (_is_block(child) or sequence) else inner
    return result


def _layers(module: nn.Module, path: str) -> list[str]:
    result = []
    for name, child in _children(module, path):
        result += [name] if _is_list(module) and not _is_list(child) else _layers(child, name)
    return result


def _children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    return [(f"{path}.{n}" if path else n, c) for n, c in module.named_children() if _has_parameters(c)]


def _is_block(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and not _is_list(module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def standing(model: nn.Module) -> dict[str, str]:
    """A name of every place where a tensor stands, and the first name of that tensor.

    [Note: once a place] A module used twice has two names for one place. `functional_call` would put a fake
    there twice, and leave what it found the second time, the fake. So it gets each place of a tensor once."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                full = f"{path}.{name}" if path else name
                found[full] = first.setdefault(id(tensor), full)
    return found
