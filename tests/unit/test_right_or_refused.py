"""Calls that once ended in an error of Python's own, or of the process: each is right, or refused by name and line."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.errors import TraceError, UnsupportedError
from tests import fresh

a, square, vector = torch.randn(5, 7), torch.randn(6, 6), torch.randn(7)
x, w, c, v = torch.randn(2, 5, 8), torch.randn(8, 6), torch.randn(2, 8), torch.randn(8, 6)
images = torch.randn(2, 3, 6, 7).to(memory_format=torch.channels_last)
sparse = torch.eye(4).to_sparse()


class Attributes(dict):
    __getattr__ = dict.__getitem__


attributes = Attributes(scale=2.0, inner=Attributes(weight=vector))

RIGHT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "tril, sum": (lambda a: a.tril().sum(), (a,)),
    "arange, sum": (lambda a: (a * torch.arange(7)).sum(), (a,)),
    "layer_norm over transposed trailing dimensions": (
        lambda a: F.layer_norm(a, (5, 8)),
        (x.transpose(1, 2).contiguous().transpose(1, 2),),
    ),
    "channels last": (lambda a: F.layer_norm(a, a.shape[1:]), (images,)),
    "group_norm of channels last": (lambda a: F.group_norm(a, 3), (images,)),
    "mean over both dimensions of a transpose": (lambda a: a - a.mean((0, 1), keepdim=True), (a.T,)),
    "a product that broadcasts over another": (lambda x, w, c, v: (x @ w) * (c @ v)[:, None], (x, w, c, v)),
    "a sum of products of two shapes": (lambda x, w, y, v: x @ w + y @ v, (x, w, x[0], v)),
    "a sum of products of one shape": (lambda x, w, y, v: x @ w + y @ v, (x, w, x.flip(0), v)),
    "attribute dicts": (lambda a: a * attributes.scale + attributes.inner.weight, (a,)),
    "roll of a transpose": (lambda a: a.roll(2), (a.T,)),
    "roll of a transposed dimension": (lambda a: a.roll(2, 0), (a.T,)),
    "no inputs": (lambda: torch.ones(3) * 2, ()),
    "cosine_similarity": (lambda a, b: F.cosine_similarity(a, b), (a, a + 1)),
    "cosine_similarity of broadcast operands": (lambda a, b: F.cosine_similarity(a, b, -1), (a, vector)),
    "cosine_similarity of vectors": (lambda a, b: F.cosine_similarity(a, b, 0), (vector, vector + 1)),
    "cosine_similarity of a 0-d operand": (lambda a, b: F.cosine_similarity(a, b, 0), (vector, torch.tensor(2.0))),
    "linear of three dimensions": (lambda x, w: F.linear(x, w), (x, w.T)),
    "a size as text": (lambda a: a * len(f"{a.shape[0]} {a.numel():6d} {a.shape}"), (a,)),
    "a float stored among ints": (lambda a, n: torch.full((3,), n, dtype=torch.int32) * a.sum(), (a, 1.5)),
    "a number of 2**63": (lambda a, n: a + n, (a, 2**63)),
    "variance of a 0-d half": (lambda a: a.var(0), (torch.tensor(2.0, dtype=torch.float16),)),
    "variance of a 0-d bfloat16": (lambda a: torch.var_mean(a), (torch.tensor(2.0, dtype=torch.bfloat16),)),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.quick(where=lambda case: list(RIGHT).index(case) % 3 == 0)
def test_right(case: str) -> None:
    function, arguments = RIGHT[case]
    want = function(*arguments)
    got = jitgen.jit(function)(*arguments)
    torch.testing.assert_close(got, want, equal_nan=True)
    if isinstance(want, torch.Tensor) and want.ndim:
        strided = torch.full((*want.shape[:-1], 2 * want.shape[-1]), torch.nan)[..., ::2]
        transposed = torch.full(want.T.shape, torch.nan).T if want.ndim == 2 else torch.full(want.shape, torch.nan)
        for out in (strided, transposed):
            for _ in range(2):
                assert jitgen.jit(function)(*arguments, out=out) is out
                torch.testing.assert_close(out, want)


class Holder:
    def __init__(self, value: Any):
        self.value = value


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a type that is compared": (lambda a: a if type(a) is torch.Tensor else a * 2, (a,)),
    "a type among types": (lambda a: a if type(a) in (torch.Tensor, torch.nn.Parameter) else a * 2, (a,)),
    "vmap": (lambda a: torch.vmap(lambda row: row * 2)(a), (a,)),
    "grad": (lambda a: torch.func.grad(lambda a: (a * a).sum())(a), (a,)),
    "jvp": (lambda a: torch.func.jvp(torch.sin, (a,), (a,)), (a,)),
    "torch.Tensor.add": (lambda a: torch.Tensor.add(a, a), (a,)),
    "a captured sparse tensor": (lambda a: a @ sparse, (square[:4, :4],)),
    "a comparison with an object": (lambda a: a >= Holder(1), (a,)),
    "a comparison of a tensor with a string": (lambda a: a < "1", (a,)),
    "a branch on data": (lambda a: a if a.sum() > 0 else -a, (a,)),
    "a loop over data": (lambda a: sum(range(a.sum())), (a,)),
    "a dimension that is not there": (lambda a: a.sum(5), (a,)),
    "a dimension of a name": (lambda a: a.sum("rows"), (a,)),
    "an index that is too large": (lambda a: a[9], (a,)),
    "too many indices": (lambda a: a[0, 0, 0], (a,)),
    "transposing a missing dimension": (lambda a: a.transpose(0, 4), (a,)),
    "a permutation that is short": (lambda a: a.permute(0), (a,)),
    "a reshape that does not fit": (lambda a: a.reshape(4, -1), (a,)),
    "an expansion that does not fit": (lambda a: a.expand(4, 4), (a,)),
    "a product that does not fit": (lambda a: a @ a, (a,)),
    "a product of a number": (lambda a: a @ 2, (a,)),
    "shapes that do not broadcast": (lambda a: a + a.T, (a,)),
    "a list of nothing": (lambda a: torch.cat([]), (a,)),
    "a concatenation of other shapes": (lambda a: torch.cat([a, a.T]), (a,)),
    "a split into no pieces": (lambda a: a.split(0), (a,)),
    "a negative narrow": (lambda a: a.narrow(0, 0, -1), (a,)),
    "an einsum of nonsense": (lambda a: torch.einsum("ij,jk->q", a, a), (a,)),
    "an einsum of other ranks": (lambda a: torch.einsum("ijk->i", a), (a,)),
    "a norm of another shape": (lambda a: F.layer_norm(a, (3,)), (a,)),
    "groups that do not divide": (lambda a: F.group_norm(a, 2), (a,)),
    "a clamp by a string": (lambda a: a.clamp("0"), (a,)),
    "a clamp of nothing": (lambda a: a.clamp(), (a,)),
    "a dtype that is none": (lambda a: a.to("floats"), (a,)),
    "a pad that is too short": (lambda a: F.pad(a, (1,)), (a,)),
    "a where of one": (lambda a: torch.where(a), (a,)),
    "a scan of no dimension": (lambda a: a.cumsum(3), (a,)),
    "a view of other size": (lambda a: a.view(3, 3), (a,)),
    "shifts for other dimensions": (lambda a: a.roll((1, 2), 0), (a,)),
    "a flip of a missing dimension": (lambda a: a.flip(4), (a,)),
    "bits of floats": (lambda a: a & a, (a,)),
    "bits of a float and an int": (lambda a: a.long() << 0.5, (a,)),
    "an update of another shape": (lambda a: a.add_(a.T), (a.clone(),)),
    "a softmax of no dimension": (lambda a: torch.softmax(a, 5), (a,)),
    "a loss of other shapes": (lambda a: F.cross_entropy(a, torch.arange(3)), (a,)),
    "a bias of another size": (lambda a: F.linear(a, torch.ones(3, 7), torch.ones(4)), (a,)),
}
INTERNAL = ("Node", "Proxy", "Expr", "Symbolic", "tuple index", "list index", "NoneType", "unpack", "KeyError")


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    function, arguments = REFUSED[case]
    with pytest.raises((TraceError, UnsupportedError)) as caught:
        jitgen.jit(function)(*arguments)
    text, _, where = str(caught.value).partition("\n  at ")
    assert where.startswith(__file__), str(caught.value)
    assert not [name for name in INTERNAL if name in text], text


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.shape[5],
        lambda a: torch.stack([1, 2]),
        lambda a: torch.full((2,), "1"),
        lambda a: torch.arange(None),
        lambda a: a + missing,  # type: ignore[name-defined]  # noqa: F821
        lambda a: a * [1.0][2],
    ],
)
def test_mistakes_that_are_not_about_tensors_are_those_of_eager_torch(function: Callable[..., Any]) -> None:
    with pytest.raises(Exception) as eager:
        function(a)
    with pytest.raises(type(eager.value)) as ours:
        jitgen.jit(function)(a)
    assert str(ours.value) == str(eager.value)
    assert ours.traceback[-1].path == eager.traceback[-1].path


def test_tensors_that_are_no_plain_memory() -> None:
    """In a process of its own, because torch itself once ended it."""
    program = """
import torch, jitgen
twice = jitgen.jit(lambda x: x * 2)
nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])
for make in (lambda: torch._efficientzerotensor(3), lambda: torch.eye(3).to_sparse(), lambda: nested):
    tensor = make()
    captures = jitgen.jit(lambda x: x * tensor)
    for call in (lambda: twice(tensor), lambda: captures(torch.ones(3)), lambda: twice(x=tensor)):
        try:
            call()
        except jitgen.UnsupportedError as error:
            print("refused", error)
try:
    torch.vmap(twice.bind(torch.ones(3)))(torch.ones(2, 3))
except jitgen.UnsupportedError as error:
    print("refused", error)
"""
    done = fresh.run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 10, done.stdout


# ------------------------------------------------------------------------------------------------ copies, and pickles


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7), requires_grad=False)

    @jitgen.jit
    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return x * self.weight * scale


@jitgen.jit
def decorated(x: Any) -> Any:
    return x * 3


def test_copies_and_pickles_after_a_call() -> None:
    model, out = Model(), torch.empty(5, 7)
    for call in (lambda f: f(a), lambda f: f(x=a), lambda f: f(a, out=out)):
        call(model.forward)
        call(decorated)
    want = model(a)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (
        *(copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))),
        torch.load(file, weights_only=False),
    ):
        torch.testing.assert_close(copied(a), want)
        torch.testing.assert_close(copied.forward(a, out=out), want)
    copied = copy.deepcopy(model)
    copied.weight.fill_(2)
    torch.testing.assert_close(copied(x=a), a * 2)
    torch.testing.assert_close(model(x=a), want)
    for again in (copy.deepcopy(decorated), pickle.loads(pickle.dumps(decorated))):
        torch.testing.assert_close(again(a), a * 3)


def test_a_variance_of_nothing_is_nan_for_any_correction() -> None:
    assert jitgen.jit(lambda a: a.var(0, correction=-1))(a[:0]).isnan().all()


def test_transforms_outside_of_a_trace_go_on() -> None:
    with pytest.raises(TraceError, match="vmap"):
        jitgen.jit(lambda a: torch.vmap(torch.sin)(a))(a)
    assert torch.equal(torch.vmap(torch.sin)(a), a.sin())
    assert torch.equal(torch.func.grad(lambda a: (a * a).sum())(a), 2 * a)


def test_out_of_a_function_without_inputs() -> None:
    out = torch.full((3,), torch.nan)
    twos = jitgen.jit(lambda: torch.ones(3) * 2)
    for _ in range(2):
        assert twos(out=out) is out
        torch.testing.assert_close(out, torch.full((3,), 2.0))
        out.fill_(torch.nan)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_warm_calls() -> None:
    """torch's check of a layout would end the process at their strides."""
    x = torch.randn(4, 5)
    nested = torch.nested.nested_tensor([x, x])
    function = jitgen.jit(lambda x, y: x * 2 + y)
    plan, out = function.bind(x, x), torch.empty_like(x)
    function(x, x), plan(x, x), plan(x, x, out=out), plan(x, x, out=out)
    for call in (
        lambda: function(nested, x),
        lambda: function(x, nested),
        lambda: plan(nested, x),
        lambda: plan(x, x, out=nested),
    ):
        with pytest.raises(UnsupportedError, match="nested"):
            call()
    torch.testing.assert_close(function(x, x), x * 3)


def test_a_mask_of_one_dimension_is_refused_as_by_eager_torch() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(TraceError, match="at least two dimensions"):
        jitgen.jit(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m))(q, torch.zeros(4))


@pytest.mark.parametrize("shape", [(2, 3, 7), (2, 3, 5, 9)], ids=str)
def test_adaptive_pools_of_uneven_windows(shape: tuple[int, ...]) -> None:
    """Windows of different sizes are read as the longest, in as many kernels as there are dimensions, not windows."""
    x, count, outputs = torch.randn(shape), len(shape) - 2, (4, 7)[: len(shape) - 2]
    average, largest = (getattr(F, f"adaptive_{kind}_pool{count}d") for kind in ("avg", "max"))
    mean, most = jitgen.jit(lambda x: average(x, outputs)), jitgen.jit(lambda x: largest(x, outputs, True))
    wide = x.double()
    assert ((mean(x).double() - average(wide, outputs)).abs() <= 2**-22 * average(wide.abs(), outputs)).all()
    for found, wanted in zip(most(x), largest(x, outputs, True), strict=True):
        assert torch.equal(found, wanted)
    assert len(mean.lower(x).kernels) <= 4 * count
