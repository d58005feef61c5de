"""A sort kernel in words."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.families.sort.chunks import order_of
from jitgen.families.sort.launch import is_merge
from jitgen.families.sort.layout import Layout
from jitgen.families.sort.schedule import Schedule
from jitgen.ir.ops import OPS
from jitgen.ir.program import Kernel


def explain(kernel: Kernel, layouts: Sequence[Layout], schedule: Schedule, device: Device) -> list[str]:
    """A title, and how a row is sorted."""
    (layout,), (body,) = layouts, kernel.bodies
    order = order_of(body)
    found = [i.attr[0] for i in body.instructions if i.op in ("sort", "merge")]
    down = "descending" if order.descending else "ascending"
    ranks = f"{order.count} ranks from {order.start} on"
    if is_merge(body):
        lines = [f"merge of sorted chunks: {' and '.join(found)}, {down}, {ranks}"]
        lines.append("the rank of an element is its rank in its chunk, and those before it in the others")
    else:
        lines = [f"sort along a row: {' and '.join(found)}, {down}, {ranks}"]
    if order.chunk and not is_merge(body):
        lines.append(f"a row is cut into chunks of {order.chunk} elements, each sorted by a block of its own")
    if not device.is_gpu:
        lines.append("a thread sorts a row by itself: by digits, or where few ranks are asked for, those alone")
    elif not is_merge(body):
        lines.append(f"a block sorts {schedule.rows} rows of up to {schedule.tile} elements by bitonic merges")
    operations = sum(instruction.op in OPS for instruction in body.instructions)
    lines.append(f"{operations} operations; operands {', '.join(layout.along)}")
    return lines
