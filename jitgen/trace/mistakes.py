"""Explains to a user why a torch function's row cannot take the arguments of a call.

A row refuses arguments with a message of its own, and torch's functions that rows call do so too. Where neither did,
the error is Python's, about objects that users never see ("'>=' not supported between instances of 'Node' and 'int'");
then the message says which arguments were given. The error itself stays the cause of the one that is raised.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jitgen.ir.graph import Node
from jitgen.ir.symbols import Expr

_INTERNAL = re.compile(r"\b(Node|Expr|Trace|\w*Proxy|Symbolic\w+)\b")
_SPOKEN = ("RAISE_VARARGS", "CALL", "CALL_FUNCTION_EX", "CALL_KW")
"""Instructions at which an error has a message for users: ``raise``, and calls of functions written in C."""


def refusal(error: Exception, positional: Sequence[Any], named: Mapping[str, Any], hint: Callable[[Any], Any]) -> str:
    """Explains why a row refuses these arguments.

    Args:
        error: what the row raised.
        positional, named: its arguments.
        hint: the value of a symbolic size in the call that is traced.
    """
    message = str(error)
    if message and _is_spoken(error) and not _INTERNAL.search(message):
        return message
    arguments = [_described(value, hint) for value in positional]
    arguments += [f"{name}={_described(value, hint)}" for name, value in named.items()]
    return f"does not take the arguments ({', '.join(arguments)})"


def _is_spoken(error: Exception) -> bool:
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry is not None and dis.opname[entry.tb_frame.f_code.co_code[entry.tb_lasti]] in _SPOKEN


def _described(value: Any, hint: Callable[[Any], Any]) -> str:
    if isinstance(value, Node):
        return f"{value.dtype}[{', '.join(str(hint(size)) for size in value.shape)}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_described(item, hint) for item in value)}]"
    return str(hint(value)) if isinstance(value, Expr) else f"{value!r:.100}"
