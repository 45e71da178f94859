"""What a step is estimated to take: Python, the device and the update, by the machine's own figures."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from test_planner import problem

import zeroshard as zs
from zeroshard.layout.memory import StepSegment
from zeroshard.machine import machine
from zeroshard.planner import pricing
from zeroshard.planner.candidates import price
from zeroshard.planner.plan import Candidate
from zeroshard.planner.planning_problem import PlanningProblem
from zeroshard.planner.pricing import GATHERED, HOOKED, SENT, STEPPED, STREAMED


def test_python_holds_up_the_pass_that_it_is_slow_in() -> None:
    """A device that waits in forward makes up for it in no backward; while the host updates, Python is slower
    by what the machine says."""

    def asked(offload: zs.Offload | None = None, **figures: float) -> PlanningProblem:
        base = problem(1000, machine=machine("H100", gap=0.0, drag=0.0, **figures), world=1)
        work = {"flops": 10**11, "back": 3 * 10**12, "kernels": 30, "kernels_back": 30}
        segments = tuple(StepSegment(unit.name, **work) for unit in base.units)
        clip = {"clip_norm": 1.0} if offload is not None else {}
        options = dataclasses.replace(base.options, stage=0, offload=offload, **clip)
        return dataclasses.replace(base, options=options).stepping(trace=lambda _: segments)

    def priced(of: PlanningProblem) -> Candidate:
        return price(of, of.options)

    free, slow = priced(asked(launch=0.0)), priced(asked(launch=1e-4))
    units = len(problem(1000).units)
    rate = machine("H100").half * machine("H100").efficiency
    update = free.seconds["update"]
    assert free.seconds["interpreter"] == 0.0
    assert free.step == pytest.approx(units * 3.1e12 / rate + update)
    launches = 60 * units + sum(HOOKED) * (units - 1)  # the root has no hooks of its own
    assert slow.seconds["interpreter"] == pytest.approx(launches * 1e-4)
    forward = (30 * units + HOOKED[0] * (units - 1)) * 1e-4
    assert slow.step == pytest.approx(forward + units * 3e12 / rate + update)  # backward is the device's
    host = asked(zs.Offload(), launch=1e-5, host_rate=1e12)
    slowed = dataclasses.replace(host, machine=dataclasses.replace(host.machine, drag=0.25))
    alone, beside = priced(host).seconds, priced(slowed).seconds
    assert beside["interpreter"] == pytest.approx(alone["interpreter"] + 0.2 * alone["host update"])


def test_the_host_s_updates_slow_python_down_while_they_run() -> None:
    """In backward, which sends parts to the host, and in the next forward if the host is behind. The step
    itself is Python's as well."""
    one = machine("H100", launch=1e-6, drag=0.5, gap=0.0)
    asked = problem(1000, machine=one, world=1)
    options = dataclasses.replace(asked.options, stage=0, offload=zs.Offload(), clip_norm=1.0)
    setup, segments = asked.setup(options), [StepSegment("", kernels=100, kernels_back=300)]
    back = 3e-4 + len(setup.parts) * SENT * 1e-6

    def launched(device: float, update: float) -> tuple[float, float]:
        return pricing._launched(setup, segments, one, device, update)

    assert launched(0.0, 0.0) == pytest.approx((1e-4, back))
    assert launched(0.0, 3e-5) == pytest.approx((1e-4, back + 1e-5))  # a third of the time that it has
    assert launched(1.0, 0.5) == pytest.approx((1e-4, 1.5 * back))  # no more than all of it
    assert launched(0.0, back + 3e-5) == pytest.approx((1e-4 + 1e-5, back + back / 3))
    told = price(asked, options, tuple(segments)).seconds
    both = sum(launched(0.0, told["host update"]))
    assert told["interpreter"] == pytest.approx(both + STEPPED * 1e-6 * len(setup.parts))


def test_each_weight_that_is_streamed_takes_python_s_time() -> None:
    """So of many small ones the state rests on the host before they do."""
    one = machine("H100", launch=1e-6, drag=0.0, gap=0.0)
    asked = problem(1000, machine=one, world=1)

    def launched(parameters: Literal["device", "host"]) -> tuple[float, float]:
        offload = zs.Offload(parameters=parameters)
        options = dataclasses.replace(asked.options, stage=0, offload=offload, clip_norm=1.0)
        return pricing._launched(asked.setup(options), [], one, 0.0, 0.0)

    weights = sum(len(unit.weights) for unit in asked.units)
    more = [away - here for away, here in zip(launched("host"), launched("device"), strict=True)]
    assert more == pytest.approx([each * weights * 1e-6 for each in STREAMED])


def test_the_device_updates_its_own_while_the_host_updates() -> None:
    """A slow host is what a step waits for, whatever the device has to update; a fast one is not seen."""

    def priced(host_rate: float, update_rate: float) -> Candidate:
        rates = {"launch": 0.0, "drag": 0.0, "gap": 0.0, "host_rate": host_rate, "update_rate": update_rate}
        asked = problem(1000, machine=machine("H100", **rates), world=1)
        whole = price(asked, dataclasses.replace(asked.options, stage=0)).lasting
        half = zs.Offload(optimizer="auto", device_bytes=whole["parameters"] + whole["state"] // 2)
        return price(asked, dataclasses.replace(asked.options, stage=0, offload=half, clip_norm=1.0))

    slow, later = priced(1e6, 1e12), priced(1e6, 1e10)
    assert 0 < slow.seconds["update"] < later.seconds["update"] < slow.seconds["host update"]
    assert later.step == pytest.approx(slow.step)
    fast, behind = priced(1e15, 1e12), priced(1e15, 1e10)
    assert behind.step - fast.step == pytest.approx(behind.seconds["update"] - fast.seconds["update"])


def test_gathers_take_python_s_time() -> None:
    """All of them before forward where parameters stay; else one before it, and all in each pass."""

    def python(stage: int, world: int) -> tuple[float, float]:
        asked = problem(1000, machine=machine("H100", launch=1e-6), world=world)
        # The device is slower.
        work = {"flops": 10**13, "back": 3 * 10**13, "kernels": 30, "kernels_back": 30}
        segments = tuple(StepSegment(unit.name, **work) for unit in asked.units)
        told = price(asked, dataclasses.replace(asked.options, stage=stage), segments)
        free = dataclasses.replace(asked, machine=dataclasses.replace(asked.machine, launch=0.0))
        bare = price(free, dataclasses.replace(asked.options, stage=stage), segments)
        return told.step - bare.step, told.seconds["interpreter"]

    asked = problem(1000, world=8)
    gather_groups = len(asked.setup(dataclasses.replace(asked.options, stage=1)).gather_groups)
    small = len(asked.setup(dataclasses.replace(asked.options, stage=3)).small)
    assert gather_groups > small
    each = GATHERED * 1e-6
    (_, alone), (_, none) = python(3, 1), python(0, 8)
    assert none == pytest.approx(alone)
    assert python(1, 8) == pytest.approx((gather_groups * each, alone + gather_groups * each))
    apart = gather_groups - small
    assert python(3, 8) == pytest.approx(((small + 1) * each, alone + (small + 1 + 2 * apart) * each))


def test_an_update_takes_what_was_measured_of_it() -> None:
    """On the device: state at the rate of its own update, gradients widened and weights made at a copy's."""
    plain, measured = (price(one, one.options) for one in (
        problem(1000), problem(1000, machine=machine("H100", update_rate=machine("H100").memory_rate / 2)),
    ))  # fmt: skip
    touched, widened = 28, 12
    ratio = (2 * touched + widened) / (touched + widened)
    assert measured.seconds["update"] == pytest.approx(ratio * plain.seconds["update"])


def test_gradients_of_stage_0_come_back_beside_backward_and_codes_when_it_is_over() -> None:
    """Of codes half of the exchange is hidden by no computation. Updates on the host begin as gradients come
    back between GPUs, elsewhere when backward is over."""

    def priced(
        link: float, offload: zs.Offload | None = None, world: int = 8, gpu: bool = True, **more: object
    ) -> Candidate:
        rates = {
            "link": link,
            "network": link,
            "latency": 0.0,
            "hop": 0.0,
            "node_hop": 0.0,
            "launch": 0.0,
            "drag": 0.0,
            "gap": 0.0,
        }
        asked = problem(1000, machine=machine("H100", host_rate=1e9, node=1, gpu=gpu, **rates), world=world)
        segments = tuple(StepSegment(unit.name, flops=10**12, back=3 * 10**12) for unit in asked.units)
        clip = {"clip_norm": 1.0} if offload is not None else {}
        options = dataclasses.replace(asked.options, stage=0, offload=offload, **clip, **more)
        return price(asked.stepping(trace=lambda _: segments), options)

    for gpu in (True, False):
        fast, slow = (priced(link, gpu=gpu) for link in (1e18, 1e11))
        assert 0 < slow.seconds["exchange"] < slow.seconds["compute"]  # else it would not be hidden anyway
        assert slow.step == pytest.approx(fast.step)
        fast, slow = (priced(link, gpu=gpu, compress=zs.Int8()) for link in (1e18, 1e11))
        assert slow.step - fast.step == pytest.approx(slow.seconds["exchange"] / 2)
        several, one = (priced(1e18, zs.Offload(), world, gpu) for world in (8, 1))
        assert several.seconds["host update"] == pytest.approx(one.seconds["host update"])
        later = 0.0 if gpu else 0.75 * several.seconds["compute"]
        assert several.step == pytest.approx(one.step + later, rel=1e-3)
