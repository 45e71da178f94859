"""What comes to a model after `shard()`: gradient hooks on parameters, which would not be called, and modules
with parameters that are not the run's."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import nn

from zeroshard.errors import StateError
from zeroshard.life.face import Face
from zeroshard.life.shard import Faces, Param

_learns = attrgetter("requires_grad")
_early, _late = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class LateHooks:
    """Finds them. Those that were there before, `shard()` itself has refused."""

    def __init__(self, faces: Faces, params: Sequence[Param], size: int) -> None:
        self._writes, self._names = faces.writes, [param.name for param in params]
        self._homes = [param.home for param in params]
        self._ours = size > 1 and faces.mesh is None  # plain homes of several ranks have one: see `hooks`
        self._tell = all(isinstance(home, Face) for home in self._homes)
        self._seen = -1

    def refuse(self) -> None:
        settings = self._writes.settings
        if self._tell and settings == self._seen:
            return
        pairs = zip(map(_early, self._homes), map(_late, self._homes), strict=True)
        hooked = [bool(late) or (early is not None and len(early) > self._ours) for early, late in pairs]
        if any(hooked):
            name = self._names[hooked.index(True)]
            raise StateError(
                f"`{name}` has a gradient hook, registered after zs.shard(), which would not be called: "
                "autograd sees other tensors. Remove it, and change gradients in the loop, between "
                "backward() and step()."
            )
        self._seen = settings


class Strangers:
    """Parameters that were not in the model when it was sharded: no rank adds up their gradients, so that
    they would differ from rank to rank.

    `put` hears of whatever is put into any module of the process; only then is the model looked through."""

    def __init__(self, model: nn.Module, params: Sequence[Param]) -> None:
        self._modules = {id(module) for module in model.modules()}
        self._homes = {id(param.home) for param in params}
        # What is assigned where a home stood is found by its unit, which says more of it.
        self._places = {(id(place.module), place.attribute) for param in params for place in param.places}
        self._changed, self._frozen = False, list[nn.Parameter]()

    def put(self, module: nn.Module, name: str, what: object) -> None:
        self._changed = self._changed or id(module) in self._modules

    def refuse(self, model: nn.Module) -> None:
        """Those that would train. Frozen ones are the same as they were put there."""
        if not self._changed and not any(map(_learns, self._frozen)):
            return
        self._frozen.clear()
        for path, module in model.named_modules():
            self._modules.add(id(module))
            for attribute, parameter in module._parameters.items():
                if (
                    parameter is None
                    or id(parameter) in self._homes
                    or (id(module), attribute) in self._places
                ):
                    continue
                self._frozen.append(parameter)
                if parameter.requires_grad:
                    raise StateError(
                        f"`{path}{'.' if path else ''}{attribute}` was not in the model when zs.shard() was "
                        "called, and the ranks would not add up its gradients: they would train different "
                        "models. Call run.close(), complete the model and the optimizer, and shard again; or "
                        "freeze it (requires_grad_(False))."
                    )
        self._changed = False
