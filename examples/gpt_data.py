"""The sources of Python's own standard library as text to learn from: nothing to download, on any machine.

Everything here is a pure function of the installed Python, so every rank reads, splits and cuts the same way
and no rank has to send tokens to another.

  file    a module of the library, less tests and tables; one in 16, by a seeded draw, is held out.
          Comments and docstrings are left out: in two minutes a model can learn Python, but not English too
  shard   a word with the sign or space before it, a digit, a run of signs, or a line break with the
          indentation that follows it
  token   a byte, or two tokens glued because they often meet (byte-pair encoding), never across shards
  window  `context` tokens and the one after them: what one row of a batch is cut from
"""

from __future__ import annotations

import heapq
import os
import random
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

# Tests are as large as the library itself and read like lists.
SKIPPED = {"__pycache__", "dist-packages", "site-packages", "test", "tests", "idle_test"}
HELD_OUT = 16
LEARNT_FROM = 6000
SHARDS = re.compile(r"\n+ *|[^A-Za-z0-9\n]?[A-Za-z]+|[0-9]| ?[^A-Za-z0-9\s]+|\s")
COMMENTS = re.compile(r"^ *#.*\n|  +#.*$", re.MULTILINE)
DOCSTRINGS = re.compile(r"^ *[rRuU]?(\"\"\"|''').*?\1 *\n", re.MULTILINE | re.DOTALL)
GAPS = re.compile(r"\n\n\n\n+")
ENTRIES = re.compile(r"^ *['\"0-9(\[{]", re.MULTILINE)
END = "\x00"


def sources(folder: Path | None = None) -> list[Path]:
    """Every Python file that is worth reading, in an order that does not depend on the file system."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for place, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        found += [Path(place, name) for name in sorted(names) if name.endswith(".py")]
    if not found:
        raise SystemExit(f"no Python source under {root}: name a folder that has some with --text FOLDER")
    return found


def code(source: bytes) -> str:
    """A file without its prose, one character for each byte: latin-1 does that."""
    text = source.replace(b"\r\n", b"\n").expandtabs(8).decode("latin-1")
    return GAPS.sub("\n\n\n", COMMENTS.sub("", DOCSTRINGS.sub("", text))).strip("\n") + "\n"


def is_table(text: str) -> bool:
    """Whether a third of the lines begin with a value, as in lists of codecs. They read like noise."""
    return len(ENTRIES.findall(text)) > text.count("\n") / 3


def read(paths: Sequence[Path], limit: int) -> tuple[str, str]:
    """About `limit` bytes of text as (train, held out)."""
    order = random.Random(0).sample(list(paths), len(paths))
    train: list[str] = []
    held: list[str] = []
    total = 0
    for number, path in enumerate(order):
        text = code(path.read_bytes())
        if is_table(text) or total > limit:
            continue
        (held if number % HELD_OUT == 0 else train).append(text + END)
        total += len(text)
    return "".join(train), "".join(held)


class Tokenizer:
    """Byte-pair encoding, learnt in about a second.

    Text is first counted into distinct shards (a few thousand cover almost everything), and merges are learnt
    on those counts, so that a merge costs as much as there are distinct shards with the pair, not text.
    """

    def __init__(self, text: str, size: int) -> None:
        counts = Counter(SHARDS.findall(text))
        self.bytes: list[bytes] = [bytes([byte]) for byte in range(256)]
        self.ranks: dict[tuple[int, int], int] = {}
        self._known: dict[str, list[int]] = {}
        for pair in _merges(counts.most_common(LEARNT_FROM), size - 256):
            self.ranks[pair] = len(self.bytes)
            self.bytes.append(self.bytes[pair[0]] + self.bytes[pair[1]])

    def __len__(self) -> int:
        return len(self.bytes)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        known = self._known
        for shard in SHARDS.findall(text):
            found = known.get(shard)
            if found is None:
                found = known[shard] = self._encode_shard(shard)
            tokens += found
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.bytes[token] for token in tokens).decode("utf-8", errors="replace")

    def _encode_shard(self, shard: str) -> list[int]:
        tokens = list(shard.encode("latin-1"))
        while len(tokens) > 1:
            best = min(pairwise(tokens), key=lambda pair: self.ranks.get(pair, len(self.bytes)))
            if best not in self.ranks:
                break
            tokens = _glue(tokens, best, self.ranks[best])
        return tokens


def _glue(tokens: list[int], pair: tuple[int, int], new: int) -> list[int]:
    glued: list[int] = []
    index = 0
    while index < len(tokens):
        if tokens[index : index + 2] == [*pair]:
            glued.append(new)
            index += 2
        else:
            glued.append(tokens[index])
            index += 1
    return glued


def _merges(counts: Sequence[tuple[str, int]], number: int) -> Iterator[tuple[int, int]]:
    """The `number` most frequent pairs, each counted after the earlier ones were glued."""
    shards = [list(shard.encode("latin-1")) for shard, _ in counts]
    often = [count for _, count in counts]
    total: dict[tuple[int, int], int] = defaultdict(int)
    where: dict[tuple[int, int], set[int]] = defaultdict(set)
    for index, tokens in enumerate(shards):
        for pair in pairwise(tokens):
            total[pair] += often[index]
            where[pair].add(index)
    # The count of an old pair can only fall: an entry that is out of date is met too early, and put back.
    heap = [(-count, pair) for pair, count in total.items()]
    heapq.heapify(heap)
    new = 256
    while heap and new < 256 + number:
        count, pair = heapq.heappop(heap)
        if -count != total[pair]:
            if total[pair] > 0:
                heapq.heappush(heap, (-total[pair], pair))
            continue
        touched: set[tuple[int, int]] = set()
        for index in where.pop(pair):
            for old in pairwise(shards[index]):
                total[old] -= often[index]
            shards[index] = _glue(shards[index], pair, new)
            for fresh in pairwise(shards[index]):
                total[fresh] += often[index]
                where[fresh].add(index)
                if new in fresh:
                    touched.add(fresh)
        for fresh in touched:
            heapq.heappush(heap, (-total[fresh], fresh))
        yield pair
        new += 1


@dataclass(frozen=True)
class Text:
    """Tokens, and the bytes they stand for: only losses per byte compare across tokenizers."""

    tokens: Tensor
    bytes: int

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / len(self.tokens)

    def windows(self, context: int) -> int:
        return (len(self.tokens) - 1) // context

    def batch(self, rows: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the windows numbered `rows`; targets are the inputs one token later."""
        starts = torch.tensor(rows).unsqueeze(1) * context
        index = starts + torch.arange(context + 1)
        window = self.tokens[index].long()
        return window[:, :-1], window[:, 1:]


class Batches:
    """What a rank reads at a step: the windows, shuffled anew for every pass, are dealt to the ranks."""

    def __init__(self, text: Text, context: int, rows: int, rank: int, size: int) -> None:
        self.text, self.context, self.rows, self.rank, self.size = text, context, rows, rank, size
        self._order: list[int] = []
        self._pass = -1

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        steps = max(1, self.text.windows(self.context) // (self.rows * self.size))
        if step // steps != self._pass:
            self._pass = step // steps
            shuffle = torch.Generator().manual_seed(self._pass)
            self._order = torch.randperm(self.text.windows(self.context), generator=shuffle).tolist()
        start = ((step % steps) * self.size + self.rank) * self.rows
        return self.text.batch(self._order[start : start + self.rows], self.context)


def load(vocabulary: int, folder: Path | None = None, limit: int = 8_000_000) -> tuple[Tokenizer, Text, Text]:
    """The tokenizer, the text to train on and the text held out."""
    train, held = read(sources(folder), limit)
    tokenizer = Tokenizer(train, vocabulary)

    def encoded(text: str) -> Text:
        return Text(torch.tensor(tokenizer.encode(text), dtype=torch.int32), len(text))

    return tokenizer, encoded(train), encoded(held)
