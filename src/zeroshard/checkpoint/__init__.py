"""Checkpoints: one format for every world size, stage and tier. The runtime fills in `records.py`; nothing
here imports it.

A checkpoint is a folder of safetensors files and a manifest, and it exists if and only if its manifest does.

Who is imported by whom: `elements`, `wording`, `plainjson`, `disk`, `progress` → `records`, `ranges`,
`values`, `blocks` → `tensorfile` → `manifest` → `claim` → `shelf` → `reader`, `agree` → `saving`, `loading`,
`verifying`, `exporting` → `staging`, `background`, `distcp`, `sources`.
"""

from .background import PendingSave, Saver
from .exporting import Exported, export
from .loading import load
from .manifest import Manifest, read_manifest
from .records import Alone, Held, Loaded, Peers, Saved, Snapshot
from .saving import save
from .shelf import clean, latest
from .sources import import_weights
from .verifying import Report, verify

__all__ = [
    "Alone",
    "Exported",
    "Held",
    "Loaded",
    "Manifest",
    "Peers",
    "PendingSave",
    "Report",
    "Saved",
    "Saver",
    "Snapshot",
    "clean",
    "export",
    "import_weights",
    "latest",
    "load",
    "read_manifest",
    "save",
    "verify",
]
