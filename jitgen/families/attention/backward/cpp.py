"""Builds the context of ``templates/attention_backward/attention_backward.cpp.j2``, whose mainloop is
``attention_backward.hpp``; see ``rule/cpp.py``."""

from __future__ import annotations

from jitgen.codegen.dialect import Dialect
from jitgen.codegen.printing import Built
from jitgen.families.attention.backward.context import Backward, bounds
from jitgen.families.attention.backward.layout import Layout
from jitgen.families.attention.backward.schedule import CpuSchedule
from jitgen.families.attention.rule.bounds import tile_ends
from jitgen.families.attention.rule.cpp import FLAGS, WORDS, load, store, struct_of
from jitgen.ir.program import Kernel
from jitgen.kernel.printed import indices


def build(kernel: Kernel, layout: Layout, schedule: CpuSchedule, backward: Backward, dialect: Dialect) -> Built:
    """Builds template context and source options; see ``kernel/render.py``."""
    return {
        **struct_of(
            backward, bounds(backward.rule, tile_ends(backward.rule.operands, dialect.name, forward=False), WORDS)
        ),
        "groups": " * ".join(backward.groups) or "1",
        "group_indices": indices(backward.groups, "group", "h", "/"),
        "operands": backward.operands,
        "bases": {o.index: o.task_base for o in backward.operands},
        "group_bases": {o.index: o.group_base for o in backward.operands},
        "products": backward.products,
        "results": [
            {
                "number": r.number,
                "value": r.value,
                "width": r.width,
                "shared": -1 if r.shared is None else r.shared,
                "accumulator": r.accumulator,
                "loads": [load(o, o.row("row", "batch"), "e") for o in r.loads],
                "lines": r.lines,
                "stores": [store(o, o.row("row", "batch"), "e") for o in r.stores],
            }
            for r in backward.results
        ],
    }, {"flags": FLAGS}
