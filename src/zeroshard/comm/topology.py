"""Which ranks share a node."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from zeroshard.errors import OptionError


@dataclass(frozen=True)
class Topology:
    """`nodes[r]` is the node of rank r; nodes are numbered in the order in which ranks meet them.

    >>> by_count(6, 2).nodes
    (0, 0, 1, 1, 2, 2)
    """

    nodes: tuple[int, ...]

    @property
    def count(self) -> int:
        return max(self.nodes) + 1

    @property
    def ranks_per_node(self) -> int | None:
        """How many ranks every node has, where all have as many and those follow one another."""
        each = len(self.nodes) // self.count
        regular = all(node == rank // each for rank, node in enumerate(self.nodes))
        return each if regular and each * self.count == len(self.nodes) else None

    def why_not_two_levels(self) -> str | None:
        """Why traffic cannot be divided into that inside nodes and that between them, or None."""
        if self.count == 1:
            return f"all {len(self.nodes)} ranks are on one node"
        if self.count == len(self.nodes):
            return "every rank is on a node of its own"
        if self.ranks_per_node is None:
            return f"nodes must have equally many ranks, one after another; by rank they are {self.nodes}"
        return None


def by_host(hosts: Sequence[Hashable]) -> Topology:
    """From what tells the hosts of the ranks apart, in rank order."""
    numbers: dict[Hashable, int] = {}
    return Topology(tuple(numbers.setdefault(host, len(numbers)) for host in hosts))


def by_count(size: int, ranks_per_node: int) -> Topology:
    """As if every `ranks_per_node` ranks were on a node."""
    if ranks_per_node > size:
        raise OptionError(
            f"ranks_per_node={ranks_per_node} and only {size} {'rank' if size == 1 else 'ranks'}: drop it, "
            "or start as many with `zeroshard run --ranks N script.py`."
        )
    if size % ranks_per_node:
        raise OptionError(
            f"ranks_per_node={ranks_per_node} does not divide the {size} ranks: every node must have as many."
        )
    return Topology(tuple(rank // ranks_per_node for rank in range(size)))
