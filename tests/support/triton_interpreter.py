"""Triton's interpreter, which stands in for a GPU where Triton is installed and none is there."""

from __future__ import annotations

import importlib.util

import pytest
import torch

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="Triton's interpreter stands in where Triton is installed and no GPU is there",
)


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels run in it. Triton asks for that when it is imported, and torch may have done so before."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.max, InterpretedFunction):
        pytest.skip("Triton was imported for a GPU before this test")
