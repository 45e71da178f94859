"""Lightning's scripts, sharded, against the same scripts under its own DDP."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixed
from lightning.pytorch.plugins import MixedPrecision
from lightning_case import (
    Averaged,
    Job,
    Net,
    Outcome,
    asked_by_name,
    averaged,
    by_hand,
    clipped,
    dropped,
    evaluated,
    finetuned,
    fitted_twice,
    from_meta,
    logged,
    looped,
    of_the_other_package,
    rate_found,
    refused,
    sent_to_others,
    shown,
    trained,
    two_models,
    without_optimizer,
)
from outcomes import assert_near

import zeroshard as zs
from zeroshard.testing import Ranks, assert_losses, assert_same_bits

pytestmark = pytest.mark.ranks
HOST = zs.Offload("host")


def assert_same(got: list[Outcome], want: list[Outcome]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.stage is not None, theirs.stage) == (True, None)
        assert ours.losses == theirs.losses
        assert ours.logged == theirs.logged
        assert_same_bits(ours.weights, theirs.weights)


@pytest.mark.parametrize("size", [1, 2])
def test_losses_metrics_and_weights_equal_those_of_ddp(pool: Ranks, alone: Ranks, size: int) -> None:
    """The last batch of an epoch is a smaller one."""
    ranks = pool if size == 2 else alone
    plain = ranks.run(trained, Job(None))
    for options in ({"stage": 0}, {"stage": 2}, {"stage": 3}):
        assert_same(ranks.run(trained, Job(options)), plain)
    hosted = ranks.run(trained, Job({"stage": 3, "offload": HOST}))[0]
    assert_losses(hosted.losses, plain[0].losses, 1e-6)


def test_accumulated_clipped_and_watched(pool: Ranks) -> None:
    plain = pool.run(clipped, None)[0]
    assert max(plain.norms) > 0.25
    for options in ({"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload": "host"}):
        ours = pool.run(clipped, options)[0]
        assert_near(ours, plain)
        assert ours.rates == plain.rates


def test_half_precision(pool: Ranks) -> None:
    """bf16 is as near to fp32 as autocast is; fp16 goes through Lightning's scaler, on CPUs too."""
    exact, cast = (pool.run(trained, Job(None, {"precision": kind}))[0] for kind in ("32-true", "bf16-mixed"))
    for options, kind in (({"stage": 3}, "bf16-mixed"), ({"stage": 2, "precision": "bf16"}, "32-true")):
        ours = pool.run(trained, Job(options, {"precision": kind}))[0]
        assert_losses(ours.losses, cast.losses, 4e-3)
        assert ours.losses != exact.losses
        assert all(weight.dtype == torch.float32 for weight in ours.weights.values())
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    half = pool.run(trained, Job({"stage": 2}, {"plugins": scaled, "gradient_clip_val": 5.0}))[0]
    assert_losses(half.losses, exact.losses, 4e-3)
    true = [pool.run(trained, Job(o, {"precision": "bf16-true"})) for o in ({"stage": 3}, None)]
    assert_same(*true)


def test_checkpoints_go_on_at_another_stage_and_number_of_ranks(
    pool: Ranks, alone: Ranks, tmp_path: Path
) -> None:
    longer, plain = Job(None, {"max_epochs": 4}), str(tmp_path / "plain.ckpt")
    whole = pool.run(trained, longer)
    first = pool.run(trained, Job(None, save=plain))[0]
    for stage, other in ((2, 3), (3, 0), (0, 2)):
        folder = str(tmp_path / f"{stage}.ckpt")
        pool.run(trained, Job({"stage": stage}, save=folder))
        for path in (folder, plain):
            rest = pool.run(trained, Job({"stage": other}, longer.trainer, resume=path))
            assert [outcome.losses for outcome in rest] == [outcome.losses[8:] for outcome in whole]
            assert_same_bits(rest[0].weights, whole[0].weights)
        ended = alone.run(trained, Job({"stage": 3}, resume=folder))[0]
        assert ended.losses == []
        assert_same_bits(ended.weights, first.weights)


def test_checkpoints_and_weights_of_one_file_are_plain_lightning_s(pool: Ranks, tmp_path: Path) -> None:
    file, longer = str(tmp_path / "whole.ckpt"), {"max_epochs": 4}
    whole = pool.run(trained, Job(None, longer))
    ours = pool.run(trained, Job({"stage": 3, "whole_checkpoints": True}, save=file))[0]
    read = Net.load_from_checkpoint(file, weights_only=False)
    assert_same_bits(dict(read.state_dict()), ours.weights)
    for options in (None, {"stage": 2}):
        rest = pool.run(trained, Job(options, longer, resume=file))[0]
        assert rest.losses == whole[0].losses[8:]
        assert_same_bits(rest.weights, whole[0].weights)


def test_evaluates_before_and_after_training(pool: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "trained.ckpt")
    pool.run(trained, Job({"stage": 2}, save=folder))
    file = str(tmp_path / "file.ckpt")
    pool.run(trained, Job(None, save=file))
    plain = pool.run(evaluated, None, file)[0]
    for stage, path, sharded_at in ((0, folder, 0), (2, file, 0), (3, folder, 3)):
        assert pool.run(evaluated, {"stage": stage}, path)[0] == (plain[0], sharded_at)


def alike(got: Averaged, want: Averaged) -> None:
    assert (got.losses, got.logged, got.best, got.files, got.rates) == (
        want.losses,
        want.logged,
        want.best,
        want.files,
        want.rates,
    )
    assert_same_bits(got.weights, want.weights)


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_callbacks_that_average_save_stop_and_log(pool: Ranks, tmp_path: Path, kind: str) -> None:
    plain, last = str(tmp_path / "plain"), "last.ckpt"
    begun = pool.run(averaged, None, kind, plain)[0]
    ended = pool.run(averaged, None, kind, f"{plain}-rest", str(Path(plain, last)), 5)[0]
    assert len(begun.files) == 3
    for stage, other in ((2, 3), (3, 2)):
        folder = str(tmp_path / f"{stage}")
        alike(pool.run(averaged, {"stage": stage}, kind, folder)[0], begun)
        rest = pool.run(averaged, {"stage": other}, kind, f"{folder}-rest", str(Path(folder, last)), 5)[0]
        alike(rest, ended)


def test_averages_and_masters_go_on_in_bf16(pool: Ranks, tmp_path: Path) -> None:
    """A checkpoint has all of an fp32 master; what a bf16 model shows would be half of it."""
    options, folders = {"stage": 3}, [str(tmp_path / name) for name in ("whole", "half", "rest")]
    whole = pool.run(averaged, options, "ema", folders[0], None, 5, "bf16-mixed")[0]
    first = pool.run(averaged, options, "ema", folders[1], None, 3, "bf16-mixed")[0]
    last = str(Path(folders[1], "last.ckpt"))
    rest = pool.run(averaged, options, "ema", folders[2], last, 5, "bf16-mixed")[0]
    assert first.losses + rest.losses == whole.losses
    assert_same_bits(rest.weights, whole.weights)


def test_layers_from_the_meta_device(pool: Ranks) -> None:
    _, _, state = pool.run(from_meta, {"stage": 0})[0]
    losses, weights, _ = pool.run(from_meta, None, state)[0]
    for stage in (0, 2, 3):
        ours = pool.run(from_meta, {"stage": stage})[0]
        assert ours[0] == losses
        assert_same_bits(ours[1], weights)


def test_several_optimizers_by_hand(pool: Ranks) -> None:
    plain = pool.run(by_hand, None)
    for stage in (0, 2, 3):
        assert_same(pool.run(by_hand, {"stage": stage}), plain)


def test_weights_that_a_callback_freezes_and_thaws(pool: Ranks, alone: Ranks) -> None:
    """Against one process with the whole batches: DDP does not reduce what was frozen when it began."""
    losses, weights = alone.run(finetuned, None, 8)[0]
    for stage in (0, 2, 3):
        both = pool.run(finetuned, {"stage": stage}, 4)
        means = [sum(each) / 2 for each in zip(*(of_rank[0] for of_rank in both), strict=True)]
        assert_losses(means, losses, 1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(both[0][1][name], value, rtol=0, atol=1e-6)


def test_the_tuner_goes_back_to_where_it_began(pool: Ranks, tmp_path: Path) -> None:
    plain, *ours = (
        pool.run(rate_found, options, str(tmp_path))[0] for options in (None, {"stage": 2}, {"stage": 3})
    )
    assert ours == [plain, plain]
    assert plain[2] == []


def test_fabric(pool: Ranks, tmp_path: Path) -> None:
    plain = str(tmp_path / "plain")
    begun = pool.run(looped, None, plain)[0]
    assert max(begun.norms) > 0.5
    hosted = {"stage": 3, "clip_norm": 0.5, "offload": HOST}
    for number, options in enumerate(({"stage": 0}, {"stage": 2}, {"stage": 3}, hosted)):
        path = str(tmp_path / f"{number}")
        assert_near(pool.run(looped, options, path, "", "32-true", number == 2)[0], begun)
    ended = pool.run(looped, None, "", plain)[0]
    for stage, name in ((3, "1"), (2, "3"), (0, "2"), (3, "plain")):
        ours = pool.run(looped, {"stage": stage}, "", str(tmp_path / name))[0]
        assert_near(ours, ended)
        assert (ours.step, ours.rest) == (4, {})
    weights = torch.load(tmp_path / "2.weights")["model"]
    for name, value in torch.load(tmp_path / "plain.weights")["model"].items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
    whole = str(tmp_path / "whole")
    pool.run(looped, {"stage": 3, "whole_checkpoints": True}, whole)
    assert_near(pool.run(looped, None, "", whole)[0], ended)


def test_fabric_in_half_precision(pool: Ranks) -> None:
    cast, exact = pool.run(looped, None, "", "", "bf16-mixed")[0], pool.run(looped, None)[0]
    ours = pool.run(looped, {"stage": 3}, "", "", "bf16-mixed")[0]
    assert_losses(ours.losses, cast.losses, 1e-2)
    assert ours.losses != exact.losses
    scaled = FabricMixed("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    assert_losses(pool.run(looped, {"stage": 2}, "", "", scaled)[0].losses, exact.losses, 1e-2)


def test_fabric_s_optimizers_drop_what_waits(pool: Ranks) -> None:
    plain = pool.run(dropped, None)[0]
    for stage in (0, 2, 3):
        assert torch.equal(pool.run(dropped, {"stage": stage})[0], plain)


def test_several_models_of_fabric_in_one_checkpoint(pool: Ranks, tmp_path: Path) -> None:
    first, second, third, fourth = pool.run(two_models, {"stage": 3}, str(tmp_path / "both"))[0]
    assert_same_bits(third, first)
    assert_same_bits(fourth, second)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", "OptionError: neither zs.shard() nor what it is called by here has an option 'stages'"),
        ("contradiction", "of Lightning and precision='fp16' of the strategy say different things: pass"),
        ("no scaler", "OptionError: precision='fp16' needs a GradScaler, which Lightning makes"),
        ("engine", "OptionError: precision='transformer-engine' does not go with ZeroShard: pass one of"),
        ("clipped", "OptionError: gradient_clip_val=2.0 does not agree with clip_norm=1.0, by which the"),
        ("clipped by value", 'OptionError: gradient_clip_algorithm="value" has no gradients to clip'),
        ("norms of nothing", "StateError: grad_norm() has no gradients to look at: with clip_norm="),
        ("no norm", "OptionError: norm_type=0: pass a number above 0, or 'inf'."),
        ("elsewhere", "s3://somewhere/x.ckpt: each rank writes its rows into a folder that all ranks see"),
        ("not Trainer's", "was not saved by Trainer, which goes on from its own checkpoints only"),
        ("unpaired", "StateError: Linear was set up without its optimizer, so nothing is sharded"),
        ("unpaired, alone", "StateError: Linear was set up without its optimizer, so nothing is sharded"),
        ("paired twice", "ModelError: this SGD has no parameters of a model that waits for its optimizer"),
        ("loop clips", "OptionError: clip_gradients(…, max_norm=2.0, norm_type=2.0) does not agree with"),
        ("loop clips by value", "OptionError: clip_gradients(…, clip_val=) has no gradients to clip"),
        ("nobody's", "is a folder with rows of models and optimizers: pass those that were saved"),
        ("more", "has nothing by the name of 'epoch': take it out, or pass strict=False."),
    ],
)
def test_what_is_refused(alone: Ranks, tmp_path: Path, case: str, words: str) -> None:
    assert words in alone.run(refused, case, str(tmp_path / "saved"))[0]


def test_an_optimizer_that_trained_the_model_before(pool: Ranks) -> None:
    plain = pool.run(fitted_twice, None)
    for stage in (0, 2, 3):
        assert_same(pool.run(fitted_twice, {"stage": stage}), plain)


def test_models_without_an_optimizer(alone: Ranks, tmp_path: Path) -> None:
    for whole in (False, True):
        options = {"stage": 3, "whole_checkpoints": whole}
        losses, kinds, same = alone.run(without_optimizer, options, tmp_path / f"{whole}.ckpt")[0]
        assert (len(losses), same) == (2, True)
        assert kinds == (["PosixPath"] if whole else [])


def test_strategies_can_be_sent_to_ranks(alone: Ranks) -> None:
    assert alone.run(sent_to_others)[0] == ["ZeroShardStrategy", "ZeroShardFabricStrategy"]


def test_names_of_strategies(alone: Ranks) -> None:
    hosted = {"stage": 3, "offload": HOST}
    assert alone.run(asked_by_name)[0] == [
        "ZeroShardStrategy {'stage': 3}",
        f"ZeroShardStrategy {hosted}",
        "ZeroShardFabricStrategy {'stage': 2}",
        "ZeroShardStrategy {'stage': 1}",
    ]


def test_pytorch_lightning(pool: Ranks) -> None:
    (plain, none), (ours, stage) = (pool.run(of_the_other_package, sharded)[0] for sharded in (False, True))
    assert (none, stage) == (None, 3)
    assert ours == plain


def test_numbers_of_the_run_are_logged(pool: Ranks, tmp_path: Path) -> None:
    """Every second step, of the two steps since."""
    assert pool.run(logged, str(tmp_path))[0] == ["2", "2", "2", "2"]


def blocks() -> list[str]:
    guide = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", guide, re.DOTALL)


def test_the_page_s_loop(pool: Ranks, tmp_path: Path) -> None:
    pool.run(shown, blocks()[1], str(tmp_path))
    assert (tmp_path / "state" / "manifest.json").exists()


@pytest.mark.slow
def test_the_page_s_script_with_ranks_that_lightning_starts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(blocks()[0], encoding="utf-8")
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    ran = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout.count("32-true"), ran.stdout.count(" 32 steps")) == (2, 2), ran.stdout
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=False)["state_dict"]
    assert {name: value.shape for name, value in weights.items()} == {
        "layer.weight": (2, 32),
        "layer.bias": (2,),
    }


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_without_the_package_the_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"zeroshard.integrations.{package}"
    for fabric in ("lightning.fabric", "lightning_fabric"):
        monkeypatch.setitem(sys.modules, f"{fabric}.plugins.environments", None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"{name} needs the package"):
        importlib.import_module(name)


ALONE = """
import sys
import torch
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from zeroshard.integrations.lightning import ZeroShardStrategy


class Fewer(torch.utils.data.IterableDataset):
    def __iter__(self):
        for _ in range(9 - 6 * torch.distributed.get_rank() * (sys.argv[1] == "fewer batches")):
            yield torch.ones(32)


class Fails(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        if sys.argv[1] == "an error" and trainer.global_step == 2 and trainer.global_rank == 1:
            raise ValueError("said by a callback")


callbacks = [Fails(), pl.callbacks.OnExceptionCheckpoint("saved")]
strategy = ZeroShardStrategy(stage=3, timeout=300)
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False, callbacks=callbacks
)
trainer.fit(BoringModel(), torch.utils.data.DataLoader(Fewer()))
"""


@pytest.mark.wide(2)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("an error", "said by a callback"),
        ("fewer batches", r"had ended or closed its run|ranks wait for different things and none can go on"),
    ],
)
def test_what_one_rank_does_ends_all(tmp_path: Path, case: str, words: str) -> None:
    (tmp_path / "script.py").write_text(ALONE, encoding="utf-8")
    launch = [sys.executable, "-m", "zeroshard", "run", "--ranks", "2", "script.py", case]
    ran = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode != 0
    assert re.search(words, ran.stderr), ran.stderr
    assert not list(tmp_path.glob("saved/*"))
    assert "no checkpoint is written to" in ran.stderr
