"""Seams: what codecs, transports, tiers and optimizers of your own are made of, and what tools use.

Each protocol says in its docstring what it asks, and most have an example there. The command line, reports
and the test helpers see nothing of the library but its public names and these. Names are loaded at their
first use, so that a command that needs no torch does not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.checkpoint import Manifest, export, import_weights, read_manifest, verify
    from zeroshard.checkpoint.manifest import TensorEntry
    from zeroshard.comm.connect import connect, register_transport
    from zeroshard.comm.link_speed import EVERY_PAIR, Advice, LinkSpeeds
    from zeroshard.comm.link_speed import advise as advise_on_links
    from zeroshard.comm.link_speed import measure as measure_links
    from zeroshard.comm.transport import (
        Cuts,
        DoneWork,
        Land,
        Spans,
        SummingTransport,
        Transport,
        TransportBuffer,
        Work,
        fold,
    )
    from zeroshard.compress import Codec, Compression, MeanCodec
    from zeroshard.convert import converted as convert_config
    from zeroshard.convert import deepspeed as convert_deepspeed
    from zeroshard.convert import fsdp as convert_fsdp
    from zeroshard.convert import read as read_config
    from zeroshard.errors import (
        CheckpointError,
        OptionError,
        PlanError,
        StateError,
        ZeroShardError,
        did_you_mean,
    )
    from zeroshard.kernels import HostStep, StateRows, register_host_update
    from zeroshard.launch.job import PRELOAD, LaunchJob, rank_range
    from zeroshard.launch.join import announced as announced_group
    from zeroshard.launch.join import join as join_group
    from zeroshard.launch.launcher import run as launch
    from zeroshard.layout.memory import KINDS, OUTSIDE
    from zeroshard.layout.specs import TransportTraits
    from zeroshard.machine import GPUS, NETWORKS, Machine, machine
    from zeroshard.options import Options, dtype_name
    from zeroshard.output_file import write_file
    from zeroshard.planner.answer import problem_of
    from zeroshard.planner.candidates import PictureFrame
    from zeroshard.planner.plan import Candidate, Plan, Rate, options_of, settings_of, settings_text
    from zeroshard.planner.signatures import with_rows
    from zeroshard.runtime.measure import disk_rate
    from zeroshard.runtime.measure import here as this_machine
    from zeroshard.runtime.own_state import keep as keep_own_state
    from zeroshard.runtime.own_state import read as read_own_state
    from zeroshard.search import MOST_RANKS, fewest_ranks, largest_batch, largest_model
    from zeroshard.sizes import parse_bytes, show_bytes
    from zeroshard.tiers import TierStorage, register_tier

#: By module, the names that it gives: what features are made of, and then what tools use.
_SOURCES = {
    "comm.connect": "connect, register_transport",
    "comm.transport": "Cuts, DoneWork, Land, Spans, SummingTransport, Transport, TransportBuffer, Work, fold",
    "compress": "Codec, Compression, MeanCodec",
    "layout.specs": "TransportTraits",
    "kernels": "HostStep, StateRows, register_host_update",
    "tiers": "TierStorage, register_tier",
    "checkpoint": "Manifest, export, import_weights, read_manifest, verify",
    "checkpoint.manifest": "TensorEntry",
    "comm.link_speed": "Advice, EVERY_PAIR, LinkSpeeds, advise as advise_on_links, measure as measure_links",
    "convert": "converted as convert_config, deepspeed as convert_deepspeed, fsdp as convert_fsdp, "
    "read as read_config",
    "errors": "CheckpointError, OptionError, PlanError, StateError, ZeroShardError, did_you_mean",
    "launch.job": "LaunchJob, PRELOAD, rank_range",
    "launch.join": "announced as announced_group, join as join_group",
    "launch.launcher": "run as launch",
    "layout.memory": "KINDS, OUTSIDE",
    "machine": "GPUS, Machine, NETWORKS, machine",
    "options": "Options, dtype_name",
    "output_file": "write_file",
    "planner.answer": "problem_of",
    "planner.candidates": "PictureFrame",
    "runtime.measure": "disk_rate, here as this_machine",
    "runtime.own_state": "keep as keep_own_state, read as read_own_state",
    "planner.plan": "Candidate, Plan, Rate, options_of, settings_of, settings_text",
    "planner.signatures": "with_rows",
    "search": "MOST_RANKS, fewest_ranks, largest_batch, largest_model",
    "sizes": "parse_bytes, show_bytes",
}


def _sources_by_name() -> dict[str, tuple[str, str]]:
    """By name, the module that has it, and what it is called there."""
    sources = {}
    for module, names in _SOURCES.items():
        for name in names.split(", "):
            inside, _, outside = name.partition(" as ")
            sources[outside or inside] = module, inside
    return sources


_BY_NAME = _sources_by_name()


def __getattr__(name: str) -> Any:
    if name not in _BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, inside = _BY_NAME[name]
    return getattr(import_module(f"zeroshard.{module}"), inside)


def __dir__() -> list[str]:
    return sorted(_BY_NAME)
