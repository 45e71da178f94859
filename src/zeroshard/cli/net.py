"""Measure the links between ranks, and say which strategy suits them.

Every pair of ranks (of many: neighbours and opposites) sends messages of several sizes to and fro, then all
ranks reduce together. The advice is for a model of --parameters (fp32) whose forward and backward compute for
--step seconds.

Starts its own ranks on this host with --ranks. Under a launcher it measures that launcher's ranks, on any
number of hosts.

examples:
  zeroshard net --ranks 2
  zeroshard run --ranks 4 -m zeroshard net --parameters 124e6 --step 0.5
  torchrun --nnodes 2 --nproc-per-node 4 … -m zeroshard net
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zeroshard.extend import OptionError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zeroshard.extend import Advice, LinkSpeeds


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="start so many ranks on this host")
    add("--parameters", type=float, default=100e6, metavar="N", help="of the model (default %(default)g)")
    add("--step", type=float, default=1.0, metavar="S", help="seconds of computation (default %(default)g)")
    add("--seconds", type=float, default=0.05, metavar="S", help="for each pair and size (default 0.05)")
    add(
        "--transport",
        default="auto",
        choices=("auto", "shm", "gloo", "nodes", "nccl"),
        help="what to send with (default: as shard() would)",
    )
    add("--ranks-per-node", type=int, metavar="N", help="ranks that count as a node (default: of one host)")
    add("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks where asked to; in a rank, measures, and rank 0 prints."""
    from zeroshard.extend import announced_group

    if arguments.parameters <= 0 or arguments.step <= 0 or arguments.seconds <= 0:
        raise OptionError("--parameters, --step and --seconds must be above zero.")
    if announced_group() is not None:
        return _measure(arguments)
    if arguments.ranks is None or arguments.ranks < 2:
        raise OptionError(
            "there is no group of ranks here: start some with --ranks 2 or more, or run this under "
            "`zeroshard run` or torchrun."
        )
    return _start(arguments)


def _start(arguments: argparse.Namespace) -> int:
    from zeroshard.extend import LaunchJob, launch

    passed = ["net", *(["--json"] if arguments.json else []), "--transport", arguments.transport]
    for name in ("parameters", "step", "seconds", "ranks_per_node"):
        value = getattr(arguments, name)
        if value is not None:
            passed += [f"--{name.replace('_', '-')}", str(value)]
    return launch(
        LaunchJob(ranks=arguments.ranks, target="zeroshard", arguments=tuple(passed), module=True, threads=1)
    )


def _measure(arguments: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from zeroshard.extend import advise_on_links, connect, join_group, measure_links

    join_group()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    transport = connect(
        device or torch.device("cpu"), arguments.transport, ranks_per_node=arguments.ranks_per_node
    )
    try:
        if transport.size == 1:
            raise OptionError("one rank has no links: start two or more.")
        links = measure_links(transport, arguments.seconds)
    finally:
        transport.close()
    if transport.rank == 0:
        advice = advise_on_links(links, arguments.parameters, arguments.step)
        if arguments.json:
            print(json.dumps({"links": asdict(links), "advice": asdict(advice)}))
        else:
            Console(highlight=False).print(*show(links, advice, arguments), sep="\n")
    return 0


def show(links: LinkSpeeds, advice: Advice, arguments: Any) -> list[RenderableType]:
    """The tables, and the advice."""
    from rich.text import Text

    title = f"{links.ranks} ranks on {_count(links.node_count, 'node')}, over {links.transport}"
    shown: list[RenderableType] = [Text(title, style="bold"), _by_size(links)]
    if links.ranks > 2:
        shown.append(_by_pair(links))
    shown.append(_ways(advice, arguments))
    shown.append(Text.assemble(("Take: ", "bold"), (advice.best.options, "bold green")))
    return [*shown, *(Text(f"  {reason}") for reason in advice.reasons)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _by_size(links: LinkSpeeds) -> RenderableType:
    from rich.table import Table

    from zeroshard.extend import show_bytes

    table = Table(title="One message, and a reduction of all ranks", title_justify="left")
    table.add_column("bytes", justify="right")
    kinds = [(inside, name) for inside, name in ((True, "inside a node"), (False, "between nodes"))]
    kinds = [(inside, name) for inside, name in kinds if links.of(inside)]
    columns = [links.typical(inside) for inside, _ in kinds]
    for _, name in kinds:
        table.add_column(name, justify="right")
        table.add_column("rate", justify="right")
    table.add_column("all together", justify="right")
    table.add_column("rate a rank", justify="right")
    for index, total in enumerate(links.together):
        cells = []
        for column in columns:
            cells += [_time(column[index].seconds), f"{show_bytes(column[index].rate)}/s"]
        size = columns[0][index].size
        table.add_row(show_bytes(size), *cells, _time(total.seconds), f"{show_bytes(total.rate)}/s")
    return table


def _by_pair(links: LinkSpeeds) -> RenderableType:
    """Latency above, rate below the diagonal; of many ranks, the slowest pairs."""
    from rich.table import Table

    from zeroshard.extend import EVERY_PAIR, show_bytes

    if links.ranks > EVERY_PAIR:
        slowest = sorted(links.pairs, key=lambda link: link.rate)[:5]
        table = Table(title="The slowest pairs", title_justify="left")
        for name in ("ranks", "latency", "rate"):
            table.add_column(name, justify="right")
        for link in slowest:
            rate = f"{show_bytes(link.rate)}/s"
            table.add_row(f"{link.first} and {link.second}", _time(link.latency), rate)
        return table
    found = {(link.first, link.second): link for link in links.pairs}
    table = Table(title="Pairs: latency right of the diagonal, rate left", title_justify="left")
    table.add_column("rank", justify="right", style="bold")
    for rank in range(links.ranks):
        table.add_column(str(rank), justify="right")
    for row in range(links.ranks):
        cells = []
        for column in range(links.ranks):
            pair = found.get((min(row, column), max(row, column)))
            if pair is None:
                cells.append("")
            else:
                cells.append(f"{show_bytes(pair.rate)}/s" if column < row else _time(pair.latency))
        table.add_row(str(row), *cells)
    return table


def _ways(advice: Advice, arguments: Any) -> RenderableType:
    from rich.table import Table

    from zeroshard.extend import show_bytes

    table = Table(
        title=f"Estimated for {arguments.parameters:,.0f} parameters and {arguments.step:g} s of computation",
        title_justify="left",
    )
    for name in ("zs.shard(model, optimizer, …)", "numerics", "sent a step", "takes", "exposed"):
        table.add_column(name, justify="left" if name[0] in "zn" else "right")
    for way in advice.ways:
        style = "bold green" if way == advice.best else ""
        cells = show_bytes(way.sent), _time(way.exchange), _time(way.exposed) if way.exposed else "hidden"
        table.add_row(way.options, way.numerics, *cells, style=style)
    return table


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs"
