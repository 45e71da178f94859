"""Imported last by the server that ranks are forked from, and by nobody else.

Objects that are there before a rank is forked stay until it ends. Python's collector need not look at them
again, which would take a quarter of a second in each new rank, nor write to their pages, which ranks share.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
