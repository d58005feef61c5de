"""The context of ``templates/triton/gemm.py.j2``.

A program makes one tile of one region: y[m, n] = epilogue(sum over k of x[m, k] * W[n, k]), float32 sums. Three forms:

* ``tokens``: x is the dot's left operand; for dense weights and many rows.
* ``weights``: the weights are, x its right one, and the accumulator lies [n, m]. Quantised weights are unpacked in
  the registers the tensor cores read their left operand from, so they never pass through shared memory, and rows
  of x, which may be few, are on the side where the instruction's tile may be narrow.
* ``slices``: as ``weights``, with a leading dimension: each warp multiplies its own slice of every step along k, and
  the slices are summed once, in order, behind the loop. A few rows of x give few tiles; warps that share a tile keep
  enough loads in flight.

The scale of a group of weights is applied once per accumulator and group (``accumulator``: the slice of a dot is
within a group, the product is exact up to float32), once per weight (``weight``: rounded once to x's dtype) or, with
one scale for a row, once behind the loop (``row``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen import environment, triton
from jitgen.errors import UnsupportedError

SIXTEEN_BITS = ("float16", "bfloat16")


@dataclass(frozen=True)
class Tile:
    """How a region is tiled.

    Attributes:
        form: ``tokens``, ``weights`` or ``slices``.
        block_m, block_n: of y, powers of two.
        block_k: of one dot; with grouped scales a divisor of the group.
        warps, stages: of a program; ``stages`` steps of loads are in flight.
        slices: dots side by side along k, one for each warp (``slices``), else 1.
        raster: tiles along m that are made next to each other, so that they share weights in the second-level cache.
        scaling: of grouped scales: ``accumulator`` or ``weight``.
        whole_k: whether K is a multiple of the step, so that nothing is masked along it.
        one_row: whether there is one tile along m.
        wide: 64-bit indices.
    """

    form: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    slices: int = 1
    raster: int = 8
    scaling: str = "weight"
    whole_k: bool = False
    one_row: bool = False
    wide: bool = False

    @property
    def depth_step(self) -> int:
        return self.block_k * self.slices

    @property
    def weights_first(self) -> bool:
        return self.form != "tokens"


@dataclass(frozen=True)
class Access:
    """A tensor an epilogue or a prologue reads or writes at [m, n], or [m, k].

    ``kind`` is ``full`` (column stride 1), ``column`` (row stride 0, column stride 1), ``row`` (column stride 0),
    ``scalar`` or ``strided``; ``role`` is load, iota or store; ``strides`` are expressions.
    """

    role: str
    kind: str
    dtype: str
    value: str
    strides: tuple[str, str]
    pointer: str | None
    offset: str = ""


@dataclass(frozen=True)
class Weight:
    """The weight [n, k] of a contraction whose sum is named ``accumulator``.

    Dense: ``pointer`` and ``strides``. Quantised, portable layout: ``pointer`` of the codes and ``strides[0]`` of their
    rows, in bytes; ``scales`` and ``zeros`` with ``groups``, the elements between their rows.
    """

    accumulator: str
    pointer: str
    strides: tuple[str, str]
    dtype: str
    format: str | None = None
    group_size: int | None = None
    scales: str = ""
    zeros: str = ""
    groups: str = ""

    @property
    def bits(self) -> int:
        return {"int4": 4, "uint4": 4, "int8": 8}[self.format] if self.format else 0


@dataclass(frozen=True)
class Region:
    """One region: ``rows``, ``columns`` and ``depth`` are the expressions of M, N and K; ``x`` the activation's value."""

    index: int
    title: str
    rows: str
    columns: str
    depth: str
    x_dtype: str
    x_loads: tuple[Access, ...]
    weights: tuple[Weight, ...]
    operands: tuple[Access, ...]
    lines: tuple[Any, ...]
    parameters: tuple[str, ...]
    x_lines: tuple[Any, ...] = ()
    x: str = "x"
    condition: str = ""
    first: str = "0"


def context(regions: Sequence[Region], tile: Tile, parameters: Sequence[str]) -> dict[str, Any]:
    """What the template reads of ``regions``, besides the entry's name, the banner and the notes."""
    built = [_region(region, tile, len(regions)) for region in regions]
    values: dict[str, Any] = {
        "regions": built,
        "tile": tile,
        "parameters": list(parameters),
        "index_cast": ".to(tl.int64)" if tile.wide else "",
    }
    return values | {"include": _used(built)}


# ------------------------------------------------------------------------------------------------- indices of blocks


@dataclass(frozen=True)
class Axes:
    """How an index vector is spread over the dimensions of a block: ``m``, ``n``, ``k`` of x, the weights, y."""

    x_m: str
    x_k: str
    w_n: str
    w_k: str
    y_m: str
    y_n: str
    scale_n: str


_AXES = {
    "tokens": Axes("[:, None]", "[None, :]", "[None, :]", "[:, None]", "[:, None]", "[None, :]", "[None, :]"),
    "weights": Axes("[None, :]", "[:, None]", "[:, None]", "[None, :]", "[None, :]", "[:, None]", "[:, None]"),
    "slices": Axes(
        "[None, None, :]",
        "[None, :, None]",
        "[None, :, None]",
        "[None, None, :]",
        "[None, :]",
        "[:, None]",
        "[None, :, None]",
    ),
}


def _sum(*terms: str) -> str:
    return " + ".join(term for term in terms if term and term != "0") or "0"


def _times(index: str, stride: str) -> str:
    return "" if stride == "0" else index if stride == "1" else f"{index} * {stride}"


def _region(region: Region, tile: Tile, regions: int) -> dict[str, Any]:
    _check(region, tile)
    axes = _AXES[tile.form]
    x_access = [_x_load(a, region, tile) for a in region.x_loads]
    weights = [_weight(weight, number, region, tile) for number, weight in enumerate(region.weights)]
    epilogue = [_operand(a, region) for a in region.operands]
    shape = (tile.block_n, tile.block_m) if tile.weights_first else (tile.block_m, tile.block_n)
    sliced = (tile.slices, *shape) if tile.form == "slices" else shape
    return {
        "index": region.index,
        "title": region.title,
        "parameters": list(region.parameters),
        "condition": region.condition,
        "first": region.first,
        "depth": region.depth,
        "shape": sliced,
        "tile_lines": _tile_lines(region, tile),
        "index_lines": [*_index_lines(region, tile, axes), *(line for w in weights for line in w["index_lines"])],
        "contractions": weights,
        "ahead_lines": [line for w in weights for line in w["ahead_lines"]],
        "next_lines": [line for w in weights for line in w["next_lines"]],
        "turn_lines": [line for w in weights for line in w["turn_lines"]],
        "x_loads": x_access,
        "x_lines": region.x_lines,
        "x": region.x,
        "final_lines": [
            *(line for w in weights for line in w["final_lines"]),
            f"m = m{axes.y_m}",
            f"n = n{axes.y_n}",
        ],
        "loads": [a for a in epilogue if a["role"] != "store"],
        "lines": region.lines,
        "stores": [a for a in epilogue if a["role"] == "store"],
    }


def _check(region: Region, tile: Tile) -> None:
    for weight in region.weights:
        if weight.format and not tile.weights_first:
            raise UnsupportedError("a quantised weight is the left operand of Triton's dot")
        if weight.group_size and weight.group_size % tile.block_k:
            raise UnsupportedError(f"a group of {weight.group_size} weights is no multiple of a block of {tile.block_k}")


def _tile_lines(region: Region, tile: Tile) -> list[str]:
    if tile.one_row:
        return ["tile_m = 0", "tile_n = block"]
    tiles_n = f"tiles_n = ({region.columns} + {tile.block_n - 1}) // {tile.block_n}"
    if tile.raster == 1:
        return [tiles_n, "tile_m = block // tiles_n", "tile_n = block % tiles_n"]
    return [
        f"tiles_m = ({region.rows} + {tile.block_m - 1}) // {tile.block_m}",
        tiles_n,
        f"first_m = block // (tiles_n * {tile.raster}) * {tile.raster}",
        f"group_m = tl.minimum(tiles_m - first_m, {tile.raster})",
        "place = block - first_m * tiles_n",
        "tile_m = first_m + place % group_m",
        "tile_n = place // group_m",
    ]


def _index_lines(region: Region, tile: Tile, axes: Axes) -> list[str]:
    """``k`` of x, its rows and, where they are masked rather than clamped, ``x_live``."""
    k = f"tl.arange(0, {tile.block_k})"
    lines = []
    if tile.form == "slices":
        lines.append(f"first_k = tl.arange(0, {tile.slices})[:, None, None] * {tile.block_k}")
        lines.append(f"x_k = first_k + {k}{axes.x_k}")
    else:
        if any(weight.group_size for weight in region.weights):
            lines.append("first_k = tl.full((1, 1), 0, tl.int32)")
        lines.append(f"x_k = {k}{axes.x_k}")
    if _masks_rows(region, tile):
        lines.append(f"x_m = m{axes.x_m}")
    else:
        lines.append(f"x_m = tl.minimum(m, {region.rows} - 1){axes.x_m}  # beyond the last: read, never stored")
    return lines


def _masks_rows(region: Region, tile: Tile) -> bool:
    """Whether rows of x beyond the last are masked: where there may be many, or where they lie side by side."""
    return tile.form == "slices" or any(a.strides[0] == "1" for a in region.x_loads)


def _x_load(a: Access, region: Region, tile: Tile) -> dict[str, Any]:
    at = _sum(a.offset, _times("start", a.strides[1]), _times("x_m", a.strides[0]), _times("x_k", a.strides[1]))
    masks = [f"(x_m < {region.rows})"] if _masks_rows(region, tile) and a.strides[0] != "0" else []
    masks += [] if tile.whole_k else [f"(x_k < {region.depth} - start)"]
    if a.role == "iota":
        return {"value": a.value, "expression": f"({at}).to(tl.int64)"}
    mask = f", mask={' & '.join(masks)}, other=0" if masks and a.kind != "scalar" else ""
    loaded = f"tl.load({a.pointer}{'' if at == '0' else ' + ' + at}{mask})"
    if region.x_lines:
        loaded = triton.load_cast(loaded, a.dtype)
    return {"value": a.value, "expression": loaded}


# ----------------------------------------------------------------------------------------------------------- weights


def _weight(weight: Weight, number: int, region: Region, tile: Tile) -> dict[str, Any]:
    lines = _dense(weight, number, region, tile) if weight.format is None else _quantised(weight, number, region, tile)
    empty: dict[str, list[str]] = {"ahead_lines": [], "next_lines": [], "turn_lines": [], "final_lines": []}
    found: dict[str, Any] = empty | lines | {"accumulator": weight.accumulator}
    if tile.form == "slices":
        total = f"{weight.accumulator} = tl.sum({weight.accumulator}, 0)"
        found["final_lines"] = [total, *found["final_lines"]]
    return found


def _precision(region: Region) -> str:
    return 'input_precision="ieee"' if region.x_dtype == "float32" else 'input_precision="ieee", out_dtype=tl.float32'


def _dense(weight: Weight, number: int, region: Region, tile: Tile) -> dict[str, Any]:
    axes, w, acc = _AXES[tile.form], f"w{number}", weight.accumulator
    k = f"tl.arange(0, {tile.block_k}){axes.w_k}"
    masks = [] if tile.whole_k else [f"({w}_k < {region.depth} - start)"]
    if weight.strides[0] == "1":
        row = f"n{axes.w_n}"
        masks.append(f"({w}_n < {region.columns})")
    else:
        row = f"tl.minimum(n, {region.columns} - 1){axes.w_n}"
    mask = f", mask={' & '.join(masks)}, other=0" if masks else ""
    at = _sum(
        _times("start", weight.strides[1]), _times(f"{w}_n", weight.strides[0]), _times(f"{w}_k", weight.strides[1])
    )
    operands = f"{w}, x" if tile.weights_first else f"x, {w}"
    return {
        "index_lines": [
            f"{w}_n = {row}",
            f"{w}_k = {'first_k + ' if tile.form == 'slices' else ''}{k}",
        ],
        "loop_lines": [
            f"{w} = tl.load({weight.pointer} + {at}{mask})",
            f"{acc} = tl.dot({operands}, {acc}, {_precision(region)})",
        ],
    }


def _quantised(weight: Weight, number: int, region: Region, tile: Tile) -> dict[str, Any]:
    axes, w, acc = _AXES[tile.form], f"w{number}", weight.accumulator
    per_code = 8 // weight.bits
    sliced = tile.form == "slices"
    scaling = tile.scaling if weight.group_size else "row"
    dtype = triton.STORAGE_TYPES[region.x_dtype]
    step, group = tile.depth_step, weight.group_size
    bytes_k = f"tl.arange(0, {tile.block_k // per_code}){axes.w_k}"
    first = "first_k" if per_code == 1 else f"first_k // {per_code}"
    index_lines = [
        f"{w}_n = tl.minimum(n, {region.columns} - 1){axes.w_n}",
        f"{w}_k = {first + ' + ' if sliced else ''}{bytes_k}",
    ]
    live = f"{w}_k < {region.depth} - start" if per_code == 1 else f"{w}_k * {per_code} < {region.depth} - start"
    mask = "" if tile.whole_k else f", mask={live}, other=0"
    start = "start" if per_code == 1 else f"start // {per_code}"
    codes = f"tl.load({weight.pointer} + {_sum(start, _times(f'{w}_n', weight.strides[0]), f'{w}_k')}{mask})"

    def parameter(pointer: str, at: str) -> str:
        """A scale or a zero-point of the step at ``at``; nothing beyond the last."""
        row = _times(f"{w}_n", weight.groups)
        if group is None:
            return f"tl.load({pointer} + {row})"
        at_k = f"({at} + first_k)" if at else "first_k"
        return f"tl.load({pointer} + {row} + {at_k} // {group}, mask={at_k} < {region.depth}, other=0)"

    ahead, following, turn, final = [], [], [], []
    per_group = [("scale", weight.scales)] if group else []
    per_group += [("zero", weight.zeros)] if weight.zeros and group else []
    for name, pointer in per_group:
        ahead.append(f"{w}_{name} = {parameter(pointer, '')}")
        # The loads of a step are in flight while the one before it is multiplied.
        following.append(f"{w}_next_{name} = {parameter(pointer, f'start + {step}')}")
        turn.append(f"{w}_{name} = {w}_next_{name}")
    if weight.zeros and not group:
        ahead.append(f"{w}_zero = {parameter(weight.zeros, '')}")
    zero = f", {w}_zero" if weight.zeros else ""

    def values(as_dtype: str) -> str:
        return f"{weight.format}_values({w}_codes{zero}, {as_dtype})"

    scale = f"{w}_scale"
    loop = [f"{w}_codes = {codes}"]
    if scaling == "weight":
        scales_dtype = "float32" if weight.format == "int8" else "bfloat16"
        if region.x_dtype == scales_dtype:
            loop.append(f"{w} = {values(dtype)} * {scale}")
        elif region.x_dtype == "float32":
            loop.append(f"{w} = {values(dtype)} * {scale}.to(tl.float32)")
        else:
            loop.append(f"{w} = ({values(dtype)}.to(tl.float32) * {scale}.to(tl.float32)).to({dtype})")
    else:
        loop.append(f"{w} = {values(dtype)}")
    if scaling == "accumulator":
        loop.append(f"{acc}_group = tl.dot({w}, x, {_precision(region)})")
        loop.append(f"{acc} = tl.fma({acc}_group, {scale}.to(tl.float32), {acc})")
    else:
        loop.append(f"{acc} = tl.dot({w}, x, {acc}, {_precision(region)})")
    if scaling == "row":
        at = _times(f"tl.minimum(n, {region.columns} - 1)[:, None]", weight.groups)
        final.append(f"{acc} = {acc} * tl.load({weight.scales} + {at}).to(tl.float32)")
    return {
        "index_lines": index_lines,
        "ahead_lines": ahead,
        "next_lines": following,
        "loop_lines": loop,
        "turn_lines": turn,
        "final_lines": final,
    }


# ---------------------------------------------------------------------------------------------------------- epilogue


def _operand(a: Access, region: Region) -> dict[str, Any]:
    row, column = {
        "full": (a.strides[0], "1"),
        "column": ("0", "1"),
        "row": (a.strides[0], "0"),
        "scalar": ("0", "0"),
        "strided": a.strides,
    }[a.kind]
    at = _sum(a.offset, _times("m", row), _times("n", column))
    limits = {
        "row": f"m < {region.rows}",
        "column": f"n < {region.columns}",
    }
    mask = limits.get(a.kind, f"(m < {region.rows}) & (n < {region.columns})")
    found: dict[str, Any] = {"role": a.role, "value": a.value, "pointer": a.pointer, "at": at, "mask": mask}
    if a.role == "store":
        return found | {"stored": triton.store_cast(a.value, a.dtype)}
    if a.role == "iota":
        return found | {"expression": f"({at}).to(tl.int64)"}
    loaded = f"tl.load({a.pointer})" if a.kind == "scalar" else f"tl.load({a.pointer} + {at}, mask={mask})"
    return found | {"expression": triton.load_cast(loaded, a.dtype)}


def _used(regions: Sequence[dict[str, Any]]) -> str:
    """The static header's functions that the regions call: one file is one kernel, and holds no more than it needs."""
    lines: list[str] = []
    for region in regions:
        lines += [line.text for line in (*region["x_lines"], *region["lines"])]
        lines += [a["expression"] for a in (*region["x_loads"], *region["loads"])]
        lines += [a["stored"] for a in region["stores"]]
        lines += [line for c in region["contractions"] for line in c["loop_lines"]]
    return environment.select_functions(environment.header("triton", "jitgen_triton.py"), "\n".join(lines))
