"""`join()`: ranks whose batches have run out keep the others company.

[Note: words] Inside of the block every rank says, before a forward and before an optimizer's step, what it is
about to do; one that has run out says nothing, and does what the others say: a forward and backward of its
last batch whose gradients are zero, and the step with their numbers. So rows that it owns are updated, and
whatever ranks do together has all of them. At stage 0 it takes their gradients, too: the loop may have
clipped them. At stages 1 and 2 nobody else has those of its rows, so that a loop which changes gradients by
hand is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import zeroshard as zs

_FORWARD, _STEP = "forward", "step"
_NONE, _KEPT, _ZERO, _CHANGED = "none", "kept", "zero", "changed"


@dataclass
class Joining:
    """One block. `share(tensors, source)`: values of one rank for all; `optimizers`: those of the run, in one
    order on all ranks."""

    module: nn.Module
    shards_state: bool
    group: Any
    share: Callable[[Sequence[Tensor], int], None]
    optimizers: Sequence[Optimizer]
    keep_scale: bool  # gradients are divided by the number of all ranks, and not of those that go on
    throw: bool

    def __post_init__(self) -> None:
        self._inputs: tuple[Any, Any] | None = None
        self._landed: dict[int, tuple[Tensor, Tensor]] = {}  # by id of a parameter: its gradient, and a sum
        self._active: dict[int, list[Any]] = {}  # what ranks that go on have said last
        self._last = 0  # the rank whose buffers count
        self._own: list[Callable[[], Any]] = []

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Steps are announced inside of a block."""
        before = [vars(optimizer).get("step") for optimizer in self.optimizers]
        self._own = [optimizer.step for optimizer in self.optimizers]
        for number, optimizer in enumerate(self.optimizers):
            vars(optimizer)["step"] = MethodType(
                _like(optimizer.step, partial(self._announce, number)), optimizer
            )
        try:
            yield
        finally:
            for optimizer, step in zip(self.optimizers, before, strict=True):
                vars(optimizer).pop("step")
                if step is not None:
                    vars(optimizer)["step"] = step

    # ------------------------------------------------------------------ of ranks that go on

    def forward(self, inputs: tuple[Any, Any], synced: bool, due: bool) -> float:
        """This rank is about to make one that trains; buffers may be `due` to be shared. By what gradients
        are to be multiplied."""
        self._inputs = inputs
        active = self._say([_FORWARD, synced, self._gradients(), due])
        return 1.0 if self.keep_scale else dist.get_world_size(self.group) / len(active)

    def made(self, output: Any, factor: float) -> None:
        """It has: look at gradients when its backward has ended."""
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
        for tensor in outputs:
            tensor.register_hook(lambda grad: grad if factor == 1.0 else grad * factor)
        for tensor in outputs[:1]:
            tensor.register_hook(lambda grad: Variable._execution_engine.queue_callback(self._look))

    def _look(self) -> None:
        if self.shards_state:
            grads = {id(p): p.grad for p in self.module.parameters()}
            self._landed = {key: (g, _sum_of(g)) for key, g in grads.items() if g is not None}

    def _gradients(self) -> list[str]:
        """What the loop has done with each gradient since backward."""
        return [self._state_of(p) for p in self.module.parameters()]

    def _state_of(self, param: Tensor) -> str:
        grad = param.grad
        if grad is None:
            return _NONE
        landed, before = self._landed.get(id(param), (None, None))
        if not self.shards_state or (landed is grad and before is not None and before.equal(_sum_of(grad))):
            return _KEPT
        return _CHANGED if bool(_local(grad).any()) else _ZERO

    def _announce(self, number: int, optimizer: Optimizer, closure: object = None) -> Any:
        """This rank is about to step."""
        if closure is not None:
            raise zs.StateError(
                "optimizer.step(closure) inside of join(): ranks that have run out of batches cannot follow "
                "a closure. Call loss.backward() before optimizer.step()."
            )
        numbers = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        active = self._say([_STEP, number, numbers, self._gradients()])
        self._share_gradients(next(iter(active.values())))
        return self._own[number]()

    # ------------------------------------------------------------------ of ranks that have run out

    def follow_others(self) -> None:
        """Until all have run out."""
        while active := self._say(None):
            word = next(iter(active.values()))
            self._replay(word) if word[0] == _FORWARD else self._step(word)
        self.share(list(self.module.buffers()), self._last)

    def _replay(self, word: list[Any]) -> None:
        _, synced, gradients, _ = word
        assert self._inputs is not None
        for param, state in zip(self.module.parameters(), gradients, strict=True):
            if state == _NONE:
                param.grad = None
            elif state == _ZERO and param.grad is not None:
                _local(param.grad).zero_()
        args, kwargs = self._inputs
        with torch.enable_grad():
            output = self.module(*args, **kwargs)
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
        if synced:
            torch.autograd.backward(outputs, [torch.zeros_like(tensor) for tensor in outputs])

    def _step(self, word: list[Any]) -> None:
        _, number, numbers, _ = word
        for group, own in zip(self.optimizers[number].param_groups, numbers, strict=True):
            group.update(own)
        self._share_gradients(word)
        self._own[number]()

    # ------------------------------------------------------------------ together

    def _say(self, word: list[Any] | None) -> dict[int, list[Any]]:
        """What all ranks that go on say, by rank."""
        told: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, (word, self._inputs is not None), self.group)
        self._active = active = {rank: each for rank, (each, _) in enumerate(told) if each is not None}
        if not active:
            return active
        if len(active) < len(told):
            self._refuse(told, next(iter(active.values())))
        self._last = max(active)
        if (word := active[self._last])[0] == _FORWARD and word[3]:
            self.share(list(self.module.buffers()), self._last)
        return active

    def _refuse(self, told: list[Any], word: list[Any]) -> None:
        """What those who have run out cannot follow. All ranks raise the same."""
        gone = next(rank for rank in range(len(told)) if rank not in self._active)
        if self.throw:
            raise zs.StateError(
                f"rank {gone} has run out of batches, and join(throw_on_early_termination=True) ends the "
                "training of all ranks then."
            )
        if not told[gone][1]:
            raise zs.StateError(
                f"rank {gone} had no batch at all inside of join(), so it cannot keep the others company: "
                "give every rank one."
            )
        if word[0] == _STEP and _CHANGED in word[3] and self.shards_state:
            raise zs.StateError(
                f"the loop has changed gradients before optimizer.step(), and rank {gone}, which has run out "
                "of batches, owns rows that nobody changes: inside of join() clip by clip_norm=, or pass "
                "stage=0."
            )

    def _share_gradients(self, word: list[Any]) -> None:
        """At stage 0 those who go on have them whole, as the loop has left them."""
        if self.shards_state or len(self._active) == dist.get_world_size(self.group):
            return
        for param, state in zip(self.module.parameters(), word[3], strict=True):
            if state == _NONE:
                param.grad = None
            elif param.grad is not None:
                self.share([param.grad], min(self._active))


def _like(own: Any, step: Any) -> Any:
    """With the mark by which a scheduler knows a step that it counts."""
    if hasattr(own, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True
    return step


def _local(grad: Tensor) -> Tensor:
    return getattr(grad, "_local_tensor", grad)


@torch.no_grad()
def _sum_of(grad: Tensor) -> Tensor:
    """A number that changes with what is in this rank's rows: they are written in ways that nobody counts."""
    rows = _local(grad)
    return torch.stack([rows.double().sum(), rows.double().abs().sum()])
