"""The page of a plan: one file that fetches nothing, with the figures of every candidate's step."""

from __future__ import annotations

import json
import os
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import zeroshard as zs
from zeroshard import cli
from zeroshard.layout.memory import KINDS, OUTSIDE
from zeroshard.planner.answer import ModelProblem, problem_of
from zeroshard.report import page


@cache
def asked() -> ModelProblem:
    with torch.device("meta"):
        model = models.GPT(even=True, blocks=4)
    return problem_of(model, ranks=2, limit="1900KiB", batch=torch.zeros(8, 11, dtype=torch.int64))


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_has_every_candidates_step() -> None:
    model_problem = asked()
    plan = model_problem.plan()
    data = data_of(page(plan, model_problem.frames(plan), ["largest micro-batch: 8."]))
    assert data["kinds"] == [*KINDS, *OUTSIDE]
    assert data["limit"] == 1900 * 1024
    assert len(data["candidates"]) == len(plan.candidates) > 3
    assert data["reasons"][0] == "largest micro-batch: 8."
    for told, one in zip(data["candidates"], plan.candidates, strict=True):
        assert max(sum(frame[2:]) for frame in told["frames"]) == one.device
        assert sum(frame[1] for frame in told["frames"]) == pytest.approx(1, abs=1e-4)
        assert told["frames"][-1][0] == "the update"
    assert plan.candidates[data["chosen"]] == plan.chosen


def test_the_page_has_rates_and_what_they_assume() -> None:
    model_problem = asked()
    plan = model_problem.plan()
    rate = model_problem.rate(plan)
    data = data_of(page(plan, model_problem.frames(plan), rate=rate))
    assert (rate.items, rate.what) == (2 * 8 * 11, "tokens")
    assert 0 < rate.flops <= 6 * plan.parameters * 8 * 11
    assert data["rate"]["assumed"][0].startswith("Times are estimates for ")
    assert any("an exchange takes 20 µs more" in text for text in data["rate"]["assumed"])
    assert data["optimizer"] == list(plan.optimizer)
    assert {one["precision"] for one in data["candidates"]} == {"as it is"}
    with torch.device("meta"):
        narrow = problem_of(models.GPT(even=True, blocks=2), ranks=2, limit="1GiB", precision="bf16")
    plan = narrow.plan()
    data = data_of(page(plan, narrow.frames(plan), rate=narrow.rate(plan)))
    assert {one["precision"] for one in data["candidates"]} == {"bf16"}
    assert 'precision="bf16"' in data["candidates"][0]["options"]
    assert any("No batch was given" in text for text in data["rate"]["assumed"])


def test_the_page_fetches_nothing() -> None:
    model_problem = asked()
    plan = model_problem.plan()
    text = page(plan, model_problem.frames(plan))
    outside = re.findall(r"""(?:src|href|action)\s*=|url\(|@import|fetch\(|XMLHttp|import\(""", text)
    assert not outside
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of a namespace, which nothing loads
    assert "{{" not in text


def test_every_kind_has_a_colour_in_light_and_dark() -> None:
    model_problem = asked()
    plan = model_problem.plan()
    text = page(plan, model_problem.frames(plan))
    for number, kind in enumerate((*KINDS, *OUTSIDE)):
        assert len(re.findall(rf"--k{number}: #", text)) == 2, kind


def test_a_models_name_cannot_end_the_script() -> None:
    class Odd(torch.nn.Linear):
        pass

    Odd.__name__ = "</script><b>"
    model_problem = problem_of(Odd(3, 3), ranks=1, limit="1MiB")
    plan = model_problem.plan()
    text = page(plan, model_problem.frames(plan))
    assert "</script><b>" not in text
    assert data_of(text)["model"] == "</script><b>"


def test_the_options_on_the_page_can_be_typed() -> None:
    """What the page shows as a call of `shard` is the plan's options."""
    with torch.device("meta"):
        model = models.GPT(even=True, blocks=2)
    plan = zs.plan(
        model, ranks=1, limit="1GiB", offload=zs.Offload(master="split"), precision="bf16", clip_norm=1.0
    )
    model_problem = problem_of(
        model, ranks=1, limit="1GiB", offload=zs.Offload(master="split"), precision="bf16", clip_norm=1.0
    )
    call = data_of(page(plan, model_problem.frames(plan)))["candidates"][0]["options"]
    said: dict[str, Any] = {}
    shard = partial(lambda said, model, optimizer, **options: said.update(options), said)
    exec(call.replace("zs.shard", "shard"), {"zs": zs, "shard": shard, "model": 0, "optimizer": 0})
    assert zs.Options(**said) == zs.Options(**plan.options())


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "paged_model.py").write_text(
        "import torch.nn as n\ndef build():\n    return n.Sequential(n.Linear(8, 8), n.Linear(8, 8))\n"
    )
    words = ["plan", f"{tmp_path}/paged_model.py:build", "--ranks", "2", "--device", "1MiB"]
    assert cli.main([*words, "--html", str(tmp_path / "plan.html")]) == 0
    assert "plan.html" in capsys.readouterr().out
    assert data_of((tmp_path / "plan.html").read_text())["ranks"] == 2
    (tmp_path / "plan.html").write_text("mine")
    assert cli.main([*words, "--html", str(tmp_path / "plan.html")]) == 1
    assert "this exists and stays as it is. Name another file, or pass --overwrite" in capsys.readouterr().err
    assert (tmp_path / "plan.html").read_text() == "mine"
    assert cli.main([*words, "--html", str(tmp_path / "plan.html"), "--overwrite"]) == 0
    assert data_of((tmp_path / "plan.html").read_text())["ranks"] == 2
    assert {*os.listdir(tmp_path)} - {"__pycache__"} == {"paged_model.py", "plan.html"}
    assert cli.main([*words, "--html", str(tmp_path / "absent" / "plan.html")]) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_the_examples_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python blocks of docs/planning.md, one after another."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})
    assert "chosen" in capsys.readouterr().out
    assert zs.Plan.read(tmp_path / "plan.json").ranks == 8


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_a_page_says_stands_out_from_its_ground() -> None:
    """In light and in dark: a contrast of 4.5 to 1, as WCAG demands of small text."""
    text = (Path(zs.__file__).parent / "report" / "template.html").read_text(encoding="utf-8")
    schemes = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", rule))
        for rule in re.findall(r":root \{.*?\}", text, re.S)
    ]
    assert len(schemes) == 2
    for scheme in schemes:
        for ink in ("ink", "soft", "faint", "accent", "good", "bad"):
            for ground in ("paper", "card"):
                low, high = sorted((luminance(scheme[ink]), luminance(scheme[ground])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground, scheme[ink])
