"""What the README and the guides show runs as it stands there, and so do the examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"
EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
# Of planning.md and the codec of one's own there are tests that look at what comes out.
GUIDES = ["README.md", *(f"docs/{n}.md" for n in ("guide", "offload", "checkpoints", "communication"))]
GUIDES.append("docs/synchronisation.md")
SEVERAL_HOSTS = ("node_cache=True", 'transport="nodes"')


class Transformer(nn.Module):
    """The smallest that has what the guides name. A scalar loss, which also is its own `.loss`."""

    def __init__(self, config: None) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Any:
        loss: Any = self.head(self.norm(self.tokens(tokens))).float().square().mean()
        loss.loss = loss
        return loss


class Reader:
    """Runs the code of a guide, statement after statement, on one rank."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"torch": torch, "zs": zs, "sys": sys, "nullcontext": nullcontext}
        self.runs: list[zs.Run] = []
        self._shard = zs.shard

    def shard(self, *args: Any, **options: Any) -> zs.Run:
        self.runs.append(self._shard(*args, **options))
        return self.runs[-1]

    def read(self, code: str) -> None:
        own, batches = "model = " in code, [torch.tensor([[1, 2, 3]])] * 2
        self.names |= {"Transformer": Transformer, "config": None, "loader": batches, "data": batches}
        self.names |= {"batch": batches, "n": 2, "last": 1, "step": 0, "steps": 500}
        for statement in ast.parse(code).body:
            source = ast.unparse(statement)
            if "zs.shard(" in source:
                if not own:
                    self.start()
                if any(word.replace('"', "'") in source for word in SEVERAL_HOSTS):
                    with pytest.raises(zs.OptionError, match=r"transport 'nodes' needs a process group"):
                        exec(source, self.names)
                    continue
            if not own and source.startswith("optimizer = "):
                self.start()
            exec(source, self.names)

    def start(self) -> None:
        """A model and its optimizer that nothing was done with."""
        self.close()
        model = Transformer(None)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        self.names |= {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def close(self) -> None:
        while self.runs:
            self.runs.pop().close()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Reader]:
    made = Reader()
    monkeypatch.setattr(zs, "shard", made.shard)
    monkeypatch.chdir(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("guide", GUIDES)
def test_the_code_of_a_guide_runs(guide: str, reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / guide).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        reader.read(block)
    assert isinstance(reader.names["run"], zs.Run)
    reader.close()
    if guide == "docs/checkpoints.md":
        assert zs.latest("ckpt") == Path("ckpt/step-500")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_examples_in_docstrings_hold(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(f"zeroshard.{name}")
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
