"""Trainer's scripts, sharded, against the same scripts under Trainer's own DDP."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hf_case import Job, Outcome, engines, listening, resumed, shown, trained
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import zeroshard as zs
from zeroshard.integrations import hf as zhf
from zeroshard.integrations.options import parse_options
from zeroshard.testing import Ranks, assert_losses, assert_same_bits

pytestmark = pytest.mark.ranks
HOST = zs.Offload("host")
ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}


def assert_same(got: Outcome, want: Outcome) -> None:
    assert got.stage is not None
    assert want.stage is None
    assert got.losses == want.losses
    assert got.norms == pytest.approx(want.norms, rel=1e-6)
    assert_same_bits(got.weights, want.weights)


def assert_near(got: Outcome, want: Outcome, within: float = 1e-6) -> None:
    assert got.stage is not None
    assert want.stage is None
    assert_losses(got.losses, want.losses, within)
    assert got.norms == pytest.approx(want.norms, rel=within * 10)


@pytest.mark.parametrize("size", [1, 2])
def test_losses_and_weights_equal_those_of_ddp(pool: Ranks, alone: Ranks, size: int, tmp_path: Path) -> None:
    """The last batch of an epoch is a smaller one."""
    ranks = pool if size == 2 else alone
    plain = ranks.run(trained, str(tmp_path), Job(None, rows=30))[0]
    for options in ({"stage": 0}, {"stage": 2}, {"stage": 3}):
        assert_same(ranks.run(trained, str(tmp_path), Job(options, rows=30))[0], plain)
    assert_near(ranks.run(trained, str(tmp_path), Job({"stage": 3, "offload": HOST}, rows=30))[0], plain)


def test_accumulated_and_clipped(pool: Ranks, tmp_path: Path) -> None:
    plain = pool.run(trained, str(tmp_path), Job(None, ACCUMULATED))[0]
    assert max(plain.norms) > 0.5
    for options in ({"stage": 2}, {"stage": 3}, {"stage": 3, "offload": HOST}):
        assert_near(pool.run(trained, str(tmp_path), Job(options, ACCUMULATED))[0], plain)


def test_evaluates_keeps_the_best_and_saves_what_from_pretrained_reads(pool: Ranks, tmp_path: Path) -> None:
    plain = pool.run(listening, str(tmp_path / "plain"), None)[0]
    for stage in (2, 3):
        ours = pool.run(listening, str(tmp_path / f"{stage}"), {"stage": stage})[0]
        assert_same(ours, plain)
        assert ours.history == plain.history
    for name in ("plain", "2", "3"):
        read = AutoModelForCausalLM.from_pretrained(tmp_path / name / "last")
        assert_same_bits(dict(read.state_dict()), plain.weights)
        assert (tmp_path / name / "last" / "config.json").read_text() == (
            tmp_path / "plain" / "last" / "config.json"
        ).read_text()
        assert len(list((tmp_path / name).glob("checkpoint-*"))) == 2


def test_goes_on_at_another_stage_and_after_plain_trainer(pool: Ranks, tmp_path: Path) -> None:
    """With the same bits as if it had never stopped, in the middle of an epoch too."""
    saving = {"save_strategy": "steps", "save_steps": 1, "seed": 5}
    whole = pool.run(trained, str(tmp_path / "whole"), Job(None, saving))[0]
    pool.run(trained, str(tmp_path / "plain"), Job(None, saving, stop=3))
    pool.run(trained, str(tmp_path / "ours"), Job({"stage": 3}, saving, stop=3))
    for folder, stage in (("ours", 0), ("ours", 3), ("plain", 2)):
        resume = str(tmp_path / folder / "checkpoint-3")
        rest = pool.run(trained, str(tmp_path / "rest"), Job({"stage": stage}, saving, resume=resume))[0]
        assert rest.losses == whole.losses
        assert_same_bits(rest.weights, whole.weights)


def test_goes_on_with_other_ranks(pool: Ranks, alone: Ranks, tmp_path: Path) -> None:
    """A step keeps its rows, and rows that were trained are skipped: as plain Trainer on as many ranks does
    it whose batches are cut so from the start."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = pool.run(trained, str(tmp_path / "whole"), Job(None, saving))[0]
    pool.run(trained, str(tmp_path / "two"), Job({"stage": 3}, saving, stop=6))
    resume = str(tmp_path / "two" / "checkpoint-6")
    rest = alone.run(trained, str(tmp_path / "one"), Job({"stage": 2}, saving, resume=resume))[0]
    assert len(rest.losses) == 8
    assert_near(rest, whole, 1e-5)
    resume, cut = str(tmp_path / "one" / "checkpoint-7"), saving | {"per_device_train_batch_size": 16}
    assert_near(
        pool.run(trained, str(tmp_path / "again"), Job({"stage": 3}, cut, resume=resume))[0], whole, 1e-5
    )


@pytest.mark.parametrize(
    ("now", "rows", "kept"),
    [
        ((1, 4, 1), 8, (1, 4, 2)),
        ((4, 4, 1), 8, (4, 2, 1)),
        ((2, 3, 1), 8, (2, 2, 2)),
        ((2, 16, 4), 24, (2, 12, 1)),
        ((3, 4, 1), 8, None),
        ((16, 4, 1), 8, None),
    ],
)
def test_the_rows_of_a_step(now: tuple[int, ...], rows: int, kept: tuple[int, ...] | None) -> None:
    assert zhf._Batch(*now).for_rows(rows) == (kept and zhf._Batch(*kept))


AUTO = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
AUTO |= {"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}


@pytest.mark.parametrize(
    ("options", "keywords", "words"),
    [
        ({}, {"deepspeed": AUTO, "max_grad_norm": 0.5}, "clip_norm=0.5, stage=2"),
        ({"stage": 2}, {"deepspeed": AUTO, "bf16": True}, "precision='bf16', stage=2"),
        ({}, {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, "stage=2"),
        ({}, {"fsdp": "full_shard auto_wrap offload"}, "clip_norm=inf, stage=3"),
        (
            {},
            {"fsdp": "hybrid_shard"},
            "there is no equivalent of 'hybrid_shard' here; pass stage=.",
        ),
        (
            {},
            {"fsdp": True, "fsdp_config": {"xla": True}},
            "OptionError: fsdp_config has xla, which is for",
        ),
        (
            {},
            {"fsdp": True, "fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}},
            "OptionError: fsdp_config: there is no equivalent of HYBRID_SHARD: ranks shard",
        ),
        (
            {},
            {"fsdp": True, "deepspeed": AUTO},
            "OptionError: TrainingArguments have deepspeed= and fsdp=: ",
        ),
        ({"stage": 3}, {"deepspeed": AUTO}, "OptionError: stage=3, and the deepspeed= or fsdp= of Training"),
        (
            {},
            {"deepspeed": AUTO | {"train_batch_size": 64}},
            "deepspeed= says train_batch_size=64, and TrainingArguments rows of a step=4: make them equal",
        ),
        (
            {},
            {"deepspeed": AUTO | {"scheduler": {"type": "WarmupLR"}}},
            "says scheduler.type='constant_with_warmup', and TrainingArguments lr_scheduler_type='linear'",
        ),
        (
            {},
            {"deepspeed": AUTO | {"pipeline": {"stages": 2}}},
            "OptionError: deepspeed={...}: there is no equivalent of pipeline={'stages': 2}",
        ),
    ],
)
def test_arguments_that_ask_for_other_engines(
    alone: Ranks, options: dict[str, Any], keywords: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """They are translated, or refused, and the engine is not imported: it is not installed."""
    assert words in alone.run(engines, str(tmp_path), options, keywords)[0]


def test_what_is_refused(pool: Ranks, alone: Ranks, tmp_path: Path) -> None:
    told = alone.run(engines, str(tmp_path), {"stage": 2}, {}, True)[0]
    assert "these TrainingArguments have fsdp= and were made before" in told
    folder, saving = str(tmp_path / "out"), {"save_strategy": "steps", "save_steps": 2}
    pool.run(trained, folder, Job({"stage": 2}, saving | {"per_device_train_batch_size": 3}, stop=2))
    batch = Path(folder, "checkpoint-2", zhf.BATCH)
    batch.write_text(batch.read_text().replace('"ranks": 2', '"ranks": 3'))
    told = pool.run(resumed, folder, f"{folder}/checkpoint-2")
    had = "9 rows in a step (3 ranks, per_device_train_batch_size=3, gradient_accumulation_steps=1)"
    have = "32 rows in a step (2 ranks, per_device_train_batch_size=16, gradient_accumulation_steps=1)"
    assert set(told) == {
        f"OptionError: the checkpoint was trained with {had}, and 2 ranks have no equal shares of them: pass "
        f"ignore_data_skip=True to begin an epoch with {have}, or a number of ranks that divides 9."
    }
    assert set(pool.run(resumed, folder, f"{folder}/checkpoint-2", True)) == {"2 steps"}
    Path(folder, "checkpoint-2", "zeroshard").rename(tmp_path / "elsewhere")
    told = pool.run(resumed, folder, f"{folder}/checkpoint-2", True)
    assert all("has no folder 'zeroshard', in which the state of its optimizer was" in text for text in told)


UNCHANGED = """
import sys
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if args.process_index == 1:
            raise ValueError("a mistake of the user's")


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = args.process_index == 1


model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
rows = [{"input_ids": row, "labels": row} for row in [[1, 2, 3, 4]] * 8]
arguments = TrainingArguments("out", max_steps=2, use_cpu=True, report_to=[])
Trainer(model, arguments, train_dataset=rows).train()
if sys.argv[1:] == ["sharded"]:
    from zeroshard.integrations.accelerate import run_of

    print(run_of(model).options.stage, run_of(model).size, "ranks")
"""


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "zeroshard.integrations.hf")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'zeroshard\[hf\]'"):
        __import__("zeroshard.integrations.hf")


@pytest.mark.slow
def test_a_script_that_knows_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNCHANGED)
    launch = [sys.executable, "-m", "zeroshard", "run", "--ranks", "2", "--hf", "stage=3,offload=host"]
    done = subprocess.run(
        [*launch, "train.py", "sharded"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "3 2 ranks" in done.stdout
    assert "had no effect" not in done.stderr
    (tmp_path / "fails.py").write_text(UNCHANGED.replace("rows)", "rows, callbacks=[Fails()])"))
    done = subprocess.run([*launch, "fails.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert re.search(r"rank 1 (exited with code 1:|raised) ValueError: a mistake of the user's", done.stderr)
    (tmp_path / "stops.py").write_text(UNCHANGED.replace("rows)", "rows, callbacks=[Stops()])"))
    done = subprocess.run([*launch, "stops.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0  # ours, or gloo's where both ranks are in collectives of Trainer's own
    told = "had ended or closed its run|ranks wait for different things|distributed collective mismatch"
    assert re.search(told, done.stderr), done.stderr
    (tmp_path / "none.py").write_text("")
    done = subprocess.run([*launch, "none.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stderr == (
        "zeroshard: --hf stage=3,offload=host had no effect: the script imports neither transformers.Trainer "
        "nor accelerate.\n"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("stage", "'stage' is no option with its value: type stage=3 or offload=host"),
        ("stage=3,stage=2", "stage= stands there twice"),
        ("stages=3", "has an option 'stages'"),
        ("offload=moon", "Offload.optimizer='moon' is not one of"),
    ],
)
def test_options_that_are_typed_wrongly(words: str, text: str) -> None:
    with pytest.raises(zs.OptionError, match=text):
        parse_options([words])


def test_options_are_all_that_shard_takes_by_name() -> None:
    named = parse_options(["weights=folder,device=cpu,timeout=30,limit=20GiB,stage=3"])
    assert named == {"weights": "folder", "device": "cpu", "timeout": 30, "limit": "20GiB", "stage": 3}


def test_what_the_page_shows(pool: Ranks, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert pool.run(shown, str(tmp_path), first, second) == ["ZeroShardTrainer", "ZeroShardTrainer"]
    GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "last")
