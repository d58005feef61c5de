"""What can tell the difference sees values of 16 bits as eager torch stores them; JITGEN_EAGER_ROUNDING rounds all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import jitgen

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
HALVES = (torch.float16, torch.bfloat16)

SEES: dict[str, Function] = {
    "isinf": lambda x, y: (x * x * 400).isinf(),
    "isfinite": lambda x, y: torch.isfinite(x * y * 1e4),
    "isnan": lambda x, y: (x * x * 400).isnan(),
    "as float32": lambda x, y: (x * y).float(),
    "as float64": lambda x, y: (x / 3).double(),
    "as the other half": lambda x, y: (x / 3).to(torch.bfloat16 if x.dtype == torch.float16 else torch.float16),
    "as 8 bits": lambda x, y: (x / 3).to(torch.float8_e4m3fn).float(),
    "as integers": lambda x, y: (x * 0.1).long(),
    "as bool": lambda x, y: (x * 1e-8).bool(),
    "promoted": lambda x, y: x / 3 + torch.ones(x.shape[0]),
    "equal to a number": lambda x, y: x / 10 == 0.1,
    "equal": lambda x, y: x / 3 == x * 0.3333,
    "less": lambda x, y: x / 3 < y / 9,
    "not zero": lambda x, y: (x * 1e-8).count_nonzero(),
    "sign": lambda x, y: (x * 1e-8).sign(),
    "floor": lambda x, y: (x * 0.3).floor(),
    "round": lambda x, y: (x * 0.3).round(),
    "frac": lambda x, y: (x / 3).frac(),
    "what is left of a floor": lambda x, y: x * 0.3 - (x * 0.3).floor(),
    "heaviside": lambda x, y: torch.heaviside(x * 1e-8, y),
    "argmax": lambda x, y: (x / 3).abs().argmax(),
    "cummax": lambda x, y: (x * y).cummax(0).indices,
    "sort": lambda x, y: (x * y).sort(stable=True).indices,
    "a maximum": lambda x, y: torch.maximum(x / 3, y / 7).float(),
    "an update": lambda x, y: x.clone().mul_(y).float(),
    "a sum": lambda x, y: x.sum().float() == x.sum(),
    "a product": lambda x, y: (x.reshape(-1, 20) @ y.reshape(20, -1)).float(),
    "masked_fill": lambda x, y: x.masked_fill(x > 2, 0.1).float(),
    "masked_fill, computed on": lambda x, y: x.masked_fill(x > 2, 0.1) * 1024,
    "fill_": lambda x, y: x.clone().fill_(0.1).float(),
    "where": lambda x, y: torch.where(x > 2, x, 0.1).float(),
    "pad": lambda x, y: F.pad(x, (1, 1), value=0.1).float(),
    "remainder": lambda x, y: (x / 3) % (y / 7),
    "floor_divide": lambda x, y: (x / 3) // (y / 7),
    "square root": lambda x, y: (x * x * 400).sqrt(),
    "logarithm": lambda x, y: (x * x * 400).log2(),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize(
    "then",
    [
        lambda y, z: torch.cat([y.unsqueeze(1).transpose(0, 1), z.view(1, 1, -1)], 1),
        lambda y, z: y.reshape(4, 2, -1).amax(-1),
        lambda y, z: y.view(2, 4, -1).transpose(0, 1) @ z.reshape(1, -1, 1),
    ],
    ids=["cat", "amax", "product"],
)
@pytest.mark.parametrize(
    "product",
    [
        lambda x, w, b: F.linear(x, w, b),
        lambda x, w, b: F.linear(x.view(4, 2, -1), w, b).transpose(0, 1).reshape(8, -1),
        lambda x, w, b: torch.addmm(b, x, w.T),
        lambda x, w, b: (
            torch.baddbmm(b.expand(2, 1, -1), x.view(2, 4, -1), w.T.expand(2, -1, -1)).transpose(0, 1).reshape(8, -1)
        ),
    ],
    ids=["linear", "of three dimensions", "addmm", "baddbmm"],
)
@pytest.mark.covering(1)
def test_a_product_and_its_bias_are_rounded_once(
    product: Callable[..., torch.Tensor],
    then: Function,
    switch: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole numbers, and a bias that half of them are rounded away with."""
    monkeypatch.setenv("JITGEN_EAGER_ROUNDING", switch)
    x = (torch.arange(64.0).reshape(8, 8) % 13 - 6).to(dtype)
    w = (torch.arange(128.0).reshape(16, 8) % 11 - 5).to(dtype) * 8 + 1
    b = (torch.arange(16.0) % 5 * 100 - 200.5).to(dtype)
    z = torch.eye(16)[3].to(dtype)
    rounded = product(x.float(), w.float(), b.float()).to(dtype)
    expected = then(rounded.float(), z.float()).to(dtype)
    found = jitgen.jit(lambda x, w, b, z: then(product(x, w, b), z))(x, w, b, z)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def arguments(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = (torch.arange(-200, 200) / 8).to(dtype)
    return x, (x.flip(0) * 3 + 0.5).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got.double().nan_to_num(7), want.double().nan_to_num(7))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", SEES)
@pytest.mark.covering(1)
def test_what_can_tell_the_difference(name: str, dtype: torch.dtype) -> None:
    function = SEES[name]
    x, y = arguments(dtype)
    want, got = function(x, y), jitgen.jit(function)(x, y)
    if name in ("a product", "square root", "logarithm"):  # sums in another order; functions to an ulp
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-2, equal_nan=True)
        assert same(got.isinf(), want.isinf())
    else:
        assert same(got, want)


NUMBERS = (0.1, -0.7, 1 / 3, 3.3)
DIVISIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "//": lambda x, n: x // n,
    "%": lambda x, n: x % n,
    "fmod": torch.fmod,
    "floor": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "trunc": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "number %": lambda x, n: n % x,
    "number //": lambda x, n: n // x,
    "in place": lambda x, n: x.clone().remainder_(n),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.covering(1)
def test_divisions_by_numbers(name: str, dtype: torch.dtype) -> None:
    function = DIVISIONS[name]
    x = (torch.arange(-300, 301) / 8).to(dtype)
    x = x[x != 0]
    constants = jitgen.jit(lambda x: [function(x, number) for number in NUMBERS])
    for number, got in zip(NUMBERS, constants(x), strict=True):
        assert same(got, function(x, number)), number
    assert same(jitgen.jit(function)(x, 0.1), function(x, 0.1)), "a number that is an argument"


def test_arithmetic_runs_on_unless_eager_rounding_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([300.0, 1.0, 2049.0]).half()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * x * 0.001 + F.silu(x)

    def decorated() -> torch.Tensor:
        return jitgen.jit(lambda x: function(x))(x)

    assert function(x).isinf().any()
    assert decorated().isfinite().all()
    monkeypatch.setenv("JITGEN_EAGER_ROUNDING", "1")
    assert same(decorated(), function(x))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_eager_rounding_rounds_each_function(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_EAGER_ROUNDING", "1")
    x, y = arguments(dtype)
    chain = lambda x, y: ((x * y + x) / 3 - y * 0.7).abs() * x - (x / 7 + y / 11) * 3  # noqa: E731
    assert same(jitgen.jit(chain)(x, y), chain(x, y))
    grads = []
    for function in (chain, jitgen.jit(chain)):
        leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        grads.append(torch.autograd.grad(function(*leaves).sum(), leaves))
    for want, got in zip(*grads, strict=True):  # what several uses add up to is rounded in another order
        few = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, want, rtol=few, atol=few * want.abs().max().item())


def test_gradients_see_what_is_stored() -> None:
    x = torch.tensor([300.0, 1.0, 2.0]).half()
    function = lambda x: torch.where((x * x).isinf(), x * 2, x * 3)  # noqa: E731
    grads = []
    for each in (function, jitgen.jit(function)):
        leaf = x.clone().requires_grad_()
        grads.append(torch.autograd.grad(each(leaf).sum(), leaf)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("triton", "sm_90a"), ("cpp", "x86-64-v3")])
def test_every_dialect_rounds(backend: str, target: str) -> None:
    x = torch.ones(4, 64, dtype=torch.float16)
    function = jitgen.jit(lambda x: ((x * x).isinf(), (x / 3).float()))
    body = function.lower(x, backend=backend, target=target).lowered.program.kernels[0].bodies[0]
    rounded = {i.args[0] for i in body.instructions if i.op == "round_to" and i.attr == "float16"}
    assert {body.instructions[position].op for position in rounded} == {"mul", "div"}
    plain = jitgen.jit(lambda x: (x * x / 3).relu() + 1)
    body = plain.lower(x, backend=backend, target=target).lowered.program.kernels[0].bodies[0]
    assert not any(i.op == "round_to" for i in body.instructions)
