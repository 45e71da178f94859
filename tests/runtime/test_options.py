"""Options: what is accepted is normalised, what is not says why and what to write, and each says what it does
to numbers.
"""

from __future__ import annotations

import dataclasses
import typing

import pytest

import zeroshard as zs
from zeroshard.errors import did_you_mean
from zeroshard.options import OptionArguments, Options, patterns
from zeroshard.sizes import parse_bytes, show_apart, show_bytes


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (1, 1),
        (26_214_400, 26_214_400),
        ("1", 1),
        ("100B", 100),
        ("25MiB", 25 * 2**20),
        ("25mib", 25 * 2**20),
        (" 25 MiB ", 25 * 2**20),
        ("25Mi", 25 * 2**20),
        ("25MB", 25 * 10**6),
        ("25M", 25 * 10**6),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes(text: int | str, number: int) -> None:
    assert parse_bytes(text, "bucket_bytes") == number


@pytest.mark.parametrize(
    "text", ["", "MiB", "25 MiBs", "1,5GB", "-3", "1e6", "5i", "5iB", "5PB", 2.5, None, True, b"1"]
)
def test_what_is_not_a_size(text: object) -> None:
    with pytest.raises(
        zs.OptionError, match=r"bucket_bytes=.* is not a size\. Write bytes as an int, or a text such as"
    ):
        parse_bytes(text, "bucket_bytes")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [0, -1, "0", "0MiB", "0.2"])
def test_sizes_must_be_above_zero(text: int | str) -> None:
    with pytest.raises(zs.OptionError, match="must be more than zero bytes"):
        parse_bytes(text, "bucket_bytes")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (25 * 2**20, "25.0 MiB"),
        (3 * 2**40, "3.0 TiB"),
        (2**52, "4096.0 TiB"),
        (2**30 - 1, "1.0 GiB"),
    ],
)
def test_bytes_for_people(number: float, text: str) -> None:
    assert show_bytes(number) == text


@pytest.mark.parametrize(
    ("pair", "texts"),
    [
        ((2**30, 3 * 2**20), ("1.0 GiB", "3.0 MiB")),
        ((2**30 - 2**20, 2**30), ("0.999 GiB", "1.000 GiB")),
        ((2**30, 2**30 + 1), ("1,073,741,824 bytes", "1,073,741,825 bytes")),
        ((1023, 1024), ("0.999 KiB", "1.000 KiB")),
        ((7, 8), ("7 B", "8 B")),
        ((2**40, 2**40), ("1.0 TiB", "1.0 TiB")),
    ],
)
def test_two_sizes_that_are_compared_look_different(pair: tuple[int, int], texts: tuple[str, str]) -> None:
    assert show_apart(*pair) == texts


def test_nearest_word() -> None:
    assert did_you_mean("block.*", ["blocks.*", "head"]) == ' Did you mean "blocks.*"?'
    assert did_you_mean("zzz", ["blocks.*", "head"]) == ""


@pytest.mark.parametrize("value", [5, "", ("a", ""), ("a", 3), None])
def test_what_is_not_a_pattern(value: object) -> None:
    with pytest.raises(
        zs.OptionError, match=r"units=.* must be a name pattern such as \"blocks\.\*\", or several"
    ):
        patterns(value, "units")  # type: ignore[arg-type]


def test_defaults() -> None:
    options = Options()
    assert (options.stage, options.precision, options.units, options.bucket_bytes) == (
        3,
        None,
        "auto",
        25 * 2**20,
    )
    assert (options.shards_state, options.shards_grads, options.shards_params) == (True, True, True)


@pytest.mark.parametrize(
    ("stage", "sharded"),
    [
        (0, (False, False, False)),
        (1, (True, False, False)),
        (2, (True, True, False)),
        (3, (True, True, True)),
    ],
)
def test_a_stage_is_three_booleans(stage: int, sharded: tuple[bool, bool, bool]) -> None:
    options = Options(stage=stage)
    assert (options.shards_state, options.shards_grads, options.shards_params) == sharded


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stage": 4}, r"stage=4 is not one of 0, 1, 2, 3"),
        ({"stage": True}, r"stage=True is not one of"),
        ({"stage": "3"}, r"stage='3' is not one of"),
        ({"precision": "int8"}, r"precision='int8' is not a floating dtype; choose one of"),
        ({"precision": 16}, r"precision=16 must be a Precision, or one of bf16, fp16, fp32"),
        ({"bucket_bytes": "many"}, r"bucket_bytes='many' is not a size"),
        ({"prefetch": -1}, r"prefetch=-1 must be a number of units, 0 or more"),
        ({"prefetch": 1.5}, r"prefetch=1\.5 must be a number of units"),
        ({"prefetch": True}, r"prefetch=True must be a number of units"),
        ({"units": 3}, r"units=3 must be a name pattern"),
        ({"recompute": ("",)}, r"recompute=.* must be a name pattern"),
        ({"split": "row"}, r"split='row' is not one of auto, rows, level, whole\. Did you mean \"rows\"\?"),
        ({"buffers": "broadcst"}, r"buffers='broadcst' is not one of .* Did you mean \"broadcast\"\?"),
        ({"transport": "glo"}, r"transport='glo' is not one of .* Did you mean \"gloo\"\?"),
    ],
)
def test_what_is_refused(given: dict[str, object], text: str) -> None:
    with pytest.raises(zs.OptionError, match=text):
        Options(**given)


def test_patterns_become_tuples() -> None:
    options = Options(units="blocks.*", recompute=["blocks.0", "blocks.1"])
    assert (options.units, options.recompute) == (("blocks.*",), ("blocks.0", "blocks.1"))
    assert hash(options) == hash(Options(units=("blocks.*",), recompute=("blocks.0", "blocks.1")))


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().stage = 1  # type: ignore[misc]


def test_the_typed_keywords_are_the_options() -> None:
    assert set(typing.get_type_hints(OptionArguments)) == {
        field.name for field in dataclasses.fields(Options)
    }


def test_every_option_is_described_where_it_is_given() -> None:
    described = str(zs.shard.__doc__)
    assert not [field.name for field in dataclasses.fields(Options) if f"`{field.name}`:" not in described]


@pytest.mark.parametrize(
    ("precision", "wire", "landed", "numerics"),
    [
        (zs.Precision(), "bfloat16", "bfloat16", "rounding"),
        (zs.Precision("fp16"), "float16", "float32", "rounding"),
        (zs.Precision("torch.bfloat16", reduce="fp32"), "float32", "float32", "rounding"),
        (zs.Precision("fp16", grad="fp16"), "float16", "float16", "rounding"),
        (zs.Precision("bf16", reduce="fp32", grad="bf16"), "float32", "bfloat16", "rounding"),
        (zs.Precision("fp32"), "float32", "float32", "exact"),
    ],
)
def test_precision(precision: zs.Precision, wire: str, landed: str, numerics: str) -> None:
    assert (precision.wire, precision.landed, precision.numerics) == (wire, landed, numerics)


@pytest.mark.parametrize(("name", "compute"), [("bf16", "bfloat16"), ("float16", "float16")])
def test_precision_by_name(name: str, compute: str) -> None:
    assert Options(precision=name).precision == zs.Precision(compute)


def test_full_precision_by_name_is_no_precision() -> None:
    assert Options(precision="fp32").precision is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"compute": "int4"}, r"Precision\.compute='int4' is not a floating dtype"),
        ({"reduce": "fp8"}, r"Precision\.reduce='fp8' is not a floating dtype"),
        (
            {"compute": "float32", "master": "bf16"},
            r"a bfloat16 master cannot hold float32 weights; swap the two",
        ),
        ({"keep": ("",)}, r"Precision\.keep=.* must be a name pattern"),
    ],
)
def test_precision_that_is_refused(arguments: dict[str, typing.Any], text: str) -> None:
    with pytest.raises(zs.OptionError, match=text):
        zs.Precision(**arguments)
