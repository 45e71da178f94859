"""What `load_state_dict` gives to the homes, of the model or of a module in it: whole tensors, of which each
rank takes its rows, or the DTensors of a state dict."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from zeroshard.life.shard import Faces, Param, names_of

from .agree import together
from .loading import refuse_weights
from .runtime import Runtime


class Weights:
    """Stands before and after the loads of one run. `hooks` registers both on every module, and torch calls
    them for modules inside of the one that is loaded, too: of these they are none of our business."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        self._model, self._runtime = model, runtime
        self._loaded: nn.Module | None = None  # the load under way is of this one

    def before(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Check every shape, then hand each home what it is made of. Every rank calls it."""
        if prefix and module is not self._model:
            return  # the model itself may be a part of another one
        runtime = self._runtime
        names = {n: every for n, every in names_of(module, runtime.params).items() if every}
        params = [param for param in runtime.params if param.name in names and _stands(param)]
        if not params:
            return
        self._loaded = module
        runtime.settle()
        look = partial(refuse_weights, params, names, state, prefix, runtime.faces.rank)
        together(runtime.transport, "model.load_state_dict()", look)
        runtime.before_change()
        runtime.transport.fence()
        for param in params:
            for name in names[param.name]:
                value = state.get(prefix + name)
                if isinstance(value, Tensor):
                    state[prefix + name] = _taken(param, value, runtime.faces)

    def after(self, module: nn.Module, keys: Any) -> None:
        """All is copied: the next forward uses it."""
        if module is self._loaded:
            self._loaded = None
            self._runtime.changed()


def _stands(param: Param) -> bool:
    """Whether its home is in its places. Inside `run.gathered()` whole tensors are, and take whole ones."""
    return all(place.module._parameters.get(place.attribute) is param.home for place in param.places)


def _taken(param: Param, value: Tensor, faces: Faces) -> Tensor:
    """What the home is loaded with. A master that is split or on the disk takes it in full precision, and
    its home is loaded with itself."""
    rows = Faces.local(value)
    whole = rows is value and faces.mesh is not None
    if whole and param.slot.split != "copy":
        start, stop = param.slot.rows(faces.rank)
        rows = value[start:stop]
    if param.master is not None:
        param.write_master(rows)
        return param.home.detach()
    return faces.show(rows.to(param.local), param.slot) if whole else value
