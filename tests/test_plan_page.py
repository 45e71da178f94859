"""The page of a plan: one file that fetches nothing, with the figures of every candidate's step."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import zeroshard as zs
from zeroshard import cli
from zeroshard.count.timeline import KINDS
from zeroshard.page import page
from zeroshard.planning.answer import Inquiry, inquire


def asked() -> Inquiry:
    with torch.device("meta"):
        model = models.GPT(even=True, blocks=4)
    return inquire(model, ranks=2, limit="1900KiB", batch=torch.zeros(8, 11, dtype=torch.int64))


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_has_every_candidates_step() -> None:
    inquiry = asked()
    plan = inquiry.plan()
    data = data_of(page(plan, inquiry.frames(plan), ["largest micro-batch: 8."]))
    assert data["kinds"] == list(KINDS)
    assert data["limit"] == 1900 * 1024
    assert len(data["candidates"]) == len(plan.candidates) > 3
    assert data["reasons"][0] == "largest micro-batch: 8."
    for told, one in zip(data["candidates"], plan.candidates, strict=True):
        assert max(sum(frame[2:]) for frame in told["frames"]) == one.device
        assert sum(frame[1] for frame in told["frames"]) == pytest.approx(1, abs=1e-4)
        assert told["frames"][-1][0] == "the update"
    assert plan.candidates[data["chosen"]] == plan.chosen


def test_the_page_fetches_nothing() -> None:
    inquiry = asked()
    plan = inquiry.plan()
    text = page(plan, inquiry.frames(plan))
    outside = re.findall(r"""(?:src|href|action)\s*=|url\(|@import|fetch\(|XMLHttp|import\(""", text)
    assert not outside
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of a namespace, which nothing loads
    assert "{{" not in text


def test_every_kind_has_a_colour_in_light_and_dark() -> None:
    inquiry = asked()
    plan = inquiry.plan()
    text = page(plan, inquiry.frames(plan))
    for number in range(len(KINDS)):
        assert len(re.findall(rf"--k{number}: #", text)) == 2, KINDS[number]


def test_a_models_name_cannot_end_the_script() -> None:
    class Odd(torch.nn.Linear):
        pass

    Odd.__name__ = "</script><b>"
    inquiry = inquire(Odd(3, 3), ranks=1, limit="1MiB")
    plan = inquiry.plan()
    text = page(plan, inquiry.frames(plan))
    assert "</script><b>" not in text
    assert data_of(text)["model"] == "</script><b>"


def test_the_options_on_the_page_can_be_typed() -> None:
    """What the page shows as a call of `shard` is the plan's options."""
    with torch.device("meta"):
        model = models.GPT(even=True, blocks=2)
    plan = zs.plan(
        model, ranks=1, limit="1GiB", offload=zs.Offload(master="split"), precision="bf16", clip_norm=1.0
    )
    inquiry = inquire(model, ranks=1, limit="1GiB", offload=zs.Offload(master="split"), precision="bf16",
                      clip_norm=1.0)  # fmt: skip
    call = data_of(page(plan, inquiry.frames(plan)))["candidates"][0]["options"]
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
    assert cli.main([*words, "--html", str(tmp_path / "absent" / "plan.html")]) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_the_examples_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python blocks of docs/planning.md, one after another."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "docs" / "planning.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})
    assert "chosen" in capsys.readouterr().out
    assert zs.Plan.read(tmp_path / "plan.json").ranks == 8
