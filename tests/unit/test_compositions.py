"""Compositions beyond the samples of ``tests/conformance``: fresh random data, edges of domains, updates, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import jitgen
from jitgen.errors import TraceError, UnsupportedError

# ---------------------------------------------------------------------------------------------------- special functions

POSITIVE, UNIT, ANY = (0.0, 40.0), (-1.0, 1.0), (-20.0, 20.0)
SPECIAL: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[float, float]]] = {
    "lgamma": (torch.lgamma, ANY),
    "digamma": (torch.digamma, ANY),
    "trigamma": (lambda x: torch.polygamma(1, x), POSITIVE),
    "polygamma of order 3": (lambda x: torch.polygamma(3, x), ANY),
    "erfinv": (torch.erfinv, UNIT),
    "ndtri": (lambda x: torch.special.ndtri(x.abs()), UNIT),
    "erfcx": (torch.special.erfcx, (-4.0, 40.0)),
    "log_ndtr": (torch.special.log_ndtr, ANY),
    "i0": (torch.i0, ANY),
    "i0e": (torch.special.i0e, ANY),
    "i1": (torch.special.i1, ANY),
    "i1e": (torch.special.i1e, ANY),
    "spherical_bessel_j0": (torch.special.spherical_bessel_j0, ANY),
}
FORMULA = 64
"""Roundings of the longest of these formulas, at most."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.quick(where=lambda name, dtype: dtype == torch.float32 and name == "erfcx")
def test_special_functions(name: str, dtype: torch.dtype) -> None:
    """Within some roundings of float64's result, and of what a rounding of the argument makes of it."""
    function, (low, high) = SPECIAL[name]
    inside = torch.rand(300, dtype=torch.float64) * (high - low) + low
    edges = [edge for edge in (0.0, 1.0, 2.0, -1.0, 0.5) if low <= edge <= high]
    edges += [low, high, math.inf, math.nan]
    x = torch.cat([inside, inside * 1e-6, torch.tensor(edges, dtype=torch.float64)]).to(dtype)
    result, exact, eager = jitgen.jit(function)(x), function(x.double()), function(x)
    eps = torch.finfo(dtype).eps
    moved = (function(x.double() * (1 + 2**-30)) - exact).abs() * 2**30 * eps
    near = (result.double() - exact).abs() <= FORMULA * (eps * exact.abs() + moved.nan_to_num(0.0, 0.0, 0.0))
    wrong = ~(near | (result == eager) | (result.isnan() & eager.isnan()))
    assert not wrong.any(), (x[wrong], result[wrong], exact[wrong])


def _gradient(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    found = [result for result in tree_leaves(function(x)) if result.requires_grad]
    generator = torch.Generator().manual_seed(1)
    given = [torch.rand(result.shape, generator=generator, dtype=result.dtype) for result in found]
    return torch.autograd.grad(found, x, given)[0]


@pytest.mark.parametrize("name", [name for name in SPECIAL if name != "spherical_bessel_j0"])
@pytest.mark.quick(where=lambda name: name in ("erfinv", "ndtri", "log_ndtr"))
def test_gradients_of_special_functions(name: str) -> None:
    """The derivative of each formula, which is right to fewer digits than the formula, is that of eager torch."""
    function, (low, high) = SPECIAL[name]
    inside = torch.rand(100, dtype=torch.float64) * (high - low) + low
    edges = [edge for edge in (0.5, 1.0, 2.0, 20.0, 40.0) if low <= edge <= high]
    edges += {"erfinv": [-1.0, 0.0, 2.0, math.nan], "ndtri": [-1.0, 0.0, 2.0, math.nan]}.get(name, [])
    x = torch.cat([inside, inside * 1e-6, torch.tensor(edges, dtype=torch.float64)])
    torch.testing.assert_close(
        _gradient(jitgen.jit(function), x), _gradient(function, x), rtol=1e-7, atol=1e-10, equal_nan=True
    )


@pytest.mark.slow
def test_the_gradient_of_a_function_of_which_torch_has_none() -> None:
    x = torch.cat([torch.linspace(0.1, 20, 99, dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)])
    expected = torch.where(x == 0, 0.0, (x * x.cos() - x.sin()) / (x * x))
    found = _gradient(jitgen.jit(lambda x: torch.special.spherical_bessel_j0(x)), x)
    given = torch.rand(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    torch.testing.assert_close(found, given * expected, rtol=1e-7, atol=1e-10)


def test_a_polynomial_of_unknown_degree_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="degree"):
        jitgen.jit(torch.special.hermite_polynomial_h)(torch.randn(3), torch.tensor([1, 2, 3]))


# --------------------------------------------------------------------------------------------------------- convolutions


def _bound(x: torch.Tensor, weight: torch.Tensor, function: Callable[..., torch.Tensor]) -> torch.Tensor:
    """What a sum of float32 products may be wrong by: the sum of their sizes times the roundings of a sum in order."""
    length = weight[0].numel() + 1
    return length * torch.finfo(torch.float32).eps * function(x.abs().double(), weight.abs().double())


@pytest.mark.parametrize(
    ("shape", "weight", "options"),
    [
        ((2, 3, 9), (4, 3, 1), {}),
        ((2, 4, 7, 6), (6, 2, 3, 2), {"stride": (2, 1), "padding": (2, 1), "dilation": (1, 2), "groups": 2}),
        ((3, 5, 5), (2, 3, 2, 2), {"padding": "same"}),
    ],
    ids=["pointwise", "groups", "same"],
)
@pytest.mark.quick(where=lambda options: "groups" in options)
def test_convolutions(shape: Any, weight: Any, options: Any) -> None:
    function = getattr(F, f"conv{len(weight) - 2}d")

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return function(x, w, **options)

    x, w = torch.randn(shape), torch.randn(weight)
    got, exact = jitgen.jit(call)(x, w), call(x.double(), w.double())
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= _bound(x, w, call)).all()


# ------------------------------------------------------------------------------------------------------- normalisations


def test_batch_norm_moves_running_statistics() -> None:
    def step(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, var, training=True, momentum=0.2)

    x, start = torch.randn(6, 3, 5) * 2 + 1, (torch.randn(3), torch.rand(3))
    ours, theirs = [t.clone() for t in start], [t.clone() for t in start]
    jitted = jitgen.jit(step)
    for _ in range(2):
        got, want = jitted(x, *ours), step(x, *theirs)
        torch.testing.assert_close([got, *ours], [want, *theirs])
    assert not torch.equal(ours[0], start[0])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
@pytest.mark.covering(1)
def test_batch_norm_of_a_module_in_training(momentum: Any, grad: bool) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3, momentum=momentum)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).relu() * 2

    eager, module = Block().requires_grad_(grad), Block().requires_grad_(grad)
    jitted = jitgen.jit(module)
    for step in range(4):
        if step == 2:
            eager.eval(), module.eval()
        elif step == 3:
            eager.train(), module.train()
        x, y = (torch.linspace(-1, 2 + step, 12).reshape(4, 3).requires_grad_(grad) for _ in range(2))
        got, want = jitted(x), eager(y)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))
        if grad:
            (got**2).sum().backward(), (want**2).sum().backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                [p.grad for p in module.parameters()], [p.grad for p in eager.parameters()], rtol=1e-4, atol=1e-5
            )
    assert int(module.norm.num_batches_tracked) == 3


def test_updates_of_captured_tensors() -> None:
    buffer, rows = torch.zeros(4, 3), torch.ones(4, 3)

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal rows
        buffer[1:3] += x[0]
        rows += buffer
        rows.mul_(2)
        return x + rows[1] * buffer.sum(0)

    x, jitted = torch.linspace(0, 1, 6).reshape(2, 3), jitgen.jit(function)
    kept = buffer, rows
    for _ in range(2):
        before = buffer.clone(), rows.clone()
        got, after = jitted(x), (buffer.clone(), rows.clone())
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)
        torch.testing.assert_close(got, function(x))
        torch.testing.assert_close((buffer, rows), after)
    assert kept[0] is buffer
    assert kept[1] is rows


# --------------------------------------------------------------------------------------------------------------- shapes


def test_sizes_that_are_negative_arguments() -> None:
    """-1 is a size to be found whether it stands in the function or is an argument; a call with another is traced."""
    reshaped = jitgen.jit(lambda x, m, n: x.reshape(m, n))
    x = torch.arange(12.0)
    for m, n in ((3, -1), (-1, 4), (2, 6), (4, -1)):
        assert torch.equal(reshaped(x, m, n), x.reshape(m, n))


def test_a_divisor_that_is_a_product_of_sizes() -> None:
    x = torch.arange(36.0)
    for m, n in ((2, 3), (3, 2)):
        torch.testing.assert_close(
            jitgen.jit(lambda x, m, n: x.reshape(m, n, -1).mean(2))(x, m, n), x.reshape(m, n, -1).mean(2)
        )


def test_joining_nothing_and_cutting_edges() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    joined = jitgen.jit(lambda a, b: torch.cat([a, b]))(empty, torch.zeros(0))
    assert (joined.shape, joined.dtype) == ((0,), torch.float32)
    x = torch.randn(4, 6)
    assert torch.equal(jitgen.jit(lambda x: F.pad(x, (-1, 2, 1, -3)))(x), F.pad(x, (-1, 2, 1, -3)))


def test_numbers_in_a_list_become_a_tensor() -> None:
    jitted = jitgen.jit(lambda x, a: x + torch.tensor([[1, a], [2.5, -a]]))
    for a in (3, 0.5):
        want = torch.eye(2) + torch.tensor([[1, a], [2.5, -a]])
        assert torch.equal(jitted(torch.eye(2), a), want)
    with pytest.raises(TraceError, match="equal lengths"):
        jitgen.jit(lambda x: x + torch.tensor([[1, 2], [3]]))(torch.eye(2))


# ---------------------------------------------------------------------------------------------- elements put into place

X, MASK, ROWS = torch.randn(5, 6), torch.rand(5, 6) > 0.4, torch.tensor([4, 0, 2, 2, 1, 3, 0])
OFFSETS = torch.tensor([0, 3, 3, 5])
PLACED: dict[str, Callable[..., Any]] = {
    "masked_scatter": lambda x: x.masked_scatter(MASK, x.flip(0)),
    "masked_scatter of a mask that broadcasts": lambda x: x.masked_scatter(MASK[0], x.flip(0)),
    "masked_scatter in place": lambda x: x.clone().masked_scatter_(MASK, x.flip(0)),
    "nonzero_static": lambda x: torch.nonzero_static(x > 0, size=7),
    "nonzero_static with a fill": lambda x: torch.nonzero_static(x > 1, size=40, fill_value=-5),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x[None], 2, return_indices=True), 2, output_size=(5, 6)),
    "max_unpool1d": lambda x: F.max_unpool1d(*F.max_pool1d(x[None], 3, return_indices=True), 3),
    "combinations": lambda x: torch.combinations(x[0], 3, with_replacement=False),
    "vander": lambda x: torch.vander(x[0], 4),
    "vander, increasing": lambda x: torch.vander(x[0], increasing=True),
    "fftshift": lambda x: (torch.fft.fftshift(x), torch.fft.ifftshift(x, 0)),
    "weight_norm": lambda x: torch._weight_norm(x, x[:, :1], 0),
    **{
        f"embedding_bag {mode}": lambda x, mode=mode: (
            F.embedding_bag(ROWS, x, OFFSETS, mode=mode, padding_idx=2),
            F.embedding_bag(ROWS.reshape(1, -1), x, mode=mode),
        )
        for mode in ("sum", "mean", "max")
    },
}


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.quick(where=lambda name: name in ("masked_scatter", "nonzero_static", "vander", "embedding_bag mean"))
def test_elements_in_place(name: str) -> None:
    torch.testing.assert_close(jitgen.jit(PLACED[name])(X), PLACED[name](X))


WITHOUT_GRADIENT = {"nonzero_static", "nonzero_static with a fill", "vander", "vander, increasing", "embedding_bag max"}
"""Results that are indices, and what ``docs/gradients.md`` says is refused."""


@pytest.mark.parametrize("name", [name for name in PLACED if name not in WITHOUT_GRADIENT])
@pytest.mark.quick(where=lambda name: name in ("masked_scatter", "embedding_bag mean"))
def test_gradients_of_elements_in_place(name: str) -> None:
    x = X.double()
    torch.testing.assert_close(_gradient(jitgen.jit(PLACED[name]), x), _gradient(PLACED[name], x))


def test_too_few_elements_for_a_mask_are_an_error() -> None:
    with pytest.raises(IndexError):
        jitgen.jit(lambda x, values: x.masked_scatter(x == x, values))(X, X[0])
