"""The disk tier in a loop, composed with what loops do: clipping, scaling, schedules, reads, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import whole_weights
from offload_loop import batch, make_model, on_disk, thirds
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import assert_same_bits, ranks

STEPS = 8
Options = dict[str, Any]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def tiers(path: Path) -> list[zs.Offload]:
    """State alone, and parameters too."""
    return [on_disk(path), on_disk(path, parameters="disk")]


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_state_dict_has_what_is_on_the_disk(
    precision: str | None, clip_norm: float | None, disk_folder: Path
) -> None:
    """Of the model or of one module; sharded parameters themselves may show NaN. It loads back."""
    for offload in tiers(disk_folder):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = zs.shard(model, optimizer, offload=offload, precision=precision, clip_norm=clip_norm)
        model(batch(0, 0)).backward()
        optimizer.step()
        expected = whole_weights(run)
        found = model.state_dict()
        assert_same_bits({name: found[name] for name in expected}, expected)
        for place, module in model.named_modules():
            for name, value in module.state_dict(prefix=f"{place}." if place else "").items():
                assert torch.equal(value, found[name])
        model.load_state_dict({name: 2 * value for name, value in found.items()})
        run.close()
        assert_same_bits(weights(model), {name: 2 * value for name, value in expected.items()})


FP16, ALL_FP16 = zs.Precision("float16"), zs.Precision("float16", grad="float16")


def scaled_loop(
    offload: zs.Offload | None, precision: zs.Precision = FP16, fused: bool = False, clips: bool = True
) -> tuple[dict[str, Tensor], list[float]]:
    """fp16 with GradScaler and plain clipping, or none; the scale of the second step is too large."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=fused)
    run = zs.shard(model, optimizer, precision=precision, offload=offload)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scales = []
    for step in range(STEPS):
        if step == 1:
            scaler.update(2.0**40)
        scaler.scale(model(batch(step, 0))).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        scaler.step(optimizer)
        scaler.update(2.0**10 if step == 1 else None)
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    run.close()
    return weights(model), scales


def test_fp16_with_a_grad_scaler(disk_folder: Path) -> None:
    """The scaler and the loop see gradients on the host; the kernels update from there."""
    want, scales = scaled_loop(None)
    for offload in tiers(disk_folder):
        got, found = scaled_loop(offload)
        assert found == scales, "the step that overflowed was skipped"
        assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 1e-6


@pytest.mark.parametrize("precision", [FP16, ALL_FP16])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_leaves_the_division_to_the_optimizer(
    precision: zs.Precision, fused: bool, disk_folder: Path
) -> None:
    """Torch's fused kernel would divide and skip; where ours updates, the run does so before it."""
    want, scales = scaled_loop(None, precision, fused, clips=False)
    for offload in [*tiers(disk_folder), zs.Offload("host")]:
        got, found = scaled_loop(offload, precision, fused, clips=False)
        assert found == scales, "the step that overflowed was skipped"
        assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 1e-6


@pytest.mark.parametrize("make", ["adamw", "momentum"])
def test_plain_clipping_and_a_scheduler(make: str, disk_folder: Path) -> None:
    """No clip_norm: `p.grad` is there for the loop to see, change and replace."""

    def trained(offload: zs.Offload | None) -> dict[str, Tensor]:
        model = make_model()
        kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        }
        optimizer = kinds[make](model.parameters())
        run = zs.shard(model, optimizer, offload=offload) if offload is not None else None
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS)
        for step in range(STEPS):
            model(batch(step, 0), 1 if step == 3 else None).backward()
            model(batch(step, 1), 1 if step == 3 else None).backward()  # accumulates without no_sync
            nn.utils.clip_grad_norm_(model.parameters(), 0.8)
            if step == 4:  # another tensor in the gradient's place
                model.head.weight.grad = model.head.weight.grad * 0.5  # type: ignore[operator]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if run is not None:
            run.close()
        return weights(model)

    want = trained(None)
    for offload in tiers(disk_folder):
        got = trained(offload)
        assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 1e-6


@pytest.mark.parametrize("tier", [0, 1, 2], ids=["state", "parameters too", "auto"])
@pytest.mark.parametrize("master", ["plain", "split"])
def test_reading_writing_and_evaluating_between_steps(tier: int, master: Any, disk_folder: Path) -> None:
    """`gathered` shows the master bit for bit, what is written is used, evaluation changes nothing; as on the
    host."""

    def trained(offload: zs.Offload) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = zs.shard(model, optimizer, precision="bf16", offload=offload, clip_norm=4.0)
        seen: list[float] = []
        for step in range(4):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(float(model(batch(99, 0))))
            if step == 1:
                with run.gathered("head.weight", "blocks.2.*", write=True) as whole:
                    seen.append(float(whole["blocks.2.up.weight"].detach().double().sum()))
                    whole["head.weight"].data.fill_(1 / 3)
                with run.gathered("head.*") as whole:
                    assert torch.equal(whole["head.weight"], torch.full((41, 20), 1 / 3)), "to the last bit"
        state = optimizer.state_dict()["state"]
        told = {f"{i}.{k}": v.clone() for i, s in state.items() for k, v in s.items() if v.dim()}
        run.close()
        return weights(model), seen, told

    options: Options = {"precision": "bf16"}
    if tier == 2:
        given = {"path": str(disk_folder), "stage_bytes": 4096, "threads": 2, "master": master}
        offload = thirds(options, 1, **given)
    else:
        offload = on_disk(disk_folder, master=master, parameters=("device", "disk")[tier])
    got = trained(offload)
    want = trained(zs.Offload(stage_bytes=4096, threads=2, master=master))
    assert got[2].keys() == want[2].keys()
    if tier < 2:
        assert_same_bits(got[0], want[0])
        assert got[1] == want[1]
        assert_same_bits(got[2], want[2])
    else:  # torch's own AdamW has the device's part of it
        assert max(float((got[0][name] - want[0][name]).abs().max()) for name in want[0]) <= 2e-3
        assert max(abs(a - b) for a, b in zip(got[1], want[1], strict=True)) <= 5e-2


@pytest.mark.parametrize("parameters", ["device", "disk"])
def test_a_checkpoint_of_the_disk_goes_on_anywhere(parameters: Any, disk_folder: Path) -> None:
    def steps(run: zs.Run, model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 3):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()

    ends = []
    for there in (True, False):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        disk = on_disk(disk_folder, parameters=parameters)
        run = zs.shard(model, optimizer, offload=disk, clip_norm=4.0)
        steps(run, model, optimizer, 0)
        run.save(disk_folder / f"kept-{there}")
        if there:
            steps(run, model, optimizer, 3)
            run.close()
        else:
            run.close()
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            host = zs.Offload(stage_bytes=4096, threads=2)
            run = zs.shard(model, optimizer, offload=host, clip_norm=4.0)
            run.load(disk_folder / f"kept-{there}")
            steps(run, model, optimizer, 3)
            run.close()
        ends.append(weights(model))
    assert_same_bits(ends[1], ends[0])


def test_parameters_without_an_update_stay_on_the_host(disk_folder: Path) -> None:
    """A unit with a frozen parameter streams from memory; the others from the disk."""
    ends = []
    for offload in (None, on_disk(disk_folder, parameters="disk")):
        model = make_model()
        model.blocks[1].up.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        run = zs.shard(model, optimizer, offload=offload, clip_norm=4.0)
        for step in range(3):
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.close()
        ends.append(weights(model))
    assert max(float((ends[0][n] - ends[1][n]).abs().max()) for n in ends[0]) <= 1e-6


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.more = (nn.Parameter(torch.randn(n, 2).t()) for n in (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.one).square().mean() + (x @ self.more).square().mean()


def trained_transposed(path: str | None, clip: float | None) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transposed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    offload = None if path is None else zs.Offload("disk", path=path, threads=1)
    run = zs.shard(model, optimizer, stage=2, offload=offload, clip_norm=clip)
    for step in range(3):
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = whole_weights(run)
    run.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("clip", [None, 1e3])
def test_one_element_of_a_transposed_parameter(clip: float | None, disk_folder: Path) -> None:
    """Its stride is not 1, and it is contiguous all the same."""
    for rank, wanted in enumerate(ranks(2).run(trained_transposed, None, clip)):
        found = ranks(2).run(trained_transposed, str(disk_folder), clip)[rank]
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
