"""A parameter server: the baseline of asynchronous systems' papers, here synchronous, so that it trains the
same model as DDP.

Rank 0 is the server and a worker at once. Every step the workers send their gradients to it (gloo send and
receive, one message per bucket of parameters, started as backward ends); it adds them in rank order, divides,
updates with AdamW, and sends the parameters back. The workers hold no optimizer state.

    python benchmarks/shared/parameter_server.py   # equal to DDP on two ranks? prints the largest difference
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 4 << 20
SERVER = 0


class ParameterServer:
    """Training through the server. `optimizer` is made from the parameters on the server alone."""

    def __init__(self, model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.optimizer = optimizer(model) if self.rank == SERVER else None
        self._groups = self._cut([p for p in model.parameters() if p.requires_grad])
        numels = [sum(p.numel() for p in group) for group in self._groups]
        count = self.size - 1 if self.rank == SERVER else 1
        self._flats = [[torch.empty(n) for _ in range(count)] for n in numels]
        with torch.no_grad():
            self._publish()

    @staticmethod
    def _cut(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = []
        room = 0
        for parameter in reversed(parameters):
            if not groups or parameter.nbytes > room:
                groups.append([])
                room = BUCKET_BYTES
            groups[-1].append(parameter)
            room -= parameter.nbytes
        return groups

    def step(self, loss: Tensor) -> None:
        loss.backward()
        with torch.no_grad():
            (self._serve if self.rank == SERVER else self._push)()
            self._publish()
            self.model.zero_grad()

    def _push(self) -> None:
        """A worker: every bucket at once; they arrive in order."""
        works = []
        for number, (group, flats) in enumerate(zip(self._groups, self._flats, strict=True)):
            torch.cat([_grad(p).reshape(-1) for p in group], out=flats[0])
            works.append(dist.isend(flats[0], SERVER, tag=number))
        for work in works:
            assert work is not None
            work.wait()

    def _serve(self) -> None:
        assert self.optimizer is not None
        workers = [rank for rank in range(self.size) if rank != SERVER]
        works = [
            [dist.irecv(flat, rank, tag=number) for rank, flat in zip(workers, flats, strict=True)]
            for number, flats in enumerate(self._flats)
        ]
        for group, flats, arriving in zip(self._groups, self._flats, works, strict=True):
            for work in arriving:
                assert work is not None
                work.wait()
            sizes = [p.numel() for p in group]
            parts = [flat.split(sizes) for flat in flats]
            for index, parameter in enumerate(group):
                total = _grad(parameter)
                for part in parts:
                    total = total + part[index].view_as(total)
                parameter.grad = total.div_(self.size)
        self.optimizer.step()

    def _publish(self) -> None:
        """The server's parameters to all workers."""
        works = []
        for number, (group, flats) in enumerate(zip(self._groups, self._flats, strict=True)):
            flat = flats[0] if flats else torch.empty(0)
            if self.rank == SERVER:
                if flats:
                    torch.cat([p.detach().reshape(-1) for p in group], out=flat)
                works += [dist.isend(flat, rank, tag=number) for rank in range(self.size) if rank != SERVER]
            else:
                works.append(dist.irecv(flat, SERVER, tag=number))
        for work in works:
            assert work is not None
            work.wait()
        if self.rank != SERVER:
            for group, flats in zip(self._groups, self._flats, strict=True):
                for parameter, part in zip(group, flats[0].split([p.numel() for p in group]), strict=True):
                    parameter.copy_(part.view_as(parameter))


def _grad(parameter: nn.Parameter) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


def losses(rank: int, world: int, folder: str, through_server: bool) -> list[float]:
    """The losses of a small model's first steps on this rank."""
    from models import WORKLOADS
    from systems import SYSTEMS

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{through_server}", rank=rank, world_size=world
    )
    workload = WORKLOADS["tiny"]
    batch, trainer = workload.batches(rank), SYSTEMS["ps" if through_server else "ddp"](workload.build())
    found = [float(trainer.step(batch(index))) for index in range(6)]
    dist.barrier()
    dist.destroy_process_group()
    return found


def difference(rank: int, world: int, folder: str) -> float:
    """The largest relative difference between the losses of DDP's and the server's steps."""
    ddp, server = (losses(rank, world, folder, through) for through in (False, True))
    gap = max(abs(a - b) / abs(b) for a, b in zip(server, ddp, strict=True))
    Path(folder, f"gap{rank}").write_text(repr(gap))
    return gap


def main() -> int:
    """Two ranks on this host; 0 if the server trains what DDP trains."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(difference, (2, folder), 2)
        gap = max(float(Path(folder, f"gap{rank}").read_text()) for rank in range(2))
    print(f"losses of six steps through the server differ from DDP's by at most {gap:.1e} (relative)")
    return 0 if gap < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
