"""Matrix products in Triton with contexts filled by hand: sources for the compiler, runs on CPU tensors, references.

``python -m tests.triton_gemm`` runs every check under Triton's interpreter (``TRITON_INTERPRET=1``) and prints what went
wrong as JSON, by check; ``tests/unit/test_gemm_triton.py`` reads that and ``tests/compile/test_gemm_triton.py``
compiles the same sources.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jitgen.codegen import environment
from jitgen.codegen import triton as dialect
from jitgen.families.gemm import triton as gemm
from jitgen.families.gemm.triton import Access, Region, Tile, Weight
from jitgen.spec import DTYPE_NAMES, KernelSource, Target

Text = Any


@dataclass(frozen=True)
class Line:
    text: str
    mark: str = ""


# ------------------------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True)
class Quantised:
    """A weight [n, k] in the portable layout, and its value in float64."""

    format: str
    group_size: int | None
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    value: torch.Tensor


def quantised(format: str, group_size: int | None, n: int, k: int) -> Quantised:
    """Random codes, scales and zero-points; what pads k to whole groups decodes to zero."""
    group = group_size or max(64, -(-k // 64) * 64)
    padded = max(group if k else 0, -(-k // group) * group)
    low, high = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-127, 128)}[format]
    codes = torch.randint(low, high, (n, padded))
    groups = padded // group if group_size else 1
    zeros = torch.randint(0, 16, (n, groups)) if format == "uint4" else torch.zeros(n, groups, dtype=torch.int64)
    spread = zeros.repeat_interleave(group, 1)[:, :padded]
    codes[:, k:] = spread[:, k:]
    scale_dtype = torch.float32 if format == "int8" else torch.bfloat16
    scales = (torch.rand(n, groups) + 0.5).to(scale_dtype) * (1 if format == "int8" else 0.125)
    value = (codes - spread) * scales.double().repeat_interleave(group, 1)[:, :padded]
    if format == "int8":
        stored = codes.to(torch.int8)
    else:
        nibbles = codes & 15
        stored = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
    kept = zeros.to(torch.uint8) if format == "uint4" else None
    return Quantised(format, group_size, stored, scales, kept, value[:, :k])


def dense(n: int, k: int, dtype: torch.dtype, order: str = "row") -> torch.Tensor:
    """A weight [n, k] whose rows (``row``) or columns (``column``) are contiguous, or neither (``strided``)."""
    if order == "column":
        return torch.randn(k, n).to(dtype).t()
    if order == "strided":
        return torch.randn(n, 2 * k + 1).to(dtype)[:, 1::2]
    return torch.randn(n, k).to(dtype)


# ------------------------------------------------------------------------------------------------------------ epilogues


@dataclass
class Builder:
    """Parameters of one kernel, in order, and the arguments to them."""

    pointers: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    integers: list[tuple[str, int]] = field(default_factory=list)
    scalars: list[tuple[str, float]] = field(default_factory=list)

    def pointer(self, name: str, tensor: torch.Tensor) -> str:
        self.pointers.append((name, tensor))
        return name

    def integer(self, name: str, value: int) -> str:
        self.integers.append((name, value))
        return name

    def stride(self, name: str, value: int) -> str:
        return str(value) if value in (0, 1) else self.integer(name, value)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in (*self.pointers, *self.integers, *self.scalars))


def access(builder: Builder, role: str, name: str, tensor: torch.Tensor) -> Access:
    """``tensor`` [m, n] as an epilogue's operand named ``name``."""
    strides = tuple(builder.stride(f"s_{name}_{dim}", tensor.stride(dim)) for dim in (0, 1))
    kind = "strided"
    if tensor.stride(1) == 1:
        kind = "column" if tensor.stride(0) == 0 else "full"
    elif tensor.stride(1) == 0:
        kind = "scalar" if tensor.stride(0) == 0 else "row"
    return Access(role, kind, DTYPE_NAMES[tensor.dtype], name, strides, builder.pointer(f"p_{name}", tensor))


Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Epilogue:
    """Lines over acc0.. and named operands, the results they give, and the same in float64."""

    lines: tuple[str, ...]
    results: tuple[str, ...]
    reference: Callable[..., Any]
    inputs: Callable[[int, int], Inputs] = lambda m, n: {}


_SIGMOID = dialect.ROWS["sigmoid"]["float32"]

EPILOGUES = {
    "plain": Epilogue((), ("acc0",), lambda a: a),
    "bias": Epilogue(
        ("v1 = acc0 + bias",),
        ("v1",),
        lambda a, bias: a + bias,
        lambda m, n: {"bias": torch.randn(n).bfloat16().expand(m, n)},
    ),
    "residual": Epilogue(
        ("v1 = acc0 * token", "v2 = v1 * one", "v3 = v2 + skip", "v4 = v3 * view"),
        ("v3", "v4"),
        lambda a, token, one, skip, view: ((a * token * one + skip), (a * token * one + skip) * view),
        lambda m, n: {
            "token": torch.randn(m, 1).expand(m, n),
            "one": torch.randn(1, 1).half().expand(m, n),
            "skip": torch.randn(m, n + 3)[:, :n],
            "view": torch.randn(n, 2 * m).t()[::2].bfloat16(),
        },
    ),
    "swiglu": Epilogue(
        (f"v1 = {_SIGMOID.format('acc0')}", "v2 = acc0 * v1", "v3 = v2 * acc1"),
        ("v3",),
        lambda a, b: torch.nn.functional.silu(a) * b,
    ),
    "three": Epilogue(("v1 = acc0 * acc1", "v2 = v1 + acc2"), ("v2",), lambda a, b, c: a * b + c),
}


@dataclass(frozen=True)
class Case:
    """A kernel with its arguments; ``outputs`` with their float64 references and tolerances."""

    source: KernelSource
    arguments: tuple[Any, ...]
    blocks: int
    outputs: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]


def case(
    tile: Tile,
    x: torch.Tensor,
    weights: list[list[torch.Tensor | Quantised]],
    epilogue: str = "plain",
    target: str = "interpreter",
    out_dtype: torch.dtype | None = None,
    transposed_store: bool = False,
) -> Case:
    """``epilogue`` of x @ W.T for every list of weights, a region each, in one kernel."""
    m, k = x.shape
    whole = k % tile.depth_step == 0
    tile = replace(tile, whole_k=whole, one_row=tile.one_row and m <= tile.block_m)
    builder = Builder()
    rows, depth = builder.integer("rows", m), builder.integer("depth", k)
    px = builder.pointer("x_pointer", x)
    strides = tuple(builder.stride(f"s_x_{dim}", x.stride(dim)) for dim in (0, 1))
    x_dtype = DTYPE_NAMES[x.dtype]
    loads = (Access("load", "strided", x_dtype, "x", strides, px),)
    made, outputs, blocks = [], [], 0
    chosen = EPILOGUES[epilogue]
    for index, factors in enumerate(weights):
        n = (factors[0].value if isinstance(factors[0], Quantised) else factors[0]).shape[0]
        columns = builder.integer(f"columns{index}", n)
        described = [_weight(builder, f"{index}_{place}", place, w) for place, w in enumerate(factors)]
        named = chosen.inputs(m, n)
        operands = [replace(access(builder, "load", f"{name}{index}", t), value=name) for name, t in named.items()]
        first, blocks = blocks, blocks + -(-m // tile.block_m) * -(-n // tile.block_n)
        end = builder.integer(f"end{index}", blocks) if index + 1 < len(weights) else ""
        last = index + 1 == len(weights)
        condition = "" if len(weights) == 1 else "else" if last else f"{'el' if index else ''}if block < {end}"
        exact, sizes = [], []
        for w in factors:
            value = w.value if isinstance(w, Quantised) else w.double()
            exact.append(x.double() @ value.t())
            sizes.append(x.double().abs() @ value.abs().t())
        wanted = chosen.reference(*exact, *(tensor.double() for tensor in named.values()))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for place, (result, want) in enumerate(zip(chosen.results, wanted, strict=True)):
            shape = (n, m) if transposed_store else (m, n)
            y = torch.full(shape, math.nan, dtype=out_dtype or x.dtype)
            y = y.t() if transposed_store else y
            store = access(builder, "store", f"y{index}_{place}", y)
            operands.append(replace(store, value=result))
            spread = _spread(chosen, exact, sizes, named, place, factors, x, k)
            outputs.append((y, want, spread + torch.finfo(y.dtype).eps * want.abs()))
        made.append(
            Region(
                index, f"region {index}", rows, columns, depth, x_dtype, loads, tuple(described), tuple(operands),
                tuple(Line(text) for text in chosen.lines), (), condition=condition, first=f"end{index - 1}" if first else "0",
            )
        )  # fmt: skip
    made = [replace(region, parameters=builder.names) for region in made]
    values = gemm.context(made, tile, builder.names) | {
        "banner": "by hand",
        "notes": [str(tile)],
        "entry": "gemm",
        "float8": False,
        "saturates": "1",
    }
    integer = "i64" if tile.wide else "i32"
    signature = [f"*{dialect.SIGNATURE_TYPES[DTYPE_NAMES[t.dtype]]}" for _, t in builder.pointers]
    signature += [integer] * len(builder.integers)
    divisible = [i for i, (_, t) in enumerate(builder.pointers) if t.data_ptr() % 16 == 0]
    divisible += [len(builder.pointers) + i for i, (_, v) in enumerate(builder.integers) if v % 16 == 0]
    options = {"signature": signature, "divisible": divisible, "num_warps": tile.warps, "num_stages": tile.stages}
    options["enable_fp_fusion"] = False
    source, _ = environment.kernel_source(
        "gemm", "triton", "gemm.py.j2", "triton", Target.parse(target), values, options
    )
    arguments = (*(t for _, t in builder.pointers), *(v for _, v in builder.integers))
    return Case(source, arguments, blocks, tuple(outputs))


def _weight(builder: Builder, name: str, place: int, w: torch.Tensor | Quantised) -> Weight:
    if isinstance(w, torch.Tensor):
        pointer = builder.pointer(f"w{name}", w)
        strides = tuple(builder.stride(f"s_w{name}_{dim}", w.stride(dim)) for dim in (0, 1))
        return Weight(f"acc{place}", pointer, strides, DTYPE_NAMES[w.dtype])
    return Weight(
        f"acc{place}",
        builder.pointer(f"codes{name}", w.codes),
        (builder.integer(f"s_codes{name}", w.codes.stride(0)), "1"),
        DTYPE_NAMES[w.codes.dtype],
        w.format,
        w.group_size,
        builder.pointer(f"scales{name}", w.scales),
        builder.pointer(f"zeros{name}", w.zeros) if w.zeros is not None else "",
        builder.integer(f"groups{name}", w.scales.stride(0)),
    )


def _spread(
    chosen: Epilogue, exact: list[Any], sizes: list[Any], named: Inputs, place: int, factors: Any, x: Any, k: int
) -> torch.Tensor:
    """How far a result may be off: float32 sums of k terms, weights rounded once to a 16-bit x's dtype."""
    relative = torch.finfo(torch.float32).eps * (8 + math.sqrt(k))
    if x.dtype != torch.float32 and any(isinstance(w, Quantised) for w in factors):
        relative += torch.finfo(x.dtype).eps / 2
    bounds = []
    for number, size in enumerate(sizes):
        moved = list(exact)
        moved[number] = exact[number] + relative * size
        results = chosen.reference(*moved, *(t.double() for t in named.values()))
        base = chosen.reference(*exact, *(t.double() for t in named.values()))
        results, base = (r if isinstance(r, tuple) else (r,) for r in (results, base))
        bounds.append((results[place] - base[place]).abs())
    return 2 * sum(bounds) + 1e-6


def run(made: Case) -> str | None:
    """What is wrong with the results of ``made`` on CPU tensors."""
    from jitgen.runtime import interpreter

    kernel = interpreter.load(made.source.text, "gemm", made.source.option("signature"))
    if made.blocks:
        kernel((made.blocks,), *made.arguments)
    for number, (y, want, spread) in enumerate(made.outputs):
        wrong = ~((y.double() - want).abs() <= spread)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            return f"result {number}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {at}: {y[at]} for {want[at]}"
    return None


# -------------------------------------------------------------------------------------------------------------- checks

TOKENS = Tile("tokens", 32, 32, 32, 4, 3, raster=2)
WEIGHTS = Tile("weights", 32, 64, 32, 4, 3, raster=2)
SLICES = Tile("slices", 16, 16, 32, 4, 3, slices=4, scaling="accumulator", one_row=True)
SHAPES = ((1, 1, 1), (16, 16, 128), (33, 65, 100), (3, 70, 257))
FORMS = {"tokens": TOKENS, "weights": WEIGHTS, "slices": SLICES}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Check = Callable[[], Iterator[str | None]]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    def keep(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return keep


def _say(wrong: str | None, *facts: Any) -> str | None:
    return wrong and f"{' '.join(map(str, facts))}: {wrong}"


def _dense_shapes(form: str, dtype: torch.dtype) -> Check:
    def run_all() -> Iterator[str | None]:
        for m, n, k in SHAPES:
            for order in ("row", "column", "strided"):
                x = torch.randn(m, k).to(dtype)
                yield _say(run(case(FORMS[form], x, [[dense(n, k, dtype, order)]])), m, n, k, order)

    return run_all


def _quantised_shapes(form: str, format: str, dtype: torch.dtype) -> Check:
    def run_all() -> Iterator[str | None]:
        for m, n, k in SHAPES:
            for group in (32, 64, 128, None):
                for scaling in ("accumulator", "weight") if group else ("weight",):
                    tile = replace(FORMS[form], scaling=scaling, block_k=64 if group == 64 else 32)
                    x = torch.randn(m, k).to(dtype)
                    made = case(tile, x, [[quantised(format, group, n, k)]])
                    yield _say(run(made), m, n, k, group, scaling)

    return run_all


for _form in FORMS:
    for _name, _dtype in DTYPES.items():
        CHECKS[f"dense-{_form}-{_name}"] = _dense_shapes(_form, _dtype)
        for _format in ("int4", "uint4", "int8") if _form != "tokens" else ():
            CHECKS[f"{_format}-{_form}-{_name}"] = _quantised_shapes(_form, _format, _dtype)


@check("epilogues")
def epilogues() -> Iterator[str | None]:
    for form, tile in FORMS.items():
        for m, n, k in ((5, 33, 64), (40, 70, 96)):
            for name, count in (("bias", 1), ("residual", 1), ("swiglu", 2), ("three", 3)):
                for transposed in (False, True):
                    x = torch.randn(m, k).bfloat16() / 4
                    weights: list[Any] = [dense(n, k, x.dtype) for _ in range(count)]
                    made = case(tile, x, [weights], name, out_dtype=torch.float32, transposed_store=transposed)
                    yield _say(run(made), form, m, n, k, name, transposed)
                    if form != "tokens":
                        weights = [quantised("int4", 32, n, k) for _ in range(count)]
                        yield _say(run(case(tile, x, [weights], name)), form, m, n, k, name, "int4")


@check("regions")
def regions() -> Iterator[str | None]:
    for form, tile in FORMS.items():
        for m in (1, 33):
            x = torch.randn(m, 96).bfloat16()
            weights: list[list[Any]] = [[dense(n, 96, x.dtype)] for n in (70, 16, 33)]
            yield _say(run(case(tile, x, weights, "bias")), form, m, "dense")
            if form != "tokens":
                weights = [[quantised("uint4", 32, n, 96)] for n in (70, 16, 33)]
                yield _say(run(case(tile, x, weights)), form, m, "uint4")


@check("degenerate")
def degenerate() -> Iterator[str | None]:
    for form, tile in FORMS.items():
        for m, n, k in ((3, 5, 0), (0, 5, 32), (3, 0, 32), (40, 40, 0)):
            x = torch.randn(m, k).bfloat16()
            yield _say(run(case(tile, x, [[dense(n, k, x.dtype)]], "bias")), form, m, n, k)
            if form != "tokens":
                yield _say(run(case(tile, x, [[quantised("uint4", 32, n, k)]], "bias")), form, m, n, k, "uint4")
                yield _say(run(case(tile, x, [[quantised("int8", None, n, k)]], "bias")), form, m, n, k, "int8")


@check("strides")
def strides() -> Iterator[str | None]:
    for form, tile in FORMS.items():
        for wide in (False, True):
            tile = replace(tile, wide=wide)
            for x in (torch.randn(50, 40).t(), torch.randn(40, 120)[:, 3:103:2], torch.randn(1, 50).expand(40, 50)):
                for order in ("row", "column", "strided"):
                    made = case(tile, x.half(), [[dense(33, 50, torch.float16, order)]])
                    yield _say(run(made), form, wide, tuple(x.stride()), order)


@check("infinities")
def infinities() -> Iterator[str | None]:
    """An infinite element of x makes its row's sums infinite, or NaN, as the weights' signs have it."""
    for form, tile in FORMS.items():
        x = torch.randn(6, 64).bfloat16()
        x[2, 9], x[4, 63] = math.inf, math.nan
        weights: list[Any] = [dense(40, 64, x.dtype)]
        if form != "tokens":
            weights += [quantised(format, 32, 40, 64) for format in ("int4", "uint4", "int8")]
        for w in weights:
            made = case(tile, x, [[w]])
            run(made)
            y, want, _ = made.outputs[0]
            same = (y.double() == want) | (y.isnan() & want.isnan()) | (want.isfinite() & y.isfinite())
            yield None if same.all() else f"{form} {getattr(w, 'format', 'dense')}: {int((~same).sum())} differ"


def failures(function: Check) -> list[str]:
    try:
        return [wrong for wrong in function() if wrong]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def main(chosen: list[str]) -> None:
    torch.seed()
    print(json.dumps({name: failures(function) for name, function in CHECKS.items() if not chosen or name in chosen}))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
