"""Writes the text of a module that defines a user's Triton kernel and everything that it calls.

The text stands by itself: it imports nothing but Triton and ``math``, and has the functions and constants that the
kernel reaches by name, in whatever modules they are. So its digest covers all that decides what the kernel computes,
and a process without the user's modules compiles the same. The user's lines stay as they are, except that a name is
replaced where two functions mean different things by it, or where an attribute of a user's module is meant.

Neighbour: ``launches.py`` puts the text into nodes of the graph.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.edits import Edit, Positions, edited
from jitgen.errors import UnsupportedError

_MISSING = object()


def is_jit_function(value: Any) -> bool:
    """Returns whether ``value`` is a function under ``@triton.jit``, to be compiled or to be interpreted."""
    return type(value).__name__ in ("JITFunction", "InterpretedFunction") and _is_tritons(type(value))


def is_constexpr_function(value: Any) -> bool:
    return type(value).__name__ == "ConstexprFunction" and _is_tritons(type(value))


def is_launcher(value: Any) -> bool:
    """Returns whether ``value`` is launched as a kernel: a function under ``@triton.jit``, perhaps with an autotuner
    or heuristics."""
    kind = type(value)
    return is_jit_function(value) or (kind.__name__ in ("Autotuner", "Heuristics") and _is_tritons(kind))


def constants_read(launcher: Any) -> list[tuple[dict[str, Any], str]]:
    """Lists the globals that a kernel and what it calls read and that are neither functions nor modules, each as a
    namespace and a name."""
    kernel = launcher
    while not is_jit_function(kernel):
        kernel = kernel.fn
    read: list[tuple[dict[str, Any], str]] = []
    waiting, seen = [kernel], set[int]()
    while waiting:
        kernel = waiting.pop()
        if id(kernel) in seen:
            continue
        seen.add(id(kernel))
        function = inspect.unwrap(kernel.fn)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name, _MISSING)
            if is_jit_function(value) or is_constexpr_function(value):
                waiting += [] if str(value.fn.__module__).startswith("triton.") else [value]
            elif constant(value) is not None:
                read.append((function.__globals__, name))
    return read


def _is_tritons(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == "triton"


@dataclass(frozen=True)
class Defined:
    """Holds the text of a function and what its names mean.

    Attributes:
        function: the plain Python function.
        text: from its ``def`` on, without decorators, at the margin.
        tree: of ``text``.
        file, line: where the ``def`` is.
    """

    function: types.FunctionType
    text: str
    tree: ast.FunctionDef
    file: str
    line: int

    def value(self, name: str) -> Any:
        """Returns what the global or enclosing ``name`` means there; ``_MISSING`` if nothing."""
        cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
        if name in cells:
            try:
                return cells[name].cell_contents
            except ValueError:  # assigned after the kernel is defined, and not yet
                return _MISSING
        return self.function.__globals__.get(name, _MISSING)

    def meaning(self, expression: ast.expr) -> Any:
        """Returns what a name, or a chain of attributes of one, means; ``_MISSING`` for a local or other expression."""
        if isinstance(expression, ast.Name):
            return _MISSING if expression.id in self.locals else self.value(expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.meaning(expression.value)
            return _MISSING if owner is _MISSING else getattr(owner, expression.attr, _MISSING)
        return _MISSING

    @property
    def locals(self) -> set[str]:
        stored = {
            node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id and _is_stored(node)
        }
        return stored | {argument.arg for argument in ast.walk(self.tree.args) if isinstance(argument, ast.arg)}

    def location(self, node: ast.AST) -> str:
        """Returns file and line of ``node``, for messages."""
        return f"{self.file}:{self.line + getattr(node, 'lineno', 1) - 1}"


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def defined(kernel: Any) -> Defined:
    """Returns the definition of ``kernel``, a function under ``@triton.jit``.

    Raises:
        UnsupportedError: its text cannot be read.
    """
    function = inspect.unwrap(kernel.fn)
    try:
        lines, first = getattr(kernel, "raw_src", None), getattr(kernel, "starting_line_number", 1)
        if not isinstance(lines, list):  # of a kernel that is interpreted; Triton has read the others already
            lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise UnsupportedError(
            f"the text of the kernel {function.__name__} cannot be read, so that nobody can tell what it computes; "
            "define it in a file"
        ) from None
    offset = next(index for index, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def ")))
    text = textwrap.dedent("".join(lines[offset:])).rstrip() + "\n"
    (tree,) = ast.parse(text).body
    assert isinstance(tree, ast.FunctionDef)
    code = next(c for c in compile(text, "<kernel>", "exec").co_consts if isinstance(c, types.CodeType))
    if (tree.name, code.co_varnames) != (function.__name__, function.__code__.co_varnames):
        raise UnsupportedError(
            f"the file {inspect.getsourcefile(function)} has changed since its kernel {function.__name__} was "
            "imported; start the program again"
        )
    return Defined(function, text, tree, inspect.getsourcefile(function) or "?", first + offset)


class _Writer:
    """Collects the parts of the module's text.

    Attributes:
        imports, constants, functions: lines and texts, in order.
        names: what each name of the module stands for.
    """

    def __init__(self) -> None:
        self.imports: list[str] = []
        self.constants: list[str] = []
        self.functions: list[str] = []
        self.names: dict[str, Any] = {}
        self._written: dict[int, str] = {}
        for path in ("triton", "triton.language"):
            self._import(path, "tl" if path.endswith("language") else path)

    def _import(self, path: str, name: str) -> None:
        self.names[name] = sys.modules[path]
        self._written[id(sys.modules[path])] = name
        self.imports.append(f"import {path}" if path == name else f"import {path} as {name}")

    def _free(self, name: str, value: Any) -> str:
        """Returns ``name``, or one like it that stands for nothing else in the module."""
        free, number = name, 0
        while free in self.names and self.names[free] is not value:
            number += 1
            free = f"{name}_{number}"
        self.names[free] = value
        return free

    def function(self, kernel: Any) -> str:
        """Adds ``kernel`` with all that it calls; returns its name in the module."""
        if id(kernel) in self._written:
            return self._written[id(kernel)]
        own = defined(kernel)
        name = self._written[id(kernel)] = self._free(own.tree.name, kernel)
        positions, edits = Positions(own.text), list[Edit]()
        for node in _outermost(own.tree):
            spelled = self._spelled(own, node)
            if spelled is not None:
                edits.append(positions.over(node, spelled))
        text = edited(own.text, edits)
        if name != own.tree.name:
            text = text.replace(f"def {own.tree.name}", f"def {name}", 1)
        decorator = "@triton.constexpr_function" if is_constexpr_function(kernel) else "@triton.jit"
        if getattr(kernel, "noinline", None):
            decorator += "(noinline=True)"
        self.functions.append(f"{decorator}\n{text}")
        return name

    def _spelled(self, own: Defined, node: ast.expr) -> str | None:
        """Returns the spelling in the module of a global that ``node`` names; None where it stays as it is."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id in own.locals:
            return None
        value = own.value(root.id)
        if value is _MISSING:
            if hasattr(builtins, root.id):
                return None
            raise UnsupportedError(
                f"{own.location(node)}: the kernel {own.tree.name} reads {root.id}, which is undefined; "
                "define it in the kernel's file before the call"
            )
        name, path = root.id, ast.unparse(node)
        chain = [] if node is root else path.split(".")[1:]
        # Attributes of a user's module or class are named one by one.
        while chain and not _is_tritons_or_math(value) and isinstance(value, (types.ModuleType, type)):
            attribute = chain.pop(0)
            if not hasattr(value, attribute):
                raise UnsupportedError(f"{own.location(node)}: {path} is undefined; import what defines it")
            value, name = getattr(value, attribute), attribute
        annotation = own.function.__globals__.get("__annotations__", {}).get(root.id)
        is_constant = annotation is not None and "constexpr" in str(annotation)
        spelled = ".".join([self._global(own, node, name, value, is_constant), *chain])
        return None if spelled == path else spelled

    def _global(self, own: Defined, node: ast.AST, name: str, value: Any, is_constant: bool) -> str:
        """Adds what defines ``value``, to be called ``name`` if that is free; returns its name."""
        known = self._written.get(id(value))
        if known is not None and self.names.get(known) is value:
            return known
        if isinstance(value, types.ModuleType):
            if not _is_tritons_or_math(value):
                raise UnsupportedError(
                    f"{own.location(node)}: the kernel {own.tree.name} uses the module {name} itself; "
                    "name what it reads of it"
                )
            free = self._free(name, value)
            self.imports.append(f"import {value.__name__} as {free}")
            self._written[id(value)] = free
            return free
        if _is_tritons(value) and isinstance(getattr(value, "__name__", None), str):
            owner, own_name = sys.modules[str(value.__module__)], str(value.__name__)
            if getattr(owner, own_name, None) is value:
                free = self._free(name, value)
                self.imports.append(f"from {owner.__name__} import {own_name} as {free}")
                self._written[id(value)] = free
                return free
        if is_jit_function(value) or is_constexpr_function(value):
            return self.function(value)
        text = constant(value)
        if text is None:
            raise UnsupportedError(
                f"{own.location(node)}: the kernel {own.tree.name} reads {name}, a {type(value).__name__}; it may read "
                "functions under @triton.jit, numbers and tl.constexpr values"
            )
        free = self._free(name, value)
        is_constant = is_constant or type(value).__name__ == "constexpr"
        line = f"{free} = tl.constexpr({text})" if is_constant else f"{free} = {text}"
        if line not in self.constants:
            self.constants.append(line)
        return free

    @property
    def text(self) -> str:
        groups = ["\n".join(dict.fromkeys(self.imports)), "\n".join(self.constants)]
        return "\n\n".join(group for group in groups if group) + "\n" + "".join(f"\n\n{f}" for f in self.functions)


def _is_tritons_or_math(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.split(".")[0] in ("triton", "math")


def _outermost(tree: ast.FunctionDef) -> list[ast.expr]:
    """Lists the names and chains of attributes in ``tree``, of which none is inside another."""
    listed: list[ast.expr] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(root, ast.Name):
            listed.append(node)
        else:
            stack.extend(ast.iter_child_nodes(node))
    return sorted(listed, key=lambda node: (node.lineno, node.col_offset))


def constant(value: Any) -> str | None:
    """Returns the text of a constant in Triton; None where it is none."""
    if type(value).__name__ == "constexpr" and _is_tritons(type(value)):
        return constant(value.value)
    if type(value).__name__ == "dtype" and _is_tritons(type(value)):
        language = sys.modules["triton.language"]
        return next((f"tl.{name}" for name, known in vars(language).items() if known is value or known == value), None)
    if isinstance(value, tuple):
        texts = [constant(item) for item in value]
        return None if None in texts else f"({', '.join(map(str, texts))}{',' * (len(texts) == 1)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if value is None or type(value) in (bool, int, float, str) else None


def module_of(kernel: Any, others: Callable[[Callable[[Any], str]], None] | None = None) -> tuple[str, str]:
    """Returns (entry, text): the name of ``kernel`` in a module that defines it, and the module's text.

    Args:
        others: is called with what adds a further function to the module and returns its name.
    """
    writer = _Writer()
    if others is not None:
        others(writer.function)
    entry = writer.function(kernel)
    return entry, writer.text
