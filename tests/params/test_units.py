"""Which modules are gathered together: found by themselves, named, or none."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.params.units import find_units, matching


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class Nested(nn.Module):
    """Encoder and decoder with their own stacks; a block holds blocks of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 4), nn.Sequential(*(Block() for _ in range(2))))
        layers = nn.ModuleList(Outer() for _ in range(2))
        self.decoder = nn.ModuleDict({"layers": layers, "out": nn.Linear(4, 2)})


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(2))


def found(model: nn.Module, wanted: tuple[str, ...] | str = "auto") -> dict[str, list[str]]:
    return {
        unit.label: [param_ref.name for param_ref in unit.param_refs] for unit in find_units(model, wanted)
    }


BLOCK = ["norm.weight", "norm.bias", "up.weight", "up.bias"]


def test_repeated_blocks_are_units_and_the_rest_is_the_root() -> None:
    assert found(Gpt()) == {
        "(root)": ["embed.weight", "norm.weight", "norm.bias"],
        **{f"blocks.{i}": [f"blocks.{i}.{name}" for name in BLOCK] for i in range(3)},
    }


def test_outermost_repeated_modules_are_found_in_every_stack() -> None:
    assert list(found(Nested())) == [
        "(root)", "encoder.1.0", "encoder.1.1", "decoder.layers.0", "decoder.layers.1",
    ]  # fmt: skip


def test_a_model_of_plain_layers_falls_back_to_the_layers_of_its_lists() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    assert list(found(model)) == ["(root)", "0", "2", "4"]


def test_sequences_in_a_list_are_blocks_unless_they_hold_blocks() -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    towers = nn.ModuleList(layers() for _ in range(2))
    assert list(found(nn.ModuleDict({"towers": towers}))) == ["(root)", "towers.0", "towers.1"]
    stages = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
    assert list(found(stages)) == ["(root)", "0.0", "0.1", "1.0", "1.1"]
    lone = nn.ModuleDict({"body": layers(), "head": layers()})
    assert list(found(lone)) == ["(root)", "body", "head"]


def test_a_single_layer_is_the_root_alone() -> None:
    assert found(nn.Linear(2, 2)) == {"(root)": ["weight", "bias"]}


def test_every_parameter_is_in_exactly_one_unit() -> None:
    for model in (Gpt(), Nested(), nn.Sequential(Gpt(), Nested())):
        for wanted in ("auto", "none"):
            names = [name for unit in found(model, wanted).values() for name in unit]
            assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_parameters_that_units_share_belong_to_the_root() -> None:
    model = Gpt()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    units = found(model)
    assert "blocks.0.up.weight" in units["(root)"]
    assert units["blocks.2"] == ["blocks.2.norm.weight", "blocks.2.norm.bias", "blocks.2.up.bias"]


def test_a_block_that_stands_twice_belongs_to_the_root() -> None:
    model = Gpt()
    model.blocks.append(model.blocks[0])
    assert "blocks.0.up.weight" in found(model)["(root)"]


def test_a_block_that_stands_in_two_lists_belongs_to_the_root() -> None:
    model = Gpt()
    model.decoder = nn.ModuleList([model.blocks[0], Block()])
    units = found(model)
    assert list(units) == ["(root)", "blocks.1", "blocks.2", "decoder.1"]
    assert "blocks.0.up.weight" in units["(root)"]


def test_named_units() -> None:
    assert list(found(Gpt(), ("blocks.*",))) == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert list(found(Gpt(), ("blocks.0", "norm"))) == ["(root)", "blocks.0", "norm"]
    assert list(found(Gpt(), ("blocks",))) == ["(root)", "blocks"]
    assert list(found(Gpt(), ("blocks.*.up",))) == ["(root)", "blocks.0.up", "blocks.1.up", "blocks.2.up"]


def test_units_inside_units_take_their_own_parameters() -> None:
    units = found(Gpt(), ("blocks.0", "blocks.0.up"))
    assert units["blocks.0"] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert units["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]


def test_units_are_no_parameters() -> None:
    said = (
        r'unit pattern "blocks\.0\.up\.weight" names a parameter, `weight` of `blocks\.0\.up`, and units are'
    )
    with pytest.raises(zs.OptionError, match=said + r' modules: write "blocks\.0\.up"\.'):
        found(Gpt(), ("blocks.1", "blocks.0.up.weight"))
    with pytest.raises(zs.OptionError, match=r"`weight` of the model itself, .* holds is the root's"):
        find_units(nn.Linear(2, 2), ("weight",))


def test_no_units() -> None:
    assert list(found(Gpt(), "none")) == ["(root)"]


@pytest.mark.parametrize(("pattern", "hint"), [
    ("block.*", r' Did you mean "blocks\.\*" \(3 modules\)\?'),
    ("emded", r' Did you mean "embed" \(1 modules\)\?'),
    ("zzz", "$"),
])  # fmt: skip
def test_unknown_units_are_refused_with_the_nearest_name(pattern: str, hint: str) -> None:
    said = f"unit pattern {re.escape(chr(34) + pattern + chr(34))} matches none of the 13 modules."
    with pytest.raises(zs.OptionError, match=said + hint):
        zs.shard(Gpt(), units=pattern)


def test_unknown_units_to_recompute_are_refused() -> None:
    with pytest.raises(zs.OptionError, match=r'recompute pattern "block" matches none of the 3 units'):
        zs.shard(Gpt(), recompute="block")


def test_unknown_parameters_are_refused_by_gathered() -> None:
    run = zs.shard(Gpt())
    said = r'parameter pattern "embedding\.\*" matches none'
    with pytest.raises(zs.OptionError, match=said), run.gathered("embedding.*"):
        pass
    run.close()


def test_patterns_reach_over_dots_for_parameters_only() -> None:
    names = ["norm.weight", "blocks.0.norm.weight", "blocks.0.up.weight"]
    assert matching(("*norm*",), names, "parameter", "parameters") == names[:2]
    names = ["blocks", "blocks.0", "blocks.0.up"]
    assert matching(("blocks.*",), names, "unit", "modules", by_level=True) == ["blocks.0"]


def test_a_run_says_its_units() -> None:
    run = zs.shard(Gpt())
    assert run.units == {"(root)": 28 + 8, "blocks.0": 28, "blocks.1": 28, "blocks.2": 28}
    run.close()
    assert torch.is_tensor(run.model.head.weight)
