"""Small models that tests share, and batches for them. Sizes are odd so that rows do not divide evenly."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs

Checkpointing = Literal["", "reentrant", "plain"]
_one_at_a_time = threading.Lock()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens in, the mean loss out. As it is, rows and vectors of the CPU do not divide evenly; `even`, all
    do.
    """

    TOKENS, LENGTH = 53, 10

    def __init__(self, even: bool = False, blocks: int = 3, checkpointing: Checkpointing = "") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        width, hidden, vocabulary, places = (64, 128, 64, 16) if even else (20, 65, self.TOKENS, self.LENGTH)
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(places, width)
        self.blocks = nn.ModuleList(Block(width, 2, hidden) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.places.weight[: self.LENGTH]
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @classmethod
    def batch(cls, rows: int, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(cls.TOKENS, (rows, cls.LENGTH + 1), generator=draw)


class InfiniteRow(torch.autograd.Function):
    """The identity; its gradient has an infinite first row: an overflow that only that row's owner sees."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        grad[0] = float("inf")
        return grad


class MLP(nn.Module):
    """Vectors in, the mean loss out. The last bias gets an infinite gradient on a rank that asks for it."""

    WIDTH = 7

    def __init__(self) -> None:
        super().__init__()
        sizes = (self.WIDTH, 29, 17, 17)
        pairs = [(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in pair))
        self.last = nn.Linear(17, 5, bias=False)
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor, infinite: bool = False) -> Tensor:
        bias = InfiniteRow.apply(self.bias) if infinite else self.bias
        out = self.last(self.layers(x)) + bias
        return (out.float() - x[:, :5].float().sin()).square().mean()

    @classmethod
    def batch(cls, rows: int, seed: int) -> Tensor:
        return torch.randn(rows, cls.WIDTH, generator=torch.Generator().manual_seed(seed))


class Tower(nn.Module):
    """Many equal blocks, next to which one unit and one bucket are small. Vectors in, the mean loss out."""

    def __init__(self, width: int = 64, blocks: int = 100) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def whole_weights(run: zs.Run) -> dict[str, Tensor]:
    """A copy of every parameter, whole; every rank calls it."""
    with run.gathered() as whole:
        return {name: p.detach().clone() for name, p in whole.items()}


def build(name: str, checkpointing: Checkpointing = "") -> GPT | MLP:
    """A model with the same values everywhere, also on threads, which share the random numbers."""
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return MLP() if name == "mlp" else GPT(even=name == "even gpt", checkpointing=checkpointing)
