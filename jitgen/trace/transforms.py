"""Refuses torch.func's transforms within a traced function: ``vmap``, ``grad`` and ``jvp`` wrap memory, and a proxy has
none.

They are refused where they begin. Once begun, torch's C++ code would fail an assertion on a proxy and leave the stack
of its transforms broken for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch._functorch import eager_transforms, vmap

from jitgen.errors import TraceError
from jitgen.trace.guards import tracing
from jitgen.trace.location import quote, user_location
from jitgen.trace.replaced import Replaced


def _refused_in_traces(begin: Callable[..., Any], name: str) -> Callable[..., Any]:
    def begins(*arguments: Any) -> Any:
        if tracing.get() is None:
            return begin(*arguments)
        raise TraceError(
            f"torch.func.{name} within a decorated function is not supported{quote(user_location())}\n"
            "  write the function for all elements at once, or call the transform outside of it"
        )

    return begins


def _refused(module: Any, *names: str) -> Replaced:
    begins = {f"{name}_increment_nesting": name for name in names}
    return Replaced(module, {key: _refused_in_traces(getattr(module, key), name) for key, name in begins.items()})


_REPLACED = _refused(vmap, "vmap"), _refused(eager_transforms, "grad", "jvp")


@contextmanager
def transforms_are_refused() -> Iterator[None]:
    with ExitStack() as active:
        for replaced in _REPLACED:
            active.enter_context(replaced.active())
        yield
