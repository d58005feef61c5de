"""Builds the context of ``templates/attention/attention.cpp.j2``, whose mainloop is ``attention.hpp``; see
``rule/cpp.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built, Source, printed
from jitgen.families.attention.forward.context import Attention, Computed, bounds
from jitgen.families.attention.forward.layout import Layout
from jitgen.families.attention.forward.schedule import CpuSchedule
from jitgen.families.attention.rule.bounds import tile_ends
from jitgen.families.attention.rule.cpp import FLAGS, WORDS, load, store, struct_of
from jitgen.ir.program import Kernel
from jitgen.kernel.printed import sum_of

COMPUTED = "jitgen::attention::Computed"
"""As the type of keys or values in memory, where they are computed."""


def build(kernel: Kernel, layout: Layout, schedule: CpuSchedule, attention: Attention, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    (body,) = kernel.bodies
    tile_bounds = bounds(body, layout, tile_ends(attention.rule.operands, dialect.name), WORDS)
    key_row = _row_computed(attention.computed_key, dialect, inner=1) if attention.computed_key else None
    value_row = _row_computed(attention.computed_value, dialect, inner=0) if attention.computed_value else None
    return {
        **struct_of(attention, tile_bounds),
        "way": "Tiles" if schedule.path == "tiles" else "Few",
        "lanes_are_rows": schedule.path == "tiles",
        "packed_rows": attention.packed_rows,
        "row_indices": attention.row_indices("/"),
        "based": [{"name": f"at{o.index}", "expression": o.task_base} for o in attention.operands],
        "positions": {o.index: o.packed_row() for o in attention.operands},
        "key": attention.key if key_row is None else replace(attention.key, kind="strided", storage=COMPUTED),
        "value": attention.value if value_row is None else replace(attention.value, kind="strided", storage=COMPUTED),
        "key_row": key_row,
        "value_row": value_row,
        "checked": bool(kernel.checked),
        "query": [load(o, o.packed_row(), "d") for o in attention.query],
        "query_lines": attention.query_lines,
        "query_value": attention.query_value,
        "row_loads": [load(o, o.packed_row(), "0") for o in attention.row_loads],
        "row_lines": attention.row_lines,
        "loads": [load(o, o.packed_row(), "e") for o in attention.loads],
        "lines": attention.lines,
        "row_stores": [store(o, o.packed_row(), "0") for o in attention.row_stores],
        "stores": [store(o, o.packed_row(), "e") for o in attention.stores],
        "row_maxima": attention.row_maxima,
        "row_sums": attention.row_sums,
    }, {"flags": FLAGS}


def _row_computed(computed: Computed, dialect: Dialect, inner: int) -> dict[str, Any]:
    """Describes a row of keys or values that is computed: what is done once for key ``n``, and for each of its elements
    ``d``.

    Args:
        inner: which of an operand's own strides is along the elements of a key.
    """
    starts = {i: sum_of([f"at{i}"], [o.own[1 - inner]], ["n"]) for i, o in computed.operands.items()}
    sources = {
        i: Source(o.pointer, starts[i], o.gathered, o.dtype)
        for i, o in computed.operands.items()
        if o.gathered and o.pointer
    }
    texts = printed(computed.instructions, dialect, "u", sources=sources)
    before: list[str] = []
    lines: list[str] = []
    for position, instruction in enumerate(computed.instructions):
        line, name = texts.lines.get(position), texts.names[position]
        if instruction.op not in ("load", "iota", "gather"):
            if line is not None:
                (before if position in computed.shared else lines).append(f"{line.text}{line.mark}")
            continue
        operand, kind = computed.operands[instruction.attr], dialect.types[instruction.dtype]
        if instruction.op == "iota":
            before.append(dialect.assign(kind, name, starts[operand.index]))
        elif position in computed.shared:
            load = f"jitgen::load({operand.pointer}[{starts[operand.index]}])"
            before.append(line.text if line is not None else dialect.assign(kind, name, load))
        else:
            indices = [texts.names[argument] for argument in instruction.args]
            chosen = [
                f"{dialect.within.format(index, size)} * {stride}"
                for index, (size, stride) in zip(indices, operand.gathered, strict=True)
            ]
            address = " + ".join([str(operand.pointer), starts[operand.index], *chosen])
            before.append(f"{operand.pointer_type} const from_{name} = {address};")
            step = "d" if operand.kind == "contiguous" else f"d * {operand.own[inner]}"
            lines.append(dialect.assign(kind, name, f"jitgen::load(from_{name}[{step}])"))
    return {
        "before": before,
        "lines": lines,
        "value": texts.names[len(computed.instructions) - 1],
        "checked": any(instruction.op == "gather" for instruction in computed.instructions),
    }
