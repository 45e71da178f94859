"""Gradients that wait where they landed for the loop's own step: `p.grad` is a handle of them.

The README's loop calls `backward()`, `clip_grad_norm_(model.parameters(), max_norm)`,
`optimizer.step()`. With state on the host, gradients brought there for torch to look at, one by one,
would cost several times what the model computes. So the loop gets handles, and what it does most often
needs no gradient:

- A gradient lands in backward and stays on the device (`LandedGrads`, one per part). The norm of each
  parameter's is computed there, and all of them are read at once when the first is asked for.
- `clip_grad_norm_` and `get_total_norm` ask for norms, and get those. `clip_grads_with_norm_` and
  `GradScaler.unscale_` multiply in place: the handle keeps the factor (`GradState.factor`).
- `optimizer.step()` starts the native update of every part, scaled by that factor in the pass over the
  state that it makes anyway (`HostUpdates.step`), and returns. The updates hide behind the next forward,
  in which each unit waits for its own. Whoever uses a parameter before that waits for it: see
  `params.guarded`.
- A loop that lets gradients alone, or multiplies them by one number, most likely does so again
  (`LoopHabit`). The update of the next gradient then begins as that lands, and `step()` finds it done. Where
  the loop does something else (it clips, looks, evaluates, does not step), it is taken back.
- All else that is done with a handle (`clip_grad_value_`, noise, masks, printing) brings the gradient to
  where its parameter rests, times the factor. From then on that copy is the gradient: it is what
  `step()` sends back to the device. So the numbers are those of a loop without handles, and what it
  costs is the way of those gradients that were looked at, there and back.

A handle is the gradient for as long as the loop holds it: after the step, after the next backward (which
adds to it, as torch does), and without a step. Its memory on the device goes with the last handle of its
part, which `zero_grad()` drops, and with the update that reads it.

Between ranks a handle is the local part of a DTensor, so norms of rows are put together and checked as
those of any other sharded tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self, cast
from weakref import ref

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from zeroshard.errors import StateError
from zeroshard.params.sharded_param import ShardedParam, ShardedTensors

_aten = torch.ops.aten


class LandedGrads:
    """The gradients of one part from one backward, flat on the device, and their norms. `spans`: where each
    parameter's is. Those that are `dropped` are brought by a second backward where somebody looks at them."""

    __slots__ = ("__weakref__", "_bring", "_flat", "_known", "dropped", "norms", "spans")

    def __init__(self, flat: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        self._flat: Tensor | None = flat
        self._bring: Callable[[], None] = _nothing
        self.dropped = False  # a second backward can bring them
        self.spans = spans
        self.norms = torch.empty(0)
        self._known: list[float] = []

    @property
    def flat(self) -> Tensor:
        if self._flat is None:
            self._bring()
        assert self._flat is not None
        return self._flat

    def drop(self, bring: Callable[[], None]) -> None:
        """Keep the norms alone; `bring` makes the gradients come again."""
        self._flat, self._bring, self.dropped = None, bring, True

    @property
    def gone(self) -> bool:
        """Whether nobody has them, nor will."""
        return self._flat is None and not self.dropped

    def spend(self, name: str) -> None:
        """Nothing makes them come again: the step has been, or was given up."""
        self._bring, self.dropped = partial(_refuse_late, name), False

    def measure(self, norms: Tensor) -> None:
        """Write the norm of each parameter's gradient to `norms`, in fp32, in the device's order of work."""
        for index, (at, n) in enumerate(self.spans):
            torch.linalg.vector_norm(self.flat[at : at + n], dtype=torch.float32, out=norms[index])
        self.norms = norms

    def know(self, norms: list[float]) -> None:
        """They have been read."""
        self._known = norms

    def move(self, flat: Tensor) -> None:
        """The gradients lie elsewhere, or are here again."""
        self._flat, self._bring, self.dropped = flat, _nothing, False

    def leave(self) -> None:
        """The memory of the norms is about to be overwritten, by those of the next gradients."""
        if not self._known:
            self.norms = self.norms.clone()

    def norm(self, index: int) -> float:
        if not self._known:
            read([self])
        return self._known[index]


def _nothing() -> None:
    """They are here."""


def _refuse_late(name: str) -> None:
    raise StateError(
        f"the gradient of `{name}` and others is gone: with Offload(repeat_backward=) it does not wait, and "
        "can be looked at between backward() and optimizer.step() alone. Drop it with zero_grad() before the "
        "next backward."
    )


def read(landed: Iterable[LandedGrads]) -> None:
    """Bring the norms of several parts to the host, in one copy."""
    due = [each for each in dict.fromkeys(landed) if not each._known]
    if due:
        found = torch.cat([each.norms for each in due]).tolist()
        at = 0
        for each in due:
            each.know(found[at : at + len(each.spans)])
            at += len(each.spans)


class GradState:
    """One parameter's gradient: that which landed, times `factor`; or `rows`, once they were brought."""

    __slots__ = ("factor", "index", "landed", "rows")

    def __init__(self, landed: LandedGrads, index: int) -> None:
        self.landed, self.index = landed, index
        self.factor = 1.0
        self.rows: Tensor | None = None

    def bring(self, like: Tensor) -> Tensor:
        """The gradient itself, where its parameter rests."""
        if self.rows is None:
            at, n = self.landed.spans[self.index]
            rows = self.landed.flat[at : at + n].to(like.device, copy=True).view(like.shape)
            if self.factor != 1.0:
                rows.mul_(self.factor)
            self.rows, self.factor = rows, 1.0
        return self.rows

    def clear(self, like: Tensor) -> None:
        """Zeros in its place."""
        self.rows = torch.zeros(like.shape, dtype=like.dtype, device=like.device)

    def multiply(self, factor: float) -> None:
        """By one number, where it landed."""
        self.factor *= factor

    def norm(self) -> float:
        return self.landed.norm(self.index) * abs(self.factor)

    def finite(self) -> bool:
        """Whether all its elements are; a norm may be too large for a number where they are not."""
        if math.isfinite(self.norm()):
            return True
        at, n = self.landed.spans[self.index]
        return math.isfinite(self.factor) and bool(self.landed.flat[at : at + n].isfinite().all())


class GradHandle(Tensor):
    """What `p.grad` is while its values are on the device. Python's ways past torch's dispatch are its
    methods."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __slots__ = ("state",)
    state: GradState

    @staticmethod
    def __new__(cls, state: GradState, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.state = state
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def rows(self) -> Tensor:
        """The plain gradient, whatever becomes of it."""
        with torch.no_grad():
            return self.state.bring(self)

    def alias(self) -> GradHandle:
        return GradHandle(self.state, self.shape, self.dtype, self.device)

    @property
    def waits(self) -> bool:
        """Whether nobody has looked at its values."""
        return self.state.rows is None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = _KNOWN.get(func)
        if known is not None:
            found = known(func, args, kwargs or {})
            if found is not NotImplemented:
                return found
        made = func(*plain(args), **{name: plain(value) for name, value in (kwargs or {}).items()})
        if func._schema.is_mutable and made is not None and args:
            return args[0]
        return made

    # Of these torch asks no dispatch.

    def data_ptr(self) -> int:
        return self.rows().data_ptr()

    def untyped_storage(self) -> Any:
        return self.rows().untyped_storage()

    def storage(self) -> Any:
        return self.rows().storage()

    def numpy(self, *, force: bool = False) -> Any:
        return self.rows().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.rows().__array__(dtype)

    def tolist(self) -> Any:
        return self.rows().tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rows().__dlpack__(*args, **kwargs)

    def __repr__(self, **how: Any) -> Any:  # type: ignore[override]
        return self.rows().__repr__(**how)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.rows().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.rows().__reduce_ex__(protocol)


# Lists of them are clipped in one call.
for _known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _known.append(cast(Any, GradHandle))


def waiting(value: Any) -> bool:
    """Whether it is a handle at whose values nobody has looked."""
    return type(value) is GradHandle and value.waits


def plain(value: Any) -> Any:
    """With gradients in place of handles."""
    if type(value) is GradHandle:
        return value.rows()
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def _is_two(order: Any) -> bool:
    return isinstance(order, (int, float)) and float(order) == 2.0


def _norms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`_foreach_norm`: of those that wait, what was measured as they landed, in torch's dtype."""
    given, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = kwargs.get("dtype", args[2] if len(args) > 2 else None)
    if not _is_two(order):
        return NotImplemented
    waits = [waiting(one) for one in given]
    read(one.state.landed for one, does in zip(given, waits, strict=True) if does)
    others = [plain(one) for one, does in zip(given, waits, strict=True) if not does]
    looked_at = iter(func(others, order, **({"dtype": dtype} if dtype else {})) if others else ())
    measured = iter(
        torch.tensor([one.state.norm() for one, does in zip(given, waits, strict=True) if does]).unbind()
    )
    return [
        next(measured).to(one.device, dtype or one.dtype) if does else next(looked_at)
        for one, does in zip(given, waits, strict=True)
    ]


def _norm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`p.grad.norm()` of all elements."""
    handle, order, dim, keep = (*args, *(2, None, False)[len(args) - 1 :])[:4]
    dtype = kwargs.get("dtype")
    if not waiting(handle) or not _is_two(order) or dim not in (None, []) or keep:
        return NotImplemented
    return torch.tensor(handle.state.norm(), dtype=dtype or handle.dtype, device=handle.device)


def _number(value: Any) -> float | None:
    """What all elements are multiplied by."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


def _multiplied(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """In place, by one number."""
    factor = _number(args[1])
    if not waiting(args[0]) or factor is None:
        return NotImplemented
    args[0].state.multiply(factor)
    return args[0]


def _all_multiplied(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`_foreach_mul_` by one number."""
    factor = _number(args[1])
    if factor is None:
        return NotImplemented
    states = {id(one.state): one.state for one in args[0] if waiting(one)}
    others = [plain(one) for one in args[0] if not waiting(one)]
    for state in states.values():
        state.multiply(factor)
    if others:
        func(others, args[1])
    return None


def _unscaled(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `GradScaler.unscale_` does: where a norm is no number, elements are looked at where they are."""
    handles, infinite, inverse = args
    if not all(map(waiting, handles)):
        return NotImplemented
    read(one.state.landed for one in handles)
    if not all(one.state.finite() for one in handles):
        infinite.fill_(1.0)
    factor = float(inverse)
    for one in handles:
        one.state.multiply(factor)
    return None


def _zeroed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`zero_grad(set_to_none=False)`: what they were is not asked for."""
    several = isinstance(args[0], (list, tuple))
    for one in args[0] if several else args:
        if waiting(one):
            one.state.clear(one)
        else:
            plain(one).zero_()
    return None if several else args[0]


def _aliased(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0].alias()


_KNOWN: dict[Any, Any] = {
    _aten._foreach_norm.Scalar: _norms,
    _aten.linalg_vector_norm.default: _norm,
    _aten.mul_.Tensor: _multiplied,
    _aten.mul_.Scalar: _multiplied,
    _aten._foreach_mul_.Tensor: _all_multiplied,
    _aten._foreach_mul_.Scalar: _all_multiplied,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    _aten.zero_.default: _zeroed,
    _aten._foreach_zero_.default: _zeroed,
    _aten.detach.default: _aliased,
    _aten.alias.default: _aliased,
}


MOST_PATIENCE = 16  # steps alike before an update begins early again, of a loop that has often differed


class LoopHabit:
    """What the loop has lately done with the gradients of one part: whether it is likely to let the next one
    alone, but for a factor that is the same every time (of a loss scaler), after as many backward passes.

    >>> habit = LoopHabit()
    >>> habit.land()
    >>> habit.expected is None  # nothing is known of the first step
    True
    >>> habit.step(1.0)
    >>> habit.land()
    >>> habit.expected
    1.0
    >>> habit.differ()  # the loop looks at weights, and the update that has begun is taken back
    >>> habit.step(1.0)
    >>> habit.land()
    >>> habit.expected is None
    True
    """

    def __init__(self, counts: bool = True) -> None:
        self._counts = counts  # else nothing is ever expected
        self.begun = False  # the update of the last gradient has begun before its step
        self._factor = 1.0  # that is expected
        self._last: float | None = None  # which the last step found
        self._landed_count, self._usual = 0, 1  # backward passes since the last step, and before it
        self._differs = False  # since then the loop has done what no update may have begun for
        self._alike, self._patience = 0, 1

    def begin(self) -> None:
        """The update of the last gradient begins before its step."""
        self.begun = True

    def land(self) -> None:
        """One more backward has brought a gradient."""
        self._landed_count += 1

    @property
    def expected(self) -> float | None:
        """What the gradient that has landed is likely to be multiplied by, and no more; None: nobody can
        tell."""
        likely = self._alike >= self._patience and self._landed_count == self._usual and not self._differs
        return self._factor if likely and self._counts else None

    def differ(self) -> None:
        """The loop uses weights, or runs another backward, between the last backward and its step."""
        self._differs = self._differs or self._landed_count >= self._usual
        self._miss()

    def drop(self) -> None:
        """No step follows."""
        if self._landed_count:
            self._alike, self._landed_count, self._differs = 0, 0, False
            self._miss()

    @property
    def accumulates(self) -> bool:
        """Whether more than one backward has led to the last step, or to the next."""
        return max(self._usual, self._landed_count) > 1

    def step(self, factor: float | None) -> None:
        """The loop has multiplied the gradient by so much, and done nothing else; None: it has."""
        if factor is not None and (factor == 0.0 or not math.isfinite(factor)):
            factor = None
        alike = factor == self._factor and self._landed_count == self._usual and not self._differs
        if alike:
            self._alike += 1
            self._patience = max(1, self._patience - 1) if self.begun else self._patience
            self.begun = False
        else:
            self._alike = 0
            self._miss()
            if factor is not None and factor == self._last:  # one that came once was most likely clipping
                self._factor = factor
        self._last = factor
        self._landed_count, self._usual, self._differs = 0, max(1, self._landed_count), False

    def _miss(self) -> None:
        if self.begun:
            self.begun = False
            self._patience = min(2 * self._patience, MOST_PATIENCE)


class DeferredGrads:
    """Shows the gradients of one part's parameters, and collects what the loop has made of them."""

    def __init__(
        self,
        params: list[ShardedParam],
        spans: list[tuple[int, int]],
        numel: int,
        dtype: torch.dtype,
        sharded_tensors: ShardedTensors,
        read_in_backward: bool,
    ) -> None:
        self.params, self.spans, self.numel, self.dtype = params, spans, numel, dtype
        self._sharded_tensors = sharded_tensors
        # Where peers read rows in backward too, another one would come to them before they are taken back.
        self.habit = LoopHabit(not read_in_backward)
        self.norms = torch.empty(0)  # on the device, one for each parameter
        self._landed: ref[LandedGrads] | None = None  # whose life is that of the handles

    def measure_in(self, norms: Tensor) -> None:
        """Where norms are written, one for each parameter."""
        self.norms = norms

    @property
    def landed(self) -> LandedGrads | None:
        return self._landed() if self._landed is not None else None

    @torch.no_grad()
    def accept(self, flat: Tensor, used: list[bool]) -> list[bool]:
        """A gradient has landed: show it, with what the parameters showed before added. Returns which of them
        show one."""
        self.habit.land()
        landed = LandedGrads(flat, self.spans)
        shown = []
        for index, (param, has) in enumerate(zip(self.params, used, strict=True)):
            before = param.sharded_param.grad
            if before is not None:
                self._add(landed, index, ShardedTensors.local(before), has)
            if has or before is not None:
                shown.append(index)
        if (last := self.landed) is not None:
            last.leave()
        landed.measure(self.norms)
        del last
        for index in shown:
            self._show(landed, index)
        self._landed = ref(landed)
        return [index in shown for index in range(len(self.params))]

    @staticmethod
    def _add(landed: LandedGrads, index: int, before: Tensor, has: bool) -> None:
        at, n = landed.spans[index]
        rows = landed.flat[at : at + n]
        if waiting(before):
            state = cast(GradHandle, before).state
            start, length = state.landed.spans[state.index]
            old = state.landed.flat[start : start + length]
            old = old * state.factor if state.factor != 1.0 else old
        else:
            old = plain(before).reshape(-1).to(rows.device)
        if has:
            rows.add_(old)
        else:
            rows.copy_(old)

    def _show(self, landed: LandedGrads, index: int) -> None:
        param = self.params[index]
        handle = GradHandle(GradState(landed, index), param.local.shape, self.dtype, param.local.device)
        param.sharded_param.grad = self._sharded_tensors.show(handle, param.slot, what="the gradient")

    @property
    def shown(self) -> bool:
        """Whether any of the parameters has a gradient."""
        return any(param.sharded_param.grad is not None for param in self.params)

    def factors(self) -> list[float | None]:
        """What the loop has multiplied each gradient by; None where it has done something else with it, or
        shows none."""
        landed = self.landed
        return [self._factor(landed, index) for index in range(len(self.params))]

    def _factor(self, landed: LandedGrads | None, index: int) -> float | None:
        seen = self.params[index].sharded_param.grad
        local = None if seen is None else ShardedTensors.local(seen)
        if not waiting(local):
            return None
        state = cast(GradHandle, local).state
        return state.factor if state.landed is landed and state.index == index else None

    @torch.no_grad()
    def collect(self) -> tuple[Tensor, list[bool], list[float]]:
        """The gradients that the parameters show now, flat on the device; which have one; and what each is
        still to be multiplied by. No update reads what landed any more."""
        landed = self.landed
        flat = landed.flat if landed is not None else self._empty()
        used, factors = [], []
        for index, (param, factor) in enumerate(zip(self.params, self.factors(), strict=True)):
            seen = param.sharded_param.grad
            used.append(seen is not None)
            factors.append(1.0 if factor is None else factor)
            if seen is not None and factor is None:
                at, n = self.spans[index]
                flat[at : at + n].copy_(plain(ShardedTensors.local(seen)).reshape(-1))
        return flat, used, factors

    def spend(self) -> None:
        """Those that were dropped will not be brought any more."""
        landed = self.landed
        if landed is not None and landed.dropped:
            landed.spend(self.params[0].name)

    def hide_spent(self) -> None:
        """Show no gradient where it is gone."""
        landed = self.landed
        for param in self.params if landed is not None and landed.gone else ():
            grad = param.sharded_param.grad
            if grad is not None and waiting(ShardedTensors.local(grad)):
                param.sharded_param.grad = None

    @property
    def awaits_second(self) -> bool:
        """Whether a second backward can bring the gradients that the parameters show, as nobody has looked at
        them or put others there."""
        landed = self.landed
        if landed is None or not landed.dropped:
            return False
        shown = [param.sharded_param.grad is not None for param in self.params]
        return all(factor is not None for factor, has in zip(self.factors(), shown, strict=True) if has)

    def _empty(self) -> Tensor:
        """For gradients that the loop has made itself."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.params[0].unsharded_param.device)

    def make_room(self, shown: Tensor) -> Tensor | None:
        """The memory where a gradient landed is about to be overwritten. Returns where it is from now on, if
        handles have it."""
        landed = self.landed
        if landed is None or landed.dropped or landed.flat.data_ptr() != shown.data_ptr():
            return None
        landed.move(shown.clone())
        return landed.flat


class HostGradients:
    """The plain way to the host: gradients land there and `sharded_param.grad` shows them; the optimizer's
    own step updates the master.

    For optimizers without a native kernel, and for loops that clip or unscale gradients themselves.
    """

    def __init__(self, params: list[ShardedParam], grads: list[Tensor], flat: Tensor) -> None:
        self.params, self.grads, self.flat = params, grads, flat
        self._own = [
            ShardedTensors.local(grad).detach() for grad in grads
        ]  # stays, whatever becomes of `p.grad.data`

    @torch.no_grad()
    def accept(self, flat: Tensor, used: list[bool]) -> None:
        held = [
            None if p.sharded_param.grad is None else ShardedTensors.local(p.sharded_param.grad).clone()
            for p in self.params
        ]
        self.flat.copy_(flat[: self.flat.numel()])
        for param, grad, local, old, has in zip(self.params, self.grads, self._own, held, used, strict=True):
            if ShardedTensors.local(grad).data_ptr() != local.data_ptr():
                grad.data = local
            if old is not None:
                local.add_(old) if has else local.copy_(old)
            param.sharded_param.grad = grad if has or old is not None else None

    @property
    def shown(self) -> bool:
        """Whether any of the parameters has a gradient."""
        return any(param.sharded_param.grad is not None for param in self.params)

    @torch.no_grad()
    def collect(self) -> tuple[Tensor, list[bool]]:
        """The gradients that the parameters show now, flat, and which have one."""
        for param, local in zip(self.params, self._own, strict=True):
            seen = param.sharded_param.grad
            if seen is not None and ShardedTensors.local(seen).data_ptr() != local.data_ptr():
                local.copy_(ShardedTensors.local(seen))  # the loop has put another tensor there
        return self.flat, [param.sharded_param.grad is not None for param in self.params]
