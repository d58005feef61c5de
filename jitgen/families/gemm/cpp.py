"""Builds the context of ``templates/gemm/gemm.cpp.j2``: structs for the activation and for each region.

The mainloop is ``templates/common/include/jitgen/gemm.hpp``. The weights of a region are described by types of that
header. Its epilogue and the activation's prologue are loops over neighbouring elements, which the compiler vectorises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.gemm.codes import codes_type
from jitgen.families.gemm.context import ContractionContext, GemmContext, GemmOperand, GemmRegion
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.mainloops import CppDecoded, CppSchedule
from jitgen.ir.body import accumulator_dtype
from jitgen.ir.program import Kernel
from jitgen.kernel.printed import struct_members, sum_of
from jitgen.quant import formats
from jitgen.quant.formats import Format

FLAGS = ["-O2"]
"""The mainloops are written with vector types, and loops over neighbours are marked ``omp simd``: -O3 takes a quarter
more time to compile than -O2 and gains nothing."""
GENERIC_TILE_ROWS = 12
"""Rows of the tallest tile in the second copy of a mainloop, which is for processors without dot products of bfloat16
or bytes, and with weights in bit planes, whose tiles have up to 32 steps. It is lower than others, to save compile
time."""

MATRIX_ROWS = 16
"""Rows of x from which on products of bytes are by matrix registers (AMX), whose tiles have 32: fewer rows take as long
by vectors, whose tiles have 24."""
NIBBLE_ROWS = 48
"""The same of 4-bit codes, which become bytes first: 16 rows of 4096 took 1.5 times as long as by vectors, and 128 rows
0.6 times (Xeon with AMX)."""
PAIR_ROWS, DENSE_PAIR_ROWS = 2, 6
"""The same of pairs of bfloat16, with quantised and with dense weights: matrix registers multiply 16 times as many in
a cycle as vectors do. Of weights of 2048 x 2048 with int4 2 rows took 0.14 ms, and 0.27 by vectors; 4 rows with dense
ones along K took 0.63 and 0.89, along N 0.96 and 0.68 (Xeon with AMX, one thread)."""
MATRIX_GROUP = 64
"""Neighbours in k that matrix registers multiply at once."""
MATRIX_PAIRS = 32
"""The same of bfloat16."""
MOST_PACKED = 4096
"""Neighbours in k of a row of x that are packed at a time, with their sums (``most_span`` of gemm_operands.hpp)."""

_COMPUTE = {"float32": "Singles", "float64": "Wide", "int32": "Whole", "int64": "WideWhole"}
"""By the accumulator's dtype, the arithmetic of ``gemm_compute.hpp``."""
_NARROW = ("uint8", "int8", "int16")
"""Dtypes of which two neighbours in k are multiplied at once."""
_ALONG = {"k": "k", "outer": "n", "strided": "neither"}


def build(
    kernel: Kernel, layouts: Sequence[GemmLayout], schedule: CppSchedule, products: GemmContext, dialect: Dialect
) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    contractions = [product for region in products.regions for product in region.contractions]
    dtype = contractions[0].contraction.dtype
    pairs = dtype == "bfloat16" and all(_in_pairs(product) for product in contractions)
    quads = _quads(contractions)
    copies = pairs or quads is not None
    planes = any(_in_planes(product) for product in contractions)
    decoded = isinstance(schedule, CppDecoded)
    return {
        "mainloop": "jitgen/gemm_panels.hpp" if decoded else "jitgen/gemm.hpp",
        "planes": planes,
        "x": _activation(contractions[0], dialect),
        "regions": [_region(region, products, decoded) for region in products.regions],
        "region_arguments": "".join(f", region{region.index}" for region in products.regions),
        "accumulator": contractions[0].type,
        "compute": _compute(contractions[0]),
        "pairs": pairs,
        "quads": quads,
        "matrices_of_bytes": _matrices_of_bytes(contractions, quads, schedule),
        "matrices_of_pairs": _matrices_of_pairs(contractions, pairs, schedule),
        "tile_rows": schedule.block_m,
        "generic_tile_rows": min(schedule.block_m, GENERIC_TILE_ROWS) if copies or planes else schedule.block_m,
        "fewest_rows": schedule.fewest_rows,
        "invariant": "jitgen::gemm::Invariant<" if schedule.invariant else "",
        "grouping": products.grouping,
        "groups": _groups(products),
        "matrices": " * ".join(products.batch) if not products.grouping else "",
        "matrix_lines": [f"const int64_t {name} = {expression};" for name, expression in products.indices("matrix")],
        "batch_steps": [
            (name, " + ".join(f"z{dim} * {stride}" for dim, stride in enumerate(strides)))
            for name, strides in products.batch_steps
        ],
    }, {"flags": FLAGS}


def _groups(products: GemmContext) -> dict[str, Any] | None:
    """Describes what divides rows, or K, among groups; None where nothing does."""
    operand = products.groups
    if operand is None:
        return None
    of_lengths = products.grouping == "lengths"
    return {
        "read": f"{operand.pointer}, {operand.own[1]}, {products.batch[0] if of_lengths else 'group_count'}",
        "divided": "k" if of_lengths else "m",
        "steps": [(str(o.pointer or o.offset), step) for o, step in products.group_steps],
    }


def _in_pairs(product: ContractionContext) -> bool:
    """Returns whether the weights are decoded to pairs of bfloat16, in which they are exact."""
    if product.contraction.format is not None:
        return not _in_planes(product)
    return product.weight[0].dtype == "bfloat16"


def _compute(product: ContractionContext) -> str:
    """Returns the arithmetic of a product on any processor."""
    dtype = product.contraction.dtype
    if dtype not in _NARROW:
        return _COMPUTE[accumulator_dtype(dtype)]
    if product.contraction.format is None:
        return "Shorts"
    return _code_bytes(formats.find(product.contraction.format), "Halves")


def _code_bytes(format: Format, sums: str) -> str:
    zeroed = str(format.zero_point).lower()
    if format.tiled:
        return f"CodeBytes<{format.bits}, {zeroed}, jitgen::{sums}>"
    assert isinstance(format.code, formats.Integer)
    return f"PlaneBytes<{format.bits}, {format.code.step}, {format.first}, {zeroed}, jitgen::{sums}>"


def _quads(products: Sequence[ContractionContext]) -> str | None:
    """Returns the arithmetic of products of bytes, four neighbours in k at once; None where an operand is no byte, or
    all are unsigned."""
    format = products[0].contraction.format
    if format is not None:
        of_codes = products[0].contraction.dtype == "int8"
        return _code_bytes(formats.find(format), "Ints") if of_codes else None
    pairs = {(product.contraction.dtype, product.weight[0].dtype) for product in products}
    signed = [tuple(dtype == "int8" for dtype in pair) for pair in pairs if set(pair) <= {"int8", "uint8"}]
    if len(pairs) != 1 or not signed or not any(signed[0]):
        return None
    return f"Quads<{', '.join(str(operand).lower() for operand in signed[0])}>"


def _matrices_of_bytes(products: Sequence[ContractionContext], quads: str | None, schedule: CppSchedule) -> int:
    """Returns the rows of x from which on matrix registers multiply bytes, where the processor has such; 0 where none
    do: groups of codes that share a scale are whole steps of them."""
    contraction = products[0].contraction
    group = contraction.group_size or MATRIX_GROUP
    whole = group % MATRIX_GROUP == 0 and MOST_PACKED % group == 0
    if quads is None or not whole or schedule.block_m < MATRIX_ROWS:
        return 0
    return MATRIX_ROWS if contraction.format is None or formats.find(contraction.format).bits == 8 else NIBBLE_ROWS


def _matrices_of_pairs(products: Sequence[ContractionContext], pairs: bool, schedule: CppSchedule) -> int:
    """Returns the rows of x from which on matrix registers multiply pairs of bfloat16, where the processor has such; 0
    where none do: their sums are in another order than those of vectors."""
    whole = all((product.contraction.group_size or MATRIX_PAIRS) % MATRIX_PAIRS == 0 for product in products)
    rows = DENSE_PAIR_ROWS if products[0].contraction.format is None else PAIR_ROWS
    return rows if pairs and whole and not schedule.invariant and schedule.block_m >= rows else 0


def _in_planes(product: ContractionContext) -> bool:
    """Returns whether the weights are of a format whose codes are stored in bit planes."""
    return product.contraction.format is not None and not formats.find(product.contraction.format).tiled


# -------------------------------------------------------------------------------------------------------- activation


def _activation(product: ContractionContext, dialect: Dialect) -> dict[str, Any]:
    storage = dialect.storage_types[product.contraction.dtype]
    operands = [product.x] if product.x is not None else list(product.x_loads)
    result = f"jitgen::store<{storage}>({product.x_value})"
    if product.x is not None:
        result = _stored(f"{_local(product.x)}[{_step(product.x, 'i')}]", product.x, storage)
    fields, arguments = struct_members(operands, _integers, product.x_scalars)
    return {
        "storage": storage,
        "fields": fields,
        "arguments": arguments,
        "bases": [_base(operand, "m", "k") for operand in operands],
        "loads": [] if product.x is not None else [_load(operand, "i") for operand in operands],
        "lines": [] if product.x is not None else product.x_lines,
        "result": result,
        "across": _across(product.x, storage),
    }


def _across(x: GemmOperand | None, storage: str) -> str | None:
    """Prints row ``i`` of ``x`` at one k if rows are next to each other in memory; else None."""
    return _stored(f"{_local(x)}[i]", x, storage) if x is not None and x.kind == "outer" else None


def _stored(element: str, operand: GemmOperand, storage: str) -> str:
    """Prints ``element`` of ``operand`` as a ``storage``; a cast that loses nothing is done as it is loaded."""
    return element if operand.storage == storage else f"jitgen::store<{storage}>(jitgen::load({element}))"


# ----------------------------------------------------------------------------------------------------------- regions


def _region(region: GemmRegion, products: GemmContext, decoded: bool) -> dict[str, Any]:
    operands = [*region.loads, *region.stores]
    fields, arguments = struct_members(operands, _integers, region.scalars)
    weights = [_weight(product, region, decoded) for product in region.contractions]
    return {
        "index": region.index,
        "title": region.title,
        "weights": weights,
        "fields": fields,
        "arguments": [*(weight["initializer"] for weight in weights), *arguments, region.columns],
        "bases": [_base(o, "m", "first" if o.run == 1 else f"(first / {o.run})") for o in operands],
        "run": max(operand.run for operand in region.stores),
        "largest": [f"largest{number}" for number in range(len(region.stores))],
        "products": [{"name": product.accumulator, "index": product.index} for product in region.contractions],
        "loads": [_load(operand, "j") for operand in region.loads],
        "lines": region.lines,
        "stores": [
            {
                "target": f"{_local(operand)}[{_step(operand, 'j' if operand.run == 1 else f'j / {operand.run}')}]",
                "type": operand.type,
                "storage": operand.storage,
                "value": operand.value,
            }
            for operand in region.stores
        ],
    }


def _weight(product: ContractionContext, region: GemmRegion, decoded: bool) -> dict[str, Any]:
    """Returns the type of a weight (of ``gemm_operands.hpp`` or ``gemm_panels.hpp``), and its initializer."""
    contraction, pointers = product.contraction, [operand.pointer for operand in product.weight]
    if contraction.format is None:
        (weight,) = product.weight
        return {
            "index": product.index,
            "type": f"jitgen::gemm::Dense<{weight.storage}, jitgen::gemm::Along::{_ALONG[weight.kind]}>",
            "initializer": f"{{{weight.pointer}, {region.columns}, k, {', '.join(weight.own)}}}",
        }
    format = formats.find(contraction.format)
    if not format.tiled:
        return {"index": product.index, **_planes(format, product, decoded)}
    zeros = pointers[2] if format.zero_point else "nullptr"
    options = (
        f"{format.bits}, {contraction.group_size or 0}, {str(format.zero_point).lower()}, {product.weight[1].storage}"
    )
    return {
        "index": product.index,
        "type": f"jitgen::gemm::{'Decoded' if decoded else 'Quantised'}<{options}>",
        "initializer": f"{{{pointers[0]}, {pointers[1]}, {zeros}, k}}",
    }


_BYTE_SCALES = {"e8m0": "jitgen::gemm::E8m0", "e4m3": "jitgen::gemm::E4m3"}


def _planes(format: formats.Format, product: ContractionContext, decoded: bool) -> dict[str, str]:
    """Returns the type and the initializer of a weight in bit planes (``gemm_planes.hpp``)."""
    tensors = dict(zip(format.tensor_names, product.weight, strict=True))
    zero = tensors["zeros"].storage if format.zero_point else "jitgen::gemm::NoZero"
    codes = f"jitgen::gemm::PlaneCodes<{format.bits}, jitgen::gemm::{codes_type(format)}, {zero}>"
    scale = _BYTE_SCALES.get(format.scale, tensors["scales"].storage)
    scales = tensors["scales"].pointer
    if format.scale in _BYTE_SCALES:
        scales = f"reinterpret_cast<const {scale}*>({scales})"
    zeros = tensors["zeros"].pointer if format.zero_point else "nullptr"
    factors = [str(tensors["tensor_scale"].pointer)] if format.tensor_scale else []
    kind = "DecodedBlocks" if decoded else "QuantisedBlocks"
    return {
        "type": f"jitgen::gemm::{kind}<{codes}, {product.contraction.group_size or 0}, {scale}>",
        "initializer": f"{{{', '.join([str(tensors['codes'].pointer), str(scales), str(zeros), 'k', *factors])}}}",
    }


# ---------------------------------------------------------------------------------------------------------- operands


def _integers(operand: GemmOperand) -> tuple[str, ...]:
    return (*operand.own, operand.offset)


def _local(operand: GemmOperand) -> str:
    """Returns the local variable for the beginning of a run of neighbours: a pointer, or an iota's value there."""
    return f"from{operand.index}"


def _base(operand: GemmOperand, row: str, column: str) -> str:
    """Returns the definition of that variable."""
    return operand.begin(_local(operand), operand.position(row, column))


def _step(operand: GemmOperand, index: str) -> str:
    """Prints the offset of neighbour ``index`` from the run's beginning, in elements."""
    return sum_of([], operand.own[1:], [index])


def _load(operand: GemmOperand, index: str) -> dict[str, str]:
    expression = operand.neighbour(_local(operand), _step(operand, index))
    return {"type": operand.type, "value": operand.value, "expression": expression}
