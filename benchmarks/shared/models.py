"""The models that are timed, and their data: all a pure function of (workload, seed, rank, step).

Every model is called as `model(inputs, targets) -> loss` and keeps its repeated parts in `model.blocks`, so
that one training loop and one rule for units ("each block, and the rest") serve every system alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 20_24


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT-2-like decoder with tied embeddings."""

    vocab: int
    context: int
    width: int
    heads: int
    depth: int


class GPTBlock(nn.Module):
    """Pre-norm attention and feed-forward, as in GPT-2."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        fed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + fed


class GPT(nn.Module):
    """A decoder whose output matrix is its token embedding: tied, as GPT-2's is."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(GPTBlock(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class SmallBlock(nn.Module):
    """Ten small residual layers: twenty parameters."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.scale * torch.tanh(layer(x))
        return x


class SmallParameters(nn.Module):
    """20 parameters a block and nothing else: times what a system spends per parameter, not per byte."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        scale = (10 * depth) ** -0.5
        self.blocks = nn.ModuleList(SmallBlock(width, scale) for _ in range(depth))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x, targets)


class Busy(torch.autograd.Function):
    """Takes a time and no processor, as computation on a device does for the thread that trains."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class PacedBlock(nn.Module):
    """Four matrices, and computation of fixed length."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.3 * torch.tanh(layer(x))
        paced: Tensor = Busy.apply(x, self.seconds)
        return paced


class Paced(nn.Module):
    """Much to send and, for the processor, little to compute: links decide also on a machine that is
    shared."""

    def __init__(self, width: int, depth: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PacedBlock(width, seconds / (3 * depth)) for _ in range(depth))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x, targets)


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model with the batch that each rank feeds it in one step."""

    name: str
    batch: int
    sequence: int
    shape: GPTShape | None = None
    width: int = 0
    depth: int = 0
    seconds: float = 0.0  # of a step's computation, where that is a sleep

    def build(self) -> nn.Module:
        """The model, with the same values on every rank and in every system."""
        torch.manual_seed(SEED)
        return self._model()

    def _model(self) -> nn.Module:
        if self.shape is not None:
            return GPT(self.shape)
        if self.seconds:
            return Paced(self.width, self.depth, self.seconds)
        return SmallParameters(self.width, self.depth)

    def batches(self, rank: int) -> Callable[[int], Batch]:
        """`step -> batch` of one rank.

        Ranks draw from different distributions on purpose: with alike data, a system that forgot to exchange
        gradients would show nearly the losses of one that did, and the check on losses would not catch it.
        """
        draw = self._tokens if self.shape is not None else self._vectors

        def batch(step: int) -> Batch:
            generator = torch.Generator().manual_seed(SEED + 1_000_003 * rank + step)
            return draw(rank, generator)

        return batch

    def _tokens(self, rank: int, generator: torch.Generator) -> Batch:
        """Each rank has 16 tokens of its own; on rank r a sequence walks through them with stride r + 1."""
        assert self.shape is not None
        start = torch.randint(0, 16, (self.batch, 1), generator=generator)
        walk = (start + (rank + 1) * torch.arange(self.sequence + 1)) % 16
        tokens = (walk + 16 * rank) % self.shape.vocab
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _vectors(self, rank: int, generator: torch.Generator) -> Batch:
        """Noise whose class is its largest element, shifted by the rank."""
        inputs = torch.randn(self.batch, self.width, generator=generator)
        return inputs, (inputs.argmax(dim=1) + rank) % self.width

    def describe(self) -> dict[str, object]:
        """For the result file: sizes, and parameters as counted on the meta device."""
        with torch.device("meta"):
            model = self._model()
        parameters = list(model.parameters())
        return {
            **asdict(self),
            "tensors": len(parameters),
            "parameters": sum(parameter.numel() for parameter in parameters),
        }


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt-27m", 2, 128, GPTShape(vocab=4096, context=256, width=512, heads=8, depth=8)),
        Workload("gpt-27m-128", 1, 128, GPTShape(vocab=4096, context=256, width=512, heads=8, depth=8)),
        Workload("gpt-27m-64", 1, 64, GPTShape(vocab=4096, context=256, width=512, heads=8, depth=8)),
        Workload("gpt-124m", 1, 64, GPTShape(vocab=50257, context=1024, width=768, heads=12, depth=12)),
        Workload("small-2000", 32, 1, width=16, depth=100),
        Workload("gpt-3m", 1, 32, GPTShape(vocab=1024, context=64, width=256, heads=4, depth=4)),
        Workload("paced-7m", 2, 1, width=640, depth=4, seconds=0.02),
        Workload("paced-2m", 2, 1, width=320, depth=4, seconds=0.02),
        Workload("tiny", 2, 16, GPTShape(vocab=256, context=32, width=32, heads=2, depth=2)),
    )
}
