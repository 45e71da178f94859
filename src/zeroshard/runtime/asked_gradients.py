"""Refuses gradients that a loop asks for by sharded parameters.

`torch.autograd.grad(loss, model.parameters())` and `loss.backward(inputs=...)` follow the graph to the very
tensors that they are given. A forward computes with the whole parameters that stand in the modules meanwhile,
so that nothing of it leads to those that the loop has: torch says that they were not used, or, where a
penalty was computed of them beside, returns the penalty's part alone without a word.

Torch has no hook for that. Both calls go through one function of `torch.autograd`, which is wrapped while
any run is open; a backward without `inputs` passes on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import GradientEdge

from zeroshard.errors import StateError

from .runtime import CheckedBackward, Runtime

_NAME = "_engine_run_backward"  # of `torch.autograd`
Watched = tuple[dict[int, str], ref[Runtime]]  # by id of a sharded parameter, its name; and its run
_watched: list[Watched] = []


def watch(runtime: Runtime) -> Callable[[], None]:
    """From now on, until what is returned is called."""
    entry = {id(p.sharded_param): p.name for p in runtime.params}, ref(runtime)
    own = getattr(torch.autograd, _NAME, None)
    if own is not None and not isinstance(own, CheckedBackward):
        setattr(torch.autograd, _NAME, CheckedBackward(own, _refuse))
    _watched.append(entry)
    return partial(_forget, entry)


def _forget(entry: Watched) -> None:
    _watched[:] = [one for one in _watched if one is not entry]
    found = getattr(torch.autograd, _NAME, None)
    if not _watched and isinstance(found, CheckedBackward):
        setattr(torch.autograd, _NAME, found.own)


def _refuse(outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
    asked = list(map(_tensor_of, inputs))
    for names, runtime in _watched:
        name = next((names[id(one)] for one in asked if id(one) in names), None)
        run = runtime() if name is not None else None
        if run is None:
            continue
        used = {id(p.unsharded_param) for p in run.params}
        if any(id(param) in used for param in _reached(outputs)):
            raise StateError(
                f"torch.autograd.grad(...) or backward(inputs=...) asks for the gradient of `{name}` as it "
                "lies on the ranks, and what the model computed leads to the whole parameters that stood in "
                "it: that part would be missing. Call loss.backward() and read p.grad, which is averaged "
                "over the ranks (p.grad.full_tensor() is whole); add a penalty to the loss before it. For "
                "gradients of some alone: p.requires_grad_(False) of the others before the forward."
            )


def _tensor_of(asked: Any) -> Any:
    return getattr(asked.node, "variable", None) if isinstance(asked, GradientEdge) else asked


def _reached(outputs: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The leaves to which the graph of some tensors leads."""
    todo = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in outputs]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        param = getattr(node, "variable", None)
        if param is not None:
            yield param
        todo += [following for following, _ in node.next_functions]
