"""Finds which of its arguments a user's Triton kernel writes, from its syntax tree.

A pointer that is stored through comes from some parameters of the kernel: it is computed of them, perhaps in other
functions. Every branch is followed, whatever its condition is, and every assignment to a variable counts for all of its
uses. So a parameter may be named although a call does not write it, but none that is written is left out.

Neighbour: ``launches.py`` makes a node for each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jitgen.errors import UnsupportedError
from jitgen.trace.kernels.triton_module import Defined, defined, is_jit_function

Origins = frozenset[str]
"""The parameters of the kernel that a value may be computed of as a pointer."""
NOTHING: Origins = frozenset()

_READS = ("load", "load_tensor_descriptor", "_experimental_descriptor_load")
_VALUES = ("dot", "dot_scaled", "program_id", "num_programs", "arange", "zeros", "full", "sum", "max", "min", "argmax")
"""Functions of Triton whose results are no pointers."""


@dataclass
class Accesses:
    """Holds what a kernel does with its pointers.

    Attributes:
        written: the parameters that it may write through, and the numbers by which it advances these.
        read: those that it may read.
        atomics: those that it may change by atomic operations.
    """

    written: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    atomics: set[str] = field(default_factory=set)


def accesses(kernel: Any) -> Accesses:
    """Returns what ``kernel``, a function under ``@triton.jit``, may do with its arguments."""
    noted = Accesses()
    own = defined(kernel)
    names = [argument.arg for argument in own.tree.args.args]
    _Function(own, {name: frozenset([name]) for name in names}, noted, ()).run()
    return noted


class _Function:
    """Follows pointers through one function, for one set of arguments."""

    def __init__(self, own: Defined, arguments: dict[str, Origins], noted: Accesses, callers: tuple[Any, ...]):
        self.own, self.noted, self.callers = own, noted, callers
        self.origins: dict[str, Origins] = dict(arguments)
        self.returned: Origins = NOTHING

    def run(self) -> Origins:
        """Returns where the function's result comes from."""
        before = None
        while before != self.origins:  # until loops add nothing
            before = dict(self.origins)
            for statement in self.own.tree.body:
                self._statement(statement)
        return self.returned

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            if node.value is not None:
                self._assign(node.target, node.value)
        elif isinstance(node, ast.Return):
            self.returned |= NOTHING if node.value is None else self._value(node.value)
        elif isinstance(node, (ast.For, ast.While, ast.If, ast.With)):
            if isinstance(node, ast.For):
                self._assign(node.target, node.iter)
            elif isinstance(node, ast.With):
                for item in node.items:
                    self._value(item.context_expr)
            else:
                self._value(node.test)
            for inner in (*node.body, *getattr(node, "orelse", ())):
                self._statement(inner)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self._value(child)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            values: Sequence[ast.expr] = value.elts if same else [value] * len(target.elts)  # type: ignore[attr-defined]
            for element, source in zip(target.elts, values, strict=True):
                self._assign(element, source)
        elif isinstance(target, ast.Name):
            self.origins[target.id] = self.origins.get(target.id, NOTHING) | self._value(value)
        else:
            self._value(value)

    def _value(self, node: ast.expr) -> Origins:
        """Returns where the pointers in the value of ``node`` come from, and notes what is accessed on the way."""
        if isinstance(node, ast.Name):
            return self.origins.get(node.id, NOTHING)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Compare):
            self._all(node)
            return NOTHING
        return self._all(node)

    def _all(self, node: ast.AST) -> Origins:
        origins = (self._value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        return frozenset().union(*origins)

    def _call(self, node: ast.Call) -> Origins:
        arguments = [self._value(a.value if isinstance(a, ast.Starred) else a) for a in node.args]
        named = {keyword.arg: self._value(keyword.value) for keyword in node.keywords}
        everything = frozenset().union(*arguments, *named.values())
        called = self.own.meaning(node.func)
        if isinstance(called, type) or (isinstance(node.func, ast.Name) and called.__class__ is object):
            return everything  # range, or a builtin of Python's
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        module = str(getattr(called, "__module__", None) or "")
        if is_jit_function(called) and not module.startswith("triton.") and not _is_tritons_own(called):
            return self._of_function(node, called, arguments, named)
        receiver = NOTHING
        if isinstance(node.func, ast.Attribute) and called.__class__ is object:  # a method of a value
            receiver = self._value(node.func.value)
        pointer = receiver or (arguments[0] if arguments else named.get("pointer", named.get("desc", NOTHING)))
        stores = name == "store" or name.endswith(("descriptor_store", "store_tensor_descriptor"))
        stores |= name == "scatter" and bool(receiver)
        is_atomic = name.startswith(("atomic_", "descriptor_atomic"))
        if stores or is_atomic or name in _READS:
            if not pointer:
                raise UnsupportedError(
                    f"{self.own.location(node)}: {self.own.tree.name} calls {name} with a pointer that comes from no "
                    "parameter, so that nobody can tell which tensor it reads or writes; compute it from an argument"
                )
            self.noted.written |= pointer if stores or is_atomic else NOTHING
            self.noted.atomics |= pointer if is_atomic else NOTHING
            self.noted.read |= NOTHING if stores else pointer
            return NOTHING
        if name == "inline_asm_elementwise" and everything:
            self.noted.written |= everything
            self.noted.read |= everything
            return NOTHING
        return NOTHING if name in _VALUES else everything | receiver

    def _of_function(
        self, node: ast.Call, called: Any, arguments: Sequence[Origins], named: dict[str | None, Origins]
    ) -> Origins:
        if called in self.callers:
            raise UnsupportedError(f"{self.own.location(node)}: {self.own.tree.name} calls itself; write a loop")
        inner = defined(called)
        names = [argument.arg for argument in (*inner.tree.args.args, *inner.tree.args.kwonlyargs)]
        if any(isinstance(argument, ast.Starred) for argument in node.args) or None in named:
            bound = dict.fromkeys(names, frozenset().union(*arguments, *named.values()))
        else:
            bound = dict(zip(names, arguments, strict=False)) | {n: o for n, o in named.items() if n is not None}
        return _Function(inner, bound, self.noted, (*self.callers, called)).run()


def _is_tritons_own(called: Any) -> bool:
    return str(getattr(called.fn, "__module__", "")).startswith("triton.")
