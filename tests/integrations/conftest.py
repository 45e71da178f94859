"""Ranks for the tests of front ends; those of front ends that are not installed are left out."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from forked_ranks import ForkedRanks

from zeroshard.testing import Ranks

NEEDS = {"accelerate": "accelerate", "axolotl": "transformers", "hf": "transformers", "keras": "keras"}
NEEDS |= {"lightning": "lightning", "trl": "transformers"}
collect_ignore_glob = [f"test_{name}*.py" for name, library in NEEDS.items() if find_spec(library) is None]


def started(size: int) -> Iterator[Ranks]:
    """Ranks where warnings are no errors: those of other libraries are not ours to mend."""
    ranks = ForkedRanks(size, warn="ignore")
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    yield from started(2)


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    yield from started(1)
