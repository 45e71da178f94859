"""Traces a training step on fake tensors: what it keeps and computes. Nothing is allocated.

A *segment* is a part of forward inside one unit, or in the root between units. For each: the bytes that
autograd saves in it, the most that lives at one time beyond what was saved before (forward) or is still
saved (backward), and its operations.

Units that are alike (`signatures.py`, and the same shapes of inputs) are traced once; the others repeat the
figures. So a trace costs what one block costs, whatever the depth. A plan looks at steps with these or those
units recomputed, in each precision.

Exact for the tensors that operations return. Not seen: workspace inside a kernel (cuBLAS, cuDNN), and what
the allocator rounds up."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zeroshard.errors import PlanError
from zeroshard.layout.memory import MemoryModel
from zeroshard.layout.timeline import StepSegment
from zeroshard.options import Options, Precision
from zeroshard.params.units import matching, standing, unit_of
from zeroshard.params.widening import Widening

from .operations import FakeTensors, MemoryMeter, as_on_gpu, unread_masks
from .planning_problem import PlanningProblem
from .positions import Positions
from .segments import RecordedSegment, SegmentTemplate, Situation, StandIn, TracedWeights, reached
from .signatures import mode, natures, sight

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class ExampleInputs:
    """Example inputs of the model's forward: only their shapes and dtypes matter."""

    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, batch: Any) -> ExampleInputs:
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

    def dtype_of(self, value: Tensor) -> torch.dtype:
        """Of an input, as the run will have it."""
        narrow = self.precision is not None and value.is_floating_point()
        return getattr(torch, self.precision.compute) if self.precision and narrow else value.dtype


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
        self._meter = MemoryMeter(self._rose, self._worked, gpu, Positions(self._weight))

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
        sizes, begun = self._weights.sizes, set[str]()
        for segment in reversed(self._recorded):
            segment.arrivals.follow(begun)
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

    def _weight(self, tensor: Tensor) -> str:
        """The name of a weight, by its memory; empty where it is none."""
        return (self._weights.by_memory(tensor) or ("", ""))[1]

    def _fake(self, inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def one(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            fake = torch.zeros(value.shape, dtype=self._asked.dtype_of(value), device="cpu")
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
            self._recorded[-1].repeat(self._templates[key])
            output = self._stand(self._recorded[-1], unsharded_params)
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
        reaches = [self._weights.name(w) for w in weights if id(w) in found]
        segment.computed(reaches, spoils=any(one[0] != two[0] for one, two in pairs))
        return SegmentTemplate(
            segment,
            outputs=[(*sight(x), self._is_saved(x)) for x in flat],
            tree=tree,
            saves=[n for n, (one, two) in enumerate(pairs) if two[1] and not one[1]],
            weights=[self._weights.name(w) for w in weights],
            reaches=[n for n, w in enumerate(weights) if id(w) in found],
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
        return self._stand(segment, tree_flatten((args, kwargs))[0])

    def _stand(self, segment: RecordedSegment, unsharded_params: list[Any]) -> Any:
        """Outputs as the first such unit had, without computing them; see [Note: stand-ins]."""
        weights = list(self._modules[segment.unit].parameters())
        template = segment.stand_for([self._weights.name(weight) for weight in weights])
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
        self._recorded.append(RecordedSegment(unit, entered, number, before))
        self._numbers.setdefault(unit, []).append(number)
        self._rose(self._meter.now)
        self._recorded[-1].begin(self._meter.now)

    def _rose(self, now: int) -> None:
        if self._backward is None:
            self._recorded[-1].rise(now)
            return
        self._look()
        self._backward.arrivals.rise(self._level())

    def _look(self, everywhere: bool = False) -> None:
        """Gradients that have arrived since the last look. Those on unsharded parameters are the memory
        model's account. `everywhere`: also those of weights that were used outside of their unit."""
        segment = self._backward
        assert segment is not None
        for name in self._weights.newly_arrived(segment.unit, everywhere):
            segment.arrivals.arrive(name, self._level())

    def _level(self) -> int:
        assert self._backward is not None
        return self._meter.now - self._weights.grad_bytes - self._backward.below

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
    compute = {w.name: getattr(torch, setup.dtypes(w)[0]) for unit in problem.units for w in unit.weights}
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
