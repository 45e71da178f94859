"""Parameters on the host behind a transport that stages what it sends on the device, as NCCL does."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from nccl_on_cpu import FakeStream, nccl_over_gloo
from offload_loop import Case, Trained, make_model, offloaded, parts

from zeroshard import api
from zeroshard.comm import NcclTransport
from zeroshard.layout.sharding import STRAIGHT, slots_for
from zeroshard.params.gather_group import GatherGroup
from zeroshard.testing import assert_same_bits, ranks

pytestmark = pytest.mark.ranks
CASE = Case(steps=12)
ON_HOST = {"offload": parts(parameters="host")}


def over_nccl(
    name: str, options: dict[str, Any], straight: int = STRAIGHT
) -> tuple[Trained, bool, list[str], int]:
    """A run over the NCCL transport; whether peers are sent what rests on the host itself, the keys of its
    transport buffers on the device, and how often the host waited. `straight`: from which size on tensors
    go straight
    to their place."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    with nccl_over_gloo(store) as transport:
        made: list[GatherGroup] = []
        keys: list[str] = []
        build, allocate = GatherGroup.__init__, NcclTransport.allocate

        def keep(self: GatherGroup, *args: Any) -> None:
            build(self, *args)
            made.append(self)

        def count(self: NcclTransport, key: str, *args: Any) -> Any:
            keys.append(key)
            return allocate(self, key, *args)

        FakeStream.waits = 0
        with (
            patch.object(api, "connect", lambda *_, **__: transport),
            patch.object(GatherGroup, "__init__", keep),
            patch.object(NcclTransport, "allocate", count),
            patch("zeroshard.layout.sharding.STRAIGHT", straight),
        ):
            told = offloaded(CASE, {"stage": 3} | options)
        direct = all(
            g.memory.transport_buffer is not None and g.memory.transport_buffer.mine is g.memory.rows
            for g in made
        )
        gather_groups = {gather_group.key for gather_group in made}
        return told, direct, sorted(gather_groups & set(keys)), FakeStream.waits


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_rows_on_the_host_are_what_peers_gather(precision: str | None) -> None:
    options = {"precision": precision, "offload": parts(parameters="host")}
    told, direct, on_device, waits = ranks(2).run(over_nccl, f"staged {precision}", options)[0]
    want = ranks(2).run(offloaded, CASE, {"stage": 3} | options)[0]
    assert_same_bits(told.weights, want.weights)
    assert told.losses == want.losses
    assert direct
    assert on_device == [], "a region on the device would be the parameters once more"
    assert waits >= CASE.steps, "the host writes rows only when the device has read them"


@pytest.mark.wide(2)
@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1}, {"precision": "bf16"}, ON_HOST], ids=str)
def test_what_goes_straight_to_its_place_has_the_same_bits(options: dict[str, Any]) -> None:
    shapes = [(name, tuple(weight.shape)) for name, weight in make_model().named_parameters()]
    with patch("zeroshard.layout.sharding.STRAIGHT", 16):
        assert {slot.straight for slot in slots_for(shapes, 2, "rows")} == {True, False}
    told = [ranks(2).run(over_nccl, f"{least} {options}", options, least)[0][0] for least in (16, STRAIGHT)]
    assert_same_bits(told[0].weights, told[1].weights)
    assert told[0].losses == told[1].losses


def test_rows_on_the_device_have_transport_buffers_there() -> None:
    told, _, on_device, waits = ranks(2).run(over_nccl, "resident", {"offload": parts()})[0]
    assert told.stats is not None
    assert told.stats.live["parameters"] > 0
    assert on_device
    assert waits == 0
