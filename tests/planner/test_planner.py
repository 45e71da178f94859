"""The planner: traces against real steps, choices, refusals with advice, and plans that survive JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import models
import pytest
import torch
from plan_models import assert_a_step_holds
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from zeroshard.errors import OptionError
from zeroshard.layout.memory import MemoryModel, StepSegment, peak_of, step_moments
from zeroshard.layout.traffic import SentBytes, sent_by_rank
from zeroshard.machine import GPUS, machine
from zeroshard.options import Options
from zeroshard.planner.candidates import moments_of
from zeroshard.planner.choice import choose
from zeroshard.planner.plan import Plan
from zeroshard.planner.planning_problem import OpenChoices, PlannedStep, PlanningProblem, TierLimits
from zeroshard.planner.signatures import ExampleInputs, blocks_of, rules_of, tokens
from zeroshard.planner.trace import Tracer
from zeroshard.testing import PeakBytes, assert_bytes, ranks

GIB = 2**30


class Huge(nn.Module):
    """A transformer of any size, which exists on the meta device only."""

    def __init__(self, width: int, layers: int, vocabulary: int = 51200) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(models.Block(width, width // 128, 4 * width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Convolutions(nn.Module):
    """Blocks that differ, with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in ((3, 8), (8, 8), (8, 16))
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3))).square().mean()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.layers = kind(6, 10, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(20 if options.get("bidirectional") else 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0]).square().mean()


CASES: list[tuple[Any, Tensor, bool]] = [
    (partial(models.GPT, even=True, blocks=4), torch.zeros(8, 11, dtype=torch.int64), False),
    (partial(models.GPT, even=True, blocks=4), torch.zeros(8, 11, dtype=torch.int64), True),
    (Convolutions, torch.zeros(4, 3, 16, 16), False),
    (Convolutions, torch.zeros(4, 3, 16, 16), True),
    (Recurrent, torch.zeros(4, 9, 6), False),
    (partial(Recurrent, bidirectional=True), torch.zeros(3, 21, 6), False),
    (partial(Recurrent, nn.GRU), torch.zeros(4, 9, 6), False),
    *(
        (lambda a=at_once, r=reentrant: Checkpointed(a, r), torch.zeros(4, 9, dtype=torch.int64), False)
        for at_once, reentrant in ((1, False), (2, False), (3, True))
    ),
]


def on_meta(factory: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = factory()
    return model


class Checkpointed(nn.Module):
    """Recomputes its blocks itself, so many at a time, below a head that dwarfs them."""

    def __init__(self, at_once: int, reentrant: bool = False) -> None:
        super().__init__()
        self.at_once, self.reentrant = at_once, reentrant
        self.tokens = nn.Embedding(1500, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 96), nn.SiLU(), nn.Linear(96, 32)) for _ in range(6)
        )
        self.head = nn.Linear(32, 1500)

    def _some(self, first: int, x: Tensor) -> Tensor:
        for block in self.blocks[first : first + self.at_once]:
            x = x + block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for first in range(0, len(self.blocks), self.at_once):
            x = checkpoint(partial(self._some, first), x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(("factory", "batch", "recompute"), CASES)
def test_a_trace_is_what_a_step_really_holds(factory: Any, batch: Tensor, recompute: bool) -> None:
    """Bytes of all tensors that the operations of a real step make, gradients let go as they arrive."""
    names = [unit.name for unit in blocks_of(on_meta(factory), None, "auto") if unit.name]
    segments = Tracer(on_meta(factory), names, lambda _: recompute, {}).run(ExampleInputs.of(batch), None)
    assert_a_step_holds(segments, factory(), batch, names if recompute else [])


def test_recomputation_saves_less_and_costs_a_forward() -> None:
    factory, batch = CASES[0][0], CASES[0][1]
    names = [f"blocks.{i}" for i in range(4)]
    plain, again = (
        Tracer(on_meta(factory), names, lambda _, r=r: r, {}).run(ExampleInputs.of(batch), None)  # type: ignore[misc]
        for r in (False, True)
    )
    assert [s.unit for s in plain] == ["", *names, ""]
    assert sum(s.saved for s in again) < sum(s.saved for s in plain) / 4
    assert [s.flops for s in again] == [s.flops for s in plain]
    for one, two in zip(plain, again, strict=True):
        # Without the last product: its result is not needed again.
        assert 0.5 * one.flops < two.back - one.back < one.flops if one.unit else two.back == one.back


def step(run: zs.Run, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, passes: int) -> None:
    for number in range(passes):
        with run.no_sync() if number < passes - 1 else nullcontext():
            model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_of_a_step(options: dict[str, Any], rows: int, passes: int) -> tuple[int, int]:
    """The most bytes of tensors that the operations of a step made, after two others; and the prediction."""
    model = models.GPT(even=True, blocks=6)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    setup = MemoryModel(units, Options(**options), 2, rules)
    compute = {name: getattr(torch, dtype) for name, (dtype, _) in setup.tensors.dtypes.items()}
    batch = torch.zeros(rows, 11, dtype=torch.int64)
    names = [unit.name for unit in units if unit.name]
    precision = setup.options.precision
    tracer = Tracer(model, names, setup.recomputed.__contains__, compute, precision=precision)
    segments = tracer.run(ExampleInputs.of(batch), None)
    run = zs.shard(model, optimizer, **options)
    moments = step_moments(dataclasses.replace(setup, rank=run.rank), segments, unsynced=passes > 1)
    for _ in range(2):
        step(run, model, optimizer, batch, passes)
    with PeakBytes() as peak:
        step(run, model, optimizer, batch, passes)
    run.close()
    return peak.most, max(m.kinds["arriving"] + m.kinds["activations"] + m.kinds["update"] for m in moments)


@pytest.mark.wide(3)
@pytest.mark.ranks
@pytest.mark.parametrize(("rows", "passes"), [(1, 1), (16, 1), (4, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2},
        {"stage": 3, "recompute": True, "bucket_bytes": 40000},
        {"stage": 3, "precision": zs.Precision("bfloat16", keep=("*norm*",))},
        {"stage": 2, "precision": zs.Precision("bfloat16", reduce="float32")},
    ],
)
def test_the_peak_of_a_sharded_step(options: dict[str, Any], rows: int, passes: int) -> None:
    """Activations, temporaries, and gradients that wait for their buckets, all at one moment; with several
    micro-batches also those that were not synchronised."""
    for measured, predicted in ranks(2).run(peak_of_a_step, options, rows, passes):
        assert_bytes(predicted, measured, 0.01, f"{options} {rows}")


def send(options: dict[str, Any], passes: int = 1) -> tuple[Any, SentBytes]:
    """What one step of a run sent, and what was predicted."""
    model = models.Tower(96, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    run = zs.shard(model, optimizer, **options)
    for count in range(3):
        if count == 2:
            before = run.stats()
        step(run, model, optimizer, torch.ones(2, 96), passes)
    sent, traits = run.stats() - before, run._runtime.transport.traits
    run.close()
    setup = MemoryModel(units, run.options, run.size, rules, traits=traits)
    return sent, sent_by_rank(setup, run.options.ranks_per_node, passes)


@pytest.mark.wide(2)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "passes"),
    [
        *[({"stage": stage}, 1) for stage in (0, 1, 2, 3)],
        ({"stage": 0, "compress": zs.LowRank(4)}, 1),
        ({"stage": 3, "compress": zs.TopK(0.1), "gather": zs.Int8()}, 1),
        ({"stage": 3, "gather": zs.Delta()}, 1),
        ({"stage": 0, "compress": zs.Int8(), "transport": "gloo", "ranks_per_node": 2}, 1),
        ({"stage": 2, "transport": "nodes", "ranks_per_node": 2}, 1),
        ({"stage": 3, "node_cache": True, "ranks_per_node": 2}, 1),
        ({"stage": 3, "node_cache": True, "ranks_per_node": 2}, 3),
        (
            {"stage": 3, "node_cache": True, "ranks_per_node": 2, "gather": zs.Int8(), "compress": zs.Int8()},
            1,
        ),
        ({"stage": 3}, 3),
        ({"stage": 3, "gather": {"*.bias": None, "*": zs.Delta()}}, 2),
        ({"stage": 1, "compress": zs.Int8()}, 2),
    ],
)
def test_bytes_sent_are_what_was_predicted(options: dict[str, Any], passes: int) -> None:
    for real, predicted in ranks(4 if "ranks_per_node" in options else 2).run(send, options, passes):
        for sent, said in ((real.sent, predicted.total), (real.between, predicted.between)):
            assert {kind for kind, count in sent.items() if count} == {kind for kind in said if said[kind]}
            for kind, count in said.items():
                assert_bytes(sent[kind], count, 0.03, kind)


# Choices.


def composed_of(segments: dict[bool, tuple[StepSegment, ...]], options: Options) -> tuple[StepSegment, ...]:
    again = options.recompute
    chosen = {s.unit for s in segments[True]} if again is True else set(again or ())
    return tuple(b if b.unit in chosen else a for a, b in zip(segments[False], segments[True], strict=True))


def problem(limit: float, blocks: int = 12, **changes: Any) -> PlanningProblem:
    model = on_meta(partial(Huge, 1024, blocks))
    segments = {
        again: tuple(
            StepSegment(unit.name, saved=(GIB // 64 if again else GIB // 4), backward=GIB // 2, flops=10**13)
            for unit in blocks_of(model, None, "auto")
        )
        for again in (False, True)
    }
    asked = PlanningProblem(
        "Huge", blocks_of(model, None, "auto"), rules_of(None), Options(precision="bf16"), 8,  # type: ignore[arg-type]
        TierLimits(int(limit * GIB)), machine("H100"),
        PlannedStep(lambda options: composed_of(segments, options)),
    )  # fmt: skip
    open_choices = {f.name for f in dataclasses.fields(OpenChoices)}
    chosen = {name: changes.pop(name) for name in open_choices.intersection(changes)}
    return dataclasses.replace(asked, **changes).allowing(**chosen)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "gather", [zs.Int8(), zs.Delta(zs.Int8()), {"*weight": zs.Int8(), "*": None}], ids=repr
)
def test_a_plan_counts_parameters_that_travel_through_a_codec(stage: Any, gather: Any) -> None:
    """As the layout does that a run is built from, which is compared with runs."""
    model = models.GPT(even=True, blocks=3)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    plain, coded = (
        zs.plan(model, optimizer, ranks=2, limit="1GiB", stage=stage, **options).chosen
        for options in ({}, {"gather": gather})
    )
    units, rules = blocks_of(model, [optimizer], "auto"), rules_of([optimizer])
    layout = MemoryModel(units, Options(stage=stage, gather=gather), 2, rules)
    assert coded.lasting == dataclasses.asdict(layout.held)
    assert coded.sent == sent_by_rank(layout).total
    assert sum(coded.sent.values()) < sum(plain.sent.values())
    assert coded.lasting["parameters"] > plain.lasting["parameters"], "the codes"


def test_a_generous_limit_changes_nothing() -> None:
    chosen = choose(problem(1000)).chosen
    assert (chosen.placing, chosen.recompute, chosen.fits) == ("device", 0, True)


def test_a_choice_is_the_fastest_that_fits_and_the_simplest_of_equals() -> None:
    plan = choose(problem(1000))
    fastest = min(one.step for one in plan.candidates if one.fits)
    equals = [one for one in plan.candidates if one.fits and one.step <= fastest * 1.01]
    assert plan.chosen.moving_parts == min(one.moving_parts for one in equals)


def descend() -> Iterator[Plan]:
    """The first plan, and then one for 99 % of what the last one needs, and so on."""
    limit = 1000.0
    while True:
        plan = choose(problem(limit, blocks=6))
        assert plan.chosen.device <= limit * GIB
        yield plan
        limit = plan.chosen.device * 0.99 / GIB


@pytest.mark.slow
def test_every_limit_down_to_the_impossible() -> None:
    """At 99 % of what a plan needs another one is chosen, which fits; in the end a refusal names the need."""
    made: list[Plan] = []
    with pytest.raises(zs.PlanError, match=r"per device: the smallest \(stage 3, "):
        made.extend(descend())
    assert len(made) == len({str(plan.chosen.settings) for plan in made}) >= 8
    labels = {plan.chosen.label for plan in made}
    assert any("of 6" in label for label in labels)  # as few units recomputed as it takes
    assert any("some on host" in label for label in labels)


def test_a_refusal_names_the_peak_and_what_would_fit() -> None:
    asked = problem(2.0, recomputes=(False,), stages=(3,), placings=("device",))
    with pytest.raises(zs.PlanError) as caught:
        choose(asked)
    text = str(caught.value)
    assert "backward of" in text
    assert "activations" in text
    assert "Sharding cannot shrink activations: allow recompute=True (estimated 1.19 s a step), or " in text
    advised = float(text.rpartition('limit="')[2].partition("GiB")[0])
    choose(asked.limited(device=int(advised * GIB)))  # what it says is true
    assert choose(asked.allowing(recomputes=(False, True))).chosen.recompute


def test_host_memory_is_a_limit_too() -> None:
    asked = problem(1000, placings=("state on host",)).limited(host=GIB // 8)
    with pytest.raises(zs.PlanError, match="of host memory per node"):
        choose(asked)
    plan = choose(asked.limited(host=100 * GIB))
    assert plan.chosen.host * 8 <= 100 * GIB


def test_the_timeline_ends_with_the_update_and_knows_its_peak() -> None:
    asked = problem(1000)
    moments = moments_of(asked, asked.way(3))
    assert [m.where for m in moments[:2]] == ["forward of the root", "forward of `blocks.0`"]
    assert moments[-1].where == "the update"
    assert moments[-1].kinds["activations"] == 0
    assert peak_of(moments).where.startswith("backward of ")
    assert peak_of(moments).total == max(m.total for m in moments)
    constant = {
        kind: {m.kinds[kind] for m in moments} for kind in ("parameters", "gradients", "state", "buckets")
    }
    assert all(len(values) == 1 for values in constant.values())


# The public function.


@pytest.mark.wide(2)
@pytest.mark.parametrize("world", [1024, 10_000])
def test_a_trillion_parameters(world: int) -> None:
    model = on_meta(partial(Huge, 25600, 128))
    plan = zs.plan(model, ranks=world, limit="120GiB", host_limit="2TiB", batch="1x2048", precision="bf16")
    assert plan.parameters > 1e12
    assert plan.chosen.stage == 3
    assert plan.imbalance < 0.01
    assert plan.options()["split"] == ("auto" if 25600 % world == 0 else "level")


def test_a_plan_is_whole_through_json_and_says_how_it_differs(tmp_path: Any) -> None:
    model = on_meta(partial(Huge, 256, 4, 1000))
    keep = zs.Precision(keep=("*norm*",))
    plan = zs.plan(model, ranks=4, limit="80GiB", batch="2x64", precision=keep, units="blocks.*")
    plan.write(tmp_path / "plan.json")
    again = zs.Plan.read(tmp_path / "plan.json")
    assert again == plan
    assert again.options()["precision"] == keep
    assert Options(**again.options()).stage == plan.chosen.stage
    assert plan.diff(again) == []
    other = zs.plan(model, ranks=8, limit="80GiB", batch="2x64", precision=keep, units="blocks.*")
    assert "ranks: 4 → 8" in plan.diff(other)
    plan.write(tmp_path / "plan.json")  # the same, as every rank of a job writes it
    with pytest.raises(zs.PlanError, match="exists and is not this plan, so it stays as it is"):
        other.write(tmp_path / "plan.json")
    assert zs.Plan.read(tmp_path / "plan.json") == plan
    other.write(tmp_path / "plan.json", overwrite=True)
    assert zs.Plan.read(tmp_path / "plan.json") == other
    with pytest.raises(zs.PlanError, match=r"the plan cannot be written to .*: Not a directory"):
        plan.write(tmp_path / "plan.json" / "x")
    assert "chosen" in str(plan)
    with pytest.raises(zs.PlanError, match="not a plan"):
        zs.Plan.from_json('{"format": 2}')


def test_a_plan_runs() -> None:
    """Planned on the meta device, carried out on a real model: the bytes are those of the plan."""
    chosen = zs.plan(on_meta(partial(models.GPT, even=True)), ranks=1, limit="1GiB", precision="bf16")
    model = models.GPT(even=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run = zs.shard(model, optimizer, **chosen.options())
    model(torch.zeros(2, 11, dtype=torch.int64)).backward()
    optimizer.step()
    live = run.stats().live
    for kind in ("parameters", "gradients", "state", "gathered", "buckets"):
        assert live[kind] == chosen.chosen.kinds[kind], kind
    run.close()


def test_what_the_user_says_is_kept_to() -> None:
    model = on_meta(partial(Huge, 256, 4, 1000))
    offload = zs.Offload(master="split")
    plan = zs.plan(model, ranks=4, limit="80GiB", batch="2x64", stage=2, offload=offload, recompute=True,
                   clip_norm=1.0, precision="bf16")  # fmt: skip
    assert {(c.stage, c.placing, c.recompute) for c in plan.candidates} == {(2, "state on host", 4)}
    assert plan.options()["offload"] == offload


def test_several_micro_batches_take_a_whole_gradient_and_as_many_passes() -> None:
    model = on_meta(partial(Huge, 256, 2, 100))
    asked: Any = {"ranks": 1, "limit": "64GiB", "batch": "64x64", "offload": zs.Offload(), "clip_norm": 1.0}
    one, four = (zs.plan(model, micro_batches=n, precision="bf16", **asked).chosen for n in (1, 4))
    whole = 2 * sum(p.numel() for p in model.parameters())
    head = 2 * 100 * 256  # at its fullest one pass has the gradient of the head too
    assert four.device - one.device == whole - head
    assert four.seconds["compute"] == pytest.approx(4 * one.seconds["compute"])


def test_models_of_other_kinds_are_planned() -> None:
    for factory, batch in ((Convolutions, torch.zeros(4, 3, 16, 16)), (Recurrent, torch.zeros(2, 5, 6))):
        plan = zs.plan(on_meta(factory), ranks=2, limit="1GiB", batch=batch)
        assert plan.chosen.kinds["activations"] > 0


def test_misuse_is_told() -> None:
    model = on_meta(partial(Huge, 256, 2, 100))
    with pytest.raises(OptionError, match="ranks=0"):
        zs.plan(model, ranks=0, limit="1GiB")
    with pytest.raises(OptionError, match=r"no option 'presicion'.*precision"):
        zs.plan(model, ranks=1, limit="1GiB", presicion="bf16")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="micro_batches=0 must be a number of micro-batches, 1 or more"):
        zs.plan(model, ranks=1, limit="1GiB", micro_batches=0)
    with pytest.raises(OptionError, match="8x2048"):
        tokens("8 by 2")
    with pytest.raises(zs.PlanError, match=r"inputs of shape \(3,\) cannot be traced"):
        zs.plan(model, ranks=1, limit="1GiB", batch=torch.zeros(3))
    with pytest.raises(OptionError, match='Did you mean "H100"'):
        machine("H10")
    assert machine("h200", 40e9, efficiency=0.5).network == 40e9
    assert all(m.source and m.half > m.full for m in GPUS.values())
