"""Say whether a model will fit, and how to train it.

SPEC names a function that returns the model, or a pair of the model and a batch of example inputs: as
package.module:function, or path/to/script.py:function; --set gives its arguments. It is called on the meta
device, so nothing is allocated. Or SPEC is a Hugging Face config.json (or its folder): bert, gemma, gpt2,
llama, mistral, qwen2, qwen3 and roberta are known here, all others where transformers is installed. DEVICE is
a size, or a GPU of the table: H100, A100, RTX4090, …

--search finds the largest micro-batch (batch), the largest value of an argument that fits (model, with
--vary), or the fewest ranks (ranks).

The exit code is 1 where nothing fits; the message says what would.

examples:
  zeroshard plan project.model:build --ranks 64 --device 80GiB --host 1TiB --batch 8x2048 --precision bf16
  zeroshard plan train.py:build --set layers=24 --ranks 8 --device H100 --batch 4x4096 --json > plan.json
  zeroshard plan config.json --ranks 8 --device H100 --batch 4x4096 --precision bf16 --html plan.html
  zeroshard plan config.json --ranks 8 --device A100 --batch 1x4096 --precision bf16 --search batch
  zeroshard plan config.json --ranks 8 --device A100 --batch 1x4096 --search model --vary n_layer=1:500
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zeroshard.extend import OptionError, PlanError

if TYPE_CHECKING:
    from zeroshard.extend import Machine, Plan

    from ._spec import Spec


NODE = 8  # devices of a node, where nothing is said
# Keyword arguments of `zs.plan` that the command line has under another name.
_WORDS = {
    "limit": "--device",
    "host_limit": "--host",
    "disk_limit": "--disk",
    "disk_path": "--disk-path",
    "memory_limit_per_node": "--memory-limit-per-node",
    "ranks_per_node": "--ranks-per-node",
    "micro_batches": "--micro-batches",
    "clip_norm": "--clip-norm",
    "machine": "--gpu",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add = parser.add_argument
    add("spec", metavar="SPEC", help="module:function, script.py:function, or a config.json")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an argument, or a config's entry")
    where = parser.add_argument_group("where it is to run")
    where.add_argument("--ranks", type=int, help="the number of processes, one for each device")
    where.add_argument("--nodes", type=int, help="with --ranks-per-node, in place of --ranks")
    where.add_argument("--ranks-per-node", type=int, metavar="N", help=f"devices of a node (default: {NODE})")
    where.add_argument("--device", metavar="SIZE|GPU", help="the memory of one device, or its name")
    where.add_argument("--memory-limit-per-node", metavar="SIZE", help="of its devices, in place of --device")
    where.add_argument("--host", metavar="SIZE", help="the host memory of one node (default: no limit)")
    where.add_argument("--disk", metavar="SIZE", help="the disk of one node, for --disk-path")
    where.add_argument("--disk-path", metavar="DIR", help="a folder that optimizer state may rest in")
    where.add_argument("--gpu", help="whose rates to reckon with (default: that of --device, or H100)")
    where.add_argument("--network", default="infiniband-ndr", help="a name of the table, or bytes a second")
    how = parser.add_argument_group("what is given")
    how.add_argument("--batch", metavar="SHAPE", help="one rank's micro-batch of token ids, such as 8x2048")
    how.add_argument(
        "--micro-batches", type=int, metavar="N", help="of a step, all but the last under no_sync"
    )
    how.add_argument("--precision", help="bf16 or fp16 (default: as the model is)")
    how.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="consider this stage only")
    how.add_argument("--recompute", choices=("yes", "no"), help="of activations (default: chosen)")
    how.add_argument("--no-offload", action="store_true", help="keep everything on the device")
    how.add_argument("--clip-norm", type=float, metavar="NORM", help="as for shard(): host updates overlap")
    out = parser.add_argument_group("what is told")
    out.add_argument("--search", choices=("batch", "model", "ranks"), help="the most that fits")
    out.add_argument("--vary", metavar="NAME=LOW:HIGH", help="what --search model varies")
    out.add_argument("--json", action="store_true", help="print the plan as JSON")
    out.add_argument("--html", metavar="FILE", help="write a page: memory over a step, for every candidate")
    out.add_argument("--overwrite", action="store_true", help="replace the file of --html, if there is one")


def run(arguments: argparse.Namespace) -> int:
    """Plans, and prints the plan."""
    try:
        return _planned(arguments)
    except (OptionError, PlanError) as error:
        if str(error).startswith(arguments.spec):  # about the user's own function and its arguments
            raise
        raise type(error)(_as_typed(str(error))) from error


def _planned(arguments: argparse.Namespace) -> int:
    from zeroshard.extend import problem_of

    from ._spec import Spec, values_of

    if arguments.vary is not None and arguments.search != "model":
        raise OptionError("--vary is what --search model varies: pass --search model too.")
    if arguments.html and not arguments.overwrite:
        _refuse_existing(arguments.html)
    spec, values, asked = Spec(arguments.spec), values_of(arguments.set), _asked(arguments)
    notes: list[str] = []
    if arguments.search:
        found, asked = _searched(arguments, spec, values, asked)
        notes.append(f"{found}.")
    model, batch = spec.build(values)
    asked.setdefault("batch", batch)
    model_problem = problem_of(model, **asked)
    made = model_problem.plan()
    if arguments.html:
        _write(arguments.html, made, model_problem, notes, arguments.overwrite)
    if arguments.json:
        print(made.to_json())
        for note in notes:
            print(note, file=sys.stderr)
        return 0
    replace(made, reasons=tuple(map(_as_typed, made.reasons))).show()
    for note in notes:
        print(note)
    if arguments.html:
        print(f"written: {arguments.html}")
    return 0


def _as_typed(text: str) -> str:
    """What a refusal advises, in the words of the command line."""
    for keyword, word in (
        ("allow recompute=True", "drop --recompute no"),
        ("allow stage=3", "drop --stage"),
        ("allow offload to the host", "drop --no-offload"),
        ('allow precision="bf16"', "pass --precision bf16"),
        ("math.inf", "inf"),
    ):
        text = text.replace(keyword, word)
    for keyword in ("ranks", "nodes", "batch", "precision", "stage", "network", *_WORDS):
        word = _WORDS.get(keyword, f"--{keyword}")
        text = re.sub(rf'\b{keyword}="([^"]*)"', rf"{word} \1", text)
        text = re.sub(rf"\b{keyword}=(?=[^\s,.;:)])", f"{word} ", text)
        text = re.sub(rf"\b{keyword}=(?=[\s,.;:)]|$)", word, text)
    return text.replace("math.inf", "inf")


def _write(path: str, made: Plan, model_problem: Any, notes: list[str], overwrite: bool) -> None:
    from zeroshard.extend import write_file
    from zeroshard.report import page

    try:
        write_file(path, page(made, model_problem.frames(made), notes, model_problem.rate(made)), overwrite)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise OptionError(f"--html {path} cannot be written: {error.strerror}.") from error


def _refuse_existing(path: str) -> None:
    """Before the work; pipes and devices may be written."""
    if os.path.isfile(path) or os.path.isdir(path) or (os.path.islink(path) and not os.path.exists(path)):
        raise _exists(path)


def _exists(path: str) -> OptionError:
    return OptionError(
        f"--html {path}: this exists and stays as it is. Name another file, or pass --overwrite."
    )


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `zs.plan`."""
    machine, limit = _machine(arguments)
    per_node = arguments.ranks_per_node
    if per_node is None and arguments.nodes is not None and arguments.ranks is None:
        per_node = NODE
    asked: dict[str, Any] = {
        "ranks": arguments.ranks,
        "nodes": arguments.nodes,
        "ranks_per_node": per_node,
        "limit": limit,
        "memory_limit_per_node": arguments.memory_limit_per_node,
        "host_limit": arguments.host,
        "disk_limit": arguments.disk,
        "disk_path": arguments.disk_path,
        "batch": arguments.batch,
        "micro_batches": arguments.micro_batches,
        "machine": machine,
        "precision": arguments.precision,
        "clip_norm": arguments.clip_norm,
        "stage": arguments.stage,
        "recompute": {"yes": True, "no": False, None: None}[arguments.recompute],
    }
    told = {name: value for name, value in asked.items() if value is not None}
    return told | ({"offload": None} if arguments.no_offload else {})


def _machine(arguments: argparse.Namespace) -> tuple[Machine, int | str | None]:
    """The machine, and the limit: all of a GPU that is named."""
    from zeroshard.extend import GPUS, did_you_mean, machine

    try:
        network: str | float = float(arguments.network)
    except ValueError:
        network = arguments.network
    device = arguments.device
    named = device is not None and device.upper() in GPUS
    if device is not None and not named and not device.strip()[:1].isdigit():
        raise OptionError(
            f"--device {device} is neither a size such as 80GiB nor a GPU of the table."
            f"{did_you_mean(device.upper(), GPUS)} Known: {', '.join(GPUS)}."
        )
    if named and arguments.gpu is not None and arguments.gpu.upper() != device.upper():
        raise OptionError(
            f"--device {device} is a GPU, and --gpu {arguments.gpu} another: name one, or give --device as a "
            "size."
        )
    per_node = arguments.ranks_per_node or NODE
    found = machine(device if named else arguments.gpu or "H100", network, node=per_node)
    return (found.whole(), found.memory) if named else (found, device)


def _searched(
    arguments: argparse.Namespace, spec: Spec, values: dict[str, Any], asked: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """What was found, and what to ask for its plan. `values` gets the one that was searched for."""
    from zeroshard.extend import MOST_RANKS, fewest_ranks, largest_batch, largest_model, with_rows

    print("searching …", file=sys.stderr)
    if arguments.search == "model":
        name, low, high = _varied(arguments.vary)
        given = {key: value for key, value in asked.items() if key != "batch"}
        batch = asked.get("batch") or spec.build(values | {name: low})[1]
        _check_varies(spec, values, name, low, high)
        try:
            found = largest_model(
                lambda size: spec.build(values | {name: size})[0], low=low, high=high, batch=batch, **given
            )
        except PlanError as error:
            raise PlanError(str(error).replace(f"even size {low:,}", f"even {name}={low}", 1)) from error
        values[name] = found.value
        return f"Largest {name}: {found.value:,}{'' if not found.bounded else ', the largest tried'}", asked
    model, batch = spec.build(values)
    asked = {"batch": batch} | asked
    if arguments.search == "batch":
        found = largest_batch(model, **asked)
        return found, asked | {"batch": with_rows(asked["batch"], found.value)}
    most = asked.pop("ranks", MOST_RANKS)
    found = fewest_ranks(model, most=most, **asked)
    return found, asked | {"ranks": found.value}


def _check_varies(spec: Spec, values: dict[str, Any], name: str, low: int, high: int) -> None:
    """A misspelt entry of a config would change nothing, and fit at any value."""
    sizes = [sum(p.numel() for p in spec.build(values | {name: n})[0].parameters()) for n in {low, high}]
    if len(sizes) == 2 and sizes[0] == sizes[1]:
        raise OptionError(
            f"--vary {name}: the model has {sizes[0]:,} parameters at {low:,} as at {high:,}, so there is no "
            "largest one. Check the name."
        )


def _varied(text: str | None) -> tuple[str, int, int]:
    name, _, span = (text or "").partition("=")
    low, _, high = span.partition(":")
    if not (name and low.isdigit() and high.isdigit() and 0 < int(low) <= int(high)):
        raise OptionError(f"--search model needs --vary NAME=LOW:HIGH, e.g. layers=1:200; this is {text!r}.")
    return name, int(low), int(high)
