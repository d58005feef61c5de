"""Bits of tensors taken for those of another dtype by ``view(dtype)``, by generated kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen.spec import DTYPES
from tests.bits import same, tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("source", DTYPES)
def test_every_dtype_as_every_other(backend: Any, source: str) -> None:
    x = tensor(DTYPES[source], 4096).cuda()
    others = [dtype for dtype in DTYPES.values() if dtype not in (x.dtype, torch.bool)]
    results = jitgen.jit(lambda x: [x.view(dtype).clone() for dtype in others], backend=backend)(x)
    for result, dtype in zip(results, others, strict=True):
        assert same(result.cpu(), x.view(dtype).cpu()), dtype
