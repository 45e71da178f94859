"""Show the zs.shard() that a configuration of another library asks for.

FILE is a configuration of DeepSpeed (JSON), or one of Accelerate (YAML) that asks for DeepSpeed or FSDP. Told
are the call, what belongs to the loop, and what has no equivalent; the exit code is 1 where there is such.

examples:
  zeroshard convert ds_config.json
  zeroshard convert ~/.cache/huggingface/accelerate/default_config.yaml
"""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("file", metavar="FILE", help="the configuration")


def run(arguments: argparse.Namespace) -> int:
    """Prints, and says by the exit code whether all of it has an equivalent."""
    from zeroshard.extend import convert_config, read_config

    result = convert_config(read_config(arguments.file))
    print(result.text())
    return 1 if result.without else 0
