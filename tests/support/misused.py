"""A small model, sharded, on which tests try what must not be done."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import zeroshard as zs

Trained = tuple[nn.Module, Optimizer, zs.Run]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(stage: int = 3, **options: Any) -> Trained:
    model = Net()
    optimizer = AdamW(model.parameters())
    return model, optimizer, zs.shard(model, optimizer, stage=stage, **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()
