"""Reading and writing at computed indices on a GPU, in both dialects."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests import gathers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BACKENDS = ["cuda", "triton"]
CHECKS = {
    **{size: lambda backend, size=size: gathers.read_failures(backend, size, "cuda") for size in gathers.READ_SIZES},
    "nothing": lambda backend: gathers.empty_failures(backend, "cuda"),
    "writes": lambda backend: gathers.write_failures(backend, "cuda"),
    "integers": lambda backend: gathers.integer_failures(backend, "cuda"),
    "assignments": lambda backend: gathers.assignment_failures(backend, "cuda"),
    "updates": lambda backend: gathers.update_failures(backend, "cuda"),
    "searches": lambda backend: gathers.search_failures(backend, "cuda"),
    "histograms": lambda backend: gathers.histogram_failures(backend, "cuda"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", CHECKS)
def test_results(check: str, backend: str) -> None:
    assert [failure for failure in CHECKS[check](backend) if failure] == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_embedding_of_a_model(backend: str, dtype: torch.dtype) -> None:
    table, ids = torch.randn(32000, 1024).mul(9).to(dtype).cuda(), torch.randint(0, 32000, (4, 77)).cuda()
    assert torch.equal(jitgen.jit(lambda i, t: F.embedding(i, t), backend=backend)(ids, table), table[ids])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scatter_gives_the_same_bits_at_every_call(backend: str) -> None:
    x, at, values = torch.zeros(50, 700).cuda(), torch.randint(0, 50, (900,)).cuda(), torch.randn(900, 700).cuda()
    add = jitgen.jit(lambda x, i, v: x.index_add(0, i, v), backend=backend)
    first = add(x, at, values)
    assert all(torch.equal(add(x, at, values), first) for _ in range(5))
    torch.testing.assert_close(first.double(), x.double().index_add(0, at, values.double()), rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_access_leaves_the_memory(backend: str) -> None:
    """Indices far out of range: reads give some element, writes are left out, and the process goes on."""
    x = torch.randn(64, 8).cuda()
    wild = torch.tensor([0, 2**40, -(2**40), 63, 64, -65]).cuda()
    jitgen.jit(lambda x, i: x.index_select(0, i), backend=backend)(x, wild)
    got = jitgen.jit(lambda x, i: x.index_fill(0, i, 1.0), backend=backend)(x, wild)
    want = x.clone()
    want[[0, 63]] = 1.0
    assert torch.equal(got, want)
    torch.cuda.synchronize()
