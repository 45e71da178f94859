"""TRL's trainers, sharded, against themselves under DDP. They run where TRL is installed:
`pip install trl==1.16.0 && pytest tests/integrations/test_trl.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zeroshard.testing import Ranks, assert_same_bits

pytest.importorskip("trl")
from trl_case import trained

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_trains_as_under_ddp(pool: Ranks, tmp_path: Path, name: str) -> None:
    """References are sharded, too, and vLLM would get whole tensors."""
    plain = pool.run(trained, name, str(tmp_path / "plain"), None)[0]
    for stage in (2, 3):
        ours = pool.run(trained, name, str(tmp_path / f"{stage}"), stage, timeout=300)[0]
        assert ours["stage"] == stage
        assert ours["reference"] == (stage == 3 and name != "sft")
        assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6, abs=1e-7)
        assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        for key, value in plain["weights"].items():
            torch.testing.assert_close(ours["weights"][key], value, rtol=0, atol=1e-6)
        assert_same_bits({key: ours["weights"][key] for key in ours["handed"]}, ours["handed"])
        assert set(ours["handed"]) >= {"lm_head.weight", "model.embed_tokens.weight"}
