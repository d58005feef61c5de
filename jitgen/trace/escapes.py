"""Refuses tensors of a trace that user code keeps beyond it: stored on an object, or returned in what a call cannot
rebuild.

What the journal finds is stored again by each call (``kept.py``). What a traced function stores where the journal does
not look would be a proxy, and later calls, which launch kernels without running the function, would store nothing. So
when the trace is over, every proxy and symbolic number must be gone.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jitgen.errors import TraceError
from jitgen.trace.journal import LRU_CACHE, Change
from jitgen.trace.kept import contained
from jitgen.trace.location import quote
from jitgen.trace.mentions import line_of_change
from jitgen.trace.proxy import TRACED, TensorProxy

MAX_REACHED = 10_000
"""Objects that a search within a returned object looks at."""


def check(
    name: str,
    function: Callable[..., Any],
    handed_out: Iterable[weakref.ref[Any]],
    returned: Sequence[Any],
    codes: Sequence[types.CodeType],
    changes: Sequence[Change] = (),
    caches: Sequence[Any] = (),
    keys: Sequence[Any] = (),
) -> None:
    """Checks that user code keeps nothing of a trace.

    Args:
        name: the function's, for messages.
        handed_out: every proxy and symbolic number that user code was given.
        returned: the leaves of its result that are no tensors.
        codes: what was run, to find the line.
        changes: what it changed; undone where anything is kept.
        caches: functions with caches that it may have called.
        keys: of the dicts in its result.

    Raises:
        TraceError: it keeps one, or its text, or returns a text, an iterator or a coroutine.
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
    _refuse_texts(name, (returned, keys), changes, codes, line)
    alive = kept(handed_out)
    if not alive:
        return
    for leaf in returned:
        if _reached(leaf, alive) is not None:
            raise TraceError(
                f"{name} returns {_a(leaf)} that holds a tensor or a size; a call can rebuild tuples, lists, dicts and "
                f"named tuples{quote(line)}\n  return one of those, or register the class with "
                "torch.export.register_dataclass"
            )
    for change in changes:
        for key in change.keys:
            value = _reached((key, change.new.get(key)), alive)
            if value is not None:
                raise TraceError(_kept(name, value, change.where(key), line_of_change(codes, change.name) or line))
    value = alive[0]
    attribute, where = _holder(value)
    line = (attribute and line_of_change(codes, attribute)) or _made_at(value) or line
    _release(alive, caches)
    raise TraceError(_kept(name, value, where, line))


def _refuse_texts(
    name: str, returned: Any, changes: Sequence[Change], codes: Sequence[types.CodeType], line: str | None
) -> None:
    """Raises TraceError where the text of a tensor of the trace is returned or kept, which later calls would have in
    place of one with the tensor's values."""
    remedy = "return the tensor, and make a text of the result of the call"
    if _has_text(returned):
        raise TraceError(f"{name} returns the text of a tensor, which has no values yet{quote(line)}\n  {remedy}")
    for change in changes:
        for key in change.keys:
            if _has_text((key, change.new.get(key))):
                raise TraceError(
                    f"{name} keeps the text of a tensor in {change.where(key)}, which has no values yet"
                    f"{quote(line_of_change(codes, change.name) or line)}\n  {remedy}"
                )


def _has_text(value: Any) -> bool:
    return any(isinstance(one, str) and TRACED in one for one in contained(value))


def kept(handed_out: Iterable[weakref.ref[Any]]) -> list[Any]:
    """Returns those of ``handed_out`` that are still referenced once reference cycles are collected."""
    if any(reference() is not None for reference in handed_out):
        gc.collect()
    return [value for reference in handed_out if (value := reference()) is not None]


def _kept(name: str, value: Any, where: str, line: str | None) -> str:
    return (
        f"{name} keeps {_a(value)} in {where}: later calls launch kernels without running the function, and would "
        f"store nothing{quote(line)}\n  return it, and store the result of the call"
    )


def _made_at(value: Any) -> str | None:
    return getattr(getattr(value, "value", None), "location", None)


def _release(kept: list[Any], caches: Sequence[Any]) -> None:
    """Takes what is kept out of the dicts, lists and caches that hold it, which eager torch may meet next."""
    for cache in caches:
        cache.cache_clear()
    for value in [*kept]:
        for holder in gc.get_referrers(value):
            if holder is kept or type(holder).__module__.partition(".")[0] == "jitgen":
                continue
            if isinstance(holder, LRU_CACHE):
                holder.cache_clear()
            elif type(holder) is dict:
                for key in [key for key, item in holder.items() if item is value and key is not value]:
                    del holder[key]
            elif isinstance(holder, (list, deque)):
                for index in reversed([index for index, item in enumerate(holder) if item is value]):
                    del holder[index]


def _a(value: Any) -> str:
    if type(value) is TensorProxy:
        return "a tensor"
    name = "number" if hasattr(type(value), "expr") else type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _reached(root: Any, wanted: Sequence[Any]) -> Any:
    """Returns the one of ``wanted`` to which ``root`` refers, directly or through other objects; None without one."""
    ids, reached, seen = set(map(id, wanted)), [root], {id(root)}
    for value in reached:
        if id(value) in ids:
            return value
        if len(reached) > MAX_REACHED or isinstance(value, (type, types.ModuleType)):
            continue
        # A function's globals are not its own.
        referents = (value.__closure__, value.__defaults__) if isinstance(value, types.FunctionType) else None
        new = [other for other in referents or gc.get_referents(value) if id(other) not in seen]
        seen.update(map(id, new))
        reached += new
    return None


def _holder(value: Any) -> tuple[str | None, str]:
    """Describes what refers to ``value``: the attribute, if it is one, and a description."""
    for owner in gc.get_referrers(value):
        for holder in (owner, *gc.get_referrers(owner)) if type(owner) is dict else (owner,):
            is_ours = type(holder).__module__.partition(".")[0] == "jitgen"
            attributes = None if is_ours else getattr(holder, "__dict__", None)
            for name, attribute in attributes.items() if isinstance(attributes, dict) else ():
                if attribute is value:
                    return name, f"attribute {name!r} of {_a(holder)}"
    return None, "a container or an object outside of it"
