"""Loops written for torch's DistributedDataParallel, under ours, against the same under torch's."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_case import (
    Found,
    Net,
    all_joined,
    all_loops,
    divided,
    ended,
    made_late,
    resumed,
    saved,
    saved_by_first,
    saved_by_one,
    unlike,
    wrapped,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

import zeroshard as zs
from zeroshard.extend import keep_own_state, read_own_state
from zeroshard.parallel import DistributedDataParallel
from zeroshard.testing import assert_losses, ranks

STAGES = [0, 1, 2, 3]
EXAMPLES = Path(__file__).parents[2] / "examples"
STATISTICS = ("running_mean", "running_var", "seen")


def assert_same(got: list[Found], want: list[Found], within: float = 0.0, statistics: bool = False) -> None:
    """Losses and states; of ranks but the first without `statistics`, which until the next forward are a
    rank's own, and in a state dict rank 0's."""
    for rank, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert_losses(mine["losses"], theirs["losses"], within)
        for ours, expected in zip(mine["states"], theirs["states"], strict=True):
            assert list(ours) == list(expected)
            for key, value in expected.items():
                if not rank or statistics or not key.endswith(STATISTICS):
                    torch.testing.assert_close(ours[key], value, rtol=0, atol=within)


def named(all_of_them: list[dict[str, Found]], name: str) -> list[Found]:
    return [of_rank[name] for of_rank in all_of_them]


@pytest.fixture(scope="module")
def torchs() -> list[dict[str, Found]]:
    return ranks(2).run(all_loops, None)


@pytest.fixture(scope="module")
def joins() -> list[dict[str, Found]]:
    return ranks(2).run(all_joined, None)


@pytest.fixture(scope="module")
def lates() -> list[dict[str, Found]]:
    return ranks(2).run(made_late, None)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_losses_and_weights_equal_those_of_torch(stage: int, torchs: list[dict[str, Found]]) -> None:
    """Bit for bit, but where the norm is summed in another order."""
    got = ranks(2).run(all_loops, stage)
    for name in torchs[0]:
        assert_same(named(got, name), named(torchs, name), 1e-6 if name == "clipped" and stage else 0.0)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_run_out_of_batches(stage: int, joins: list[dict[str, Found]]) -> None:
    got = ranks(2).run(all_joined, stage)
    for name in got[0]:
        assert_same(named(got, name), named(joins, name), 1e-6, statistics=True)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_that_are_made_late(stage: int, lates: list[dict[str, Found]]) -> None:
    got = ranks(2).run(made_late, stage)
    for name in lates[0]:
        assert_same(named(got, name), named(lates, name))


@pytest.mark.ranks
def test_whole_states_go_between_both_wrappers(tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    want = ranks(2).run(saved, None, path)
    tail = [{**found, "losses": found["losses"][2:]} for found in want]
    for stage in (1, 3):
        assert_same(ranks(2).run(resumed, stage, path), tail)
    for stage in (2, 3):
        assert_same(ranks(2).run(saved, stage, path), want)
        assert_same(ranks(2).run(resumed, None, path), tail)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_under_torchs_wrapper_can_be_divided(stage: int, torchs: list[dict[str, Found]]) -> None:
    assert_same(ranks(2).run(divided, stage), named(torchs, "adam"))


# ---------------------------------------------------------------------- what cannot be


def refusal(function: Any, *args: Any) -> list[str]:
    """What all ranks say, none of which waits."""
    told = [f"{outcome.kind}: {outcome.message}" for outcome in ranks(2).attempt(function, *args)]
    assert not any("TimeoutError" in text for text in told), told
    return told


@pytest.mark.ranks
def test_a_rank_that_is_refused_takes_the_others_along() -> None:
    for who in (0, 1):
        told = refusal(partial(wrapped, who, stage=7))
        assert told[who] == "OptionError: stage=7 is not one of 0, 1, 2, 3."
        assert told[1 - who].startswith(
            "RankError: DistributedDataParallel() is refused on all 2 ranks because of rank "
        )
    assert all(
        "DistributedDataParallel(): ranks disagree about stage: missing on rank 0, 2 on rank 1." in text
        for text in refusal(partial(wrapped, 1, stage=2))
    )
    assert all(
        "ranks disagree about `weight`: (2, 2) torch.float32 on rank 0, (3," in t for t in refusal(unlike)
    )


@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "transport"), [(0, "auto"), (1, "auto"), (2, "auto"), (2, "gloo")])
def test_rank_0_alone_may_ask_for_the_state_below_stage_3(stage: int, transport: str) -> None:
    want = ranks(2).run(saved_by_first, None)
    assert_same(ranks(2).run(saved_by_first, stage, transport), want)


@pytest.mark.ranks
@pytest.mark.parametrize("then", ["forward", "barrier"])
@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 2, "precision": "bf16"}])
def test_a_state_that_one_rank_alone_asks_for(options: dict[str, Any], then: str) -> None:
    """Where it takes all ranks: an error at once, whatever the others do meanwhile."""
    told = ranks(2).attempt(partial(saved_by_one, then=then, **options))
    assert "state_dict() of a sharded model is put together by all ranks: write state = " in told[0].trace
    assert "TimeoutError" not in told[0].trace


@pytest.mark.ranks
def test_a_state_that_one_rank_alone_asks_for_after_parameters_were_written() -> None:
    told = ranks(2).attempt(saved_by_one, 2, "written")
    assert "of parameters that were loaded or written since the last step: call model.run.publish()" in (
        told[0].trace
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("throw", "rank 1 has run out of batches, and join(throw_on_early_termination=True) ends"),
        ("none", "rank 1 had no batch at all inside of join(), so it cannot keep the others company"),
        ("value", "the loop has changed gradients before optimizer.step(), and rank 1, which has run out"),
        ("closure", "optimizer.step(closure) inside of join(): ranks that have run out of batches cannot"),
        ("late", "this SGD was made after the model was divided for others, and join() depends on all"),
    ],
)
def test_ranks_that_cannot_be_kept_company(how: str, words: str) -> None:
    for text in refusal(ended, 2, how):
        assert words in text


def alone(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stag": 2}, r"has an option 'stag'; those of zs\.shard\(\) are stage"),
        ({"delay_all_reduce_named_params": []}, r"delay_all_reduce_named_params=…\) is not done here: a gra"),
        ({"mixed_precision": object()}, r'mixed_precision=…\) is not done here: pass precision="bf16"'),
        ({"bucket_cap_mb": 0}, r"bucket_cap_mb=0 is no number of MiB above zero"),
        (
            {"bucket_cap_mb": 2, "bucket_bytes": 5},
            r"bucket_bytes=5 contradicts what torch's arguments say, bu",
        ),
        ({"device_ids": [0, 1]}, r"device_ids=\[0, 1\]: a rank computes on one device"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(zs.OptionError, match=words):
        alone(**options)


def test_more_arguments_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(zs.OptionError, match=r"got 21 arguments without names: pass options by name"):
        DistributedDataParallel(nn.Linear(2, 2), None, None, 0, *[None] * 17)
    with pytest.raises(zs.OptionError, match=r"got broadcast_buffers= twice: by its place and by its name"):
        DistributedDataParallel(nn.Linear(2, 2), None, None, 0, True, broadcast_buffers=True)

    class Mesh:
        ndim = 2

    with pytest.raises(zs.OptionError, match=r"process_group= and device_mesh= say the same: pass one of"):
        alone(process_group=object(), device_mesh=Mesh())
    with pytest.raises(
        zs.OptionError, match=r"has 2 dimensions, and batches are divided over one: pass that"
    ):
        alone(device_mesh=Mesh())
    with pytest.raises(zs.ModelError, match=r"takes a module first, and not 3\."):
        DistributedDataParallel(3)  # type: ignore[arg-type]
    with pytest.raises(zs.ModelError, match=r"`weight` is uninitialised \(a lazy module\)\. Run one forward"):
        DistributedDataParallel(nn.LazyLinear(2))
    with pytest.raises(
        zs.ModelError, match=r"not needed for a module without a parameter that requires a gra"
    ):
        DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    ignoring = nn.Linear(2, 2)
    ignoring._ddp_params_and_buffers_to_ignore = ["bias"]  # type: ignore[assignment]
    with pytest.raises(
        zs.ModelError, match=r"`bias` is among the parameters that torch's wrapper shall igno"
    ):
        DistributedDataParallel(ignoring)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        zs.OptionError, match=r"output_device=None, and the model is on cpu: move it first, mo"
    ):
        alone(device_ids=[0])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(zs.StateError, match=r"before the ranks have met: call torch\.distributed\.init_proc"):
        alone()


def test_what_is_without_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zeroshard")
    model = alone(device_ids=[0], find_unused_parameters=True, static_graph=True, dim=1)
    for name in ("find_unused_parameters", "static_graph", "dim"):
        assert f"DistributedDataParallel({name}=…) is without effect: " in caplog.text
    assert "device_ids= and output_device= are without effect: there is no GPU here" in caplog.text
    assert (model.find_unused_parameters, model.static_graph, model.device_ids) == (True, True, None)
    model._set_static_graph()


def test_hooks_are_codecs() -> None:
    hooks: dict[Any, str] = {
        bf16_compress_hook: r'model, compress=zs\.Cast\("bfloat16"\)\)',
        powerSGD_hook: r"model, compress=zs\.LowRank\(\.\.\.\)\)",
        print: r"model, compress=zs\.Int8\(\)\)",
    }
    for hook, words in hooks.items():
        with pytest.raises(zs.OptionError, match=r"register_comm_hook\(.* is not done here: .*" + words):
            alone().register_comm_hook(None, hook)


def test_options_of_the_step_want_an_optimizer() -> None:
    model = alone(clip_norm=1.0)
    with pytest.raises(
        zs.StateError, match=r"clip_norm= acts on the state of optimizers, and none holds par"
    ):
        model(torch.ones(1, 2))
    with torch.no_grad():
        assert model(torch.ones(1, 2)).shape == (1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert model.run.stats().norm > 0
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        zs.StateError, match=r"this SGD was made after the model was divided for others, and c"
    ):
        other.step()
    model.run.close()


def test_the_state_of_one_rank_is_kept_first() -> None:
    run = zs.shard(nn.Linear(2, 2), stage=2)
    with pytest.raises(zs.StateError, match=r"of a run that was told to keep it: call zeroshard\.extend"):
        read_own_state(run)
    assert keep_own_state(run)
    assert list(read_own_state(run)) == ["weight", "bias"]
    run.close()


def test_one_process() -> None:
    """A wrapped model is whole before it trains, and a plain one after `close`."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net, stage=2)
    assert model.module is net
    assert list(model.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    optimizer = torch.optim.AdamW(model.parameters())
    with model.no_sync():
        model(torch.ones(4, 6)).sum().backward()
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    with model.join():
        model(torch.ones(4, 6)).sum().backward()
    assert model.run.stats().steps == 1
    model.run.close()


@pytest.mark.ranks
def test_join_over_nccl_at_stage_3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in refusal(joined_over_nccl):
        assert "join() at stage 3 over NCCL: a rank that has run out of batches would have to gather" in text


def joined_over_nccl() -> None:
    model = alone(stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zs.Run, "transport", "nccl")
        with model.join():
            optimizer.step()


# ---------------------------------------------------------------------- the scripts


def output(command: list[str]) -> str:
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.ranks
def test_a_script_changes_by_its_import(tmp_path: Path) -> None:
    script = EXAMPLES / "torch_ddp.py"
    plain = tmp_path / script.name
    text = script.read_text(encoding="utf-8")
    assert text.count("from zeroshard.parallel import") == 1
    text = text.replace("from zeroshard.parallel import", "from torch.nn.parallel import")
    # Torch's own may wait for ever in its destructor, once its process group is gone.
    plain.write_text(text.replace("    dist.destroy", "    del model, loss\n    dist.destroy"), "utf-8")
    run = [sys.executable, "-m", "zeroshard", "run", "--ranks", "2"]
    losses = [re.findall(r"epoch .*", output([*run, str(path)])) for path in (script, plain)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


SAVES = """
import torch
import torch.distributed as dist
from zeroshard.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2), stage=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "weights.pt")
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_a_script_whose_first_rank_alone_saves_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVES, encoding="utf-8")
    run = [sys.executable, "-m", "zeroshard", "run", "--ranks", "2", "script.py"]
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode != 0
    assert "write state = model.state_dict() on every rank, and torch.save(state, path)" in found.stderr
    assert not (tmp_path / "weights.pt").exists()


@pytest.mark.ranks
def test_a_script_changes_by_one_line() -> None:
    told = output([sys.executable, str(EXAMPLES / "torch_processes.py")])
    assert len(re.findall(r"rank [0-3], epoch \d: loss 1\.\d+", told)) == 40
