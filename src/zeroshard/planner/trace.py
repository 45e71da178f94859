"""Traces a training step on fake tensors: what it keeps and computes. Nothing is allocated.

A *segment* is a part of forward inside one unit, or in the root between units. For each: the bytes that
autograd saves in it, the most that lives at one time beyond what was saved before (forward) or is still
saved (backward), and its operations.

Units that are alike (`signatures.py`, and the same shapes of inputs) are traced once; the others repeat the
figures. So a trace costs what one block costs, whatever the depth. A plan looks at steps with these or those
units recomputed, in each precision.

Exact for the tensors that operations return. Not seen: workspace inside a kernel (cuBLAS, cuDNN), and what
the allocator rounds up.

[Note: stand-ins] What a repeated unit computes is taken over from the first of its kind; what lives around
it is its own. So a stand-in keeps what the first one kept of its inputs and outputs, gives its weights
gradients, which autograd adds up where weights are used several times, and its figures are those of the first
one, moved by how much more or less lived when forward and backward came to it: outputs that the root keeps
for later, sums of gradients that are not complete."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zeroshard.errors import PlanError
from zeroshard.layout.memory import MemoryModel, StepSegment
from zeroshard.options import Options, Precision
from zeroshard.params.units import matching, standing, unit_of
from zeroshard.params.widening import Widening

from .operations import FakeTensors, MemoryMeter, Positions, as_on_gpu, unread_masks
from .planning_problem import PlanningProblem
from .signatures import ExampleInputs, mode, natures, sight

Loss = Callable[[Any], Tensor]


# What lives beyond what is saved when forward and backward come to a unit, and when backward has left it.
Situation = tuple[int, int, int]


@dataclass(eq=False)
class SegmentTemplate:
    """The first of several units that are alike.

    - `outputs`: how each looks, and whether it is saved; `tree`: theirs.
    - `saves`: the numbers of the inputs that it was the first to save.
    - `reaches`: the numbers of its weights that backward comes to through its outputs. `weights`: the names
      of all, by number.
    """

    segment: RecordedSegment
    outputs: list[tuple[Any, ...]]
    tree: TreeSpec
    saves: list[int]
    weights: list[str]
    reaches: list[int]


@dataclass
class OperationSums:
    """What operations add up to: of a segment's forward, or of its backward."""

    flops: int = 0
    moved: int = 0
    kernels: int = 0

    def add(self, flops: int, moved: int) -> None:
        """One operation more."""
        self.flops, self.moved = self.flops + flops, self.moved + moved
        self.kernels += bool(flops or moved)


@dataclass
class GradientArrivals:
    """Weights whose gradients arrived in the backward of a segment, and the most that lived before the first,
    after it, … `reaches`: those that backward comes to; `begun`: of those, whose sums had begun when it came.
    """

    order: list[str] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    reaches: list[str] = field(default_factory=list)
    begun: set[str] = field(default_factory=set)


@dataclass
class RepeatedUnit:
    """What a repeated unit has of its own, that stands for another: its weights, as in its twin, and the
    tensors that it really keeps, as long as backward would: inputs and outputs that the first one saved."""

    first: SegmentTemplate
    weights: list[str] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class RecordedSegment:
    """A segment that is being recorded. `entered`: as of a `StepSegment`."""

    unit: str
    entered: int
    number: int  # in the order of forward
    before: int  # bytes really saved by those before it
    situation: Situation
    most: int  # that lived in its forward
    repeats: RepeatedUnit | None = None
    saved: int = 0
    kept: int = 0  # that its tensors in this trace really keep for backward: none of a repeated one is saved
    forward: OperationSums = field(default_factory=OperationSums)
    backward: OperationSums = field(default_factory=OperationSums)
    spoils: bool = False
    needs: list[str] = field(default_factory=list)
    arrivals: GradientArrivals = field(default_factory=GradientArrivals)

    @property
    def below(self) -> int:
        """Bytes really saved up to and including it; repeated ones saved nothing."""
        return self.before + self.kept

    @property
    def is_elsewhere(self) -> bool:
        """Whether it stands for a unit around which other things lived than around the first one."""
        return self.repeats is not None and self.situation != self.repeats.first.segment.situation

    def rise(self, now: int) -> None:
        """So much lives in its forward."""
        self.most = max(self.most, now - self.below + self.saved)

    def save(self, nbytes: int) -> None:
        """Autograd keeps so much more of it; of what stands for another, of what that one saved."""
        self.kept += nbytes
        self.saved += nbytes if self.repeats is None else 0

    def need(self, unit: str) -> None:
        """Backward wants weights of that unit."""
        if unit not in self.needs[-1:]:
            self.needs.append(unit)

    def hold(self, tensor: Tensor, nbytes: int) -> None:
        """What stands for another keeps what that one saved: one tensor more."""
        assert self.repeats is not None
        self.save(nbytes)
        self.repeats.held.append(tensor.detach())

    def let_go(self) -> None:
        """Backward has passed it."""
        if self.repeats is not None:
            self.repeats.held.clear()

    def return_to(self, level: int) -> None:
        """Backward comes to it, and so much lives beyond what is saved."""
        if not self.arrivals.levels:
            start, _, after = self.situation
            self.situation = start, level, after
            self.arrivals.levels.append(level)

    def leave(self, level: int) -> None:
        """Backward has left it."""
        self.situation = (*self.situation[:2], level)

    def computed(self, reaches: list[str], spoils: bool) -> None:
        """The first of its kind has computed: the weights that backward comes to through its outputs, and
        whether it has written what it was given."""
        self.arrivals.reaches.extend(reaches)
        self.spoils = spoils

    def stand_for(self, first: SegmentTemplate, weights: list[str]) -> None:
        """It takes the place of a unit that is like an earlier one, with weights of its own."""
        held = self.repeats.held if self.repeats is not None else []
        self.repeats = RepeatedUnit(first, weights, held)
        self.arrivals.reaches[:] = [weights[number] for number in first.reaches]

    def done(self, sizes: dict[str, int]) -> StepSegment:
        """As a record. `sizes`: bytes of every weight's gradient."""
        source, (order, levels) = self, (self.arrivals.order, self.arrivals.levels)
        if self.repeats is not None:
            source, (order, levels) = self.repeats.first.segment, self._moved(self.repeats, sizes)
        return StepSegment(
            unit=self.unit,
            saved=source.saved,
            forward=source.most + self.situation[0] - source.situation[0],
            backward=max(levels, default=0),
            flops=source.forward.flops,
            back=source.backward.flops,
            moved=source.forward.moved,
            moved_back=source.backward.moved,
            kernels=source.forward.kernels,
            kernels_back=source.backward.kernels,
            order=tuple(order),
            levels=tuple(levels),
            spoils=source.spoils,
            entered=self.entered,
            needs=tuple(self.unit if name == source.unit else name for name in source.needs),
        )

    def _moved(self, repeats: RepeatedUnit, sizes: dict[str, int]) -> tuple[list[str], list[int]]:
        """Arrivals and levels of the first one, with those gradients that arrive here: of weights that are
        used again before, the sum goes on, and is held; of others, the last part may come here."""
        source, mine = repeats.first.segment, self.arrivals
        names = dict(zip(repeats.first.weights, repeats.weights, strict=True))
        more = self.situation[1] - source.situation[1]
        order, levels = list[str](), [level + more for level in source.arrivals.levels[:1]]
        for name, level in zip(source.arrivals.order, source.arrivals.levels[1:], strict=True):
            own = names.get(name, "")
            # The first one's sum has gone to its unsharded parameter, with what there was of it when
            # backward came.
            more += sizes[name] * ((name in source.arrivals.begun) - (own in mine.begun))
            if own in mine.order or own not in mine.reaches:
                order.append(own)
                levels.append(level + more)
            else:
                more += sizes[name]
                levels[-1] = max(levels[-1], level + more)
        for name in mine.order:
            if name not in order:
                order.append(name)
                levels.append(levels[-1] - sizes[name])
        return order, levels


class TracedWeights:
    """The fake weights of one trace, by name, unit and memory, and which of them have a gradient."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}  # by id
        self._by_memory: dict[int, tuple[str, str]] = {}  # the unit, and the name
        self._waiting: dict[str, dict[str, Tensor]] = {}  # by unit: those that have no gradient yet
        self._arrived: list[Tensor] = []  # those that hold a gradient
        self.grad_bytes = 0  # of those

    def add(self, name: str, fake: Tensor, unit: str) -> None:
        """One weight more. Of several on one memory the first gives the name, the last the unit."""
        memory = fake.untyped_storage()._cdata
        first = self._by_memory.get(memory, ("", name))[1]
        self.by_name[name], self.names[id(fake)], self._by_memory[memory] = fake, name, (unit, first)
        self._waiting.setdefault(unit, {})[name] = fake

    def by_memory(self, tensor: Tensor) -> tuple[str, str] | None:
        """The unit and the name of the weight on whose memory a tensor lies, if on any."""
        return self._by_memory.get(tensor.untyped_storage()._cdata)

    def newly_arrived(self, unit: str, everywhere: bool) -> Iterator[str]:
        """Names of the weights whose gradients have come since the last look: of a unit and the root, or
        `everywhere`."""
        for place in dict.fromkeys((unit, "", *(self._waiting if everywhere else ()))):
            waiting = self._waiting.get(place, {})
            for name in [name for name, fake in waiting.items() if fake.grad is not None]:
                fake = waiting.pop(name)
                assert fake.grad is not None
                self._arrived.append(fake)
                self.grad_bytes += fake.grad.untyped_storage().nbytes()
                yield name

    def drop_grads(self) -> None:
        """Those that have arrived are in their buckets."""
        for fake in self._arrived:
            fake.grad = None
        self._arrived.clear()
        self.grad_bytes = 0


class StandIn(torch.autograd.Function):
    """Stands for a unit that is like an earlier one; see [Note: stand-ins]."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Any], arrive: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.arrive, ctx.shapes = arrive, [(t.shape, t.dtype, t.requires_grad) for t in tensors]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))  # so that a checkpoint around it keeps what it would keep
        return tuple(torch.empty(shape, dtype=dtype) for _, shape, dtype, *_ in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _ = ctx.saved_tensors
        ctx.arrive()
        return (
            None,
            None,
            *(torch.empty(shape, dtype=dtype) if needed else None for shape, dtype, needed in ctx.shapes),
        )


def reached(outputs: list[Any], inputs: list[Any]) -> set[int]:
    """The ids of the unsharded parameters that a backward comes to from these outputs, before it comes to
    the inputs."""
    ends = {x.grad_fn for x in inputs if isinstance(x, Tensor)}
    left = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen, found = set(left), set[int]()
    while left:
        node = left.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        for after, _ in node.next_functions if node not in ends else ():
            if after is not None and after not in seen:
                seen.add(after)
                left.append(after)
    return found


@dataclass(frozen=True)
class TraceRequest:
    """What is traced: `names`: the model's units; `recompute`: those that are recomputed; `compute`: dtype of
    each weight, as `precision` makes it; `gpu`: with the kernels of a GPU; `fakes`: of an earlier trace."""

    model: nn.Module
    names: set[str]
    recompute: Callable[[str], bool]
    compute: dict[str, torch.dtype]
    gpu: bool
    precision: Precision | None
    fakes: FakeTensors


class Tracer:
    """One fake step of one model; the arguments are those of a `TraceRequest`."""

    def __init__(
        self,
        model: nn.Module,
        names: Collection[str],
        recompute: Callable[[str], bool],
        compute: dict[str, torch.dtype],
        gpu: bool = False,
        precision: Precision | None = None,
        fakes: FakeTensors | None = None,
        situations: Sequence[Situation] = (),
    ) -> None:
        fakes = fakes if fakes is not None else FakeTensors()
        self._asked = TraceRequest(model, set(names), recompute, compute, gpu, precision, fakes)
        self._widening = Widening(precision)
        self._modules = {name: module for name, module in model.named_modules() if name in self._asked.names}
        self._natures = natures(self._modules)
        self._outer = {one for one in names if any(other.startswith(f"{one}.") for other in names)}
        self._recorded: list[RecordedSegment] = []
        self._backward: RecordedSegment | None = None
        self._weights = TracedWeights()
        self._inside: list[str] = []  # units that forward is in
        self._entries: list[RecordedSegment] = []  # those in which forward entered a unit
        self._numbers: dict[str, list[int]] = {}  # by unit: of all that are inside it
        self._situations = situations  # of those, in an earlier trace
        self._saved: dict[int, Any] = {}
        self._templates: dict[Any, SegmentTemplate] = {}
        positions = Positions(lambda tensor: (self._weights.by_memory(tensor) or ("", ""))[1])
        self._meter = MemoryMeter(self._rose, self._worked, gpu, positions)

    def run(self, inputs: ExampleInputs, loss: Loss | None) -> list[StepSegment]:
        """Forward, loss and backward; the segments in the order of forward."""
        self._trace(inputs, loss)
        if any(segment.is_elsewhere for segment in self._entries):
            situations = [segment.situation for segment in self._entries]
            again = type(self)(**vars(self._asked), situations=situations)
            again._trace(inputs, loss)
            return again._steps()
        return self._steps()

    def _trace(self, inputs: ExampleInputs, loss: Loss | None) -> None:
        packs = "position_ids" in dict(inputs.kwargs)
        with _quiet(), unread_masks(packs), self._asked.fakes.mode, torch.random.fork_rng(devices=[]):
            weights = self._fake_weights()
            args, kwargs = self._fake(inputs)
            hooks = saved_tensors_hooks(self._pack, self._unpack)
            kernels = as_on_gpu() if self._asked.gpu else nullcontext()
            with self._watched(), self._meter, hooks, kernels:
                step = _TracedStep(self._asked.model, partial(self._step, inputs, loss))
                functional_call(step, weights, args, kwargs, tie_weights=False)

    def _steps(self) -> list[StepSegment]:
        sizes = {name: fake.nbytes for name, fake in self._weights.by_name.items()}
        begun = set[str]()  # weights whose sums have begun when backward comes to a segment
        for segment in reversed(self._recorded):
            arrivals = segment.arrivals
            arrivals.begun.update(begun.intersection(arrivals.reaches))
            begun.update(arrivals.reaches)
        ends = (self._recorded[0], self._recorded[-1])
        return [s.done(sizes) for s in self._recorded if s.unit or s.saved or s.forward.flops or s in ends]

    def _step(self, inputs: ExampleInputs, loss: Loss | None, *args: Any, **kwargs: Any) -> None:
        self._begin("")
        output = self._asked.model(*args, **kwargs)
        result = loss(output) if loss is not None else default_loss(output, inputs)
        del output
        self._backward = self._recorded[-1]
        self._backward.arrivals.levels.append(self._level())
        result.backward()
        self._look(everywhere=True)

    # ------------------------------------------------------------------ fakes

    def _fake_weights(self) -> dict[str, Tensor]:
        """Parameters in compute dtype and buffers as they are, once for every place where they stand (see
        [Note: once a place]). They are not counted: the memory model has them."""
        model, names = self._asked.model, self._asked.names
        made, places = self._asked.fakes.of(model, self._asked.compute), standing(model)
        units: dict[str, set[str]] = {}
        for name, first in places.items():
            units.setdefault(first, set()).add(unit_of(name, names))
        for name, _ in model.named_parameters():
            unit = units[name].pop() if len(units[name]) == 1 else ""  # the root's, of several
            self._weights.add(name, made[name], unit)
        for fake in made.values():
            self._leave_out(fake)
        return {f"model.{name}": made[first] for name, first in places.items()}

    def _fake(self, inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs in the dtypes in which the run will have them."""
        precision = self._asked.precision
        compute = getattr(torch, precision.compute) if precision is not None else None

        def one(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = compute if compute is not None and value.is_floating_point() else value.dtype
            fake = torch.zeros(value.shape, dtype=dtype, device="cpu")
            self._leave_out(fake)
            return fake

        return tree_map(one, inputs.args), tree_map(one, dict(inputs.kwargs))

    def _leave_out(self, fake: Tensor) -> None:
        self._saved[fake.untyped_storage()._cdata] = fake
        self._meter.alive.ignore(fake.untyped_storage())

    # ------------------------------------------------------------------ units

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Each unit's `forward` replaced by one that tells where forward is. Kept modules compute as in a
        run."""
        kept = list(self._widening.modules(self._asked.model))
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
        unsharded_params, tree = tree_flatten((args, kwargs))
        key = (
            self._natures[name],
            mode(),
            str(tree),
            self._asked.recompute(name),
            tuple((sight(x), self._is_saved(x)) for x in unsharded_params),
            tuple(sight(p) for p in module.parameters()),
            self._situations[len(self._entries)] if len(self._entries) < len(self._situations) else None,
        )
        outer = self._recorded[-1].unit
        self._inside.append(name)
        self._begin(name, len(self._inside))
        self._entries.append(self._recorded[-1])
        if key in self._templates and name not in self._outer:
            output = self._stand(self._recorded[-1], self._templates[key], unsharded_params)
        else:
            before = self._states(unsharded_params)
            output = self._compute(name, plain, args, kwargs)
            self._templates[key] = self._first(module, unsharded_params, before, output)
        self._inside.pop()
        self._begin(outer)
        return output

    def _states(self, unsharded_params: list[Any]) -> list[tuple[int, bool]]:
        """How often inputs were written, and whether they are saved."""
        return [
            (x._version, self._is_saved(x)) if isinstance(x, Tensor) else (0, True) for x in unsharded_params
        ]

    def _first(
        self, module: nn.Module, unsharded_params: list[Any], before: list[tuple[int, bool]], output: Any
    ) -> SegmentTemplate:
        """What units that are like this one, which has computed, will repeat. `before`: the `_states` of its
        inputs when it began."""
        segment, (flat, tree) = self._recorded[-1], tree_flatten(output)
        pairs = list(zip(before, self._states(unsharded_params), strict=True))
        self._hook(flat)
        weights, found = list(module.parameters()), reached(flat, unsharded_params)
        names = [self._weights.names[id(w)] for w in weights]
        reaches = [n for n, w in enumerate(weights) if id(w) in found]
        spoils = any(one[0] != two[0] for one, two in pairs)
        segment.computed([names[number] for number in reaches], spoils)
        return SegmentTemplate(
            segment,
            outputs=[(*sight(x), self._is_saved(x)) for x in flat],
            tree=tree,
            saves=[n for n, (one, two) in enumerate(pairs) if two[1] and not one[1]],
            weights=names,
            reaches=reaches,
        )

    def _compute(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tree_flatten((args, kwargs))[0] + list(self._modules[name].parameters())
        if not self._asked.recompute(name) or not any(getattr(x, "requires_grad", False) for x in tensors):
            return plain(*args, **kwargs)  # without a backward, a checkpoint keeps nothing either
        return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _hook(self, outputs: list[Any]) -> None:
        """Backward comes to a unit with the gradient of its output, also where a checkpoint of the model's
        own hides what the unit saves."""
        arrive = partial(self._arrive, self._recorded[-1])
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: arrive())

    def _again(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit's forward in backward: of a unit inside one that is recomputed, or by a checkpoint of the
        model's own. It saves what it saved in forward."""
        assert self._backward is not None
        here, own = self._backward.number, self._numbers[name]
        segment = self._recorded[max((index for index in own if index <= here), default=own[-1])]
        self._arrive(segment)
        if segment.repeats is None:
            return self._compute(name, plain, args, kwargs)
        return self._stand(segment, segment.repeats.first, tree_flatten((args, kwargs))[0])

    def _stand(self, segment: RecordedSegment, template: SegmentTemplate, unsharded_params: list[Any]) -> Any:
        """Outputs as the first such unit had, without computing them; see [Note: stand-ins]."""
        weights = list(self._modules[segment.unit].parameters())
        segment.stand_for(template, [self._weights.names[id(weight)] for weight in weights])
        tensors = [x for x in unsharded_params if isinstance(x, Tensor)]
        if torch.is_grad_enabled():
            tensors += [weights[number] for number in template.reaches]
        wanted = [o for o in template.outputs if o[0] == "tensor"]
        standing = StandIn.apply(wanted, partial(self._arrive, segment), *tensors)  # type: ignore[no-untyped-call]
        kept = [unsharded_params[number] for number in template.saves]
        # What the first one saved, what comes next shall not count again. It is held like that: a stand-in
        # that comes next does not save it, and it would be gone while it counts as there.
        kept += [tensor for tensor, output in zip(standing, wanted, strict=True) if output[-1]]
        for tensor in kept if self._backward is None else ():
            if not self._is_saved(tensor):
                segment.hold(tensor, self._save(tensor))
        made = iter(standing)
        return tree_unflatten(
            [next(made) if o[0] == "tensor" else o[1] for o in template.outputs], template.tree
        )

    # ------------------------------------------------------------------ what is counted

    def _begin(self, unit: str, entered: int = 0) -> None:
        number, before = len(self._recorded), self._recorded[-1].below if self._recorded else 0
        start = self._meter.alive.bytes - before
        self._recorded.append(RecordedSegment(unit, entered, number, before, (start, 0, 0), max(start, 0)))
        self._numbers.setdefault(unit, []).append(number)

    def _rose(self, now: int) -> None:
        if self._backward is None:
            self._recorded[-1].rise(now)
            return
        self._look()
        levels = self._backward.arrivals.levels
        levels[-1] = max(levels[-1], self._level())

    def _look(self, everywhere: bool = False) -> None:
        """Gradients that have arrived since the last look. Those on unsharded parameters are the memory
        model's account. `everywhere`: also those of weights that were used outside of their unit."""
        segment = self._backward
        assert segment is not None
        for name in self._weights.newly_arrived(segment.unit, everywhere):
            segment.arrivals.order.append(name)
            segment.arrivals.levels.append(self._level())

    def _level(self) -> int:
        assert self._backward is not None
        return self._meter.alive.bytes - self._weights.grad_bytes - self._backward.below

    def _worked(self, flops: int, moved: int) -> None:
        work = self._recorded[-1].forward if self._backward is None else self._backward.backward
        work.add(flops, moved)

    def _pack(self, tensor: Tensor) -> Any:
        segment = self._backward or self._recorded[-1]
        if (owner := self._weights.by_memory(tensor)) is not None:
            segment.need(owner[0])
        if self._backward is None and not self._is_saved(tensor):
            segment.save(self._save(tensor))
        return segment, tensor

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
        segment, tensor = packed
        if self._backward is not None:
            self._arrive(segment)
        result: Tensor = tensor
        return result

    def _arrive(self, segment: RecordedSegment) -> None:
        """Backward has come to a segment: the gradients of the one before are in their buckets by now."""
        at = self._backward
        assert at is not None
        if segment is not at:
            self._look()
            self._weights.drop_grads()
            first, last = segment.number, at.number
            for left in self._recorded[first + 1 : last + 1]:
                left.let_go()
            for passed in (*reversed(self._recorded[first + 1 : last]), segment):
                self._backward = passed
                passed.return_to(self._level())
            at.leave(self._level())


@contextmanager
def _quiet() -> Iterator[None]:
    """Fake tensors log a traceback of every error before they raise it; the error says enough."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _TracedStep(nn.Module):
    """A whole step as a module, so that the fake weights stand in the model during backward too:
    recomputation needs them."""

    def __init__(self, model: nn.Module, step: Callable[..., None]) -> None:
        super().__init__()
        self.model, self._step = model, step

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self._step(*args, **kwargs)


def default_loss(output: Any, inputs: ExampleInputs) -> Tensor:
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


class StepTraces:
    """The segments of a step under given options, each combination of precision and recomputed units traced
    once."""

    def __init__(
        self,
        problem: PlanningProblem,
        model: nn.Module,
        inputs: ExampleInputs,
        loss: Loss | None,
        fakes: list[FakeTensors] | None = None,
    ) -> None:
        self._problem, self._model, self._inputs, self._loss = problem, model, inputs, loss
        self._known: dict[Any, tuple[StepSegment, ...]] = {}
        self._fakes: list[FakeTensors] = [] if fakes is None else fakes  # made with the first trace

    def of(self, inputs: ExampleInputs) -> StepTraces:
        """The same of other inputs."""
        return StepTraces(self._problem, self._model, inputs, self._loss, self._fakes)

    @property
    def bounded(self) -> bool:
        """Whether values decide sizes in what was traced so far: they were taken at their largest."""
        return any(fakes.mode.bounded for fakes in self._fakes)

    def __call__(self, options: Options) -> tuple[StepSegment, ...]:
        names = self._problem.names
        wanted = options.recompute
        again = names if isinstance(wanted, bool) else matching(wanted, list(names), "recompute", "units")
        chosen = frozenset(again) if wanted else frozenset()
        key = options.precision, chosen
        if key not in self._known:
            asked = replace(self._problem, options=options)
            self._known[key] = traced(asked, self._model, self._inputs, self._loss, chosen, self._fakes)
        return self._known[key]


def traced(
    problem: PlanningProblem,
    model: nn.Module,
    inputs: ExampleInputs,
    loss: Loss | None,
    recomputed: Collection[str],
    fakes: list[FakeTensors],
) -> tuple[StepSegment, ...]:
    """The segments of one step of the model in the run's compute dtypes."""
    from .operations import FakeTensors

    setup = MemoryModel(problem.units, problem.options, problem.world, problem.rules)
    compute = {name: getattr(torch, dtype) for name, (dtype, _) in setup.tensors.dtypes.items()}
    chosen, names = set(recomputed), [u.name for u in problem.units if u.name]
    if not fakes:
        fakes.append(FakeTensors())
    try:
        return tuple(
            Tracer(
                model,
                names,
                chosen.__contains__,
                compute,
                problem.machine.gpu,
                problem.options.precision,
                fakes[0],
            ).run(inputs, loss)
        )
    except PlanError:
        raise
    except Exception as error:  # the user's code on fake tensors: say that it was that
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs.tensors)
        given = f"with inputs of shape {shapes}" if shapes else "without tensors among its inputs"
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise PlanError(
            f"a step of {type(model).__name__} {given} cannot be traced: {why}. Check the batch; code that "
            "looks at values cannot run on shapes alone: leave batch= out, and activations are not counted."
        ) from error
