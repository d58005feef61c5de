"""Bits of tensors taken for those of another dtype by ``view(dtype)``, by generated kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen.ir.rounding import NARROW
from jitgen.spec import BITS_OF, DTYPES
from tests.bits import same, tensor, words

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("source", DTYPES)
def test_every_dtype_as_every_other(backend: Any, source: str) -> None:
    x = tensor(DTYPES[source], 4096).cuda()
    others = [dtype for dtype in DTYPES.values() if dtype not in (x.dtype, torch.bool)]
    results = jitgen.jit(lambda x: [x.view(dtype).clone() for dtype in others], backend=backend)(x)
    for result, dtype in zip(results, others, strict=True):
        assert same(result.cpu(), x.view(dtype).cpu()), dtype


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("narrow", NARROW)
def test_every_word_of_a_narrow_float(backend: Any, narrow: str) -> None:
    x = words(DTYPES[narrow]).cuda()
    integer, ids = DTYPES[BITS_OF[narrow]], torch.randint(0, len(x), (5,), device="cuda")

    def function(x: torch.Tensor, bits: torch.Tensor, ids: torch.Tensor) -> Any:
        read = [x.view(torch.uint8) >> 4, x.view(torch.int64).clone(), x.T.view(integer) + 1]
        chosen = x[ids].view(torch.uint8) & 15
        stored = [(bits ^ 1).view(x.dtype), x.view(torch.int64).view(x.dtype).clone(), (bits ^ 3).view(x.dtype).T]
        return [*read, chosen, *(y.contiguous() for y in stored)]

    arguments = x, x.view(integer), ids
    for number, (result, want) in enumerate(
        zip(jitgen.jit(function, backend=backend)(*arguments), function(*arguments), strict=True)
    ):
        assert same(result.cpu(), want.cpu()), number


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("narrow", NARROW)
def test_every_word_is_updated(backend: Any, narrow: str) -> None:
    def function(x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> None:
        y[ids] = (x.view(integer) ^ 3).view(x.dtype)
        x.copy_((x.view(integer) ^ 1).view(x.dtype))

    x, integer = words(DTYPES[narrow]).cuda(), DTYPES[BITS_OF[narrow]]
    ids = torch.randperm(len(x), device="cuda")
    ours, theirs = ((x.clone(), ids, torch.zeros_like(x)) for _ in range(2))
    jitgen.jit(function, backend=backend)(*ours)
    function(*theirs)
    assert same(ours[0].cpu(), theirs[0].cpu())
    assert same(ours[2].cpu(), theirs[2].cpu())
