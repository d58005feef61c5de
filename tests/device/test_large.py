"""Tensors of more than 2**31 elements on a GPU: indices have 64 bits where they need them, in both dialects.

Results are compared at their beginning, at their end and about element 2**31, where an index of 32 bits is negative.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen

GIB = 2**30
MEMORY = 24 * GIB
"""Of the card, bytes that have to be free: a test takes up to 18 GiB."""
EDGE = 2**31
"""The first index that has no 32 bits."""
COUNT = EDGE + 2**20 + 24
REACH = 3000
PATIENCE = 40.0
"""Seconds for which a test waits until other processes have left it so much of the card's memory."""

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BACKENDS = ("cuda", "triton")


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    if torch.cuda.get_device_properties(0).total_memory < 2 * MEMORY:
        pytest.skip(f"needs a card with {2 * MEMORY // GIB} GiB of memory")
    end = time.monotonic() + PATIENCE
    while (free := torch.cuda.mem_get_info()[0]) < MEMORY and time.monotonic() < end:
        time.sleep(0.2)
    assert free >= MEMORY, f"other processes have left {free / GIB:.1f} GiB of the card's memory"
    yield
    torch.cuda.empty_cache()


def windows(count: int) -> list[slice]:
    """The beginning, the end, and what is about 2**31 and its multiples."""
    edges = range(EDGE, count, EDGE)
    return [slice(0, REACH), *(slice(edge - REACH, min(edge + REACH, count)) for edge in edges), slice(-REACH, None)]


def small(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Random numbers from -8 to 7, made in pieces: torch makes int8 numbers from wider ones."""
    x = torch.empty(shape, dtype=dtype, device="cuda")
    flat = x.view(-1)
    for piece in flat.split(2**28):
        piece.random_(-8, 8) if not dtype.is_floating_point else piece.uniform_(-8, 8)
    return x


def jit(backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return jitgen.jit(backend=backend)(function)


POINTWISE: dict[str, Callable[..., Any]] = {
    "contiguous": lambda x: x * 3 + 1,
    "flip": lambda x: x.flip(0) + 1,
    "roll": lambda x: x.roll(12345) * 2,
    "shifted": lambda x: x[1:] - x[:-1],
    "end": lambda x: x[-REACH:] * 2,
    "places": lambda x: torch.where(torch.arange(x.shape[0], device=x.device) >= EDGE, x, x + 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.quick(where=lambda name, backend: name == "contiguous" or (name, backend) == ("flip", "cuda"))
def test_elements(name: str, backend: str) -> None:
    x = small(COUNT)
    function = POINTWISE[name]
    found = jit(backend, function)(x)
    wanted = function(x)
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert all(torch.equal(found[window], wanted[window]) for window in windows(len(wanted)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.quick(where=lambda backend: backend == "cuda")
def test_transposed(backend: str) -> None:
    x = small(40_000, 55_003)
    found = jit(backend, lambda x: x.t().contiguous() + 1)(x)
    assert torch.equal(found[:3], x.t()[:3] + 1)
    assert torch.equal(found[-3:], x.t()[-3:] + 1)
    assert torch.equal(found[:, -3:], x.t()[:, -3:] + 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.quick(where=lambda backend: backend == "triton")
def test_concatenated_and_expanded(backend: str) -> None:
    x = small(EDGE // 2 + 1000)
    found = jit(backend, lambda x: torch.cat([x, x + 1, x[:7]]))(x)
    wanted = torch.cat([x, x + 1, x[:7]])
    assert all(torch.equal(found[window], wanted[window]) for window in windows(len(wanted)))
    del found, wanted
    row, column = small(60_000), small(40_000)
    found = jit(backend, lambda row, column: row + column[:, None])(row, column)
    for index in (0, 1, EDGE // 60_000, EDGE // 60_000 + 1, 39_999):
        assert torch.equal(found[index], row + column[index])


@pytest.mark.parametrize("backend", BACKENDS)
def test_reduced_to_one(backend: str) -> None:
    x = torch.zeros(COUNT, dtype=torch.int8, device="cuda")
    x[-5], x[EDGE - 1], x[EDGE] = 9, 7, 5
    found = jit(backend, lambda x: (x.sum(), x.argmax(), x.amax(), (x != 0).any()))(x)
    assert [each.item() for each in found] == [21, COUNT - 5, 9, True]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [3, 20_003, 2**25 + 77])
@pytest.mark.quick(where=lambda rows, backend: (rows == 20_003) == (backend == "cuda"))
def test_rows(rows: int, backend: str) -> None:
    x = small(rows, -(-EDGE // rows) + 5, dtype=torch.bfloat16)
    found = jit(backend, lambda x: (x.softmax(-1), x.amax(-1), x.argmin(-1)))(x)
    for window in (slice(0, 2), slice(-2, None)):
        part = x[window]
        torch.testing.assert_close(found[0][window].double(), part.double().softmax(-1), rtol=2**-7, atol=1e-7)
        assert torch.equal(found[1][window], part.amax(-1))
        assert torch.equal(part.gather(-1, found[2][window, None])[:, 0], part.amin(-1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [5, 30_001, 2**25 + 77])
@pytest.mark.quick(where=lambda columns: columns == 30_001)
def test_columns(columns: int, backend: str) -> None:
    x = small(-(-EDGE // columns) + 5, columns)
    found = jit(backend, lambda x: (x.sum(0), x.amax(0)))(x)
    for window in (slice(0, 5), slice(-5, None)):
        part = x[:, window]
        assert torch.equal(found[0][window], part.sum(0))
        assert torch.equal(found[1][window], part.amax(0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.quick(where=lambda backend: backend == "cuda")
def test_norm_and_its_gradients(backend: str) -> None:
    rows, length = 2**19 + 3, 4096
    x = small(rows, length, dtype=torch.bfloat16).requires_grad_()
    weight = torch.rand(length, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = jit(backend, lambda x, weight: F.rms_norm(x, (length,), weight, 1e-5))(x, weight)
    ones = torch.ones((), dtype=torch.bfloat16, device="cuda").expand_as(y)
    y.backward(ones)
    assert x.grad is not None
    for window in (slice(0, 2), slice(-2, None)):
        part, own = x[window].detach().double().requires_grad_(), weight.detach().double()
        wanted = F.rms_norm(part, (length,), own, 1e-5)
        torch.testing.assert_close(y[window].double(), wanted, rtol=2**-7, atol=2**-8)
        wanted.sum().backward()
        assert part.grad is not None
        torch.testing.assert_close(x.grad[window].double(), part.grad, rtol=2**-6, atol=2**-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(COUNT,), (70_001, 31_000), (1 << 20, 2052)], ids=str)
@pytest.mark.quick(where=lambda shape, backend: len(shape) == 1 and backend == "cuda")
def test_cumulative_sums(shape: tuple[int, ...], backend: str) -> None:
    x = small(*shape)
    found = jit(backend, lambda x: x.cumsum(-1, dtype=torch.int32))(x)
    for row in (0, -1):
        numbers, sums = x.view(-1, shape[-1])[row], found.view(-1, shape[-1])[row]
        for window in windows(shape[-1]):
            begin, end, _ = window.indices(shape[-1])
            before = torch.stack([piece.sum() for piece in numbers[:begin].split(2**28)]).sum() if begin else 0
            assert torch.equal(sums[window].long(), numbers[begin:end].cumsum(-1) + before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.quick(where=lambda backend: backend == "cuda")
def test_sorted_rows(backend: str) -> None:
    x = small(2_100_000, 1030)
    values, places = jit(backend, lambda x: x.topk(5, -1))(x)
    for window in (slice(0, 3), slice(-3, None)):
        assert torch.equal(values[window], x[window].sort(-1, descending=True).values[:, :5])
        assert torch.equal(x[window].gather(-1, places[window]), values[window])


@pytest.mark.parametrize("backend", BACKENDS)
def test_read_and_written_by_index(backend: str) -> None:
    table = small(2**22 + 9, 520)
    ids = torch.tensor([0, 1, 2**22 + 8, EDGE // 520, EDGE // 520 + 1], device="cuda")
    assert torch.equal(jit(backend, lambda table, ids: table[ids] + 1)(table, ids), table[ids] + 1)
    assert torch.equal(jit(backend, lambda table, ids: F.embedding(ids, table))(table, ids), table[ids])
    rows = small(5, 520)
    found = jit(backend, lambda table, ids, rows: table.index_copy(0, ids, rows))(table, ids, rows)
    assert torch.equal(found[ids], rows)
    assert torch.equal(found[3:9], table[3:9])
    assert torch.equal(found[-9:-1], table[-9:-1])
    many = ids.repeat(900_000)
    taken = jit(backend, lambda table, many: table[many])(table, many)
    assert torch.equal(taken[-5:], table[ids])
    assert torch.equal(taken[EDGE // 520], table[many[EDGE // 520]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.quick(where=lambda backend: backend == "cuda")
def test_dropout(backend: str) -> None:
    x = torch.ones(COUNT, dtype=torch.float8_e5m2, device="cuda")
    kept = jit(backend, lambda x: F.dropout(x.half(), 0.5).to(torch.float8_e5m2))(x).view(torch.uint8) != 0
    head, tail = kept[: 2**20], kept[-(2**20) :]
    for piece in (head, tail, kept[EDGE : EDGE + 2**20]):
        assert abs(piece.double().mean().item() - 0.5) < 0.005  # ten standard deviations of 2**20 draws
    assert abs((head == tail).double().mean().item() - 0.5) < 0.005
    assert abs((head == kept[EDGE : EDGE + 2**20]).double().mean().item() - 0.5) < 0.005


PRODUCTS = {
    "results": (40_000, 57_344, 64),
    "rows of x": (2**25 + 300, 16, 72),
    "weights": (3, 600_008, 4096),
    "results of many rows": (2**27 + 40, 24, 32),
}
"""Rows, columns and length: one of the matrices has more than 2**31 elements."""
AMONG_THE_QUICK = "results", "fp8_e4m3", "cuda"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", ["bfloat16", "int4", "fp8_e4m3"])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.quick(
    where=lambda name, weights, backend: (
        weights == {"results": "bfloat16", "weights": "int4"}.get(name) or (name, weights, backend) == AMONG_THE_QUICK
    )
)
def test_products(name: str, weights: str, backend: str) -> None:
    rows, columns, length = PRODUCTS[name]
    x = small(rows, length, dtype=torch.bfloat16)
    dense = small(columns, length, dtype=torch.bfloat16)
    weight: torch.Tensor = dense
    if weights != "bfloat16":
        weight = jitgen.quantize(dense, weights)
        dense = weight.dequantize(torch.float32)
    sides = [dense[:40].clone(), dense[-40:].clone()]
    del dense
    found = jit(backend, lambda x, weight: F.relu(F.linear(x, weight)))(x, weight)
    for first in {0, EDGE // columns, rows - 2}:
        rows_there = slice(first, first + 2) if first < rows else slice(0, 1)
        for side, got in zip(sides, (found[rows_there, :40], found[rows_there, -40:]), strict=True):
            wanted = F.relu(x[rows_there].double() @ side.double().t())
            torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=2**-8 * length**0.5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.quick(where=lambda backend: backend == "cuda")
def test_experts(backend: str) -> None:
    experts, columns, length = 300, 4096, 1760
    x = small(900, length, dtype=torch.bfloat16)
    w = small(experts, columns, length, dtype=torch.bfloat16)
    offs = torch.arange(3, 903, 3, device="cuda", dtype=torch.int32)
    found = jit(backend, lambda x, w, offs: F.grouped_mm(x, w.transpose(1, 2), offs=offs))(x, w, offs)
    for expert in (0, 150, 298, 299):
        own = slice(3 * expert, 3 * expert + 3)
        wanted = x[own].double() @ w[expert].double().t()
        torch.testing.assert_close(found[own].double(), wanted, rtol=2**-7, atol=2**-8 * length**0.5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(66, 64, 4100, 128), (1_100_000, 2, 16, 64)], ids=str)
@pytest.mark.quick(where=lambda sizes, backend: (sizes[0] == 66) == (backend == "cuda"))
def test_attention(sizes: tuple[int, int, int, int], backend: str) -> None:
    q, k, v = (small(*sizes, dtype=torch.bfloat16) for _ in range(3))
    found = jit(backend, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.01))(q, k, v)
    for batch in (0, -1):
        own_q, own_k, own_v = (each[batch, -1].double() for each in (q, k, v))
        wanted = F.scaled_dot_product_attention(own_q, own_k, own_v, scale=0.01)
        torch.testing.assert_close(found[batch, -1].double(), wanted, rtol=2**-6, atol=2**-6)
