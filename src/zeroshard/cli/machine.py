"""Show what this machine can do: the figures that step times are estimated from.

They are measured once (a second on a CPU, some seconds on a GPU) and kept in the user's cache folder;
`zs.shard(limit=…)` uses them. --known lists the GPUs and networks that plans can be made for without having
them.

examples:
  zeroshard machine
  zeroshard machine --again --disk-path /scratch
  zeroshard machine --known
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zeroshard.extend import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zeroshard.extend import Machine


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("--again", action="store_true", help="measure anew")
    parser.add_argument("--device", help="cpu or cuda:0 (default: a GPU where there is one)")
    parser.add_argument("--disk-path", metavar="DIR", help="measure the disk of this folder too")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--known", action="store_true", help="list the table of GPUs and networks")


def run(arguments: argparse.Namespace) -> int:
    """Measures, or lists."""
    if arguments.known:
        _show_known()
        return 0
    import json
    from dataclasses import asdict, replace

    import torch

    from zeroshard.extend import disk_rate, this_machine

    try:
        device = torch.device(arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise OptionError(f"--device {arguments.device!r} is no device: cpu or cuda:0.") from error
    found = this_machine(device, arguments.again)
    if arguments.disk_path:
        found = replace(found, disk_rate=disk_rate(arguments.disk_path))
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        _show([found])
    return 0


def _show(machines: Sequence[Machine]) -> None:
    """One line for each, rates as people write them."""
    import sys

    from rich.console import Console
    from rich.table import Table

    from zeroshard.extend import show_bytes

    table = Table(pad_edge=False)
    heads = (
        "machine",
        "memory",
        "16 bit",
        "fp32",
        "reached",
        "memory",
        "PCIe",
        "link",
        "host",
        "disk",
        "launch",
    )
    units = ("", "", "TFLOP/s", "TFLOP/s", "", *["GB/s"] * 5, "µs")
    for head, unit in zip(heads, units, strict=True):
        table.add_column(f"{head}\n{unit}".rstrip(), justify="left" if head == "machine" else "right")
    for m in machines:
        rates = [m.memory_rate, m.pcie, m.link, m.host_rate, m.disk_rate]
        table.add_row(
            m.name,
            show_bytes(m.memory),
            f"{m.half / 1e12:,.4g}",
            f"{m.full / 1e12:,.4g}",
            f"{m.efficiency:.0%}",
            *(f"{rate / 1e9:,.4g}" for rate in rates),
            f"{max(m.launch, m.gap) * 1e6:.3g}",
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


def _show_known() -> None:
    from zeroshard.extend import GPUS, NETWORKS

    _show(list(GPUS.values()))
    for found in GPUS.values():
        print(f"{found.name}: {found.source}")
    print("Networks, bytes a second of a device's port:")
    for name, rate in NETWORKS.items():
        print(f"  {name:<16}{rate / 1e9:.4g} GB/s")
