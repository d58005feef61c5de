"""Storage types: every code both ways against torch, every rounding boundary, and the casts between compute dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch
from cpp_harness import FLOATS, INTEGERS, ON_TARGETS, TYPES, Library, loop

from jitgen.spec import runs_here

STORAGE = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def casts() -> list[tuple[torch.dtype, torch.dtype]]:
    return [(a, b) for a, b in itertools.product(TYPES, TYPES) if a != b]


def cast_name(source: torch.dtype, to: torch.dtype) -> str:
    return f"cast_{TYPES[source]}_{TYPES[to]}"


@pytest.fixture(scope="module", params=ON_TARGETS, ids=str)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    if not runs_here(request.param):
        pytest.skip(f"this processor is below {request.param}")
    saturates = not torch.tensor(1e4).to(torch.float8_e4m3fn).float().isnan().item()
    text = f"#define JITGEN_E4M3FN_SATURATES {int(saturates)}\n#include <jitgen/storage.hpp>\nusing namespace jitgen;\n"
    for name in STORAGE:
        text += loop(f"load_{name}", "load(x0)", [name], "float")
        text += loop(f"store_{name}", f"store<{name}>(x0)", ["float"], name)
        text += loop(f"round_{name}", f"round_to<{name}>(x0)", ["float"], "float")
    for source, to in casts():
        text += loop(cast_name(source, to), f"cast<{TYPES[to]}>(x0)", [TYPES[source]], TYPES[to])
    return Library(text, request.param, tmp_path_factory.mktemp("storage"))


def codes_of(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.arange(2 ** (8 * dtype.itemsize))
    return bits.to(torch.int16 if dtype.itemsize == 2 else torch.uint8).view(dtype)


def boundaries(dtype: torch.dtype) -> torch.Tensor:
    """Every value of ``dtype``, every midpoint between neighbours, and the floats on either side of each midpoint."""
    values = codes_of(dtype).float()
    finite = values[values.isfinite()].double().sort().values
    last = finite[-1] + (finite[-1] - finite[-2]) / 2
    middles = torch.cat([(finite[1:] + finite[:-1]) / 2, torch.stack([last, -last])]).float()
    beside = [torch.nextafter(middles, torch.tensor(way)) for way in (torch.inf, -torch.inf)]
    return torch.cat([values, middles, *beside])


def random_bits(count: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (count,)).to(torch.int32).view(torch.float32)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, signs of zero included; a NaN equals any NaN."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    nan = expected.float().isnan() if expected.is_floating_point() else torch.zeros_like(expected, dtype=torch.bool)
    wrong = (got.view(integer) != expected.view(integer)) & ~nan
    assert not wrong.any(), (got[wrong][:5], expected[wrong][:5])
    assert not nan.any() or got.float()[nan].isnan().all()


@pytest.mark.parametrize("name", STORAGE)
def test_every_code_loads_as_in_torch(library: Library, name: str) -> None:
    codes = codes_of(STORAGE[name])
    assert_same_bits(library(f"load_{name}", codes, dtype=torch.float32), codes.float())


@pytest.mark.parametrize("name", STORAGE)
def test_stores_round_and_overflow_as_in_torch(library: Library, name: str) -> None:
    scaled = torch.randn(1 << 18) * torch.exp2(torch.randint(-30, 20, (1 << 18,)).float())
    values = torch.cat([boundaries(STORAGE[name]), scaled, random_bits(1 << 20)])
    expected = values.to(STORAGE[name])
    assert_same_bits(library(f"store_{name}", values, dtype=STORAGE[name]), expected)
    assert_same_bits(library(f"round_{name}", values, dtype=torch.float32), expected.float())


def operands(dtype: torch.dtype, to: torch.dtype) -> torch.Tensor:
    """Fresh values of ``dtype`` that torch's conversion to ``to`` is defined on."""
    if dtype is torch.bool:
        return torch.tensor([True, False] * 50)
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return torch.cat([torch.randint(low, high, (4096,), dtype=dtype), torch.tensor([low, high, 0, 1], dtype=dtype)])
    special = torch.tensor([0.0, -0.0, 1e-45, torch.nan, torch.inf, -torch.inf], dtype=dtype)
    wide = torch.randn(4096, dtype=dtype) * torch.exp2(torch.randint(-20, 70, (4096,)).to(dtype))
    values = torch.cat([torch.randn(4096, dtype=dtype) * 100, wide, special])
    if to is torch.bool or to.is_floating_point:
        return values
    # By way of int64, negative numbers and those above 255 are defined for uint8; for the rest the range is.
    limits = torch.iinfo(torch.int64 if to is torch.uint8 else to)
    return values[(values > float(limits.min)) & (values < float(limits.max))]


@pytest.mark.parametrize(("source", "to"), casts(), ids=lambda dtype: TYPES[dtype])
def test_casts_are_torchs(library: Library, source: torch.dtype, to: torch.dtype) -> None:
    values = operands(source, to)
    got = library(cast_name(source, to), values, dtype=to)
    if source in FLOATS and to in INTEGERS:
        expected = values.to(torch.int64).to(to)
    else:
        expected = values.to(to)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("to", INTEGERS, ids=str)
def test_a_value_out_of_range_gives_an_integer_and_no_trap(library: Library, to: torch.dtype) -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
    got = library(cast_name(torch.float32, to), values, dtype=to)
    smallest = torch.iinfo(to).min if to.itemsize >= 4 else 0
    assert (got[[0, 1, 2, 4]] == smallest).all()
