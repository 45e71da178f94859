"""A loop written for torch's DistributedDataParallel, sharded by its import.

    zeroshard run --ranks 2 examples/torch_ddp.py

All else is what it was: under `from torch.nn.parallel import DistributedDataParallel as DDP` the script is a
plain data-parallel one, and prints the same losses. It runs under torchrun as well.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from zeroshard.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    """A small classifier; its side branch is for batches that ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        )
        self.side, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, side: bool = False) -> torch.Tensor:
        y = self.body(x)
        scores: torch.Tensor = self.head(self.side(y) if side else y)
        return scores


def main() -> None:
    gpus = torch.cuda.is_available()
    dist.init_process_group(
        backend="nccl" if gpus else "gloo", init_method="env://", world_size=int(os.environ["WORLD_SIZE"])
    )
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")

    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    model: nn.Module = Net().to(device)
    where = local_rank if gpus else None
    model = DDP(
        model, device_ids=[local_rank] if gpus else None, output_device=where, find_unused_parameters=True
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(1, 4):
        model.train()
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = criterion(model(x, side=index % 3 == 0), y)
            loss.backward()
            optimizer.step()
            if index % 4 == 0 and dist.get_rank() == 0:
                done = 100.0 * index / len(loader)
                print(
                    f"epoch {epoch} [{index * len(x)}/{len(sampler)} ({done:.0f}%)]  loss {loss.item():.6f}"
                )

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
