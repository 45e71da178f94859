"""The life of an update: the user calls `optimizer.step()`, and the optimizer updates this rank's rows.

Inside the call the optimizer sees *proxies*: plain parameters over the local rows, with plain gradients.
Outside it sees the homes. DTensor dispatch would cost 50 to 175 µs a parameter; a proxy costs nothing. The
state of a home and of its proxy is one dict, found under either.

Gradients of fewer bits than the master are widened for the update, a chunk of parameters at a time, so that
the whole gradient never exists in fp32. Nor does the whole of a split master: its halves are joined for the
chunk, and what the optimizer made of it is split again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.errors import ModelError, StateError

from .moments import HeldMoments
from .shard import Faces, Param, SplitMaster
from .together import Together

log = logging.getLogger("zeroshard")

# Optimizers of torch that treat every element alone, so that they may work on any rows. All others get whole
# tensors.
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Rprop",
        "ASGD",
    )
)
_grad = attrgetter("grad")
_FIRST = -1  # number of a step hook of ours; torch counts from 0
WIDEN_BYTES = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}


def rows_suffice(optimizer: Optimizer) -> bool:
    """Whether the optimizer gives the same result on any slice of rows as on the whole tensor."""
    return type(optimizer) in ELEMENTWISE


def unstepped(optimizer: Optimizer) -> bool:
    """Whether its state is that of its beginning: Adagrad makes it when it is built."""
    counts = [state.get("step") for state in optimizer.state.values()]
    fresh = type(optimizer) is torch.optim.Adagrad
    return fresh and all(isinstance(n, Tensor) and (n.is_meta or not n.item()) for n in counts)


def refuse_unfit(optimizer: Optimizer) -> None:
    """Optimizers that look across parameters, or want sparse gradients, have no meaning on shards."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            "LBFGS needs inner products over all parameters and several passes a step, which no stage gives "
            "it, not even on one rank. Train in one process without zs.shard(), or use AdamW, SGD or another "
            "optimizer of one pass."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ModelError("SparseAdam needs sparse gradients, and reduced gradients are dense: use AdamW.")


def tell_of_no_gradient(params: Sequence[Param], rank: int) -> None:
    """Where no backward has had any effect: torch says nothing of inputs that it cannot reach."""
    if all(param.home.grad is None for param in params):
        log.warning(
            "rank %d: optimizer.step() without a gradient: since zs.shard() no backward has reached a "
            "parameter. Call loss.backward() without inputs=[...], and not torch.autograd.grad(): "
            "autograd knows the whole parameters that stand in the modules while they compute, not those "
            "of model.parameters().",
            rank,
        )


class Update:
    """One optimizer and the parameters that it updates."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Param], faces: Faces) -> None:
        self.optimizer, self.faces = optimizer, faces
        self._together = Together(optimizer)
        self.held: HeldMoments | None = None  # where a codec freezes second moments
        self.shrinks = 1.0  # what gradients in fp16 are multiplied by for the step under way
        self.params: dict[int, Param] = {}
        self._proxies: dict[int, nn.Parameter] = {}
        # By id(home): split masters, and those of them that are joined for the step under way.
        self._split: dict[int, SplitMaster] = {}
        self._joined: dict[int, SplitMaster] = {}
        # By id(home): its gradient, and the proxy that has it.
        self._shown: dict[int, tuple[Tensor, Tensor]] = {}
        # By group: its homes, their gradients and proxies when all were known.
        self._known: dict[int, tuple[list[Tensor], list[Tensor | None], list[Tensor]]] = {}
        self.alike = False  # the last step was of the homes and gradients of the one before it
        self.meet(params)
        self._linked: tuple[Any, list[Any]] = (None, [])  # a state and its dicts: what `_inner` was made of
        self._inner: defaultdict[Any, dict[str, Any]] = defaultdict(dict)

    def meet(self, params: Sequence[Param]) -> None:
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
            self.params[id(param.home)] = param
            if isinstance(param.master, SplitMaster):
                self._split[id(param.home)] = param.master
                nothing = torch.empty(0, dtype=param.master_dtype, device=param.local.device)
                proxy = nn.Parameter(nothing, requires_grad=False)
            elif self.faces.mesh is None:
                proxy = param.home
            else:
                proxy = nn.Parameter(param.local, requires_grad=False)
            self._proxies[id(param.home)] = proxy

    def meet_late(self, known: Sequence[Param], added: Sequence[Tensor], ranks: int) -> None:
        """Parameters that `add_param_group` brings, of those that the run knows."""
        by_home = {id(param.home): param for param in known}
        strangers = [parameter for parameter in added if id(parameter) not in by_home]
        if strangers and ranks > 1:
            raise ModelError(
                f"add_param_group(): a parameter of shape {tuple(strangers[0].shape)} was not in the model "
                "when zs.shard() was called, and the ranks would not add up its gradients. Call run.close(), "
                "complete the model and the optimizer, and shard again."
            )
        params = [by_home[id(parameter)] for parameter in added if id(parameter) in by_home]
        for param in params:
            if param.narrow and param.trainable:
                raise ModelError(
                    f"`{param.name}` was in no optimizer when zs.shard() was called, and with offload= no "
                    f"{str(param.wide).removeprefix('torch.')} master of it is kept. Give it to "
                    "the optimizer before shard(), and freeze it after shard() until it shall train."
                )
        self.meet(params)

    def adopt(self, successors: dict[int, nn.Parameter]) -> None:
        """Put the homes where the optimizer held the user's parameters."""
        for group in self.optimizer.param_groups:
            group["params"] = [successors.get(id(p), p) for p in group["params"]]

    @torch.no_grad()
    def shrink(self, factor: float) -> None:
        """Let the next step take gradients times `factor`: those in fp16 when they are widened, since small
        ones would be lost in it, and all others at once."""
        self.shrinks = factor
        if factor != 1.0:
            grads = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
            wide = [Faces.local(g) for g in grads if g is not None and g.dtype != torch.float16]
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
                for group, homes in zip(groups, chunk, strict=True):
                    group["params"] = [self._proxy(home) for home in homes if self._has_rows(home)]
                try:
                    # The user's own step hooks run once: with the last chunk.
                    if index == len(chunks) - 1:
                        self._step(step)
                    else:
                        raw(self.optimizer)
                    self._divide()
                finally:
                    for homes in chunk:
                        self._forget(homes)

    def _step_known(self, params: Sequence[list[Tensor]], step: Callable[[], Any]) -> None:
        """Of parameters that are what the optimizer shall work on. What was done together is not there any
        more for its own step, which counts and is seen."""
        done = self._together.run(params, self.optimizer.state)
        for group, own in zip(self.optimizer.param_groups, params, strict=True):
            group["params"] = [] if done else own
        step()

    def _step(self, step: Callable[[], Any]) -> None:
        """With masters joined for it: split them again before the user's hooks, which may look at homes."""
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

    def _known_proxies(self, number: int, homes: list[Tensor]) -> list[Tensor] | None:
        """The proxies of a group's homes, if all show the gradients that their proxies have had since an
        earlier step: landings are made once, so that is the rule and takes no work for each of many
        parameters."""
        grads: list[Tensor | None] = list(map(_grad, homes))
        before, had, proxies = self._known.get(number, ([], [], []))
        if len(homes) == len(before) and all(map(is_, homes, before)) and all(map(is_, grads, had)):
            return list(proxies)
        self.alike = False
        result = []
        for home, grad in zip(homes, grads, strict=True):
            if grad is not None:
                shown, proxy = self._shown.get(id(home), (None, home))
                if shown is not grad:
                    return None
                result.append(proxy)
        self._known[number] = list(homes), grads, result
        return list(result)

    def _needs_proxies(self) -> bool:
        if self.faces.mesh is not None or self._split:
            return True
        homes = [p for group in self.optimizer.param_groups for p in group["params"]]
        pairs = zip(homes, map(_grad, homes), strict=True)
        return any(grad is not None and grad.dtype != home.dtype for home, grad in pairs)

    def _widens(self, home: Tensor) -> bool:
        """Whether an update makes something in the master's dtype that does not rest in it."""
        if id(home) in self._split:
            return True
        grad = home.grad
        return grad is not None and grad.dtype != home.dtype

    def _has_rows(self, home: Tensor) -> bool:
        """Element-wise optimizers also see parameters of which this rank has no row: they make an empty state
        for them, so that `state_dict()` has the same keys on all ranks. Others may not expect a tensor
        without elements."""
        return rows_suffice(self.optimizer) or Faces.local(home).numel() > 0

    def _proxy(self, home: Tensor) -> Tensor:
        """The plain parameter over a home's rows, with its gradient in the dtype of the rows."""
        proxy = self._proxies.get(id(home))
        if proxy is None:
            return home  # a parameter group that the user added later
        assert home.grad is not None
        grad = Faces.local(home.grad)
        if grad is home.grad and self.faces.mesh is not None:
            self._refuse_whole(home, grad)
        if proxy is home:
            if grad.dtype == home.dtype:
                return home
            proxy = self._proxies[id(home)] = nn.Parameter(home.data, requires_grad=False)
            if home in self._inner:  # state that was loaded before the first step
                self._inner[proxy] = self._inner.pop(home)
        master = self._split.get(id(home))
        if master is not None:
            local = Faces.local(home)
            proxy.data = master.read(0, local.numel()).view(local.shape)
            self._joined[id(home)] = master
        elif grad.dtype == proxy.dtype and self.faces.mesh is not None and self._has_rows(home):
            self._shown[id(home)] = home.grad, proxy
            self._known.clear()
        proxy.grad = grad if grad.dtype == proxy.dtype else self._widened(grad, proxy.dtype)
        return proxy

    def _refuse_whole(self, home: Tensor, grad: Tensor) -> None:
        """A plain gradient that the loop has set, where a rank has rows."""
        if grad.shape != Faces.local(home).shape:
            raise StateError(
                f"`{self.params[id(home)].name}`.grad is a plain tensor of shape {tuple(grad.shape)}, and a "
                "gradient here has the rows of its rank: set p.grad = torch.distributed.tensor."
                "distribute_tensor(whole, p.device_mesh, p.placements), on all ranks, or write into the "
                "p.grad that backward leaves (copy_, mul_)."
            )

    def _widened(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        wide = grad.to(dtype)
        return wide.mul_(self.shrinks) if grad.dtype == torch.float16 and self.shrinks != 1.0 else wide

    def _divide(self) -> None:
        """What a step made of joined masters, in two halves again."""
        for key, master in self._joined.items():
            master.write(0, self._proxies[key].data.view(-1))
        self._joined.clear()

    def _forget(self, homes: list[Tensor]) -> None:
        """Let go of gradients and masters that were made for a step."""
        for home in homes:
            proxy = self._proxies.get(id(home), home)
            if proxy is not home and id(home) not in self._shown:
                proxy.grad = None
            if id(home) in self._split:
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
                size = Faces.local(p).numel() * (4 if id(p) in self._split else p.element_size())
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
        """Let the optimizer see proxies and their state; put the homes back whatever happens."""
        optimizer = self.optimizer
        seen_state, seen_params = optimizer.state, [group["params"] for group in optimizer.param_groups]
        linked_to, dicts = self._linked
        states = list(seen_state.values())
        if linked_to is not seen_state or len(dicts) != len(states) or not all(map(is_, states, dicts)):
            self._inner.clear()
            self._inner.update(
                {self._proxies.get(id(home), home): state for home, state in seen_state.items()}
            )
        optimizer.state = self._inner
        try:
            yield optimizer.param_groups
        finally:
            for group, params in zip(optimizer.param_groups, seen_params, strict=True):
                group["params"] = params
            optimizer.state = seen_state
            if len(seen_state) != len(self._inner):
                home_of = {id(self._proxies[key]): p.home for key, p in self.params.items()}
                for proxy, state in self._inner.items():
                    seen_state.setdefault(home_of.get(id(proxy), proxy), state)
            self._linked = (seen_state, list(seen_state.values()))

    def state_bytes(self) -> int:
        tensors = [
            v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)
        ]
        return sum(t.nbytes for t in tensors if t.dim() > 0)
