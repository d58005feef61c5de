"""Pointwise kernels on a GPU, in both dialects: every row of the trace's table, shapes, strides, streams, graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numeric import DTYPES, FLOATS, INTEGERS, failures, mismatch, sample, widened
from operations import COMPOSED, cases

import jitgen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BACKENDS = ["cuda", "triton"]
SHAPE = (10, 20)
BATCH = 64
"""Operations per function, so that a kernel covers many."""
EXACT_MODULO = ("fmod", "remainder", "mod")
"""torch's vectorised float64 fmod is NaN where the quotient is huge; the kernels' is exact."""
CONVERSIONS = ("to", "type", "type_as", "long", "int", "short", "char", "byte")


def names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, y, z = (sample(dtype, seed).reshape(SHAPE) for seed in (1, 2, 3))
    if dtype in INTEGERS:
        y = torch.where((y == 0) | ((y == -1) & (x == torch.iinfo(dtype).min)), torch.full_like(y, 5), y)
    return x, y, z, sample(torch.bool, 4).reshape(SHAPE), sample(dtype, 5)[: SHAPE[1]]


def on_device(tensors: Any) -> Any:
    return tuple(tensor.cuda() for tensor in tensors)


def exact_results(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...], want: torch.Tensor) -> Any:
    """(in float64, in eager torch of at least float32), on the CPU."""
    if tensors[0].dtype in FLOATS:
        wide = tuple(tensor.float() if tensor.itemsize == 2 else tensor for tensor in tensors)
        return function(*map(widened, tensors)), function(*wide)
    if not want.is_floating_point():
        return want, want
    try:
        return function(*(t.double() if t.dtype in INTEGERS else t for t in tensors)), want
    except (RuntimeError, TypeError):
        return want, want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
@pytest.mark.quick(where=lambda dtype: dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool))
def test_rows(backend: str, dtype: torch.dtype) -> None:
    tensors = operands(dtype)
    chosen = []
    for row, label, function in cases():
        try:
            chosen.append((row, label, function, function(*tensors)))
        except (RuntimeError, TypeError, NotImplementedError):
            continue
    assert len(chosen) > 100
    magnitude = 1 + sum(tensor.double().nan_to_num(0, 0, 0).abs() for tensor in tensors[:3])
    wrong: list[str | None] = []
    for first in range(0, len(chosen), BATCH):
        part = chosen[first : first + BATCH]
        jitted = jitgen.jit(lambda *given, part=part: tuple(f(*given) for _, _, f, _ in part), backend=backend)
        for (row, _, function, want), ours in zip(part, jitted(*on_device(tensors)), strict=True):
            got = ours.cpu()
            if (got.dtype, got.shape) != (want.dtype, want.shape):
                wrong.append(f"{got.dtype} {tuple(got.shape)}, torch has {want.dtype} {tuple(want.shape)}")
                continue
            exact, eager = exact_results(function, tensors, want)
            if row in EXACT_MODULO:
                exact = torch.where(exact.isnan() & tensors[0].isfinite() & tensors[1].isfinite(), got, exact)
            if dtype in FLOATS and got.dtype in INTEGERS and row in CONVERSIONS:
                # A float beyond an integer's range becomes what the processor makes of it.
                value, limits = tensors[0].double(), torch.iinfo(got.dtype)
                exact = torch.where((value > limits.min) & (value < limits.max), exact, got)
            wrong.append(mismatch(got, exact, eager, magnitude if row in COMPOSED else 0.0))
    assert not any(wrong), failures([label for _, label, _, _ in chosen], wrong)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=names)
def test_lengths(backend: str, dtype: torch.dtype) -> None:
    """Ragged ends, into poisoned memory with a guard behind it."""
    function = jitgen.jit(lambda x, y: x * 2 + y, backend=backend)
    for length in (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 255, 1023, 1024, 1025, 4095, 4096, 4097, 100_003, 2**20 + 5):
        x, y = (torch.randint(-9, 9, (length,), device="cuda").to(dtype) for _ in range(2))
        memory = torch.full((length + 64,), 77, device="cuda").to(dtype)
        function(x, y, out=memory[:length])
        assert torch.equal(memory[:length], x * 2 + y)
        assert (memory[length:] == 77).all()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "from an odd element": lambda x: x[:, 1:],
    "row slice": lambda x: x[3:-5],
    "expanded": lambda x: x[:, :1].expand(-1, 64),
    "permuted": lambda x: x.reshape(8, 12, 66).permute(2, 0, 1),
    "0-d": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
    "eight dimensions": lambda x: x.reshape(2, 2, 2, 12, 2, 3, 11, 1).transpose(0, 3),
    "overlapping": lambda x: x.as_strided((30, 40), (7, 1)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", VIEWS)
def test_views(backend: str, view: str) -> None:
    x = VIEWS[view](torch.randn(96, 66, device="cuda"))
    y = VIEWS[view](torch.randn(96, 66, device="cuda", dtype=torch.float64))
    function = jitgen.jit(lambda a, b: (a * 2 - b, (a > 0) | (b > 0)), backend=backend)
    for got, want in zip(function(x, y), (x * 2 - y, (x > 0) | (y > 0)), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def rotate(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat((-second, first), -1) * sin


def rotate_pairs(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * cos + turned * sin


def gated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [rotate, rotate_pairs, gated])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=names)
def test_parts_of_rows(backend: str, function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    q = torch.randn(37, 5, 128, device="cuda").to(dtype)
    cos, sin = (torch.randn(37, 1, 128, device="cuda").to(dtype) for _ in range(2))
    jitted = jitgen.jit(function, backend=backend)
    assert len(jitted.lower(q, cos, sin).kernels) == 1
    exact = function(q.double(), cos.double(), sin.double())
    error = (jitted(q, cos, sin).double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps * (exact.abs() + 4)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_updates_of_arguments(backend: str) -> None:
    @jitgen.jit(backend=backend)
    def update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x += y
        y.mul_(2)
        return x - y

    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    want_x, want_y = x + y, y * 2
    result = update(x, y)
    assert torch.equal(x, want_x)
    assert torch.equal(y, want_y)
    assert torch.equal(result, want_x - want_y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_is_captured_and_replayed(backend: str) -> None:
    x, out = torch.randn(5000, device="cuda"), torch.empty(5000, device="cuda")
    plan = jitgen.jit(lambda x: torch.exp(x) + 1, backend=backend).bind(x)
    plan(x, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(x, out=out)
    x.copy_(torch.randn(5000, device="cuda"))
    out.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(out, torch.exp(x) + 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_and_streams(backend: str) -> None:
    function = jitgen.jit(lambda x, s: x * s, backend=backend)
    wrong: list[int] = []

    def work(number: int) -> None:
        x = torch.full((4096,), float(number), device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong.extend(step for step in range(200) if not bool((function(x, float(step)) == number * step).all()))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_load_inline_gives_a_torch_operator() -> None:
    x = torch.randn(33, 100, device="cuda")
    function = jitgen.jit(lambda x: torch.tanh(x) * 3 + x[:, :1], backend="cuda", compiler="load_inline")
    torch.testing.assert_close(function(x), torch.tanh(x) * 3 + x[:, :1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unrolled_loop_of_several_states_and_its_gradient(backend: str) -> None:
    """Its kernels store all states at the same step, and those of the gradient compute steps again from these."""

    def function(x: Any, y: Any, z: Any) -> Any:
        for _ in range(130):
            x, y, z = x * 0.9 - y * z * 0.1, y * 0.9 - z * x * 0.1, z * 0.5 + x * 0.4
        return x + y, z

    tensors = [torch.rand(1003, device="cuda").requires_grad_() for _ in range(3)]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    results = [jitgen.jit(function, backend=backend)(*tensors), function(*exact)]
    low = jitgen.jit(function, backend=backend).lower(*tensors)
    assert len(low.kernels) > 2
    found, wanted = [
        (*pair, *torch.autograd.grad(pair, inputs, [torch.ones_like(one) for one in pair]))
        for pair, inputs in zip(results, (tensors, exact), strict=True)
    ]
    # Steps contract: an error of each, relative to the largest magnitude, is no larger at the end.
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= 130 * 3 * 2.0**-22 * float(other.abs().max())
