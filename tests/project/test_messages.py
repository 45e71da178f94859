"""Every message of ours is matched by a test: some test has words of it that no other message has."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zeroshard import errors

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src" / "zeroshard"
OURS = {name for name in vars(errors) if name.endswith("Error")}
# So many characters in a row, about two words, must stand in a test.
LENGTH = 12


class Message(NamedTuple):
    where: str
    texts: tuple[str, ...]  # what is written out of it, between what is filled in

    @property
    def shards(self) -> set[str]:
        return {shard for text in self.texts for shard in shards_of(text)}


def shards_of(text: str) -> Iterator[str]:
    flat = " ".join(text.split())
    return (flat[at : at + LENGTH] for at in range(len(flat) - LENGTH + 1))


def quoted(node: ast.AST) -> Iterator[str]:
    """All that stands in quotes, documentation apart."""
    documentation = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Expr)}
    for n in ast.walk(node):
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in documentation:
            yield n.value


def messages(tree: ast.AST, file: str) -> Iterator[Message]:
    """What is given to errors of ours, and to the `error` of a parser of arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] in OURS or called == "parser.error":
                texts = tuple(text for argument in node.args for text in quoted(argument))
                yield Message(f"{file}:{node.lineno}", texts)


def unmatched(told: list[Message], known: set[str]) -> list[Message]:
    """Those of whose rarest shards, by which they can be told from others, none is known. What is too short
    to have shards is passed over."""
    common = Counter(shard for texts in {m.texts for m in told} for shard in Message("", texts).shards)
    found = []
    for message in told:
        rarest = min((common[shard] for shard in message.shards), default=0)
        if rarest and not any(common[shard] == rarest and shard in known for shard in message.shards):
            found.append(message)
    return found


def test_every_message_is_matched_by_a_test() -> None:
    told, known = list[Message](), set[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        told += messages(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(PACKAGE)))
    for path in TESTS.rglob("*.py"):
        for text in quoted(ast.parse(path.read_text(encoding="utf-8"))):
            known.update(shards_of(re.sub(r"\\(.)", r"\1", text)))  # a pattern's backslashes do not count
    assert len(told) > 400, "the messages were not found"
    left = [f"{m.where} {' … '.join(m.texts)}" for m in unmatched(told, known)]
    assert not left, "no test has words that only these messages have:\n" + "\n".join(left)


def test_a_new_message_is_found_out() -> None:
    source = """
raise OptionError(f"stage={stage} is not a stage: pass 0 to 3.")
raise ModelError("this model has no wheels, so it cannot be " "pushed: pass one that has some.")
raise ModelError("this model has no wings, so it cannot be thrown: pass one that has some.")
raise KeyError("not one of ours, whatever it says")
"""
    told = list(messages(ast.parse(source), "new.py"))
    assert [m.where for m in told] == ["new.py:2", "new.py:3", "new.py:4"]
    assert unmatched(told, set()) == told
    shared = set(shards_of("pass one that has some"))
    assert unmatched(told, shared) == told, "words that two of them have tell neither"
    own = set(shards_of("is not a stage: pass 0")) | set(shards_of("cannot be pushed: pass one"))
    assert unmatched(told, own) == told[2:]
