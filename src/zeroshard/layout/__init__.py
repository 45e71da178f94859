"""Integers only: who owns which rows, how a model is divided, and how many bytes that takes, and when.

The one place that decides: `division.ModelLayout` has the gather groups, the buckets in their order, the
offload groups and every wire. A run is built from it, and a plan adds the same up.

In the order in which they build on one another: `sharding` (rows, packs, bands), `placement` (what rests in
which tier), `specs` (a model and what it is divided into, as numbers), `prefetch` (units gathered at one
time), `codes` (codes on a wire), `division`, `traffic` (what ranks send), `memory` (all that a rank holds,
and when).
"""
