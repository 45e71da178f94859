"""The ranks of a Keras script: how they are started, how they meet, and what small things they tell one
another."""

from __future__ import annotations

import os
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs

from .config import Config

_ANNOUNCES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


class World:
    """The ranks that have met. Every rank makes the same calls in the same order.

    Small things go over a group of their own on the host. A rank that fails closes it (`leave`), so that
    those who wait for it learn of that at once.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None

    @property
    def _host(self) -> Any:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def leave(self) -> None:
        """This rank has failed, and takes no part in what others wait for."""
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(group)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise zs.RankError(
                f"rank {self.rank} waited for the others, and one of them has failed or left the loop: its "
                "own message says why."
            ) from error

    def sum(self, tensor: Tensor) -> Tensor:
        """In place, over all ranks."""
        if self.size > 1:
            with self._waiting():
                dist.all_reduce(tensor, group=self._host if tensor.device.type == "cpu" else None)
        return tensor

    def mean(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of every tensor, over all ranks; None where no rank has one."""
        shapes = self.from_all([None if tensor is None else tuple(tensor.shape) for tensor in tensors])
        made: list[Tensor | None] = []
        for tensor, every in zip(tensors, zip(*shapes, strict=True), strict=True):
            shape = next((one for one in every if one is not None), None)
            own = tensor.detach().clone() if tensor is not None else None
            if own is None and shape is not None:
                own = torch.zeros(shape)
            made.append(None if own is None else self.sum(own).div_(self.size))
        return made

    def rows_of_all(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of all ranks, one after another; `counts`: how many each has."""
        longest = max(counts)
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: counts[self.rank]] = own[: counts[self.rank]]
        told = [torch.empty_like(padded) for _ in counts]
        with self._waiting():
            dist.all_gather(told, padded, group=self._host if own.device.type == "cpu" else None)
        return torch.cat([rows[:count] for rows, count in zip(told, counts, strict=True)])

    def exchange(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """One chunk to every rank; what all have for this one, in rank order. Flat, on the host."""
        counts = [chunk.numel() for chunk in chunks]
        own = counts[self.rank]
        told = torch.empty(own * self.size)
        with self._waiting():
            dist.all_to_all_single(told, torch.cat(list(chunks)), [own] * self.size, counts, group=self._host)
        return list(told.split([own] * self.size))

    def from_first(self, value: Any) -> Any:
        """What rank 0 has."""
        if self.size == 1:
            return value
        told = [value]
        with self._waiting():
            dist.broadcast_object_list(told, src=0, group=self._host)
        return told[0]

    def from_all(self, value: Any) -> list[Any]:
        """What all ranks have, in rank order."""
        if self.size == 1:
            return [value]
        told: list[Any] = [None] * self.size
        with self._waiting():
            dist.all_gather_object(told, value, group=self._host)
        return told

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        return bool(self.sum(torch.tensor(float(flag))).item())

    def seed_alike(self) -> None:
        """Random numbers go on from where rank 0's are: of Python, numpy and torch on the CPU, which shuffle
        data and make seeds."""
        if self.size == 1:
            return
        own = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        python, numpy, cpu = self.from_first(own if self.rank == 0 else None)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


def meet(config: Config) -> World:
    """This process's place among the ranks; or it starts them and does not return."""
    announced = next((name for name in _ANNOUNCES if os.environ.get(name, "1") != "1"), None)
    already = dist.is_available() and dist.is_initialized()
    wanted = config.world
    if announced is None and not already and wanted not in (None, 1):
        start(config, wanted)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    probe = zs.shard(nn.Linear(1, 1, device=device), stage=0)  # joins whom the environment announces
    rank, size = probe.rank, probe.size
    probe.close()
    if wanted is not None and wanted != size:
        raise zs.OptionError(
            f"{config!r} asks for {wanted} ranks, and {size} {'were' if size > 1 else 'was'} started: type "
            f"`{_command(config, wanted)}`, or set num_nodes and num_gpus_per_node to what there is."
        )
    return World(rank, size)


def start(config: Config, ranks: int) -> NoReturn:
    """Become the launcher of the same script on one node; of several nodes say what to type."""
    script = _script()
    if (config.num_nodes or 1) > 1 or script is None:
        where = "of a notebook or a prompt" if script is None else "of one node"
        raise zs.OptionError(
            f"{config!r} asks for {ranks} ranks, and this is one process {where}: type "
            f"`{_command(config, ranks)}`. To try all of them on this machine: `{_here(ranks)}`."
        )
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *_interpreter(), "-m", "zeroshard", "run", "--ranks", str(ranks), *script]
    os.execv(sys.executable, command)


def _script() -> list[str] | None:
    """The script or module that runs, with its arguments, as `zeroshard run` takes them."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    file = getattr(main, "__file__", None)
    return [file, *sys.argv[1:]] if file is not None and os.path.exists(file) else None


def _interpreter() -> list[str]:
    """The flags of this Python, before its script."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    return before[:-1] if before[-1:] == ["-m"] else before


def _typed() -> str:
    return shlex.join(_script() or ["script.py"])


def _here(ranks: int) -> str:
    return f"zeroshard run --ranks {ranks} {_typed()}"


def _command(config: Config, ranks: int) -> str:
    nodes, each = config.num_nodes or 1, config.num_gpus_per_node or 1
    if nodes == 1:
        return _here(ranks)
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint "
        f"<first node>:29500 {_typed()}` on every node, or here `{_here(ranks)}"
    )
