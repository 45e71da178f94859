"""What the README and the guides show runs as it stands there, and so do the examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard import options
from zeroshard.cli import main

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "zeroshard"
EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


def blocks_of(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


# Of planning.md and the codec of one's own there are tests that look at what comes out.
GUIDES = ["README.md", *(f"docs/{n}.md" for n in ("guide", "offload", "checkpoints", "communication"))]
GUIDES += ["docs/synchronisation.md", "docs/testing.md", "docs/from-ddp.md"]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])
# Pages whose blocks need not end in a run.
PAGES = ["index", "quickstart", "faq", "coming-from", "errors", "concepts", "how-to/*", "zh/*"]
SHOWN = sorted(path for page in PAGES for path in ROOT.glob(f"docs/{page}.md") if blocks_of(path))
SHOWN.append(ROOT / "README.zh-CN.md")
# Pages whose blocks are run where libraries are installed, or what comes out of them is looked at.
ELSEWHERE = {
    "planning": "planner/test_plan_page.py",
    "accelerate": "integrations/test_accelerate.py",
    "huggingface": "integrations/test_hf.py",
    "keras": "integrations/test_keras.py",
    "lightning": "integrations/test_lightning.py",
}
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
    known = [*options.TRANSPORTS], [*options.TIER_SCHEMES]  # what a page registers is unknown elsewhere
    monkeypatch.setattr(zs, "shard", wraps(zs.shard)(lambda *args, **asked: made.shard(*args, **asked)))
    monkeypatch.chdir(tmp_path)
    yield made
    made.close()
    options.TRANSPORTS[:], options.TIER_SCHEMES[:] = known


@pytest.mark.parametrize("guide", GUIDES)
def test_the_code_of_a_guide_runs(guide: str, reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = blocks_of(ROOT / guide)
    assert blocks
    for block in blocks:
        reader.read(block)
    assert isinstance(reader.names["run"], zs.Run)
    reader.close()
    if guide == "docs/checkpoints.md":
        assert zs.latest("ckpt") == Path("ckpt/step-500")


def test_a_picture_is_legible_in_light_and_dark_and_loads_nothing() -> None:
    pictures = sorted(ROOT.glob("docs/diagrams/*.svg"))
    assert pictures
    for picture in pictures:
        text = picture.read_text(encoding="utf-8")
        root = ElementTree.fromstring(text)
        names = [root.find(f"{{http://www.w3.org/2000/svg}}{name}") for name in ("title", "desc")]
        assert all(name is not None and name.text for name in names), picture.name
        light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
        kinds = set(re.findall(r"\.(\w+) { (?:fill|stroke): #", light))
        assert kinds
        assert kinds <= set(re.findall(r"\.(\w+)[ ,]", dark)), picture.name
        assert not re.findall(r"(?:href|src|url)\W+https?:", text), picture.name


@pytest.mark.parametrize("page", SHOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    if page.stem == "load-a-big-model":
        torch.save(Transformer(None).state_dict(), "weights.pt")
        main(["import", "weights.pt", "ckpt/start"])
    for block in blocks_of(page):
        reader.read(block)


def test_every_page_with_code_is_run() -> None:
    run = {ROOT / guide for guide in GUIDES} | set(SHOWN) | {ROOT / f"docs/{page}.md" for page in ELSEWHERE}
    assert not [path.name for path in DOCUMENTS if blocks_of(path) and path not in run]
    for page, test in ELSEWHERE.items():
        assert f"{page}.md" in (ROOT / "tests" / test).read_text(encoding="utf-8")


def test_the_messages_that_the_page_of_errors_explains_are_those_of_the_source() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    texts = re.sub(r"""(["'])\s+f?["']""", "", sources)  # what is written in several pieces
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8").partition("## Errors of torch")[0]
    shown = re.findall(r"^\*\*`+ ?(.*?) ?`+.*\*\*$", page, re.MULTILINE)
    assert len(shown) > 50
    parts = [part for message in shown for part in message.split("…")]
    assert not [part for part in parts if part.strip() not in texts]


def test_every_error_has_its_part_of_the_page_of_errors() -> None:
    kinds = [kind.__name__ for kind in zs.ZeroShardError.__subclasses__()]
    assert {kind.lower() for kind in kinds} <= marks(ROOT / "docs/errors.md")


@pytest.mark.ranks
def test_the_quickstart_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks_of(ROOT / "docs/quickstart.md")[0], encoding="utf-8")
    command = [sys.executable, "-m", "zeroshard", "run", "--ranks", "2", "train.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    losses = dict(re.findall(r"rank (\d) of 2: loss ([\d.]+)", found.stdout))
    assert losses.keys() == {"0", "1"}, found.stdout + found.stderr
    assert all(0 < float(loss) < 8 for loss in losses.values())  # untrained: about 8, the variance


@pytest.mark.ranks
def test_the_test_that_a_guide_shows_passes(tmp_path: Path) -> None:
    code = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/testing.md").read_text(encoding="utf-8"), re.DOTALL
    )[0]
    (tmp_path / "test_shown.py").write_text(code, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shown.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "1 passed" in found.stdout, found.stdout + found.stderr


def links(document: Path) -> list[tuple[Path, str]]:
    """What a document points to within the project: files, and headings in them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = [target for target in re.findall(r"\]\(([^()\s]+)\)", text) if "://" not in target]
    parts = [target.partition("#") for target in found]
    return [((document.parent / name).resolve() if name else document, mark) for name, _, mark in parts]


def marks(document: Path) -> set[str]:
    """The anchors that headings get: lower case, spaces as hyphens, nothing but words."""
    return slugs(document.read_text(encoding="utf-8"))


def slugs(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    lost = [
        f"{path.name}#{mark}"
        for path, mark in links(document)
        if not path.exists() or (mark and mark not in marks(path))
    ]
    assert not lost


# What stands where one of the ways of CONTRIBUTING.md ends.
ENDS = {
    "how to shard my model": "run = zs.shard(model, optimizer",
    "how to start on two hosts": "torchrun --nnodes 2",
    "how to resume at another number of ranks": "run.resume(",
    "what an option does to my numbers": "| approximate |",
    "what to do about an out-of-memory error": "| `recompute=True` |",
    "where a gradient is reduced in the code": "starts the reduce-scatter",
}


def test_six_things_are_found_from_the_readme_within_three_links() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Documents")[2]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("|")][2:]
    ways = {question.strip(): re.findall(r"\]\(([^)]+)\)", way) for question, way in rows}
    assert ways.keys() == ENDS.keys()
    for question, way in ways.items():
        assert 1 <= len(way) <= 3, question
        page = ROOT / "README.md"
        for step in way:
            name, _, mark = step.partition("#")
            assert any(target == ROOT / name for target, _ in links(page)), f"{page.name} leads not to {name}"
            page = ROOT / name
            assert not mark or mark in marks(page)
        text = page.read_text(encoding="utf-8")
        if mark:  # it stands in that part of the page
            heading = next(h for h in re.findall(r"^#+ .*$", text, re.MULTILINE) if mark in slugs(h))
            text = text.partition(heading)[2].partition("\n## ")[0]
        assert ENDS[question] in text, question


RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


def test_every_result_is_told_of() -> None:
    told = {path for document in DOCUMENTS for path, _ in links(document)}
    assert not [path.name for path in RESULTS if path.resolve() not in told]


NUMBER = r"\d[\d,]*(?:\.\d+)?"
# Shares, rates, times of a step and the like, and ratios that are told in words.
RATIO = r"× (?=(?:the|a|as|fewer|less|faster|slower)\b)"
FIGURE = re.compile(rf"{NUMBER} (?:%|[KMGT]i?B/s|tokens/s|[mµ]s\b|s a step|times as|{RATIO})")
# A result, the log, a page of results, a test, or where somebody else published it.
SOURCE = re.compile(
    r"\]\([^)]*(?:benchmarks/results/|log/|measurements\.md|tests/|https?://)|\btest(?:s|ed)?\b"
)
# Of rules and options, and no measurements: a margin within which plans are alike, a factor of momentum.
NOT_MEASURED = re.compile(r"within 1 % of (?:it|a limit)|0\.9 × the last one")
PAGES_OF_FIGURES = [d for d in DOCUMENTS if d.parent in (ROOT, *ROOT.glob("docs/**/"))]
PAGES_OF_FIGURES = [d for d in PAGES_OF_FIGURES if d.parent.name != "log" and d.name != "CHANGELOG.md"]


@pytest.mark.parametrize("document", PAGES_OF_FIGURES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_figure_stands_without_what_it_was_measured_by(document: Path) -> None:
    """A part of a page, from one heading to the next, that tells of a measured figure has a link to a result,
    the log or what was published, or says that a test holds it. The log itself is such a source."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        told = FIGURE.findall(NOT_MEASURED.sub("", part))
        assert not told or SOURCE.search(part), (part.partition("\n")[0], told)


def test_a_figure_is_known_by_its_unit() -> None:
    measured = [
        "takes 12 % more",
        "1.14 × the step",
        "2.7 GB/s",
        "0.35 s a step",
        "in 5 ms",
        "2 × fewer bytes",
    ]
    others = ["4 × 2048 tokens", "stage 3", "16Ψ/N", "after 20 steps", "1e-6", "2 × (N−1)/N"]
    assert all(FIGURE.search(text) for text in measured)
    assert not any(FIGURE.search(text) for text in others)


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_what_was_measured_where_and_how(result: Path) -> None:
    """Its script is there; its name has no date, so that a new run takes its place."""
    facts = dict(re.findall(r"^- (\w+): (.+)$", result.read_text(encoding="utf-8"), re.MULTILINE))
    assert {"date", "model", "hardware", "commit", "command"} <= facts.keys()
    assert re.match(r"2\d{3}-\d\d-\d\d$", facts["date"])
    assert re.match(r"[0-9a-f]{7,40}\b", facts["commit"])
    scripts = re.findall(r"benchmarks/\w+/\w+\.py", facts["command"])
    assert scripts
    assert all((ROOT / script).exists() for script in scripts)
    assert not re.search(r"\d{4}-\d\d-\d\d", result.name)


def test_the_data_of_a_result_lie_beside_it() -> None:
    known = {path.stem for path in RESULTS}
    files = [path for path in RESULTS[0].parent.iterdir() if path.suffix != ".md"]
    assert not [path.name for path in files if re.sub(r"-\d\.\d\d$", "", path.stem) not in known]


def test_the_log_is_by_topic_and_no_page_of_it_is_long() -> None:
    pages = sorted((ROOT / "docs" / "log").glob("*.md"))
    assert pages
    assert not [page.name for page in pages if len(page.read_text(encoding="utf-8").splitlines()) > 400]


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/reference/*.md"))
    named = re.findall(r"^::: (zeroshard(?:\.\w+)*?)\.(\w+)$", pages, re.MULTILINE)
    for module, name in named:
        there = (PACKAGE.parent / module.replace(".", "/") / f"{name}.py").exists()
        assert there or hasattr(importlib.import_module(module), name), f"{module}.{name}"
    of_errors = set(zs.errors.__dict__)  # the page of errors has that module whole
    assert set(zs.__all__) - {name for _, name in named} - of_errors == {"PREEMPTED"}  # a number


def test_the_navigation_has_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == sorted(pages)


def columns(text: str) -> int:
    """How wide a text stands in an editor: an ideograph takes two columns."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_has_at_most_100_columns_and_cells_150_characters(document: Path) -> None:
    text = re.sub(
        r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    too_long = []
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            too_long += [cell for cell in re.split(r"(?<!\\)\|", line) if len(cell.strip()) > 150]
        elif columns(line) > 100 and " " in line.lstrip("-* "):
            too_long.append(line)
    assert not too_long


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_examples_in_docstrings_hold(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(f"zeroshard.{name}")
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_the_walks_name_functions_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture" / "walks.md").read_text(encoding="utf-8")
    named = re.findall(r"^- `([\w/]+\.py): ([\w.]+)`", text, re.MULTILINE)
    assert len(named) > 40
    lost = []
    for path, name in named:
        nodes: list[Any] = [ast.parse((PACKAGE / path).read_text(encoding="utf-8"))]
        for part in name.split("."):
            nodes = [child for node in nodes for child in node.body if getattr(child, "name", None) == part]
        lost += [] if nodes else [f"{path}: {name}"]
    assert not lost
