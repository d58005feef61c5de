"""Kernels that users wrote in Triton, launched within decorated functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jitgen
from jitgen import TensorSpec
from jitgen.deploy.launch_schema import refusal
from jitgen.errors import TraceError, UnsupportedError
from jitgen.families.family import Problem
from jitgen.families.launch import FAMILY, splices
from jitgen.schedule import tuned
from jitgen.trace.kernels.triton_accesses import accesses
from jitgen.trace.kernels.triton_module import module_of
from tests import triton_own_kernels
from tests.interpreter import Interpreter

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("tests.own_kernels")

MATRIX = TensorSpec((64, 48))


@pytest.fixture(scope="module")
def failures() -> Iterator[Interpreter]:
    with Interpreter("tests.triton_own_kernels") as process:
        yield process


@pytest.mark.parametrize("check", triton_own_kernels.CHECKS)
@pytest.mark.quick(where=lambda check: check not in triton_own_kernels.SLOW)
def test_values(check: str, failures: Interpreter) -> None:
    assert failures[check] == []


# -------------------------------------------------------------------------------------------------- what a source is


def test_a_source_has_the_kernel_and_all_that_it_calls() -> None:
    entry, text = module_of(kernels.matmul)
    assert entry == "matmul"
    assert text.index("def activation(x, KIND: tl.constexpr):") < text.index("def matmul(")
    assert "    accumulator = activation(accumulator, ACTIVATION)\n" in text
    _, scaled = module_of(kernels.scale_in_place)
    assert "SCALE = tl.constexpr(2.0)" in scaled
    for kernel in (kernels.matmul, kernels.scale_in_place, kernels.flash_attention, kernels.layer_norm):
        assert refusal(module_of(kernel)[1]) is None


def test_kernels_are_compiled_without_a_gpu_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "store"))
    arguments = (TensorSpec(("M", 64), torch.bfloat16), TensorSpec((64, 48), torch.bfloat16))
    with jitgen.record(tmp_path / "specs.json"):
        low = triton_own_kernels.product.lower(*arguments, target="sm_90a")
    assert "one of" not in low.explain()
    assert "stride_ak=1" in low.source
    assert "the kernel matmul, written by you" in low.explain()
    with jitgen.strict(), pytest.raises(jitgen.CacheMissError):
        low.compile()
    assert jitgen.prewarm(tmp_path / "specs.json", ["sm_90a"]).count("failed") == 0
    with jitgen.strict():
        compiled = low.compile()
    assert "wgmma" in compiled.asm["ptx"] or "mma.sync" in compiled.asm["ptx"]


def test_configurations_are_candidates() -> None:
    low = triton_own_kernels.tuned.lower(MATRIX, MATRIX, target="sm_90a")
    assert "one of 2 configurations" in low.explain()
    assert "BLOCK=64" in low.source


def test_a_measured_configuration_is_taken() -> None:
    """``jitgen tune`` writes such rows."""
    low = triton_own_kernels.tuned.lower(MATRIX, MATRIX, target="sm_90a")
    inner = low._lowered
    (number,) = [n for n, kernel in enumerate(inner.program.kernels) if kernel.family == "launch"]
    problem = Problem(inner.program.kernels[number], inner.layouts[number], inner.laid_out.geometries[number])
    device = inner.route.device
    first, second = FAMILY.candidates(problem, device)
    facts = FAMILY.facts(problem, device)
    assert facts is not None
    row = tuned.row_from_json(tuned.row_of("any", "triton", facts, second).as_json)
    assert row.selects(second)
    assert not row.selects(first)
    assert second.constants == (("BLOCK", "128"),)
    assert second.option("num_warps") == 4


@pytest.mark.parametrize(
    ("kernel", "tensors", "written"),
    [
        (kernels.matmul, {"a_ptr", "b_ptr", "c_ptr"}, {"c_ptr"}),
        (kernels.layer_norm, {"X", "Y", "W", "B", "Mean", "Rstd"}, {"Y", "Mean", "Rstd"}),
        (kernels.flash_attention, {"Q", "K", "V", "Out"}, {"Out"}),
        (kernels.histogram, {"x_ptr", "counts_ptr"}, {"counts_ptr"}),
        (kernels.scale_in_place, {"x_ptr"}, {"x_ptr"}),
        (kernels.through_helpers, {"x_ptr", "out_ptr"}, {"out_ptr"}),
    ],
    ids=lambda value: getattr(getattr(value, "fn", None), "__name__", ""),
)
def test_what_is_written_follows_from_the_text(kernel: Any, tensors: set[str], written: set[str]) -> None:
    """Numbers that pointers are advanced by are named too, and are none of the tensors."""
    assert accesses(kernel).written & tensors == written


def test_sizes_of_one_power_of_two_share_a_trace() -> None:
    low = triton_own_kernels.softmax.lower(TensorSpec((8, 100)), target="sm_90a")
    assert "s0_1 <= 128" in low.explain()
    assert "s0_1 >= 65" in low.explain()


# ------------------------------------------------------------------------------------------------------------ fusion


def test_what_is_around_a_kernel_is_computed_in_it() -> None:
    low = triton_own_kernels.between_operations.lower(MATRIX, MATRIX, TensorSpec((48,)), target="sm_90a")
    assert len(low.kernels) == 1
    assert "5 operations behind out_ptr, where the kernel stores it" in low.explain()
    assert "1 operations before x_ptr, where the kernel loads it" in low.explain()
    assert "    y = tl.load(y_ptr + offsets, mask=mask)\n" in low.source  # the user's line
    assert low.compile().asm["ptx"]


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        (triton_own_kernels.read_back, (MATRIX, MATRIX), "used in another way than to store at offsets: tl.store(out"),
        (triton_own_kernels.of_set_values, (TensorSpec((48,)), TensorSpec((96,))), "the tensor had values before"),
    ],
)
def test_a_rule_that_is_not_proved_right_is_a_kernel_of_its_own(
    function: Any, arguments: tuple[Any, ...], why: str
) -> None:
    low = function.lower(*arguments, target="sm_90a")
    assert len(low.kernels) > 1
    assert why in low.explain()


@pytest.mark.parametrize(
    ("kernel", "parameter", "kind", "why"),
    [
        (kernels.matmul, "c_ptr", "store", ""),
        (kernels.matmul, "a_ptr", "load", ""),
        (kernels.layer_norm, "Y", "store", ""),
        (kernels.flash_attention, "Out", "store", ""),
        (kernels.histogram, "counts_ptr", "store", "used in another way"),
        (kernels.scale_in_place, "x_ptr", "store", "used in another way"),
        (kernels.through_helpers, "out_ptr", "store", "used in another way"),
        (kernels.advanced_in_a_loop, "out_ptr", "store", "is advanced in a loop"),
        (kernels.of_either, "out_ptr", "store", "used in another way"),
        (kernels.by_a_block_pointer, "out_ptr", "store", "used in another way"),
    ],
    ids=lambda value: getattr(getattr(value, "fn", None), "__name__", str(value)),
)
def test_pointers_that_a_rule_may_stand_at(kernel: Any, parameter: str, kind: str, why: str) -> None:
    entry, text = module_of(kernel)
    said = splices.refusal(text, entry, parameter, kind)
    assert (why in said) if why else not said


@pytest.mark.parametrize("name", ["pair", "three_of_rows", "pair_of_results"])
def test_a_kernel_that_reads_what_its_program_has_stored_is_one_with_that(name: str) -> None:
    matrix = TensorSpec((40, 100))
    count = {"pair": 3, "three_of_rows": 1, "pair_of_results": 2}[name]
    low = getattr(triton_own_kernels, name).lower(*[matrix] * count, target="sm_90a")
    assert len(low.kernels) == 1
    assert "one kernel: each program reads only what the same program has stored" in low.explain()
    assert low.compile().asm["ptx"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("shifted", "they use other offsets"),
        ("of_wider_mask", "the second may read elements that the first has masked out"),
        ("of_changed_number", "n is assigned several times, or outside of the kernel"),
        ("of_a_branch", "stores it several times, or in a loop or a branch"),
        ("of_another_grid", "their grids differ"),
        ("of_other_rows", "itself is advanced"),
        ("read_elsewhere", ""),
    ],
)
def test_two_kernels_stay_two(name: str, why: str) -> None:
    low = getattr(triton_own_kernels, name).lower(MATRIX, MATRIX, target="sm_90a")
    assert len(low.kernels) == 2
    assert (
        (f"two kernels: {why}" in low.explain() or why in low.explain()) if why else "which reads" not in low.explain()
    )


def _product(rule: Callable[..., Tensor], rows: int, columns: int, warps: int) -> Any:
    def product(a: Tensor, b: Tensor, *others: Tensor) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        c = torch.empty((m, n), dtype=a.dtype, device=a.device)
        sizes = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
        strides = a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1)
        grid = (triton.cdiv(m, rows) * triton.cdiv(n, columns),)
        kernels.matmul[grid](a, b, c, m, n, k, *strides, **sizes, ACTIVATION="none", num_warps=warps)
        return rule(c, *others)

    return jitgen.jit(product)


@pytest.mark.parametrize(
    ("rule", "tile", "size", "is_fused"),
    [
        (lambda c, r: torch.nn.functional.gelu(c) + r, (128, 256, 8), 4096, False),
        (lambda c, r: torch.relu(c) + r, (128, 256, 8), 4096, True),
        (lambda c, r: torch.nn.functional.gelu(c) + r, (128, 64, 4), 4096, True),
        (lambda c, r: torch.nn.functional.gelu(c) + r, (128, 256, 8), 256, True),  # a launch takes longer
    ],
)
def test_a_long_rule_behind_many_sums_is_a_kernel_of_its_own(
    rule: Any, tile: tuple[int, int, int], size: int, is_fused: bool
) -> None:
    square = TensorSpec((size, size), torch.bfloat16)
    low = _product(rule, *tile).lower(square, square, square, target="sm_90a")
    assert (len(low.kernels) == 1) == is_fused
    assert ("of which each thread holds 128 sums" in low.explain()) != is_fused


# -------------------------------------------------------------------------------------------------------- bad input


def _launching(**changes: Any) -> Callable[[Tensor, Tensor], Tensor]:
    options = {"BLOCK": 64, "grid": (4,), "out": torch.empty_like, "n": 12} | changes
    grid, out = options.pop("grid"), options.pop("out")

    @jitgen.jit
    def launching(x: Tensor, y: Tensor) -> Tensor:
        result = out(x)
        kernels.add[grid](x, y, result, **options)
        return result

    return launching


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"grid": (0,)}, TraceError, r"its grid is \(0\)"),
        ({"grid": (1, 1, 1, 1)}, TraceError, "one to three sizes"),
        ({"grid": (1.5,)}, TraceError, "is no integer"),
        ({"block": 3}, TraceError, "it has no parameter block"),
        ({"n": torch.dtype}, TraceError, "n is a type"),
        ({"BLOCK": object()}, TraceError, "the constant BLOCK is a object"),
        ({"n": "12"}, TraceError, "n is the string '12'; declare it as n: tl.constexpr"),
        ({"num_warps": "4"}, TraceError, "num_warps is '4', which is no integer"),
        ({"grid": None}, TraceError, r"it has no grid; write add\[grid\]"),
        ({"out": lambda x: x.t()}, UnsupportedError, "shares memory with x_ptr"),
    ],
)
def test_a_mistake_names_the_kernel_and_the_line(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        _launching(**changes).lower(MATRIX, MATRIX, target="sm_90a")
    assert "test_own_kernels.py:" in str(caught.value)
    assert "own_kernels.py:" in str(caught.value)


@pytest.mark.parametrize("name", ["add", "tuned_add", "add_by_heuristics"])
def test_a_launch_without_a_grid_is_named(name: str) -> None:
    launcher = getattr(kernels, name)
    launches = (lambda x: launcher(x, x, x.clone(), 12), lambda x: launcher.run(x, x, x.clone(), 12))
    for launching in launches:
        with pytest.raises(TraceError, match=r"it has no grid; write add\[grid\]\(...\)\n  at .*test_own_kernels.py:"):
            jitgen.jit(launching).lower(MATRIX, target="sm_90a")
    with pytest.raises((RuntimeError, TypeError), match=r"callable|outside of the scope"):  # Triton's own, elsewhere
        launcher(torch.ones(1))


def test_a_missing_argument_is_named() -> None:
    @jitgen.jit
    def launching(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.add[1,](x, x, out, BLOCK=64)
        return out

    with pytest.raises(TraceError, match="the argument n is missing"):
        launching.lower(MATRIX, target="sm_90a")


def test_a_kernel_on_the_cpu_says_what_runs_it() -> None:
    with pytest.raises(UnsupportedError, match="set TRITON_INTERPRET=1"):
        _launching()(torch.randn(12), torch.randn(12))


def test_gradients_are_refused() -> None:
    x = torch.randn(12, requires_grad=True)
    with pytest.raises(UnsupportedError, match="nobody knows the derivative"):
        _launching()(x, torch.randn(12))


def test_views_without_their_strides_are_refused() -> None:
    @jitgen.jit
    def launching(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.add[1,](x.t(), x, out, x.numel(), BLOCK=64)
        return out

    with pytest.raises(UnsupportedError, match="told none of its strides"):
        launching.lower(MATRIX, target="sm_90a")
    with pytest.raises(UnsupportedError, match="gets a tensor of strides"):
        _launching().lower(TensorSpec((8, 4), strides=(1, 8)), MATRIX, target="sm_90a")


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "import triton\nx = open('a')",
        "import triton\n@triton.jit\ndef f(x):\n    x.__class__\n",
        "import triton\n@triton.jit\ndef f(x):\n    triton.runtime.os.system('a')\n",
        "import triton.language as tl\nimport triton\n@triton.jit\ndef f(x):\n    tl.core.os.system('a')\n",
        "import triton\n@triton.jit\ndef f(x):\n    eval('a')\n",
        "import triton\n@triton.jit\ndef f(x=open('a')):\n    pass\n",
        "import triton\n@triton.jit\ndef f(x):\n    (lambda: 1)()\n",
        "import triton\n@print\ndef f(x):\n    pass\n",
        "print(1)",
        "def",
    ],
)
def test_a_manifest_has_no_other_code(text: str) -> None:
    assert refusal(text) is not None


# --------------------------------------------------------------------------------------------------- torch.compile


def _compiled(
    function: Callable[..., Any], arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[tuple[str | None, str]]:
    """What becomes of each step of a compiled function: why torch runs it, or the explanation of its kernels."""
    import torch.utils._triton as availability

    from jitgen.dynamo import backend

    for name in ("has_triton", "has_triton_package"):  # without a GPU, Dynamo knows no kernels of Triton
        monkeypatch.setattr(availability, name, lambda: True)
    steps: list[tuple[str | None, str]] = []

    def spec(value: Any) -> Any:
        return TensorSpec(tuple(map(int, value.shape)), value.dtype) if isinstance(value, Tensor) else int(value)

    def compiler(module: Any, inputs: Any) -> Any:
        for part in backend.compile_graph(module, inputs).all_steps():
            said = part.segment.reason
            if part.program is not None:
                specs = [spec(node.meta["example_value"]) for node in part.inputs]
                said = part.program.function.lower(*specs, target="sm_90a").explain()
            steps.append((part.segment.reason, str(said)))
        raise RuntimeError("compiled")

    torch._dynamo.reset()
    with pytest.raises(Exception, match="compiled"):
        torch.compile(function, backend=compiler, **options)(*arguments)
    return steps


@pytest.mark.parametrize("dynamic", [False, True])
def test_dynamo_has_a_launch_within_a_program(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.tuned_add[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x * 2, y, out, x.numel())
        return torch.nn.functional.gelu(out + bias)

    steps = _compiled(function, (torch.randn(6, 8), torch.randn(6, 8), torch.randn(8)), monkeypatch, dynamic=dynamic)
    assert [reason for reason, _ in steps] == [None]
    assert "the kernel add, written by you" in steps[0][1]


def test_dynamo_keeps_the_order_of_launches_that_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        before = x.sum()
        kernels.scale_in_place[(4,)](x, x.numel(), 0.5, BLOCK=32)
        return x * before

    steps = _compiled(function, (torch.randn(33, 3),), monkeypatch)
    assert [reason for reason, _ in steps] == [None]


def test_torch_launches_what_gets_tensors_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x.t())
        kernels.add[(4,)](x, x.t(), out, x.numel(), BLOCK=32)
        return out * 2

    steps = _compiled(function, (torch.randn(8, 4),), monkeypatch)
    assert "the kernel add gets a tensor that is not contiguous" in [reason for reason, _ in steps]
