"""Keras 3: its script stays, and what it trains is sharded.

import zeroshard.integrations.keras as tz

config = tz.Config()
config.num_nodes, config.num_gpus_per_node = 1, 2
config.memory_limit_per_node = "10GiB"
tz.initialize(config)
# model = keras.Sequential(...); compile, fit, evaluate as before

How it is made:

- **Ranks** (`world`): a plain `python script.py` that asks for several ranks on one node becomes their
  launcher; what is started otherwise is compared with what was asked for. Small things go over a group of
  their own, which a rank that fails closes, so that nobody waits for it.
- **Batches** (`shares`): all ranks draw the same ones, with random numbers that go on from rank 0's, and each
  takes its rows. Losses are weighed so that the mean of the ranks' gradients is that of the batch; what draws
  noise, or takes moments over a batch, does so over all of it.
- **Weights** (`holders`): each layer gets a torch module that owns its parameters and whose forward is the
  layer's call. `zs.shard` divides the tree of those; variables read what stands there.
- **Updates** (`updates`): the Keras optimizer is built on row variables, so its own code runs on this rank's
  rows. `zs.shard` sees a torch optimizer whose step is that. Norms are taken over all ranks.
- **Keras** (`seams`, `loops`, `files`): `fit`, its step functions, the result of metrics and the writing of
  files are replaced in Keras's classes from `initialize` to `finish`, and nowhere else.
- **TensorFlow** (`graphs`, `graph_shares`, `graph_rows`): the same in traced steps, which exchange by
  functions that the graph calls; weights stay whole.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

try:
    _found = importlib.util.find_spec("keras")
except ValueError:
    _found = None
if _found is None:
    raise ModuleNotFoundError(
        "zeroshard.integrations.keras needs the package 'keras': pip install 'zeroshard[keras]'", name="keras"
    )


def _choose_backend() -> None:
    """Where nothing names a backend that is there, PyTorch: Keras itself would stop at its import."""
    if "keras" in sys.modules or "KERAS_BACKEND" in os.environ:
        return
    if importlib.util.find_spec("tensorflow") is None:
        os.environ["KERAS_BACKEND"] = "torch"


_choose_backend()

import keras  # noqa: E402

import zeroshard as zs  # noqa: E402

from .config import Config  # noqa: E402
from .seams import EpochStats as LogStats  # noqa: E402
from .seams import Seams  # noqa: E402
from .world import meet  # noqa: E402

__all__ = ["Config", "LogStats", "finish", "initialize", "run_of", "share"]

_session: Any = None
_seams: Any = None


def initialize(config: Config | None = None) -> None:
    """Let every model that is compiled and fitted from now on be trained by all ranks."""
    global _session, _seams
    if config is None:
        config = Config()
    if not isinstance(config, Config):
        raise zs.OptionError(
            f"initialize() takes a tz.Config, not {config!r}: tz.initialize(tz.Config(stage=2))."
        )
    if _session is not None:
        raise zs.StateError("initialize() was called before in this process: call tz.finish() first.")
    zs.Options(**config.options())
    backend: Any
    if keras.backend.backend() == "torch":
        from . import loops as backend
    elif keras.backend.backend() == "tensorflow":
        from . import graphs as backend

        config.refuse_beyond_tensorflow()
    else:
        raise zs.OptionError(
            f"Keras runs on {keras.backend.backend()}, and models are sharded on PyTorch and TensorFlow: set "
            'the environment variable KERAS_BACKEND to "torch". With JAX, keras.distribution shards models.'
        )
    world = meet(config)
    world.seed_alike()
    _session, _seams = backend.begin(config, world), Seams()
    backend.install(_session, _seams)


def finish() -> None:
    """Models are plain again, whole on every rank, and Keras is what it was. Every rank calls it."""
    global _session, _seams
    if _session is not None:
        _session.close()
        _seams.take_away()
        _session = _seams = None


def run_of(model: Any) -> zs.Run | None:
    """The run of a model that is sharded, for `run.stats()` and the like."""
    found = _session.model_of(model) if _session is not None else None
    return found.run if found is not None else None


def share(batch: Any) -> Any:
    """This rank's rows of a batch, in a loop of your own."""
    return _session.shares.take(batch) if _session is not None else batch
