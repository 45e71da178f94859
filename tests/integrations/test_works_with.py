"""What people use beside a model and its optimizer: the rows of docs/works-with.md, against torch's DDP.

Libraries that are not installed are skipped. `./do libraries` installs them all and runs every case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from works_with_case import (
    TRACKERS,
    Outcome,
    adapted,
    adapted_later,
    autocast,
    averaged,
    compiled,
    measured,
    models_of_timm,
    resumed,
    statistics,
    told_to,
    updated,
)

from zeroshard.testing import Ranks, assert_same_bits

pytestmark = pytest.mark.ranks
PAGE = Path(__file__).parents[2] / "docs" / "works-with.md"
#: By their rows: the library, the loop and what it is called with.
LOOPS: dict[str, tuple[str, Callable[..., Outcome], Any]] = {
    "torch.amp": ("torch", autocast, ()),
    "torch.compile(model)": ("torch", compiled, ("wrapped",)),
    "model.compile()": ("torch", compiled, ("in place",)),
    "block.compile()": ("torch", compiled, ("blocks",)),
    "AveragedModel": ("torch", averaged, ()),
    "update_bn": ("torch", statistics, ()),
    "torchmetrics": ("torchmetrics", measured, ()),
    "PEFT": ("peft", adapted, ()),
    "timm": ("timm", models_of_timm, ()),
}
#: Optimizers whose loops have the numbers of DDP to the bit, at stages 2 and 3.
OPTIMIZERS = {
    "schedulefree": ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"),
    "bitsandbytes.optim": ("AdamW8bit", "Lion8bit", "AdamW", "PagedAdamW"),
    "torchao.optim": ("AdamW8bit", "AdamW4bit"),
    "pytorch_optimizer": (
        *("ADOPT", "AdEMAMix", "AdaBelief", "AdaFactor", "CAME", "Lamb", "Lion", "Muon", "RAdam"),
        *("SOAP", "ScheduleFreeAdamW", "Shampoo", "StableAdamW", "Tiger", "Yogi"),
    ),
}
SAVED = {
    "schedulefree": ("AdamWScheduleFree",),
    "bitsandbytes.optim": ("AdamW8bit",),
    "pytorch_optimizer": ("AdEMAMix",),
}
#: Of pytorch_optimizer, those that look at all parameters for the update of each.
ACROSS = ("AdaGC", "Adai", "AvaGrad", "DAdaptAdam", "DAdaptLion", "DAdaptSGD", "LoRARite", "Prodigy")


def needs(library: str) -> pytest.MarkDecorator:
    there = find_spec(library.partition(".")[0]) is not None
    return pytest.mark.skipif(not there, reason=f"needs {library}")


def same(got: list[Outcome], want: list[Outcome]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.numbers == theirs.numbers
        assert_same_bits(ours.tensors, theirs.tensors)


@pytest.mark.parametrize("row", [pytest.param(row, marks=needs(case[0])) for row, case in LOOPS.items()])
def test_loops_have_the_numbers_of_ddp(pool: Ranks, row: str) -> None:
    _, loop, args = LOOPS[row]
    plain = pool.run(loop, None, *args)
    for stage in (0, 2, 3):
        same(pool.run(loop, stage, *args), plain)


def listed(names: dict[str, tuple[str, ...]]) -> list[Any]:
    return [
        pytest.param(library, name, marks=needs(library), id=name)
        for library, of_library in names.items()
        for name in of_library
    ]


@pytest.mark.parametrize(("library", "name"), listed(OPTIMIZERS))
def test_optimizers_have_the_numbers_of_ddp(pool: Ranks, library: str, name: str) -> None:
    plain = pool.run(updated, None, library, name, timeout=240)
    for stage in (2, 3):
        same(pool.run(updated, stage, library, name, timeout=240), plain)


@pytest.mark.parametrize(
    ("library", "name"),
    listed(
        {
            "schedulefree": ("AdamWScheduleFree",),
            "bitsandbytes.optim": ("AdamW8bit",),
            "pytorch_optimizer": ("AdEMAMix",),
        }
    ),
)
def test_their_state_goes_through_a_checkpoint(pool: Ranks, tmp_path: Path, library: str, name: str) -> None:
    whole = pool.run(updated, 2, library, name)[0]
    first = pool.run(resumed, 2, library, name, str(tmp_path / "half"), 0)[0]
    rest = pool.run(resumed, 3, library, name, str(tmp_path / "half"), 2)[0]
    assert first.numbers + rest.numbers == whole.numbers
    assert_same_bits(rest.tensors, whole.tensors)


@needs("torchao")
def test_quantised_state_is_not_saved_in_rows(pool: Ranks, tmp_path: Path) -> None:
    told = pool.attempt(resumed, 2, "torchao.optim", "AdamW8bit", str(tmp_path / "none"), 0, timeout=240)
    assert all(
        "AdamW8bit keeps its state in tensors of its own kind (OptimState8bit" in t.message for t in told
    )


@needs("pytorch_optimizer")
@pytest.mark.parametrize("name", ACROSS)
def test_optimizers_that_look_at_all_parameters_are_refused(pool: Ranks, name: str) -> None:
    for told in pool.attempt(updated, 2, "pytorch_optimizer", name):
        assert told.kind == "ModelError"
        assert f"{name} looks at all parameters for the update of each" in told.message
        assert told.message.endswith("Pass stage=0.")
    same(pool.run(updated, 0, "pytorch_optimizer", name), pool.run(updated, None, "pytorch_optimizer", name))


@needs("peft")
def test_adapters_that_come_later_are_refused(pool: Ranks) -> None:
    for told in pool.attempt(adapted_later, 2):
        assert told.kind is not None
        assert "blocks.0.inner.lora_A.second.weight" in told.message


@pytest.mark.parametrize("tracker", [pytest.param(name, marks=needs(name)) for name in TRACKERS])
def test_trackers_take_a_runs_numbers(alone: Ranks, tmp_path: Path, tracker: str) -> None:
    numbers, found = alone.run(told_to, tracker, str(tmp_path))[0]
    assert found == pytest.approx(numbers, rel=1e-6)
    assert numbers["live/parameters"] > 0


@pytest.mark.parametrize("library", sorted(OPTIMIZERS))
def test_the_page_names_what_is_tested(library: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in (*LOOPS, *OPTIMIZERS[library], *ACROSS):
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", page), name
