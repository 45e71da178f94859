"""The user's optimizer steps on this rank's rows.

Inside of `optimizer.step()` the optimizer sees *proxies*: plain parameters over the local rows, with plain
gradients. Outside it sees the sharded parameters. DTensor dispatch would cost 50 to 175 µs a parameter; a
proxy costs nothing. The state of a sharded parameter and of its proxy is one dict, found under either.

Gradients of fewer bits than the master are widened for the update, a chunk of parameters at a time, so that
the whole gradient never exists in fp32. Nor does the whole of a split master: its halves are joined for the
chunk, and what the optimizer made of it is split again.

[Note: lists made once] A step of torch's fused Adam on the CPU over 2,000 small tensors takes 5.9 ms on one
core, of which 1.2 are the kernel. In the rest, lists are put together that are the same at every step, and
one is added to 2,000 counts. Here the lists are made once and the counts lie in one tensor. The kernel and
what it is given are torch's own, and so are the numbers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, optimizer

from zeroshard.errors import ModelError, StateError
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors, SplitMaster

from .frozen_moments import FrozenMoments
from .optimizer_kinds import ElsewhereState, rows_suffice, state_bytes

log = logging.getLogger("zeroshard")

_grad, _dtype = attrgetter("grad"), attrgetter("dtype")
_FIRST = -1  # number of a step hook of ours; torch counts from 0
_STATE = ("step", "exp_avg", "exp_avg_sq")
_KERNELS: dict[bool, Callable[..., None] | None] = {  # by whether the weight decay is decoupled
    False: getattr(torch, "_fused_adam_", None),
    True: getattr(torch, "_fused_adamw_", None),
}
WIDEN_BYTES = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}


def tell_of_no_gradient(params: Sequence[ShardedParam], rank: int) -> None:
    """Where no backward has had any effect: torch says nothing of inputs that it cannot reach."""
    if all(param.sharded_param.grad is None for param in params):
        log.warning(
            "rank %d: optimizer.step() without a gradient: since zs.shard() no backward has reached a "
            "parameter. Call loss.backward() without inputs=[...], and not torch.autograd.grad(): "
            "autograd knows the whole parameters that stand in the modules while they compute, not those "
            "of model.parameters().",
            rank,
        )


class ShardedOptimizer:
    """One optimizer and the parameters that it updates."""

    def __init__(
        self, optimizer: Optimizer, params: Sequence[ShardedParam], sharded_tensors: ShardedTensors
    ) -> None:
        self.optimizer, self.sharded_tensors = optimizer, sharded_tensors
        self._together = FusedAdam(optimizer)
        self.held: FrozenMoments | None = None  # where a codec freezes second moments
        # What `state_dict()` shows instead of this rank's rows, by id(sharded parameter).
        self.whole: dict[int, dict[str, Any]] | None = None
        self.shrinks = 1.0  # what gradients in fp16 are multiplied by for the step under way
        self.params: dict[int, ShardedParam] = {}
        self._proxies: dict[int, nn.Parameter] = {}
        # By id(sharded parameter): split masters, and those of them that are joined for the step under way.
        self._split: dict[int, SplitMaster] = {}
        self._joined: dict[int, SplitMaster] = {}
        # By id(sharded parameter): its gradient, and the proxy that has it.
        self._shown: dict[int, tuple[Tensor, Tensor]] = {}
        # By group: its sharded parameters, their gradients and proxies when all were known.
        self._known: dict[int, tuple[list[Tensor], list[Tensor | None], list[Tensor]]] = {}
        self.alike = False  # the last step was of the sharded parameters and gradients of the one before it
        self.meet(params)
        self._linked: tuple[Any, list[Any]] = (None, [])  # a state and its dicts: what `_inner` was made of
        self._inner: defaultdict[Any, dict[str, Any]] = defaultdict(dict)

    def freeze(self, moments: FrozenMoments) -> None:
        """Let a codec freeze second moments."""
        self.held = moments

    @contextmanager
    def showing(self, whole: dict[int, dict[str, Any]]) -> Iterator[None]:
        """Inside, `state_dict()` shows these whole tensors, by id(sharded parameter)."""
        self.whole = whole
        try:
            yield
        finally:
            self.whole = None

    def meet(self, params: Sequence[ShardedParam]) -> None:
        """Parameters that the optimizer holds."""
        wholes = not rows_suffice(self.optimizer) and any(
            p.slot.split == "whole" for p in self.params.values()
        )
        for param in params:
            if wholes and param.slot.by_rows:
                raise ModelError(
                    f"{type(self.optimizer).__name__} needs whole tensors, and `{param.name}` was divided by "
                    'rows. Give it the parameter before shard(), or pass shard(..., split="whole").'
                )
            self.params[id(param.sharded_param)] = param
            if isinstance(param.master, SplitMaster):
                self._split[id(param.sharded_param)] = param.master
                nothing = torch.empty(0, dtype=param.master_dtype, device=param.local.device)
                proxy = nn.Parameter(nothing, requires_grad=False)
            elif self.sharded_tensors.mesh is None:
                proxy = param.sharded_param
            else:
                proxy = nn.Parameter(param.local, requires_grad=False)
            self._proxies[id(param.sharded_param)] = proxy

    def meet_late(self, known: Sequence[ShardedParam], added: Sequence[Tensor], ranks: int) -> None:
        """Parameters that `add_param_group` brings, of those that the run knows."""
        by_sharded_param = {id(param.sharded_param): param for param in known}
        strangers = [parameter for parameter in added if id(parameter) not in by_sharded_param]
        if strangers and ranks > 1:
            raise ModelError(
                f"add_param_group(): a parameter of shape {tuple(strangers[0].shape)} was not in the model "
                "when zs.shard() was called, and the ranks would not add up its gradients. Call run.close(), "
                "complete the model and the optimizer, and shard again."
            )
        params = [by_sharded_param[id(parameter)] for parameter in added if id(parameter) in by_sharded_param]
        for param in params:
            if param.narrow and param.trainable:
                raise ModelError(
                    f"`{param.name}` was in no optimizer when zs.shard() was called, and with offload= it "
                    "has no master that an update could reach. Give it to the optimizer before shard(), and "
                    "freeze it after shard() until it shall train."
                )
        self.meet(params)

    def adopt(self, successors: dict[int, nn.Parameter]) -> None:
        """Put the sharded parameters where the optimizer held the user's parameters."""
        for group in self.optimizer.param_groups:
            group["params"] = [successors.get(id(p), p) for p in group["params"]]

    @torch.no_grad()
    def shrink(self, factor: float) -> None:
        """Let the next step take gradients times `factor`: those in fp16 when they are widened, since small
        ones would be lost in it, and all others at once."""
        self.shrinks = factor
        if factor != 1.0:
            grads = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
            wide = [ShardedTensors.local(g) for g in grads if g is not None and g.dtype != torch.float16]
            if wide:
                torch._foreach_mul_(wide, factor)

    @torch.no_grad()
    def run(self, step: Callable[[], Any]) -> None:
        """One update of the local rows by `step`, which is the optimizer's own."""
        if self.held is not None:
            self.held.hold()
        groups = self.optimizer.param_groups
        self.alike = False
        if not self._needs_proxies():
            with self._as_they_are():
                self._step_known([group["params"] for group in groups], step)
            return
        self.alike = True
        known = [self._known_proxies(number, group["params"]) for number, group in enumerate(groups)]
        if all(proxies is not None for proxies in known):
            with self._as_proxies():
                self._step_known([proxies for proxies in known if proxies is not None], step)
            return
        lists = [[p for p in group["params"] if p.grad is not None] for group in self.optimizer.param_groups]
        chunks = self._chunks(lists)
        raw = getattr(type(self.optimizer).step, "__wrapped__", type(self.optimizer).step)
        with self._as_proxies() as groups:
            for index, chunk in enumerate(chunks):
                for group, sharded_params in zip(groups, chunk, strict=True):
                    group["params"] = [
                        self._proxy(sharded_param)
                        for sharded_param in sharded_params
                        if self._has_rows(sharded_param)
                    ]
                try:
                    # The user's own step hooks run once: with the last chunk.
                    if index == len(chunks) - 1:
                        self._step(step)
                    else:
                        raw(self.optimizer)
                    self._divide()
                finally:
                    for sharded_params in chunk:
                        self._forget(sharded_params)

    @torch.no_grad()
    def change(self, own: Callable[[], Any]) -> Any:
        """A method of the optimizer's that writes parameters outside of a step, such as `eval()` of a
        schedule-free one, on the local rows."""
        if self.sharded_tensors.mesh is None and not self._split:
            return own()
        sharded_params = [group["params"] for group in self.optimizer.param_groups]
        with self._as_proxies() as groups:
            for group, held in zip(groups, sharded_params, strict=True):
                group["params"] = [
                    self._bare(sharded_param) for sharded_param in held if self._has_rows(sharded_param)
                ]
            try:
                result = own()
                self._divide()
            finally:
                for held in sharded_params:
                    self._forget(held)
        return result

    def _bare(self, sharded_param: Tensor) -> Tensor:
        """The plain parameter over a sharded parameter's rows, whatever its gradient."""
        proxy, master = (
            self._proxies.get(id(sharded_param), sharded_param),
            self._split.get(id(sharded_param)),
        )
        if master is not None:
            local = ShardedTensors.local(sharded_param)
            proxy.data = master.read(0, local.numel()).view(local.shape)
            self._joined[id(sharded_param)] = master
        return proxy

    def _step_known(self, params: Sequence[list[Tensor]], step: Callable[[], Any]) -> None:
        """Of parameters that are what the optimizer shall work on. What was done together is not there any
        more for its own step, which counts and is seen."""
        done = self._together.run(params, self.optimizer.state)
        for group, own in zip(self.optimizer.param_groups, params, strict=True):
            group["params"] = [] if done else own
        step()

    def _step(self, step: Callable[[], Any]) -> None:
        """With masters joined for it: split them again before the user's hooks, which may look at sharded
        parameters."""
        if not self._joined:
            step()
            return
        hooks = cast("OrderedDict[int, Any]", self.optimizer._optimizer_step_post_hooks)
        hooks[_FIRST] = lambda *_: self._divide()
        hooks.move_to_end(_FIRST, last=False)
        try:
            step()
        finally:
            del hooks[_FIRST]

    def _known_proxies(self, number: int, sharded_params: list[Tensor]) -> list[Tensor] | None:
        """The proxies of a group's sharded parameters, if all show the gradients that their proxies have had
        since an earlier step: reduced-gradient buffers are made once, so that is the rule and takes no work
        for each of many parameters."""
        grads: list[Tensor | None] = list(map(_grad, sharded_params))
        before, had, proxies = self._known.get(number, ([], [], []))
        if (
            len(sharded_params) == len(before)
            and all(map(is_, sharded_params, before))
            and all(map(is_, grads, had))
        ):
            return list(proxies)
        self.alike = False
        result = []
        for sharded_param, grad in zip(sharded_params, grads, strict=True):
            if grad is not None:
                shown, proxy = self._shown.get(id(sharded_param), (None, sharded_param))
                if shown is not grad:
                    return None
                result.append(proxy)
        self._known[number] = list(sharded_params), grads, result
        return list(result)

    def _needs_proxies(self) -> bool:
        if self.sharded_tensors.mesh is not None or self._split:
            return True
        sharded_params = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = list(map(_grad, sharded_params))
        if len({grad.dtype for grad in grads if grad is not None}.union(map(_dtype, sharded_params))) <= 1:
            return False  # the common case, of thousands of parameters
        pairs = zip(sharded_params, grads, strict=True)
        return any(grad is not None and grad.dtype != sharded_param.dtype for sharded_param, grad in pairs)

    def _widens(self, sharded_param: Tensor) -> bool:
        """Whether an update makes something in the master's dtype that does not rest in it."""
        if id(sharded_param) in self._split:
            return True
        grad = sharded_param.grad
        return grad is not None and grad.dtype != sharded_param.dtype

    def _has_rows(self, sharded_param: Tensor) -> bool:
        """Element-wise optimizers also see parameters of which this rank has no row: they make an empty state
        for them, so that `state_dict()` has the same keys on all ranks. Others may not expect a tensor
        without elements."""
        return rows_suffice(self.optimizer) or ShardedTensors.local(sharded_param).numel() > 0

    def _proxy(self, sharded_param: Tensor) -> Tensor:
        """The plain parameter over a sharded parameter's rows, with its gradient in the dtype of the rows."""
        proxy = self._proxies.get(id(sharded_param))
        if proxy is None:
            return sharded_param  # a parameter group that the user added later
        assert sharded_param.grad is not None
        grad = ShardedTensors.local(sharded_param.grad)
        if grad is sharded_param.grad and self.sharded_tensors.mesh is not None:
            self._refuse_whole(sharded_param, grad)
        if proxy is sharded_param:
            if grad.dtype == sharded_param.dtype:
                return sharded_param
            proxy = self._proxies[id(sharded_param)] = nn.Parameter(sharded_param.data, requires_grad=False)
            if sharded_param in self._inner:  # state that was loaded before the first step
                self._inner[proxy] = self._inner.pop(sharded_param)
        master = self._split.get(id(sharded_param))
        if master is not None:
            local = ShardedTensors.local(sharded_param)
            proxy.data = master.read(0, local.numel()).view(local.shape)
            self._joined[id(sharded_param)] = master
        elif (
            grad.dtype == proxy.dtype
            and self.sharded_tensors.mesh is not None
            and self._has_rows(sharded_param)
        ):
            self._shown[id(sharded_param)] = sharded_param.grad, proxy
            self._known.clear()
        proxy.grad = grad if grad.dtype == proxy.dtype else self._widened(grad, proxy.dtype)
        return proxy

    def _refuse_whole(self, sharded_param: Tensor, grad: Tensor) -> None:
        """A plain gradient that the loop has set, where a rank has rows."""
        if grad.shape != ShardedTensors.local(sharded_param).shape:
            raise StateError(
                f"`{self.params[id(sharded_param)].name}`.grad is a plain tensor of shape "
                f"{tuple(grad.shape)}, and a gradient here has the rows of its rank: set p.grad = "
                "torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements), on all "
                "ranks, or write into the p.grad that backward leaves (copy_, mul_)."
            )

    def _widened(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        wide = grad.to(dtype)
        return wide.mul_(self.shrinks) if grad.dtype == torch.float16 and self.shrinks != 1.0 else wide

    def _divide(self) -> None:
        """What a step made of joined masters, in two halves again."""
        for key, master in self._joined.items():
            master.write(0, self._proxies[key].data.view(-1))
        self._joined.clear()

    def _forget(self, sharded_params: list[Tensor]) -> None:
        """Let go of gradients and masters that were made for a step."""
        for sharded_param in sharded_params:
            proxy = self._proxies.get(id(sharded_param), sharded_param)
            if proxy is not sharded_param and id(sharded_param) not in self._shown:
                proxy.grad = None
            if id(sharded_param) in self._split:
                proxy.data = proxy.data.new_empty(0)
        self._joined.clear()

    def _chunks(self, lists: list[list[Tensor]]) -> list[list[list[Tensor]]]:
        """The parameters of every group cut so that no chunk widens more than the limit. Unknown optimizers
        get one chunk: they may keep counters of their own, and must be called once a step."""
        widened = [p for ps in lists for p in ps if self._widens(p)]
        if not widened or not rows_suffice(self.optimizer):
            return [lists]
        limit = WIDEN_BYTES.get(widened[0].device.type, WIDEN_BYTES["cpu"])
        chunks: list[list[list[Tensor]]] = []
        room = 0
        for index, ps in enumerate(lists):
            for p in ps:
                size = ShardedTensors.local(p).numel() * (4 if id(p) in self._split else p.element_size())
                if not chunks or size > room:
                    chunks.append([[] for _ in lists])
                    room = limit
                chunks[-1][index].append(p)
                room -= size
        return chunks

    @contextmanager
    def _as_they_are(self) -> Iterator[None]:
        """Put the parameters back that a step was not shown."""
        seen = [group["params"] for group in self.optimizer.param_groups]
        try:
            yield
        finally:
            for group, params in zip(self.optimizer.param_groups, seen, strict=True):
                group["params"] = params

    @contextmanager
    def _as_proxies(self) -> Iterator[list[dict[str, Any]]]:
        """Let the optimizer see proxies and their state; put the sharded parameters back whatever happens."""
        optimizer = self.optimizer
        seen_state, seen_params = optimizer.state, [group["params"] for group in optimizer.param_groups]
        linked_to, dicts = self._linked
        states = list(seen_state.values())
        if linked_to is not seen_state or len(dicts) != len(states) or not all(map(is_, states, dicts)):
            self.point_elsewhere()
            self._inner.clear()
            self._inner.update(
                {
                    self._proxies.get(id(sharded_param), sharded_param): state
                    for sharded_param, state in seen_state.items()
                }
            )
        optimizer.state = self._inner
        try:
            yield optimizer.param_groups
        finally:
            for group, params in zip(optimizer.param_groups, seen_params, strict=True):
                group["params"] = params
            optimizer.state = seen_state
            if len(seen_state) != len(self._inner):
                sharded_param_of = {id(self._proxies[key]): p.sharded_param for key, p in self.params.items()}
                for proxy, state in self._inner.items():
                    seen_state.setdefault(sharded_param_of.get(id(proxy), proxy), state)
            self._linked = (seen_state, list(seen_state.values()))

    def is_elsewhere(self, sharded_param: Tensor) -> bool:
        """Whether the parameter and its state lie whole on another rank."""
        param = self.params.get(id(sharded_param))
        if param is None or self.sharded_tensors.mesh is None or rows_suffice(self.optimizer):
            return False
        return param.slot.split == "whole" and param.slot.owner != self.sharded_tensors.rank

    def point_elsewhere(self) -> None:
        """Where other ranks alone have state, say so: else Python's KeyError would."""
        for param in self.params.values():
            if self.is_elsewhere(param.sharded_param):
                said = ElsewhereState(type(self.optimizer).__name__, param.name, param.slot.owner)
                self.optimizer.state.setdefault(param.sharded_param, said)

    def state_bytes(self) -> int:
        return state_bytes(self.optimizer)


@dataclass(frozen=True)
class _AdamLists:
    """What one group's update is given. `states`: the dicts of the parameters, and `held` what they held by
    each name; `counts`: all of their steps."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    held: dict[str, list[Tensor]]
    counts: Tensor

    def stand(self, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: dict[Any, Any]) -> bool:
        """Whether these still are what the optimizer would work on."""
        same = len(params) == len(self.params) and all(map(is_, params, self.params))
        if not same or not all(map(is_, grads, self.grads)):
            return False
        if not all(map(is_, map(state.get, params), self.states)):
            return False
        held = self.held.items()
        return all(all(map(is_, map(dict.get, self.states, repeat(name)), own)) for name, own in held)


class FusedAdam:
    """Torch's fused Adam of one optimizer; see [Note: lists made once]. Used from the second step on with the
    same tensors: reduced-gradient buffers are made once, but one rank has new gradients at every step, and
    some loops make their own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._lists: dict[int, _AdamLists] = {}
        self._before: dict[int, _LastStep] = {}

    def run(self, params: Sequence[Sequence[Tensor]], state: dict[Any, Any]) -> bool:
        """One update of each group's parameters, whose state is in `state`; or False, and nothing was
        done."""
        groups = self._optimizer.param_groups
        if not self._takes(groups):
            return False
        found = [self._find(number, own, state) for number, own in enumerate(params)]
        known = [lists for lists in found if lists is not None]
        if len(known) < len(found):
            return False
        for group, lists in zip(groups, known, strict=True):
            lists.counts.add_(1)
            beta1, beta2 = group["betas"]
            kernel = _KERNELS[group["decoupled_weight_decay"]]
            assert kernel is not None
            kernel(
                lists.params,
                lists.grads,
                lists.held["exp_avg"],
                lists.held["exp_avg_sq"],
                [],
                lists.held["step"],
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=None,
                found_inf=None,
            )
        return True

    def _takes(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether all groups ask for the fused kernel and nothing beside, and nobody else has a say: hooks,
        which see what `step()` works on, or a GradScaler."""
        own = self._optimizer
        if type(own) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        for group in groups:
            numbers = (group["lr"], *group["betas"])
            asked = group["fused"] is True and all(type(number) is float for number in numbers)
            if not asked or any(group[name] for name in ("amsgrad", "capturable", "differentiable")):
                return False
        hooks = (
            own._optimizer_step_pre_hooks,
            own._optimizer_step_post_hooks,
            optimizer._global_optimizer_pre_hooks,
            optimizer._global_optimizer_post_hooks,
        )
        scaled = any(getattr(own, name, None) is not None for name in ("grad_scale", "found_inf"))
        return not any(hooks) and not scaled

    def _find(self, number: int, params: Sequence[Tensor], state: dict[Any, Any]) -> _AdamLists | None:
        if not params or params[0].device.type != "cpu":
            return None
        grads = list(map(_grad, params))
        lists = self._lists.pop(number, None)
        if lists is None or not lists.stand(params, grads, state):
            again = number in self._before and self._before[number].same(params, grads)
            self._before[number] = _LastStep(params, grads)
            lists = _lists_of(params, grads, [state.get(param) for param in params]) if again else None
        if lists is not None:
            self._lists[number] = lists
        return lists


class _LastStep:
    """What a step worked on. It holds no gradient: those that a loop makes anew are gone by the next step."""

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        self._params = list(params)
        self._grads = [None if grad is None else ref(grad) for grad in grads]

    def same(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        if len(params) != len(self._params) or None in self._grads:
            return False
        held = [grad() for grad in self._grads if grad is not None]
        return all(map(is_, params, self._params)) and all(map(is_, grads, held)) and None not in held


def _lists_of(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], states: Sequence[dict[str, Any] | None]
) -> _AdamLists | None:
    """None where the kernel does not take them all at once, as they are."""
    if any(kernel is None for kernel in _KERNELS.values()):
        return None
    given = [grad for grad in grads if grad is not None]
    known = [state for state in states if state is not None and all(name in state for name in _STATE)]
    if not len(given) == len(known) == len(params):
        return None
    alike = {(tensor.device.type, tensor.dtype) for tensor in (*params, *given)}
    counted = {(state["step"].device.type, state["step"].dtype) for state in known}
    if len(alike) > 1 or alike.pop()[0] != "cpu" or counted != {("cpu", torch.float32)}:
        return None
    counts = torch.stack([state["step"] for state in known])
    for state, step in zip(known, counts.unbind(), strict=True):
        state["step"] = step
    return _AdamLists(
        list(params), given, known, {name: [state[name] for state in known] for name in _STATE}, counts
    )
