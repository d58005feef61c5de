"""Defines the rows of random numbers and dropout, by the operation ``philox``: bits that are a function of seed, offset
and index.

Each tensor of random numbers has an offset of its own, beyond the one that a call draws from torch's generator
(``runtime/random.py``). A view of one, or two kernels that read one, see the same numbers. Distributions are torch's;
uniform numbers have as many bits as torch's have in their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from jitgen.errors import UnsupportedError
from jitgen.ir import symbols
from jitgen.ir.draws import offset_of
from jitgen.ir.graph import Node, Shape
from jitgen.spec import dtype_name
from jitgen.trace.guards import default_dtype
from jitgen.trace.movement import listed, new_shape, view
from jitgen.trace.numbers import SymbolicNumber
from jitgen.trace.sorting import sorted_
from jitgen.trace.table import ROWS, Row, row
from jitgen.trace.typing import (
    broadcast_shapes,
    expand,
    is_float,
    operand,
    pointwise,
    require_float,
    require_own_device,
)

if TYPE_CHECKING:
    from jitgen.trace.tracer import Trace

_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""The bits of a uniform number of a dtype: with more of them it would round to 1."""


# ------------------------------------------------------------------------------------------------------------- bits


def bits(trace: Trace, shape: Shape) -> Node:
    """Draws 64 random bits for each element of ``shape``, as int64."""
    count = symbols.product(shape)
    index = trace.make("iota", (), "int64", (count,), (0,))
    if shape != (count,):
        index = view(trace, index, ("reshape",), shape)
    number, trace.draws = trace.draws, trace.draws + 1
    seed = trace.builder.scalar(symbols.SEED, "int64")
    offset = trace.builder.scalar(offset_of(number), "int64")
    return trace.make("philox", (index, seed, offset), "int64", shape)


def uniform(trace: Trace, shape: Shape, dtype: str) -> Node:
    """Draws numbers from [0, 1): multiples of two to the power of minus the bits of ``dtype``."""
    return _unit(trace, bits(trace, shape), 0, dtype)


def _unit(trace: Trace, random: Node, first: int, dtype: str) -> Node:
    """Converts the bits from ``first`` on to a number from [0, 1)."""
    digits = _DIGITS[dtype]
    moved = pointwise(trace, "right_shift", random, first) if first else random
    whole = pointwise(trace, "bitwise_and", moved, 2**digits - 1)
    wide = "float64" if dtype == "float64" else "float32"
    return trace.cast(pointwise(trace, "mul", trace.cast(whole, wide), 2.0**-digits), dtype)


def normal(trace: Trace, shape: Shape, dtype: str) -> Node:
    """Draws numbers of the standard normal distribution (Box and Muller, "A Note on the Generation of Random Normal
    Deviates", 1958)."""
    random = bits(trace, shape)
    if dtype == "float64":
        radius, angle = _unit(trace, random, 0, dtype), _unit(trace, bits(trace, shape), 0, dtype)
        radius = pointwise(trace, "sub", 1.0, radius)
    else:
        low = pointwise(trace, "bitwise_and", random, 2**32 - 1)
        radius = pointwise(trace, "mul", pointwise(trace, "add", trace.cast(low, "float32"), 0.5), 2.0**-32)
        angle = _unit(trace, random, 32, "float32")
    length = pointwise(trace, "sqrt", pointwise(trace, "mul", pointwise(trace, "log", radius), -2.0))
    numbers = pointwise(trace, "mul", length, pointwise(trace, "cos", pointwise(trace, "mul", angle, 2 * math.pi)))
    return trace.cast(numbers, dtype)


# -------------------------------------------------------------------------------------------------------- factories


def _float_dtype(dtype: Any, otherwise: str) -> str:
    name = dtype_name(dtype) if dtype is not None else otherwise
    if name not in _DIGITS:
        raise TypeError(f"random numbers of {name} are not floating, as in torch; use randint")
    return name


def _plain(trace: Trace, generator: Any, device: Any) -> None:
    if generator is not None:
        raise UnsupportedError(
            "a generator of one's own is not supported; torch.manual_seed seeds the one that is used"
        )
    require_own_device(trace, device)


def _sizes(trace: Trace, sizes: Any) -> Shape:
    return new_shape(trace, (sizes,) if isinstance(sizes, (int, SymbolicNumber)) else sizes)


def _register_factories(name: str, draw: Callable[[Trace, Shape, str], Node]) -> None:
    """Registers ``draw`` for the functions that make a tensor: of given sizes, and like another."""

    @row(name)
    def of_sizes(trace: Trace, *size: Any, dtype: Any = None, device: Any = None, generator: Any = None) -> Node:
        _plain(trace, generator, device)
        return draw(trace, _sizes(trace, listed(size)), _float_dtype(dtype, dtype_name(default_dtype())))

    @row(f"{name}_like")
    def like(trace: Trace, input: Node, *, dtype: Any = None, device: Any = None, generator: Any = None) -> Node:
        _plain(trace, generator, device)
        return draw(trace, input.shape, _float_dtype(dtype, input.dtype))


_register_factories("rand", uniform)
_register_factories("randn", normal)


def _integers(trace: Trace, low: Any, high: Any, shape: Shape, dtype: str) -> Node:
    """Draws integers from [low, high): 63 bits modulo the distance, which favours none by more than 2**-63 of it times
    the distance."""
    if not low < high:
        raise ValueError(f"randint: {int(low)} is not below {int(high)}")
    random = pointwise(trace, "bitwise_and", bits(trace, shape), 2**63 - 1)
    within = pointwise(trace, "remainder", random, high - low)
    return trace.cast(pointwise(trace, "add", within, low), dtype)


@row("randint")
def randint(
    trace: Trace,
    *bounds: Any,
    low: Any = 0,
    high: Any = None,
    size: Any = None,
    dtype: Any = None,
    device: Any = None,
    generator: Any = None,
) -> Node:
    _plain(trace, generator, device)
    if bounds and isinstance(bounds[-1], (tuple, list, torch.Size)):
        *bounds, size = bounds  # type: ignore[assignment]
    if len(bounds) == 2:
        low, high = bounds
    elif bounds:
        (high,) = bounds
    return _integers(trace, low, high, _sizes(trace, size), dtype_name(dtype) if dtype else "int64")


@row("randperm")
def randperm(
    trace: Trace, n: Any, *, dtype: Any = torch.int64, layout: Any = None, device: Any = None, generator: Any = None
) -> Node:
    """Orders the numbers below ``n`` by random bits. Of 64 bits two are equal with a probability of n^2 / 2^65."""
    _plain(trace, generator, device)
    order = sorted_(trace, bits(trace, _sizes(trace, (n,))), 0, False)[1]
    return trace.cast(order, dtype_name(dtype or torch.int64))


@row("randint_like")
def randint_like(
    trace: Trace, input: Node, *bounds: Any, low: Any = 0, high: Any = None, dtype: Any = None, device: Any = None
) -> Node:
    _plain(trace, None, device)
    if bounds:
        *first, high = bounds
        low = first[0] if first else low
    return _integers(trace, low, high, input.shape, dtype_name(dtype) if dtype else input.dtype)


# ----------------------------------------------------------------------------------------------- in place of elements


def _chosen(trace: Trace, probability: Any, shape: Shape) -> Node:
    """Draws true with ``probability``, to within 2**-24."""
    return pointwise(trace, "lt", uniform(trace, shape, "float32"), probability, dtype="float32", result="bool")


def _probability(trace: Trace, p: Any) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"a probability must be between 0 and 1, but is {float(p)}")


@row("torch.bernoulli", "Tensor.bernoulli")
def bernoulli(trace: Trace, input: Node, p: Any = None, *, generator: Any = None) -> Node:
    """Draws 1 with the probability that the element of ``input`` is, or with ``p``."""
    _plain(trace, generator, None)
    if p is None:
        require_float(input.dtype)
        return trace.cast(_chosen(trace, trace.cast(input, "float32"), input.shape), input.dtype)
    return bernoulli_in_place(trace, input, p)


def bernoulli_in_place(trace: Trace, input: Node, p: Any = 0.5, *, generator: Any = None) -> Node:
    _plain(trace, generator, None)
    if isinstance(p, Node):
        p = expand(trace, trace.cast(p, "float32"), input.shape)
    else:
        _probability(trace, p)
    return trace.cast(_chosen(trace, p, input.shape), input.dtype)


ROWS["Tensor.bernoulli_"] = Row(bernoulli_in_place, inplace=True)


@row("Tensor.uniform")
def uniform_in_place(trace: Trace, input: Node, low: Any = 0.0, high: Any = 1.0, *, generator: Any = None) -> Node:
    _plain(trace, generator, None)
    require_float(input.dtype)
    unit = uniform(trace, input.shape, input.dtype)
    return pointwise(trace, "add", pointwise(trace, "mul", unit, high - low), low, dtype=input.dtype)


@row("Tensor.normal")
def normal_in_place(trace: Trace, input: Node, mean: Any = 0.0, std: Any = 1.0, *, generator: Any = None) -> Node:
    _plain(trace, generator, None)
    require_float(input.dtype)
    if std < 0:
        raise ValueError(f"normal_: std is {float(std)}, and must not be negative")
    standard = normal(trace, input.shape, input.dtype)
    return pointwise(trace, "add", pointwise(trace, "mul", standard, std), mean, dtype=input.dtype)


@row("Tensor.exponential")
def exponential(trace: Trace, input: Node, lambd: Any = 1.0, *, generator: Any = None) -> Node:
    _plain(trace, generator, None)
    require_float(input.dtype)
    if lambd <= 0:
        raise ValueError(f"exponential_: lambd is {float(lambd)}, and must be positive")
    wide = "float64" if input.dtype == "float64" else "float32"
    above = pointwise(trace, "sub", 1.0, uniform(trace, input.shape, wide))
    numbers = pointwise(trace, "div", pointwise(trace, "neg", pointwise(trace, "log", above)), lambd)
    return trace.cast(numbers, input.dtype)


@row("Tensor.log_normal")
def log_normal(trace: Trace, input: Node, mean: Any = 1.0, std: Any = 2.0, *, generator: Any = None) -> Node:
    return pointwise(trace, "exp", normal_in_place(trace, input, mean, std, generator=generator))


@row("Tensor.cauchy")
def cauchy(trace: Trace, input: Node, median: Any = 0.0, sigma: Any = 1.0, *, generator: Any = None) -> Node:
    """Draws by the inverse of the distribution function."""
    _plain(trace, generator, None)
    require_float(input.dtype)
    if sigma <= 0:
        raise ValueError(f"cauchy_: sigma is {float(sigma)}, and must be positive")
    wide = "float64" if input.dtype == "float64" else "float32"
    turned = pointwise(trace, "mul", pointwise(trace, "sub", uniform(trace, input.shape, wide), 0.5), math.pi)
    numbers = pointwise(trace, "mul", pointwise(trace, "tan", turned), sigma)
    return trace.cast(pointwise(trace, "add", numbers, median), input.dtype)


@row("Tensor.geometric")
def geometric(trace: Trace, input: Node, p: Any, *, generator: Any = None) -> Node:
    """Draws the number of trials up to the first success, by the inverse of the distribution function."""
    _plain(trace, generator, None)
    if not 0 < p < 1:
        raise ValueError(f"geometric_: p is {float(p)}, and must be between 0 and 1")
    above = pointwise(trace, "sub", 1.0, uniform(trace, input.shape, "float64"))
    failing = pointwise(trace, "log", operand(trace, 1.0 - p, "float64"))
    trials = pointwise(trace, "ceil", pointwise(trace, "div", pointwise(trace, "log", above), failing))
    return trace.cast(pointwise(trace, "maximum", trials, 1.0), input.dtype)


@row("torch.normal")
def normal_of(
    trace: Trace,
    mean: Any,
    std: Any = 1.0,
    size: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    generator: Any = None,
) -> Node:
    """Draws numbers with the means and standard deviations of tensors, or of ``size``."""
    _plain(trace, generator, device)
    if not isinstance(std, Node) and std < 0:
        raise ValueError(f"normal: std is {float(std)}, and must not be negative")
    tensors = [value for value in (mean, std) if isinstance(value, Node)]
    if (size is None) == (not tensors):
        raise TypeError("normal takes a tensor of means or standard deviations, or else a size")
    if size is not None:
        shape, name = _sizes(trace, size), _float_dtype(dtype, dtype_name(default_dtype()))
    else:
        shape, name = (
            broadcast_shapes(trace, *(tensor.shape for tensor in tensors)),
            _float_dtype(None, tensors[0].dtype),
        )
    standard = normal(trace, shape, name)
    return pointwise(trace, "add", pointwise(trace, "mul", standard, std, dtype=name), mean, dtype=name)


# ---------------------------------------------------------------------------------------------------------- dropout


@row("torch.dropout", itself=True)
def dropout(trace: Trace, input: Node, p: Any, train: Any) -> Node:
    _probability(trace, p)
    if not train or p == 0:
        return input
    if not is_float(input):
        raise TypeError(f"dropout of {input.dtype} tensors: the elements are scaled, as in torch")
    return _scaled(trace, input, input.shape, p)


@row("torch.feature_dropout", itself=True)
def feature_dropout(trace: Trace, input: Node, p: Any, train: Any) -> Node:
    """Drops whole channels, dimension 1."""
    _probability(trace, p)
    if not train or p == 0:
        return input
    if len(input.shape) < 2:
        raise ValueError("feature dropout needs at least 2 dimensions")
    return _scaled(trace, input, (*input.shape[:2], *[1] * (len(input.shape) - 2)), p)


def _scaled(trace: Trace, input: Node, shape: Shape, p: Any) -> Node:
    """Multiplies ``input`` by a mask of ``shape``: 1 / (1 - p) with probability 1 - p, else 0."""
    if p == 1:
        return pointwise(trace, "mul", input, 0.0)
    wide = "float64" if input.dtype == "float64" else "float32"
    scale: Any = 1.0 / (1.0 - p)
    kept = expand(trace, _chosen(trace, 1.0 - p, shape), input.shape)
    factors = operand(trace, scale, wide), operand(trace, 0.0, wide)
    mask = trace.make("where", (kept, *factors), wide, input.shape)
    return trace.cast(pointwise(trace, "mul", trace.cast(input, wide), mask), input.dtype)
