"""``jitgen.nn.Float8Linear``: its products and gradients beside float64 products of the codes, and a training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import jitgen
from jitgen.errors import TraceError, UnsupportedError
from jitgen.nn import Float8Linear, convert_linears


def rounded(x: torch.Tensor, dtype: torch.dtype, by_row: bool) -> torch.Tensor:
    """What the codes of ``x`` stand for, in float64."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True) if by_row else wide.abs().amax().reshape(1, 1)
    scales = (largest * (1 / {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}[dtype])).clamp(min=2.0**-126)
    return (wide * scales.reciprocal()).to(dtype).double() * scales.double()


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_products_and_gradients_are_those_of_the_codes(scaling: str) -> None:
    torch.manual_seed(3)
    by_row, e4m3, e5m2 = scaling == "row", torch.float8_e4m3fn, torch.float8_e5m2
    layer = Float8Linear(48, 33, scaling=scaling)
    x = (torch.randn(2, 9, 48) * torch.logspace(-2, 2, 9)[:, None]).requires_grad_()
    seed = torch.randn(2, 9, 33)
    found = layer(x)
    found.backward(seed)
    rows, grads, weight = x.detach().reshape(-1, 48), seed.reshape(-1, 33), layer.weight.detach()
    wanted = rounded(rows, e4m3, by_row) @ rounded(weight, e4m3, by_row).T + layer.bias.detach().double()
    assert_near(found.detach().reshape(-1, 33), wanted)
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert_near(x.grad.reshape(-1, 48), rounded(grads, e5m2, by_row) @ rounded(weight.T, e4m3, by_row).T)
    assert_near(layer.weight.grad, rounded(grads.T, e5m2, by_row) @ rounded(rows.T, e4m3, by_row).T)
    assert_near(layer.bias.grad, grads.double().sum(0))


def test_zeros_and_nothing() -> None:
    layer = Float8Linear(32, 16, bias=False)
    assert (layer(torch.zeros(3, 32)) == 0).all()
    assert layer(torch.zeros(0, 32)).shape == (0, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 32)).dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match="'row', 'tensor'"):
        Float8Linear(4, 4, scaling="block")


def test_what_a_linear_refuses_is_refused() -> None:
    layer = Float8Linear(32, 16)
    for x in (torch.ones(2, 32, dtype=torch.int32), torch.ones(2, 31), torch.ones(())):
        with pytest.raises(UnsupportedError, match=r"takes floats of shape \(..., 32\)"):
            layer(x)
    with pytest.raises(TraceError, match=r"_Float8Product, a torch.autograd.Function"):
        jitgen.jit(lambda x: layer(x) * 2)(torch.ones(2, 32))


def test_a_trained_layer_is_quantised_as_a_linear() -> None:
    model = nn.Sequential(nn.Linear(48, 33))
    convert_linears(model)
    x = torch.randn(5, 48)
    jitgen.quantize_(model, "fp8_e4m3", activation="fp8_e4m3")
    weight, bias = model[0].weight, model[0].bias
    assert isinstance(weight, jitgen.QTensor)
    with torch.no_grad():
        wanted = rounded(x, torch.float8_e4m3fn, True) @ weight.dequantize(torch.float64).T + bias.double()
        assert_near(model(x), wanted)


def test_functional_gradients_are_those_of_autograd() -> None:
    layer, x = Float8Linear(16, 8), torch.randn(3, 16)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,)).square().sum()

    loss(layer.weight).backward()
    assert layer.weight.grad is not None
    assert torch.equal(torch.func.grad(loss)(layer.weight.detach()), layer.weight.grad)


def test_training_reaches_the_loss_of_floats() -> None:
    def loss_after(convert: bool) -> float:
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).requires_grad_(False)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        if convert:
            assert convert_linears(model) == ["0", "2"]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        x = torch.randn(512, 32)
        for step in range(150):
            rows = x[step * 64 % 512 :][:64]
            loss = nn.functional.mse_loss(model(rows), teacher(rows))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            return nn.functional.mse_loss(model(x), teacher(x)).item()

    plain, narrow = loss_after(False), loss_after(True)
    before = 0.2
    assert plain < before / 10
    assert narrow < before / 5
