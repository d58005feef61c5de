"""Gradients of attention whose result a product reads through views, on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.projected_attention import LIMITS, arguments, error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize(("batch", "heads", "shared", "rows"), [(1, 8, 4, 512), (2, 4, 1, 333), (1, 4, 2, 64)])
def test_gradients(backend: str, batch: int, heads: int, shared: int, rows: int) -> None:
    given = arguments(batch, heads, shared, rows, 128, torch.bfloat16, "cuda")
    assert error(backend, given) <= LIMITS[torch.bfloat16]
