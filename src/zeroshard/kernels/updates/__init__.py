"""Optimizers that the host knows: a file of Python and one of C each, and nothing else.

`adam.py` says what state AdamW keeps, and which numbers a step comes down to; `adam.c` is the pass over it.
The module's `Rows` are found by its name (`host_update`), its kernel by `StateRows.kernel`."""
