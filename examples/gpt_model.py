"""A compact GPT: rotary positions, normalised queries and keys, squared ReLU, an output head of its own.

Chosen to learn as much as possible in two minutes on two cores. What a block adds is projected by zeros at
first, and so is what the head says: the first loss is exactly ln(vocabulary), and a high learning rate is
safe from the first step on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocabulary: int
    context: int = 128
    width: int = 128
    blocks: int = 4
    heads: int = 2


class Block(nn.Module):
    """Attention, then a feed-forward of four times the width, each added to what came in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for entry in (self.query_key_value, self.up):
            nn.init.normal_(entry.weight, std=0.8 * width**-0.5)
        for output in (self.mix, self.down):
            nn.init.zeros_(output.weight)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, width = x.shape
        flat = self.query_key_value(self.attention_norm(x))
        query, key, value = flat.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = _rotate(query, turn), _rotate(key, turn)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(rows, length, width))
        added: Tensor = self.down(F.relu(self.up(self.feed_norm(x))).square())
        return x + added


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Normalise, then turn pairs of features by an angle that grows with the position (rotary embedding)."""
    cos, sin = turn
    x = F.rms_norm(x, (x.size(-1),))
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class GPT(nn.Module):
    """Tokens in, logits out; with targets, the mean loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        size = config.width // config.heads
        speeds = 1000.0 ** (-torch.arange(0, size, 2) / size)
        angles = (torch.arange(config.context).unsqueeze(1) * speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        turn = self.cos[: tokens.size(1)], self.sin[: tokens.size(1)]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.7, top: int = 30) -> Tensor:
        """`count` more tokens for every row, drawn from the `top` most likely ones."""
        draw = torch.Generator(tokens.device).manual_seed(0)
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1]
            best, index = logits.topk(top)
            chosen = torch.multinomial((best / temperature).softmax(-1), 1, generator=draw)
            tokens = torch.cat((tokens, index.gather(1, chosen)), dim=1)
        return tokens
