"""Takes the copies out of a program that has launches of users' kernels: what they write is an argument or a result.

A launch gets its tensors in temporaries, of which those that had values before are copies, and the new value of an
argument is copied back. Where nothing reads what the argument was once the kernel has begun, it gets the argument. A
temporary that the function returns is a result, so that it may be the caller's ``out=``.

Neighbour: ``families/partition.py`` makes the program.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from jitgen.families.call_memory import CallMemory
from jitgen.ir.body import Body
from jitgen.ir.program import Alias, Kernel, Program

_OF_OPERANDS = ("load", "iota", "store", "gather")
"""Instructions whose attribute is the number of an operand."""
_AWAY = ("launch", "scatter", "contract", "reduce", "scan", "sort", "state", "merge")
"""Instructions of bodies that are not pointwise."""


def without_copies(program: Program, memory: CallMemory) -> Program:
    """Returns ``program`` with launches that update arguments in place, and whose returned tensors are results."""
    if not any(launches(body) for kernel in program.kernels for body in kernel.bodies):
        return program
    position = 0
    while position < len(program.mutated):
        changed = _in_place(program, *program.mutated[position], memory)
        position += changed is program
        program = changed
    return _with_results(program)


def without_temporaries(program: Program, dropped: Set[int]) -> Program:
    """Returns ``program`` without the temporaries whose buffers have the numbers ``dropped``, which no kernel has."""
    if not dropped:
        return program
    kept = [buffer for buffer in range(len(program.buffers)) if buffer not in dropped]
    numbers = {old: new for new, old in enumerate(kept)}
    first = len(program.inputs)
    return replace(
        program,
        temporaries=tuple(one for buffer, one in enumerate(program.temporaries, first) if buffer not in dropped),
        outputs=tuple(
            replace(output, input=numbers[output.input]) if isinstance(output, Alias) else output
            for output in program.outputs
        ),
        kernels=tuple(
            replace(kernel, bodies=tuple(_renumbered(body, numbers) for body in kernel.bodies))
            for kernel in program.kernels
        ),
    )


def _with_results(program: Program) -> Program:
    """Returns ``program`` with the temporaries that launches write and the function returns as results. These come in
    the order in which they are returned, and are row-major."""
    first, end = len(program.inputs), len(program.inputs) + len(program.temporaries)
    bodies = [body for kernel in program.kernels for body in kernel.bodies if launches(body)]
    returned = [output.input if isinstance(output, Alias) else end + output for output in program.outputs]
    viewed = {output.input for output in program.outputs if isinstance(output, Alias) and output.movements}
    written = set[int | None]().union(*map(_written, bodies)) - viewed
    moved = {buffer for buffer in returned if buffer in written and first <= buffer < end}
    if not moved:
        return program
    kept = [buffer for buffer in range(first, end) if buffer not in moved]
    results = dict.fromkeys(buffer for buffer in returned if buffer in moved or buffer >= end)
    results |= dict.fromkeys(range(end, len(program.buffers)))
    numbers = {old: new for new, old in enumerate([*range(first), *kept, *results])}
    before = first + len(kept)  # the results
    return replace(
        program,
        temporaries=tuple(program.buffers[old] for old in kept),
        results=tuple(
            replace(program.buffers[old], contiguous=True) if old in moved else program.buffers[old] for old in results
        ),
        outputs=tuple(
            replace(output, input=numbers[output.input])
            if isinstance(output, Alias) and output.input not in moved
            else numbers[buffer] - before
            for output, buffer in zip(program.outputs, returned, strict=True)
        ),
        mutated=tuple((number, numbers[end + position] - before) for number, position in program.mutated),
        kernels=tuple(
            replace(kernel, bodies=tuple(_renumbered(body, numbers) for body in kernel.bodies))
            for kernel in program.kernels
        ),
        general=False,  # a caller's tensor may lie otherwise
    )


def _in_place(program: Program, number: int, position: int, memory: CallMemory) -> Program:
    """Returns ``program`` without the copies of argument ``number``, whose new value is result ``position``."""
    first, result = len(program.inputs), len(program.inputs) + len(program.temporaries) + position
    bodies = {(k, b): body for k, kernel in enumerate(program.kernels) for b, body in enumerate(kernel.bodies)}
    back = [place for place, body in bodies.items() if result in _buffers(body)]
    if len(back) != 1 or (temporary := _copied_to(bodies[back[0]], result)) is None:
        return program
    if not first <= temporary < result - position:
        return program
    users = {place: body for place, body in bodies.items() if temporary in _buffers(body)}
    there = [place for place, body in users.items() if _copied_to(body, temporary) == number]
    writers = [place for place, body in users.items() if temporary in _written(body) and place not in there]
    if len(there) != 1 or not writers or not all(launches(bodies[place]) for place in writers):
        return program
    begin = min(writers)[0]
    early = any(place[0] < begin for place in users if place not in there) or there[0][0] >= begin
    if early or any(number in _buffers(body) and place[0] >= begin for place, body in bodies.items()):
        return program
    memory.depends_on_strides()
    if not memory.inputs[number].is_row_major:
        return program
    bodies[there[0]] = _without_store(bodies[there[0]], temporary)
    bodies[back[0]] = _without_store(bodies[back[0]], result)
    numbers = {buffer: buffer for buffer in range(len(program.buffers))} | {temporary: result}
    kernels: list[Kernel] = []
    for k, kernel in enumerate(program.kernels):
        own = (bodies[k, b] for b in range(len(kernel.bodies)))
        left = tuple(_renumbered(body, numbers) for body in own if body.stores)
        if left:
            name = f"{program.name}_{len(kernels)}" if kernels else program.name
            kernels.append(replace(kernel, name=name, bodies=left))
    outputs = tuple(
        replace(output, input=number) if isinstance(output, Alias) and output.input == temporary else output
        for output in program.outputs
    )
    general = memory.is_general and program.general
    changed = replace(program, outputs=outputs, kernels=tuple(kernels), general=general)
    return without_temporaries(changed, {temporary})


def launches(body: Body) -> bool:
    """Returns whether ``body`` is the launch of a user's kernel."""
    return body.instructions[0].op == "launch"


def _buffers(body: Body) -> set[int | None]:
    return {operand.buffer for operand in body.operands}


def _written(body: Body) -> set[int | None]:
    return {body.operands[number].buffer for number in body.stores}


def _copied_to(body: Body, buffer: int) -> int | None:
    """Returns the buffer of which a pointwise body stores a copy in ``buffer``; None where it stores anything else."""
    stores = [i for i in body.instructions if i.op == "store" and body.operands[i.attr].buffer == buffer]
    if len(stores) != 1 or any(i.op in _AWAY for i in body.instructions):
        return None
    loaded, target = body.instructions[stores[0].args[0]], body.operands[stores[0].attr]
    if loaded.op != "load":
        return None
    source = body.operands[loaded.attr]
    same = source.dtype == target.dtype and source.shape == target.shape
    return source.buffer if same and not (source.movements or target.movements) else None


def _without_store(body: Body, buffer: int) -> Body:
    """Returns ``body`` without its store in ``buffer``, and without what is loaded for that alone."""
    stores = {n for n, i in enumerate(body.instructions) if i.op == "store" and body.operands[i.attr].buffer == buffer}
    read = {a for n, i in enumerate(body.instructions) if n not in stores for a in i.args}
    kept = [n for n, i in enumerate(body.instructions) if n not in stores and (i.op != "load" or n in read)]
    positions = {old: new for new, old in enumerate(kept)}
    left = [body.instructions[n] for n in kept]
    used = sorted({i.attr for i in left if i.op in _OF_OPERANDS})
    operands = {old: new for new, old in enumerate(used)}
    instructions = tuple(
        replace(i, args=tuple(positions[a] for a in i.args), attr=operands[i.attr] if i.op in _OF_OPERANDS else i.attr)
        for i in left
    )
    return replace(body, operands=tuple(body.operands[n] for n in used), instructions=instructions)


def _renumbered(body: Body, numbers: dict[int, int]) -> Body:
    operands = tuple(
        operand if operand.buffer is None else replace(operand, buffer=numbers[operand.buffer])
        for operand in body.operands
    )
    return replace(body, operands=operands)
