"""Puts rules into a user's kernel in CUDA C++ or C++, at its hooks (``codegen/c_text/hooks.py``).

``JITGEN_PROLOGUE(x[i], row, column)`` becomes a call of a generated function, which computes what would be loaded; the
statement ``out[i] = JITGEN_EPILOGUE(value, row, column);`` becomes a call of one that stores what follows the kernel.
Both get the struct with everything that the entry takes, which is a further parameter of the kernel's function, the
element's own index, of which its coordinates follow, and the row and the column: in a matrix a right row saves the
division.

Neighbours: ``c_context.py`` prints the functions; ``splices.py`` is the same for Triton.
"""

from __future__ import annotations

from collections.abc import Mapping

from jitgen.codegen.c_text.definition import Definition
from jitgen.codegen.c_text.hooks import PROLOGUE, hooks_of
from jitgen.codegen.edits import Edit

STRUCT = "jitgen_params"
"""What the kernel's function calls the struct."""


def as_function(definition: Definition) -> list[Edit]:
    """Returns the edits that make the kernel, an entry in CUDA C++, a function for the device."""
    edits = []
    for position, token in enumerate(definition.head):
        if token.text == "__global__":
            edits.append(Edit(token.start, token.end, "__device__ __forceinline__"))
        following = definition.head[position + 1].text if position + 1 < len(definition.head) else ""
        if token.text == "extern" and following.startswith('"'):
            edits.append(Edit(token.start, definition.head[position + 1].end, ""))
    edits += [Edit(attribute[0].start, attribute[-1].end, "") for attribute in definition.attributes]
    return edits


def is_behind_loops(definition: Definition, parameter: str) -> bool:
    """Returns whether the kernel stores ``parameter`` behind its loops alone, once in a thread."""
    return all(hook.is_behind_loop for hook in hooks_of(definition)[0] if hook.parameter == parameter)


def replaced(definition: Definition, loads: Mapping[str, str], stores: Mapping[str, str]) -> list[Edit]:
    """Returns the edits that put rules into the kernel.

    Args:
        loads, stores: the functions of rules, by the parameters that they stand for.
    """
    types = {parameter.name: parameter.type for parameter in definition.parameters}
    edits = []
    for hook in hooks_of(definition)[0]:
        function = (loads if hook.kind == PROLOGUE else stores).get(hook.parameter)
        if function is None:
            continue
        kind, (first, last), (start, end) = types[hook.parameter], hook.index, hook.value
        if hook.kind == PROLOGUE:
            edits += [Edit(hook.start, first, f"{function}<{kind}>({STRUCT}, "), Edit(last, hook.rest, ",")]
        else:
            edits += [Edit(hook.start, first, f"{function}({STRUCT}, "), Edit(last, start, f", ({kind})(")]
            edits.append(Edit(end, end, ")"))
    following = ", " if definition.parameters else ""
    edits.append(Edit(definition.opening, definition.opening, f"const jitgen_launch::Params& {STRUCT}{following}"))
    return edits
