"""Products by CUTLASS on a GPU against float64 on the same rounded numbers: tiles, orders of operands, epilogues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.families.gemm.schedules import cutlass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2.0**-8, F16: 2.0**-10, F32: 2.0**-9}
"""Of the norm of the difference, relative to the result's; a result of float32 may be made of rounded values."""
ROWS = (1, 64, 777, 1500)


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def block(x: Any, w: Any, b: Any, s: Any, r: Any) -> torch.Tensor:
    return F.gelu(x @ w + b) * s + r


def both(x: Any, w: Any, s: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.linear(x, w).float() * s[:, None]
    return y, torch.relu(y).to(x.dtype)


def swiglu(x: Any, gate: Any, up: Any) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def selected(x: Any, w: Any, b: Any) -> torch.Tensor:
    y = F.linear(x, w) + b
    return torch.where(y > 0.5, y.tanh(), y.clamp(-1, 1))


def made(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(*sizes, device="cuda") * 0.5).to(dtype)


def check(function: Callable[..., Any], *arguments: torch.Tensor) -> None:
    got = jitgen.jit(backend="cutlass")(function)(*arguments)
    want = function(*(argument.double() for argument in arguments))
    for one, other in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, want)), strict=True):
        error = (one.double() - other).norm() / other.norm()
        assert error < TOLERANCE[one.dtype], float(error)


@pytest.mark.slow
@pytest.mark.parametrize("tile", cutlass.TILES, ids=str)
def test_every_tile(tile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass, "TILES", (tile,))
    weight = made(520, 392)
    for rows in ROWS:
        check(linear, made(rows, 392), weight)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_operands_in_either_order(dtype: torch.dtype) -> None:
    weight = made(200, 264, dtype=dtype)
    for rows in ROWS:
        check(matmul, made(rows, 200, dtype=dtype), weight)
    check(matmul, made(200, 1504, dtype=dtype).T, weight)


@pytest.mark.parametrize("tile", cutlass.TILES[3:5], ids=str)
def test_numbers_of_tiles_that_are_no_powers_of_two(tile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass, "TILES", (tile,))
    for rows, columns, length in ((777, 2560, 128), (777, 512, 5632), (4100, 1992, 256), (130, 136, 64)):
        check(linear, made(rows, length), made(columns, length))


def test_a_block_is_right_and_equal_calls_give_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass, "TILES", cutlass.TILES[3:4])
    for rows in ROWS:
        arguments = made(rows, 256), made(256, 520), made(520), made(520), made(rows, 520)
        check(block, *arguments)
        function = jitgen.jit(backend="cutlass")(block)
        first = function(*arguments)
        assert all(torch.equal(first, function(*arguments)) for _ in range(5))


@pytest.mark.slow
def test_codes_of_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    def integers(x: Any, w: Any, s: Any, t: Any) -> torch.Tensor:
        return (torch._int_mm(x, w.t()).float() * s[:, None] * t).to(BF16)

    for tile in (cutlass.TILES[0], cutlass.TILES[3]):
        monkeypatch.setattr(cutlass, "TILES", (tile,))
        for rows in ROWS[1:]:
            x, w = (torch.randint(-128, 128, (n, 400), device="cuda", dtype=torch.int8) for n in (rows, 528))
            s, t = made(rows, dtype=F32), made(528, dtype=F32)
            want = (x.double() @ w.double().T) * s.double()[:, None] * t.double()
            got = jitgen.jit(backend="cutlass")(integers)(x, w, s, t).double()
            assert (got - want).norm() / want.norm() < TOLERANCE[BF16]


@pytest.mark.slow
def test_epilogues() -> None:
    for rows in (64, 777):
        check(both, made(rows, 256), made(520, 256), made(rows, dtype=F32))
        check(swiglu, made(rows, 256), made(520, 256), made(520, 256))
        check(selected, made(rows, 256), made(520, 256), made(520))


@pytest.mark.slow
def test_results_with_gaps_and_strided_sources() -> None:
    def added(x: Any, w: Any, r: Any) -> torch.Tensor:
        return F.linear(x, w) + r

    wide = made(300, 2 * 520)
    check(added, made(300, 256), made(520, 256), wide[:, ::2])
    check(added, made(300, 256), made(520, 256), wide[:, :520])
    out = torch.full((300, 1040), 7.0, device="cuda", dtype=BF16)
    x, w = made(300, 256), made(520, 256)
    jitgen.jit(backend="cutlass")(linear)(x, w, out=out[:, :520])
    error = (out[:, :520].double() - F.linear(x.double(), w.double())).norm() / F.linear(x.double(), w.double()).norm()
    assert error < TOLERANCE[BF16]
    assert bool((out[:, 520:] == 7.0).all())
