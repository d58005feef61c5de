"""Traces the bodies of torch functions that are written in Python and have no row.

Such a function begins with ``if has_torch_function(...): return handle_torch_function(...)``, which is how the trace
comes to see it. Its body is the same code with a ``has_torch_function`` that says no. The torch functions that it calls
are intercepted like those of the user, so its checks of arguments are torch's own.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

_MODULES = ("torch.nn.functional", "torch.functional", "torch._tensor")


def _no(*arguments: Any) -> bool:
    return False


_ANSWERS = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)


@cache
def body(function: Any) -> Callable[..., Any] | None:
    """Returns ``function`` with its own code running on proxies; None if it is not a Python function of torch."""
    if not isinstance(function, types.FunctionType) or function.__module__ not in _MODULES:
        return None
    if not any(name in function.__code__.co_names for name in _ANSWERS):
        return None
    variables = {**function.__globals__, **_ANSWERS}
    made = types.FunctionType(
        function.__code__, variables, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
