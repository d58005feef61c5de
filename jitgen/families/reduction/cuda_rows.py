"""What ``templates/cuda/reduction_rows.j2`` reads beside ``cuda.py``'s context: a row has threads of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jitgen.codegen.printing import fields
from jitgen.families.layout import ACCESS_BYTES
from jitgen.families.reduction.context import RowContext, RowOperand
from jitgen.families.reduction.cuda_walk import Held, Walk, Walks
from jitgen.families.reduction.layout import RowLayout
from jitgen.families.reduction.residency import REGISTER_BYTES, held
from jitgen.families.reduction.schedule import BUSY_ROWS, RESIDENT_THREADS, RowSchedule, Staged
from jitgen.ir.program import Kernel

REGISTERS, MOST_REGISTERS = 65536, 255
"""Of a multiprocessor; of a thread."""
REGISTERS_BESIDE, MOMENT_REGISTERS, SCARCE_REGISTERS = 16, 8, 64
"""What a kernel takes beside the vectors it holds; what it takes more in a cluster that combines moments
(``online.py``), where a thread has so few that ptxas would spill for it."""
MOST_AHEAD = 4
"""Vectors of an operand to ask for ahead in a cluster, half as many in a block: more were slower on an H200."""
PAIRED, PAIRED_DTYPES = {"max": "maximum", "min": "minimum"}, ("float16", "bfloat16")
"""Reductions that elements of these dtypes can enter as they lie in memory, two at a time."""


def context(kernel: Kernel, layout: RowLayout, schedule: RowSchedule, rows: RowContext, walks: Walks) -> dict[str, Any]:
    combine, scratch = _combination(schedule)
    kept = {operand.value for operand in walks.kept_loads}
    taken = walks.passes[0].fetched if schedule.turns > 1 else ()
    own = [operand for operand in rows.operands if operand.pointer and not layout.shared[operand.index]]
    once = own if schedule.once else ()
    return {
        "taken": [_array(operand, turns=True) for operand in taken],
        "row_load": {o.index: row_value(o) for o in rows.row_loads},
        "combine": combine,
        "scratch": scratch,
        # What a cluster stores is not to push the operands that every row shares out of the cache, nor later rows.
        "store_vector": "store_vector_streaming" if schedule.cluster > 1 else "store_vector",
        "staged": [o for o in rows.operands if schedule.staged and o.index in schedule.staged.operands],
        "few_rows": BUSY_ROWS,
        "prefetched_common": [o for o in rows.operands if schedule.prefetch and o.index in schedule.prefetch.common],
        "prefetched": [o for o in own if schedule.prefetch and o.index in schedule.prefetch.operands],
        "held_type": _held_type,
        "kept_operands": [_array(o, held=schedule.shared_vectors > 0) for o in walks.kept_loads if o not in taken],
        "passes": [
            _pass(walk, kept, taken, once, schedule) | {"batch": _batch(kernel, schedule, len(walk.late))}
            for walk in walks.passes
        ],
    }


def _batch(kernel: Kernel, schedule: RowSchedule, late: int) -> int:
    """Vectors of each of ``late`` operands that are asked for ahead of their use: what the row leaves of the registers.

    The first are on their way while the row is combined. Loads do not pass a store to memory that may be the same, so
    that without this each vector would wait for the second-level cache by itself.
    """
    if schedule.early:
        return schedule.unroll
    threads = schedule.block_threads * schedule.blocks
    registers = min(MOST_REGISTERS, REGISTERS // (threads if schedule.cluster > 1 else max(threads, RESIDENT_THREADS)))
    taken = held(kernel.bodies[0], schedule.elements).bytes * schedule.elements // REGISTER_BYTES
    scarce = schedule.online and schedule.cluster > 1 and registers <= SCARCE_REGISTERS
    taken += REGISTERS_BESIDE + MOMENT_REGISTERS * scarce
    vectors = (registers - taken) * REGISTER_BYTES // (ACCESS_BYTES * max(1, late))
    return max(1, min(schedule.unroll, vectors, MOST_AHEAD if schedule.cluster > 1 else MOST_AHEAD // 2))


def _combination(schedule: RowSchedule) -> tuple[str, str]:
    """The function of ``reduce.cuh`` that combines over a row, over ``{op}``, and what it shares, over ``{state}``."""
    if schedule.cluster > 1:
        return "receive_cluster<{op}, warps, cluster>", "jitgen::Inbox<{state}, warps * cluster>"
    return "combine_row<{op}, threads>", "jitgen::Scratch<{state}, warps>"


def row_value(operand: RowOperand) -> str:
    return f"from{operand.index}" if operand.pointer is None else f"jitgen::load(*from{operand.index})"


def _array(
    operand: RowOperand,
    count: str = "unroll",
    at: str = "u",
    turns: bool = False,
    once: bool = False,
    held: bool = False,
) -> dict[str, Any]:
    """Registers for ``count`` vectors of an operand's elements, and how the one at ``at`` is filled.

    ``turns``: for those of all rows that a thread takes; ``once``: as of ``RowSchedule``; ``held``: where some of the
    vectors lie in shared memory (``held.cuh``).
    """
    name, place = f"x{operand.index}", f"from{operand.index}"
    if held:
        array, fetch = f"{_held_type(operand.storage)} {name}(places)", f"{name}.fetch({at}, {place} + column);"
        return {"name": name, "array": array, "fetch": fetch, "index": operand.index}
    if operand.kind == "contiguous":
        kind, length = f"jitgen::Vector<{operand.storage}, width>", ""
        load = "load_vector_once" if once else "load_vector"
        fetch = f"{{to}} = jitgen::{load}<width>({place} + column);"
    else:
        kind, length = operand.storage, "[width]"
        step = "0" if operand.kind == "broadcast" else f"(column + j) * {operand.inner}"
        fetch = f"for (int j = 0; j < width; ++j) {{to}}[j] = {place}[{step}];"
    return {
        "name": name,
        "array": f"{kind} of_{name}[turns][{count}]{length}" if turns else f"{kind} {name}[{count}]{length}",
        "fetch": fetch.format(to=f"{name}[{at}]"),
        "index": operand.index,
    }


def _held_type(type: str) -> str:
    """Of one value of every element of a thread, some in registers and some in shared memory."""
    return f"jitgen::Held<{type}, width, unroll - shared_vectors, threads>"


def _element(operand: RowOperand, place: str) -> str:
    if operand.pointer is None:
        return f"from{operand.index} + (column + j) * {operand.inner}"
    return f"jitgen::load(x{operand.index}[{place}][j])"


def _paired(reduction: dict[str, Any], walk: Walk, vector: int, at: str) -> dict[str, str]:
    """How the extremum of 16-bit elements as they were read takes two at a time (``pair.cuh``); empty where none is."""
    name = PAIRED.get(reduction["kind"])
    for operand in walk.needed if name and vector % 2 == 0 else ():
        if operand.value == reduction["element"] and operand.kind == "contiguous" and operand.dtype in PAIRED_DTYPES:
            place = at if operand in walk.late else "u"
            return {"name": f"jitgen::{name}", "storage": operand.storage, "vector": f"x{operand.index}[{place}]"}
    return {}


def _pass(
    walk: Walk, kept: set[str], taken: Collection[RowOperand], once: Sequence[RowOperand], schedule: RowSchedule
) -> dict[str, Any]:
    # What is not kept is asked for a few vectors ahead of its use; what is ``taken``, all rows at once.
    p = walk.source
    fetched = [operand for operand in walk.fetched if operand not in taken]
    at = f"u % batch{p.number}"
    described = pass_fields(walk, {r["result"]: _paired(r, walk, schedule.vector, at) for r in walk.reductions})
    described |= {
        "arrays": [_array(o) for o in fetched if o.value not in kept],
        "fetched": [_array(o, once=o in once, held=schedule.shared_vectors > 0) for o in fetched],
        "late": [_array(o, f"batch{p.number}", at, once=o in once) for o in walk.late],
        "element_loads": [fields(o) | {"element": _element(o, at if o in walk.late else "u")} for o in walk.needed],
    }
    if schedule.staged:
        described |= _staged(walk, described, schedule.staged, at)
    return described | _held(walk, described) if schedule.shared_vectors else described


def _staged(walk: Walk, described: Mapping[str, Any], staged: Staged, at: str) -> dict[str, Any]:
    """What differs where vectors of what is ``late`` lie in shared memory."""
    here = {f"x{operand.index}": operand for operand in walk.late if operand.index in staged.operands}
    if not here:
        return {}
    places = {name: f"jitgen::load_place<{o.storage}>(staged{o.index} + u * threads)" for name, o in here.items()}
    return {
        "staged": staged.vectors,
        "reads": [
            "if (u < staged) jitgen::barrier_wait(jitgen::shared_address(&copied[u]), 0);",
            *(f"const auto now_{name} = u < staged ? {place} : {name}[{at}];" for name, place in places.items()),
        ],
        "element_loads": [
            x | ({"element": f"jitgen::load(now_x{x['index']}[j])"} if f"x{x['index']}" in here else {})
            for x in described["element_loads"]
        ],
    }


def _held(walk: Walk, described: Mapping[str, Any]) -> dict[str, Any]:
    """What differs where some vectors lie in shared memory: all is read, and what is kept is written, as vectors."""
    read = [f"x{operand.index}" for operand in walk.needed if operand.pointer]
    read += [f"kept_{name}" for name, _ in walk.restored]
    return {
        "reads": [f"const auto now_{name} = {name}[u];" for name in read]
        + [f"jitgen::Vector<{type}, width> next_{name};" for name, type in walk.saved],
        "element_loads": [
            x | ({"element": f"jitgen::load(now_x{x['index']}[j])"} if x["pointer"] else {})
            for x in described["element_loads"]
        ],
        "restored": [v | {"kept": f"now_kept_{v['name']}[j]"} for v in described["restored"]],
        "saved": [v | {"kept": f"next_{v['name']}[j]"} for v in described["saved"]],
        "writes": [f"kept_{name}.put(u, next_{name});" for name, _ in walk.saved],
    }


def pass_fields(walk: Walk, paired: Mapping[str, dict[str, str]]) -> dict[str, Any]:
    """What ``reduction_pass.j2`` reads of a pass, but where its elements come from.

    ``paired``: as of ``_paired``, by the result of a reduction.
    """
    p = walk.source
    reductions = []
    for r in walk.reductions:
        pair = paired.get(r["result"], {})
        if pair:
            kind = f"jitgen::Pair<{pair['storage']}>"
            r = r | {"held": Held(f"pair_{r['result']}", kind, f"{kind}::of({r['identity']})", pair["name"])}
        reductions.append(r | {"step": r["step"].format(part=f"part_{r['result']}"), "pair": pair})
    return fields(p) | {
        "staged": 0,
        "reads": [],
        "writes": [],
        "late": [],
        "restored": [_kept(name, type) for name, type in walk.restored],
        "saved": [_kept(name, type) for name, type in walk.saved],
        "lines": walk.lines,
        "reductions": reductions,
        "elementwise": walk.lines or p.stores or not all(r["pair"] for r in reductions),
        "vector_stores": [fields(o) | {"place": f"to{o.index} + column"} for o in p.stores if o.kind == "contiguous"],
        "element_stores": [o for o in p.stores if o.kind != "contiguous"],
    }


def _kept(name: str, type: str) -> dict[str, str]:
    return {"name": name, "type": type, "kept": f"kept_{name}[u][j]"}
