"""What a training step keeps and computes, found by running it once on fake tensors: shapes flow, nothing
is allocated.

A *segment* is a stretch of forward inside one unit, or in the root between units. For each: the bytes that
autograd saves in it, the most that lives at one time beyond what was saved before (forward) or is still
saved (backward), and its operations.

Units that are alike (`likeness.py`, and the same shapes of inputs) are traced once; the others repeat the
figures. So a trace costs what one block costs, whatever the depth.

Exact for the tensors that operations return. Not seen: workspace inside a kernel (cuBLAS, cuDNN), and what
the allocator rounds up.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zeroshard.config import Precision
from zeroshard.count.timeline import Segment
from zeroshard.errors import PlanError
from zeroshard.life.units import standing, unit_of

from .fakes import Fakes, unread_masks
from .fused import as_on_gpu
from .likeness import mode, natures, sight
from .meter import Meter
from .stretch import Situation, Stand, Stretch, Twin, reached
from .widening import Widening

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Example inputs of the model's forward: only their shapes and dtypes matter."""

    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, batch: Any) -> Inputs:
        """A tensor, a tuple or list of positional arguments, or a dict of keyword arguments."""
        if isinstance(batch, dict):
            return cls((), tuple(batch.items()))
        return cls(tuple(batch) if isinstance(batch, tuple | list) else (batch,))

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in tree_flatten((self.args, dict(self.kwargs)))[0] if isinstance(x, Tensor)]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


class Tracer:
    """One fake step of one model. `names`: its units; `recompute`: those that are recomputed; `compute`:
    dtype of each weight, as `precision` makes it; `gpu`: with the kernels of a GPU; `fakes`: of an earlier
    trace."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        recompute: Callable[[str], bool],
        compute: dict[str, torch.dtype],
        gpu: bool = False,
        precision: Precision | None = None,
        fakes: Fakes | None = None,
    ) -> None:
        self._fakes = fakes if fakes is not None else Fakes()
        self._given = (model, names, recompute, compute, gpu, precision, self._fakes)
        self.model, self.names, self.recompute, self.compute = model, set(names), recompute, compute
        self._inputs = getattr(torch, precision.compute) if precision is not None else None
        self._widening = Widening(precision)
        self._kernels = as_on_gpu if gpu else nullcontext
        self._modules = {name: module for name, module in model.named_modules() if name in self.names}
        self._natures = natures(self._modules)
        self._outer = {one for one in names if any(other.startswith(f"{one}.") for other in names)}
        self._stretches: list[Stretch] = []
        self._backward: Stretch | None = None
        self._waiting: dict[str, dict[str, Tensor]] = {}  # by unit: leaves that have no gradient yet
        self._leaves: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}  # of leaves, by id
        self._owner: dict[int, str] = {}  # the unit of a weight, by its memory
        self._inside: list[str] = []  # units that forward is in
        self._entries: list[Stretch] = []  # those in which forward entered a unit
        self._situations: list[Situation] = []  # of those, in an earlier trace
        self._arrived: list[Tensor] = []  # leaves that hold a gradient
        self._grad_bytes = 0  # of those
        self._saved: dict[int, Any] = {}
        self._twins: dict[Any, Twin] = {}
        self._meter = Meter(self._rose, self._worked, gpu)

    def run(self, inputs: Inputs, loss: Loss | None) -> list[Segment]:
        """Forward, loss and backward; the segments in the order of forward."""
        self._trace(inputs, loss)
        if any(stretch.is_elsewhere for stretch in self._entries):
            again = type(self)(*self._given)
            again._situations = [stretch.situation for stretch in self._entries]
            again._trace(inputs, loss)
            return again._segments()
        return self._segments()

    def _trace(self, inputs: Inputs, loss: Loss | None) -> None:
        with _quiet(), unread_masks(), self._fakes.mode, torch.random.fork_rng(devices=[]):
            weights = self._weights()
            args, kwargs = self._fake(inputs)
            hooks = saved_tensors_hooks(self._pack, self._unpack)
            with self._watched(), self._meter, hooks, self._kernels():
                step = _Step(self.model, partial(self._step, inputs, loss))
                functional_call(step, weights, args, kwargs, tie_weights=False)

    def _segments(self) -> list[Segment]:
        sizes = {name: leaf.nbytes for name, leaf in self._leaves.items()}
        begun = set[str]()
        for stretch in reversed(self._stretches):
            stretch.begun = begun.intersection(stretch.reaches)
            begun.update(stretch.reaches)
        ends = (self._stretches[0], self._stretches[-1])
        return [s.done(sizes) for s in self._stretches if s.unit or s.saved or s.flops or s in ends]

    def _step(self, inputs: Inputs, loss: Loss | None, *args: Any, **kwargs: Any) -> None:
        self._begin("")
        output = self.model(*args, **kwargs)
        result = loss(output) if loss is not None else default_loss(output, inputs)
        del output
        self._backward = self._stretches[-1]
        self._backward.levels.append(self._level())
        result.backward()
        self._look(everywhere=True)

    # ------------------------------------------------------------------ fakes

    def _weights(self) -> dict[str, Tensor]:
        """Parameters in compute dtype and buffers as they are, once for every place where they stand (see
        [Note: once a place]). They are not counted: the memory model has them."""
        made, places = self._fakes.of(self.model, self.compute), standing(self.model)
        units: dict[str, set[str]] = {}
        for name, first in places.items():
            units.setdefault(first, set()).add(unit_of(name, self.names))
        for name, _ in self.model.named_parameters():
            unit = units[name].pop() if len(units[name]) == 1 else ""  # the root's, of several
            self._waiting.setdefault(unit, {})[name] = made[name]
            self._leaves[name], self._names[id(made[name])] = made[name], name
            self._owner[made[name].untyped_storage()._cdata] = unit
        for fake in made.values():
            self._leave_out(fake)
        return {f"model.{name}": made[first] for name, first in places.items()}

    def _fake(self, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def one(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = self._inputs if self._inputs is not None and value.is_floating_point() else value.dtype
            fake = torch.zeros(value.shape, dtype=dtype, device="cpu")
            self._leave_out(fake)
            return fake

        return tree_map(one, inputs.args), tree_map(one, dict(inputs.kwargs))

    def _leave_out(self, fake: Tensor) -> None:
        self._saved[fake.untyped_storage()._cdata] = fake
        self._meter.ignore(fake)

    # ------------------------------------------------------------------ units

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Each unit's `forward` replaced by one that tells where forward is. Kept modules compute as in a
        run."""
        kept = list(self._widening.modules(self.model))
        before = [(module, vars(module).get("forward")) for module in {*self._modules.values(), *kept}]
        for module in kept:
            module.forward = self._widening.forward(module.forward)
        for name, module in self._modules.items():
            module.forward = partial(self._enter, name, module, module.forward)
        try:
            yield
        finally:
            for module, own in before:
                del module.forward
                if own is not None:
                    module.forward = own

    def _enter(
        self, name: str, module: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._backward is not None:
            return self._again(name, plain, args, kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        key = (
            self._natures[name],
            mode(),
            str(tree),
            self.recompute(name),
            tuple((sight(x), self._is_saved(x)) for x in leaves),
            tuple(sight(p) for p in module.parameters()),
            self._situations[len(self._entries)] if len(self._entries) < len(self._situations) else None,
        )
        outer = self._stretches[-1].unit
        self._inside.append(name)
        self._begin(name, len(self._inside))
        self._entries.append(self._stretches[-1])
        if key in self._twins and name not in self._outer:
            self._stretches[-1].like = self._twins[key]
            output = self._stand(self._stretches[-1], leaves)
        else:
            before = self._states(leaves)
            output = self._compute(name, plain, args, kwargs)
            self._twins[key] = self._first(module, leaves, before, output)
        self._inside.pop()
        self._begin(outer)
        return output

    def _states(self, leaves: list[Any]) -> list[tuple[int, bool]]:
        """How often inputs were written, and whether they are saved."""
        return [(x._version, self._is_saved(x)) if isinstance(x, Tensor) else (0, True) for x in leaves]

    def _first(
        self, module: nn.Module, leaves: list[Any], before: list[tuple[int, bool]], output: Any
    ) -> Twin:
        """What units that are like this one, which has computed, will repeat. `before`: the `_states` of its
        inputs when it began."""
        stretch, (flat, tree) = self._stretches[-1], tree_flatten(output)
        pairs = list(zip(before, self._states(leaves), strict=True))
        stretch.spoils = any(one[0] != two[0] for one, two in pairs)
        self._hook(flat)
        weights, found = list(module.parameters()), reached(flat, leaves)
        stretch.reaches = [self._names[id(w)] for w in weights if id(w) in found]
        return Twin(
            stretch,
            outputs=[(*sight(x), self._is_saved(x)) for x in flat],
            tree=tree,
            saves=[n for n, (one, two) in enumerate(pairs) if two[1] and not one[1]],
            weights=[self._names[id(w)] for w in weights],
            reaches=[n for n, w in enumerate(weights) if id(w) in found],
        )

    def _compute(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tree_flatten((args, kwargs))[0] + list(self._modules[name].parameters())
        if not self.recompute(name) or not any(getattr(x, "requires_grad", False) for x in tensors):
            return plain(*args, **kwargs)  # without a backward, a checkpoint keeps nothing either
        return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _hook(self, outputs: list[Any]) -> None:
        """Backward comes to a unit with the gradient of its output, also where a checkpoint of the model's
        own hides what the unit saves."""
        arrive = partial(self._arrive, self._stretches[-1])
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: arrive())

    def _again(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit's forward in backward: of a unit inside one that is recomputed, or by a checkpoint of the
        model's own. It saves what it saved in forward."""
        assert self._backward is not None
        here = self._stretches.index(self._backward)
        own = [index for index, stretch in enumerate(self._stretches) if stretch.unit == name]
        stretch = self._stretches[max((index for index in own if index <= here), default=own[-1])]
        self._arrive(stretch)
        if stretch.like is None:
            return self._compute(name, plain, args, kwargs)
        return self._stand(stretch, tree_flatten((args, kwargs))[0])

    def _stand(self, stretch: Stretch, leaves: list[Any]) -> Any:
        """Outputs as the first such unit had, without computing them; see [Note: stand-ins]."""
        twin, weights = stretch.like, list(self._modules[stretch.unit].parameters())
        assert twin is not None
        stretch.weights = [self._names[id(weight)] for weight in weights]
        stretch.reaches = [stretch.weights[number] for number in twin.reaches]
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if torch.is_grad_enabled():
            tensors += [weights[number] for number in twin.reaches]
        wanted = [o for o in twin.outputs if o[0] == "tensor"]
        standing = Stand.apply(wanted, partial(self._arrive, stretch), *tensors)  # type: ignore[no-untyped-call]
        kept = [leaves[number] for number in twin.saves]
        # What the first one saved, what comes next shall not count again. It is held like that: a stand-in
        # that comes next does not save it, and it would be gone while it counts as there.
        kept += [tensor for tensor, output in zip(standing, wanted, strict=True) if output[-1]]
        for tensor in kept if self._backward is None else ():
            if not self._is_saved(tensor):
                stretch.standing += self._save(tensor)
                stretch.held.append(tensor.detach())
        made = iter(standing)
        return tree_unflatten([next(made) if o[0] == "tensor" else o[1] for o in twin.outputs], twin.tree)

    # ------------------------------------------------------------------ what is counted

    def _begin(self, unit: str, entered: int = 0) -> None:
        self._stretches.append(Stretch(unit, entered))
        self._rose(self._meter.now)
        self._stretches[-1].start = self._meter.now - self._below(self._stretches[-1])

    def _rose(self, now: int) -> None:
        if self._backward is None:
            stretch = self._stretches[-1]
            stretch.forward = max(stretch.forward, now - self._below(stretch) + stretch.saved)
            return
        self._look()
        self._backward.levels[-1] = max(self._backward.levels[-1], self._level())

    def _look(self, everywhere: bool = False) -> None:
        """Gradients that have arrived since the last look. Those on leaves are the memory model's account.
        `everywhere`: also those of weights that were used outside of their unit."""
        stretch = self._backward
        assert stretch is not None
        for unit in dict.fromkeys((stretch.unit, "", *(self._waiting if everywhere else ()))):
            waiting = self._waiting.get(unit, {})
            for name in [name for name, leaf in waiting.items() if leaf.grad is not None]:
                leaf = waiting.pop(name)
                assert leaf.grad is not None
                self._arrived.append(leaf)
                self._grad_bytes += leaf.grad.untyped_storage().nbytes()
                stretch.order.append(name)
                stretch.levels.append(self._level())

    def _level(self) -> int:
        assert self._backward is not None
        return self._meter.now - self._grad_bytes - self._below(self._backward)

    def _below(self, stretch: Stretch) -> int:
        """Bytes really saved up to and including a stretch; repeated ones saved nothing."""
        total = 0
        for other in self._stretches:
            total += other.real
            if other is stretch:
                break
        return total

    def _worked(self, flops: int, moved: int) -> None:
        if self._backward is None:
            stretch = self._stretches[-1]
            stretch.flops += flops
            stretch.moved += moved
            stretch.kernels += bool(flops or moved)
        else:
            self._backward.back += flops
            self._backward.moved_back += moved
            self._backward.kernels_back += bool(flops or moved)

    def _pack(self, tensor: Tensor) -> Any:
        stretch = self._backward or self._stretches[-1]
        owner = self._owner.get(tensor.untyped_storage()._cdata)
        if owner is not None and owner not in stretch.needs[-1:]:
            stretch.needs.append(owner)
        if self._backward is None and not self._is_saved(tensor):
            stretch.saved += self._save(tensor)
        return stretch, tensor

    def _is_saved(self, value: Any) -> bool:
        """Whether autograd keeps this memory already (or the model does: weights and inputs)."""
        return isinstance(value, Tensor) and value.untyped_storage()._cdata in self._saved

    def _save(self, tensor: Tensor) -> int:
        """From now on it is kept; its bytes."""
        storage = tensor.untyped_storage()
        self._saved[storage._cdata] = None
        weakref.finalize(storage, self._saved.pop, storage._cdata, None)
        return storage.nbytes()

    def _unpack(self, packed: Any) -> Tensor:
        stretch, tensor = packed
        if self._backward is not None:
            self._arrive(stretch)
        result: Tensor = tensor
        return result

    def _arrive(self, stretch: Stretch) -> None:
        """Backward has come to a segment: the gradients of the one before are in their buckets by now."""
        at = self._backward
        assert at is not None
        if stretch is not at:
            self._look()
            for leaf in self._arrived:
                leaf.grad = None
            self._arrived.clear()
            self._grad_bytes = 0
            first, last = (self._stretches.index(s) for s in (stretch, at))
            for left in self._stretches[first + 1 : last + 1]:
                left.held.clear()
            for passed in (*reversed(self._stretches[first + 1 : last]), stretch):
                self._backward = passed
                if not passed.levels:
                    passed.base = self._level()
                    passed.levels.append(passed.base)
            at.after = self._level()


@contextmanager
def _quiet() -> Iterator[None]:
    """Fake tensors log a traceback of every error before they raise it; the error says enough."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _Step(nn.Module):
    """A whole step as a module, so that the fake weights stand in the model during backward too:
    recomputation needs them."""

    def __init__(self, model: nn.Module, step: Callable[..., None]) -> None:
        super().__init__()
        self.model, self._step = model, step

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self._step(*args, **kwargs)


def default_loss(output: Any, inputs: Inputs) -> Tensor:
    """The model's own scalar or `.loss`; for logits over tokens a cross-entropy; else a mean of squares."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, dict):
        found = output.get("loss")
    if isinstance(found, Tensor):
        return found
    tensors = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.requires_grad]
    if not tensors:
        raise PlanError(
            "the model's output has no gradient, so no backward can be traced. Pass loss=, a function of it."
        )
    first = tensors[0]
    if first.dim() == 0:
        return first
    tokens = next((t for t in inputs.tensors if t.dtype == torch.int64), None)
    if tokens is not None and first.shape[:-1] == tokens.shape:
        targets = torch.zeros(tokens.numel(), dtype=torch.int64)
        return F.cross_entropy(first.flatten(0, -2).float(), targets)
    return first.float().square().mean()
