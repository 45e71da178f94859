"""Policies of `sync=` that cannot be, alone or with other options, are refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroshard as zs

CHOICES = zs.Adaptive(choices=[zs.EveryStep(compress=zs.TopK(ratio=0.2)), zs.EveryStep()])
APART = zs.Adaptive(choices=(zs.EveryStep(), zs.Local(steps=2)))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"stage": 3, "sync": zs.Local(steps=4)}, "stage=0"),
        ({"stage": 0, "sync": zs.Delayed(), "compress": zs.Int8()}, "needs stage 1, 2 or 3: .* Pass stage=1"),
        ({"stage": 0, "sync": zs.Delayed(), "transport": "nodes"}, "cross between nodes once for each. Pass"),
        ({"stage": 1, "sync": "delayed"}, "zs.Delayed()"),
        ({"sync": zs.Delayed(), "precision": "fp16"}, r'GradScaler divides .* Pass precision="bf16"'),
        ({"stage": 0, "sync": APART, "precision": "fp16"}, r"Adaptive\(\) that has Local\(\) beside .* fp16"),
        ({"stage": 0, "sync": zs.Local(steps=4), "offload": zs.Offload()}, "offload"),
        ({"sync": zs.EveryStep(compress=zs.Int8())}, "is a choice of Adaptive"),
        ({"sync": CHOICES, "offload": zs.Offload()}, "one way to the host"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(zs.OptionError, match=word):
        zs.Options(**options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: zs.Local(steps=0),
        lambda: zs.Local(steps=2, fragments=3),
        lambda: zs.Local(rates=(1.0, 0.0)),
        lambda: zs.Local(rates=0.5),
        lambda: zs.Nesterov(momentum=1.0),
        lambda: zs.Adaptive(choices=[zs.EveryStep()]),
        lambda: zs.Adaptive(choices=[zs.EveryStep(), "local"]),
    ],
)
def test_policies_are_checked_when_made(make: Any) -> None:
    with pytest.raises(zs.OptionError):
        make()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: zs.Delayed(warmup_steps=-1), r"Delayed\(warmup_steps=-1\): 0 or more is needed"),
        (lambda: zs.Delayed(warmup_steps=True), r"Delayed\(warmup_steps=True\): pass a whole number"),
        (
            lambda: zs.EveryStep(compress="int8"),
            r"EveryStep\(compress='int8'\): pass a codec such as zs.Int8",
        ),
        (lambda: zs.EveryStep(compress=zs.Int8), r"EveryStep\(compress=<class .*Int8'>\): pass a codec"),
        (lambda: zs.EveryStep(compress={"*": 8}), r"EveryStep\(compress=.* or a mapping from name patterns"),
        (
            lambda: zs.Adaptive(choices=[zs.EveryStep(), zs.Int8()]),
            r"Int8\(.*\) is no choice; list .* or for a codec EveryStep\(compress=\.\.\.\)",
        ),
        (
            lambda: zs.Adaptive(choices=[zs.EveryStep(), zs.Delayed(warmup_steps=2)]),
            r"warms up, and which choice is in force .* list EveryStep\(\) first",
        ),
    ],
)
def test_a_choice_or_a_warm_up_that_cannot_be_is_refused(make: Any, told: str) -> None:
    with pytest.raises(zs.OptionError, match=told):
        make()


@pytest.mark.parametrize(
    ("others", "numerics"),
    [
        ([zs.EveryStep(compress={"*": zs.Rows()})], "exact"),
        ([zs.EveryStep(compress=zs.Int8())], "rounding"),
        ([zs.EveryStep(compress={"*norm*": None, "*": zs.Int8()}), zs.Local(steps=4)], "approximate"),
        ([zs.EveryStep(compress=zs.TopK(ratio=0.1))], "approximate"),
        ([zs.Delayed()], "approximate"),
    ],
    ids=["rows", "int8", "local", "topk", "delayed"],
)
def test_a_choice_of_policies_is_as_exact_as_the_least_exact(others: list[Any], numerics: str) -> None:
    sync = zs.Adaptive(choices=[zs.EveryStep(), *others])
    assert sync.numerics == numerics
    assert zs.Options(stage=0, sync=sync).numerics == numerics


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"sync": zs.Delayed()}, r"sync=Delayed\(\).* Compute in bf16"),
        ({"sync": zs.Delayed(warmup_steps=3)}, r"sync=Delayed\(\).* Compute in bf16"),
        ({"stage": 0, "sync": APART}, r"an Adaptive\(\) that has Local\(\).* Compute in bf16"),
        ({"offload": zs.Offload(), "clip_norm": 1.0}, r"offload= and clip_norm=.* clip_grad_norm_\(\)"),
    ],
    ids=["delayed", "warm-up", "apart", "early"],
)
@pytest.mark.parametrize(("fused", "unscales"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_grad_scaler_that_cannot_divide_is_refused(
    options: dict[str, Any], word: str, fused: bool, unscales: bool
) -> None:
    """In the first step, before anything is updated; one that is switched off, or steps without it, go on,
    and after `close()` it works."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    run = zs.shard(model, optimizer, **options)
    before = model.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(zs.StateError, match=f"a GradScaler does not go with {word}"):
        scaler.step(optimizer)
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        off.scale(model(torch.ones(1, 3)).sum()).backward()
        off.step(optimizer)
    assert not torch.equal(model.weight, before)
    run.close()
    optimizer.zero_grad()
    again = torch.amp.GradScaler("cpu", init_scale=4.0)
    again.scale(model(torch.ones(1, 3)).sum()).backward()
    kept = model.weight.detach().clone()
    again.step(optimizer)
    assert not torch.equal(model.weight, kept)
