"""Make a checkpoint from weights in another format.

SOURCE is a safetensors file, a Hugging Face folder (with an index or without), a state dict that torch.save
wrote, or a folder of torch.distributed.checkpoint. Only tensors are read; code in a file is never run. Load
the result with strict=False, since it has no optimizer state.

examples:
  zeroshard import model.safetensors ckpt/0
  zeroshard import consolidated.pt ckpt/0 --prefix model
"""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add = parser.add_argument
    add("source", help="a file or a folder")
    add("out", help="the checkpoint to make")
    add("--prefix", metavar="NAME", help="take the tensors below NAME only, and drop it from their names")
    add("--overwrite", action="store_true", help="replace a checkpoint that is at OUT already")


def run(arguments: argparse.Namespace) -> int:
    """Imports, and says what it wrote."""
    from zeroshard.extend import import_weights, read_manifest, show_bytes

    saved = import_weights(arguments.source, arguments.out, arguments.prefix, overwrite=arguments.overwrite)
    print(f"{saved.path}: {len(read_manifest(saved.path).entries)} tensors, {show_bytes(saved.bytes)}")
    return 0
