"""Builds the context of ``templates/gemm/gemm_cutlass.cu.j2``: a kernel of CUTLASS 3.x, and what a launch has of it.

CUTLASS fills the parameters of its kernels on the host, from a stub that a host compiler has compiled. Here the kernel
fills them, from the struct that every kernel in CUDA C++ takes, and tensor maps are made by the driver and reached by
their address (``jitgen/cutlass.cuh``), so that NVRTC is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jitgen.codegen import evt
from jitgen.codegen.printing import Built
from jitgen.families.gemm import cutlass_epilogue
from jitgen.families.gemm.context import GemmContext
from jitgen.families.gemm.cutlass_mainloops import EPILOGUE_COLUMNS, EPILOGUE_ROWS, CutlassTile
from jitgen.families.gemm.layout import GemmGeometry, GemmLayout
from jitgen.ir.body import Body
from jitgen.kernel.operands import SWIZZLE_BYTES, MappedTensor, item_size, mapped_tensor
from jitgen.kernel.printed_entry import map_names
from jitgen.quant.formats import round_up

BARRIER_BYTES = 512
"""Shared memory in bytes that barriers of pipelines and of the scheduler take at most."""
SWIZZLE_ROWS = 8
"""Rows of a piece after which its swizzle repeats: pieces are aligned to as many of their rows."""
BATCH_RANK = 1
"""Dimensions that CUTLASS's tensors have before rows and columns."""


def fixed_bytes(schedule: CutlassTile, body: Body, layout: GemmLayout) -> int:
    """Returns the shared memory of a block besides its stages, as CUTLASS lays it out for the epilogue of ``body``:
    barriers; two pieces of the result, or four where as many are read ahead; and what is read for each column, at least
    a byte. Each of the three ends at a multiple of the alignment of a piece."""
    result, source = cutlass_epilogue.mapped_operands(body, layout)
    row = EPILOGUE_COLUMNS * item_size(body.operands[result].dtype)
    pieces = schedule.block_m // EPILOGUE_ROWS * (schedule.block_n // EPILOGUE_COLUMNS)
    count = min(pieces, 2) if source is None else max(min(pieces, 4), min(pieces, 2) + 1)
    columns = sum(
        item_size(body.operands[i.attr].dtype)
        for i in body.instructions
        if i.op == "load" and layout.operands[i.attr] == "column"
    )
    ends = (BARRIER_BYTES, count * EPILOGUE_ROWS * row, max(1, columns * schedule.block_n))
    return sum(round_up(end, SWIZZLE_ROWS * row) for end in ends)


def stage_bytes(schedule: CutlassTile, dtype: str) -> int:
    return (schedule.block_m + schedule.block_n) * schedule.block_k * item_size(dtype)


def build(layouts: Sequence[GemmLayout], schedule: CutlassTile, products: GemmContext, body: Body) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    (region,) = products.regions
    (product,) = region.contractions
    assert product.x is not None
    epilogue = cutlass_epilogue.epilogue(body, layouts[0], region)
    operands = region.operands
    mapped = [product.x, product.weight[0], *([operands[epilogue.source]] if epilogue.source is not None else [])]
    mapped.append(operands[epilogue.result])
    dtype = product.contraction.dtype
    source = operands[epilogue.source] if epilogue.source is not None else None
    names = map_names(operand.source for operand in mapped)
    return {
        "maps": names,
        "map_names": names,
        "index": "int64_t" if schedule.wide else "int32_t",
        "element": evt.OPERANDS[dtype],
        "vector": 16 // item_size(dtype),
        "accumulator": "int32_t" if dtype == "int8" else "float",
        "x_layout": "RowMajor" if product.x.kind == "k" else "ColumnMajor",
        "weight_layout": "ColumnMajor" if product.weight[0].kind == "k" else "RowMajor",
        "columns": region.columns,
        "operations": epilogue.operations,
        "result": evt.ELEMENTS[operands[epilogue.result].dtype],
        "result_vector": 16 // item_size(operands[epilogue.result].dtype),
        "source": evt.ELEMENTS[source.dtype] if source is not None else "",
        "title": region.title,
        "epilogue_rows": EPILOGUE_ROWS,
        "epilogue_columns": EPILOGUE_COLUMNS,
    }, {"relative_includes": True}


def tensor_maps(
    body: Body, layout: GemmLayout, geometry: GemmGeometry, schedule: CutlassTile
) -> Iterator[MappedTensor]:
    """Yields the kernel's tensor maps in the order of its parameters: both operands, what the epilogue reads ahead, and
    the result."""
    first = body.contractions[0]
    assert first.activation is not None
    sizes, chunk = (geometry.rows, geometry.columns), SWIZZLE_BYTES // item_size(first.dtype)
    for index, rows, tile, share in (
        (first.activation, geometry.rows, schedule.block_m, 1),
        (first.weight[0], geometry.columns, schedule.block_n, schedule.cluster),
    ):
        strides = geometry.strides[index]
        if layout.operands[index] == "k":
            yield _mapped(body, geometry, index, (rows, geometry.length), strides[0], (tile // share, chunk))
        else:
            yield _mapped(body, geometry, index, (geometry.length, rows), strides[1], (chunk // share, chunk))
    result, source = cutlass_epilogue.mapped_operands(body, layout)
    box = (EPILOGUE_ROWS, EPILOGUE_COLUMNS)
    for index in (result,) if source is None else (source, result):
        swizzle = EPILOGUE_COLUMNS * item_size(body.operands[index].dtype)
        yield replace(_mapped(body, geometry, index, sizes, geometry.strides[index][0], box), swizzle=swizzle)


def _mapped(
    body: Body, geometry: GemmGeometry, index: int, shape: tuple[int, int], stride: int, box: tuple[int, int]
) -> MappedTensor:
    made = mapped_tensor(body.operands[index], geometry.offsets[index], (), BATCH_RANK, shape, stride, box)
    return made if not made.dtype.startswith(("float8", "int8")) else replace(made, dtype="uint8")
