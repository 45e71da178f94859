"""`shard(limit=)`: a limit becomes a plan, the plan a run that keeps to it; plans that are repeated or
refused."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import weakref
from typing import Any

import plan_models
import pytest
import torch
from plan_models import case, measured_step
from torch import nn

import zeroshard as zs
from zeroshard.errors import OptionError
from zeroshard.layout.specs import TransportTraits
from zeroshard.planner.answer import problem_of
from zeroshard.planner.choice import choose
from zeroshard.runtime.plan_guard import divided
from zeroshard.testing import assert_bytes, ranks

STEPS = 20


def test_a_closed_run_holds_nothing_back() -> None:
    """Neither the run nor the trace of its planning keeps the model or the optimizer."""
    model, optimizer, batch = case("gpt")
    run = zs.shard(model, optimizer, limit="1GiB", batch=batch)
    measured_step(run, model, optimizer, batch)
    run.close()
    held = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(run)]
    del model, optimizer, run
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]


def test_a_limit_a_byte_too_small_is_told_from_what_is_needed() -> None:
    with torch.device("meta"):
        model = nn.Linear(16384, 16384)  # 1.0 GiB and a bias
    least = min(one.device for one in zs.plan(model, ranks=1, limit="1TiB", offload=None).candidates)
    with pytest.raises(zs.PlanError) as refused:
        zs.plan(model, ranks=1, limit=least - 1, offload=None)
    assert f"no plan fits {least - 1:,} bytes per device: the smallest" in str(refused.value)
    assert f"needs {least:,} bytes at" in str(refused.value)
    made = zs.plan(model, ranks=1, limit=least, offload=None)
    assert made.chosen.device == least
    with pytest.raises(zs.PlanError, match=r"no plan fits 3\.999 GiB per device.* needs 4\.000 GiB at"):
        zs.plan(model, ranks=1, limit=least - 2**20, offload=None)


def test_planning_leaves_a_module_that_is_used_twice_as_it_was() -> None:
    """`functional_call` leaves fake tensors in such a one."""
    twice, tied = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(twice, nn.Tanh(), twice, nn.BatchNorm1d(8), tied, nn.Linear(8, 8))
    model[5].weight = tied.weight
    before, buffers = list(model.parameters()), list(model.buffers())
    one = zs.plan(model, ranks=1, limit="1GiB", batch=torch.zeros(4, 8), loss=lambda out: out.mean())
    assert one.chosen.kinds["activations"] > 0
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))


def test_shards_of_large_segments_are_seen() -> None:
    mib = 1 << 20
    whole = {"total_size": 64 * mib, "blocks": [{"size": 64 * mib}]}
    small = {"total_size": 20 * mib, "blocks": [{"size": 4 * mib}, {"size": 16 * mib}]}
    cut = {"total_size": 64 * mib, "blocks": [{"size": 12 * mib}, {"size": 52 * mib}]}
    assert divided([whole, small]) == 0
    assert divided([whole, cut, small, cut]) == 128 * mib


def sweep(name: str, stride: int) -> list[tuple[int, str, int, int, str]]:
    """Limits from generous to impossible: each with the plan's label and bytes, and the bytes measured."""
    told = []
    for number in [*range(0, STEPS - 1, stride), STEPS - 1]:
        model, optimizer, batch = case(name)
        limit = int(plan_models.TOP[name] * 0.9**number)
        try:
            run = zs.shard(model, optimizer, limit=limit, batch=batch)
        except zs.PlanError as error:
            untouched = all(type(p) is nn.Parameter for p in model.parameters())
            told.append((limit, "", 0, 0, str(error) if untouched else ""))
            continue
        device, host = measured_step(run, model, optimizer, batch)
        assert run.plan is not None
        chosen = run.plan.chosen
        assert host == chosen.host
        resting = batch.nbytes + sum(b.nbytes for b in model.buffers())
        told.append((limit, chosen.label, chosen.device, device + resting, ""))
        run.close()
    return told


@pytest.mark.wide(3)
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "stride"), [("gpt", 1), ("resnet", 3), ("moe", 3)])
def test_limits_from_generous_to_impossible(name: str, stride: int) -> None:
    """Each trains within its limit, on bytes that were foreseen, or is refused before anything is touched."""
    labels = []
    for rank in ranks(2).run(sweep, name, stride):
        for limit, label, planned, measured, refusal in rank:
            if not label:
                assert "the smallest" in refusal
                assert "pass limit=" in refusal
            else:
                assert measured <= min(limit, planned * 1.001)
                assert_bytes(planned, measured, 0.001, label)
        labels = [label for _, label, *_ in rank]
    assert labels[0]
    assert not labels[-1]
    first_refused = labels.index("")
    assert not any(labels[first_refused:])  # what is refused at some limit is refused below it
    assert len(set(labels[:first_refused])) >= (6 if stride == 1 else 3), labels
    assert stride > 1 or any(" of " in label for label in labels)  # as few units recomputed as it takes


def just_below() -> list[tuple[str, int, int]]:
    """Three plans, each at 99 % of what the last one needs."""
    told, limit = [], plan_models.TOP["gpt"]
    for _ in range(3):
        model, optimizer, batch = case("gpt")
        run = zs.shard(model, optimizer, limit=limit, batch=batch)
        device, _ = measured_step(run, model, optimizer, batch)
        assert run.plan is not None
        told.append((str(run.plan.chosen.settings), limit, device))
        limit = int(run.plan.chosen.device * 0.99)
        run.close()
    return told


@pytest.mark.ranks
def test_at_99_percent_another_plan_is_chosen_that_fits() -> None:
    for rank in ranks(2).run(just_below):
        assert len({settings for settings, *_ in rank}) == 3
        assert all(device <= limit for _, limit, device in rank)


HOST, ALL, SOME = zs.Offload(), zs.Offload(parameters="host"), zs.Offload("auto", device_bytes=1_000_000)


@pytest.mark.parametrize(
    ("offload", "options"),
    [
        (HOST, {"clip_norm": 1.0}),
        (HOST, {"precision": "bf16", "recompute": True}),  # its gradients land on the host, for the loop
        (ALL, {"precision": "bf16", "clip_norm": 1.0}),
        (HOST, {"precision": zs.Precision("bfloat16", reduce="float32"), "clip_norm": 1.0}),
        (None, {"precision": zs.Precision("bfloat16", reduce="float32")}),
        (SOME, {"clip_norm": 1.0, "recompute": True}),
    ],
    ids=["state", "stepped", "all", "wide sums", "wide sums on the device", "some"],
)
def test_accumulated_gradients_beside_a_host_tier_are_foreseen(
    offload: zs.Offload | None, options: dict[str, Any]
) -> None:
    """All but the last backward of a step leave a whole gradient on the device, wherever its state rests."""
    model, optimizer, batch = case("gpt")
    whole = sum(p.numel() for p in model.parameters()) * (2 if options.get("precision") == "bf16" else 4)
    run = zs.shard(model, optimizer, limit="64MiB", micro_batches=3, batch=batch, offload=offload, **options)
    assert run.plan is not None
    chosen = run.plan.chosen
    device, host = measured_step(run, model, optimizer, batch, micro_batches=3)
    run.close()
    resting = batch.nbytes + sum(b.nbytes for b in model.buffers())
    assert (chosen.device, chosen.host) == (device + resting, host)
    assert chosen.kinds["arriving"] + chosen.kinds.get("gradients", 0) >= whole


class Words(nn.Module):
    """One tensor that is nearly all of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20_000, 16), nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).mean(1)).square().mean()


OPTIMIZERS: dict[str, Any] = {
    "AdamW": {},
    "Adam": {"weight_decay": 0.1},
    "SGD": {"lr": 0.1},
    "RAdam": {},
    "Adagrad": {"foreach": True},
    "Adadelta": {"foreach": True, "weight_decay": 0.1},
    "NAdam": {"foreach": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("factory", [Words, lambda: plan_models.MoE()], ids=["one large tensor", "many"])
def test_what_an_optimizer_makes_in_its_step_is_foreseen(factory: Any, name: str) -> None:
    """Loops make copies of the largest tensor, foreach of all of them: mostly not just one."""
    model, batch = factory(), torch.zeros(1, 2, dtype=torch.int64)
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    run = zs.shard(model, optimizer, limit="64MiB", batch=batch, offload=None)
    assert run.plan is not None
    planned = run.plan.chosen.device
    measured = 0
    for _ in range(3):  # after six steps RAdam makes more
        device, _ = measured_step(run, model, optimizer, batch)
        measured = max(measured, device + batch.nbytes)
    run.close()
    assert measured <= planned <= 1.05 * measured


def test_what_only_a_gpu_takes_can_be_planned_elsewhere() -> None:
    model = nn.Linear(64, 64)
    for given in ({"capturable": True}, {"capturable": True, "foreach": True, "lr": torch.tensor(0.1)}):
        optimizer = torch.optim.AdamW(model.parameters(), **given)
        made = zs.plan(model, optimizer, ranks=1, limit="1GiB", stage=0, offload=None)
        assert made.chosen.lasting["state"] == 2 * 4 * (64 * 64 + 64)


def beside_its_plan(ways: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Bytes of device and host tier, and how many more than planned."""
    told = []
    for way in ways:
        model, optimizer, batch = case("gpt")
        run = zs.shard(model, optimizer, limit="64MiB", batch=batch, **way)
        assert run.plan is not None
        device, host = measured_step(run, model, optimizer, batch)
        resting = batch.nbytes + sum(b.nbytes for b in model.buffers())
        told.append((device + resting - run.plan.chosen.device, host - run.plan.chosen.host))
        run.close()
    return told


@pytest.mark.ranks
def test_the_peak_of_two_ranks_is_foreseen_to_the_byte() -> None:
    """Whenever the peers come: gradients stay as long as it was planned, and squares of norms have a
    place."""
    clipped: dict[str, Any] = {"offload": HOST, "clip_norm": 1.0, "bucket_bytes": 50_000, "recompute": True}
    near: dict[str, Any] = {"offload": None, "bucket_bytes": 50_000}
    ways: list[dict[str, Any]] = [{"stage": stage, **way} for stage in range(4) for way in (near, clipped)]
    for rank in ranks(2).run(beside_its_plan, ways):
        assert rank == [(0, 0)] * len(ways)


def test_a_limit_holds_for_accumulated_gradients() -> None:
    """Three plans of three micro-batches, each at 99 % of what the last one needs; on one rank."""
    told, limit = set[str](), 2 * plan_models.TOP["gpt"]
    for _ in range(3):
        model, optimizer, batch = case("gpt")
        run = zs.shard(model, optimizer, limit=limit, batch=batch, micro_batches=3, clip_norm=1.0)
        device, _ = measured_step(run, model, optimizer, batch, micro_batches=3)
        assert run.plan is not None
        assert device <= limit
        told.add(str(run.plan.chosen.settings))
        limit = int(run.plan.chosen.device * 0.99)
        run.close()
    assert len(told) == 3


def test_the_plan_is_shown_and_its_figures_are_in_the_stats(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, batch = case("gpt")
    run = zs.shard(model, optimizer, limit="64MiB", host_limit="1GiB", batch=batch, machine="A100")
    shown = capsys.readouterr().err
    assert "chosen" in shown
    assert "Runner-up: " in shown
    measured_step(run, model, optimizer, batch)
    model(batch).backward()
    optimizer.step()
    stats = run.stats()
    assert run.plan is not None
    assert stats.planned["device"] == run.plan.chosen.device
    for kind in ("parameters", "gradients", "state", "gathered", "buckets", "host", "staging"):
        assert stats.peak[kind] == stats.planned[kind], kind
    run.close()


def kept_full(spare: int) -> tuple[list[str], str]:
    """A run that gathers all of its model at once, which no plan foresaw; what it says in three steps."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard").addHandler(handler)
    model, optimizer, batch = case("gpt")
    batch = batch[:1]
    options: Any = {"stage": 3, "offload": None, "bucket_bytes": 50_000, "recompute": True, "batch": batch}
    asked = problem_of(model, optimizer, ranks=2, limit="64MiB", **options).problem
    need = choose(dataclasses.replace(asked, traits=TransportTraits(overlaps=True))).chosen.device
    run = zs.shard(model, optimizer, limit=need + spare, **options)
    refused = ""
    try:
        with run.kept_full():
            model(batch)
    except zs.PlanError as error:
        refused = str(error)
        run.close = lambda: None  # type: ignore[method-assign]
    else:
        for _ in range(3):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return said, refused


@pytest.mark.ranks
def test_a_run_that_drifts_says_so_once() -> None:
    for said, refused in ranks(2).run(kept_full, 2**20):
        assert not refused
        assert len(said) == 1, said
        assert "drifts over its plan: gathered take" in said[0]


@pytest.mark.ranks
def test_a_run_out_of_memory_says_what_was_planned(caplog: pytest.LogCaptureFixture) -> None:
    """What a GPU's allocator calls when the limit refuses something."""
    model, optimizer, batch = case("gpt")
    run = zs.shard(model, optimizer, limit=plan_models.TOP["gpt"], batch=batch)
    guard = run._guard
    assert guard is not None
    with caplog.at_level("ERROR", "zeroshard"):
        guard.exceeded(2**30)
    assert "out of memory: the limit of 5.2 MiB has no room for 1.0 GiB more. Planned were" in caplog.text
    assert not guard.holds(0)  # no GPU is
    run.close()


def test_a_limit_is_never_exceeded() -> None:
    """Where the drift would exceed the limit itself, it is refused before it is allocated."""
    for _, refused in ranks(2).run(kept_full, 0):
        assert "more of gathered would make" in refused
        assert refused.endswith(". Nothing was allocated for them.")
        assert "and the limit is" in refused


def test_a_plan_is_repeated_or_refused(tmp_path: Any) -> None:
    model, optimizer, batch = case("moe")
    made = zs.plan(
        model, optimizer, ranks=1, limit="8MiB", batch=batch, precisions=(None, "bf16"), clip_norm=1.0
    )
    made.write(tmp_path / "plan.json")
    plan = zs.Plan.read(tmp_path / "plan.json")
    assert plan == made
    assert {c.precision for c in plan.candidates} == {"as it is", "bfloat16"}
    run = zs.shard(model, optimizer, plan=plan)
    assert run.options == zs.Options(**plan.options())
    assert run.plan == plan
    measured_step(run, model, optimizer, batch)
    run.close()
    model, optimizer, batch = case("moe")
    with pytest.raises(zs.PlanError, match=r"`head.weight` is absent in the plan|`words.weight` is float32"):
        zs.shard(nn.Sequential(nn.Linear(3, 3)), plan=plan)
    with pytest.raises(zs.PlanError, match=r"its optimizer is AdamW \(2 .*, and this one SGD \(0 mom"):
        zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    with pytest.raises(zs.PlanError, match=r"AdamW \(2 moments of .*, and this one AdamW \(3 moments of"):
        zs.shard(model, torch.optim.AdamW(model.parameters(), fused=True, amsgrad=True), plan=plan)
    with pytest.raises(zs.PlanError, match=r"its optimizer is AdamW .*, and this one AdamW"):
        zs.shard(model, torch.optim.AdamW([*model.parameters()][1:], fused=True), plan=plan)
    told = json.loads(made.to_json())
    told["ranks"] = 2
    with pytest.raises(zs.PlanError, match="it is for 2 ranks, and these are 1"):
        zs.shard(model, optimizer, plan=zs.Plan.from_json(json.dumps(told)))


def test_a_plan_is_not_repeated_with_a_step_that_takes_more() -> None:
    """A fused step makes no temporaries. One that does is taken where the plan has room for them."""
    model = nn.Linear(512, 512)

    def optimizer(**way: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **way)

    fused = zs.plan(model, optimizer(fused=True), ranks=1, limit="1GiB", offload=None)
    said = r"the step of AdamW makes 1.0 MiB of temporaries and would take 5.0 MiB, and the plan has"
    with pytest.raises(zs.PlanError, match=said + r" 4.0 MiB at its fullest \(fused=True makes none\)"):
        zs.shard(model, optimizer(foreach=True), plan=fused)
    with pytest.raises(zs.PlanError, match=r"the step of AdamW makes"):
        zs.shard(model, optimizer(foreach=False), plan=fused)
    roomy = zs.plan(model, optimizer(fused=True), ranks=1, limit="1GiB", batch=torch.zeros(4096, 512))
    away = zs.plan(model, optimizer(fused=True), ranks=1, limit="1GiB", offload=zs.Offload(), clip_norm=1.0)
    for plan in (fused, roomy, away, zs.plan(model, optimizer(foreach=True), ranks=1, limit="1GiB")):
        way = {"fused": True} if plan is fused else {"foreach": True}
        zs.shard(model, optimizer(**way), plan=plan).close()


def test_a_node_is_a_limit() -> None:
    """On the CPU device and host tier are one memory: what is moved from one to the other frees nothing."""
    model, optimizer, batch = case("gpt")
    need = zs.plan(model, optimizer, ranks=1, limit="64MiB", batch=batch, recompute=True).chosen.device
    with pytest.raises(zs.PlanError, match=r"per rank: the smallest .*host tier"):
        zs.shard(
            model, optimizer, memory_limit_per_node=need // 2, nodes=1, batch=batch, offload=zs.Offload()
        )
    plan = zs.plan(model, nodes=4, ranks_per_node=2, memory_limit_per_node="1GiB", batch=batch)
    assert (plan.ranks, plan.ranks_per_node, plan.limit) == (8, 2, 2**29)
    with pytest.raises(OptionError, match="nodes=2 does not make 7 ranks"):
        zs.plan(model, ranks=7, nodes=2, limit="1GiB")


def test_a_loss_of_the_users_own_is_traced() -> None:
    model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.zeros(50, 8)
    plain = zs.plan(model, optimizer, ranks=1, limit="1GiB", batch=batch)
    heavy = zs.plan(
        model, optimizer, ranks=1, limit="1GiB", batch=batch, loss=lambda out: out.repeat(1, 500).exp().sum()
    )
    assert heavy.chosen.kinds["activations"] > plain.chosen.kinds["activations"] + 50 * 8 * 500 * 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_limit": "1GiB"}, r"host_limit= is for a run that is planned: pass limit="),
        ({"plan": 3}, r"must be a zs.Plan"),
        ({"limit": "1GiB", "precision": "bf16", "precisions": ("bf16",)}, r"not both"),
        ({"limit": "1GiB", "memory_limit_per_node": "1GiB"}, r"needs one limit"),
        ({"limit": "1GiB", "nodes": 3}, r"nodes=3 does not make 1 ranks"),
        ({"limit": "1 parsec"}, r"is not a size"),
    ],
)
def test_misuse_is_told(options: dict[str, Any], said: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(OptionError, match=said):
        zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_a_plan_and_options_exclude_each_other() -> None:
    model = nn.Linear(3, 3)
    plan = zs.plan(model, ranks=1, limit="1GiB")
    with pytest.raises(OptionError, match="a plan says all: stage="):
        zs.shard(model, plan=plan, stage=2)
