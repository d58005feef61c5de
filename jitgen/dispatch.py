"""Dispatchers: how a warm call finds its launch.

A call's argument types select a *dispatcher*, generated for exactly those types, so that it asks only what may differ
from the last call, without a loop: shape, strides, dtype, device, alignment, values that are static. What it does not
know goes to ``JitFunction._resolve``. Quantised weights are taken apart first; what they consist of has a dispatcher.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from jitgen import weights
from jitgen.errors import UnsupportedError
from jitgen.runtime.guards import layout_check
from jitgen.trace.guards import tracing
from jitgen.trace.host_scalars import HOST_SCALARS, exchanged

if TYPE_CHECKING:
    from jitgen.function import Entry, JitFunction

TENSORS = (torch.Tensor, torch.nn.Parameter)
NUMBERS = frozenset((int, float, *HOST_SCALARS.values()))
MAX_LAUNCHES = 4096
"""Launches kept per function and argument types; beyond it the table starts anew."""


def make_dispatcher(function: JitFunction, kinds: tuple[type, ...], tree: Any) -> Callable[..., Any]:
    """The function ``(*leaves) -> result`` for leaves of exactly these types.

    Its text is generated, so that it asks only what may differ from the last call, without a loop.
    """
    tensors = [i for i, kind in enumerate(kinds) if kind in TENSORS]
    number_places = [i for i, kind in enumerate(kinds) if kind in NUMBERS]
    static = [i for i, kind in enumerate(kinds) if kind not in TENSORS and kind not in NUMBERS]
    static += [place for index, place in enumerate(number_places) if index in function._static_numbers]
    if not tensors or any(kind in (list, tuple, dict) for kind in kinds):
        return _slow_dispatcher(function, tree)

    arguments = ", ".join(f"a{i}" for i in range(len(kinds)))
    given = ", ".join([*(f"a{i}" for i in tensors), *(f"p{i}" for i in tensors), *(f"a{i}" for i in number_places)])
    exact = [f"exact(a{i})" if kinds[i] is float else f"a{i}" for i in static]
    # Addresses matter to a GPU's 16-byte accesses; the CPU's take any.
    places = [f"p{i} & 15" for i in tensors] if torch.cuda.is_available() else []
    tests = [f"check({', '.join(f'a{i}' for i in tensors)})"]
    tests += [f"{fact} == f{n}" for n, fact in enumerate([*exact, *places])]
    hot = ", ".join(["check", "launch", *(f"f{n}" for n in range(len(exact) + len(places)))])
    facts = [*(f"a{i}.{fact}" for i in tensors for fact in ("shape", "stride()", "dtype", "device", "requires_grad"))]
    text = "\n".join(
        [
            f"def dispatch({arguments}):",
            # A trace in progress refuses to read an address: then this call is part of its kernel.
            "    try:",
            *(f"        p{i} = a{i}.data_ptr()" for i in tensors),
            "    except UnsupportedError:",
            f"        return state.inline({arguments})",
            f"    {hot} = state.hot",
            f"    if {' and '.join(tests)}:",
            f"        return launch({given})",
            f"    return state.cold(({', '.join(facts)},), ({_tuple(exact + places)}), ({arguments},), ({given},))",
            "",
        ]
    )
    state = _Dispatch(function, tree, tensors, len(exact) + len(places))
    names: dict[str, Any] = {"state": state, "exact": float.hex, "UnsupportedError": UnsupportedError}
    return _generated(function, text, names)


def make_quantized_dispatcher(function: JitFunction, args: Sequence[Any]) -> Callable[..., Any]:
    """The function ``(*args) -> result`` where some of ``args`` are quantised weights: takes them apart and goes on to
    the dispatcher of what they consist of."""
    arguments = ", ".join(f"a{i}" for i in range(len(args)))
    apart = [i for i, arg in enumerate(args) if weights.is_quantized(arg)]
    flat = ", ".join(f"*a{i}.parts" if i in apart else f"a{i}" for i in range(len(args)))
    text = "\n".join(
        [
            f"def dispatch({arguments}):",
            "    if tracing.get() is not None:",
            f"        return function.function({arguments})",
            f"    follow = table.get(({_tuple([f'a{i}.token' for i in apart])}))",
            "    if follow is None:",
            f"        return learn({arguments})",
            f"    return follow({flat})",
            "",
        ]
    )
    table: dict[Any, Callable[..., Any]] = {}

    def learn(*args: Any) -> Any:
        leaves, tree, _ = function._leaves(args, {})
        follow = function._dispatcher(leaves, tree)
        if all(args[i].token.layout == function._layout(args[i]) for i in apart):
            table[tuple(args[i].token for i in apart)] = follow
        return follow(*leaves)

    return _generated(function, text, {"tracing": tracing, "function": function, "table": table, "learn": learn})


def _generated(function: JitFunction, text: str, names: dict[str, Any]) -> Callable[..., Any]:
    """``dispatch`` as ``text`` defines it over ``names``; tracebacks show the text."""
    path = f"<jitgen dispatch {function.name} {id(names):x}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec"), names)
    return names["dispatch"]


def _inline(function: JitFunction, leaves: Sequence[Any], tree: Any) -> Any:
    """The call as part of the trace in progress."""
    args, kwargs = (leaves, {}) if tree is None else pytree.tree_unflatten(list(leaves), tree)
    return function.function(*args, **kwargs)


def _tuple(parts: Sequence[str]) -> str:
    return "".join(f"{part}, " for part in parts)


def _never(*tensors: torch.Tensor) -> bool:
    return False


class _Dispatch:
    """The state behind one generated dispatcher: what the last call was, and the table of all.

    ``hot`` is (layout check, launch, static values and address remainders) of the last call that needs no more checks
    than these: no captured tensors, no guarded values, no argument that requires grad.
    """

    __slots__ = ("function", "hot", "table", "tensors", "tree")

    def __init__(self, function: JitFunction, tree: Any, tensors: Sequence[int], facts: int):
        self.function = function
        self.tree = tree
        self.tensors = tensors
        self.hot: tuple[Any, ...] = (_never, None, *(None,) * facts)
        self.table: dict[Any, Entry] = {}

    def inline(self, *leaves: Any) -> Any:
        return _inline(self.function, leaves, self.tree)

    def cold(
        self, layout: tuple[Any, ...], exact: tuple[Any, ...], leaves: tuple[Any, ...], given: tuple[Any, ...]
    ) -> Any:
        """A call that is not like the last one, or whose entry must be checked at every call."""
        tensors = [leaves[i] for i in self.tensors]
        needs_grad = any(tensor.requires_grad for tensor in tensors)
        if needs_grad and torch.is_grad_enabled():
            self.function._check(leaves, host_scalars=True)
        key = (layout, exact)
        entry = self.table.get(key)
        captured = entry.captured_tensors() if entry is not None else None
        if entry is None and (scalars := exchanged(leaves)) is not None:
            return self.function._dispatcher(scalars, self.tree)(*scalars)
        if entry is None or captured is None:
            entry, captured = self.function._resolve(leaves, self.tree)
            if len(self.table) >= MAX_LAUNCHES:
                self.table.clear()
            self.table[key] = entry
        if not entry.captured and not entry.guards and not needs_grad:
            self.hot = (layout_check(tensors), entry.launch, *exact)
        count = len(tensors)
        addresses, numbers = given[count : 2 * count], given[2 * count :]
        return entry.launch(*tensors, *captured, *addresses, *(t.data_ptr() for t in captured), *numbers)


def _slow_dispatcher(function: JitFunction, tree: Any) -> Callable[..., Any]:
    """Resolves every call anew: for functions without tensor arguments."""

    def dispatch(*leaves: Any) -> Any:
        if tracing.get() is not None:
            return _inline(function, leaves, tree)
        entry, captured = function._resolve(leaves, tree)
        tensors = [*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *captured]
        numbers = [leaf for leaf in leaves if type(leaf) in NUMBERS]
        return entry.launch(*tensors, *(t.data_ptr() for t in tensors), *numbers)

    return dispatch
