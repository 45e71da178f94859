"""The models that are timed, and their data: all a pure function of (workload, seed, rank, step).

Every model is called as `model(inputs, targets) -> loss` and keeps its repeated parts in `model.blocks`, so
that one training loop and one rule for units ("each block, and the rest") serve every system alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

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

    def build(self) -> nn.Module:
        """The model, with the same values on every rank and in every system."""
        torch.manual_seed(SEED)
        if self.shape is not None:
            return GPT(self.shape)
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
            model = GPT(self.shape) if self.shape is not None else SmallParameters(self.width, self.depth)
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
        Workload("gpt-124m", 1, 64, GPTShape(vocab=50257, context=1024, width=768, heads=12, depth=12)),
        Workload("small-2000", 32, 1, width=16, depth=100),
        Workload("gpt-3m", 1, 32, GPTShape(vocab=1024, context=64, width=256, heads=4, depth=4)),
        # For links: much to send, little to compute, so that the link decides also on a shared machine.
        Workload("wide-7m", 1, 8, GPTShape(vocab=1024, context=64, width=512, heads=4, depth=2)),
        Workload("wide-2m", 1, 8, GPTShape(vocab=512, context=64, width=256, heads=4, depth=2)),
        Workload("tiny", 2, 16, GPTShape(vocab=256, context=32, width=32, heads=2, depth=2)),
    )
}
