"""Checkpoints: one format for every world size, stage and tier. The runtime fills in `records.py`; nothing
here imports it.

A checkpoint is a folder of safetensors files and a manifest, and it exists if and only if its manifest does.
The format: `records`, `values`, `tensor_file`, `manifest`, and `untrusted` for what a file may claim. The
folder: `durable_files`, `directory`, `locks`. What is done with it: `saving`, by the plan of `ranges` and, in
the background, through `staging` and `pacing`; `loading`, `verifying`, `exporting`; `sources` and `weights`
read the files of others.
"""

from .directory import clean, latest
from .exporting import ExportResult, export
from .loading import load
from .manifest import Manifest, read_manifest
from .records import HeldRows, LoadResult, NoPeers, RunSnapshot, SavePeers, SaveResult
from .saving import PendingSave, Saver, save
from .sources import import_weights
from .verifying import VerifyReport, verify
from .weights import Weights

__all__ = [
    "NoPeers",
    "ExportResult",
    "HeldRows",
    "LoadResult",
    "Manifest",
    "SavePeers",
    "PendingSave",
    "VerifyReport",
    "SaveResult",
    "Saver",
    "RunSnapshot",
    "Weights",
    "clean",
    "export",
    "import_weights",
    "latest",
    "load",
    "read_manifest",
    "save",
    "verify",
]
