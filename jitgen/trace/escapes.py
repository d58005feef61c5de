"""Tensors of a trace that user code keeps beyond it: stored on an object, or returned in what a call cannot rebuild.

What a traced function stores elsewhere would be a proxy, and later calls, which launch kernels without running the
function, would store nothing. So when the trace is over, every proxy and symbolic number must be gone.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jitgen.errors import TraceError
from jitgen.trace.location import quote
from jitgen.trace.mentions import line_of
from jitgen.trace.proxy import TensorProxy

MAX_REACHED = 10_000
"""Objects that a search within a returned object looks at."""


def check(
    name: str,
    function: Callable[..., Any],
    given: Iterable[weakref.ref[Any]],
    returned: Sequence[Any],
    codes: Sequence[types.CodeType],
) -> None:
    """Check that user code keeps nothing of a trace.

    Args:
        name: the function's, for messages.
        given: every proxy and symbolic number that user code was given.
        returned: the leaves of its result that are no tensors.
        codes: what was run, to find the line.

    Raises:
        TraceError: it keeps one, or returns an iterator or a coroutine.
    """
    code = getattr(function, "__code__", None)
    line = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
    for leaf in returned:
        if isinstance(leaf, (Iterator, types.CoroutineType, types.AsyncGeneratorType)):
            if isinstance(leaf, types.CoroutineType):
                leaf.close()  # or else Python warns that it was never awaited
            raise TraceError(
                f"{name} returns {_a(leaf)}, which would run outside of the kernels{quote(line)}\n"
                "  return a tuple or a list"
            )
    kept = [value for reference in given if (value := reference()) is not None]
    if kept:  # a reference cycle may wait to be collected
        del kept
        gc.collect()
    kept = [value for reference in given if (value := reference()) is not None]
    if not kept:
        return
    for leaf in returned:
        if _reaches(leaf, kept):
            raise TraceError(
                f"{name} returns {_a(leaf)} that holds a tensor or a size; a call can rebuild tuples, lists, dicts and "
                f"named tuples{quote(line)}\n  return one of those, or register the class with "
                "torch.export.register_dataclass"
            )
    attribute, where = _holder(kept[0])
    made = getattr(getattr(kept[0], "value", None), "location", None)
    line = (attribute and line_of(codes, attribute)) or made or line
    raise TraceError(
        f"{name} keeps {_a(kept[0])} in {where}: later calls launch kernels without running the function, and would "
        f"store nothing{quote(line)}\n  return it, and store the result of the call"
    )


def _a(value: Any) -> str:
    if type(value) is TensorProxy:
        return "a tensor"
    name = "number" if hasattr(type(value), "expr") else type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _reaches(root: Any, wanted: Sequence[Any]) -> bool:
    """Whether ``root`` refers to one of ``wanted``, directly or through other objects."""
    ids, reached, seen = set(map(id, wanted)), [root], {id(root)}
    for each in reached:
        if id(each) in ids:
            return True
        if len(reached) > MAX_REACHED or isinstance(each, (type, types.ModuleType)):
            continue
        # A function's globals are not its own.
        found = (each.__closure__, each.__defaults__) if isinstance(each, types.FunctionType) else None
        new = [other for other in found or gc.get_referents(each) if id(other) not in seen]
        seen.update(map(id, new))
        reached += new
    return False


def _holder(value: Any) -> tuple[str | None, str]:
    """What refers to ``value``: the attribute, if it is one, and a description."""
    for owner in gc.get_referrers(value):
        for holder in (owner, *gc.get_referrers(owner)) if type(owner) is dict else (owner,):
            is_ours = type(holder).__module__.partition(".")[0] == "jitgen"
            attributes = None if is_ours else getattr(holder, "__dict__", None)
            for name, found in attributes.items() if isinstance(attributes, dict) else ():
                if found is value:
                    return name, f"attribute {name!r} of {_a(holder)}"
    return None, "a container or an object outside of it"
