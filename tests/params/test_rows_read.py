"""Whatever is computed of what `shard()` shows (parameters, gradients, state dicts, optimizer state) is of
the whole tensor, however its rows are divided: the same on all ranks, and what one process computes."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._library.simple_registry import singleton
from torch.distributed.tensor import DTensor

import zeroshard as zs
from zeroshard.params import dispatch_rules, dtensor
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows": ("adamw", {"split": "rows"}),
    "level": ("adamw", {"split": "level"}),
    "whole": ("adamw", {"split": "whole"}),
    "adafactor": ("adafactor", {}),
    "muon": ("muon", {}),
}
READ: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "numbers in a list": lambda t: torch.tensor([t.detach().norm(2), t.detach().sum()]),
    "whole numbers in a list": lambda t: torch.tensor([t.detach().argmax()]),
    "truths in a list": lambda t: torch.tensor([t.detach().sum() > 0.5]),
    "mean": lambda t: t.mean(),
    "prod": lambda t: t.prod(),
    "var": lambda t: t.var(),
    "std": lambda t: t.std(),
    "std biased": lambda t: t.std(correction=0),
    "var_mean": lambda t: list(torch.var_mean(t)),
    "median": lambda t: t.median(),
    "quantile": lambda t: t.quantile(0.3),
    "kthvalue": lambda t: t.flatten().kthvalue(2).values,
    "mode": lambda t: t.mode(dim=0).values,
    "max": lambda t: t.max(),
    "min": lambda t: t.min(),
    "aminmax": lambda t: list(torch.aminmax(t)),
    "max of rows": lambda t: t.max(dim=0).values,
    "largest in rows": lambda t: t.max(dim=-1).values,
    "argmax": lambda t: t.argmax(),
    "argmin of rows": lambda t: t.argmin(dim=0),
    "argmax in rows": lambda t: t.argmax(dim=-1),
    "logsumexp": lambda t: t.logsumexp(0),
    "logsumexp in rows": lambda t: t.logsumexp(-1),
    "softmax": lambda t: t.softmax(0),
    "softmax in rows": lambda t: t.softmax(-1),
    "log_softmax": lambda t: t.log_softmax(0),
    "cumsum": lambda t: t.cumsum(0),
    "cumsum in rows": lambda t: t.cumsum(-1),
    "cumprod": lambda t: t.cumprod(0),
    "norm": lambda t: t.norm(),
    "norm 1": lambda t: torch.linalg.vector_norm(t, 1),
    "norm inf": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "norm -inf": lambda t: torch.linalg.vector_norm(t, -float("inf")),
    "norm of rows": lambda t: t.norm(dim=0),
    "norm in rows": lambda t: t.norm(dim=-1, keepdim=True),
    "sum of rows": lambda t: t.sum(0),
    "mean of rows": lambda t: t.mean(0, keepdim=True),
    "mean in rows": lambda t: t.mean(-1),
    "std of rows": lambda t: t.std(0),
    "normalized": lambda t: nn.functional.normalize(t, dim=0),
    "normalized rows": lambda t: nn.functional.normalize(t, dim=-1),
    "product": lambda t: t @ t.T if t.dim() == 2 else t @ t,
    "transposed product": lambda t: t.T @ t,
    "outer": lambda t: torch.outer(t.flatten(), t.flatten()),
    "einsum": lambda t: torch.einsum("...,...->", t, t),
    "svd": lambda t: torch.linalg.svdvals(torch.atleast_2d(t)),
    "matrix norm": lambda t: torch.linalg.matrix_norm(torch.atleast_2d(t)),
    "sort": lambda t: t.sort(dim=0).values,
    "topk": lambda t: t.flatten().topk(2).values,
    "unique": lambda t: t.unique(),
    "histc": lambda t: t.histc(4, -2, 2),
    "bincount": lambda t: (t > 0).flatten().long().bincount(),
    "nonzero": lambda t: (t > 0).nonzero(),
    "count": lambda t: torch.count_nonzero(t > 0),
    "any": lambda t: (t > 0).any(),
    "all": lambda t: (t > 0).all(),
    "flip": lambda t: t.flip(0),
    "roll": lambda t: t.roll(1, 0),
    "first row": lambda t: t[0],
    "last row": lambda t: t[-1],
    "every other": lambda t: t[::2],
    "column": lambda t: t[..., 0],
    "masked": lambda t: t[t > 0],
    "picked": lambda t: plain(t)[[0, -1]],
    "gathered": lambda t: t.gather(0, torch.zeros_like(t, dtype=torch.long)),
    "transposed": lambda t: t.T.contiguous(),
    "flat": lambda t: t.flatten(),
    "reshaped": lambda t: t.reshape(-1, 1),
    "viewed": lambda t: t.view(-1),
    "expanded": lambda t: t.expand(2, *t.shape),
    "raised": lambda t: t.unsqueeze(0),
    "chunks": lambda t: list(t.chunk(2)),
    "chunks of columns": lambda t: list(t.chunk(2, dim=-1)),
    "unbound": lambda t: list(t.unbind(0)),
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, t]),
    "diff": lambda t: t.diff(dim=0),
    "tril": lambda t: torch.atleast_2d(t).tril(),
    "computed": lambda t: (t * 2 + t.abs()).clamp(min=0.1).sqrt(),
    "scaled": lambda t: t / t.norm(),
    "less its mean": lambda t: t - t.mean(),
    "less that of rows": lambda t: t - t.mean(-1, keepdim=True),
    "less that of columns": lambda t: t - t.mean(0, keepdim=True),
    "where": lambda t: torch.where(t > 0, t, torch.zeros_like(t)),
    "copy": lambda t: t.clone().mul_(3).add_(t, alpha=2),
    "written": lambda t: t.clone().cumsum_(0),
    "filled": lambda t: t.clone().masked_fill_(t > 0, 1.0),
    "double": lambda t: t.double().mean(),
    "close": lambda t: torch.allclose(t, t) and torch.equal(t, t),
    "one": lambda t: t.flatten()[0].item(),
    "list": lambda t: plain(t).tolist(),
    "total": lambda t: nn.utils.get_total_norm([t, t]),
    "together": lambda t: [n * 2 for n in torch._foreach_norm([t, t])],
    "whole": lambda t: t,
}


class Shaped(nn.Module):
    """Fewer rows than ranks, a row too many, one row, and none to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall = nn.Linear(3, 2), nn.Linear(2, 7)
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.tall(self.wide(x).tanh())).square().mean()


def trained(layout: str | None, kind: str) -> tuple[nn.Module, list[Any], zs.Run | None]:
    """After a step, with the gradients of another one."""
    draw, model = torch.Generator().manual_seed(1), Shaped()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw)
    if kind == "muon":
        optimizers: list[Any] = [
            torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1),
            torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.1),
        ]
    else:
        made = torch.optim.AdamW if kind == "adamw" else torch.optim.Adafactor
        optimizers = [made(model.parameters(), lr=0.1)]
    run = zs.shard(model, optimizers, stage=3, **LAYOUTS[layout][1]) if layout else None
    for step in range(2):
        for optimizer in optimizers:
            if step:
                optimizer.step()
            optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).backward()
    return model, optimizers, run


def shown(model: nn.Module, optimizers: list[Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    names = ("wide.weight", "tall.weight", "last.bias")
    for name in names:
        p = model.get_parameter(name)
        found |= {
            f"{name}": p,
            f"{name}.grad": p.grad,
            f"{name}.detach()": p.detach(),
            f"{name}.data": p.data,
        }
    found |= {f"state_dict {name}": value for name, value in model.state_dict().items() if name in names}
    for optimizer in optimizers:
        if type(optimizer) is not torch.optim.AdamW:
            continue  # has state on the rank alone that has the rows
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{type(optimizer).__name__} {number} {key}": value for key, value in state.items()}
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and value.dim()}


def plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.detach() if isinstance(value, Tensor) else value


def readings(model: nn.Module, optimizers: list[Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, tensor in shown(model, optimizers).items():
        for what, read in READ.items():
            try:
                with warnings.catch_warnings(action="ignore"):
                    told[f"{what} of {name}"] = plain(read(tensor))
            except zs.ZeroShardError as error:
                told[f"{what} of {name}"] = str(error)
            except Exception as error:
                told[f"{what} of {name}"] = type(error)
    return told


def on_ranks(layout: str) -> dict[str, Any]:
    model, optimizers, run = trained(layout, LAYOUTS[layout][0])
    told = readings(model, optimizers)
    run.close()
    return told


@pytest.mark.wide(4)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_computed_is_of_the_whole(layout: str, world: int) -> None:
    expected = readings(*trained(None, LAYOUTS[layout][0])[:2])
    told = ranks(world).run(on_ranks, layout, timeout=300)
    wrong = [what for what in expected if not alike(told, what, expected[what])]
    assert told[0].keys() == expected.keys()
    assert not wrong, (
        len(wrong),
        len(expected),
        [(w, told[0][w], told[-1][w], expected[w]) for w in wrong[:12]],
    )


def same(one: Any, other: Any) -> bool:
    """Most are, which takes a tenth of the time to see that a comparison with tolerances takes."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(map(same, one, other))
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype
    return tensors and torch.equal(one, other)


def alike(told: list[dict[str, Any]], what: str, expected: Any) -> bool:
    if all(same(found.get(what), expected) for found in told):
        return True
    try:
        for found in told:
            torch.testing.assert_close(found.get(what), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    except (AssertionError, TypeError, ValueError):
        return all(found.get(what) == expected for found in told) if isinstance(expected, type) else False
    return True


ASKED: dict[str, Callable[[Any, nn.Module], Any]] = {
    "entry": lambda optimizer, model: [optimizer.state[p]["momentum_buffer"] for p in matrices(model)],
    "state dict": lambda optimizer, model: [
        float(kept["momentum_buffer"].mean()) for kept in optimizer.state_dict()["state"].values()
    ],
}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def asked(how: str) -> None:
    model, (muon, _), _ = trained("muon", "muon")
    assert any(muon.state[p].get("momentum_buffer") is None for p in matrices(model))
    ASKED[how](muon, model)


@pytest.mark.parametrize("how", ASKED)
def test_state_that_one_rank_alone_has_says_so_on_all(how: str) -> None:
    """Python's KeyError would come from the rank that does not have it, and name no way."""
    for outcome in ranks(2).attempt(asked, how):
        assert outcome.kind in ("StateError", "RankError")
        said = r"`momentum_buffer` of `.*weight` is on rank \d alone: Muon" if how == "entry" else "alone has"
        assert re.search(said, outcome.message)
        assert "run.full_optimizer_state_dict()" in outcome.message


def handed_on() -> None:
    """What stands for state on other ranks is in no state dict, and loading and copies do not mind it."""
    _, (muon, _), run = trained("muon", "muon")
    own = muon.state_dict()
    assert all(own["state"].values())
    muon.load_state_dict(own)
    assert all(type(kept) is dict for kept in copy.deepcopy(muon.state).values())
    whole = run.full_optimizer_state_dict(muon)
    assert run.rank or [set(kept) for kept in whole["state"].values()] == [{"momentum_buffer"}] * 3
    muon.step()
    run.close()
    assert all(kept["momentum_buffer"].shape == p.shape for p, kept in muon.state.items())


def test_what_stands_for_state_of_others_is_not_handed_on() -> None:
    ranks(2).run(handed_on)


def read_by_rules(split: str) -> tuple[int, list[bool]]:
    """How often a rule was asked, and whether what was read is right."""
    asked, kind, known = [], dtensor.ShardedDTensor, dispatch_rules._by_class

    def counted(kind: Any, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return known(kind, func, *rest)

    before = dispatch_rules._rules.pop(kind, None)
    _without_rules()
    dispatch_rules._by_class, dispatch_rules._rules[kind] = counted, set()
    try:
        model = Shaped()
        plain = [param.detach().clone() for param in model.parameters()]
        zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3, split=split)  # type: ignore[arg-type]
        pairs = list(zip(model.parameters(), plain, strict=True))
        right = [torch.allclose(p.detach().mean(), value.mean()) for p, value in pairs]
        right += [torch.equal(p.full_tensor(), value) for p, value in pairs]  # type: ignore[operator]
        norms = [norm.full_tensor() for norm in torch._foreach_norm([p.detach() for p, _ in pairs])]  # type: ignore[attr-defined]
        right += [torch.allclose(norm, value.norm()) for norm, (_, value) in zip(norms, pairs, strict=True)]
    finally:
        _without_rules()
        dispatch_rules._by_class = known
        del dispatch_rules._rules[kind]
        if before is not None:
            dispatch_rules._rules[kind] = set()
            dispatch_rules.renew()
    return len(asked), right


def _without_rules() -> None:
    for entry in singleton._data.values():
        entry.torch_dispatch_rules._data.pop(dtensor.ShardedDTensor, None)


@pytest.mark.parametrize("split", ["rows", "level", "whole"])
def test_where_torch_asks_no_subclass_it_finds_rules_for_every_operation(split: str) -> None:
    """Torch 2.11 computes with DTensors in C++, past the hooks of a subclass."""
    for count, right in ranks(2).run(read_by_rules, split):
        assert count > 0
        assert right
        assert all(right)


class Unasked(Tensor):
    """Torch makes plain tensors of it without asking."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def test_a_torch_that_asks_neither_subclass_nor_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_rules, "_rules", {})
    monkeypatch.setattr(dispatch_rules, "renew", lambda: None)
    with pytest.raises(zs.StateError, match=r"without asking the subclass.*Take torch 2.11 to 2.15"):
        dispatch_rules.be_asked(torch.ones(2).as_subclass(Unasked))
