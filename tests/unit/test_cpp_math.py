"""The C++ rows of every operation: domain, accuracy in ulp against float64, special values, integers, vectorisation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
import torch
from cpp_harness import INTEGERS, ON_TARGETS, TARGETS, TYPES, Library, loop, source

from jitgen.compilers import host
from jitgen.ir.ops import OPS
from jitgen.spec import DTYPES, Target, runs_here

UNARY = [op.name for op in OPS.values() if op.arity == 1 and "float32" in op.domain and not op.predicate]
BINARY = [op.name for op in OPS.values() if op.arity == 2 and "float32" in op.domain and not op.predicate]
PREDICATES = [op.name for op in OPS.values() if op.predicate and "float32" in op.domain]
INTEGER = [op.name for op in OPS.values() if op.arity <= 2 and "int8" in op.domain]
SCALAR = ("fmod", "remainder", "floor_divide")
"""Operations whose exact result needs a loop: they may call the C library."""

COARSE = ("exp", "sigmoid", "exp_below", "erfc")
"""Those with a variant for results of 16 bits."""

MAX_ULP = 4.0
DENORMAL = 2.0**-1074
"""One last place of a float64 below 2**-1022, where no relative bound holds: the tail of erfc ends there."""
NOT_IN_TORCH_OR_NUMPY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "rsqrt": lambda x: 1 / x.sqrt(),
    "reciprocal": lambda x: 1 / x,
    "erfc": torch.erfc,
    "exp2_normal": torch.exp2,
    # As ops.py defines it, but with a numerator that is not lost where exp(-x) overflows.
    "sigmoid": lambda x: torch.where(x < 0, x.exp(), 1.0) / (1 + torch.exp(-x.abs())),
}
NUMPY_NAMES = {name: f"arc{name[1:]}" for name in ("asin", "acos", "atan", "asinh", "acosh", "atanh", "atan2")}
NUMPY_NAMES |= {"pow": "power", "round": "rint", "abs": "fabs"}

SPECIAL = torch.tensor(
    [
        *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 2.5, torch.inf, -torch.inf, torch.nan),
        *(1e-45, -1e-45, 1e-40, -1e-40, 1.17549435e-38, 3.4028235e38, -3.4028235e38, 1e10, 1e20, 1e30, -1e30),
        *(88.72283, 88.72284, 89.4159, 89.42, -87.3365, -103.97, -103.98, -149.0, -149.5, -150.0, 127.99999, 128.0),
        *(10.05, 10.06, 16777216.0, 8388608.5, 0.99999994, 1.0000001),
    ]
)


@pytest.fixture(scope="module", params=ON_TARGETS, ids=str)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    if not runs_here(request.param):
        pytest.skip(f"this processor is below {request.param}")
    text = "#include <jitgen/math.hpp>\n"
    for name in (*UNARY, *BINARY, *PREDICATES, "fma"):
        arity = OPS[name].arity
        arguments = ", ".join(f"x{i}" for i in range(arity))
        result = "bool" if OPS[name].predicate else "float"
        text += loop(f"float_{name}", f"jitgen::{name}({arguments})", ["float"] * arity, result)
    for name in COARSE:
        text += loop(f"coarse_{name}", f"jitgen::coarse_{name}(x0)", ["float"], "float")
    for name, dtype in itertools.product(INTEGER, INTEGERS):
        arity, ctype = OPS[name].arity, TYPES[dtype]
        arguments = ", ".join(f"x{i}" for i in range(arity))
        result = "bool" if OPS[name].predicate else ctype
        text += loop(f"{ctype}_{name}", f"jitgen::{name}({arguments})", [ctype] * arity, result)
    return Library(text, request.param, tmp_path_factory.mktemp("math"))


# ------------------------------------------------------------------------------------------------------------ domain


def test_every_operation_has_every_dtype_of_its_domain() -> None:
    rows = []
    for op in OPS.values():
        for name in op.domain:
            ctype = TYPES[DTYPES[name]]
            values = ["bool()" if op.name == "where" else f"{ctype}(1)", *[f"{ctype}(1)"] * (op.arity - 1)]
            result = "bool" if op.predicate else ctype
            call = f"jitgen::{op.name}({', '.join(values)})"
            rows.append(f'static_assert(__is_same(decltype({call}), {result}), "{op.name} {name}");')
            rows.append(f"{result} row{len(rows)}() {{ return {call}; }}")
    host.compile(source("\n".join(["#include <jitgen/math.hpp>", *rows]), TARGETS[-1]))


# ---------------------------------------------------------------------------------------------------------- accuracy


def samples() -> torch.Tensor:
    """Every magnitude, the ranges where functions turn, large angles, and the special values."""
    count = 1 << 17
    bits = torch.randint(-(2**31), 2**31, (count,)).to(torch.int32).view(torch.float32)
    usual = torch.randn(count) * torch.exp2(torch.randint(-12, 8, (count,)).float())
    return torch.cat(
        [
            bits,
            usual,
            torch.rand(count) * 2.2 - 1.1,
            torch.rand(count) * 220 - 110,
            (torch.rand(count) * 2 - 1) * 1e6,
            torch.arange(1, 2001) * (torch.pi / 2),  # next to the zeros of sine and cosine
            SPECIAL,
        ]
    )


def pairs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    values = samples()
    values = values[torch.randperm(values.numel())]
    others = values[torch.randperm(values.numel())]
    if name == "pow":  # most random powers overflow
        exponents = torch.cat([torch.randint(-20, 20, (1 << 17,)).float(), torch.rand(1 << 17) * 300 - 150])
        values = torch.cat([values, torch.randn(1 << 17), torch.rand(1 << 17) * 2.5])
        others = torch.cat([others, exponents])
    grid = torch.cartesian_prod(SPECIAL, SPECIAL)
    return torch.cat([values, grid[:, 0]]), torch.cat([others, grid[:, 1]])


def reference(name: str, *operands: torch.Tensor) -> torch.Tensor:
    """The operation in float64, on float32 operands."""
    wide = [operand.double() for operand in operands]
    if name in SCALAR:  # exact in float32; NumPy's are the C library's and Python's
        functions = {"fmod": numpy.fmod, "remainder": numpy.remainder, "floor_divide": None}
        if functions[name] is None:
            return torch.floor_divide(*operands).double()
        with numpy.errstate(all="ignore"):
            return torch.from_numpy(functions[name](*(operand.numpy() for operand in operands))).double()
    if name in NOT_IN_TORCH_OR_NUMPY:
        return NOT_IN_TORCH_OR_NUMPY[name](*wide)
    function = getattr(numpy, NUMPY_NAMES.get(name, name), None)
    if function is None or name == "sign":
        return getattr(torch, name)(*wide)
    with numpy.errstate(all="ignore"):
        return torch.from_numpy(function(*(operand.numpy() for operand in wide)))


def ulps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The error in units of the last place of a float32 at ``exact``, a denormal's included; 0 where rounded right."""
    spacing = torch.exp2((torch.frexp(exact.abs()).exponent - 24).clamp(min=-149).double())
    error = (got.double() - exact).abs() / spacing
    right = (got == exact.float()) | (got.isnan() & exact.isnan())
    return torch.where(right, 0.0, torch.where(error.isnan(), torch.inf, error))


def assert_accurate(name: str, got: torch.Tensor, exact: torch.Tensor, *operands: torch.Tensor) -> None:
    error = ulps(got, exact)
    worst = int(error.argmax())
    at = [float(operand[worst]) for operand in operands]
    assert error[worst] <= MAX_ULP, f"{name}{at} is {got[worst]:.9g}, not {exact[worst]:.9g}: {error[worst]:.3g} ulp"
    if name not in ("minimum", "maximum", "fmin", "fmax"):  # which of -0 and 0 is smaller is nobody's promise
        zero = (exact == 0) & (got == 0)
        assert torch.equal(got[zero].signbit(), exact[zero].signbit()), f"{name}: sign of zero"


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions(library: Library, name: str) -> None:
    x = samples()
    assert_accurate(name, library(f"float_{name}", x, dtype=torch.float32), reference(name, x), x)


@pytest.mark.parametrize("name", [name for name in BINARY if name not in SCALAR])
def test_binary_functions(library: Library, name: str) -> None:
    a, b = pairs(name)
    assert_accurate(name, library(f"float_{name}", a, b, dtype=torch.float32), reference(name, a, b), a, b)


@pytest.mark.parametrize("name", SCALAR)
def test_modulo_functions_are_exact(library: Library, name: str) -> None:
    a, b = pairs(name)
    got, exact = library(f"float_{name}", a, b, dtype=torch.float32), reference(name, a, b)
    # torch's vectorised fmod, and all that it makes of it, gives NaN for quotients beyond 2^23; there the C++ is right.
    near = ((a.double() / b.double()).abs() < 2**22) | (name == "fmod")
    wrong = near & (got != exact.float()) & ~(got.isnan() & exact.isnan())
    assert not wrong.any(), (a[wrong][:3], b[wrong][:3], got[wrong][:3], exact[wrong][:3])


@pytest.mark.parametrize("name", COARSE)
def test_coarse_functions(library: Library, name: str) -> None:
    """What a 16-bit result hides: 2**-16 of the value. exp reaches the denormals; sigmoid, as torch's, is 0 there."""
    x = torch.cat([samples(), torch.linspace(-110, 95, 100_000), torch.linspace(-11, 11, 100_000)])
    if name == "exp_below":
        x = x[~(x > 0)]
    got = library(f"coarse_{name}", x, dtype=torch.float32)
    exact = reference(name.removesuffix("_below"), x)
    step = torch.finfo(torch.float32).smallest_normal if name == "sigmoid" else 2.0**-149
    fine = (got.double() - exact).abs() <= exact.abs() * 2**-16 + step
    fine |= (got.isnan() & exact.isnan()) | (got == exact.float())
    fine |= (x > 88.72) & (got > 3.4e38)  # where the last numbers before infinity are
    assert fine.all(), (x[~fine][:5], got[~fine][:5], exact[~fine][:5])


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates(library: Library, name: str) -> None:
    operands = pairs(name)[: OPS[name].arity]
    got = library(f"float_{name}", *operands, dtype=torch.bool)
    assert torch.equal(got, getattr(torch, name)(*operands))


def test_fma_rounds_once(library: Library) -> None:
    a, b = (torch.randn(4000) * torch.exp2(torch.randint(-30, 30, (4000,)).float()) for _ in range(2))
    # Addends that nearly cancel the product, that only break a tie, and that are of any other size.
    near = -(a * b) * (1 + torch.randn(4000) * 2**-22)
    tiny = a * b * torch.exp2(torch.randint(-60, -20, (4000,)).float())
    for c in (near, tiny, torch.randn(4000)):
        got = library("float_fma", a, b, c, dtype=torch.float32)
        for row in range(0, 4000, 8):
            exact = Fraction(a[row].item()) * Fraction(b[row].item()) + Fraction(c[row].item())
            spread = [torch.nextafter(got[row], torch.tensor(way)).item() for way in (torch.inf, -torch.inf)]
            error = abs(Fraction(got[row].item()) - exact)
            assert all(error <= abs(Fraction(other) - exact) for other in spread)
    for special in itertools.product((torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.5), repeat=3):
        operands = [torch.tensor([value]) for value in special]
        expected = operands[0] * operands[1] + operands[2]
        got = library("float_fma", *operands, dtype=torch.float32)
        assert torch.equal(got.nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0)), special
        assert got.isnan() or got.signbit() == expected.signbit()


def test_float64_is_the_c_librarys(tmp_path: Path) -> None:
    names = [op.name for op in OPS.values() if op.arity == 1 and "float64" in op.domain and not op.predicate]
    text = "#include <jitgen/math.hpp>\n" + "".join(
        loop(f"double_{name}", f"jitgen::{name}(x0)", ["double"], "double") for name in names
    )
    library = Library(text, TARGETS[-1], tmp_path)
    x = torch.cat([torch.randn(2000), torch.randn(2000) * 30, torch.rand(2000), SPECIAL]).double()
    for name in names:
        got = library(f"double_{name}", x, dtype=torch.float64)
        expected = getattr(torch, name.removesuffix("_normal"))(x)
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=DENORMAL, equal_nan=True, msg=name)


# ---------------------------------------------------------------------------------------------------------- integers


def wrap(value: int, dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return (value - info.min) % 2**info.bits + info.min


def truncated(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def power(a: int, b: int) -> int:
    return a ** min(b, 200) if b >= 0 else (a if b % 2 else 1) if abs(a) == 1 else 0


def shift(a: int, count: int, dtype: torch.dtype, *, left: bool) -> int:
    out = not 0 <= count < torch.iinfo(dtype).bits
    if left:
        return 0 if out else a << count
    return a >> (64 if out else count)


EXACT: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floor_divide": lambda a, b: 0 if b == 0 else a // b,
    "trunc_divide": truncated,
    "fmod": lambda a, b: 0 if b == 0 else a - truncated(a, b) * b,
    "remainder": lambda a, b: 0 if b == 0 else a % b,
    "pow": power,
    "minimum": min,
    "maximum": max,
    "neg": lambda a: -a,
    "abs": abs,
    "sign": lambda a: (a > 0) - (a < 0),
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "bitwise_and": lambda a, b: a & b,
    "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_not": lambda a: ~a,
}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", INTEGER)
def test_integers(library: Library, name: str, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    edges = torch.tensor([info.min, info.max, 0, 1, 2, 3, 7, 8, info.bits - 1, info.bits, info.max - 1]).to(dtype)
    if dtype.is_signed:
        edges = torch.cat([edges, torch.tensor([-1, -2, -8, info.min + 1], dtype=dtype)])
    grid = torch.cartesian_prod(edges, edges)
    drawn = torch.randint(info.min, info.max, (2, 400), dtype=dtype)
    small = torch.randint(max(info.min, -9), 9, (2, 400)).to(dtype)
    a = torch.cat([grid[:, 0], drawn[0], drawn[1], small[0]])
    b = torch.cat([grid[:, 1], drawn[1], small[1], small[1]])
    if name == "pow":
        b = b.clamp(max=127)
    operands = (a, b)[: OPS[name].arity]
    got = library(f"{TYPES[dtype]}_{name}", *operands, dtype=torch.bool if OPS[name].predicate else dtype)
    exact = EXACT.get(name, lambda a, b: shift(a, b, dtype, left=name == "left_shift"))
    expected = [exact(*row) for row in zip(*(operand.tolist() for operand in operands), strict=True)]
    if not OPS[name].predicate:
        expected = [wrap(value, dtype) for value in expected]
    wrong = [
        row for row in zip(*(o.tolist() for o in operands), got.tolist(), expected, strict=True) if row[-1] != row[-2]
    ]
    assert not wrong, wrong[:5]


def test_integer_powers_are_torchs(library: Library) -> None:
    a = torch.randint(-9, 9, (2000,))
    for exponent in range(12):
        b = torch.full_like(a, exponent)
        assert torch.equal(library("int64_t_pow", a, b, dtype=torch.int64), a.pow(exponent))


# ----------------------------------------------------------------------------------------------------- vectorisation


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("target", "register"), [(TARGETS[0], "zmm"), (TARGETS[1], "ymm"), (TARGETS[2], "xmm")], ids=str
)
def test_float_functions_are_vectorised(target: Target, register: str) -> None:
    """In the assembly of each function's loop there is no call, and packed arithmetic at the target's full width."""
    same = ("exp2_normal",)  # as exp2, so that the compiler makes a jump of its loop
    names = [name for name in (*UNARY, *BINARY) if name not in (*SCALAR, *same)]
    text = "#include <jitgen/math.hpp>\n"
    for name in names:
        arguments = ", ".join(f"x{i}" for i in range(OPS[name].arity))
        text += loop(f"loop_{name}", f"jitgen::{name}({arguments})", ["float"] * OPS[name].arity, "float")
    listing = host.assembly(source(text, target))
    for name in names:
        body = listing.split(f"\nloop_{name}:\n", 1)[1].split(f"\t.size\tloop_{name}", 1)[0]
        assert "call" not in body, name
        assert f"%{register}" in body, name
        assert "ps\t" in body or "\tvp" in body or "\tp" in body, name
