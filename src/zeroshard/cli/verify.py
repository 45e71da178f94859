"""Read all of a checkpoint and prove it against its checksums.

Lists everything that is wrong, with files, tensors and rows; the exit code is 1 when anything is.

examples:
  zeroshard verify ckpt/1000
"""

from __future__ import annotations

import argparse
import sys


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("checkpoint", help="the folder of a checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; 1 when something is wrong."""
    from zeroshard.extend import show_bytes, verify

    report = verify(arguments.checkpoint)
    for problem in report.problems:
        print(f"damaged: {problem}", file=sys.stderr)
    for name in report.strangers:
        print(f"not part of it: {name!r}")
    if not report.ok:
        print(f"{report.path} is damaged. {report.advice}", file=sys.stderr)
        return 1
    print(
        f"{report.path} is good: {report.tensors} tensors, {show_bytes(report.bytes)} in {report.files} files"
    )
    return 0
