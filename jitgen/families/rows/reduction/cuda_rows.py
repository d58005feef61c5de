"""Builds what ``templates/reduction/cuda_rows.j2`` reads in addition to ``cuda.py``'s context: rows that have threads
of their own.

Elements are in vectors of ``width``; the template calls the vector ``u`` of a thread, and an element of it ``j``. An
operand's vectors come from one of four sources, which this module tells the template as C++ text:

- resident operands from registers, loaded by the first pass that needs them (``Registers``);
- of a partly shared row from registers or from shared memory (``jitgen::Held`` in ``held.cuh``);
- deferred operands from a few registers, loaded ``batch`` vectors ahead of their use;
- staged deferred operands from shared memory, where a bulk copy put them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.cuda import constant
from jitgen.codegen.printing import fields
from jitgen.families.rows.reduction.context import Blocked, ReductionContext, identity
from jitgen.families.rows.reduction.cuda_passes import OPS, Accumulator, CudaPass, CudaPasses
from jitgen.families.rows.reduction.forms import LoopedRows, ResidentRows, Staged
from jitgen.families.rows.reduction.residency import REGISTER_BYTES, residency_of_thread
from jitgen.families.rows.reduction.schedule import MULTIPROCESSOR_THREADS
from jitgen.ir.program import Kernel
from jitgen.kernel.operands import ACCESS_BYTES
from jitgen.kernel.printed_rows import RowOperand
from jitgen.kernel.rows import RowLayout

REGISTERS = 65536
"""Registers of a multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities")."""
MAX_REGISTERS = 255
"""Registers of a thread, at most (the same table)."""
KERNEL_REGISTERS = 16
"""Registers of a thread for anything but the vectors it holds."""
MOMENT_REGISTERS = 8
"""Registers that it takes in addition where a cluster combines moments (``online.py``)."""
SCARCE_REGISTERS = 64
"""Registers of a thread up to which ptxas would spill for those."""
MAX_BATCH = 4
"""Vectors of a deferred operand that are loaded ahead in a cluster, at most; half as many in a block. More were slower
on an H200."""
PAIRED = {"max": "maximum", "min": "minimum"}
"""Reductions of elements as they lie in memory, two at a time, and the function that does it (``pair.cuh``)."""
PAIRED_DTYPES = ("float16", "bfloat16")
"""The dtypes of such elements."""


@dataclass(frozen=True)
class Registers:
    """Declares registers for vectors of one operand: their C++ ``declaration``, and the statement that loads vector
    ``u``."""

    index: int
    name: str
    declaration: str
    load: str


def context(
    kernel: Kernel, layout: RowLayout, schedule: LoopedRows | ResidentRows, rows: ReductionContext, passes: CudaPasses
) -> dict[str, Any]:
    combine, scratch = _combination(schedule)
    partly_shared = schedule.shared_vectors > 0
    resident = {operand.value for operand in passes.resident_loads}
    iterated = passes.passes[0].loaded if schedule.rows_per_iteration > 1 else ()
    own = [operand for operand in rows.operands if operand.pointer and not layout.row_invariant[operand.index]]
    streaming = own if schedule.streaming_loads else ()
    return {
        "iteration_loads": [_registers(operand, iterated=True) for operand in iterated],
        "row_value": {o.index: row_value(o) for o in rows.row_loads},
        "combine": combine,
        "scratch": scratch,
        # Streaming stores of a cluster push neither row-invariant operands nor later rows out of the cache.
        "store_vector": "store_vector_streaming" if schedule.cluster > 1 else "store_vector",
        "staged": [o for o in rows.operands if schedule.staged and o.index in schedule.staged.operands],
        "few_blocks": schedule.prefetch.row_invariant_blocks if schedule.prefetch else 0,
        "prefetched": [o for o in own if schedule.prefetch and o.index in schedule.prefetch.operands],
        "prefetched_invariant": [
            o for o in rows.operands if schedule.prefetch and o.index in schedule.prefetch.row_invariant
        ],
        "partly_shared_type": _partly_shared_type,
        "resident_loads": [
            _partly_shared(o) if partly_shared else _registers(o) for o in passes.resident_loads if o not in iterated
        ],
        "passes": [
            _pass(p, resident, iterated, streaming, schedule) | {"batch": _batch(kernel, schedule, len(p.deferred))}
            for p in passes.passes
        ],
    }


def _batch(kernel: Kernel, schedule: LoopedRows | ResidentRows, deferred: int) -> int:
    """Returns how many vectors of each of ``deferred`` operands are loaded ahead of their use: what the row leaves of
    registers.

    The first are on their way while the row is reduced. The compiler moves no load across a store to memory that may be
    the same, so that otherwise each vector would wait for the second-level cache by itself.
    """
    if schedule.preload_deferred:
        return schedule.unroll
    threads = schedule.block_threads * schedule.blocks_per_multiprocessor
    threads = threads if schedule.cluster > 1 else max(threads, MULTIPROCESSOR_THREADS)
    registers = min(MAX_REGISTERS, REGISTERS // threads)
    elements = schedule.elements_per_thread
    taken = residency_of_thread(kernel.bodies[0], elements).bytes_per_element * elements // REGISTER_BYTES
    scarce = schedule.online and schedule.cluster > 1 and registers <= SCARCE_REGISTERS
    taken += KERNEL_REGISTERS + MOMENT_REGISTERS * scarce
    vectors = (registers - taken) * REGISTER_BYTES // (ACCESS_BYTES * max(1, deferred))
    return max(1, min(schedule.unroll, vectors, MAX_BATCH if schedule.cluster > 1 else MAX_BATCH // 2))


def _combination(schedule: LoopedRows | ResidentRows) -> tuple[str, str]:
    """Returns the function of ``reduce.cuh`` that combines over a row, with ``{op}``, and the shared type of its
    threads, with ``{state}``."""
    if schedule.cluster > 1:
        return "receive_cluster<{op}, warps, cluster>", "jitgen::Inbox<{state}, warps * cluster>"
    return "combine_row<{op}, threads>", "jitgen::Scratch<{state}, warps>"


def row_value(operand: RowOperand) -> str:
    """Returns the value of an operand that is read once a row."""
    return f"from{operand.index}" if operand.pointer is None else f"jitgen::load(*from{operand.index})"


def _registers(
    operand: RowOperand, count: str = "unroll", at: str = "u", iterated: bool = False, streaming: bool = False
) -> Registers:
    """Declares registers for ``count`` vectors of an operand, of which the one at ``at`` is loaded.

    ``iterated``: for those of all rows of an iteration; ``streaming``: by loads past the first-level cache.
    """
    name, start = f"x{operand.index}", f"from{operand.index}"
    if operand.kind == "contiguous":
        kind, length = f"jitgen::Vector<{operand.storage}, width>", ""
        function = "load_vector_once" if streaming else "load_vector"
        load = f"{name}[{at}] = jitgen::{function}<width>({start} + column);"
    else:
        kind, length = operand.storage, "[width]"
        step = "0" if operand.kind == "broadcast" else f"(column + j) * {operand.inner}"
        load = f"for (int j = 0; j < width; ++j) {name}[{at}][j] = {start}[{step}];"
    declaration = f"{kind} of_{name}[turns][{count}]{length}" if iterated else f"{kind} {name}[{count}]{length}"
    return Registers(operand.index, name, declaration, load)


def _partly_shared(operand: RowOperand) -> Registers:
    """Declares such registers where the last vectors lie in shared memory."""
    name = f"x{operand.index}"
    declaration = f"{_partly_shared_type(operand.storage)} {name}(places)"
    return Registers(operand.index, name, declaration, f"{name}.fetch(u, from{operand.index} + column);")


def _partly_shared_type(type: str) -> str:
    """Prints the C++ type of one value of every element of a thread, some in registers and some in shared memory."""
    return f"jitgen::Held<{type}, width, unroll - shared_vectors, threads>"


def _element(operand: RowOperand, at: str) -> str:
    """Prints element ``j`` of the vector at ``at``."""
    if operand.pointer is None:
        return f"from{operand.index} + (column + j) * {operand.inner}"
    return f"jitgen::load(x{operand.index}[{at}][j])"


def _pair(reduction: dict[str, Any], p: CudaPass, vector: int, at: str) -> dict[str, str]:
    """Describes how the extremum of loaded 16-bit elements takes two at a time (``pair.cuh``); empty if it does not.

    ``at``: the vector of a deferred operand.
    """
    name = PAIRED.get(reduction["kind"])
    for operand in p.needed if name and vector % 2 == 0 else ():
        if operand.value == reduction["element"] and operand.kind == "contiguous" and operand.dtype in PAIRED_DTYPES:
            vector_at = at if operand in p.deferred else "u"
            return {"name": f"jitgen::{name}", "storage": operand.storage, "vector": f"x{operand.index}[{vector_at}]"}
    return {}


def _pass(
    p: CudaPass,
    resident: set[str],
    iterated: Collection[RowOperand],
    streaming: Sequence[RowOperand],
    schedule: LoopedRows | ResidentRows,
) -> dict[str, Any]:
    """Describes a pass for the template: its loads and where each element comes from."""
    partly_shared = schedule.shared_vectors > 0
    loaded = [operand for operand in p.loaded if operand not in iterated]
    at = f"u % batch{p.source.number}"
    described = pass_fields(p, {r["result"]: _pair(r, p, schedule.vector, at) for r in p.reductions})
    described |= {
        "arrays": [_registers(o) for o in loaded if o.value not in resident],
        "loads": [_partly_shared(o) if partly_shared else _registers(o, streaming=o in streaming) for o in loaded],
        "deferred": [_registers(o, f"batch{p.source.number}", at, streaming=o in streaming) for o in p.deferred],
        "elements": [fields(o) | {"element": _element(o, at if o in p.deferred else "u")} for o in p.needed],
    }
    if schedule.staged:
        described |= _with_staged(p, described, schedule.staged, at)
    return described | _with_partly_shared(p, described) if partly_shared else described


def _with_staged(p: CudaPass, described: Mapping[str, Any], staged: Staged, at: str) -> dict[str, Any]:
    """Returns what differs if the first vectors of deferred operands lie in shared memory: each is read as a vector
    first."""
    here = {f"x{operand.index}": operand for operand in p.deferred if operand.index in staged.operands}
    if not here:
        return {}
    copies = {name: f"jitgen::load_place<{o.storage}>(staged{o.index} + u * threads)" for name, o in here.items()}
    return {
        "staged": staged.vectors,
        "reads": [
            'if (u < staged) jitgen::barrier_wait(jitgen::shared_address(&copied[u]), 0, "copied");',
            *(f"const auto now_{name} = u < staged ? {copy} : {name}[{at}];" for name, copy in copies.items()),
        ],
        "elements": [
            x | ({"element": f"jitgen::load(now_x{x['index']}[j])"} if f"x{x['index']}" in here else {})
            for x in described["elements"]
        ],
    }


def _with_partly_shared(p: CudaPass, described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what differs if some vectors lie in shared memory: elements are read and stay resident as whole
    vectors."""
    read = [f"x{operand.index}" for operand in p.needed if operand.pointer]
    read += [f"kept_{name}" for name, _ in p.resident_inputs]
    return {
        "reads": [f"const auto now_{name} = {name}[u];" for name in read]
        + [f"jitgen::Vector<{type}, width> next_{name};" for name, type in p.resident_outputs],
        "elements": [
            x | ({"element": f"jitgen::load(now_x{x['index']}[j])"} if x["pointer"] else {})
            for x in described["elements"]
        ],
        "resident_inputs": [v | {"element": f"now_kept_{v['name']}[j]"} for v in described["resident_inputs"]],
        "resident_outputs": [v | {"element": f"next_{v['name']}[j]"} for v in described["resident_outputs"]],
        "writes": [f"kept_{name}.put(u, next_{name});" for name, _ in p.resident_outputs],
    }


def pass_fields(p: CudaPass, pairs: Mapping[str, dict[str, str]]) -> dict[str, Any]:
    """Describes a pass for ``cuda_pass.j2``, without where its elements come from.

    ``pairs``: by the result of a reduction, what ``_pair`` gives for it.
    """
    source = p.source
    reductions = []
    for r in p.reductions:
        pair = pairs.get(r["result"], {})
        if pair:
            kind = f"jitgen::Pair<{pair['storage']}>"
            initial = f"{kind}::of({r['identity']})"
            r = r | {"accumulator": Accumulator(f"pair_{r['result']}", kind, initial, pair["name"])}
        reductions.append(r | {"step": r["step"].format(part=f"part_{r['result']}"), "pair": pair})
    return fields(source) | {
        "staged": 0,
        "reads": [],
        "writes": [],
        "deferred": [],
        "resident_inputs": [_resident_value(name, type) for name, type in p.resident_inputs],
        "resident_outputs": [_resident_value(name, type) for name, type in p.resident_outputs],
        "block_lines": [line for line in p.lines if line.position in source.of_blocks],
        "lines": [line for line in p.lines if line.position not in source.of_blocks],
        "reductions": reductions,
        "elementwise": p.lines or source.stores or not all(r["pair"] for r in reductions),
        "vector_stores": [fields(o) | {"target": f"to{o.index} + column"} for o in source.stores if _is_vector(o)],
        "element_stores": [o for o in source.stores if not _is_vector(o) and not o.block],
        "block_stores": [o for o in source.stores if o.block],
        "blocked": [_blocked(b, p) for b in source.blocked],
    }


def _blocked(b: Blocked, p: CudaPass) -> dict[str, Any]:
    return fields(b) | {
        "op": f"jitgen::{OPS[b.kind]}",
        "identity": constant(identity(b.kind, b.dtype), b.dtype),
        "lines": [line for line in p.lines if line.position not in b.after],
    }


def _is_vector(operand: RowOperand) -> bool:
    """Returns whether a result's elements are stored as vectors."""
    return operand.kind == "contiguous" and not operand.block


def _resident_value(name: str, type: str) -> dict[str, str]:
    return {"name": name, "type": type, "element": f"kept_{name}[u][j]"}
