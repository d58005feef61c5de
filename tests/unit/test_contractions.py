"""How functions with matrix products are cut into kernels: what shares a kernel, what is materialized first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.errors import TraceError, UnsupportedError
from jitgen.ir.program import Alias, Program
from jitgen.lowering import CallFacts
from jitgen.trace import table
from tests.cuda_on_host import run

M, N, K = 5, 9, 7


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


def program(function: Callable[..., Any], *arguments: Any) -> Program:
    return jitgen.jit(function).lower(*arguments, target="x86-64-v3", backend="cpp")._lowered.program


def kinds(cut: Program) -> list[str]:
    return [kernel.family for kernel in cut.kernels]


@pytest.mark.parametrize("lead", [(), (M,), (2, M), (2, 3, M)])
def test_linear_with_an_epilogue_is_one_kernel(lead: tuple[int, ...]) -> None:
    cut = program(lambda x, w, b: F.gelu(F.linear(x, w, b)), *tensors((*lead, K), (N, K), (N,)))
    assert kinds(cut) == ["gemm"]
    assert not cut.temporaries


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ w.T,
        lambda x, w: torch.matmul(x, w.t()),
        lambda x, w: torch.mm(x, w.T),
        lambda x, w: F.linear(x, w),
        lambda x, w: x.matmul(w.mT),
    ],
)
def test_every_spelling_is_the_same_product(function: Callable[..., Any]) -> None:
    cut = program(function, *tensors((M, K), (N, K)))
    (contraction,) = cut.kernels[0].bodies[0].contractions
    assert contraction.activation == 0
    assert [cut.kernels[0].bodies[0].operands[i].kind for i in contraction.weight] == ["weight"]


def test_two_products_that_meet_are_one_region() -> None:
    cut = program(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), *tensors((M, K), (N, K), (N, K)))
    assert [[len(body.contractions) for body in kernel.bodies] for kernel in cut.kernels] == [[2]]


def test_the_halves_of_one_weight_are_two_products() -> None:
    def swiglu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        return F.silu(gate) * up

    cut = program(swiglu, *tensors((M, K), (2 * N, K)))
    assert [[len(body.contractions) for body in kernel.bodies] for kernel in cut.kernels] == [[2]]
    assert not cut.temporaries


def test_products_of_one_activation_share_a_kernel() -> None:
    cut = program(lambda x, q, k, v: (x @ q.T, x @ k.T, x @ v.T + 1), *tensors((M, K), (N, K), (3, K), (3, K)))
    assert [len(kernel.bodies) for kernel in cut.kernels] == [3]


def test_products_of_different_activations_do_not() -> None:
    cut = program(lambda x, y, w: (x @ w.T, y @ w.T), *tensors((M, K), (M, K), (N, K)))
    assert [len(kernel.bodies) for kernel in cut.kernels] == [1, 1]


def test_several_results_of_one_product() -> None:
    def results(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w.T
        return y, torch.relu(y), y.to(torch.bfloat16)

    cut = program(results, *tensors((M, K), (N, K)))
    assert [[len(body.stores) for body in kernel.bodies] for kernel in cut.kernels] == [[3]]


def test_a_reduction_of_a_product_reads_a_temporary() -> None:
    cut = program(lambda x, w, b: torch.softmax(F.linear(x, w, b) * 2, -1), *tensors((M, K), (N, K), (N,)))
    assert kinds(cut) == ["gemm", "reduction"]
    assert len(cut.temporaries) == 1
    assert [len(body.operands) for body in cut.kernels[0].bodies] == [4], (
        "bias and scale belong to the product's kernel"
    )


def test_rows_of_several_dimensions_are_reduced_from_one_product() -> None:
    cut = program(lambda x, w: torch.softmax(x @ w.T, -1), *tensors((2, M, K), (N, K)))
    assert kinds(cut) == ["gemm", "reduction"]
    assert len(cut.temporaries) == 1


def test_a_returned_sum_is_the_temporary_its_norm_reads() -> None:
    def block(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.linear(x, w) + r
        return h, F.layer_norm(h, (N,))

    cut = program(block, *tensors((M, K), (N, K), (M, N)))
    assert kinds(cut) == ["gemm", "reduction"]
    assert isinstance(cut.outputs[0], Alias)
    assert cut.outputs[0].input == len(cut.inputs)


def test_chained_products_are_two_kernels() -> None:
    def mlp(x: torch.Tensor, g: torch.Tensor, u: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return x + F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)

    cut = program(mlp, *tensors((M, K), (N, K), (N, K), (K, N)))
    assert kinds(cut) == ["gemm", "gemm"]
    assert len(cut.temporaries) == 1


def test_a_transposed_result_is_a_view_of_the_product() -> None:
    heads = program(
        lambda x, w, b: F.linear(x, w, b).view(2, M, 3, 3).transpose(1, 2), *tensors((2, M, K), (N, K), (N,))
    )
    assert kinds(heads) == ["gemm"]
    (output,) = heads.outputs
    assert isinstance(output, Alias)
    assert [attrs[0] for attrs, _ in output.movements] == ["reshape", "permute"]


def test_an_activation_is_computed_in_the_kernel_or_before_it() -> None:
    arguments = tensors((M, K), (N, K))
    low = jitgen.jit(lambda x, w: torch.relu(x) @ w.T)
    assert kinds(low.lower(*arguments, target="x86-64-v3")._lowered.program) == ["gemm"]
    few, many = (low.lower(torch.randn(rows, K), arguments[1], target="sm_90a") for rows in (4, 400))
    assert kinds(few._lowered.program) == ["gemm"]
    assert "in its product" in few.explain()
    assert kinds(many._lowered.program) == ["elementwise", "gemm"]
    assert "before its product" in many.explain()
    triton = low.lower(*arguments, target="sm_90a", backend="triton")._lowered.program
    assert kinds(triton) == ["elementwise", "gemm"]


def test_an_activation_that_is_returned_is_not_computed_twice_on_a_gpu() -> None:
    low = jitgen.jit(lambda x, w: (torch.relu(x) @ w.T, torch.relu(x))).lower(*tensors((4, K), (N, K)), target="sm_90a")
    assert kinds(low._lowered.program) == ["elementwise", "gemm"]
    assert "it is a result too" in low.explain()


@pytest.mark.parametrize("formats", [(None, None), ("int4", "int4"), ("int4", "int8"), ("int4", None)])
@pytest.mark.parametrize("one_activation", [True, False])
@pytest.mark.quick(
    where=lambda formats, one_activation: formats == (("int4", "int8") if one_activation else (None, None))
)
def test_products_of_one_kernel_are_alike(formats: tuple[str | None, ...], one_activation: bool) -> None:
    x, z = tensors((M, 64), (M, 64))
    if one_activation:
        z = x
    weights = [
        w if f is None else jitgen.quantize(w, f, 32) for f, w in zip(formats, tensors((N, 64), (N, 64)), strict=True)
    ]

    def function(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w) * F.linear(z, v)

    cut = (
        program((lambda x, w, v: function(x, x, w, v)), x, *weights)
        if one_activation
        else program(function, x, z, *weights)
    )
    assert kinds(cut) == ["gemm"] * (1 if one_activation and formats[0] == formats[1] else 2)
    exact = [w.dequantize(torch.float64) if isinstance(w, jitgen.QTensor) else w.double() for w in weights]
    found = jitgen.jit(function)(x, z, *weights)
    torch.testing.assert_close(found.double(), function(x.double(), z.double(), *exact), rtol=1e-4, atol=1e-4)


def test_a_normalised_activation_comes_first() -> None:
    cut = program(lambda x, w: F.linear(F.rms_norm(x, (K,)), w), *tensors((M, K), (N, K)))
    assert kinds(cut) == ["reduction", "gemm"]


def test_a_quantised_weight_keeps_its_parts() -> None:
    weight = jitgen.quantize(torch.randn(40, 70), "uint4", 32)
    cut = jitgen.jit(lambda x, w: F.linear(x, w)).lower(torch.randn(3, 70), weight, target="sm_90a")._lowered.program
    (contraction,) = cut.kernels[0].bodies[0].contractions
    assert (contraction.format, contraction.group_size, contraction.layout) == ("uint4", 32, "mma")
    assert [cut.kernels[0].bodies[0].operands[i].kind for i in contraction.weight] == ["codes", "scales", "zeros"]


@pytest.mark.parametrize(
    ("function", "shapes", "error", "words"),
    [
        (lambda x, w: x @ w, [(M, K), (N, K)], TraceError, "cannot be multiplied"),
        (lambda x, w: torch.mm(x, w), [(2, M, K), (K, N)], TraceError, "two matrices"),
        (lambda x, w: x @ w.to(torch.bfloat16), [(M, K), (K, N)], TraceError, "same dtype"),
        (lambda x, w: x.bool() @ w.bool(), [(M, K), (K, N)], UnsupportedError, "bool"),
    ],
)
def test_refusals_say_why(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        program(function, *tensors(*shapes))


def test_a_quantised_weight_cannot_be_computed_with() -> None:
    weight = jitgen.quantize(torch.randn(32, 64), "int4", 32)
    with pytest.raises((UnsupportedError, TraceError), match="quantised"):
        program(lambda x, w: x + w, torch.randn(32, 64), weight)


def square() -> list[torch.Tensor]:
    return tensors((32, 32), (32, 32), (32, 32))


def test_out_may_be_what_a_product_still_reads() -> None:
    plan = jitgen.jit(lambda x, w, r: x @ w + r).bind(*square())
    x, w, r = square()
    expected = x @ w + r
    torch.testing.assert_close(plan(x, w, r, out=torch.empty(32, 32)), expected)
    for index in range(3):  # of x and w by way of other memory; r is read where it is written
        operands = [x.clone(), w.clone(), r.clone()]
        assert plan(*operands, out=operands[index]) is operands[index]
        torch.testing.assert_close(operands[index], expected)


def test_out_may_be_what_a_later_kernel_reads() -> None:
    def block(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x @ w
        return h * 2, torch.softmax(h, -1) + r

    plan = jitgen.jit(block).bind(*square())
    x, w, r = square()
    expected = block(x, w, r)
    for memory in (r.clone(), r):
        results = plan(x, w, r, out=(torch.empty(32, 32), memory))
        for found, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(found, wanted)


def test_an_argument_updated_with_a_product_of_itself() -> None:
    def update(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.add_(x @ w)

    x, w, _ = square()
    expected = x + x @ w
    jitgen.jit(update)(x, w)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


FORMS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "F.linear": (F.linear, [(M, K), (N, K)]),
    "F.linear, bias": (F.linear, [(2, M, K), (N, K), (N,)]),
    "F.linear, vector": (F.linear, [(K,), (N, K), (N,)]),
    "F.linear, one output": (F.linear, [(M, K), (K,)]),
    "@": (lambda a, b: a @ b, [(2, M, K), (K, N)]),
    "@, matrix and vector": (lambda a, b: a @ b, [(M, K), (K,)]),
    "@, vector and matrix": (lambda a, b: a @ b, [(K,), (K, N)]),
    "@, vectors": (lambda a, b: a @ b, [(K,), (K,)]),
    "torch.matmul": (torch.matmul, [(M, K), (K, N)]),
    "Tensor.matmul": (lambda a, b: a.matmul(b), [(M, K), (K, N)]),
    "torch.mm": (torch.mm, [(M, K), (K, N)]),
    "Tensor.mm": (lambda a, b: a.mm(b), [(M, K), (K, N)]),
    "torch.mv": (torch.mv, [(M, K), (K,)]),
    "Tensor.mv": (lambda a, b: a.mv(b), [(M, K), (K,)]),
    "torch.dot": (torch.dot, [(K,), (K,)]),
    "torch.vdot": (torch.vdot, [(K,), (K,)]),
    "torch.inner": (torch.inner, [(K,), (K,)]),
    "torch.outer": (torch.outer, [(M,), (K,)]),
    "torch.ger": (torch.ger, [(M,), (K,)]),
    "torch.addmm": (torch.addmm, [(M, N), (M, K), (K, N)]),
    "torch.addmm, row": (torch.addmm, [(N,), (M, K), (K, N)]),
    "torch.addmm, scaled": (lambda *t: torch.addmm(*t, beta=0.5, alpha=2), [(M, N), (M, K), (K, N)]),
    "torch.addmm, without": (lambda *t: torch.addmm(*t, beta=0), [(M, N), (M, K), (K, N)]),
    "Tensor.addmm_": (lambda a, b, c: a.clone().addmm_(b, c), [(M, N), (M, K), (K, N)]),
    "torch.addmv": (torch.addmv, [(M,), (M, K), (K,)]),
    "torch.bmm": (torch.bmm, [(2, M, K), (2, K, N)]),
    "torch.baddbmm": (torch.baddbmm, [(2, M, N), (2, M, K), (2, K, N)]),
    "torch.addbmm": (torch.addbmm, [(M, N), (2, M, K), (2, K, N)]),
    "torch.einsum": (lambda a, b: torch.einsum("mk,kn->mn", a, b), [(M, K), (K, N)]),
    "@, a batch on the right": (lambda a, b: a @ b, [(M, K), (2, K, N)]),
    "nothing to sum": (F.linear, [(M, 0), (N, 0), (N,)]),
    "no rows": (F.linear, [(0, K), (N, K)]),
    "no columns": (F.linear, [(M, K), (0, K)]),
    "one of each": (F.linear, [(1, 1), (1, 1)]),
}


QUICK_FORMS = (
    "F.linear, bias",
    "F.linear, vector",
    "@",
    "@, vectors",
    "torch.outer",
    "torch.addmm, scaled",
    "torch.addmv",
)
QUICK_FORMS += ("torch.baddbmm", "torch.addbmm", "torch.einsum", "@, a batch on the right", "nothing to sum", "no rows")
"""Those that are not another spelling of one of these."""


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick(where=lambda form, dtype: dtype == torch.float32 and form in QUICK_FORMS[::2])
def test_every_row_in_every_form(form: str, dtype: torch.dtype) -> None:
    function, shapes = FORMS[form]
    arguments = [tensor.to(dtype) for tensor in tensors(*shapes)]
    found, expected = jitgen.jit(function)(*arguments), function(*(tensor.double() for tensor in arguments))
    eager = function(*arguments)
    assert (found.shape, found.dtype) == (eager.shape, eager.dtype)
    # Sums of at most K products of order 1 in at least float32, rounded once to dtype.
    sums = 16 * K * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=sums)


def test_the_rows_all_have_a_form() -> None:
    rows = {name for name, row in table.rows().items() if row.function.__module__ == "jitgen.trace.contractions"}
    assert rows <= {"_int_mm", "jitgen.linear"} | {form.split(",")[0].rpartition(".")[2] for form in FORMS}


def test_the_reference_is_torch_on_dequantised_weights() -> None:
    weight, x = jitgen.quantize(torch.randn(40, 64), "int4", 32), torch.randn(3, 64)
    compiled: list[jitgen.CompileEvent] = []
    unsubscribe = jitgen.on_compile(compiled.append)
    found = jitgen.jit(lambda x, w: F.linear(x, w)).reference(x, weight)
    unsubscribe()
    assert not compiled
    assert torch.equal(found, F.linear(x, weight.dequantize()))


def test_a_program_serves_other_sizes_where_the_same_is_decided_of_its_prologues() -> None:
    function = jitgen.jit(lambda x, w: torch.relu(x) @ w.T)
    few, more, many = (
        function.lower(torch.randn(rows, K), torch.randn(N, K), target="sm_90a")._lowered for rows in (3, 4, 400)
    )
    alike = {
        (rows := other.memories[0].view.sizes[0]): few.partitioned.applies_to(
            CallFacts({"s0_0": rows, "s0_1": K, "s1_0": N, "s1_1": K}, other.memories[:2]), few.route.device
        )
        for other in (more, many)
    }
    assert alike == {4: True, 400: False}
    assert few.program == more.program != many.program


# ------------------------------------------------------------------------------------------------------------ integers

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INTEGER_PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "mm": (lambda a, b: a @ b, ((5, 300), (300, 7))),
    "bmm": (torch.bmm, ((3, 5, 30), (3, 30, 7))),
    "broadcast": (torch.matmul, ((2, 1, 5, 30), (3, 30, 7))),
    "linear": (F.linear, ((2, 5, 30), (7, 30), (7,))),
    "vectors": (torch.dot, ((300,), (300,))),
    "mv": (torch.mv, ((5, 300), (300,))),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b, beta=2, alpha=3), ((3, 5, 30), (3, 30, 7), (3, 1, 7))),
    "addbmm": (lambda a, b, c: torch.addbmm(c, a, b), ((3, 5, 30), (3, 30, 7), (1, 7))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bki", a, b), ((2, 5, 30), (2, 7, 30))),
    "einsum of sums": (lambda a, b: torch.einsum("ij,kl->il", a, b), ((3, 4), (5, 6))),
    "einsum of one": (lambda a: torch.einsum("ij->j", a), ((3, 40),)),
    "einsum of three": (lambda a, b, c: torch.einsum("ij,kl,jk->il", a, b, c), ((3, 4), (5, 6), (4, 5))),
    "no terms": (lambda a, b: a @ b, ((3, 0), (0, 4))),
}


QUICK_INTEGER_PRODUCTS = [(name, torch.int8) for name in ("mm", "baddbmm", "einsum of sums", "no terms")]
QUICK_INTEGER_PRODUCTS += [("mm", torch.int64)]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", INTEGER_PRODUCTS)
@pytest.mark.quick(where=lambda name, dtype: (name, dtype) in QUICK_INTEGER_PRODUCTS)
def test_integer_products_wrap_around_in_their_dtype(name: str, dtype: torch.dtype) -> None:
    function, shapes = INTEGER_PRODUCTS[name]
    limits = torch.iinfo(dtype)
    arguments = [torch.randint(limits.min, limits.max, shape, dtype=dtype) for shape in shapes]
    found, wanted = jitgen.jit(function)(*arguments), function(*arguments)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


OF_MORE = [
    ("...ij,...jk,...kl->...il", ((2, 3, 4), (1, 4, 5), (2, 5, 6))),
    ("ij,jk,kl,lm,mn", ((2, 3), (3, 4), (4, 5), (5, 6), (6, 7))),
    ("ij,j,jk->ik", ((2, 3), (1,), (3, 4))),
    ("ii,kl,ij->j", ((3, 3), (2, 1), (3, 4))),
    ("ij,ij,ij->", ((3, 4), (3, 4), (3, 4))),
    ("ij,jk,kl->il", ((3, 0), (0, 5), (5, 6))),
]


@pytest.mark.parametrize(("equation", "shapes"), OF_MORE)
@pytest.mark.quick(where=lambda equation, shapes: (equation, shapes) in OF_MORE[:2])
def test_einsum_of_more_than_two(equation: str, shapes: Sequence[tuple[int, ...]]) -> None:
    def function(*operands: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *operands)

    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found, wanted = jitgen.jit(function)(*operands), function(*operands)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(wanted)
    of_found, of_wanted = (torch.autograd.grad(result, operands, weights) for result in (found, wanted))
    torch.testing.assert_close(of_found, of_wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 300, 64), (33, 65, 7), (100, 16, 130), (4, 0, 4)])
def test_int8_products_that_are_int32(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((m, k), (k, n)))
    for left, right in ((a, b), (a.T.contiguous().T, b.T.contiguous().T)):
        found = jitgen.jit(lambda a, b: torch._int_mm(a, b) * 3)(left, right)
        assert found.dtype == torch.int32
        assert torch.equal(found, (left.long() @ right.long()).int() * 3)
    with pytest.raises((TraceError, UnsupportedError), match="int8"):
        program(torch._int_mm, a.int(), b.int())


@pytest.mark.parametrize("dtype", [dtype for dtype in INTEGERS if dtype.itemsize > 1], ids=str)
@pytest.mark.quick(where=lambda dtype: dtype is torch.int16)
def test_integer_products_in_cuda(dtype: torch.dtype) -> None:
    """The kernels of a GPU, run on the CPU; those of bytes multiply by instructions of a GPU (``tests/device``)."""
    limits = torch.iinfo(dtype)
    for function, shapes in (
        (torch.matmul, ((5, 100), (100, 7))),
        (lambda a, b: (a + 1) @ b.T * 2, ((70, 33), (65, 33))),
    ):
        arguments = [torch.randint(limits.min, limits.max, shape, dtype=dtype) for shape in shapes]
        assert torch.equal(run(function, *arguments)[0], function(*arguments))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "gfx942"])
def test_integer_products_lower_for_gpus(target: str) -> None:
    specs = jitgen.TensorSpec((3, "M", 64), torch.int8), jitgen.TensorSpec((3, 64, 48), torch.int8)
    assert jitgen.jit(torch.bmm).lower(*specs, target=target).source


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.addmm, ((5,), (2, 3, 4), (4, 5))),
        (torch.addmm, ((1, 2, 5), (2, 4), (4, 5))),
        (torch.addmv, ((5,), (3, 4), (4, 5))),
        (torch.addbmm, ((3, 5), (2, 3, 4), (1, 4, 5))),
        (torch.baddbmm, ((2, 3, 5), (2, 3, 4), (4, 5))),
        (torch.baddbmm, ((1, 1, 3, 2), (1, 3, 4), (1, 4, 2))),
    ],
)
def test_products_take_the_ranks_that_torch_takes(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]
) -> None:
    with pytest.raises((TraceError, UnsupportedError)):
        program(function, *tensors(*shapes))


@pytest.mark.parametrize(
    ("equation", "swapped", "shape"),
    [("mk,nk->mn", False, (5, 64)), ("nk,bmk->bnm", True, (2, 5, 64)), ("...k,nk->...n", False, (2, 3, 64))],
)
def test_einsum_with_a_quantised_weight(equation: str, swapped: bool, shape: tuple[int, ...]) -> None:
    weight, x = jitgen.quantize(torch.randn(32, 64), "int4", 32), torch.randn(shape)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *((w, x) if swapped else (x, w)))

    assert kinds(program(function, x, weight)) == ["gemm"]
    torch.testing.assert_close(jitgen.jit(function)(x, weight), function(x, weight.dequantize()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("equation", ["mn,nk->mk", "bk,nk->b", "mn,nk->mnk", "nk,nk->n"])
def test_einsum_that_is_no_product_with_a_quantised_weight_is_refused(equation: str) -> None:
    weight = jitgen.quantize(torch.randn(64, 64), "int4", 32)
    with pytest.raises(UnsupportedError, match="quantised weight"):
        program(lambda x, w: torch.einsum(equation, x, w), torch.randn(64, 64), weight)


def test_an_epilogue_of_a_size_that_is_guarded_to_be_a_number() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a @ b + torch.arange(8)) * b.shape[1]

    arguments = tensors((5, 6), (6, 8))
    assert kinds(program(function, *arguments)) == ["gemm"]
    torch.testing.assert_close(jitgen.jit(function)(*arguments), function(*arguments))


@pytest.mark.parametrize("side", ["rows", "columns", "both"])
def test_an_expanded_operand_has_no_tensor_map(side: str) -> None:
    """Its rows have a stride of 0, which no tensor map has; other mainloops take it."""

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left = a.expand(256, 256) if side != "columns" else a.repeat(256, 1)
        right = b.expand(256, 256).t() if side != "rows" else b.repeat(256, 1).t()
        return left @ right

    specs = [jitgen.TensorSpec((1, 256), torch.bfloat16)] * 2
    low = jitgen.jit(function).lower(*specs, target="sm_90a", backend="cuda")._lowered
    product = next(number for number, kernel in enumerate(low.program.kernels) if kernel.family == "gemm")
    assert "strided" in low.layouts[product][0].operands
    assert not low.arguments(product).maps
    arguments = tensors((1, 256), (1, 256))
    torch.testing.assert_close(jitgen.jit(function)(*arguments), function(*arguments), rtol=1e-4, atol=1e-3)


def test_sums_over_several_dimensions_of_size_1_beside_a_product() -> None:
    q, k = torch.randn(1, 3, 1, 8), torch.randn(1, 3, 50, 8)
    for function in (lambda q, k: (q @ k.mT).sum((0, 2)), lambda q, k: torch.exp(q @ k.mT).sum((0, 2), keepdim=True)):
        wanted = function(q.double(), k.double())
        bound = 16 * torch.finfo(torch.float32).eps * wanted.abs().max().item()
        torch.testing.assert_close(jitgen.jit(function)(q, k).double(), wanted, rtol=0, atol=bound)


def test_products_without_dimensions() -> None:
    def function(x: torch.Tensor, number: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.tensordot(x, x, dims=2),
            torch.tensordot(number, number, dims=0),
            torch.kron(number, number),
            torch.kron(number, x),
        ]

    x, number = torch.rand(3, 4), torch.tensor(2.5)
    torch.testing.assert_close(jitgen.jit(function)(x, number), function(x, number))
