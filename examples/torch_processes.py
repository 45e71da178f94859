"""Four processes of torch.multiprocessing that train one model: the line that wraps it shards it.

    python examples/torch_processes.py

Gradients are averaged over the processes before each step. Where they were meant to be summed, multiply the
learning rate by their number.
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from zeroshard.parallel import DistributedDataParallel


def train(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(32, 10), torch.randn(32, 5)
    for epoch in range(10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        print(f"rank {rank}, epoch {epoch}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = [mp.Process(target=train, args=(rank, 4)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
