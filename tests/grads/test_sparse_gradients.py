"""Embeddings with sparse gradients: what the sharded parameters show is dense, on one rank as on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs


def trained(sparse: bool, stage: int | None, unsynced: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = zs.shard(model, optimizer, stage=stage, **options) if stage is not None else None
    for step in range(4):
        for micro in range(2):
            ids = torch.randint(8, (3,), generator=torch.Generator().manual_seed(10 * step + micro))
            loss = model(ids).float().square().mean()
            if run is not None and unsynced and not micro:
                with run.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if run is not None:
        run.close()
    return [p.detach() for p in model.parameters()]


CASES = {
    "plain": (False, {}),
    "unsynced": (True, {}),
    "host": (True, {"offload": zs.Offload(optimizer="host")}),
    "bf16": (True, {"precision": "bf16"}),
    "delayed": (True, {"sync": zs.Delayed()}),
}


@pytest.mark.parametrize(("unsynced", "options"), CASES.values(), ids=CASES)
def test_one_rank_takes_them_as_dense_ones(unsynced: bool, options: dict[str, Any]) -> None:
    found = trained(True, 2, unsynced, options)
    dense = trained(False, 2, unsynced, options)
    for one, other in zip(found, dense, strict=True):
        torch.testing.assert_close(one, other)
    if not options:
        for one, other in zip(found, trained(False, None, False, {}), strict=True):
            torch.testing.assert_close(one, other)
