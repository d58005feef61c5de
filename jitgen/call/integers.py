"""Refuses integers that a parameter of a user's kernel in C++ does not hold, which C++ would narrow.

Numbers of a call are checked where it is lowered, and again by the launcher of each later call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jitgen.ir import symbols
from jitgen.ir.body import Instruction
from jitgen.ir.program import Kernel
from jitgen.ir.symbols import Scalar
from jitgen.runtime.launcher import IntegerRange


def check(kernels: Iterator[Kernel] | tuple[Kernel, ...], environment: Mapping[str, Any]) -> None:
    """Raises NumberRangeError where an integer that one of ``kernels`` takes, by the sizes and numbers of a call, is
    outside of its parameter's range."""
    for kernel in kernels:
        for value, own in ranges_of(kernel):
            own.check(int(symbols.evaluate(value, environment)))


def ranges_of(kernel: Kernel) -> Iterator[tuple[Scalar, IntegerRange]]:
    """Yields each integer that ``kernel`` takes, and the range of its parameter; nothing for a kernel that is not a
    user's in CUDA C++ or C++, and for types of which nobody can tell."""
    launched = launch_of(kernel)
    if launched is None:
        return
    from jitgen.codegen.c_text.definition import definition_of
    from jitgen.codegen.c_text.files import location_of
    from jitgen.codegen.c_text.types import range_of
    from jitgen.ir.launches import TRITON, UNSPECIALIZED

    own, parameters = launched.attr.attrs.kernel, launched.attr.attrs.parameters
    if own.language == TRITON:
        return
    definition = definition_of(own.text, own.entry, language=own.language)
    declared = {parameter.name: parameter for parameter in definition.parameters}
    for name, how, value in parameters:
        bounds = range_of(definition.type_of(declared[name])) if how == UNSPECIALIZED else None
        if bounds is not None:
            line = location_of(own.text, definition.line_of(declared[name].start))
            yield value, IntegerRange(f"{with_launch(kernel)}: {declared[name]} ({line})", *bounds)


def with_launch(kernel: Kernel) -> str:
    """Returns the name of ``kernel``, with the line that launches it where a user wrote it."""
    launched = launch_of(kernel)
    location = launched and launched.location
    return f"{kernel.name}: the kernel launched at {location}" if location else kernel.name


def launch_of(kernel: Kernel) -> Instruction | None:
    """Returns the instruction that launches a user's kernel; None if ``kernel`` is generated."""
    first = next(iter(kernel.bodies[0].instructions), None)
    return first if first is not None and first.op == "launch" else None
