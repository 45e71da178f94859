"""Export the weights of a checkpoint in the layout of Hugging Face libraries.

Parameters and buffers go to OUT/model.safetensors, or to several files with an index where they are more than
one file holds. They are streamed: memory stays small whatever the model. OUT appears when it is complete.

examples:
  zeroshard export ckpt/1000 weights
  zeroshard export ckpt/1000 weights --dtype bf16 --max-shard 2GB
"""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add = parser.add_argument
    add("checkpoint", help="the folder of a checkpoint")
    add("out", help="a folder that does not exist yet")
    add("--dtype", help="convert floating tensors: bf16, fp16, fp32 (default: as they were saved)")
    add("--max-shard", default="5GB", metavar="SIZE", help="bytes of one file at most (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace an export that is at OUT already")


def run(arguments: argparse.Namespace) -> int:
    """Exports, and says what it wrote."""
    from zeroshard.extend import dtype_name, export, parse_bytes, show_bytes

    dtype = None if arguments.dtype is None else dtype_name(arguments.dtype, "--dtype")
    most = parse_bytes(arguments.max_shard, "--max-shard")
    done = export(arguments.checkpoint, arguments.out, most, dtype, overwrite=arguments.overwrite)
    print(f"{done.path}: {done.tensors} tensors, {show_bytes(done.bytes)} in {', '.join(done.files)}")
    return 0
