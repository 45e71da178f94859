"""Integers only: who owns which rows, how a model is divided, and how many bytes that takes, and when.

In the order in which they build on one another: `layout` (rows, packs, bands), `placement` (what rests in
which tier), `shapes` (a model as numbers), `lending` (units gathered at one time), `coding` and `wires`
(the way of the gradients), `division` (slots, bundles, parts, buckets), `meeting` and `crossing` (what
ranks send, and pass it through), `memory` (all that a rank holds), `timeline` (when it does), `balance`
(how evenly).
"""
