"""The CUDA headers on a GPU: every operation against torch, every conversion code by code, every vector access.

Floating operations are compared with float64 torch on random and special values, in units in the last place; integer
operations and conversions must be equal. The kernels here call the headers directly, so that a failure is theirs.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy
import pytest
import torch

from jitgen.codegen import environment
from jitgen.compilers import nvrtc
from jitgen.ir.ops import COMPUTE_DTYPES, FLOATS, INTS, OPS
from jitgen.runtime import cuda
from jitgen.spec import DTYPES, KernelSource, Target
from tests import philox

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK = 256
C_TYPES = {"float32": "float", "float64": "double", "bool": "bool"}
SMALL_FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
STORAGE_TYPES = {name: f"jitgen::{name}" for name in SMALL_FLOATS}


def c_type(dtype: str) -> str:
    return STORAGE_TYPES.get(dtype) or C_TYPES.get(dtype, f"{dtype}_t")


def pointwise(name: str, expression: str, inputs: tuple[str, ...], output: str) -> str:
    """A kernel of one element a thread; ``expression`` is over the elements a, b, c."""
    pointers = [f"const {kind}* p{place}" for place, kind in enumerate(inputs)]
    elements = " ".join(f"{kind} {'abc'[place]} = p{place}[i];" for place, kind in enumerate(inputs))
    return (
        f'extern "C" __global__ void {name}({", ".join(pointers)}, {output}* out, long long n) {{\n'
        f"  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;\n"
        f"  if (i >= n) return;\n  {elements}\n  out[i] = {expression};\n}}\n"
    )


def source(entry: str, text: str, target: Target) -> KernelSource:
    """``text`` with the headers, told whether this torch saturates float8_e4m3fn or gives NaN."""
    saturates = not torch.tensor(1e6).to(torch.float8_e4m3fn).float().isnan()
    text = f"#define JITGEN_E4M3FN_SATURATES {int(saturates)}\n#include <jitgen/vector.cuh>\n{text}"
    return KernelSource(
        entry, "cuda", "nvrtc", target, text, environment.headers(environment.family_folder("reduction"), text)
    )


def run(entry: str, text: str, inputs: tuple[torch.Tensor, ...], output: torch.dtype) -> torch.Tensor:
    """The output of a ``pointwise`` kernel of ``text``, on the CPU; fp8 and its like go in and out as codes."""
    function = _load(entry, text)
    count = inputs[0].numel()
    on_device = [tensor.contiguous().cuda() for tensor in inputs]
    result = torch.full((count * output.itemsize,), 0xA5, dtype=torch.uint8, device="cuda")
    blocks = (count + BLOCK - 1) // BLOCK
    values = (*(tensor.data_ptr() for tensor in on_device), result.data_ptr(), count)
    launch = cuda.Launch(function, "P" * (len(values) - 1) + "q", values, (blocks, 1, 1), (BLOCK, 1, 1))
    launch(cuda.current_stream(0))
    return result.cpu().view(output)


@functools.cache
def _load(entry: str, text: str) -> cuda.Function:
    return cuda.load(_cubin(text), entry, 0)


@functools.cache
def _cubin(text: str) -> bytes:
    first = text.split("__global__ void ", 1)[1].split("(", 1)[0]
    return nvrtc.compile(source(first, text, cuda.target_of(0))).files["kernel.cubin"]


# ------------------------------------------------------------------------------------------------------------ values


def floats(dtype: torch.dtype, arity: int) -> tuple[torch.Tensor, ...]:
    """Random values of three scales, and every combination of the special ones, ``arity`` columns."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 3.0, float("inf"), -float("inf"), float("nan"), limits.max]
    special += [-limits.max, limits.tiny, -limits.tiny, limits.smallest_normal / 4, limits.eps, 88.5, -104.0, 1e6]
    columns = torch.meshgrid(*[torch.tensor(special, dtype=dtype)] * arity, indexing="ij")
    return tuple(
        torch.cat(
            [column.flatten(), *(torch.randn(20_000, generator=generator, dtype=dtype) * s for s in (1, 30, 1e-3))]
        )
        for column in columns
    )


def integers(dtype: torch.dtype, arity: int) -> tuple[torch.Tensor, ...]:
    """Every pair of 8-bit values; of wider ones the edges and random values; of three operands fewer of each."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(dtype)
    if limits.bits == 8:
        values = torch.arange(limits.min, limits.max + 1)
    else:
        edges = [limits.min, limits.min + 1, limits.max, limits.max - 1, *range(-5, 10), 31, 32, 33, 63, 64, 65]
        random = torch.randint(-(2 ** (limits.bits - 2)), 2 ** (limits.bits - 2), (200,), generator=generator)
        values = torch.cat([torch.tensor(edges), random])
    values = values.to(dtype)
    if arity == 1:
        return (values,)
    if arity == 3:
        values = values[torch.randperm(len(values), generator=generator)[:24]]
    return tuple(column.flatten() for column in torch.meshgrid(*[values] * arity, indexing="ij"))


def operands(dtype: str, arity: int) -> tuple[torch.Tensor, ...]:
    torch_dtype = DTYPES[dtype]
    if dtype == "bool":
        columns = torch.meshgrid(*[torch.tensor([False, True])] * arity, indexing="ij")
        return tuple(column.flatten() for column in columns)
    return floats(torch_dtype, arity) if torch_dtype.is_floating_point else integers(torch_dtype, arity)


# -------------------------------------------------------------------------------------------------------- references


def _whole(divide: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Integer division as ir/ops.py has it: 0 for a divisor of zero, wrapping for the one overflow."""

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype.is_floating_point:
            return divide(a, b)
        overflow = (b == -1) & (a.dtype != torch.uint8)
        safe = torch.where((b == 0) | overflow, 1, b).to(b.dtype)
        opposite = divide(-a, torch.ones_like(b)) if a.dtype != torch.uint8 else a
        result = torch.where(overflow, opposite, divide(a, safe))
        return torch.where(b == 0, 0, result).to(a.dtype)

    return reference


def _shift(
    shift: Callable[..., torch.Tensor], fill: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def reference(a: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        bits = torch.iinfo(a.dtype).bits
        outside = (count < 0) | (count >= bits)
        return torch.where(outside, fill(a), shift(a, torch.where(outside, 0, count).to(a.dtype)))

    return reference


def _exact_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c rounded once to float64, which float64 arithmetic alone cannot tell."""
    result = torch.where(a.isfinite() & b.isfinite() & c.isinf(), c, a * b + c)  # the product may overflow
    for place in (a.isfinite() & b.isfinite() & c.isfinite()).nonzero().flatten().tolist():
        x, y, z = (Fraction(column[place].item()) for column in (a, b, c))
        with contextlib.suppress(OverflowError):
            result[place] = float(x * y + z)
    return result


def _philox(*columns: torch.Tensor) -> torch.Tensor:
    found = [philox.bits(*operands) for operands in zip(*(column.tolist() for column in columns), strict=True)]
    return torch.tensor([value - 2**64 if value >= 2**63 else value for value in found])


def _numpy(name: str, integer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """numpy's function on floats, torch's on integers."""

    def reference(*columns: torch.Tensor) -> torch.Tensor:
        if not columns[0].dtype.is_floating_point:
            return integer(*columns)
        with numpy.errstate(all="ignore"):
            return torch.from_numpy(getattr(numpy, name)(*(column.numpy() for column in columns)))

    return reference


REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "floor_divide": _whole(lambda a, b: torch.div(a, b, rounding_mode="floor")),
    "trunc_divide": _whole(lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    # numpy's on floats: torch's vectorised ones are inexact, or NaN, where a / b is large or overflows.
    "fmod": _whole(_numpy("fmod", torch.fmod)),
    "remainder": _whole(_numpy("remainder", torch.remainder)),
    "sqrt": _numpy("sqrt", torch.sqrt),
    "fma": lambda a, b, c: a * b + c,
    "philox": _philox,
    "left_shift": _shift(torch.bitwise_left_shift, torch.zeros_like),
    "right_shift": _shift(torch.bitwise_right_shift, lambda a: torch.where(a < 0, -1, 0).to(a.dtype)),
    "where": torch.where,
    "exp2_normal": torch.exp2,
    "abs": lambda a: a if a.dtype == torch.uint8 else torch.abs(a),
}
EXACT = {"floor_divide", "fmod", "remainder"}
"""Exact in their own dtype, so float32 is compared with float32 torch: the float64 result has another meaning."""
SIGNED_ZERO = {"neg", "copysign", "floor", "ceil", "trunc", "round", "sqrt", "abs", "mul", "div", "reciprocal", "sin"}
ULPS = {"pow": 4, "tan": 4, "sigmoid": 4, "sinh": 3, "asinh": 3, "acosh": 4, "atanh": 4, "erfc": 4, "atan2": 3}
"""What NVIDIA's programming guide states where it is more than 2 units, for either precision; 2 elsewhere."""
CORRECTLY_ROUNDED = {"add", "sub", "mul", "div", "sqrt", "reciprocal", "fma", "floor", "ceil", "round", "trunc", "neg"}
CORRECTLY_ROUNDED |= {"abs", "sign", "copysign", "minimum", "maximum", "fmin", "fmax", "where", "cast"} | EXACT


def reference(op: str, columns: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if op == "fma" and columns[0].dtype == torch.float64:
        return _exact_fma(*columns)
    function = REFERENCES.get(op) or getattr(torch, op)
    if columns[-1].dtype == torch.float32 and op not in EXACT and not OPS[op].predicate:
        columns = tuple(column if column.dtype == torch.bool else column.double() for column in columns)
    return function(*columns)


def assert_close(op: str, got: torch.Tensor, want: torch.Tensor, columns: tuple[torch.Tensor, ...]) -> None:
    rounded = want.to(got.dtype)
    fine = (got == rounded) | (got.isnan() & rounded.isnan())
    if got.dtype.is_floating_point:
        # The guide counts from the correctly rounded result; half a unit more from the exact one.
        ulps = 0 if op in CORRECTLY_ROUNDED else ULPS.get(op, 2) + 0.5
        if got.dtype == torch.float64 and ulps:
            ulps += 2  # the reference, itself float64, may be off by as much
        step = (torch.nextafter(rounded.abs(), torch.full_like(rounded, float("inf"))) - rounded.abs()).double()
        tiny = torch.finfo(got.dtype).tiny if ulps else 0.0
        fine |= (got.double() - want.double()).abs() <= ulps * step + tiny
        if op in SIGNED_ZERO:
            fine &= (rounded != 0) | (got.signbit() == rounded.signbit())
    if not fine.all():
        place = int((~fine).nonzero()[0])
        inputs = [column[place].item() for column in columns]
        pytest.fail(
            f"{op}{inputs}: got {got[place].item()!r}, want {want[place].item()!r}; {int((~fine).sum())} differ"
        )


# -------------------------------------------------------------------------------------------------------------- tests


def operations_source(dtype: str) -> str:
    """One kernel ``run_<op>`` for every operation of this compute dtype."""
    kernels = []
    for op in OPS.values():
        if dtype in op.domain:
            kind = c_type(dtype)
            inputs = ("bool", kind, kind) if op.name == "where" else (kind,) * op.arity
            call = f"jitgen::{op.name}({', '.join('abc'[: op.arity])})"
            kernels.append(pointwise(f"run_{op.name}", call, inputs, "bool" if op.predicate else kind))
    return "".join(kernels)


@pytest.mark.parametrize(("op", "dtype"), [(op.name, dtype) for op in OPS.values() for dtype in op.domain])
def test_operation(op: str, dtype: str) -> None:
    columns = operands(dtype, 2 if op == "where" else OPS[op].arity)
    if op == "where":
        columns = (torch.arange(columns[0].numel()) % 3 == 0, *columns)
    output = torch.bool if OPS[op].predicate else DTYPES[dtype]
    got = run(f"run_{op}", operations_source(dtype), columns, output)
    assert_close(op, got, reference(op, columns), columns)


@pytest.mark.parametrize("op", ["exp", "sigmoid", "erfc", "gelu"])
def test_coarse_operation(op: str) -> None:
    """What a 16-bit result hides: 2**-16 of the value, of erfc and GELU 2**-13 where a float16 is 0; exp and erfc reach
    the subnormals, sigmoid (as torch's) and GELU become 0."""
    (column,) = floats(torch.float32, 1)
    column = torch.cat([column, torch.linspace(-110, 95, 50_000), torch.linspace(-11, 11, 50_000)])
    got = run(
        f"coarse_{op}",
        pointwise(f"coarse_{op}", f"jitgen::coarse_{op}(a)", ("float",), "float"),
        (column,),
        torch.float32,
    )
    wide = column.double()  # of which torch's gelu cancels the digits of the tail
    gelu = wide * 0.5 * torch.special.erfc(wide * -math.sqrt(0.5))
    want = gelu if op == "gelu" else reference(op, (column,))
    smallest = torch.finfo(torch.float32).smallest_normal
    step = smallest if op in ("sigmoid", "gelu") else smallest * torch.finfo(torch.float32).eps
    tail = (column > 4.2) if op == "erfc" else (column < -5.9) & (op == "gelu")
    bound = torch.where(tail, 2.0**-13, 2.0**-16)
    fine = (got.double() - want).abs() <= want.abs() * bound + step
    fine |= (got.isnan() & want.isnan()) | (got == want.float())
    fine |= (column > 88.72) & (got > 3.4e38)  # where the last numbers before infinity are
    assert fine.all(), (column[~fine][:5], got[~fine][:5], want[~fine][:5])


def casts_source() -> str:
    kernels = []
    for source_type in COMPUTE_DTYPES:
        for to in COMPUTE_DTYPES:
            call = f"jitgen::cast<{c_type(to)}>(a)"
            kernels.append(pointwise(f"run_{source_type}_{to}", call, (c_type(source_type),), c_type(to)))
    return "".join(kernels)


@pytest.mark.parametrize("to", COMPUTE_DTYPES)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_cast(dtype: str, to: str) -> None:
    (values,) = operands(dtype, 1)
    if dtype in FLOATS and to in INTS:
        low, high = float(torch.iinfo(DTYPES[to]).min), float(torch.iinfo(DTYPES[to]).max)
        values = values[(values > low - 1) & (values < high)]  # beyond them torch leaves the result undefined
    got = run(f"run_{dtype}_{to}", casts_source(), (values,), DTYPES[to])
    assert_close("cast", got, values.to(DTYPES[to]), (values,))


def conversions_source() -> str:
    kernels = []
    for storage, kind in STORAGE_TYPES.items():
        kernels.append(pointwise(f"load_{storage}", "jitgen::load(a)", (kind,), "float"))
        kernels.append(pointwise(f"store_{storage}", f"jitgen::store<{kind}>(a)", ("float",), kind))
        kernels.append(pointwise(f"round_{storage}", f"jitgen::round_to<{kind}>(a)", ("float",), "float"))
    return "".join(kernels)


def code_type(storage: str) -> torch.dtype:
    return torch.int8 if DTYPES[storage].itemsize == 1 else torch.int16


def every_code(storage: str) -> torch.Tensor:
    limits = torch.iinfo(code_type(storage))
    return torch.arange(limits.min, limits.max + 1).to(code_type(storage)).view(DTYPES[storage])


def rounding_edges(storage: str) -> torch.Tensor:
    """Every value of the format, every midpoint, the floats beside them, and random bit patterns."""
    values = every_code(storage).float()
    ordered = values[values.isfinite()].unique()
    beyond = torch.tensor([464.0, 480.0, 61440.0, 65519.0, 65520.0, 3.3895e38, 3.4e38, float("inf"), float("nan")])
    centres = torch.cat([ordered, (ordered[1:].double() + ordered[:-1].double()).div(2).float(), beyond, -beyond])
    infinity = torch.full_like(centres, float("inf"))
    neighbours = [torch.nextafter(centres, infinity), torch.nextafter(centres, -infinity)]
    patterns = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return torch.cat([centres, *neighbours, patterns.view(torch.float32)])


@pytest.mark.parametrize("storage", SMALL_FLOATS)
def test_load_every_code(storage: str) -> None:
    codes = every_code(storage)
    got, want = run(f"load_{storage}", conversions_source(), (codes,), torch.float32), codes.float()
    number = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int32)[number], want.view(torch.int32)[number])


@pytest.mark.parametrize("storage", SMALL_FLOATS)
def test_store_rounds_to_nearest_even(storage: str) -> None:
    values = rounding_edges(storage)
    got, want = run(f"store_{storage}", conversions_source(), (values,), DTYPES[storage]), values.to(DTYPES[storage])
    number = ~want.float().isnan()
    assert torch.equal(got.float().isnan(), ~number)
    assert torch.equal(got.view(code_type(storage))[number], want.view(code_type(storage))[number])


@pytest.mark.parametrize("storage", SMALL_FLOATS)
def test_round_to_is_store_then_load(storage: str) -> None:
    values = rounding_edges(storage)
    got, want = (
        run(f"round_{storage}", conversions_source(), (values,), torch.float32),
        values.to(DTYPES[storage]).float(),
    )
    assert torch.equal(got.nan_to_num(1e30), want.nan_to_num(1e30))


LOADS = ("load_vector", "load_vector_once", "load_vector_streaming")
STORES = ("store_vector", "store_vector_streaming")


def vectors_source(dtype: str, count: int) -> str:
    """A kernel for each pair of access policies, which reverses every vector of ``count`` elements."""
    kind = c_type(dtype)
    return "".join(
        f'extern "C" __global__ void {load}_{store}(const {kind}* x, {kind}* out, long long n) {{\n'
        f"  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;\n  if (i * {count} >= n) return;\n"
        f'  auto v = jitgen::{load}<{count}>(x + i * {count});\n  decltype(v) w;\n  _Pragma("unroll")\n'
        f"  for (int j = 0; j < {count}; ++j) w[j] = v[{count} - 1 - j];\n"
        f"  jitgen::{store}(out + i * {count}, w);\n}}\n"
        for load in LOADS
        for store in STORES
    )


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("dtype", "count"),
    [(d, n) for d in ("bool", "float8_e5m2", "bfloat16", "float32", "int64") for n in (1, 2, 4, 8, 16)],
)
@pytest.mark.quick(where=lambda load, store: load == LOADS[0] or store == STORES[0])
def test_vector(dtype: str, count: int, load: str, store: str) -> None:
    size = DTYPES[dtype].itemsize
    shape = (1000, count) if size == 1 else (1000, count, size)
    content = torch.randint(0, 2 if dtype == "bool" else 256, (1000 * count * size,), dtype=torch.uint8)
    got = run(f"{load}_{store}", vectors_source(dtype, count), (content.view(DTYPES[dtype]),), DTYPES[dtype])
    assert torch.equal(got.view(torch.uint8).view(shape), content.view(shape).flip(1))
