"""Where the first values of a model come from: its own tensors, or weight files that its names fit.

Names are matched before anything is allocated, from the headers of the files alone; rows are read when the
unit that they belong to is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.records import convertible, dtype_name, height
from zeroshard.checkpoint.untrusted import some
from zeroshard.checkpoint.weights import StoredTensor, Weights, names_with_prefix, open_weights
from zeroshard.comm import Transport
from zeroshard.errors import CheckpointError, RankError

from .rank_agreement import together

CHUNK = 16 << 20  # bytes of a tensor that move to another device at once
_LISTED = 8  # names of each kind in an error


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or a saved buffer of a model, with every name and every place that it has."""

    value: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


class FirstValues:
    """The first values of a model's parameters and buffers, by rows. Without weight files: its own."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self._left = {p.device for p in model.parameters() if self.moves(p)}
        self._stored: dict[int, StoredTensor] = {}  # by id of a parameter or buffer
        self._buffers: list[NamedTensor] = []
        self._files = ExitStack()

    @classmethod
    def of(
        cls, model: nn.Module, weights: Weights | None, device: torch.device, transport: Transport
    ) -> FirstValues:
        """Opens the files and matches their names. Every rank calls it; what one is refused all are."""
        found = cls(model, device)
        if weights is not None:
            together(transport, "shard(weights=...)", lambda: found._match(model, weights))
            sums = transport.exchange(found._digest(), "shard(weights=...)")
            if len(set(map(str, sums))) > 1:
                found.close()
                raise RankError(
                    "ranks disagree about the weights: tensors in their files have other names, shapes or "
                    "dtypes. Every rank must pass weights= the same files."
                )
        return found

    def close(self) -> None:
        self._files.close()

    @property
    def buffers(self) -> list[Tensor]:
        """Those that come from files."""
        return [tensor.value for tensor in self._buffers]

    # ------------------------------------------------------------------ names

    def _match(self, model: nn.Module, weights: Weights) -> None:
        """Give each tensor of the model its own in the files, or raise with all that does not fit."""
        try:
            stored = open_weights(weights, self._files)
            self._fit(model, weights, stored)
        except BaseException:
            self.close()
            raise

    def _fit(self, model: nn.Module, weights: Weights, stored: dict[str, StoredTensor]) -> None:
        wanted = _saved_tensors(model)
        known = {name for tensor in wanted for name in tensor.names}
        names = names_with_prefix(stored, known, getattr(model, "base_model_prefix", None))
        by_name = {names[name]: tensor for name, tensor in stored.items()}
        missing, unlike = list[str](), list[str]()
        for tensor in wanted:
            name = next((name for name in tensor.names if name in by_name), None)
            if name is None:
                if not any(_matches(name, weights.missing) for name in tensor.names):
                    missing.append(tensor.names[0])
                continue
            found, value = by_name[name], tensor.value
            if found.shape != tuple(value.shape) or not convertible(found.dtype, dtype_name(value.dtype)):
                unlike.append(
                    f"`{name}` is {found.shape} {found.dtype} in the files and {tuple(value.shape)} "
                    f"{dtype_name(value.dtype)} in the model"
                )
            self._stored[id(value)] = found
            if not isinstance(value, nn.Parameter):
                self._buffers.append(tensor)
        made_anew = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        unexpected = [
            name
            for name, own in names.items()
            if own not in known and own not in made_anew and not _matches(name, weights.unused)
        ]
        _refuse(weights, missing, unexpected, unlike)

    def _digest(self) -> str:
        told = sorted(f"{t.name} {t.shape} {t.dtype}" for t in self._stored.values())
        return blake2b("\n".join(told).encode(), digest_size=12).hexdigest()

    # ------------------------------------------------------------------ rows

    def stored(self, value: Tensor) -> bool:
        """Whether this parameter or buffer comes from files."""
        return id(value) in self._stored

    def moves(self, value: Tensor) -> bool:
        """Whether it rests on another device than the run's."""
        return not value.is_meta and value.device != self.device

    def chunks(
        self, parameter: Tensor, value: Tensor | None, start: int, stop: int
    ) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of a parameter in order, from files or from `value`; one without dims has a row.
        They may be on another device than where they go, and of another dtype."""
        if value is None:
            yield from self._stored[id(parameter)].chunks(start, stop)
            return
        lines = value if value.dim() else value.view(1)
        step = max(stop - start, 1)
        if self.moves(value):
            step = max(1, CHUNK // max(1, value.nbytes // max(1, len(lines))))
        for first in range(start, stop, step):
            yield first, lines[first : min(first + step, stop)]

    def release(self, parameter: nn.Parameter) -> None:
        """Let go of the user's values, which now rest elsewhere: else memory would hold the model twice."""
        if parameter.is_meta:
            return
        nothing = float("nan") if parameter.is_floating_point() else 0
        parameter.data = torch.full((), nothing, dtype=parameter.dtype, device=parameter.device).expand(
            parameter.shape
        )

    @torch.no_grad()
    def fill_buffers(self, model: nn.Module) -> None:
        """Read the saved buffers, and bring all others to the device of the run."""
        for tensor in self._buffers:
            target = tensor.value
            if target.is_meta:
                target = torch.empty_like(target, device=self.device)
                for module, name in tensor.places:
                    module._buffers[name] = target
            lines = target if target.dim() else target.view(1)
            for first, rows in self._stored[id(tensor.value)].chunks(0, height(tuple(target.shape))):
                lines[first : first + len(rows)].copy_(rows)
        for buffer in model.buffers():
            if buffer.device in self._left and self.moves(buffer):
                buffer.data = buffer.data.to(self.device)


def _saved_tensors(model: nn.Module) -> list[NamedTensor]:
    """What a state dict of the model holds: each tensor once, with all its names."""
    found: dict[int, NamedTensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is not None:
                record = found.setdefault(id(tensor), NamedTensor(tensor))
                record.names.append(f"{path}.{name}" if path else name)
                record.places.append((module, name))
    return list(found.values())


def _matches(name: str, patterns: str | tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse(weights: Weights, missing: list[str], unexpected: list[str], unlike: list[str]) -> None:
    """Raise where anything does not fit, with all of it."""
    said, advice = list[str](), list[str]()
    if missing:
        said.append(f"{len(missing)} missing in the files: {some([f'`{n}`' for n in missing], _LISTED)}")
        advice.append(f'missing="{_pattern(missing[0])}" leaves the first to be filled as without weights')
    if unexpected:
        said.append(f"{len(unexpected)} unexpected: {some([f'`{n}`' for n in unexpected], _LISTED)}")
        advice.append(f'unused="{_pattern(unexpected[0])}" leaves the first unread')
    if unlike:
        said.append(f"{len(unlike)} unlike: {some(unlike, _LISTED)}")
    if said:
        hint = f' Where that is meant: weights=zs.Weights("{weights.path}", ...); {", and ".join(advice)}.'
        raise CheckpointError(
            f"the weights in {weights.path} do not fit the model. {'; '.join(said)}.{hint if advice else ''} "
            "Nothing was changed."
        )


def _pattern(name: str) -> str:
    """``head.*`` for ``head.weight``."""
    module, _, _ = name.rpartition(".")
    return f"{module}.*" if module else name
