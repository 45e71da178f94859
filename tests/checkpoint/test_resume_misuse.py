"""Saving and loading at the wrong moment, into the wrong run, or with something forgotten."""

from __future__ import annotations

import math
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import whole_weights
from test_checkpoint_hostile import rewrite
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, MultiStepLR, SequentialLR

import zeroshard as zs
from zeroshard.checkpoint import PendingSave, import_weights
from zeroshard.testing import ranks


class Normed(nn.Module):
    """With persistent buffers and one that is not."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def made(width: int = 6, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Any, zs.Run]:
    torch.manual_seed(0)
    model = Normed(width)
    optimizer = kind(model.parameters(), lr=0.01)
    return model, optimizer, zs.shard(model, optimizer, **options)


def step(model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_buffers_and_step_counts_come_back(tmp_path: Path) -> None:
    model, optimizer, run = made()
    step(model, optimizer)
    run.save(tmp_path / "one")
    norm = model.layers[1]
    wanted = norm.running_mean.clone()
    step(model, optimizer, seed=1)
    assert not torch.equal(norm.running_mean, wanted)
    assert run.load(tmp_path / "one") == {}
    assert torch.equal(norm.running_mean, wanted)
    assert int(norm.num_batches_tracked) == 1
    assert run.stats().steps == 1
    run.close()


def test_state_that_the_host_was_not_built_for(tmp_path: Path) -> None:
    host = {"offload": zs.Offload(), "clip_norm": math.inf}
    model, optimizer, run = made(kind=partial(torch.optim.SGD, momentum=0.9), **host)
    step(model, optimizer)
    run.save(tmp_path / "momentum")
    run.close()
    _, _, run = made(kind=torch.optim.SGD, **host)
    said = r"has state `momentum_buffer` there, and the host update here was built without it\. Build the opt"
    with pytest.raises(zs.CheckpointError, match=said):
        run.load(tmp_path / "momentum")
    run.close()


def test_values_that_somebody_has_written(tmp_path: Path) -> None:
    model, optimizer, run = made()
    step(model, optimizer)
    run.save(tmp_path / "one")
    rewrite(tmp_path / "one", lambda data: data["values"].update(step="many"))
    with pytest.raises(zs.CheckpointError, match=r"values do not fit this run \(ValueError: .* Weights"):
        run.load(tmp_path / "one")
    run.close()


def test_a_checkpoint_before_the_first_step_takes_later_state_away(tmp_path: Path) -> None:
    """Also where the host keeps state from the beginning: no step, no moments."""
    for name, options in (
        ("device", {}),
        ("host", {"offload": zs.Offload(threads=1), "clip_norm": math.inf}),
    ):
        model, optimizer, run = made(**options)
        run.save(tmp_path / name)
        step(model, optimizer)
        first = whole_weights(run)
        run.load(tmp_path / name)
        step(model, optimizer)
        with run.gathered() as whole:
            assert all(torch.equal(whole[key], value) for key, value in first.items()), name
        run.close()


def test_retention_keeps_the_newest_and_latest_finds_it(tmp_path: Path) -> None:
    model, optimizer, run = made()
    assert zs.latest(tmp_path) is None
    for number in range(4):
        step(model, optimizer)
        run.save(tmp_path / f"step-{number}", keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2", "step-3"]
    assert zs.latest(tmp_path) == tmp_path / "step-3"
    run.close()


def test_accumulation_in_progress_is_refused(tmp_path: Path) -> None:
    model, optimizer, run = made()
    with run.no_sync():
        model(torch.ones(8, 4)).backward()
    with pytest.raises(
        zs.StateError, match=r"cannot save now \(rank 0\): gradients accumulated under run.no_sync"
    ):
        run.save(tmp_path / "early")
    assert not list(tmp_path.iterdir())
    optimizer.zero_grad()
    run.save(tmp_path / "now")
    with run.no_sync():
        model(torch.ones(8, 4)).backward()
    with pytest.raises(zs.StateError, match="cannot load now"):
        run.load(tmp_path / "now")
    optimizer.zero_grad()
    run.close()


def test_host_updates_under_way_are_refused(tmp_path: Path) -> None:
    model, optimizer, run = made(offload=zs.Offload(threads=1), clip_norm=math.inf)
    model(torch.ones(8, 4)).backward()
    with pytest.raises(zs.StateError, match=r"between backward .*and optimizer.step\(\)"):
        run.save(tmp_path / "early")
    optimizer.step()
    run.save(tmp_path / "now")
    run.close()


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer, run = made(width=5)
    step(model, optimizer)
    run.save(tmp_path / "other")
    run.close()
    model, optimizer, run = made(width=6)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        zs.CheckpointError, match=r"`layers.0.weight` \(parameter\) is \(5, 4\) float32 there and \(6, 4\)"
    ):
        run.load(tmp_path / "other")
    assert not optimizer.state
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    step(model, optimizer)
    run.close()


def test_a_missing_checkpoint_says_where_a_good_one_is(tmp_path: Path) -> None:
    _, _, run = made()
    run.save(tmp_path / "good")
    with pytest.raises(
        zs.CheckpointError, match=f"The latest complete checkpoint besides it is {tmp_path}/good"
    ):
        run.load(tmp_path / "gone")
    run.close()


def test_another_optimizer_is_refused_unless_it_may_begin_afresh(tmp_path: Path) -> None:
    model, optimizer, run = made(kind=torch.optim.RMSprop)
    step(model, optimizer)
    run.save(tmp_path / "rms")
    run.close()
    model, optimizer, run = made()
    with pytest.raises(zs.CheckpointError, match="was trained with RMSprop there and is with AdamW here"):
        run.load(tmp_path / "rms")
    run.load(tmp_path / "rms", strict=False)
    assert not optimizer.state
    step(model, optimizer)
    run.close()


def test_hyperparameters_and_schedulers_come_back(tmp_path: Path) -> None:
    model, optimizer, run = made()
    schedule = MultiStepLR(optimizer, [1, 3])
    for _ in range(2):
        step(model, optimizer)
        schedule.step()
    run.save(tmp_path / "two", schedulers=[schedule])
    run.close()
    model, optimizer, run = made()
    said = r"two does not fit this run: it holds 1 schedulers and 0 were given\. Pass to run\.load\(\) what"
    with pytest.raises(zs.CheckpointError, match=said):
        run.load(tmp_path / "two")
    later = MultiStepLR(optimizer, [1, 3])
    run.load(tmp_path / "two", schedulers=[later])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    assert later.state_dict() == schedule.state_dict()
    step(model, optimizer)
    later.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0001)
    run.close()


def test_a_scheduler_inside_another_comes_back_whole(tmp_path: Path) -> None:
    """It begins with its first step when its turn comes, and asks its counter for its milestones."""
    rates = []
    for cut in (False, True):
        model, optimizer, run = made()
        parts = [ConstantLR(optimizer, 0.5, 3), MultiStepLR(optimizer, [1, 2])]
        schedule = SequentialLR(optimizer, parts, [3])
        if cut:
            run.load(tmp_path / "two", schedulers=[schedule])
        for number in range(2 if cut else 0, 6):
            step(model, optimizer)
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if number == 1:
                run.save(tmp_path / "two", schedulers=[schedule])
        run.close()
    assert rates[6:] == rates[2:6] == pytest.approx([0.01, 0.001, 0.0001, 0.0001])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"extra": [1, 2]}, "extra= takes a dict, .* and this is a list"),
        (
            {"schedulers": torch.amp.GradScaler("cpu")},
            r"takes a list, .* GradScaler: pass schedulers=\[...\]",
        ),
        ({"scalers": [3]}, r"scalers=\[...\]: 3 has no state_dict"),
        ({"keep": "3"}, "keep='3' is no number of checkpoints to keep; pass 1 or more"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    _, _, run = made()
    with pytest.raises(zs.ZeroShardError, match=told):
        run.save(tmp_path / "one", **given)
    assert not list(tmp_path.iterdir())
    run.close()


def test_resume_says_what_it_goes_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, _, run = made()
    assert run.resume(tmp_path) is None
    assert "going on" not in caplog.text
    run.save(tmp_path / "step-1")
    run.resume(tmp_path)
    assert f"going on from {tmp_path / 'step-1'}" in [record.message for record in caplog.records]
    run.close()


def test_a_file_is_no_folder_to_resume_from(tmp_path: Path) -> None:
    _, _, run = made()
    (tmp_path / "file").write_text("")
    with pytest.raises(zs.CheckpointError, match="file is no folder: pass the folder that holds the check"):
        run.resume(tmp_path / "file")
    run.close()


class Tied(nn.Module):
    """One weight under two names, and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.again, self.head = self.inner, nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.inner(self.tokens(tokens)))).square().mean()


@pytest.mark.parametrize("dropped", ["", "tokens.weight", "head.weight"])
def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path, dropped: str) -> None:
    """State dicts of torch have all of them, safetensors files one of them."""
    torch.manual_seed(1)
    given = {name: value for name, value in Tied().state_dict().items() if name != dropped}
    kept = "head.weight" if dropped == "tokens.weight" else "tokens.weight"
    torch.save(given, tmp_path / "weights.pt")
    import_weights(tmp_path / "weights.pt", tmp_path / "imported")
    model = Tied()
    run = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3, precision="bf16")
    run.load(tmp_path / "imported")
    with run.gathered() as whole:
        assert torch.equal(whole["tokens.weight"], given[kept])
        assert torch.equal(whole["inner.weight"], given["again.weight"])
    run.close()


def test_two_values_for_a_tied_weight_are_refused(tmp_path: Path) -> None:
    given = Tied().state_dict()
    torch.save(given | {"head.weight": given["head.weight"] + 1}, tmp_path / "weights.pt")
    import_weights(tmp_path / "weights.pt", tmp_path / "imported")
    model = Tied()
    run = zs.shard(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(zs.CheckpointError, match=r"1 of its tensors are not in this run: `head.weight`"):
        run.load(tmp_path / "imported")
    run.close()


def test_other_parameter_groups_are_refused(tmp_path: Path) -> None:
    _, _, run = made()
    run.save(tmp_path / "one group")
    run.close()
    model = Normed()
    halves = [
        {"params": model.layers[0].parameters()},
        {"params": [*model.layers[1].parameters(), *model.layers[2].parameters()]},
    ]
    run = zs.shard(model, torch.optim.AdamW(halves))
    with pytest.raises(
        zs.CheckpointError, match=r"group 0 of AdamW has 2 parameters \(first `layers.0.weight`\)"
    ):
        run.load(tmp_path / "one group")
    run.close()


def test_a_failed_background_save_is_told_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = threading.enumerate()
    model, optimizer, run = made()
    (tmp_path / "file").write_text("in the way")
    pending = run.save(tmp_path / "file" / "below", background=True)
    assert isinstance(pending, PendingSave)
    step(model, optimizer)
    saved = run.save(tmp_path / "good")
    assert "file/below" in str(saved.after_failure)  # type: ignore[union-attr]
    assert "the background save" in caplog.text
    run.save(tmp_path / "last", background=True)
    run.close()
    assert zs.latest(tmp_path) == tmp_path / "last"
    assert not [t for t in threading.enumerate() if t.name.startswith("save") and t not in others]


def test_a_plain_model_reads_what_close_gave_back(tmp_path: Path) -> None:
    """What a checkpoint brings survives `close`: the optimizer goes on as a plain one."""
    model, optimizer, run = made()
    step(model, optimizer)
    run.save(tmp_path / "one")
    run.close()
    model, optimizer, run = made()
    run.load(tmp_path / "one")
    run.close()
    assert all(float(state["step"]) == 1.0 for state in optimizer.state.values())
    step(model, optimizer)


def save_apart(folder: Path) -> str:
    """Every rank saves to a path of its own."""
    _, _, run = made(stage=2)
    try:
        run.save(folder / f"of-{run.rank}")
    except zs.ZeroShardError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_ranks_that_save_to_different_paths_are_told(tmp_path: Path) -> None:
    for text in ranks(2).run(save_apart, tmp_path):
        assert f"rank 0: saving to {tmp_path}/of-0; rank 1: saving to {tmp_path}/of-1" in text


def own_buffers(folder: Path, buffers: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's batch statistics when saved, and after a load into a fresh run."""
    seen = []
    for number in range(2):
        model, optimizer, run = made(stage=2 + number, buffers=buffers)
        if number:
            run.load(folder)
        else:
            step(model, optimizer, seed=run.rank)
            run.save(folder)
        seen.append(model.layers[1].running_mean.clone())
        run.close()
    return seen[0], seen[1]


@pytest.mark.ranks
def test_batch_statistics_are_each_ranks_own_or_those_of_rank_0(tmp_path: Path) -> None:
    for rank, (saved, loaded) in enumerate(ranks(2).run(own_buffers, tmp_path / "local", "local")):
        assert torch.equal(saved, loaded), rank
    (first, _), (_, second) = ranks(2).run(own_buffers, tmp_path / "broadcast", "broadcast")
    assert torch.equal(first, second)


def load_and_train(path: Path) -> str:
    """The text of a refused load; the run must be as good as before it."""
    model, optimizer, run = made(stage=3)
    try:
        run.load(path)
    except zs.CheckpointError as error:
        step(model, optimizer)
        run.close()
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_all_ranks_refuse_a_checkpoint_with_one_text_and_train_on(tmp_path: Path) -> None:
    _, _, run = made(width=5)
    run.save(tmp_path / "other")
    run.close()
    first, second = ranks(2).run(load_and_train, tmp_path / "other")
    assert first == second
    assert "is not a checkpoint of this model and optimizer" in first
