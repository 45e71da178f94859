"""Choose and make the transport of a group of ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from zeroshard.errors import OptionError, RankError
from zeroshard.options import TRANSPORTS

from .diagnosis.exits import ExitRegistry
from .diagnosis.waits import StoreWatch
from .gloo import GlooTransport
from .local import LocalTransport
from .nccl import NcclTransport
from .nodes import NodesTransport
from .refusal import raise_together, told_of
from .rendezvous import Rendezvous
from .shm import ShmTransport
from .simulated import SimulatedTransport
from .topology import Topology, by_count, by_host
from .transport import Transport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Maker = Callable[["Store", int, int, torch.device, float], Transport]

_makers: dict[str, Maker] = {}
_PATIENCE = 30.0  # seconds that a rank waits with its error for peers that are on their way to `shard`

# By this rank and the ranks of the group: the store of its time, and what its transports share.
_watches: dict[tuple[int, ...], tuple[Store, StoreWatch]] = {}
# By this rank: the store of its time, and who has ended.
_registries: dict[int, tuple[Store, ExitRegistry]] = {}


def connect(
    device: torch.device,
    transport: str = "auto",
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    ranks_per_node: int | None = None,
) -> Transport:
    """The transport `transport` between the ranks of `group` (default: all). Collective.

    A group of torch's ``fake`` backend is simulated, whatever was asked.

    `auto` takes `local` for one rank, `nccl` where the group has it and every rank its own GPU, `shm` where
    all ranks are processes of one host that can read one another, else `gloo`. A node is a host, or as many
    ranks as `ranks_per_node` says.
    """
    if transport not in (*TRANSPORTS, "local"):
        raise OptionError(f"unknown transport {transport!r}: one of {', '.join((*TRANSPORTS, 'local'))}")
    if not _is_group(group):
        error = OptionError(
            f"group={group!r} is no process group of torch.distributed that this rank is in: pass what "
            "torch.distributed.new_group() gave its members, and call shard() on these alone."
        )
        outside: object = dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
        if group is not outside:  # no rank waits for one that is not in the group
            refuse(error)
        raise error
    if not (dist.is_available() and dist.is_initialized()):
        if transport in ("auto", "local"):
            return _alone(device, ranks_per_node)
        raise OptionError(
            f"transport {transport!r} needs a process group and there is none: start with "
            "`zeroshard run --ranks N script.py` or torchrun, or call torch.distributed.init_process_group()"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1 and transport in ("auto", "local"):
        return _alone(device, ranks_per_node)
    if dist.get_backend(group) == "fake":
        simulated = SimulatedTransport(rank, size, device)
        if ranks_per_node is not None:
            simulated.place(by_count(size, ranks_per_node).nodes)
        return simulated
    meeting, watch = _meeting(group, timeout)
    store = meeting.store
    here = _here(device, transport, ranks_per_node, group)
    places: list[Any] = meeting.share("place", here)
    raise_together("shard()", [place.get("refused") for place in places], None)
    topology = _topology(places)
    chosen = _choose(places, transport, topology)
    if chosen == "nodes":
        return NodesTransport(store, rank, topology, device, timeout)
    made = _flat(chosen, transport == "auto", store, device, timeout, group, watch)
    made.place(topology.nodes)
    return made


def register_transport(name: str, make: Maker) -> None:
    """Give `transport=` another name. `make(store, rank, size, device, timeout)` is called by every rank; the
    store is torch's, and nobody else writes to this part of it.

    Every process registers it before `shard()`. A name that exists is refused.
    """
    if name in TRANSPORTS:
        raise OptionError(f"transport {name!r} exists already: take another name.")
    _makers[name] = make
    TRANSPORTS.append(name)


def _alone(device: torch.device, ranks_per_node: int | None) -> Transport:
    """One rank, on a node of one."""
    if ranks_per_node is not None:
        by_count(1, ranks_per_node)
    return LocalTransport(device)


def refuse(error: Exception, group: dist.ProcessGroup | None = None) -> None:
    """In place of `connect`, where `error` keeps this rank from it: tells the ranks that come there. Raises
    what all of them raise, or returns where nobody waits for this rank."""
    if not (dist.is_available() and dist.is_initialized()) or not _is_group(group):
        return
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    meeting, _ = _meeting(group, _PATIENCE)
    try:
        told: list[Any] = meeting.share("place", {"refused": told_of(error)})
    except RankError:  # who has not come yet finds it in the store
        return
    raise_together("shard()", [place.get("refused") for place in told], error)


def _is_group(group: object) -> bool:
    return group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup))


def _meeting(group: dist.ProcessGroup | None, timeout: float) -> tuple[Rendezvous, StoreWatch]:
    """Makes the rendezvous at which the ranks of a group build their next transport. All ranks call it in the
    same order."""
    store = _own_store(group)
    watch = _shared_watch(group, store)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return Rendezvous(store, rank, size, timeout, _ended(group)), watch


def _flat(
    chosen: str,
    or_gloo: bool,
    store: Store,
    device: torch.device,
    timeout: float,
    group: dist.ProcessGroup | None,
    watch: StoreWatch,
) -> Transport:
    """A transport that treats all peers alike."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if chosen in _makers:
        return _makers[chosen](store, rank, size, device, timeout)
    if chosen == "nccl":
        return NcclTransport(store, group if group is not None else _world(), device, timeout, watch)
    if chosen == "shm":
        try:
            return ShmTransport(store, rank, size, device, timeout)
        except OptionError:
            if not or_gloo:
                raise
    return GlooTransport(store, rank, size, device, timeout, watch)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _own_store(group: dist.ProcessGroup | None) -> Store:
    """A part of the group's store that no other transport uses."""
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else _world()))
    members = ",".join(map(str, ranks)) if len(ranks) < dist.get_world_size() else "all"
    ours = PrefixStore(members, _this_attempt())
    # How many transports this rank has made, counted in the store: ranks may be threads of one process.
    return PrefixStore(str(ours.add(f"made/{dist.get_rank()}", 1)), ours)


def _this_attempt() -> Store:
    """A part of the default store: a restarted run may meet what the last attempt left in it."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"zeroshard/{attempt}", _get_default_store())


def _ended(group: dist.ProcessGroup | None) -> Callable[[int], str | None]:
    """How a rank of the group ended, if it has. From now on this rank's end is told to the others."""
    rank, base = dist.get_rank(), _get_default_store()
    held = _registries.get(rank)
    if held is None or held[0] is not base:
        held = _registries[rank] = (base, ExitRegistry(_this_attempt(), rank))
    ranks = dist.get_process_group_ranks(group if group is not None else _world())
    registry = held[1]
    return lambda member: registry.ended(ranks[member])


def was_in_shard() -> bool:
    """Whether a transport between several ranks was ever asked for here: this rank's end is told then."""
    return bool(_registries)


def end_early() -> None:
    """This rank ends, and was in no `shard`: others may come to one, over the group that the script made."""
    ExitRegistry(_this_attempt(), dist.get_rank()).close()


def _shared_watch(group: dist.ProcessGroup | None, store: Store) -> StoreWatch:
    """What all transports between these ranks share, as long as the group is the same."""
    rank, base = dist.get_rank(group), _get_default_store()
    members = (rank, *dist.get_process_group_ranks(group if group is not None else _world()))
    held = _watches.get(members)
    if held is None or held[0] is not base:
        watch = StoreWatch(PrefixStore("watch", store), rank, dist.get_world_size(group))
        held = _watches[members] = (base, watch)
    return held[1]


def _here(
    device: torch.device, transport: str, ranks_per_node: int | None, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Where this rank is, and what it asks for."""
    return {
        "asked": transport,
        "per_node": ranks_per_node,
        "host": _host(),
        "gpu": _gpu(device),
        "nccl": device.type == "cuda" and "nccl" in str(dist.get_backend_config(group)),
    }


def _topology(places: list[dict[str, Any]]) -> Topology:
    """The same on every rank, or the same OptionError."""
    asked = [place["per_node"] for place in places]
    if len(set(asked)) > 1:
        raise OptionError(
            f"ranks ask for different ranks_per_node: {', '.join(map(str, asked))} (in rank order)"
        )
    if asked[0] is None:
        return by_host([str(place["host"]) for place in places])
    return by_count(len(places), asked[0])


def _choose(told: list[dict[str, Any]], transport: str, topology: Topology) -> str:
    """The same name on every rank, or the same OptionError."""
    asked = [value["asked"] for value in told]
    if len(set(asked)) > 1:
        raise OptionError(f"ranks ask for different transports: {', '.join(asked)} (in rank order)")
    if transport == "local":
        raise OptionError(
            f"transport 'local' is for one rank and this group has {len(told)}: use transport='auto'"
        )
    own_gpu = all(value["nccl"] for value in told) and len({str(value["gpu"]) for value in told}) == len(told)
    if transport == "nccl" and not own_gpu:
        raise OptionError(
            "transport 'nccl' needs a group with the nccl backend and one GPU per rank, and the ranks are on "
            f"{[value['gpu'] for value in told]}: use transport='auto'"
        )
    one_host = len({str(value["host"]) for value in told}) == 1
    if transport == "shm" and not one_host:
        hosts = sorted({str(value["host"][0]) for value in told})
        raise OptionError(
            "transport 'shm' needs all ranks on one host and in one process namespace, and they are on "
            f"{', '.join(hosts)}: use transport='gloo'"
        )
    if transport == "nodes":
        _check_nodes(told, topology)
    if transport != "auto":
        return transport
    return "nccl" if own_gpu else "shm" if one_host else "gloo"


def _check_nodes(told: list[dict[str, Any]], topology: Topology) -> None:
    """Whether ranks can be divided into nodes whose ranks share memory."""
    trouble = topology.why_not_two_levels()
    hosts = {(node, str(place["host"])) for node, place in zip(topology.nodes, told, strict=True)}
    if trouble is None and len(hosts) > topology.count:
        trouble = "ranks_per_node= puts ranks of different hosts on one node"
    if trouble is None and any(place["gpu"] != "cpu" for place in told):
        trouble = "it is for ranks without GPUs"
    if trouble is not None:
        raise OptionError(
            f"transport 'nodes', which node_cache=True uses, joins nodes of several ranks, and {trouble}: "
            "drop it, or to try it on one host pass ranks_per_node="
        )


def _host() -> list[str]:
    """What two processes that can open one another's /proc entries have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        space = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        # Without /proc there is no shared memory to open: a name that no other rank has.
        boot, space = f"pid {os.getpid()}", ""
    return [socket.gethostname(), boot, space]


def _gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    index = device.index if device.index is not None else torch.cuda.current_device()
    # NCCL refuses two ranks on one GPU unless they say that they are on different hosts.
    host = os.environ.get("NCCL_HOSTID", socket.gethostname())
    return f"{host} {torch.cuda.get_device_properties(index).uuid}"
