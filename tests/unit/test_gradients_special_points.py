"""Gradients where eager torch's are those of formulas of its own: overflow, zeros, ties, infinities.

A table of functions, each at points where the derivative of a composition would be NaN or another number. First and
second derivatives, in every floating dtype, through ``jitgen.jit`` and ``torch.compile``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jitgen
import jitgen.dynamo.registration  # registers the backend

Function = Callable[..., torch.Tensor]
INF, NAN = math.inf, math.nan
SIXTEEN_BITS = 2e-2
TOLERANCES = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: SIXTEEN_BITS}
"""Of gradients, relative: a few dozen operations of the dtype, the exponentials among them of arguments up to 90."""


def overflowing(dtype: torch.dtype) -> list[float]:
    """Points around the thresholds of activations, and where exponentials and squares overflow ``dtype``."""
    large = math.log(torch.finfo(dtype).max)
    ends = [0.0, -0.0, 0.5, 1.0, 3.0, 7.3, 20.0, 20.5, 0.98 * large, 1.02 * large, 2 * large, 1e4, INF]
    return [*ends, *(-point for point in ends if point)]


UNARY: dict[str, Function] = {
    "elu": F.elu,
    "elu of another scale": lambda x: F.elu(x, 2.0),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.5),
    "softplus": F.softplus,
    "softplus of another threshold": lambda x: F.softplus(x, 0.5, 60.0),
    "mish": F.mish,
    "silu": F.silu,
    "logit": torch.logit,
    "entr": torch.special.entr,
    "log_ndtr": lambda x: torch.special.log_ndtr(x.clamp(-8, 8)),
    "erfinv": lambda x: torch.erfinv(x.clamp(-1, 1)),
    "i0": torch.i0,
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
    "reciprocal square": lambda x: x**-2,
    "reciprocal root": lambda x: x**-0.5,
    "power of a negative number": lambda x: (-2.0) ** x,
    "xlogy of a number": lambda x: torch.xlogy(x, 3.0),
    "xlogy of 0": lambda x: torch.xlogy(x, 0.0),
    "xlog1py of a number": lambda x: torch.special.xlog1py(x, -1.0),
    "angle": torch.angle,
    "clamp": lambda x: x.clamp(-1, 3),
}
NO_SECOND = {"logit", "log_ndtr", "erfinv", "i0", "i0e", "i1", "angle"}
"""Functions whose second derivatives torch computes less exactly, or not at all."""
FLOAT64_ALONE = {"erfinv", "log_ndtr", "i0", "i0e", "i1"}
"""Functions whose formulas cancel digits, which torch does in narrower dtypes, too."""
UNARY_CASES = [
    (name, dtype)
    for name, dtype in itertools.product(UNARY, TOLERANCES)
    if not (name in FLOAT64_ALONE and dtype != torch.float64) and (name, dtype) != ("logit", torch.bfloat16)
]

GRID = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 90.0, INF, -INF, NAN]
BINARY: dict[str, Function] = {
    "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py,
    "hypot": torch.hypot,
    "atan2": torch.atan2,
    "logaddexp": torch.logaddexp,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "copysign": torch.copysign,
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
    "huber_loss": lambda a, b: F.huber_loss(a, b, reduction="none", delta=2.0),
    "poisson_nll_loss": lambda a, b: F.poisson_nll_loss(a, b, reduction="none"),
    "clamp at equal bounds": lambda a, b: torch.clamp(a, b, b),
    **{
        f"norm, p = {p}": lambda a, b, p=p: torch.linalg.vector_norm(torch.stack([a, b]), p, 0)
        for p in (0.5, 1, 1.5, 2, 2.5, 3, INF, -1)
    },
}

PROBABILITIES = [0.0, 1.0, 0.5, 1e-13, 1e-3, 0.25, 0.75]
OF_PROBABILITIES: dict[str, Function] = {
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(a, b, reduction="none"),
    "weighted": lambda a, b: F.binary_cross_entropy(a, b, torch.full((1,), 3.0, dtype=a.dtype), reduction="none"),
    "mean": lambda a, b: F.binary_cross_entropy(a, b).reshape(1),
    "with logits": lambda a, b: F.binary_cross_entropy_with_logits(a * 400 - 200, b, reduction="none"),
    "gaussian_nll_loss": lambda a, b: F.gaussian_nll_loss(a, b, a * b, reduction="none"),
    "soft_margin_loss": lambda a, b: F.soft_margin_loss(a * 400 - 200, b.detach() * 2 - 1, reduction="none") + b,
    "multi_margin_loss": lambda a, b: F.multi_margin_loss(
        torch.stack([a, b], -1), torch.zeros(len(a), dtype=torch.long), reduction="none"
    ),
    "multilabel_margin_loss": lambda a, b: F.multilabel_margin_loss(
        torch.stack([a, b], -1), torch.tensor([[0, -1]]).expand(len(a), 2), reduction="none"
    ),
    "cosine_similarity of zeros": lambda a, b: F.cosine_similarity(a[:, None] * 0, b[:, None]),
    "triplet_margin_loss": lambda a, b: F.triplet_margin_loss(
        a[:, None], b[:, None], (a * b)[:, None], p=3, eps=0.0, swap=True, reduction="none"
    ),
    "prod": lambda a, b: torch.stack([a, b, b], -1).prod(-1),
    "renorm": lambda a, b: torch.renorm(torch.stack([a, b, a], -1), 3, 0, 0.7),
    **{
        f"{name}, p = {p}": lambda a, b, of=of, p=p: of(torch.stack([a, b, a], -1)[:9], p)
        for p in (0.5, 1.0, 1.5, 3.0, INF)
        for name, of in (
            ("cdist", lambda x, p: torch.cdist(x, x[:4], p)),
            ("pdist", F.pdist),
            ("normalize", lambda x, p: F.normalize(x, p, -1)),
            ("pairwise_distance", lambda x, p: F.pairwise_distance(x, x.flip(0), p, 0.0)),
        )
    },
}


def compile_with_jitgen(function: Function) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, backend="jitgen")


ROUTES = {"jit": jitgen.jit, "compile": compile_with_jitgen}


def derivatives(function: Function, points: Sequence[torch.Tensor], order: int) -> list[torch.Tensor]:
    """The gradients of ``order``, of a gradient of 1.5 for each element of the result; zeros where there is none."""
    leaves = [point.clone().requires_grad_() for point in points]
    found: Sequence[Any] = [function(*leaves)]
    for number in range(order):
        found = [each for each in found if each is not None and each.requires_grad]
        if not found:
            break
        given = [torch.full_like(each, 1.5) for each in found]
        found = torch.autograd.grad(found, leaves, given, create_graph=number + 1 < order, allow_unused=True)
    else:
        return [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves, strict=True)]
    return [torch.zeros_like(leaf) for leaf in leaves]


def check(function: Function, points: Sequence[torch.Tensor], order: int, route: str) -> None:
    wanted, found = (derivatives(f, points, order) for f in (function, ROUTES[route](function)))
    for want, got in zip(wanted, found, strict=True):
        finite = want[want.isfinite()].double().abs()
        least = torch.finfo(want.dtype).tiny * 64  # what torch may flush to 0
        # Differences of near numbers lose digits: by their own size where a result is the sum of several terms.
        scale = min(finite.amax().item(), 1e6) if len(finite) and want.dtype == torch.float64 else 0.0
        torch.testing.assert_close(
            got.double(), want.double(), rtol=TOLERANCES[want.dtype], atol=least + 1e-12 * scale, equal_nan=True
        )


def meshed(points: Sequence[float], dtype: torch.dtype) -> list[torch.Tensor]:
    grid = itertools.product(points, points)
    return list(torch.tensor(list(grid), dtype=torch.float64).to(dtype).unbind(1))


def of_unary(name: str, dtype: torch.dtype) -> list[float]:
    """The points of a function. Torch's derivative of logit at -0.0 has the sign of a processor's instructions."""
    return [point for point in overflowing(dtype) if name != "logit" or str(point) != "-0.0"]


@pytest.mark.parametrize(("name", "dtype"), UNARY_CASES, ids=str)
@pytest.mark.quick(where=lambda name, dtype: name in ("elu", "mish", "logit") and dtype == torch.float32)
def test_a_function_of_one_number(name: str, dtype: torch.dtype) -> None:
    points = torch.tensor(of_unary(name, dtype), dtype=torch.float64).to(dtype)
    check(UNARY[name], [points], 1, "jit")


ACTIVATIONS = ["relu", "relu6", "hardtanh", "leaky_relu", "elu", "selu", "celu", "softplus", "softsign", "logsigmoid"]
ACTIVATIONS += ["silu", "mish", "gelu", "hardsigmoid", "hardswish", "tanhshrink", "hardshrink", "softshrink"]
OF_SINGLE_ELEMENTS: dict[str, Function] = {
    **{name: getattr(F, name) for name in ACTIVATIONS},
    "elu that falls": lambda x: F.elu(x, -0.7),
    "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "logit": torch.logit,
    "logit between": lambda x: torch.logit(x, 0.1),
    "logit between bounds that cross": lambda x: torch.logit(x, 0.6),
    "logit of a negative bound": lambda x: torch.logit(x, -0.2),
    "prelu": lambda x: F.prelu(x, torch.full((1,), math.inf, dtype=x.dtype)),
    "clamp": lambda x: x.clamp(-1, 3),
    **{f"power {p}": lambda x, p=p: x**p for p in (0, 0.5, 1.5, 2, 2.5, 3, -0.5, -1, -2, INF, NAN)},
    **{
        f"power tensor({p})": lambda x, p=p: torch.pow(x, torch.tensor(p, dtype=x.dtype))
        for p in (0.0, 0.5, 1.5, 2.0, -0.5, -1.0, NAN)
    },
}


@pytest.mark.parametrize("name", OF_SINGLE_ELEMENTS)
@pytest.mark.quick(where=lambda name: name in ("elu", "hardsigmoid", "hardswish", "logit"))
def test_special_points_have_the_values_and_gradients_that_torch_gives_a_single_element(name: str) -> None:
    """Torch's kernels for whole vectors give some of them others, at a NaN and at -0.0."""
    function, points = OF_SINGLE_ELEMENTS[name], torch.tensor([*overflowing(torch.float64), -3.0, NAN]).double()
    for weight in (1.5, NAN):
        found = []
        for of, pieces in ((function, points.split(1)), (jitgen.jit(function), [points])):
            leaves = [piece.clone().requires_grad_() for piece in pieces]
            results = [of(leaf) for leaf in leaves]
            given = [torch.full_like(result, weight) for result in results]
            gradients = torch.autograd.grad(results, leaves, given)
            found.append((torch.cat([result.detach() for result in results]), torch.cat(gradients)))
        for want, got in zip(*found, strict=True):  # torch has 1 / 6 in float32
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-15, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(UNARY.keys() - NO_SECOND))
def test_second_derivatives(name: str) -> None:
    far = [] if name == "mish" else [700.0, 720.0]  # where that of mish is NaN in torch
    points = [0.5, 1.0, 3.0, 7.3, 20.5, -0.5, -1.0, -3.0, -7.3, *far]
    check(UNARY[name], [torch.tensor(points, dtype=torch.float64)], 2, "jit")


PRODUCTS: dict[str, Function] = {
    "prod": lambda x: x.prod(-1),
    "prod of columns": lambda x: x.prod(0),
    "prod of one": lambda x: x[:2].prod(1, keepdim=True),
    "reversed cumprod": lambda x: x.flip(0).cumprod(0).flip(0),
    "cumprod": lambda x: x.cumprod(-1),
}


@pytest.mark.parametrize(
    "name", [name if name == "cumprod" else pytest.param(name, marks=pytest.mark.slow) for name in PRODUCTS]
)
def test_second_derivatives_of_products_with_zeros(name: str) -> None:
    """With none, one, two and three in a row. Those of the elements behind a zero depend on it."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    x[torch.rand(8, 5, generator=generator) < 0.3] = 0
    x[0] = torch.tensor([2.0, 0.0, 0.0, 3.0, 0.0])
    weights = torch.randn(40, generator=generator, dtype=torch.float64)
    found = []
    for of in (PRODUCTS[name], jitgen.jit(PRODUCTS[name])):
        leaf = x.clone().requires_grad_()
        result = of(leaf)
        (first,) = torch.autograd.grad(result.flatten(), leaf, weights[: result.numel()], create_graph=True)
        (second,) = torch.autograd.grad(first.flatten(), leaf, weights)
        found.append((first.detach(), second))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["elu", "softplus", "mish", "logit", "xlogy of 0"])
def test_a_compiled_function_of_one_number(name: str) -> None:
    check(UNARY[name], [torch.tensor(of_unary(name, torch.float32))], 1, "compile")


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.quick(where=lambda name: name in ("xlogy", "huber_loss", "norm, p = 3"))
def test_a_function_of_two_numbers(name: str) -> None:
    check(BINARY[name], meshed(GRID, torch.float64), 1, "jit")


@pytest.mark.parametrize("name", OF_PROBABILITIES)
@pytest.mark.quick(where=lambda name: name in ("binary_cross_entropy", "cdist, p = 3.0", "cdist, p = inf"))
def test_a_function_of_probabilities(name: str) -> None:
    check(OF_PROBABILITIES[name], meshed(PROBABILITIES, torch.float64), 1, "jit")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["binary_cross_entropy", "mean", "cdist, p = 3.0", "normalize, p = 3.0"])
def test_a_compiled_function_of_probabilities(name: str) -> None:
    check(OF_PROBABILITIES[name], meshed(PROBABILITIES, torch.float64), 1, "compile")


def test_a_variance_below_the_bound_has_a_gradient() -> None:
    """torch raises the variance without recording that."""
    points = [torch.tensor([1.0, 2.0]), torch.tensor([1e-8, 1.0])]
    check(lambda x, v: F.gaussian_nll_loss(x, torch.zeros(2), v, reduction="none"), points, 1, "jit")


def test_the_number_of_elements_that_are_not_zero_has_no_gradient() -> None:
    x = torch.tensor([[0.0, 2.0], [INF, 1.0]], requires_grad=True)
    jitgen.jit(lambda x: torch.linalg.vector_norm(x, 0, dim=1) * x.sum(1))(x).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0, 1.0], [2.0, 2.0]]))


def windows(*shape: int) -> torch.Tensor:
    """Small integers, most of which occur several times, NaN and infinities."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(0, 3, shape, generator=generator).double()
    for share, value in ((0.1, NAN), (0.25, -INF), (0.05, INF)):
        x[torch.rand(shape, generator=generator) < share] = value
    return x


POOLS: dict[str, dict[str, Any]] = {
    "windows apart": {"kernel_size": 2},
    "overlapping, padded": {"kernel_size": 3, "stride": 1, "padding": 1},
    "ceil_mode": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    "dilated": {"kernel_size": 2, "stride": 1, "dilation": 2},
    "with indices": {"kernel_size": 3, "stride": 2, "padding": 1, "return_indices": True},
}


@pytest.mark.parametrize("rank", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.quick(where=lambda name, rank: rank == 1)
def test_the_first_of_equal_elements_has_the_gradient_of_max_pooling(name: str, rank: int) -> None:
    """And the last NaN of a window, to which the index points, too."""
    pool, x = getattr(F, f"max_pool{rank}d"), windows(2, 2, *{1: (11,), 2: (5, 6), 3: (3, 4, 5)}[rank])
    same_gradients_and_indices(lambda x: pool(x, **POOLS[name]), x)


@pytest.mark.parametrize("rank", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("return_indices", [False, True])
@pytest.mark.covering(1)
def test_the_first_of_equal_elements_has_the_gradient_of_adaptive_max_pooling(
    rank: int, size: int, return_indices: bool
) -> None:
    pool, x = getattr(F, f"adaptive_max_pool{rank}d"), windows(2, 2, *{1: (11,), 2: (5, 6), 3: (3, 4, 5)}[rank])
    same_gradients_and_indices(lambda x: pool(x, size, return_indices), x)


def same_gradients_and_indices(function: Callable[..., Any], x: torch.Tensor) -> None:
    results = []
    for of in (function, jitgen.jit(function)):
        leaf = x.clone().requires_grad_()
        found = of(leaf)
        values, *indices = found if isinstance(found, tuple) else (found,)
        given = torch.arange(1.0, values.numel() + 1, dtype=values.dtype).reshape(values.shape)
        results.append([values.detach(), *torch.autograd.grad(values, leaf, given), *indices])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["mask", "mask with a gradient", "causal", "groups", "scale"])
@pytest.mark.quick(where=lambda kind: kind == "mask")
def test_a_row_that_a_mask_of_numbers_hides_has_gradients_of_zero(kind: str) -> None:
    """Of ``scaled_dot_product_attention``; the formula written by hand has NaN there, as in eager torch."""
    torch.manual_seed(0)
    heads = 2 if kind == "groups" else 4
    q, k, v = (torch.randn(2, count, 9, 8, dtype=torch.float64) for count in (4, heads, heads))
    mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(torch.rand(9, 9) > 0.6, -INF)
    mask[0] = -INF
    options: dict[str, Any] = {"groups": {"enable_gqa": True}, "scale": {"scale": 0.3}}.get(kind, {})

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if kind == "causal":
            bias = bias.masked_fill(torch.ones(9, 9).triu(1) > 0, -INF)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)

    points = [q, k, v, mask] if kind == "mask with a gradient" else [q, k, v]
    function = attention if len(points) == 4 else lambda q, k, v: attention(q, k, v, mask)
    for order in (1, 2):
        with sdpa_kernel(SDPBackend.MATH):  # which alone has second derivatives
            wanted = derivatives(function, points, order)
        found = derivatives(jitgen.jit(function), points, order)
        assert not any(each.isnan().any() for each in wanted)
        for want, got in zip(wanted, found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("route", ["eager", "jit", pytest.param("compile", marks=pytest.mark.slow), "func"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.covering(1)
def test_the_gradient_through_a_quantised_weight_has_the_accuracy_of_the_activation(
    dtype: torch.dtype, route: str
) -> None:
    torch.manual_seed(0)
    weight = jitgen.quantize(torch.randn(64, 256).bfloat16(), "int4", 64)
    dense, given = weight.dequantize(torch.float64), torch.randn(5, 64, dtype=dtype)

    def linear(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)

    x = torch.randn(5, 256, dtype=dtype)
    if route == "func":
        found = torch.func.grad(lambda x: (jitgen.jit(linear)(x) * given).sum())(x)
    else:
        function = linear if route == "eager" else ROUTES[route](linear)
        (found,) = torch.autograd.grad(function(x.requires_grad_()), x, given)
    wanted = given.double() @ dense
    # A sum of 64 products, each rounded; the dense weight is rounded to the dtype of the activation.
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=8 * torch.finfo(dtype).eps * wanted.abs().max())


WITH_NANS: dict[str, Callable[..., Any]] = {
    "amax": lambda x: x.amax(-1),
    "amax of columns": lambda x: x.amax(0),
    "amin": lambda x: x.amin((0, 1)),
    "aminmax": lambda x: torch.stack(torch.aminmax(x, dim=-1)),
    "amax of a product": lambda x: (x @ torch.eye(4)).amax(-1),
    "max of all": torch.max,
    "min of all": torch.min,
    "max of a row": lambda x: x.max(-1).values,
    "median": torch.median,
    "median of a row": lambda x: x.median(-1).values,
    "largest size": lambda x: torch.linalg.vector_norm(x, INF, -1),
    "least size": lambda x: torch.linalg.vector_norm(x, -INF, -1),
    "quantile": lambda x: x.quantile(0.4, -1),
    "quantiles": lambda x: x.quantile(torch.tensor([0.4, 1.0]), -1),
    "nanquantile": lambda x: x.nanquantile(0.4, -1),
    "nansum": lambda x: x.nansum(-1),
    "nanmean": lambda x: x.nanmean(-1),
    "renorm": lambda x: x.renorm(2, 0, 3.0),
    "prod": lambda x: x.prod(-1),
    "prod of columns": lambda x: x.prod(0, keepdim=True),
    "prod of all": torch.prod,
    "prod of one row": lambda x: x[4:].prod(-1),
    "prod of all of a row": lambda x: x[7].prod(),
    "prod of a tensor of one dimension": lambda x: x[7].prod(0),
    "prod of all of one row": lambda x: x[7:8].prod(),
    "prod of all of one element": lambda x: x[4:5, :1].prod(),
    "prod along a size of 1": lambda x: x[3:4].prod(0),
    "cumprod": lambda x: x.cumprod(-1),
    "cumprod of columns": lambda x: x.cumprod(0),
    "cumprod along a size of 1": lambda x: x[7:8].cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
}
ZEROS = [[INF, 0.0, 2.0, NAN], [0.0, 0.0, NAN, INF], [INF, -0.5, 0.0, 3.0], [0.0, INF, 0.0, NAN], [2.0, -0.0, 1.0, 3.0]]


@pytest.mark.parametrize("name", WITH_NANS)
def test_rows_with_nans_have_eager_torchs_gradients(name: str) -> None:
    function = WITH_NANS[name]
    rows = [
        [1.0, NAN, 3.0, NAN],
        [2.0, 2.0, 1.0, 2.0],
        [INF, 1.0, INF, -INF],
        [NAN, INF, -INF, 0.0],
        [1.0, 2.0, 3.0, 4.0],
        [NAN, NAN, NAN, NAN],
        *(ZEROS if "prod" in name.split() or "cumprod" in name else []),
    ]
    if name == "amax of a product":
        rows = [row for row in rows if INF not in row]
    found = []
    eager = function if name != "aminmax" else lambda x: torch.stack((x.amin(-1), x.amax(-1)))  # torch 2.11 has none
    for called in (eager, jitgen.jit(function)):
        x = torch.tensor(rows, requires_grad=True)
        result = called(x)
        weights = torch.arange(1.0, result.numel() + 1).reshape(result.shape)
        found.append((result.detach(), torch.autograd.grad(result, x, weights)[0]))
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.quick(
    where=lambda dtype, reduce, include_self: dtype == torch.float64 and (reduce == "amax") != include_self
)
def test_equal_extrema_of_a_scatter_share_the_gradient(dtype: torch.dtype, reduce: str, include_self: bool) -> None:
    """Of small integers, most of which occur several times, with NaN and infinities; the base counts where it equals an
    extremum, as in torch, be it included or not."""
    x, source = windows(4, 5).to(dtype), windows(6, 5).to(dtype)
    index = torch.randint(0, 4, (6, 5), generator=torch.Generator().manual_seed(3))

    def scattered(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        result = (x * 2).scatter_reduce(0, index, source.relu() * 2, reduce, include_self=include_self)
        return torch.cat([result, x.index_reduce(0, index[:, 0], source, reduce, include_self=include_self)])

    found = []
    for called in (scattered, jitgen.jit(scattered)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, source)]
        result = called(*leaves)
        weights = torch.arange(1.0, result.numel() + 1).reshape(result.shape).to(dtype)
        found.append((result.detach(), *torch.autograd.grad(result, leaves, weights)))
    # A gradient is a sum of four quotients of numbers that bfloat16 has: each is rounded once.
    tolerance = 0 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[1], found[0], rtol=max(tolerance, 1e-12), atol=0, equal_nan=True)
