"""What the README and the guides show runs as it stands there, and so do the examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
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
GUIDES += ["docs/synchronisation.md", "docs/testing.md"]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "README.md"])
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


@pytest.mark.ranks
def test_the_test_that_a_guide_shows_passes(tmp_path: Path) -> None:
    code = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/testing.md").read_text(encoding="utf-8"), re.DOTALL
    )[0]
    (tmp_path / "test_shown.py").write_text(code, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shown.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "1 passed" in found.stdout, found.stdout + found.stderr


def links(document: Path) -> list[tuple[Path, str]]:
    """What a document points to within the project: files, and headings in them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = [target for target in re.findall(r"\]\(([^()\s]+)\)", text) if "://" not in target]
    parts = [target.partition("#") for target in found]
    return [((document.parent / name).resolve() if name else document, mark) for name, _, mark in parts]


def marks(document: Path) -> set[str]:
    """The anchors that headings get: lower case, spaces as hyphens, nothing but words."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    lost = [
        f"{path.name}#{mark}"
        for path, mark in links(document)
        if not path.exists() or (mark and mark not in marks(path))
    ]
    assert not lost


def test_every_result_is_told_of() -> None:
    told = {path for document in DOCUMENTS for path, _ in links(document)}
    results = (ROOT / "benchmarks" / "results").glob("*.md")
    assert not [path.name for path in sorted(results) if path.resolve() not in told]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_examples_in_docstrings_hold(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(f"zeroshard.{name}")
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
