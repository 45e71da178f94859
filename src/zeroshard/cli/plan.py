"""Say whether a model will fit, and how to train it.

SPEC names a function without arguments that returns the model, or a pair of the model and a batch of
example inputs: as package.module:function, or path/to/script.py:function. It is called on the meta device,
so nothing is allocated. A Hugging Face config.json works where transformers is installed. DEVICE is a size,
or a GPU of the table: H100, A100, RTX4090, …

The exit code is 1 where nothing fits; the message says what would.

examples:
  zeroshard plan project.model:build --ranks 64 --device 80GiB --host 1TiB --batch 8x2048 --precision bf16
  zeroshard plan train.py:build --ranks 8 --device H100 --batch 4x4096 --precision bf16 --json > plan.json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from zeroshard.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from zeroshard.machine import Machine


def configure(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add = parser.add_argument
    add("spec", metavar="SPEC", help="module:function, script.py:function, or a config.json")
    add("--ranks", type=int, required=True, help="the number of processes, one for each device")
    add("--device", required=True, metavar="SIZE|GPU", help="the memory of one device, or its name")
    add("--host", metavar="SIZE", help="the host memory of one node (default: no limit)")
    add("--batch", metavar="SHAPE", help="one rank's micro-batch of token ids, such as 8x2048")
    add("--precision", help="bf16 or fp16 (default: as the model is)")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="consider this stage only")
    add("--clip-norm", type=float, metavar="NORM", help="as for shard(): lets updates on the host overlap")
    add(
        "--gpu",
        default="H100",
        help="whose rates to reckon with where DEVICE is a size (default: %(default)s)",
    )
    add("--network", default="infiniband-ndr", help="between nodes: a name of the table, or bytes a second")
    add("--node", type=int, default=8, help="devices of a node (default: %(default)s)")
    add("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Plans, and prints the plan."""
    import zeroshard as zs

    model, batch = _model(arguments.spec)
    machine, limit = _machine(arguments)
    options: dict[str, Any] = {"precision": arguments.precision, "clip_norm": arguments.clip_norm}
    if arguments.stage is not None:
        options["stage"] = arguments.stage
    made = zs.plan(
        model,
        ranks=arguments.ranks,
        limit=limit,
        host_limit=arguments.host,
        batch=arguments.batch or batch,
        machine=machine,
        **options,
    )
    if arguments.json:
        print(made.to_json())
    else:
        made.show()
    return 0


def _machine(arguments: argparse.Namespace) -> tuple[Machine, int | str]:
    """The machine, and the limit: its whole memory where a GPU is named."""
    from zeroshard.machine import GPUS, machine

    try:
        network: str | float = float(arguments.network)
    except ValueError:
        network = arguments.network
    named = arguments.device.upper() in GPUS
    found = machine(arguments.device if named else arguments.gpu, network, node=arguments.node)
    return found, found.memory if named else arguments.device


def _model(spec: str) -> tuple[nn.Module, Any]:
    """The model on the meta device, and the batch that came with it."""
    import torch

    made = _configured(spec) if spec.endswith(".json") else _called(spec)
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"{spec} returned a {type(model).__name__}, not a module.")
    return model, batch


def _called(spec: str) -> Any:
    import torch

    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise OptionError(f"SPEC {spec!r} must be module:function, script.py:function, or a config.json.")
    try:
        found = getattr(_module(place), name)
    except (ImportError, AttributeError, OSError) as error:
        raise OptionError(f"SPEC {spec!r} cannot be loaded: {error}.") from error
    try:
        with torch.device("meta"):
            return found()
    except Exception as error:  # the user's code: say that it was that
        raise OptionError(f"{spec}() raised {type(error).__name__} on the meta device: {error}") from error


def _module(place: str) -> Any:
    """A module by its dotted name, the current folder searched first; or a script, under a name that is not
    `__main__`."""
    import importlib
    import importlib.util
    import os
    import sys
    from pathlib import Path

    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    path = Path(place)
    if not path.exists():
        raise OSError(f"there is no file {place}")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def _configured(path: str) -> Any:
    """A causal language model of Hugging Face from its config.json."""
    import importlib
    from pathlib import Path

    import torch

    if not Path(path).exists():
        raise OptionError(f"there is no file {path}.")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise OptionError(
            f"{path} describes a model of Hugging Face, which takes `pip install transformers`; or name a "
            "function that builds the model: module:function."
        ) from error
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)
