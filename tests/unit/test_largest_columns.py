"""The argmax of a product's columns without storing these (``families/gemm/largest.py``).

Numbers are small integers where not said otherwise, so that sums are exact, many are equal, and the result is torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import host
from tests.compile.test_formats_on_host import host_headers
from tests.cuda_on_host import run

needs_compiler = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def column(h: Any, w: Any) -> Any:
    return F.linear(h, w).argmax(-1)


def scaled(h: Any, w: Any, bias: Any) -> Any:
    return (F.linear(h[:, -1], w, bias) * 0.5).argmax(-1, keepdim=True)


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


def is_rewritten(function: Callable[..., Any], *args: Any, target: str = "sm_90a", **keywords: Any) -> bool:
    return "the argmax of a product's columns" in jitgen.jit(function).lower(*args, target=target, **keywords).explain()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_first_of_equal_columns(dtype: torch.dtype) -> None:
    function = jitgen.jit(column)
    for shape, columns in (((1, 48), 1024), ((2, 1, 48), 2064), ((2, 3, 48), 1040), ((8, 48), 4096)):
        h, w = integers(*shape, dtype=dtype), integers(columns, 48, dtype=dtype)
        expected = F.linear(h.double(), w.double()).to(dtype).argmax(-1)
        assert torch.equal(function(h, w), expected), (shape, columns)
    if dtype != torch.bfloat16:  # which has not all sums of 48 products of at most 9
        args = integers(3, 2, 48, dtype=dtype), integers(2048, 48, dtype=dtype), integers(2048, dtype=dtype)
        assert torch.equal(jitgen.jit(scaled)(*args), scaled(*(each.double() for each in args)))


@needs_compiler
def test_numbers_that_are_not_finite_and_zeros() -> None:
    function, h, w = jitgen.jit(column), torch.ones(4, 32), torch.zeros(2048, 32)
    assert function(h, w).tolist() == [0] * 4
    w[:] = -1.0
    w[5], w[9] = -0.0, 0.0
    assert function(h, w).tolist() == [5] * 4
    w[[700, 1300]] = math.inf
    assert function(h, w).tolist() == [700] * 4
    w[[1500, 1600], 3] = -math.nan
    assert function(h, w).tolist() == [1500] * 4
    assert function(h, torch.full_like(w, -math.inf)).tolist() == [0] * 4


@needs_compiler
@pytest.mark.parametrize("case", ["int4, 1", "int4, 2", "dense, 3"])
def test_lanes_combine_what_neighbours_have(case: str) -> None:
    """Blocks of a GPU, run on the CPU; the last one of the columns is not whole."""
    format, rows = case.split(", ")
    dtype = torch.bfloat16 if format == "int4" else torch.float32
    h, w = integers(int(rows), 64, dtype=dtype), integers(1040, 64, dtype=dtype)
    weight = w if format == "dense" else jitgen.quantize(torch.cat([w, torch.full_like(w, 7)], 1), "int4", 32)
    if format == "int4":  # the second half, whose columns are all equal, has the scale of the first
        h = torch.cat([h, torch.zeros_like(h)], 1)
    exact = weight.dequantize(torch.float64) if isinstance(weight, jitgen.QTensor) else w.double()
    products = F.linear(h.double(), exact)
    (found,) = run(column, h, weight, target="sm_80", headers=host_headers())
    if format == "dense":
        assert torch.equal(found, products.argmax(-1))
    else:  # sums of scaled groups are rounded, and so is their number
        lost = products.amax(-1) - products.gather(-1, found[:, None])[:, 0]
        assert (lost <= 2 * torch.finfo(dtype).eps * products.abs().amax(-1)).all()


def test_what_is_rewritten() -> None:
    h, w = TensorSpec((1, 4096), torch.bfloat16), TensorSpec((128256, 4096), torch.bfloat16)
    for backend in ("cuda", "triton"):
        assert is_rewritten(column, h, w, backend=backend)
        lowered = jitgen.jit(column).lower(h, w, target="sm_90a", backend=backend)
        assert len(lowered.kernels) == 2
        (keys,) = (temporary for temporary in lowered.lowered.program.temporaries)
        assert keys.dtype == "int64"
    assert is_rewritten(column, h, TensorSpec((128256, 4096), torch.bfloat16, format="int4", group_size=128))
    assert is_rewritten(column, h, w, target="x86-64-v3")


def test_what_is_not() -> None:
    def with_logits(h: Any, w: Any) -> Any:
        logits = F.linear(h, w)
        return logits.argmax(-1), logits

    def with_softmax(h: Any, w: Any) -> Any:
        logits = F.linear(h, w)
        return logits.argmax(-1), torch.softmax(logits, -1).amax(-1)

    h, w = TensorSpec((1, 4096), torch.bfloat16), TensorSpec((128256, 4096), torch.bfloat16)
    for function in (with_logits, with_softmax, lambda h, w: F.linear(h, w).argmax(0)):
        assert not is_rewritten(function, h, w)
    for columns, rows in ((50257, 1), (512, 1), (128256, 9)):
        specs = TensorSpec((rows, 256), torch.bfloat16), TensorSpec((columns, 256), torch.bfloat16)
        assert not is_rewritten(column, *specs)
    assert not is_rewritten(column, *(TensorSpec(spec.shape, torch.float64) for spec in (h, w)))
