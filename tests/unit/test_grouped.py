"""Grouped products, of which mixtures of experts are made, against float64 torch in every dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

import jitgen
from jitgen.errors import TraceError, UnsupportedError
from jitgen.quant.activations import quantized
from tests import triton_grouped
from tests.cuda_on_host import run as run_cuda
from tests.grouped import (
    ACTIVATIONS,
    CHOSEN,
    COLUMNS,
    GROUPS,
    LENGTH,
    OFFSETS,
    ROWS,
    SEVERAL_IDS,
    chosen,
    failure,
    gated,
    lengths_of_groups,
    of_lengths,
    of_one_row,
    offsets,
    product,
    rows_as_quantized,
    rows_of_groups,
)
from tests.interpreter import Interpreter


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_grouped") as process:
        yield process


@pytest.mark.parametrize("check", triton_grouped.CHECKS)
def test_in_triton(check: str, interpreter: Interpreter) -> None:
    assert interpreter[check] == []


@pytest.mark.quick(where=lambda dtype, format: format is None)
@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        (torch.float32, None),
        (torch.float64, None),
        (torch.bfloat16, "int4"),
        (torch.float32, "int8"),
        (torch.bfloat16, "mxfp4"),
    ],
    ids=str,
)
def test_rows_of_groups(dtype: torch.dtype, format: str | None) -> None:
    run = jitgen.jit(product)
    x, dense = torch.randn(ROWS, LENGTH, dtype=dtype), torch.randn(GROUPS, COLUMNS, LENGTH, dtype=dtype)
    weight = jitgen.quantize(dense, format, group_size=32 if format == "int4" else None) if format else dense
    exact = weight.dequantize(torch.float64) if format else dense
    for name, ends in OFFSETS.items():
        assert not failure(run(x, weight, offsets(name)), rows_of_groups(x, exact, ends), name)
    many = x.repeat(20, 1)
    ends = [20 * end for end in OFFSETS["ragged"]]
    assert not failure(run(many, weight, torch.tensor(ends)), rows_of_groups(many, exact, ends), "many rows")


def test_layouts_of_operands() -> None:
    run = jitgen.jit(torch._grouped_mm)
    x, weight = torch.randn(ROWS, 33), torch.randn(GROUPS, 33, 47)
    wanted = rows_of_groups(x, weight.mT, OFFSETS["ragged"])
    for left in (x, x.T.contiguous().T):
        for right in (weight, weight.mT.contiguous().mT):
            assert not failure(run(left, right, offsets("ragged")), wanted, "strides")
    batch, columns = torch.randn(GROUPS, 20, 33), torch.randn(33, ROWS)
    wanted = rows_of_groups(columns.T, batch, OFFSETS["ragged"]).T
    assert not failure(run(batch, columns, offsets("ragged")), wanted, "groups of columns")
    other = torch.randn(GROUPS, 33, 7)
    assert not failure(run(batch, other), batch.double() @ other.double(), "a batch")


def test_epilogue_is_in_the_kernel() -> None:
    run = jitgen.jit(gated)
    x, weight, scales = torch.randn(ROWS, LENGTH), torch.randn(GROUPS, COLUMNS, LENGTH), torch.rand(ROWS)
    quantized = jitgen.quantize(weight, "int4", group_size=32)
    for given, exact in ((weight, weight), (quantized, quantized.dequantize(torch.float64))):
        gate, up = rows_of_groups(x, exact, OFFSETS["rows of none"]).chunk(2, -1)
        wanted = F.silu(gate) * up * scales.double()[:, None]
        assert not failure(run(x, given, offsets("rows of none"), scales), wanted, "gated")
        assert len(run.lower(x, given, offsets("ragged"), scales).kernels) == 1


def test_lengths_of_groups() -> None:
    run = jitgen.jit(of_lengths)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(20, ROWS, dtype=dtype), torch.randn(ROWS, 24, dtype=dtype)
        for name, ends in OFFSETS.items():
            assert not failure(run(x, weight, offsets(name)), lengths_of_groups(x, weight, ends), name)


def test_bits_are_the_same_for_every_number_of_threads() -> None:
    run, threads = jitgen.jit(product), torch.get_num_threads()
    x, weight = torch.randn(ROWS, LENGTH), torch.randn(GROUPS, COLUMNS, LENGTH)
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results += [run(x, weight, offsets("ragged")) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("ends", [(9, 3, 30, 30, 30), (-1, 3, 7, 30, 30), (3, 3, 7, 30, 31)])
def test_bad_offsets_are_an_error(ends: tuple[int, ...]) -> None:
    x, weight = torch.randn(ROWS, LENGTH), torch.randn(GROUPS, COLUMNS, LENGTH)
    with pytest.raises(IndexError, match=r"offsets of groups.*test_grouped|grouped"):
        jitgen.jit(product)(x, weight, torch.tensor(ends))


def test_refusals_say_what_does_not_fit() -> None:
    run = jitgen.jit(torch._grouped_mm)
    x, weight = torch.randn(ROWS, LENGTH), torch.randn(GROUPS, LENGTH, COLUMNS)
    for arguments, words in (
        ((x, weight), "offs"),
        ((x, weight, offsets("ragged")[:4]), "number of groups"),
        ((x[:, 1:], weight, offsets("ragged")), "K is"),
        ((x, weight, offsets("ragged").float()), "offs is"),
        ((x, weight.double(), offsets("ragged")), "one dtype"),
    ):
        with pytest.raises(TraceError, match=words):
            run(*arguments)


@pytest.mark.parametrize("format", [None, "int4"])
def test_in_cuda(format: str | None) -> None:
    """The kernels of a GPU without tensor cores, run on the CPU."""
    x, dense = torch.randn(5 * ROWS, LENGTH), torch.randn(GROUPS, COLUMNS, LENGTH)
    weight = jitgen.quantize(dense, format, group_size=32) if format else dense
    exact = weight.dequantize(torch.float64) if format else dense
    for name in ("ragged", "rows of none"):
        ends = 5 * offsets(name)
        (found,) = run_cuda(product, x, weight, ends)
        assert not failure(found, rows_of_groups(x, exact, ends.tolist()), name)


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("cuda", "sm_80"), ("triton", "sm_90a")])
@pytest.mark.parametrize("format", [None, "int4", "mxfp4"])
def test_the_row_of_one_token_is_not_copied_for_its_experts(format: str | None, backend: str, target: str) -> None:
    x, weight = jitgen.TensorSpec((1, 128), torch.bfloat16), (4, 64, 128)
    matrices = jitgen.TensorSpec(weight, torch.bfloat16, format=format, group_size=64 if format == "int4" else None)
    ends, order = jitgen.TensorSpec((4,), torch.int32), jitgen.TensorSpec(("N",), torch.int64)
    low = jitgen.jit(of_one_row).lower(x, matrices, ends, order, backend=backend, target=target)
    assert len(low.kernels) == 1
    assert "operands repeated, " in low.explain()


def test_rows_of_one_token() -> None:
    x, dense, order = torch.randn(1, LENGTH), torch.randn(GROUPS, COLUMNS, LENGTH), torch.zeros(ROWS, dtype=torch.int64)
    weight = jitgen.quantize(dense, "int4", group_size=32)
    wanted = rows_of_groups(x.expand(ROWS, -1), weight.dequantize(torch.float64), OFFSETS["ragged"])
    assert not failure(jitgen.jit(of_one_row)(x, weight, offsets("ragged"), order), wanted, "on a CPU")
    with pytest.raises(IndexError):
        jitgen.jit(of_one_row)(x, weight, offsets("ragged"), order + 2)
    (found,) = run_cuda(of_one_row, x, weight, offsets("ragged"), order + 2)
    assert not failure(found, wanted, "a GPU reads the first row instead")


@pytest.mark.parametrize(("format", "group", "activation"), ACTIVATIONS)
def test_quantised_activations_and_blocks(format: str, group: int | None, activation: str | None) -> None:
    x, dense = torch.randn(ROWS, 256, dtype=torch.bfloat16), torch.randn(GROUPS, 128, 256, dtype=torch.bfloat16)
    weight = jitgen.quantize(dense, format, group_size=group, activation=activation)
    exact, rows = weight.dequantize(torch.float64), rows_as_quantized(x, activation)
    for name in ("ragged", "rows of none"):
        found = jitgen.jit(product)(x, weight, offsets(name))
        assert not failure(found, rows_of_groups(rows, exact, OFFSETS[name]), name)


def test_matrices_that_ids_choose() -> None:
    run, turned = jitgen.jit(chosen), jitgen.jit(lambda x, w, ids: torch.bmm(x.unsqueeze(1), w[ids]).squeeze(1))
    x, dense = torch.randn(7, LENGTH), torch.randn(GROUPS, COLUMNS, LENGTH)
    ids = torch.tensor([0, 4, 3, 3, -1, 2, 0])
    quantized = jitgen.quantize(dense, "int4", group_size=32)
    for weight, exact in ((dense, dense.double()), (quantized, quantized.dequantize(torch.float64))):
        wanted = torch.einsum("snk,sk->sn", exact[ids], x.double())
        assert not failure(run(x, weight, ids), 2 * wanted, "matrices on the left")
        assert not failure(turned(x, weight.mT, ids), wanted, "matrices on the right")
        assert len(run.lower(x, weight, ids).kernels) == 1
        with pytest.raises(IndexError, match="an id is of no group"):
            run(x, weight, ids + 2)
    needs = x.clone().requires_grad_()
    run(needs, quantized, ids).sum().backward()
    assert needs.grad is not None
    assert not failure(needs.grad, 2 * exact[ids].sum(1), "gradient of rows")
    needs = dense.clone().requires_grad_()
    run(x, needs, ids).sum().backward()
    expected = torch.zeros(GROUPS, COLUMNS, LENGTH, dtype=torch.float64)
    expected.index_add_(0, ids % GROUPS, 2 * x.double()[:, None].expand(-1, COLUMNS, -1))
    assert needs.grad is not None
    assert not failure(needs.grad, expected, "gradient of matrices")


@pytest.mark.parametrize("count", [1, 3])
def test_several_rows_of_an_id(count: int) -> None:
    """A quantised matrix that an id chooses multiplies all of the id's rows, and one id may choose it for all."""
    weight = jitgen.quantize(torch.randn(GROUPS, COLUMNS, LENGTH), "int4", group_size=32)
    x, ids, exact = torch.randn(3, count, LENGTH), torch.tensor([4, 1, 4]), weight.dequantize(torch.float64)
    for chosen_by in (ids, ids[:1]):
        wanted = x.double() @ exact[chosen_by].mT
        assert not failure(jitgen.jit(lambda x, w, ids: x @ w[ids].mT)(x, weight, chosen_by), wanted, "on the right")
        on_the_left = jitgen.jit(lambda x, w, ids: torch.matmul(w[ids], x.mT))(x, weight, chosen_by)
        assert not failure(on_the_left, wanted.mT, "on the left")


def test_matrices_of_a_quantised_weight() -> None:
    x, weight = torch.randn(GROUPS, 5, LENGTH), jitgen.quantize(torch.randn(GROUPS, COLUMNS, LENGTH), "int4", 32)
    exact = weight.dequantize(torch.float64)
    products = jitgen.jit(lambda x, w: torch.bmm(x, w.mT))(x, weight)
    assert not failure(products, x.double() @ exact.mT, "a batch")
    one = jitgen.jit(lambda x, w: F.linear(x, w[2]) + F.linear(x, w[-1]))
    assert not failure(one(x[0], weight), x[0].double() @ (exact[2] + exact[-1]).T, "one matrix")
    with pytest.raises(TraceError, match="for a weight of 5 matrices"):
        jitgen.jit(lambda x, w: F.linear(x, w[5]))(x[0], weight)
    facts = jitgen.jit(lambda x, w: x * w.size(0) + w.dim() + w.numel() + w.element_size() + w.is_floating_point())
    assert torch.equal(facts(torch.ones(2), weight), torch.full((2,), 5.0 + 3 + GROUPS * COLUMNS * LENGTH + 4 + 1))
    with pytest.raises(UnsupportedError, match="dequantise it outside the function"):
        jitgen.jit(lambda w: w.dequantize())(weight)


@pytest.mark.parametrize("name", CHOSEN)
def test_matrices_that_one_id_a_slice_or_an_einsum_chooses(name: str) -> None:
    x, ids = torch.randn(3, 64, requires_grad=True), torch.randint(0, 5, (3, 2))
    weight = jitgen.quantize(torch.randn(5, 48, 64), "int8")
    wanted = CHOSEN[name](x.double(), weight.dequantize(torch.float64), ids)
    found = jitgen.jit(CHOSEN[name])(x, weight, ids)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-4)
    mine, exact = (torch.autograd.grad(result.sum(), x)[0] for result in (found, wanted))
    torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ["some", "every second", "all"])
def test_eager_multiplies_by_some_matrices(name: str) -> None:
    x, weight = torch.randn(3, 64), jitgen.quantize(torch.randn(5, 48, 64), "int8")
    wanted = CHOSEN[name](x.double(), weight.dequantize(torch.float64), None)
    torch.testing.assert_close(CHOSEN[name](x, weight, None).double(), wanted, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, i: F.linear(x, w[i + 1]) + x @ w[-2:].mT,
        lambda x, w, i: F.linear(x[:, :32], w[1][:, 32:]) + F.linear(x, w[i.argmax()][8:24]).sum(),
    ],
)
@pytest.mark.slow
def test_compiled_choices_of_one_id_a_slice_and_columns(function: Callable[..., torch.Tensor]) -> None:
    x, weight, i = torch.randn(3, 64), jitgen.quantize(torch.randn(5, 48, 64), "int4", 32), torch.tensor(2)
    found = torch.compile(function, backend="jitgen", fullgraph=True)(x, weight, i)
    wanted = function(x.double(), weight.dequantize(torch.float64), i)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-4)


SOME: dict[str, Callable[..., torch.Tensor]] = {
    "a list": lambda x, w, ids: x @ w[[0, -1]].mT,
    "ids and slices": lambda x, w, ids: x @ w[ids, :, :].mT + x @ w[ids, ...].mT,
    "a list and slices": lambda x, w, ids: w[[3, 1], :] @ x.mT,
    "index_select": lambda x, w, ids: x @ w.index_select(0, ids).mT + x @ torch.index_select(w, -3, ids.int()).mT,
    "index_select by name": lambda x, w, ids: x @ torch.index_select(input=w, dim=0, index=ids).mT,
    "transposed": lambda x, w, ids: x @ w.mT.index_select(0, ids) + x @ w.mT[[2, 1]],
    "select": lambda x, w, ids: x @ w.select(0, 2).T + x @ torch.select(w, 0, -1).T,
    "a number as a tensor": lambda x, w, ids: (x @ w[torch.tensor(-2)].T)[:, :16] + x @ w[torch.tensor(1), 8:24].T,
    "narrow": lambda x, w, ids: x @ w.narrow(0, 1, 3).mT,
    "pieces": lambda x, w, ids: (x @ w.chunk(2)[1].mT).sum(0) + x @ w.split([1, 4])[0].mT,
    "rows of one": lambda x, w, ids: x @ w[1, 8:24].T + x @ w[-1, ..., :][:16].T,
}
"""Functions of x (3, K), matrices (5, N, K), and two ids."""


@pytest.mark.parametrize("name", SOME)
def test_spellings_of_some_matrices(name: str) -> None:
    x, weight, ids = torch.randn(3, 64), jitgen.quantize(torch.randn(5, 48, 64), "int4", 32), torch.tensor([4, 2])
    wanted = SOME[name](x.double(), weight.dequantize(torch.float64), ids)
    for function in (SOME[name], jitgen.jit(SOME[name])):
        found = function(x, weight, ids)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("backend", ["aot_eager", "jitgen"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, ids: x @ w[[0, -1]].mT + x @ w.index_select(0, ids).mT,
        lambda x, w, ids: x @ w.select(0, 2).T + x @ w.chunk(5)[1][0].T,
        lambda x, w, ids: x @ w[3][16:32].T + x[:, :32] @ w[1].chunk(2, 1)[0][:16].T,
    ],
)
def test_compiled_spellings_of_some_matrices(function: Callable[..., torch.Tensor], backend: str) -> None:
    """A backend that records a graph meets which rows these are as numbers, not as data."""
    x, weight, ids = torch.randn(3, 64), jitgen.quantize(torch.randn(5, 48, 64), "int4", 32), torch.tensor([4, 2])
    wanted = function(x.double(), weight.dequantize(torch.float64), ids)
    found = torch.compile(function, backend=backend, fullgraph=True)(x, weight, ids)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-4)


def test_choices_of_no_matrix_are_an_error() -> None:
    x, weight = torch.randn(3, 64), jitgen.quantize(torch.randn(5, 48, 64), "int4", 32)
    for choose in (
        lambda w: w[[0, 5]],
        lambda w: w.index_select(0, torch.tensor([-1])),
        lambda w: w.index_select(0, torch.tensor([5])),
        lambda w: w.select(0, 5),
        lambda w: w.narrow(0, 3, 3),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            choose(weight)
    by_ids = jitgen.jit(lambda x, w, ids: x @ w.index_select(0, ids).mT)
    for number in (-1, 5):
        with pytest.raises(IndexError, match="an id is of no group"):
            by_ids(x, weight, torch.tensor([number]))
    for refused in (lambda w: w[:, :16], lambda w: w.index_select(1, torch.tensor([0])), lambda w: w[None]):
        with pytest.raises(UnsupportedError, match="quantised weight"):
            refused(weight)
    assert torch.equal(weight[torch.tensor([True, False, True, False, True])].dequantize(), weight.dequantize()[::2])


def test_gradients() -> None:
    run, scales = jitgen.jit(gated), torch.rand(ROWS)
    x, weight = torch.randn(ROWS, 16, requires_grad=True), torch.randn(GROUPS, 24, 16, requires_grad=True)
    ends = offsets("rows of none")
    result = run(x, weight, ends, scales)
    given = torch.randn_like(result)
    found = torch.autograd.grad(result, (x, weight), given)
    left, right = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    gate, up = rows_of_groups(left, right, OFFSETS["rows of none"]).chunk(2, -1)
    wanted = torch.autograd.grad(F.silu(gate) * up * scales.double()[:, None], (left, right), given.double())
    for one, other in zip(found, wanted, strict=True):
        assert not failure(one, other, "gradient")


def test_gradients_of_lengths() -> None:
    x, weight = torch.randn(20, ROWS, requires_grad=True), torch.randn(ROWS, 24, requires_grad=True)
    result = jitgen.jit(of_lengths)(x, weight, offsets("ragged"))
    given = torch.randn_like(result)
    found = torch.autograd.grad(result, (x, weight), given)
    left, right = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    wanted = torch.autograd.grad(lengths_of_groups(left, right, OFFSETS["ragged"]), (left, right), given.double())
    for one, other in zip(found, wanted, strict=True):
        assert not failure(one, other, "gradient")


@pytest.mark.parametrize("name", SEVERAL_IDS)
@pytest.mark.quick(where=lambda name: name in ("a row by several matrices", "matrices first"))
def test_matrices_by_ids_of_several_dimensions_are_not_copied(name: str) -> None:
    function = SEVERAL_IDS[name]
    for tokens, count in ((7, 2), (1, 3), (0, 2), (3, 1)):
        x, w, ids = torch.randn(tokens, 24), torch.randn(5, 40, 24), torch.randint(-5, 5, (tokens, count))
        want = function(x.double(), w.double(), ids)
        got = jitgen.jit(function)(x, w, ids)
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    ids = torch.zeros(64, 2, dtype=torch.int64)
    balance = jitgen.jit(function).lower(torch.randn(64, 24), torch.randn(5, 40, 24), ids).balance
    assert balance.moved < 128 * 40 * 24 * 4, str(balance)  # of the copies alone
    with pytest.raises(IndexError):
        jitgen.jit(function)(torch.randn(64, 24), torch.randn(5, 40, 24), ids + 5)


@pytest.mark.parametrize("activation", [None, "int8"])
def test_quantised_matrices_by_ids_of_several_dimensions(activation: str | None) -> None:
    weight = jitgen.quantize(torch.randn(5, 48, 64), "int8", activation=activation)
    dense, function = weight.with_activation(None).dequantize().double(), jitgen.jit(SEVERAL_IDS["matmul"])
    for tokens, count in ((7, 2), (1, 3), (0, 2)):
        x, ids = torch.randn(tokens, 64), torch.randint(-5, 5, (tokens, count))
        rows = x if activation is None else quantized(x, activation)
        want, got = SEVERAL_IDS["matmul"](rows.double(), dense, ids), function(x, weight, ids)
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    with pytest.raises(IndexError):
        function(torch.randn(4, 64), weight, torch.full((4, 2), 5))
    with pytest.raises(UnsupportedError, match="flatten"):
        weight[torch.zeros(2, 2, dtype=torch.int64)]


@pytest.mark.parametrize("format", ["int4", "fp8_e4m3"])
def test_several_rows_of_ids_of_several_dimensions(format: str) -> None:
    """A quantised matrix of each id multiplies rows of its own, or the same as all others; ids may broadcast."""
    weight = jitgen.quantize(torch.randn(5, 48, 64), format)
    exact = weight.dequantize(torch.float64)
    right = jitgen.jit(lambda x, w, ids: x @ w[ids].mT)
    left = jitgen.jit(lambda x, w, ids: torch.matmul(w[ids], x.mT))
    shapes = ((3, 2), (3, 2)), ((), (3, 2)), ((3, 2), (3, 1)), ((3, 2), (2,)), ((0, 2), (0, 2)), ((), (3,))
    for leading, of_ids in shapes:
        x, ids = torch.randn(*leading, 7, 64), torch.randint(-5, 5, of_ids)
        wanted = x.double() @ exact[ids].mT
        for found, expected in ((right(x, weight, ids), wanted), (left(x, weight, ids), wanted.mT)):
            assert found.shape == expected.shape
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    x, ids = torch.randn(3, 2, 7, 64, requires_grad=True), torch.randint(0, 5, (3, 2))
    vector = jitgen.jit(lambda x, w, ids: w[ids] @ x)(x[0, 0, 0].detach(), weight, ids)
    torch.testing.assert_close(vector.double(), exact[ids] @ x[0, 0, 0].detach().double(), rtol=1e-5, atol=1e-4)
    (gradient,) = torch.autograd.grad(right(x, weight, ids).sum(), x)
    wanted = exact[ids].sum(-2, keepdim=True).expand(x.shape)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-4)
    with pytest.raises(UnsupportedError, match="flatten the ids"):
        jitgen.jit(lambda x, w, ids: x.flatten(0, 1) @ w[ids].flatten(0, 1).mT)(x.detach(), weight, ids)


def test_gradients_of_matrices_by_ids_of_several_dimensions() -> None:
    function = SEVERAL_IDS["a row by several matrices"]
    x, w = torch.randn(6, 8, dtype=torch.float64), torch.randn(4, 5, 8, dtype=torch.float64)
    ids, of_result = torch.randint(0, 4, (6, 2)), torch.randn(6, 2, 5, dtype=torch.float64)
    found = [
        torch.autograd.grad(one(*tensors, ids), tensors, of_result)
        for one in (jitgen.jit(function), function)
        for tensors in [[x.clone().requires_grad_(), w.clone().requires_grad_()]]
    ]
    torch.testing.assert_close(*found)
