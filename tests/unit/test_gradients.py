"""Gradients of decorated functions: against eager autograd and finite differences in float64, of every operation.

First and second derivatives, captured parameters, quantised weights, what is saved, and what is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jitgen_cases import lowered_graph

import jitgen
from jitgen import pipeline
from jitgen.errors import UnsupportedError
from jitgen.gradients.plan import plan
from jitgen.gradients.rules import RULES
from jitgen.gradients.weights import _is_reciprocal
from jitgen.ir.graph import Graph, topological
from jitgen.ir.nodes import CONTRACT
from jitgen.ir.ops import FLOATS, OPS

Function = Callable[..., Any]


def results(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def derivatives(function: Function, inputs: Sequence[torch.Tensor], second: bool) -> list[Any]:
    """Results, gradients for fixed random gradients of the results, and gradients of a function of these."""
    generator = torch.Generator().manual_seed(1)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = [result for result in results(function(*inputs)) if result.requires_grad]
    weights = [torch.randn(result.shape, generator=generator, dtype=torch.float64) for result in found]
    given = [weight.to(result.dtype) for weight, result in zip(weights, found, strict=True)]
    first = torch.autograd.grad(found, wanted, given, create_graph=second, allow_unused=True)
    everything = [*found, *first]
    if second:
        depends = [g for g in first if g is not None and g.requires_grad]
        total = sum((g * torch.randn(g.shape, generator=generator, dtype=g.dtype)).sum() for g in depends)
        if isinstance(total, torch.Tensor):
            everything += torch.autograd.grad(total, wanted, allow_unused=True)
    return everything


def check(function: Function, *inputs: torch.Tensor, second: bool = True) -> None:
    """The derivatives of ``function`` in float64 are those of eager autograd, and None where those are."""
    leaves = [t.double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    found = derivatives(jitgen.jit(function), leaves, second)
    expected = derivatives(function, leaves, second)
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        if got is None or want is None:
            continue
        # A few hundred operations of float64, each rounded to 1.1e-16 of its largest operand.
        scale = 1 + (want.detach().abs().max().item() if want.numel() else 0)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-13 * scale)


def randn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x.detach()


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(torch.ones(q.shape[-2], k.shape[-2]).triu(1) > 0, -math.inf), -1) @ v


CASES: dict[str, tuple[Function, Callable[[], Sequence[torch.Tensor]]]] = {
    "softmax": (lambda x: torch.softmax(x, -1), lambda: [randn(4, 7)]),
    "log_softmax": (lambda x: torch.log_softmax(x, 0), lambda: [randn(4, 7)]),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), lambda: [randn(4, 7)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (9,), w, b), lambda: [randn(5, 9), randn(9), randn(9)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (9,), w), lambda: [randn(2, 3, 9), randn(9)]),
    "group_norm": (lambda x: F.group_norm(x, 2), lambda: [randn(3, 4, 5)]),
    "swiglu": (
        lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
        lambda: [randn(3, 8), randn(5, 8), randn(5, 8)],
    ),
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: [randn(2, 3, 8), randn(5, 8), randn(5)]),
    "attention": (attention, lambda: [randn(2, 3, 5, 4), randn(2, 3, 6, 4), randn(2, 3, 6, 4)]),
    "rope": (rope, lambda: [randn(2, 3, 8), randn(3, 4), randn(3, 4)]),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), lambda: [randn(6, 9), torch.randint(0, 9, (6,))]),
    "label smoothing": (
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        lambda: [randn(6, 9), torch.randint(0, 9, (6,))],
    ),
    "embedding": (lambda w, t: F.embedding(t, w).tanh(), lambda: [randn(9, 4), torch.randint(0, 9, (2, 6))]),
    "variance": (lambda x: x.var(-1) + x.std(-1), lambda: [randn(3, 8)]),
    "broadcast": (lambda x, y: x / (y * y + 1) - y, lambda: [randn(3, 5), randn(5)]),
    "product": (lambda x: x.prod(-1), lambda: [randn(3, 5) * torch.tensor([1, 1, 0, 1, 1])]),
    "extrema": (lambda x: (x.amax(0) * x.amin(0), x.max(1).values), lambda: [randn(4, 5)]),
    "views": (lambda x: (x.flip(0)[1:].mT.reshape(-1)[::2] ** 2, x[1:, -1]), lambda: [randn(4, 5)]),
    "cat": (lambda x, y: (torch.cat([x, y * y], 1) ** 2)[:, 1:8], lambda: [randn(3, 4), randn(3, 6)]),
    "cumsum": (lambda x: x.cumsum(1).sin(), lambda: [randn(3, 5)]),
    "cumprod": (lambda x: x.cumprod(1).sin(), lambda: [randn(4, 6) * torch.tensor([1, 1, 0, 1, 0, 1])]),
    "logcumsumexp": (lambda x: x.logcumsumexp(1).sin(), lambda: [randn(3, 5)]),
    "cummax": (lambda x: x.cummax(0).values ** 2, lambda: [randn(5, 4)]),
    "topk": (lambda x: x.topk(3).values ** 2, lambda: [randn(4, 7)]),
    "gather": (lambda x, t: x.gather(1, t).sin(), lambda: [randn(4, 7), torch.randint(0, 7, (4, 3))]),
    "gather of rows": (lambda x, t: x.gather(0, t).sin(), lambda: [randn(4, 3), torch.randint(0, 4, (2, 3))]),
    "scatter": (
        lambda x, y, t: x.scatter(1, t, y).sin(),
        lambda: [randn(4, 7), randn(4, 1), torch.randint(0, 7, (4, 1))],
    ),
    "index_add": (
        lambda x, y, t: x.index_add(0, t, y) ** 2,
        lambda: [randn(4, 3), randn(5, 3), torch.randint(0, 4, (5,))],
    ),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1) ** 2, lambda: [randn(2, 3, 9), randn(4, 3, 3)]),
    "several results": (lambda x: (x.exp(), x.sum(), x.argmax(), x > 0), lambda: [randn(3, 5)]),
    "detached": (lambda x: x * x.detach() * x, lambda: [randn(3, 5)]),
    "an input returned": (lambda x, y: (x, y.t(), x * y), lambda: [randn(3, 5), randn(3, 5)]),
    "integers beside": (lambda x, t: x * t, lambda: [randn(3, 5), torch.arange(5)]),
    "a scalar": (lambda x: x.sum() * x, lambda: [randn(1)]),
    "nothing": (lambda x: x.exp().sum(0), lambda: [randn(0, 3)]),
    "unused": (lambda x, y: x * 2 + y.sign(), lambda: [randn(3), randn(3)]),
    "a result and what is detached of it": (lambda x: twice((x * x).sum()), lambda: [randn(5)]),
    "a result and the same of what is detached": (lambda x: (x.exp(), x.detach().exp()), lambda: [randn(5)]),
    "equal values of other gradients": (
        lambda x: (x.exp() * x.detach().sin(), x.detach().exp() * x.sin()),
        lambda: [randn(5)],
    ),
    "saved values of other gradients": (
        lambda x: torch.softmax(x, 0) * torch.softmax(x.detach(), 0),
        lambda: [randn(5)],
    ),
}
FIRST_ALONE = {"conv1d", "embedding", "attention"}
"""Cases whose second derivatives are tested in the long run only."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(where=lambda case: case in {"softmax", "layer_norm", "swiglu", "embedding", "detached", "unused"})
def test_derivatives_are_those_of_eager_torch(case: str) -> None:
    function, inputs = CASES[case]
    check(function, *inputs(), second=case not in FIRST_ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(FIRST_ALONE))
def test_second_derivatives(case: str) -> None:
    function, inputs = CASES[case]
    check(function, *inputs())


NAN = math.nan
WITHOUT_DERIVATIVE: dict[str, tuple[Function, Sequence[Sequence[float]]]] = {
    "std of equal values": (lambda x: x.std(), [[2, 2, 2]]),
    "std_mean of equal values": (lambda x: torch.std_mean(x), [[0, 0]]),
    "clamp at tensors": (lambda x, y, z: x.clamp(y, z), [[1, 2, 3, NAN, -1], [1, 3, NAN, 0, 0], [2, 2, 4, 1, -1]]),
    "clamp at a least": (lambda x, y: x.clamp(min=y), [[1, 2, NAN, 3], [1, 3, 0, NAN]]),
    "clamp at a most": (lambda x, y: x.clamp(max=y), [[1, 2, NAN, 3], [1, 1, 0, NAN]]),
    "clamp at numbers": (lambda x: x.clamp(-1, 1), [[-1, 1, 0, NAN, 3]]),
    "maximum": (lambda x, y: torch.maximum(x, y), [[1, 2, NAN, 3], [1, 3, 0, NAN]]),
    "minimum": (lambda x, y: torch.minimum(x, y), [[1, 2, NAN, 3], [1, 3, 0, NAN]]),
    "median of equal elements": (lambda x: x.median(), [[2, 1, 2, 2, 5]]),
    "median of NaN": (lambda x: x.median(), [[2, NAN, NAN]]),
    "nanmedian of equal elements": (lambda x: x.nanmedian(), [[2, NAN, 2, 7]]),
}


@pytest.mark.parametrize("case", WITHOUT_DERIVATIVE)
@pytest.mark.quick(where=lambda case: case in ("std of equal values", "clamp at tensors", "maximum"))
def test_values_at_bounds_equal_elements_and_nan_have_the_gradients_of_torch(case: str) -> None:
    function, rows = WITHOUT_DERIVATIVE[case]
    inputs = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in rows]
    found = derivatives(jitgen.jit(function), inputs, False)
    torch.testing.assert_close(found, derivatives(function, inputs, False), equal_nan=True)


def test_a_gradient_that_is_a_negated_view() -> None:
    x = torch.randn(4, requires_grad=True)
    g = torch.randn(4, dtype=torch.complex64).conj().imag
    assert g.is_neg()
    (found,) = torch.autograd.grad(jitgen.jit(lambda x: x.exp() * 2)(x), x, g)
    torch.testing.assert_close(found, g * 2 * x.exp())


def test_an_argument_that_no_gradient_reaches_has_none() -> None:
    """A backward of some results, after which an optimiser leaves the parameters of others as they are."""
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    jitgen.jit(lambda x, y: (x * 2, (y * 3).sum()))(x, y)[0].sum().backward()
    assert y.grad is None
    assert x.grad.tolist() == [2, 2, 2]


def test_results_of_one_value_have_memory_of_their_own() -> None:
    x = torch.randn(3, requires_grad=True)
    first, second = jitgen.jit(lambda x: (x.exp(), x.detach().exp()))(x)
    second.zero_()
    assert first.requires_grad
    assert not second.requires_grad
    first.sum().backward()
    torch.testing.assert_close(x.grad, x.exp())


UNARY = sorted(name for name, op in OPS.items() if op.arity == 1 and name in RULES and hasattr(torch, name))
DOMAIN = {"acosh": (1.1, 3.0), "atanh": (-0.9, 0.9), "asin": (-0.9, 0.9), "acos": (-0.9, 0.9)}
POSITIVE = {"sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal"}


def test_every_differentiable_operation_has_a_rule() -> None:
    without = {name for name, op in OPS.items() if set(op.domain) & set(FLOATS) and not op.predicate} - set(RULES)
    assert without == {"fma", "exp2_normal"}  # which passes make, after a graph is differentiated


@pytest.mark.parametrize("second", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_derivatives_of_unary_operations(second: bool) -> None:
    names = [name for name in UNARY if name not in ("signbit",)]

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(torch, name)(x) for name, x in zip(names, inputs, strict=True))

    inputs = []
    for name in names:
        low, high = DOMAIN.get(name, (0.2, 3.0) if name in POSITIVE else (-2.0, 2.0))
        inputs.append(torch.rand(7, dtype=torch.float64) * (high - low) + low)
    check(function, *inputs, second=second)


@pytest.mark.parametrize("second", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_derivatives_of_binary_operations(second: bool) -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positive = z.abs() + 0.5
        return (
            *(x + y, x - y, x * y, x / positive, torch.atan2(x, y), torch.copysign(x, y), torch.hypot(x, y)),
            *(torch.minimum(x, y), torch.maximum(x, z), torch.fmin(x, y), torch.fmax(x, y), torch.fmod(x, positive)),
            *(torch.remainder(x, positive), positive**x, x**3, 2.0**x, x**0, torch.where(x > y, x, z)),
            *(torch.maximum(x, x), torch.logaddexp(x, y), torch.lerp(x, y, z)),
        )

    check(function, randn(3, 5), randn(3, 5), randn(3, 5), second=second)


@pytest.mark.slow
def test_finite_differences() -> None:
    """torch.autograd.gradcheck and gradgradcheck, which do not know what eager torch computes."""

    @jitgen.jit
    def block(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(F.rms_norm(x, (4,), weight) @ up).softmax(-1) + x.sum(-1, keepdim=True)

    inputs = [randn(2, 4).requires_grad_(), randn(4).requires_grad_(), randn(4, 3).requires_grad_()]
    assert torch.autograd.gradcheck(block, inputs)
    assert torch.autograd.gradgradcheck(block, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
def test_gradients_have_the_dtype_of_their_tensors_and_are_summed_in_float32(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(400, 24, dtype=dtype).requires_grad_(), torch.randn(24, dtype=dtype).requires_grad_())
    given = torch.randn(400, 24, dtype=dtype)

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (24,), weight, eps=1e-6)

    gradients = torch.autograd.grad(jitgen.jit(function)(x, weight), [x, weight], given)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    wanted = torch.autograd.grad(function(*exact), exact, given.double())
    for got, want in zip(gradients, wanted, strict=True):
        assert got.dtype == dtype
        # A sum of 400 products in float32, of inputs that the forward rounded once, and one rounding of the result.
        bound = (torch.finfo(dtype).eps + 400 * 2.0**-24) * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["amax", "amin"])
@pytest.mark.covering(1)
def test_an_extremum_of_values_that_are_computed_in_more_bits_than_their_dtype(name: str, dtype: torch.dtype) -> None:
    """What is equal to the extremum as eager torch would have stored both shares its gradient."""
    x, b = (torch.randn(70, 33, dtype=dtype).requires_grad_(), torch.randn(33, dtype=dtype).requires_grad_())
    function = jitgen.jit(lambda x, b: getattr(x * 0.3 + b, name)(-1))
    given = torch.arange(1.0, 71.0, dtype=dtype)
    of_x, of_b = torch.autograd.grad(function(x, b), [x, b], given)
    rounded = (x.detach().float() * 0.3 + b.detach().float()).to(dtype)
    chosen = rounded == getattr(rounded, name)(-1, keepdim=True)
    share = torch.where(chosen, given[:, None].double() / chosen.sum(-1, keepdim=True), 0.0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(of_x.double(), share * 0.3, rtol=eps, atol=0)
    torch.testing.assert_close(of_b.double(), share.sum(0), rtol=eps, atol=0)


def test_a_backward_holds_for_other_sizes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that is a product of others is no number in it."""
    graphs: list[Graph] = []
    lower = pipeline.lower
    monkeypatch.setattr(pipeline, "lower", lambda graph, *args: (graphs.append(graph), lower(graph, *args))[1])
    function = jitgen.jit(lambda y, t: F.cross_entropy(y.flatten(0, -2), t.flatten()))

    def step(*lead: int) -> None:
        y = torch.randn(*lead, 16, requires_grad=True)
        t = torch.randint(0, 16, lead)
        (found,) = torch.autograd.grad(function(y, t), y)
        wide = y.detach().double().requires_grad_()
        (wanted,) = torch.autograd.grad(F.cross_entropy(wide.flatten(0, -2), t.flatten()), wide)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)

    for lead in ((3, 7), (4, 5), (2, 9)):
        step(*lead)
    assert len({id(graph) for graph in graphs}) == 2, "a forward and a backward"
    assert not [guard for graph in graphs for guard in graph.guards if guard.expr.op == "symbol"]


def test_parameters_that_a_function_closes_over() -> None:
    layer = torch.nn.Linear(8, 5)
    function = jitgen.jit(lambda x: layer(x).relu())
    for rows in (3, 4, 1):
        x = torch.randn(rows, 8)
        layer.zero_grad()
        function(x).sum().backward()
        assert layer.weight.grad is not None
        found = layer.weight.grad.clone(), layer.bias.grad.clone()  # type: ignore[union-attr]
        layer.zero_grad()
        layer(x).relu().sum().backward()
        torch.testing.assert_close(found, (layer.weight.grad, layer.bias.grad))
        with torch.no_grad():
            assert not function(x).requires_grad


@pytest.mark.slow
def test_training_goes_as_in_eager_torch() -> None:
    x = torch.randn(32, 4, dtype=torch.float64)
    y = x.sum(-1, keepdim=True)

    def losses(decorate: Callable[[Function], Function]) -> list[float]:
        torch.manual_seed(0)
        first, second = torch.nn.Linear(4, 8).double(), torch.nn.Linear(8, 1).double()
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05)
        loss = decorate(lambda x, y: F.mse_loss(second(torch.tanh(first(x))), y))
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            value = loss(x, y)
            value.backward()
            optimizer.step()
            found.append(value.item())
        return found

    found = losses(jitgen.jit)
    assert found[-1] < 0.5 * found[0]
    assert found == pytest.approx(losses(lambda function: function), rel=1e-10)


@pytest.mark.parametrize("format", ["int8", "int4", "uint4"])
@pytest.mark.quick(where=lambda format: format == "int4")
@pytest.mark.quick(where=lambda format: format == "uint4")
def test_gradients_of_what_a_quantised_weight_multiplies(format: str) -> None:
    weight = jitgen.quantize(torch.randn(24, 100), format, group_size=32)
    x, low, high = torch.randn(3, 100), torch.randn(4, 100), torch.randn(24, 4)
    inputs = [tensor.requires_grad_() for tensor in (x, low, high)]

    @jitgen.jit
    def adapted(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:  # as LoRA does
        return F.silu(F.linear(x, weight)) + F.linear(F.linear(x, low), high)

    given = torch.randn(3, 24)
    found = torch.autograd.grad(adapted(*inputs), inputs, given)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    dense = weight.dequantize(torch.float64)
    result = F.silu(F.linear(exact[0], dense)) + F.linear(F.linear(exact[0], exact[1]), exact[2])
    for got, want in zip(found, torch.autograd.grad(result, exact, given.double()), strict=True):
        # Sums of at most 100 products in float32, of products of at most 100 terms each.
        bound = 200 * 2.0**-24 * want.abs().max().item() * 4
        torch.testing.assert_close(got.double(), want, rtol=0, atol=bound)
    layer = F.linear(inputs[0], weight)  # outside of a decorated function
    (alone,) = torch.autograd.grad(layer, [inputs[0]], given)
    torch.testing.assert_close(alone.double(), given.double() @ dense, rtol=0, atol=1e-4)


def test_dropout_has_one_mask() -> None:
    x = torch.randn(200, 30, requires_grad=True)
    y = jitgen.jit(lambda x: F.dropout(x, 0.5, True) * 3)(x)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.where(y == 0, 0.0, 6.0))


def test_what_is_saved() -> None:
    """Row statistics and products, and nothing pointwise."""

    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(torch.softmax(x, -1), weight)).tanh()

    graph = lowered_graph(jitgen.jit(block), torch.randn(4, 8), torch.randn(6, 8))
    found = plan(graph, [0, 1])
    assert sorted(node.op for node in found.saved) == ["contract", "reduce", "reduce"]
    assert found.inputs == (0, 1)


def test_a_residual_stream_is_saved_in_place_of_what_layers_add() -> None:
    def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x + F.linear(F.rms_norm(x, x.shape[-1:]), weight)
        return F.rms_norm(x, x.shape[-1:])

    inputs = [randn(5, 8), *(randn(8, 8) for _ in range(3))]
    saved = plan(lowered_graph(jitgen.jit(layers), *inputs), range(4)).saved
    assert [node.op for node in saved if node.shape[-1] != 1] == ["add"] * 3
    check(layers, *inputs, second=False)


def test_a_second_backward_is_refused_by_torch_and_a_changed_input_is_noticed() -> None:
    function = jitgen.jit(lambda x: x.exp() * x)
    x = torch.randn(3, requires_grad=True)
    y = function(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    y = function(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


REFUSED: dict[str, tuple[Function, str]] = {
    "scatter by product": (
        lambda x: x.scatter_reduce(0, torch.zeros(3, 4, dtype=torch.long), x, "prod"),
        "a scatter that multiplies",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_gradient_here_is_refused(case: str) -> None:
    function, words = REFUSED[case]
    x = torch.randn(3, 4, requires_grad=True) * 1
    with pytest.raises(UnsupportedError, match=words) as refused:
        jitgen.jit(function)(x)
    assert "torch.no_grad()" in str(refused.value)


def test_plans_and_out_compute_no_gradients() -> None:
    function = jitgen.jit(lambda x: x * 2)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(UnsupportedError, match="plan"):
        function.bind(x)
    with pytest.raises(UnsupportedError, match="out="):
        function(x, out=torch.empty(3))
    with torch.no_grad():
        torch.testing.assert_close(function.bind(x)(x), x * 2)


def test_a_training_step_is_recorded_prewarmed_and_served_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> torch.Tensor:
        function = jitgen.jit(lambda x, weight: torch.softmax(x * weight, -1).square())
        x = torch.arange(12.0).reshape(3, 4).sin().requires_grad_()
        function(x, torch.linspace(1, 2, 4)).sum().backward()
        assert x.grad is not None
        return x.grad

    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "development"))
    with jitgen.record(tmp_path / "step.json"):
        wanted = step()
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path / "deployment"))
    with jitgen.strict(), pytest.raises(jitgen.CacheMissError):
        step()
    jitgen.prewarm(tmp_path / "step.json", targets=["cpu"], jobs=1)
    with jitgen.strict():
        assert torch.equal(step(), wanted)


ENDS: dict[str, Function] = {
    **{f.__name__: f for f in (F.relu, F.relu6, F.hardtanh, F.hardsigmoid, F.hardswish, F.leaky_relu, torch.abs)},
    "clamp": lambda x: x.clamp(-1, 1) + x.clamp(min=0) + torch.clamp_max(x, 2.0),
    "maximum": lambda x: torch.maximum(x, torch.ones_like(x)),
    "norm": lambda x: torch.linalg.vector_norm(x[:1] * 0) + x.sum(),
    "sinc": torch.sinc,
    "atan2": lambda x: torch.atan2(x, x * 0),
}


def test_a_backward_follows_the_settings_that_it_depends_on() -> None:
    x, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    product, elementwise = jitgen.jit(lambda x, w: x @ w), jitgen.jit(lambda x: torch.exp(x) * x)
    losses = [function(*inputs).sum() for function, inputs in 3 * [(product, (x, w)), (elementwise, (x,))]]
    before = torch.get_float32_matmul_precision()
    try:
        for number, setting in enumerate(("highest", "high", "highest")):
            torch.set_float32_matmul_precision(setting)
            for loss in losses[2 * number : 2 * number + 2]:
                loss.backward()
    finally:
        torch.set_float32_matmul_precision(before)
    graphs = [found.traced.graph for found in product._dispatchers.of_gradients]
    backwards = [graph for graph in graphs if graph.name.endswith("backward")]
    precisions = [
        {node.attrs.precision for node in topological(graph.results) if node.kind is CONTRACT} for graph in backwards
    ]
    assert precisions == [{"ieee"}, {"tf32"}], "made once for each"
    graphs = [found.traced.graph for found in elementwise._dispatchers.of_gradients]
    assert sum(graph.name.endswith("backward") for graph in graphs) == 1
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 3 * (w.sum(1) + torch.exp(x) * (x + 1)).detach())


def test_where_a_function_has_no_derivative_the_gradient_is_torchs() -> None:
    """In float32: eager torch divides by 6 in float32 for float64 too."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each(x) for each in ENDS.values())

    x = torch.tensor([0.0, 1.0, -1.0, 6.0, 2.0, 3.0, -3.0, 0.5], requires_grad=True)
    for found, wanted in zip(jitgen.jit(function)(x), function(x), strict=True):
        gradients = [torch.autograd.grad(result.sum(), x, retain_graph=True)[0] for result in (found, wanted)]
        # A few operations of float32 on numbers up to 6.
        torch.testing.assert_close(*gradients, rtol=0, atol=6 * 4 * 2.0**-24)


@pytest.mark.parametrize("padding", [2, -1, None])
def test_the_padding_of_an_embedding_gets_no_gradient(padding: int | None) -> None:
    check(lambda w, i: F.embedding(i, w, padding_idx=padding), randn(4, 3), torch.tensor([0, 2, 2, 3]), second=False)
    weight = torch.randn(4, 3, requires_grad=True)
    scaled = jitgen.jit(lambda i: F.embedding(i, weight, scale_grad_by_freq=True))
    with pytest.raises(UnsupportedError, match="scale_grad_by_freq"):
        scaled(torch.tensor([1]))


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.covering(1)
def test_of_equal_elements_the_one_that_the_index_names_has_the_gradient(kind: str, keepdim: bool) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    check(lambda x: getattr(torch, kind)(x, 1, keepdim).values ** 2, x)
    check(lambda x: getattr(torch, kind)(x.t(), dim=0, keepdim=keepdim)[0].exp(), x, second=False)
    check(lambda x: getattr(x, kind)() * getattr(x, f"a{kind}")(1), x, second=False)  # these divide it
    check(lambda x: getattr(x, kind)(0).values, torch.tensor(2.0), second=False)


@pytest.mark.parametrize("dim", [None, -1, (0, 1)])
@pytest.mark.parametrize("correction", [3, 6, 7])
@pytest.mark.parametrize("of", ["var", "std", "var_mean"])
@pytest.mark.covering(1)
def test_a_variance_without_degrees_of_freedom(dim: Any, correction: int, of: str) -> None:
    x = torch.tensor([[1.0, 5.0, 2.0], [3.0, 3.0, 3.0]], dtype=torch.float64, requires_grad=True)

    def spread(x: torch.Tensor) -> Any:
        return getattr(torch, of)(x, dim, correction=correction)

    for got, want in zip(derivatives(jitgen.jit(spread), [x], False), derivatives(spread, [x], False), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def _assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    copy = x * 1
    copy[0] = y[1:]
    return copy * x


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: x / (1 + x[..., 1:].abs()), [(3, 3, 2)]),
        (lambda x: torch.lerp(torch.softmax(x, 0), x, 0.25).add(x[..., 1:]), [(2,)]),
        (lambda x: F.cosine_similarity(torch.square(x), torch.square(x)[..., 1:], 1), [(2, 2)]),
        (lambda x: x[1:].expand(5, 3) * torch.arange(15).view(5, 3), [(2, 3)]),
        (lambda x, y: torch.where(y[:, 1:] > 0, x, y[:, 1:]), [(2, 3), (2, 2)]),
        (lambda x, y: x[1:] @ y, [(2, 3, 3), (4, 3, 3)]),
        (lambda x: torch.einsum("ij,kj->ik", x, x[..., 1:]), [(2, 2)]),
        (lambda x: torch.einsum("ij,ij->ij", x, x[1:]), [(2, 3)]),
        (_assigned, [(2, 3), (2, 3)]),
        (
            lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m[:, 1:], enable_gqa=True),
            [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 5)],
        ),
    ],
)
def test_gradients_of_a_broadcast_size_that_is_an_expression_of_value_one(
    function: Function, shapes: list[tuple[int, ...]]
) -> None:
    """The size of ``x[1:]`` is that of ``x`` less 1; of two elements it is 1, and is broadcast."""
    check(function, *(torch.randn(shape, dtype=torch.float64) for shape in shapes), second=False)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"attn_mask": torch.randn(3, 1, dtype=torch.float64)}, marks=pytest.mark.slow)],
    ids=["plain", "mask"],
)
def test_gradients_of_one_key_that_several_heads_share(options: dict[str, Any]) -> None:
    """A size of the backward's input, by a guard, is the quotient of the heads: one of the two stands for both."""
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options),
        *(torch.randn(shape, dtype=torch.float64) for shape in [(2, 4, 3, 8), (2, 2, 1, 8), (2, 2, 1, 1)]),
        second=False,
    )


def test_what_a_reciprocal_is() -> None:
    def values(x: torch.Tensor) -> Any:
        one, other = 1 / x, x.reciprocal()
        return one, torch.where(x > 0, other, 0.0), other.unsqueeze(0), 0 / x, x / x, torch.where(x > 0, other, 1.0)

    results = lowered_graph(jitgen.jit(values), randn(3)).outputs
    assert [_is_reciprocal(node) for node in results] == [True, True, True, False, False, False]
