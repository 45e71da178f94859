"""Host kernels: one pass over memory for updates, sums, casts, codes and checksums of flat CPU tensors.

Each runs on the calling thread and releases the GIL. `Workers` runs chunks side by side; a `ThreadTeam`
shares one update out among threads in C, on a `HostRoundTrip` with the copies around it; `TransferWorkers`
have threads that make such round trips by themselves. All are compiled with the package; without a compiler
torch computes the same bits and one line says so (`library`, `fallback`).
"""

from .checksum import copy_crc32, crc32
from .host_memory import allocate, raw, trim
from .host_update import (
    Bound,
    HostStep,
    StateRows,
    host_update_of,
    is_registered,
    register_host_update,
    update_rows,
)
from .ordered_sum import sum_in_order
from .passes import SumSpan, TensorCopies, accumulate, cast, sum_shards, sum_spans
from .split_master import Ties, join, split
from .threads import ThreadTeam, Workers, usable_cores
from .transfer import (
    CopyEvents,
    CopySpec,
    CopyStreams,
    HostRoundTrip,
    HostTask,
    TransferWorkers,
    UpdateChunks,
)
from .updates.adam import AdamRows, AdamStep
from .updates.sgd import SgdRows, SgdStep

__all__ = [
    "AdamRows",
    "AdamStep",
    "Bound",
    "CopySpec",
    "UpdateChunks",
    "TensorCopies",
    "HostTask",
    "TransferWorkers",
    "CopyStreams",
    "SgdRows",
    "SgdStep",
    "CopyEvents",
    "SumSpan",
    "ThreadTeam",
    "Ties",
    "HostRoundTrip",
    "Workers",
    "accumulate",
    "allocate",
    "cast",
    "copy_crc32",
    "crc32",
    "join",
    "raw",
    "update_rows",
    "StateRows",
    "HostStep",
    "host_update_of",
    "is_registered",
    "register_host_update",
    "split",
    "sum_in_order",
    "sum_shards",
    "sum_spans",
    "trim",
    "usable_cores",
]
