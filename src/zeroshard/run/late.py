"""Gradient hooks that are registered on parameters after `shard()`, and would not be called."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from zeroshard.errors import StateError
from zeroshard.life.face import Face
from zeroshard.life.shard import Faces, Param

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
