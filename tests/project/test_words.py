"""The words of the code and the documents are those of the field, or of the glossary."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "zeroshard"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md"])
GLOSSARY = ROOT / "docs" / "architecture" / "words.md"

# What was once called so has a word of the field now.
OLD = set(
    re.findall(
        r"\w+",
        """
        bundle piece face region courier crew parcel errand road berth desk pace landing promise wish inquiry
        inquire likeness twin stretch tenant seat company claim shelf roll whereabouts crossed outlook leaf
        mail deal sheet
        """,
    )
)
# Names of torch and of Python.
THEIRS = {"tree_leaves", "is_leaf", "leaves"}
# English, and names: `Hugging Face`, a vendor's data sheet, what leaves.
ENGLISH = re.compile(r"Hugging\s+Face|data\s+sheets?|\bleaves\b", re.ASCII)


def singular(word: str) -> str:
    word = word.lower()
    for end, single in (("elves", "elf"), ("eaves", "eaf"), ("iries", "iry"), ("nesses", "ness")):
        if word.endswith(end):
            return word.removesuffix(end) + single
    for end in ("es", "s"):
        if word.endswith(end) and word.removesuffix(end) in OLD:
            return word.removesuffix(end)
    return word


def words_of(name: str) -> set[str]:
    """The words that an identifier is made of."""
    return {singular(word) for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names_in(path: Path) -> set[str]:
    """All that a module defines or uses, and its own name."""
    names = set(path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("name", "id", "attr", "arg", "asname"):
            value = getattr(node, field, None)
            names |= {value} if isinstance(value, str) else set()
    return names


def test_identifiers_are_made_of_the_fields_words() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if old := {name for name in names_in(path) - THEIRS if words_of(name) & OLD}:
            found[str(path.relative_to(PACKAGE))] = old
    assert not found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_say_it_in_the_fields_words(document: Path) -> None:
    text = ENGLISH.sub("", document.read_text(encoding="utf-8"))
    lines = text.splitlines()
    assert not [
        line
        for line in lines
        if {singular(word) for word in re.findall(r"[A-Za-z]+", line)} & (OLD - {"claim"})
    ]


def test_the_glossary_has_at_most_twenty_words_each_with_its_reason() -> None:
    table = GLOSSARY.read_text(encoding="utf-8").partition("## Words of our own")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")][2:]
    assert 0 < len(rows) <= 20
    assert not [row for row in rows if len(row) != 3 or not all(cell.strip() for cell in row)]


@pytest.mark.parametrize("folder", ["runtime", "planner", "checkpoint", "offload", "kernels", "layout"])
def test_what_a_package_says_of_its_modules_is_so(folder: str) -> None:
    """A word in backticks that is all lower case names a module, there or as a folder of the package."""
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    modules = {path.stem for path in [*(PACKAGE / folder).glob("*.py"), *PACKAGE.iterdir()]}
    named = set(re.findall(r"`([a-z_0-9]+)`", text))
    assert named
    assert not named - modules


def test_the_files_that_the_architecture_names_are_there() -> None:
    lost = []
    for document in sorted((ROOT / "docs" / "architecture").glob("*.md")):
        for name in re.findall(r"`([\w/]+\.(?:py|h))\b", document.read_text(encoding="utf-8")):
            bases = (PACKAGE, ROOT, ROOT / "tests", *(path for path in PACKAGE.iterdir() if path.is_dir()))
            lost += [] if any((base / name).exists() for base in bases) else [f"{document.name}: {name}"]
    assert not lost
