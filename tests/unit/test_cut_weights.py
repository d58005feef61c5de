"""Rows and columns of quantised weights that are cut within a decorated function are those of a copy of the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.errors import UnsupportedError

Function = Callable[[torch.Tensor, Any], torch.Tensor]
IDS = torch.tensor([1, 0, 2])


def check(function: Function, x: torch.Tensor, weight: Any, tolerance: float = 2.0**-16) -> None:
    wanted = function(x.double(), weight.dequantize(torch.float64))
    found = jitgen.jit(function)(x, weight)
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm()


ROWS: dict[str, Function] = {
    "within a tile": lambda x, w: F.linear(x, w[3:20]),
    "from a tile on": lambda x, w: F.linear(x, w[16:21]),
    "the last": lambda x, w: F.linear(x, w[-5:]),
    "in steps": lambda x, w: F.linear(x, w[1::3]),
    "of rows": lambda x, w: F.linear(x, w[4:][4:][4:20]),
    "by a size": lambda x, w: F.linear(x, w[x.shape[0] :]),
    "one": lambda x, w: x @ w[5],
    "transposed": lambda x, w: x @ w.T[:, 3:],
    "on the left": lambda x, w: w[3:20] @ x.T,
    "of a reshape": lambda x, w: F.linear(x, w.reshape(6, 8, 64)[1]),
    "pieces": lambda x, w: torch.cat([F.linear(x, piece) for piece in w.split([5, 20, 23])], -1),
    "halves": lambda x, w: F.silu(F.linear(x, w.chunk(2)[0])) * F.linear(x, w.chunk(2)[1]),
    "einsum": lambda x, w: torch.einsum("mk,nk->mn", x, w[3:20]),
}
COLUMNS: dict[str, Function] = {
    "the first": lambda x, w: F.linear(x, w[:, :64]),
    "the last": lambda x, w: F.linear(x, w[:, -64:]),
    "within groups": lambda x, w: F.linear(x, w[:, 5:69]),
    "of rows": lambda x, w: F.linear(x, w[3:20, 64:][:, :64]),
    "of one row": lambda x, w: x @ w[5, 32:96],
    "transposed": lambda x, w: x @ w.T[64:128, 3:],
    "on the left": lambda x, w: w[:, 64:128] @ x.T,
    "pieces": lambda x, w: sum(F.linear(x, piece) for piece in w.chunk(2, 1)),
    "by a size": lambda x, w: F.linear(x, w[:, x.shape[1] : 2 * x.shape[1]]),
    "einsum": lambda x, w: torch.einsum("mk,nk->mn", x, w[:, :64]),
}
MATRICES: dict[str, Function] = {
    "columns of one": lambda x, w: F.linear(x[:, :32], w[0][:, 32:]),
    "of some": lambda x, w: F.linear(x, w[1:4][1]),
    "of every other one": lambda x, w: F.linear(x, w[::2][1]),
    "unbound": lambda x, w: sum(F.linear(x, matrix) for matrix in w) + F.linear(x, w.unbind(0)[1]),
    "selected": lambda x, w: F.linear(x, w.select(0, -1)),
    "einsum of chosen ones": lambda x, w: torch.einsum("bk,bnk->bn", x, w[IDS]),
    "einsum of all": lambda x, w: torch.einsum("enk,emk->men", w, x.repeat(6, 1, 1)),
    "rows of one": lambda x, w: F.linear(x, w[2][3:20]),
    "rows of one, by a pair": lambda x, w: F.linear(x, w[2, 3:20]),
    "rows of all": lambda x, w: (x.unsqueeze(1) @ w[:, 16:32][IDS].mT).squeeze(1),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    check(ROWS[name], torch.randn(3, 64), jitgen.quantize(torch.randn(48, 64), "int4", 32))


@pytest.mark.parametrize(("format", "group"), [("int8", None), ("nf4", 32), ("fp8_e4m3.rows128", 128), ("uint4", 32)])
def test_formats(format: str, group: int | None) -> None:
    weight = jitgen.quantize(torch.randn(272, 256), format, group)
    check(lambda x, w: F.linear(x, w[7:20]) + F.linear(x, w[130:143]), torch.randn(3, 256), weight)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns(name: str) -> None:
    check(COLUMNS[name], torch.randn(3, 64), jitgen.quantize(torch.randn(48, 128), "int4", 32))


@pytest.mark.parametrize(
    ("format", "activation"), [("uint4", "int8"), ("fp8_e4m3", "fp8_e4m3.block128"), ("nf4", None)]
)
def test_columns_in_other_formats(format: str, activation: str | None) -> None:
    """Zeros for the other columns change neither the scales of an activation nor what zero-points take off."""
    weight = jitgen.quantize(torch.randn(48, 512), format, 128, activation=activation)
    x = torch.randn(3, 256)
    cut = jitgen.jit(lambda x, w: F.linear(x, w[:, 128:384]))
    found = cut(x, weight)
    assert (found - F.linear(x, weight[:, 128:384])).norm() <= 2.0**-16 * found.norm()


def test_gradients_of_columns() -> None:
    x, weight = torch.randn(3, 64, requires_grad=True), jitgen.quantize(torch.randn(48, 128), "int4", 32)
    (grad,) = torch.autograd.grad(jitgen.jit(COLUMNS["within groups"])(x, weight).sum(), x)
    wanted = weight.dequantize(torch.float64)[:, 5:69].sum(0).expand(3, 64)
    assert (grad.double() - wanted).norm() <= 2.0**-16 * wanted.norm()


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name: str) -> None:
    check(MATRICES[name], torch.randn(3, 64), jitgen.quantize(torch.randn(6, 48, 64), "int4", 32))


def test_quantised_activations() -> None:
    weight = jitgen.quantize(torch.randn(48, 64), "int4", 32, activation="int8")
    x = torch.randn(3, 64)
    whole, cut = (jitgen.jit(f)(x, weight) for f in (F.linear, lambda x, w: F.linear(x, w[3:20])))
    torch.testing.assert_close(cut, whole[:, 3:20])


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_kernels_of_gpus_cut_the_product(backend: str) -> None:
    weight = jitgen.quantize(torch.randn(4096, 64), "int4", 32)
    low = jitgen.jit(ROWS["within a tile"], backend=backend).lower(torch.randn(3, 64), weight, target="sm_90a")
    program = low.lowered.program
    assert any(20 in temporary.shape for temporary in program.temporaries), low.explain()


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda x, w: F.linear(x[:, :32], w[0][:, ::2]), "rows and neighbouring columns"),
        (lambda x, w: (x.unsqueeze(1) @ w[:, 3:20][IDS].mT).squeeze(1), "multiples of 16"),
        (lambda x, w: (x.unsqueeze(1) @ w[IDS][IDS].mT).squeeze(1), "one tensor of ids"),
        (lambda x, w: F.linear(x, w[0][IDS]), "F.embedding"),
        (lambda x, w: F.linear(x, w[IDS[0]][:16]), "cut its columns"),
        (lambda x, w: (x.unsqueeze(1) @ w[1:][IDS].mT).squeeze(1), r"choose of all, w\[ids \+ i\]"),
        (lambda x, w: F.linear(x, w[1:3].flatten(0, 1)), r"x @ w\[i:j\]\.mT"),
        (lambda x, w: torch.einsum("td,tkod->to", x, w[IDS[:, None]]), "sum what they return"),
    ],
)
def test_other_parts_are_refused(function: Function, remedy: str) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        jitgen.jit(function)(torch.randn(3, 64), jitgen.quantize(torch.randn(6, 48, 64), "int4", 32))
