"""Modules that compute in unusual ways: called again, recomputed, recurrent, sparse, with odd outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from test_param_kinds import Block, four, next_token, squared
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trained_twice import STAGES, Case, Training, assert_as_one_process, plain_turn, rows, sharded, tokens

import zeroshard as zs
from zeroshard.testing import ranks

pytestmark = pytest.mark.ranks


class Again(nn.Module):
    """Each block runs three times in one forward; optionally recomputed."""

    def __init__(self, how: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.how = how or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            for block in self.blocks:
                x = self.how(block, x)
        return x


class Inside(nn.Module):
    """A block that recomputes a part of itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(6, 8), nn.Linear(8, 6), reentrant
        self.norm = nn.LayerNorm(6)

    def part(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + checkpoint(self.part, x, use_reentrant=self.reentrant)


class Layers(nn.Module):
    """Whatever layers, one after another, behind a linear layer of the root."""

    def __init__(self, *layers: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def recomputed(reentrant: bool) -> nn.Module:
    return Again(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))


def recomputed_all(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    """The whole model under one checkpoint, called from the loop."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant).pow(2).mean()

    return loss


def nested_checkpoint() -> nn.Module:
    """A checkpointed pair of checkpointed blocks."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Inside(False), Inside(False)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: self.b(self.a(y)), x, use_reentrant=False)

    return Layers(Pair(), Pair())


# ---------------------------------------------------------------------- outputs


@dataclass
class Answer:
    logits: Tensor
    extra: dict[str, Any]


class Point(NamedTuple):
    x: Tensor
    y: tuple[Tensor, ...]


class Thing:
    """An object of a class that nobody knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wraps() for _ in range(3))

    def forward(self, x: Tensor) -> Answer:
        kept = []
        for block in self.blocks:
            answer = block(Answer(x, {}))
            kept.append(answer["thing"].value)
            inner: Answer = answer["answer"]
            x = answer["point"].x + answer["point"].y[0] + inner.logits + inner.extra["k"][0]
        return Answer(x, {"all": Point(x, tuple(kept))})


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, given: Answer) -> dict[str, Any]:
        x = self.norm(given.logits)
        y = torch.tanh(self.inner(x))
        return {"thing": Thing(y * 2), "point": Point(x, (y,)), "answer": Answer(y * 3, {"k": [x * y]})}


def from_answer(model: nn.Module, x: Tensor) -> Tensor:
    answer = model(x)
    return answer.logits.pow(2).mean() + sum(k.mean() for k in answer.extra["all"].y)


# ---------------------------------------------------------------------- methods


class Holder(nn.Module):
    """A block that is only a container of layers, which others call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)


class Methods(nn.Module):
    """The loop calls `encode` and `decode`, never the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.holders = nn.ModuleList(Holder() for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, 4)

    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for holder in self.holders:
            x = x + holder.down(F.relu(holder.up(x)))
        return x

    def decode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Bypassed(Methods):
    """The layers of a block that has a forward of its own are called from outside."""

    def decode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(F.relu(block.up(x)))
        return self.last(x)


def by_methods(model: Any, x: Tensor) -> Tensor:
    return (model.decode(model.encode(x)) - x).pow(2).mean()


# ---------------------------------------------------------------------- torch's own layers


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), x, x, need_weights=False)[0]


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(10, 6, batch_first=True)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(self.embed(ids))[0])[0])


class Convolutions(nn.Module):
    """Channels-last convolutions with groups, dilation, transposition, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.groups = nn.Conv2d(6, 9, (3, 1), groups=3, dilation=2, padding=(2, 0), bias=False)
        self.norm = nn.GroupNorm(3, 9)
        self.up = nn.ConvTranspose2d(9, 5, 2, stride=2)
        self.head = nn.Conv2d(5, 3, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.groups(F.relu(self.stem(x)))))
        return self.head(self.up(x))


def images(step: int, rank: int) -> Tensor:
    return rows(step, rank, 2 * 5 * 5, height=3).view(3, 2, 5, 5).to(memory_format=torch.channels_last)


def pictures(step: int, rank: int) -> Tensor:
    return rows(step, rank, 12, height=4).view(4, 3, 4)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, sparse=True)
        self.bag = nn.EmbeddingBag(11, 6, sparse=True, mode="sum")
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) + self.bag(ids)[:, None])


# ---------------------------------------------------------------------- backward inside of forward


class Force(nn.Module):
    """A block that computes with the gradient of an energy, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.energy, self.out = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.energy(torch.tanh(self.up(x))).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + self.out(force)


class InChunks(Layers):
    """The loss of its head goes backward a chunk at a time, so that all logits never exist at once. What it
    returns hands that gradient on, and is the loss."""

    share = 1.0  # of a batch in all that the process trains on

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        cut, loss = x.detach().requires_grad_(), x.new_zeros(())
        for chunk in cut.chunk(2):
            part = self.head(chunk).pow(2).sum() / (5 * len(x))
            (part * self.share).backward()
            loss += part.detach()
        assert cut.grad is not None
        handed_on = (x * cut.grad / self.share).sum()
        return handed_on + loss - handed_on.detach()


def chunk_by_chunk(training: Training, step: int) -> None:
    training.model.share = 1 / len(training.parts)
    plain_turn(training, step)


def parametrized() -> nn.Module:
    from torch.nn.utils import parametrizations

    model = Layers(Block(), Block())
    for block in model.layers:
        parametrizations.weight_norm(block.up)
    parametrizations.orthogonal(model.first)
    return model


def spectral() -> nn.Module:
    from torch.nn.utils import parametrizations

    model = Layers(Block(), Block())
    parametrizations.spectral_norm(model.layers[0].down)
    return model.eval()  # in training every forward changes buffers, and one process makes more forwards


CASES = {
    "again": Case(Again, four, squared),
    "again, recomputed": Case(lambda: recomputed(False), four, squared),
    "again, reentrant": Case(lambda: recomputed(True), four, squared),
    "recompute=True": Case(Again, four, squared, options={"recompute": True}),
    "recompute one": Case(Again, four, squared, options={"recompute": "blocks.1"}, clip=0.5),
    "whole recomputed": Case(Again, four, recomputed_all(False)),
    "whole reentrant": Case(Again, four, recomputed_all(True)),
    "inside": Case(lambda: Layers(Inside(False), Inside(False)), four, squared),
    "inside, reentrant": Case(lambda: Layers(Inside(True), Inside(True)), four, squared),
    "inside both": Case(lambda: Layers(Inside(True), Inside(False)), four, squared,
                        options={"recompute": True}),
    "nested": Case(nested_checkpoint, four, squared),
    "outputs": Case(Returns, four, from_answer),
    "methods": Case(Methods, four, by_methods),
    "bypassed": Case(Bypassed, four, by_methods, options={"units": "none"}),
    "bypassed units": Case(Bypassed, four, by_methods),
    "attention": Case(lambda: Layers(Attention(), Attention()), pictures, squared),
    "encoder layer": Case(lambda: Layers(encoder_layer(), encoder_layer()), pictures, squared),
    "recurrent": Case(Recurrent, tokens, next_token),
    "recurrent units": Case(Recurrent, tokens, next_token, options={"units": ("lstm", "gru")}),
    "convolutions": Case(Convolutions, images, squared),
    "sparse": Case(Sparse, tokens, next_token, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)),
    "forces": Case(lambda: Layers(Force(), Force(), Force()), four, squared),
    "forces, recomputed": Case(lambda: Layers(Force(), Force()), four, squared, options={"recompute": True}),
    "in chunks": Case(InChunks, four, lambda model, x: model(x), turn=chunk_by_chunk),
    "parametrized": Case(parametrized, four, squared),
    "spectral": Case(spectral, four, squared),
}  # fmt: skip


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", [name for name in CASES if name != "bypassed units"])
def test_equals_one_process(name: str, stage: int) -> None:
    assert_as_one_process(__name__, name, stage)


@pytest.mark.wide(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["again, reentrant", "inside both", "methods", "outputs", "in chunks"])
def test_equals_one_process_over_gloo(name: str, stage: int) -> None:
    assert_as_one_process(__name__, name, stage, transport="gloo")


def bypass(stage: int) -> None:
    with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):
        sharded(__name__, "bypassed units", stage, "auto")


@pytest.mark.parametrize("stage", [0, 3])
def test_bypassed_units_work_where_sharded_params_are_plain_or_layers_are_hooked(stage: int) -> None:
    assert_as_one_process(__name__, "bypassed units", stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_bypassed_units_are_an_error_elsewhere(stage: int) -> None:
    ranks(2).run(bypass, stage)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_recurrent_weights_stay_where_they_are(
    precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU `flatten_parameters`, which forward calls when it sees other weights than before, moves them
    out of the memory that the optimizer updates."""
    moved: list[nn.Module] = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda module: moved.append(module))
    model = Recurrent()
    moved.clear()
    run = zs.shard(model, torch.optim.SGD(model.parameters()), precision=precision)
    model(tokens(0, 0))
    assert moved == []
    run.close()
    model(tokens(0, 0))
    assert set(moved) == {model.lstm, model.gru}
