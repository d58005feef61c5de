"""Kernels that evaluate every Triton row of a compute dtype, with operands and references for all of them.

``tests/unit/test_triton_rows.py`` runs them on CPU tensors, as ``tests/interpreter.py`` says;
``tests/compile/test_triton_compile.py`` compiles the same kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy
import torch

from jitgen.codegen import triton as dialect
from jitgen.ir.ops import COMPUTE_DTYPES, OPS
from jitgen.spec import DTYPES, KernelSource, Target, e4m3fn_saturates
from tests import philox
from tests.interpreter import Check, serve

INCLUDE = Path(__file__).parents[1] / "templates" / "common" / "include" / "jitgen_triton.py"
FLOAT_STORAGES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
BLOCK = 128

# ---------------------------------------------------------------------------------------------------------- kernels


def row(name: str, dtype: str) -> str:
    """The format of an operation for a compute dtype: by the dtype, else by its class."""
    found = dialect.ROWS[name]
    if isinstance(found, str):
        return found
    kind = "float" if dtype.startswith("float") else "bool" if dtype == "bool" else "int"
    return found[dtype] if dtype in found else found[kind]


def ops_of(dtype: str) -> list[str]:
    return [name for name, op in OPS.items() if dtype in op.domain]


def rows_source(dtype: str, target: str, names: Sequence[str] | None = None) -> KernelSource:
    """A kernel storing op number i of operands A, B, C at element i * n of V, or of P where the result is bool."""
    stores = []
    for number, name in enumerate(names or ops_of(dtype)):
        operands = ("w", "a", "b") if name == "where" else ("a", "b", "c")
        expression = row(name, dtype).format(*operands, type=dialect.TYPES[dtype])
        output = "P" if OPS[name].predicate else "V"
        stores.append(f"    tl.store({output} + {number} * n + at, {expression}, mask=inside)")
    text = f"""{INCLUDE.read_text()}

@triton.jit
def rows(A, B, C, W, V, P, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(A + at, mask=inside)
    b = tl.load(B + at, mask=inside)
    c = tl.load(C + at, mask=inside)
    w = tl.load(W + at, mask=inside)
{chr(10).join(stores)}
"""
    pointer = "*" + dialect.SIGNATURE_TYPES[dtype]
    return _source("rows", text, [pointer] * 3 + ["*i1", pointer, "*i1", "i32"], target)


def storage_source(storage: str, target: str) -> KernelSource:
    """A kernel storing X (float32) as ``storage`` in Y, Y's old content as float32 in Z, and X rounded in R."""
    text = f"""{INCLUDE.read_text()}
E4M3FN_SATURATES = tl.constexpr({int(e4m3fn_saturates())})

@triton.jit
def convert(X, Y, Z, R, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(X + at, mask=inside)
    y = tl.load(Y + at, mask=inside)
    tl.store(Z + at, {dialect.load_cast("y", storage)}, mask=inside)
    tl.store(Y + at, {dialect.store_cast("x", storage)}, mask=inside)
    tl.store(R + at, {dialect.round_to("x", storage)}, mask=inside)
"""
    pointer = "*" + dialect.SIGNATURE_TYPES[storage]
    return _source("convert", text, ["*fp32", pointer, "*fp32", "*fp32", "i32"], target)


def cast_source(source: str, target: str) -> KernelSource:
    """A kernel storing X (of compute dtype ``source``) cast to every compute dtype, and a few constants of each."""
    outputs = [f"Y{number}" for number in range(len(COMPUTE_DTYPES))]
    stores = []
    for output, to in zip(outputs, COMPUTE_DTYPES, strict=True):
        stores.append(f"    tl.store({output} + at, {dialect.cast('x', source, to)}, mask=inside)")
        for number, value in enumerate(constants_of(to)):
            stores.append(f"    tl.store({output} + n + {number}, {dialect.constant(value, to)})")
    text = f"""{INCLUDE.read_text()}

@triton.jit
def cast(X, {", ".join(outputs)}, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(X + at, mask=inside)
{chr(10).join(stores)}
"""
    pointers = ["*" + dialect.SIGNATURE_TYPES[dtype] for dtype in (source, *COMPUTE_DTYPES)]
    return _source("cast", text, [*pointers, "i32"], target)


def scalars_source(target: str) -> KernelSource:
    """A kernel storing F + G in Y (float64) and I + J in Z (int64), from scalars of every type."""
    text = f"""{INCLUDE.read_text()}

@triton.jit
def scalars(Y, Z, F, G, I, J, BLOCK: tl.constexpr):
    tl.store(Y, F.to(tl.float64) + G)
    tl.store(Z, I.to(tl.int64) + J)
"""
    return _source("scalars", text, ["*fp64", "*i64", "fp32", "fp64", "i32", "i64"], target)


def _source(name: str, text: str, signature: list[str], target: str) -> KernelSource:
    options = (("constants", {"BLOCK": BLOCK}), ("num_warps", 4), ("signature", signature))
    return KernelSource(name, "triton", "triton", Target.parse(target), text, options=options)


# --------------------------------------------------------------------------------------------------------- operands


def constants_of(dtype: str) -> list[bool | int | float]:
    if dtype == "bool":
        return [False, True]
    if dtype.startswith("float"):
        return [0.0, -0.0, 0.1, -1e-42, 3.4e38, float("inf"), float("-inf"), float("nan")]
    limits = torch.iinfo(DTYPES[dtype])
    return [0, 1, limits.min, limits.max]


def _fresh() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


def operands_of(dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three operands: every pair of special values, then random ones over the dtype's range."""
    generator = _fresh()
    if dtype == "bool":
        pairs = torch.tensor(list(itertools.product([False, True], repeat=3)))
        return pairs[:, 0].clone(), pairs[:, 1].clone(), pairs[:, 2].clone()
    if dtype.startswith("float"):
        info = torch.finfo(DTYPES[dtype])
        near = [0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 7.0, 88.0, 1e-4, 1e6, info.tiny, info.tiny / 8, info.max]
        special = torch.tensor([*near, *(-value for value in near), torch.inf, -torch.inf, torch.nan])
        special = special.to(DTYPES[dtype])
        scale = torch.exp(torch.empty(3, 4000, dtype=torch.float64).uniform_(-9, 9, generator=generator))
        noise = torch.randn(3, 4000, dtype=torch.float64, generator=generator) * scale
        random = noise.to(DTYPES[dtype])
    else:
        info = torch.iinfo(DTYPES[dtype])
        edges = {info.min, info.min + 1, info.max, info.max - 1, *range(max(info.min, -9), 10), 15, 16, 31, 32, 63, 64}
        special = torch.tensor(sorted(edges), dtype=DTYPES[dtype])
        random = torch.randint(info.min, info.max, (3, 1000), dtype=DTYPES[dtype], generator=generator)
    first = special.repeat_interleave(len(special))
    second = special.repeat(len(special))
    third = second.roll(7)
    return tuple(torch.cat([fixed, drawn]) for fixed, drawn in zip((first, second, third), random, strict=True))


# ------------------------------------------------------------------------------------------------------- references


def _zero_safe(function: Callable[[int, int], int]) -> Callable[[int, int, int], int]:
    return lambda a, b, _: function(a, b) if b else 0


def _trunc(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _int_pow(a: int, b: int, _: int) -> int:
    if b >= 0:
        return pow(a, b, 1 << 64)
    return a ** (b % 2) if a in (1, -1) else 0


_INTEGERS: dict[str, Callable[[int, int, int], int | bool]] = {
    "philox": philox.bits,
    "add": lambda a, b, _: a + b,
    "sub": lambda a, b, _: a - b,
    "mul": lambda a, b, _: a * b,
    "floor_divide": _zero_safe(lambda a, b: a // b),
    "trunc_divide": _zero_safe(_trunc),
    "fmod": _zero_safe(lambda a, b: a - b * _trunc(a, b)),
    "remainder": _zero_safe(lambda a, b: a % b),
    "pow": _int_pow,
    "minimum": lambda a, b, _: min(a, b),
    "maximum": lambda a, b, _: max(a, b),
    "neg": lambda a, *_: -a,
    "abs": lambda a, *_: abs(a),
    "sign": lambda a, *_: (a > 0) - (a < 0),
    "eq": lambda a, b, _: a == b,
    "ne": lambda a, b, _: a != b,
    "lt": lambda a, b, _: a < b,
    "le": lambda a, b, _: a <= b,
    "gt": lambda a, b, _: a > b,
    "ge": lambda a, b, _: a >= b,
    "bitwise_and": lambda a, b, _: a & b,
    "bitwise_or": lambda a, b, _: a | b,
    "bitwise_xor": lambda a, b, _: a ^ b,
    "bitwise_not": lambda a, *_: ~a,
}


def _shifts(bits: int) -> dict[str, Callable[[int, int, int], int]]:
    return {
        "left_shift": lambda a, b, _: a << b if 0 <= b < bits else 0,
        "right_shift": lambda a, b, _: a >> b if 0 <= b < bits else (-1 if a < 0 else 0),
    }


def _exact_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    plain = a * b + c
    for index in torch.isfinite(plain).nonzero().flatten().tolist():
        exact = Fraction(a[index].item()) * Fraction(b[index].item()) + Fraction(c[index].item())
        if exact:  # else the sum is right, and has the sign of zero
            plain[index] = float(exact)
    return plain


def _ieee_sqrt(a: torch.Tensor) -> torch.Tensor:
    with numpy.errstate(invalid="ignore"):
        return torch.from_numpy(numpy.sqrt(a.numpy()))


_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "exp2_normal": torch.exp2,
    "fma": _exact_fma,
    "sign": lambda a: torch.sign(a).nan_to_num(0.0),
    "sqrt": _ieee_sqrt,  # torch's vectorised one is not
}

# As torch rounds it, in the compute dtype itself.
_SAME_DTYPE = ("floor_divide",)
# 1 / (1 + exp(-x)) is zero once exp(-x) overflows; the other's subnormal results may be zero.
_UNDERFLOWING = ("sigmoid", "exp2_normal")
_EITHER_ZERO = ("minimum", "maximum", "fmin", "fmax")


def expected(name: str, operands: tuple[torch.Tensor, ...], where: torch.Tensor) -> torch.Tensor:
    """What an operation gives: float64 for floats (the operands' dtype where rounding is part of it), else exact."""
    dtype = operands[0].dtype
    if name == "where":
        return torch.where(where, operands[0], operands[1])
    if dtype.is_floating_point:
        used = operands[: OPS[name].arity]
        function = _TORCH.get(name) or getattr(torch, name)
        return function(*used) if name in _SAME_DTYPE else function(*(value.double() for value in used))
    bits = 1 if dtype == torch.bool else torch.iinfo(dtype).bits
    function = (_INTEGERS | _shifts(bits))[name]
    results = [function(*values) for values in zip(*(operand.tolist() for operand in operands), strict=True)]
    if OPS[name].predicate or dtype == torch.bool:
        return torch.tensor([bool(value & 1) for value in results])
    low = 0 if dtype == torch.uint8 else -(1 << bits - 1)
    return torch.tensor([(value - low) % (1 << bits) + low for value in results], dtype=dtype)


def ulp_bound(name: str) -> float:
    """How far a float result may be from the exact one: nothing but its rounding, or a library function's error.

    The CUDA C++ Programming Guide's table of maximum errors has at most 4 for these but double ``erfc``, 5.
    """
    if name == "erfc":
        return 6.0
    return 4.0 if OPS[name].flops > 2 or name == "rsqrt" else 1.0 if name == "remainder" else 0.5


def mismatches(name: str, actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Where a result is wrong: NaN for NaN, the sign of zero, and the bound in units of the last place."""
    if not actual.dtype.is_floating_point:
        return actual != exact
    rounded = exact.to(actual.dtype)
    nan = rounded.isnan()
    spacing = torch.nextafter(rounded.abs(), torch.full_like(rounded, torch.inf)) - rounded.abs()
    error = (actual.double() - exact.double()).abs() / spacing.double()
    wrong = (actual != rounded) & ~(error <= ulp_bound(name))
    if name in _UNDERFLOWING:
        wrong &= (actual - rounded).abs() > torch.finfo(actual.dtype).tiny
    if name not in _EITHER_ZERO:
        wrong |= (rounded == 0) & (actual == 0) & (rounded.signbit() != actual.signbit())
    return torch.where(nan, ~actual.isnan(), wrong | actual.isnan())


# ------------------------------------------------------------------------------------------------------------- runs


def check_rows(dtype: str, launch: Callable[..., None]) -> list[str]:
    """Run the kernel of ``rows_source`` by ``launch(grid, *arguments)`` and describe each wrong operation."""
    operands = operands_of(dtype)
    n = operands[0].numel()
    where = torch.arange(n) % 3 == 0
    names = ops_of(dtype)
    values = torch.full((len(names), n), 77).to(DTYPES[dtype])
    predicates = torch.full((len(names), n), True)
    launch((-(-n // BLOCK),), *operands, where, values, predicates, n)
    failures = []
    for number, name in enumerate(names):
        actual = (predicates if OPS[name].predicate else values)[number]
        exact = expected(name, operands, where)
        wrong = mismatches(name, actual, exact).nonzero().flatten()
        if len(wrong):
            at = wrong[0]
            inputs = [operand[at].item() for operand in operands[: OPS[name].arity]]
            failures.append(f"{name} {dtype}: {len(wrong)} wrong; {inputs} -> {actual[at]}, expected {exact[at]}")
    return failures


def check_storage(storage: str, launch: Callable[..., None]) -> list[str]:
    dtype = DTYPES[storage]
    generator = _fresh()
    limit = torch.finfo(dtype)
    size = torch.uint8 if limit.bits == 8 else torch.int16
    codes = torch.arange(1 << limit.bits).to(size).view(dtype)
    exact = codes.float()
    halves = (exact + exact.roll(-1)) / 2
    noise = torch.randn(20000, generator=generator) * torch.exp(torch.randn(20000, generator=generator) * 8)
    edges = torch.tensor([limit.max, limit.max * 1.04, limit.max * 1.05, limit.max * 1.2, limit.tiny, 1e-45, torch.inf])
    x = torch.cat([exact, halves, noise, edges, -edges, torch.tensor([0.0, -0.0, torch.nan])])
    n = x.numel()
    y = codes.repeat(-(-n // codes.numel()))[:n].clone()
    loaded, rounded = torch.full((n,), 77.0), torch.full((n,), 77.0)
    before, stored = y.float(), x.to(dtype)
    launch((-(-n // BLOCK),), x, y, loaded, rounded, n)
    pairs = {"load": (loaded, before), "store": (y.float(), stored.float()), "round": (rounded, stored.float())}
    failures = []
    for what, (actual, wanted) in pairs.items():
        same = (actual == wanted) & (actual.signbit() == wanted.signbit()) | actual.isnan() & wanted.isnan()
        if not same.all():
            at = (~same).nonzero().flatten()[0]
            failures.append(f"{what} {storage}: {(~same).sum()} wrong; {x[at]} -> {actual[at]}, expected {wanted[at]}")
    return failures


def check_casts(source: str, launch: Callable[..., None]) -> list[str]:
    x = operands_of(source)[0]
    if x.dtype.is_floating_point:
        x = torch.cat([x[x.abs() < 120], torch.tensor([torch.nan, torch.inf], dtype=x.dtype)])
    n = x.numel()
    outputs = [torch.full((n + 8,), 77).to(DTYPES[to]) for to in COMPUTE_DTYPES]
    launch((-(-n // BLOCK),), x, *outputs, n)
    failures = []
    for to, output in zip(COMPUTE_DTYPES, outputs, strict=True):
        # Converting NaN and infinity to an integer is undefined in torch too.
        defined = torch.isfinite(x) if to not in ("float32", "float64", "bool") else torch.ones(n, dtype=torch.bool)
        constants = torch.tensor(constants_of(to), dtype=DTYPES[to])
        for what, actual, wanted in (
            ("cast", output[:n][defined], x.to(DTYPES[to])[defined]),
            ("constant", output[n : n + len(constants)], constants),
        ):
            zero = actual.signbit() == wanted.signbit() if wanted.dtype.is_floating_point else wanted == actual
            same = (actual == wanted) & zero | (actual != actual) & (wanted != wanted)
            if not same.all():
                at = (~same).nonzero().flatten()[0]
                failures.append(f"{what} {source} to {to}: got {actual[at]}, expected {wanted[at]}")
    return failures


def check_scalars(launch: Callable[..., None]) -> list[str]:
    y, z = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    launch((1,), y, z, 0.1, 0.2, -7, 5)
    wanted = float(torch.tensor(0.1)) + 0.2, -2
    return [] if (y.item(), z.item()) == wanted else [f"scalars: {(y.item(), z.item())}, expected {wanted}"]


def _interpreted(check: Callable[..., list[str]], source: Callable[..., KernelSource], *dtype: str) -> list[str]:
    from jitgen.runtime import interpreter

    kernel = source(*dtype, "interpreter")
    launch = interpreter.load(kernel.text, kernel.name, kernel.option("signature"), kernel.option("constants"))
    return check(*dtype, functools.partial(launch, kernel.name))


CHECKS: dict[str, Check] = {
    f"{kind}-{dtype}": functools.partial(_interpreted, check, source, dtype)
    for kind, check, source, dtypes in (
        ("rows", check_rows, rows_source, COMPUTE_DTYPES),
        ("storage", check_storage, storage_source, FLOAT_STORAGES),
        ("casts", check_casts, cast_source, COMPUTE_DTYPES),
    )
    for dtype in dtypes
} | {"scalars": functools.partial(_interpreted, check_scalars, scalars_source)}


if __name__ == "__main__":
    serve(CHECKS)
