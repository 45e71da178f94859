"""`compress=`: a codec that loses nothing changes no bit, whatever it is combined with; one that does is seen
by all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
from codecs_for_tests import Same
from recipes import Recipe, on_ranks

import zeroshard as zs
from zeroshard.testing import assert_same_bits

pytestmark = pytest.mark.ranks
GPT, MLP = Recipe("gpt", steps=4), Recipe("mlp", steps=4)
SMALL = "8KiB"

CASES: list[tuple[int, Recipe, dict[str, Any]]] = [
    *[(2, GPT, {"stage": stage}) for stage in (0, 1, 2, 3)],
    *[(3, MLP, {"stage": stage}) for stage in (0, 3)],
    *[(2, MLP, {"stage": stage, "transport": "gloo"}) for stage in (0, 2)],
    *[(2, GPT, {"stage": stage, "precision": "bf16"}) for stage in (0, 1, 3)],
    *[
        (2, Recipe("mlp", steps=4, accumulate=3, no_sync=quiet, clip=0.05), {"stage": stage})
        for stage, quiet in ((0, False), (2, True))
    ],
    *[
        (2, Recipe("mlp", steps=8, scaled=True, infinite=(2, 5)), {"stage": stage, "precision": "fp16"})
        for stage in (0, 3)
    ],
    (2, GPT, {"stage": 2, "sync": zs.Delayed()}),
    (2, Recipe("gpt", "muon", steps=4), {"stage": 3}),
    (2, GPT, {"stage": 2, "offload": zs.Offload(), "clip_norm": 0.5}),
    (2, MLP, {"stage": 0, "offload": zs.Offload(), "clip_norm": 0.5}),
]


@pytest.mark.parametrize(("world", "recipe", "options"), CASES, ids=str)
def test_a_codec_that_loses_nothing_changes_no_bit(
    world: int, recipe: Recipe, options: dict[str, Any]
) -> None:
    options = {**options, "bucket_bytes": SMALL}
    plain = on_ranks(world, recipe, **options)[0]
    coded = on_ranks(world, recipe, compress=Same(warmup=2), **options)[0]
    assert_same_bits(coded.weights, plain.weights)
    assert coded.scales == plain.scales
    assert coded.norms == plain.norms


GATHERED: list[tuple[int, Recipe, dict[str, Any]]] = [
    *[(2, GPT, {"stage": stage}) for stage in (1, 2, 3)],
    (3, MLP, {"stage": 3}),
    *[(2, GPT, {"stage": stage, "transport": "gloo"}) for stage in (1, 3)],
    *[(2, GPT, {"stage": stage, "precision": "bf16"}) for stage in (2, 3)],
    (2, Recipe("gpt", "muon", steps=4), {"stage": 3}),
    (2, GPT, {"stage": 3, "precision": "bf16", "offload": zs.Offload(master="split"), "clip_norm": 0.5}),
    (2, GPT, {"stage": 3, "precision": "bf16", "offload": zs.Offload(parameters="host"), "clip_norm": 0.5}),
]


@pytest.mark.parametrize(("world", "recipe", "options"), GATHERED, ids=str)
def test_parameters_gathered_through_a_codec_that_loses_nothing(
    world: int, recipe: Recipe, options: dict[str, Any]
) -> None:
    plain = on_ranks(world, recipe, **options)[0]
    coded = on_ranks(world, recipe, gather=Same(), **options)[0]
    assert_same_bits(coded.weights, plain.weights)
    assert coded.losses == plain.losses
