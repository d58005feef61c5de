"""What eager torch rejects is rejected, with the user's line; what it accepts, beside it, is not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jitgen_cases import lowered

import jitgen
from jitgen.errors import TraceError, UnsupportedError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
X, INTEGERS, CLASSES = torch.rand(3, 4), torch.arange(12).reshape(3, 4), torch.tensor([1, 3, 0])

CALLS: dict[str, Callable[..., Any]] = {
    "lerp of ints": lambda x, i, t: torch.lerp(i, i, 0.5),
    "lerp by a 0-d tensor of another dtype": lambda x, i, t: torch.lerp(x, x, x.double().sum()),
    "layer_norm with a weight of (1,)": lambda x, i, t: F.layer_norm(x, (4,), x[0, :1]),
    "layer_norm with a bias of (1,)": lambda x, i, t: F.layer_norm(x, (4,), x[0], x[0, :1]),
    "layer_norm": lambda x, i, t: F.layer_norm(x, (4,), x[0], x[1]),
    "layer_norm of bfloat16 with float32": lambda x, i, t: F.layer_norm(x.bfloat16(), (4,), x[0], x[1]),
    "layer_norm with parameters of two dtypes": lambda x, i, t: F.layer_norm(x.half(), (4,), x[0], x[1].half()),
    "rms_norm with a weight of (1,)": lambda x, i, t: F.rms_norm(x, (4,), x[0, :1]),
    "rms_norm of ints": lambda x, i, t: F.rms_norm(i, (4,)),
    "group_norm with a weight of (1,)": lambda x, i, t: F.group_norm(x, 2, x[0, :1]),
    "group_norm with a bias of (1,)": lambda x, i, t: F.group_norm(x, 2, x[0], x[0, :1]),
    "group_norm of a vector": lambda x, i, t: F.group_norm(x[0], 2),
    "cross_entropy with one class for three rows": lambda x, i, t: F.cross_entropy(x, t[:1]),
    "cross_entropy of a vector": lambda x, i, t: F.cross_entropy(x[0], t[:1]),
    "cross_entropy of a vector with two classes": lambda x, i, t: F.cross_entropy(x[0], t[:2]),
    "cross_entropy with int32 classes": lambda x, i, t: F.cross_entropy(x, t.int()),
    "cross_entropy with uint8 classes": lambda x, i, t: F.cross_entropy(x, t.byte()),
    "cross_entropy of ints": lambda x, i, t: F.cross_entropy(i, t),
    "cross_entropy with a strange reduction": lambda x, i, t: F.cross_entropy(x, t, reduction="most"),
    "cross_entropy smoothed too much": lambda x, i, t: F.cross_entropy(x, t, label_smoothing=1.5),
    "cross_entropy with three weights": lambda x, i, t: F.cross_entropy(x, t, x[0, :3]),
    "cross_entropy with float64 weights": lambda x, i, t: F.cross_entropy(x, t, x[0].double()),
    "cross_entropy of probabilities with float64 weights": lambda x, i, t: F.cross_entropy(x, x, x[0].double()),
    "nll_loss with int32 classes": lambda x, i, t: F.nll_loss(x, t.int()),
    "nll_loss of ints": lambda x, i, t: F.nll_loss(i, t),
    "multi_margin_loss with p=3": lambda x, i, t: F.multi_margin_loss(x, t, p=3),
    "huber_loss with delta 0": lambda x, i, t: F.huber_loss(x, x, delta=0),
    "huber_loss with a negative delta": lambda x, i, t: F.huber_loss(x, x, delta=-1.0),
    "smooth_l1_loss with a negative beta": lambda x, i, t: F.smooth_l1_loss(x, x, beta=-1.0),
    "smooth_l1_loss with beta 0": lambda x, i, t: F.smooth_l1_loss(x, x, beta=0),
    "binary_cross_entropy of other shapes": lambda x, i, t: F.binary_cross_entropy(x, x[0]),
    "binary_cross_entropy_with_logits of other shapes": lambda x, i, t: F.binary_cross_entropy_with_logits(x, x[0]),
    "softmax of ints": lambda x, i, t: i.softmax(-1),
    "softmax of ints as floats": lambda x, i, t: i.softmax(-1, dtype=torch.float32),
    "logsumexp of ints": lambda x, i, t: i.logsumexp(-1),
    "logcumsumexp of ints": lambda x, i, t: i.logcumsumexp(0),
    "mean of ints": lambda x, i, t: i.mean(),
    "var of ints": lambda x, i, t: i.var(),
    "std of bools": lambda x, i, t: (i > 1).std(),
    "norm of ints": lambda x, i, t: i.norm(),
    "normalize of ints": lambda x, i, t: F.normalize(i),
    "elu of ints": lambda x, i, t: F.elu(i),
    "selu of ints": lambda x, i, t: F.selu(i),
    "frac of ints": lambda x, i, t: i.frac(),
    "minus a bool": lambda x, i, t: -(i > 1),
    "abs of bools": lambda x, i, t: (i > 1).abs(),
    "sign of bools": lambda x, i, t: (i > 1).sign(),
    "square of bools": lambda x, i, t: (i > 1).square(),
    "floor of bools": lambda x, i, t: (i > 1).floor(),
    "relu of bools": lambda x, i, t: F.relu(i > 1),
    "tanh of bools": lambda x, i, t: (i > 1).tanh(),
    "heaviside of two dtypes": lambda x, i, t: torch.heaviside(x, x.double()),
    "prelu of two dtypes": lambda x, i, t: F.prelu(x, x[0].double()),
    "addcmul of bools": lambda x, i, t: torch.addcmul(i > 1, i > 2, i > 3),
    "addcdiv of ints": lambda x, i, t: torch.addcdiv(i, i, i + 1),
    "xor of floats": lambda x, i, t: x ^ x,
    "linear with a bias of three dimensions": lambda x, i, t: F.linear(x, x, x[None, :, :3]),
    "linear with a bias of two dimensions": lambda x, i, t: F.linear(x, x, x[:, :3]),
    "linear with a bias of (1,)": lambda x, i, t: F.linear(x, x, x[0, :1]),
    "linear with a bias that does not fit": lambda x, i, t: F.linear(x, x, x[0]),
    "addmm with a matrix that does not fit": lambda x, i, t: torch.addmm(x[:2, :2], x, x.T),
    "addmm with three dimensions": lambda x, i, t: torch.addmm(x[None, :, :3], x, x.T),
    "addmv with a vector that does not fit": lambda x, i, t: torch.addmv(x[0, :2], x, x[0]),
    "baddbmm with a matrix that does not fit": lambda x, i, t: torch.baddbmm(x[:2, :2], x[None], x.T[None]),
    "narrow to a negative length": lambda x, i, t: x.narrow(0, 0, -1),
    "narrow from the end": lambda x, i, t: x.narrow(0, -1, 1),
    "narrow past the end": lambda x, i, t: x.narrow(0, 2, 2),
    "narrow before the start": lambda x, i, t: x.narrow(0, -5, 1),
    "flip of one dimension twice": lambda x, i, t: x.flip(0, 0),
    "flip by a negative name for it": lambda x, i, t: x.flip(0, -2),
    "permute of one dimension twice": lambda x, i, t: x.permute(0, 0),
    "movedim of one dimension twice": lambda x, i, t: x.movedim((0, 0), (0, 1)),
    "movedim to one dimension twice": lambda x, i, t: x.movedim((0, 1), (0, 0)),
    "squeeze of one dimension twice": lambda x, i, t: x[:1].squeeze((0, 0)),
    "roll of one dimension twice": lambda x, i, t: x.roll((1, 1), (0, 0)),
    "roll without enough dimensions": lambda x, i, t: x.roll((1, 1), (0,)),
    "dropout with p 2": lambda x, i, t: F.dropout(x, 2.0, False),
    "softshrink with a negative lambda": lambda x, i, t: F.softshrink(x, -1.0),
    "hardtanh with limits exchanged": lambda x, i, t: F.hardtanh(x, 2.0, 1.0),
    "glu of three rows": lambda x, i, t: F.glu(x, 0),
    "repeat by a negative number": lambda x, i, t: x.repeat(-1, 2),
    "repeat by 0": lambda x, i, t: x.repeat(0, 2),
    "expand to a negative size": lambda x, i, t: x[:1].expand(-2, 4),
    "expand of a new dimension to -1": lambda x, i, t: x.expand(-1, 3, 4),
    "zeros of a negative size": lambda x, i, t: torch.zeros(-1) + x.sum(),
    "split into pieces of 0": lambda x, i, t: x.split(0)[0],
    "split of nothing into pieces of 0": lambda x, i, t: x[:0].split(0)[0],
    "chunk into 0": lambda x, i, t: x.chunk(0)[0],
    "clamp without limits": lambda x, i, t: x.clamp(),
    "div with a strange rounding": lambda x, i, t: x.div(2, rounding_mode="up"),
    "where with ints as condition": lambda x, i, t: torch.where(i, x, x),
    "masked_fill by ints": lambda x, i, t: x.masked_fill(i, 1),
    "masked_fill by bytes": lambda x, i, t: x.masked_fill(i.byte(), 1),
    "masked_fill of ints with a float": lambda x, i, t: i.masked_fill(i > 1, 1.5),
    "tril of a vector": lambda x, i, t: x[0].tril(),
    "einsum of two dtypes": lambda x, i, t: torch.einsum("ij,ij->i", x, i.double()),
    "einsum of sizes that differ": lambda x, i, t: torch.einsum("ij,jk->ik", x, x),
    "ints to a negative power": lambda x, i, t: i**-1,
    "ints divided by 0": lambda x, i, t: i // 0,
    "ints modulo 0": lambda x, i, t: i % 0,
    "fmod of ints by 0": lambda x, i, t: i.fmod(0),
    "ints divided by 0, truncated": lambda x, i, t: torch.div(i, 0, rounding_mode="trunc"),
    "batch_norm with parameters of two dtypes": lambda x, i, t: F.batch_norm(
        x.half(), x[0].half(), x[1].half(), x[0].half(), x[1]
    ),
    "batch_norm of float16 with float32": lambda x, i, t: F.batch_norm(x.half(), x[0], x[1], x[0], x[1]),
    "cross of two dtypes": lambda x, i, t: torch.linalg.cross(x[:, :3], x[:, 1:].double()),
    "cross of bools": lambda x, i, t: torch.linalg.cross(x[:, :3] > 0, x[:, :3] > 0),
    "padding that cuts off more than there is": lambda x, i, t: F.pad(x, (-3, -3)),
    "padding that cuts off more than there is, on one side": lambda x, i, t: F.pad(x, (-5, 4)),
    "padding that cuts off everything": lambda x, i, t: F.pad(x, (-2, -2)),
    "masked_scatter of two dtypes": lambda x, i, t: x.masked_scatter(x > 0, x.double()),
    "nonzero_static of a negative size": lambda x, i, t: torch.nonzero_static(x, size=-1),
    "combinations of a matrix": lambda x, i, t: torch.combinations(x),
    "embedding_bag without offsets": lambda x, i, t: F.embedding_bag(t[:2], x),
    "embedding_bag with weights of samples and a mean": lambda x, i, t: F.embedding_bag(
        i[:, :2] % 3, x, per_sample_weights=x[:, :2]
    ),
    "ints truly divided by 0": lambda x, i, t: i / 0,
    "floats divided by 0": lambda x, i, t: x // 0,
    "arange with step 0": lambda x, i, t: torch.arange(0, 3, 0) + x[0, 0],
    "arange with the wrong sign": lambda x, i, t: torch.arange(3, 0) + x[0, 0],
    "arange downwards": lambda x, i, t: torch.arange(3, 0, -1) + x[0, :3],
    "arange with the wrong sign of its step": lambda x, i, t: torch.arange(0, 3, -1) + x[0, 0],
    "stack of sizes that differ": lambda x, i, t: torch.stack([x, x[0]]),
    "cat of 0-d tensors": lambda x, i, t: torch.cat([x[0, 0], x[0, 1]]),
    "dot of matrices": lambda x, i, t: torch.dot(x, x),
    "mv of sizes that differ": lambda x, i, t: torch.mv(x, x[0, :1]),
    "matmul of sizes that differ": lambda x, i, t: x @ x,
    "cosine_similarity of ints": lambda x, i, t: F.cosine_similarity(i, i),
    "a dimension that is not there": lambda x, i, t: F.normalize(x, dim=5),
    "amax of an empty dimension": lambda x, i, t: x[:0].amax(0),
    "amax beside an empty dimension": lambda x, i, t: x[:0].amax(1),
    "argmax of nothing": lambda x, i, t: x[:0].argmax(),
    "argmin of an empty dimension": lambda x, i, t: x[:0].argmin(0),
    "max of nothing": lambda x, i, t: x[:0].max(),
    "aminmax of nothing": lambda x, i, t: x[:0].aminmax(),
    "mean of nothing": lambda x, i, t: x[:0].mean(),
}


def outcome(call: Callable[[], Any]) -> str | None:
    """The error's type where the call is rejected."""
    try:
        call()
    except (TraceError, UnsupportedError) as error:
        return "refused" if __file__ in str(error) else f"refused without the user's line: {error}"
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError) as error:
        return type(error).__name__
    return None


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_rejected_as_in_eager_torch(name: str) -> None:
    function = CALLS[name]
    expected = outcome(lambda: function(X, INTEGERS, CLASSES))
    found = outcome(lambda: lowered(function, X, INTEGERS, CLASSES))
    assert (found == "refused") == (expected is not None), f"eager torch: {expected}, jitgen: {found}"


def assigned(x: torch.Tensor, value: Any) -> torch.Tensor:
    x = x.clone()
    x[0] = value
    return x


FILLS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "fill": lambda x, value: torch.fill(x, value),
    "full_like": lambda x, value: torch.full_like(x, value),
    "masked_fill": lambda x, value: x.masked_fill(x == 0, value),
    "index_fill": lambda x, value: x.index_fill(0, torch.tensor([0]), value),
    "scatter": lambda x, value: x.scatter(0, torch.tensor([0]), value),
    "pad": lambda x, value: F.pad(x, (1, 1), value=value),
    "setitem": lambda x, value: assigned(x, value),
}
NUMBERS: dict[torch.dtype, tuple[Any, ...]] = {
    torch.int8: (127, 128, -128, -129, 1.5, math.inf, math.nan),
    torch.uint8: (255, 256, 3.7),
    torch.int32: (2**31 - 1, 2**31, 1e10),
    torch.float16: (65504, 70000, -1e9, math.inf, math.nan),
    torch.bfloat16: (3e38, 3.4e38, -math.inf),
    torch.float32: (3e38, 1e300, math.inf),
    torch.bool: (2, 0.5),
}


@pytest.mark.parametrize("name", FILLS)
def test_numbers_beyond_a_dtype(name: str) -> None:
    """Those that torch does not store are refused, as constants and as arguments."""
    for dtype, numbers in NUMBERS.items():
        x = torch.zeros(3).to(dtype)
        for value in numbers:
            expected = outcome(lambda x=x, value=value: FILLS[name](x, value))
            constant = outcome(lambda x=x, value=value: lowered(lambda x: FILLS[name](x, value), x))
            argument = outcome(lambda x=x, value=value: lowered(FILLS[name], x, value))
            assert [constant == "refused", argument == "refused"] == 2 * [expected is not None], (dtype, value)


DIVISIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "//": lambda i, j: i // j,
    "%": lambda i, j: i % j,
    "fmod": lambda i, j: torch.fmod(i, j),
    "trunc": lambda i, j: torch.div(i, j, rounding_mode="trunc"),
    "a number": lambda i, j: 7 // j,
    "a sum": lambda i, j: (i // j).sum(),
    "in place": lambda i, j: i.clone().floor_divide_(j),
}


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.quick(where=lambda name: name in ("//", "a sum"))
def test_integer_division_by_an_element_that_is_0(name: str) -> None:
    function = DIVISIONS[name]
    jitted = jitgen.jit(function)
    x, y = torch.arange(-5, 6), torch.tensor([-3, -1, 2, 5, 7, 1, 1, -9, 2, 3, 4])
    for dtype in (torch.int64, torch.int8):
        torch.testing.assert_close(jitted(x.to(dtype), y.to(dtype)), function(x.to(dtype), y.to(dtype)))
    with pytest.raises(RuntimeError, match=r"integer division by zero at .*test_rejected\.py"):
        jitted(x, y.where(y != 7, 0))


def pairs() -> Iterator[tuple[str, Callable[..., Any], tuple[int, ...], tuple[int, ...]]]:
    """(label, function of two tensors, the shapes of these)."""
    matrix, row, vector, scalar = (3, 4), (4,), (4,), ()
    for name in ("hypot", "atan2", "copysign", "xlogy", "logaddexp", "heaviside", "fmod", "pow", "float_power", "sub"):
        yield name, getattr(torch, name), matrix, row
    for name in ("add", "mul", "div", "floor_divide", "remainder", "maximum", "fmin", "bitwise_and", "logical_xor"):
        yield name, getattr(torch, name), matrix, row
    for name in ("huber_loss", "smooth_l1_loss", "mse_loss", "l1_loss", "kl_div", "poisson_nll_loss"):
        yield name, getattr(F, name), matrix, matrix
        yield f"{name} none", functools.partial(getattr(F, name), reduction="none"), matrix, matrix
    for name in ("binary_cross_entropy_with_logits", "hinge_embedding_loss", "soft_margin_loss", "pairwise_distance"):
        yield name, getattr(F, name), matrix, matrix
    yield "binary_cross_entropy", lambda x, y: F.binary_cross_entropy(x / 4, y / 4), matrix, matrix
    yield "layer_norm weight", lambda x, y: F.layer_norm(x, (4,), y), matrix, row
    yield "layer_norm bias", lambda x, y: F.layer_norm(x, (4,), None, y), matrix, row
    yield "rms_norm weight", lambda x, y: F.rms_norm(x, (4,), y), matrix, row
    yield "group_norm weight", lambda x, y: F.group_norm(x, 2, y), matrix, row
    yield "group_norm bias", lambda x, y: F.group_norm(x, 2, None, y), matrix, row
    yield "cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=0), vector, vector
    yield "cosine_similarity of a 0-d tensor", lambda x, y: F.cosine_similarity(x, y, dim=0), scalar, vector
    yield "cosine_similarity with a 0-d tensor", lambda x, y: F.cosine_similarity(x, y, dim=0), vector, scalar
    yield "cross_entropy", F.cross_entropy, matrix, (3,)
    yield "cross_entropy of probabilities", F.cross_entropy, matrix, matrix
    yield "lerp", lambda x, y: torch.lerp(x, y, 0.5), matrix, matrix
    yield "prelu", F.prelu, matrix, row
    yield "where", lambda x, y: torch.where(x > 1, x, y), matrix, row
    yield "masked_fill", lambda x, y: x.masked_fill(x > 1, y), matrix, scalar
    yield "clamp", lambda x, y: x.clamp(y, y), matrix, row
    yield "fill", torch.fill, matrix, scalar
    yield "in place", lambda x, y: x.clone().add_(y), matrix, row
    yield "cat", lambda x, y: torch.cat([x, y]), matrix, matrix
    yield "linear", F.linear, matrix, (5, 4)
    yield "linear bias", lambda x, y: F.linear(x, x, y), matrix, (3,)
    yield "outer", torch.outer, vector, vector
    yield "cumulative_trapezoid", torch.cumulative_trapezoid, matrix, row


PAIRS = {label: (function, first, second) for label, function, first, second in pairs()}
QUICK_PAIRS = (
    *("smooth_l1_loss", "hypot", "cross_entropy", "cosine_similarity of a 0-d tensor", "linear", "linear bias"),
    *("rms_norm weight", "where", "masked_fill", "outer"),
)
INT_PRODUCTS = {"linear", "linear bias"}


@pytest.mark.parametrize("label", PAIRS)
@pytest.mark.quick(where=lambda label: label in QUICK_PAIRS)
def test_mixed_dtypes(label: str) -> None:
    function, *shapes = PAIRS[label]
    for first in DTYPES:
        for second in DTYPES:
            x, y = (torch.rand(shape).mul(3).add(1) for shape in shapes)
            x, y = x.to(first), y.to(second)
            try:
                want = function(x, y)
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                want = None
            try:
                (got,) = lowered(function, x, y).graph.outputs
            except (TraceError, UnsupportedError):
                got = None
            where = (first, second)
            if label in INT_PRODUCTS and first == second == torch.int64:
                continue  # not supported yet
            assert (got is None) == (want is None), (*where, got, want)
            if want is not None and got is not None:
                assert (got.dtype, len(got.shape)) == (str(want.dtype).removeprefix("torch."), want.dim()), where
