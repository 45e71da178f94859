"""Checkpoints: one format for every world size, stage and tier. The runtime fills in `records.py`; nothing
here imports it.

A checkpoint is a folder of safetensors files and a manifest, and it exists if and only if its manifest does.

Who is imported by whom: `elements`, `wording`, `plainjson`, `disk`, `progress` → `records`, `ranges`,
`values`, `blocks` → `tensorfile` → `manifest` → `claim` → `shelf` → `reader`, `agree` → `saving`, `loading`,
`verifying`, `exporting` → `staging`, `background`, `distcp`, `sources`.
"""

from zeroshard.checkpoint.background import PendingSave, Saver
from zeroshard.checkpoint.exporting import Exported, export
from zeroshard.checkpoint.loading import load
from zeroshard.checkpoint.manifest import Manifest, read_manifest
from zeroshard.checkpoint.records import Alone, Held, Loaded, Peers, Saved, Snapshot
from zeroshard.checkpoint.saving import save
from zeroshard.checkpoint.shelf import clean, latest
from zeroshard.checkpoint.sources import import_weights
from zeroshard.checkpoint.verifying import Report, verify

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
