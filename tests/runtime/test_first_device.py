"""`shard(device=...)`: a model that is elsewhere moves unit by unit, and is no longer where it was."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import zeroshard as zs
from zeroshard.runtime import devices
from zeroshard.runtime.first_values import CHUNK, FirstValues
from zeroshard.testing import ranks


class Net(nn.Module):
    table: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.linspace(0, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.scale * block(x) + self.table.to(x.dtype)
        return x.square().mean()


def trained(**options: Any) -> dict[str, Tensor]:
    """Weights after three steps."""
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    run = zs.shard(model, optimizer, **options)
    where = next(iter(model.buffers())).device
    for step in range(3):
        x = torch.full((2, 8), 0.1 * step + 0.1 * run.rank).to(where)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def moved_and_not(options: dict[str, Any]) -> None:
    expected = trained(**options)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        # As if this were another device: every value is brought here, and let go where it was.
        patch.setattr(FirstValues, "moves", lambda self, value: not value.is_meta)
        released = FirstValues.release

        def release(self: FirstValues, parameter: nn.Parameter) -> None:
            released(self, parameter)
            found.append((parameter.untyped_storage().nbytes(), bool(parameter.isnan().all())))

        patch.setattr(FirstValues, "release", release)
        values = trained(**options)
    assert values.keys() == expected.keys()
    for name in expected:
        assert torch.equal(values[name], expected[name]), name
    assert len(found) == 13
    assert all(nbytes <= 4 and gone for nbytes, gone in found)


@pytest.mark.ranks
def test_a_model_that_moves_trains_as_one_that_was_there_and_is_let_go() -> None:
    for options in ({"stage": 3}, {"stage": 1, "precision": "bf16"}):
        ranks(2).run(moved_and_not, options)


def test_what_moves_comes_in_parts() -> None:
    model = nn.Linear(1 << 10, 1 << 13)  # 32 MiB
    values = FirstValues(model, torch.device("meta"))
    parts = list(values.chunks(model.weight, model.weight.detach(), 5, 1 << 13))
    assert [at for at, _ in parts] == [5, 5 + (CHUNK >> 12)]
    assert torch.equal(torch.cat([rows for _, rows in parts]), model.weight[5:])
    alone = FirstValues(model, torch.device("cpu"))
    assert len(list(alone.chunks(model.weight, model.weight.detach(), 0, 1 << 13))) == 1


def test_devices_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for given in ("gpu", "meta", 3.5):
        with pytest.raises(zs.OptionError, match=r'device=.*: pass "cuda", "cuda:1" or "cpu"\.'):
            zs.shard(Net(), device=given)  # type: ignore[arg-type]
    with pytest.raises(
        zs.OptionError, match=r"device='cuda:1': torch sees 1 GPUs here. Drop device= to train"
    ):
        zs.shard(Net(), device="cuda:1")


def test_where_a_model_goes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    model, limit = Net(), {"limit": 1}
    assert devices.device_for(model, None, limit) == cpu  # no GPU is here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices.device_for(model, None, {}) == cpu
    assert devices.device_for(model, devices.device_asked("cuda"), {}) == gpu
    assert devices.device_for(model, cpu, limit) == cpu
    with caplog.at_level(logging.INFO, "zeroshard"):
        assert devices.device_for(model, None, limit) == gpu
    assert 'the limit is of cuda:0, so the model moves there; device="cpu" keeps it here' in caplog.text
    assert devices.device_for(model, None, {**limit, "batch": torch.ones(2, device="meta")}) == gpu
    assert devices.device_for(model, None, {**limit, "batch": torch.ones(2)}) == cpu


@pytest.mark.parametrize(("here", "gpus", "told"), [(None, 1, True), ("cpu", 1, False), (None, 0, False)])
def test_a_model_left_on_the_cpu_beside_gpus_is_told_of(
    here: str | None, gpus: int, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: gpus)
    devices.tell_of_idle_gpus(torch.device("cpu"), devices.device_asked(here), 1)
    said = 'on the CPU and trains there, beside 1 GPU: zs.shard(..., device="cuda")' in caplog.text
    assert said == told
    devices.tell_of_idle_gpus(torch.device("cpu"), None, gpus + 1)  # not one for each rank
    devices.tell_of_idle_gpus(torch.device("cuda"), None, 1)
    assert len(caplog.records) == told


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("offload", [None, zs.Offload()])
def test_a_model_of_the_host_goes_to_the_gpu_by_units(offload: zs.Offload | None) -> None:
    options: dict[str, Any] = {"precision": "bf16", "offload": offload, "clip_norm": 1.0}
    torch.manual_seed(3)
    expected = Net().cuda()
    optimizer = AdamW(expected.parameters(), lr=1e-2)
    run = zs.shard(expected, optimizer, **options)
    for step in range(3):
        expected(torch.full((2, 8), 0.1 * step, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    values = trained(device="cuda", **options)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(values[name], tensor.cpu()), name
