"""Show what a checkpoint holds.

Reads its manifest only, so it answers at once whatever the size. With --against, the model that SPEC names is
built without memory (on the meta device), and names and shapes are compared; the exit code is 1 where they
differ. SPEC is as for `zeroshard plan` (module:function, script.py:function or a config.json); --set gives
arguments to it. --plan prints the plan of the run that saved it, for `zs.shard(plan=zs.Plan.read(...))`.

examples:
  zeroshard inspect ckpt/1000
  zeroshard inspect ckpt/1000 --all --against project.model:build
  zeroshard inspect ckpt/1000 --against gpt.py:GPT --set layers=24
  zeroshard inspect ckpt/1000 --plan > plan.json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.extend import Manifest, TensorEntry

_SHOWN = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add = parser.add_argument
    add("checkpoint", help="the folder of a checkpoint")
    add("--against", metavar="SPEC", help="compare with this model: module:function, script.py:function, …")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument of --against")
    add("--plan", action="store_true", help="print the plan of its run as JSON, and nothing else")
    add("--all", action="store_true", help=f"list every tensor, not only the {_SHOWN} largest")


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables; 1 when the model differs."""
    from rich.console import Console

    from zeroshard.extend import OptionError, read_manifest

    from ._spec import values_of

    if arguments.set and arguments.against is None:
        raise OptionError("--set gives an argument of --against: pass --against SPEC too.")
    manifest = read_manifest(arguments.checkpoint)
    if arguments.plan:
        return _plan(manifest, arguments.checkpoint)
    console = Console(highlight=False)
    _facts(manifest, arguments.checkpoint, console)
    _tensors(manifest, console, None if arguments.all else _SHOWN)
    if arguments.against is None:
        return 0
    return _compare(manifest, arguments.against, values_of(arguments.set), console)


def _facts(manifest: Manifest, path: str, console: Any) -> None:
    from datetime import datetime

    from zeroshard.extend import show_bytes

    saved = datetime.fromtimestamp(manifest.head.saved_at).astimezone().isoformat(" ", "seconds")
    by = ", ".join(_printable(f"{name} {number}"[:80]) for name, number in manifest.versions.items())
    step = "" if manifest.head.step is None else f", step {manifest.head.step}"
    console.print(f"{path}{step}: saved {saved} by {manifest.world} ranks ({by})", markup=False)
    console.print(
        f"{len(manifest.entries)} tensors, {show_bytes(manifest.bytes)} in {len(manifest.files)} files",
        markup=False,
    )

    if options := _options(manifest.values.get("options")):
        console.print(f"options: {options}", markup=False)


def _options(saved: Any) -> str:
    """The options that are not as they are by default."""
    from zeroshard.extend import Options, settings_of

    if not isinstance(saved, dict):
        return ""
    usual = {**settings_of(Options()), "stage": None}
    changed = [(name, value) for name, value in saved.items() if value != usual.get(name)]
    return ", ".join(f"{_printable(str(name))}={_value(value)}" for name, value in changed[:_SHOWN])


def _value(value: Any, deep: int = 3) -> str:
    """`Offload(optimizer=host, …)` for a record, and the text of anything else; short, whoever wrote it."""
    if isinstance(value, dict) and deep:
        fields = [(k, v) for k, v in value.items() if k != "type" and v is not None]
        inner = ", ".join(f"{_printable(str(k))}={_value(v, deep - 1)}" for k, v in fields[:_SHOWN])
        return f"{_printable(str(value.get('type', '')))}({inner})"
    if isinstance(value, list) and deep:
        return f"[{', '.join(_value(item, deep - 1) for item in value[:_SHOWN])}]"
    plain = isinstance(value, str | int | float | None)
    return _printable(str(value))[:80] if plain else "…"


def _plan(manifest: Manifest, path: str) -> int:
    from zeroshard.extend import CheckpointError

    plan = manifest.values.get("plan")
    if not isinstance(plan, str):
        raise CheckpointError(f"{path} holds no plan: its run was given options, not a limit or a plan.")
    print(plan.strip().encode("utf-8", "backslashreplace").decode())
    return 0


def _tensors(manifest: Manifest, console: Any, most: int | None) -> None:
    from rich.table import Table
    from rich.text import Text

    entries = manifest.entries
    if most is not None and len(entries) > most:
        largest = sorted(entries, key=lambda entry: -entry.bytes)[:most]
        chosen = {(entry.kind, entry.name) for entry in largest}
        entries = tuple(entry for entry in entries if (entry.kind, entry.name) in chosen)
    rows = [_cells(entry) for entry in entries]
    table = Table()
    names = ("tensor", "kind", "shape", "dtype", "files", "bytes")
    for name in names:
        table.add_column(name, justify="right" if name in ("files", "bytes") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: brackets are no markup
    taken = 1 + sum(3 + max(map(len, column)) for column in zip(names, *rows, strict=True))
    if taken <= console.width:
        console.print(table)
    else:  # a name is to be copied, so it is never broken
        for first, *rest in rows:
            console.print(first, markup=False, soft_wrap=True)
            told = (
                f"{name} {cell}" if name == "files" else cell
                for name, cell in zip(names[1:], rest, strict=True)
            )
            console.print("  " + " · ".join(told), markup=False, soft_wrap=True)
    if len(entries) < len(manifest.entries):
        console.print(f"… and {len(manifest.entries) - len(entries)} smaller ones (--all lists them)")


def _cells(entry: TensorEntry) -> tuple[str, ...]:
    from zeroshard.extend import show_bytes

    shape = "×".join(map(str, entry.shape)) or "scalar"
    files = str(len({span.file for span in entry.spans}))
    words = _printable(entry.name), _printable(entry.kind)
    return (*words, shape, entry.dtype, files, show_bytes(entry.bytes))


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _compare(manifest: Manifest, spec: str, values: dict[str, Any], console: Any) -> int:
    from ._model import differences
    from ._spec import Spec

    lines = differences(manifest, Spec(spec).build(values)[0])
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if not lines:
        console.print(f"every parameter and buffer of {spec} is in it, and nothing else is", markup=False)
    return 1 if lines else 0
