"""What a step is estimated to take: Python, the device and the update, by the machine's own figures."""

from __future__ import annotations

import dataclasses

import pytest
from test_planner import question

import zeroshard as zs
from zeroshard.count.timeline import Segment
from zeroshard.machine import machine
from zeroshard.planning import pricing
from zeroshard.planning.plan import Candidate
from zeroshard.planning.planner import price
from zeroshard.planning.pricing import HOOKED, SENT, STEPPED
from zeroshard.planning.question import Question


def test_python_holds_up_the_pass_that_it_is_slow_in() -> None:
    """A device that waits in forward makes up for it in no backward; an update that is handed to the host
    costs Python what the machine says, beside its launches."""

    def asked(offload: zs.Offload | None = None, **figures: float) -> Question:
        base = question(1000, machine=machine("H100", gap=0.0, hand=0.0, **figures), world=1)
        work = {"flops": 10**11, "back": 3 * 10**12, "kernels": 30, "kernels_back": 30}
        segments = tuple(Segment(unit.name, **work) for unit in base.units)
        clip = {"clip_norm": 1.0} if offload is not None else {}
        options = dataclasses.replace(base.options, stage=0, offload=offload, **clip)
        return dataclasses.replace(base, options=options, trace=lambda _: segments)

    def priced(of: Question) -> Candidate:
        return price(of, of.options)

    free, slow = priced(asked(launch=0.0)), priced(asked(launch=1e-4))
    units = len(question(1000).units)
    rate = machine("H100").half * machine("H100").efficiency
    update = free.seconds["update"]
    assert free.seconds["interpreter"] == 0.0
    assert free.step == pytest.approx(units * 3.1e12 / rate + update)
    launches = 60 * units + sum(HOOKED) * (units - 1)  # the root has no hooks of its own
    assert slow.seconds["interpreter"] == pytest.approx(launches * 1e-4)
    forward = (30 * units + HOOKED[0] * (units - 1)) * 1e-4
    assert slow.step == pytest.approx(forward + units * 3e12 / rate + update)  # backward is the device's
    host = asked(zs.Offload(), launch=1e-5)
    handed = dataclasses.replace(host, machine=dataclasses.replace(host.machine, hand=1e-3))
    parts = len(host.setup(host.options).parts)
    more = priced(handed).seconds["interpreter"] - priced(host).seconds["interpreter"]
    assert more == pytest.approx(parts * 1e-3)


def test_python_hands_updates_over_while_they_run() -> None:
    """A host that keeps up with backward takes Python's time from it alone; one that falls behind, from the
    next forward too. The step itself is Python's as well."""
    one = machine("H100", launch=1e-6, hand=1e-3)
    asked = question(1000, machine=one, world=1)
    options = dataclasses.replace(asked.options, stage=0, offload=zs.Offload(), clip_norm=1.0)
    setup, segments = asked.setup(options), [Segment("", kernels=100, kernels_back=300)]
    handed = len(setup.parts) * (1e-3 + SENT * 1e-6)
    assert pricing._launched(setup, segments, one, 1.5) == pytest.approx((1e-4, 3e-4 + handed))
    quarter = 1e-4 + 0.75 * handed, 3e-4 + 0.25 * handed
    assert pricing._launched(setup, segments, one, 0.25) == pytest.approx(quarter)
    told = price(asked, options, tuple(segments)).seconds["interpreter"]
    assert told == pytest.approx(4e-4 + handed + STEPPED * 1e-6 * len(setup.parts))


def test_an_update_takes_what_was_measured_of_it() -> None:
    """On the device: state at the rate of its own update, gradients widened and weights made at a copy's."""
    plain, measured = (price(one, one.options) for one in (
        question(1000), question(1000, machine=machine("H100", update_rate=machine("H100").memory_rate / 2)),
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
        rates = {"link": link, "network": link, "latency": 0.0, "launch": 0.0, "hand": 0.0, "gap": 0.0}
        asked = question(1000, machine=machine("H100", host_rate=1e9, node=1, gpu=gpu, **rates), world=world)
        segments = tuple(Segment(unit.name, flops=10**12, back=3 * 10**12) for unit in asked.units)
        clip = {"clip_norm": 1.0} if offload is not None else {}
        options = dataclasses.replace(asked.options, stage=0, offload=offload, **clip, **more)
        return price(dataclasses.replace(asked, trace=lambda _: segments), options)

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
