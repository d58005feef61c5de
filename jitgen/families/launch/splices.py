"""Proves where a pointwise rule may stand in a user's Triton kernel, and puts it there.

A kernel stores to a tensor through a pointer that it computes of one parameter: ``c_ptr + offs_m[:, None] * stride +
offs_n[None, :]``. The tensor is row-major, so what is added to the parameter is the number of the element, and the
coordinates follow from it by division. Beside every assignment of such a pointer, one of its *offset* is put: the same
text, with the offset of the pointer that it starts from in the place of that. A store becomes a call of a generated
function, which gets offset, value and mask, loads the rule's other operands there, and stores what the rule gives. It
is the same for what is loaded of a tensor.

A splice is right if nothing else is done with the pointer. It is refused, with the line and the reason, where the
kernel reads what it stores, changes it by an atomic operation, hands the pointer to another function, makes a block
pointer or a descriptor of it, or computes it otherwise than by adding to the parameter. An element that is stored
several times keeps the last value, of which the rule is then computed too.

Neighbours: ``claim.py`` asks for the refusal, ``context.py`` for the text.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jitgen.codegen.edits import Edit, Positions, edited

LOAD, STORE = "load", "store"
_ARGUMENTS = {LOAD: ("pointer", "mask", "other"), STORE: ("pointer", "value", "mask")}
_KEPT = ("cache_modifier", "eviction_policy", "volatile")
"""Further arguments of a load or a store, which decide nothing about values."""
ZERO = "tl.full((), 0, tl.int32)"


@dataclass(frozen=True)
class Access:
    """Holds one call of ``tl.load`` or ``tl.store`` that a rule replaces.

    Attributes:
        node: the call.
        pointer, value, mask, other: its arguments; None where they are not given.
    """

    node: ast.Call
    pointer: ast.expr
    value: ast.expr | None = None
    mask: ast.expr | None = None
    other: ast.expr | None = None


@dataclass
class Pointer:
    """Holds what a kernel does with the pointer that is one of its parameters.

    Attributes:
        parameter: its name.
        names: the variables that are such pointers, the parameter among them.
        assigned: the statements that assign one.
        accesses: the loads, or the stores, through one.
        refusal: why no rule may stand there; empty if one may.
    """

    parameter: str
    names: set[str]
    assigned: list[ast.Assign | ast.AugAssign] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    refusal: str = ""


@functools.lru_cache(256)
def function_of(text: str, entry: str) -> ast.FunctionDef:
    """Returns the definition of ``entry`` in a module's ``text``."""
    return next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == entry)


@functools.lru_cache(1024)
def pointer_of(text: str, entry: str, parameter: str, kind: str) -> Pointer:
    """Returns what the kernel ``entry`` does with ``parameter``, of which ``kind`` is replaced."""
    function = function_of(text, entry)
    pointer = Pointer(parameter, {parameter})
    size = 0
    while size != len(pointer.names):  # until no assignment makes another pointer of one
        size = len(pointer.names)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _root(node.value, pointer.names) is not None:
                pointer.names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    _Uses(text, function, pointer, kind).check()
    return pointer


def refusal(text: str, entry: str, parameter: str, kind: str) -> str:
    """Explains why no rule may stand at the loads, or stores, of ``parameter``; empty if one may."""
    pointer = pointer_of(text, entry, parameter, kind)
    if not pointer.refusal and not pointer.accesses:
        return f"it has no tl.{kind} through {parameter} in its own text"
    return pointer.refusal


def _root(node: ast.expr, names: set[str]) -> ast.Name | None:
    """Returns the pointer among ``names`` to which ``node`` adds offsets; None where it is no such sum."""
    if isinstance(node, ast.Name):
        return node if node.id in names else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _root(node.left, names), _root(node.right, names)
        return left if right is None else right if left is None else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return _root(node.left, names)
    return None


def _advanced(statement: ast.stmt, names: set[str]) -> ast.Name | None:
    """Returns the pointer that ``statement`` advances in place; None if it advances none."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, (ast.Add, ast.Sub)):
        return _root(statement.target, names)
    return None


class _Uses:
    """Checks every use of a pointer in a function."""

    def __init__(self, text: str, function: ast.FunctionDef, pointer: Pointer, kind: str) -> None:
        self.lines, self.function, self.pointer, self.kind = text.split("\n"), function, pointer, kind
        self.allowed: set[int] = set()

    def check(self) -> None:
        self._statements(self.function.body, in_loop=False)
        for node in ast.walk(self.function):
            if isinstance(node, ast.Name) and node.id in self.pointer.names and id(node) not in self.allowed:
                self._refuse(node, f"{node.id} is used in another way than to {self.kind} at offsets")

    def _refuse(self, node: ast.AST, why: str) -> None:
        if not self.pointer.refusal:
            line = self.lines[getattr(node, "lineno", 1) - 1].strip()
            self.pointer.refusal = f"{why}: {line}"

    def _statements(self, statements: Sequence[ast.stmt], in_loop: bool) -> None:
        names = self.pointer.names
        for statement in statements:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target, root = statement.targets[0], _root(statement.value, names)
                if root is not None and isinstance(target, ast.Name):
                    self._assign(statement, target, root, in_loop)
            elif (advanced := _advanced(statement, names)) is not None:
                self._assign(statement, advanced, advanced, in_loop)
            loops = isinstance(statement, (ast.For, ast.While))
            for attribute in ("body", "orelse"):
                self._statements(getattr(statement, attribute, ()), in_loop or loops)
            for node in _expressions(statement):
                self._expression(node)

    def _assign(self, statement: Any, target: ast.Name, root: ast.Name, in_loop: bool) -> None:
        if in_loop and target.id == self.pointer.parameter:
            self._refuse(statement, f"{target.id} is advanced in a loop")
        self.allowed |= {id(target), id(root)}
        self.pointer.assigned.append(statement)

    def _expression(self, root: ast.expr) -> None:
        for node in ast.walk(root):
            if isinstance(node, ast.Call) and (access := self._access(node)) is not None:
                pointer = _root(access.pointer, self.pointer.names)
                assert pointer is not None
                self.allowed.add(id(pointer))
                self.pointer.accesses.append(access)
            elif isinstance(node, ast.Attribute) and node.attr in ("dtype", "type"):
                self.allowed.add(id(node.value))
            elif isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                self.allowed.add(id(node.left))

    def _access(self, node: ast.Call) -> Access | None:
        """Returns the access that ``node`` is, if it is of this pointer and of the kind that is replaced."""
        if ast.unparse(node.func) != f"tl.{self.kind}" or any(isinstance(a, ast.Starred) for a in node.args):
            return None
        names = _ARGUMENTS[self.kind]
        bound = dict(zip(names, node.args, strict=False))
        bound |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
        if "pointer" not in bound or _root(bound["pointer"], self.pointer.names) is None:
            return None
        unknown = [name for name in bound if name not in (*names, *_KEPT)]
        if unknown or len(node.args) > len(names) or any(keyword.arg is None for keyword in node.keywords):
            self._refuse(node, f"tl.{self.kind} has other arguments than {', '.join(names)}")
        return Access(node, **{name: bound.get(name) for name in names})  # type: ignore[arg-type]


def _expressions(statement: ast.stmt) -> list[ast.expr]:
    """Lists the expressions of a statement itself, without those of statements inside it."""
    listed: list[ast.expr] = []
    for _, value in ast.iter_fields(statement):
        items = value if isinstance(value, list) else [value]
        listed += [item for item in items if isinstance(item, ast.expr)]
        listed += [item.context_expr for item in items if isinstance(item, ast.withitem)]
    return listed


# ------------------------------------------------------------------------------------------------------- the text


@dataclass(frozen=True)
class Splice:
    """Says which function replaces the accesses of a parameter.

    Attributes:
        parameter, kind: of the kernel; loads or stores.
        function: takes offset, value and mask of a store, offset, mask and other of a load, and ``arguments``.
        arguments: the further parameters, which the kernel gets too.
    """

    parameter: str
    kind: str
    function: str
    arguments: tuple[str, ...]


def spliced(text: str, entry: str, splices: Sequence[Splice]) -> str:
    """Returns the module's ``text`` with the accesses of some parameters of ``entry`` replaced."""
    function = function_of(text, entry)
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(function.body) > 1:
        first = function.body[1]
    rewriting, positions = _Rewriting(), Positions(text)
    for splice in splices:
        pointer = pointer_of(text, entry, splice.parameter, splice.kind)
        rewriting.add(splice, pointer)
    edits: list[Edit] = []
    for splice in splices:
        pointer = pointer_of(text, entry, splice.parameter, splice.kind)
        offsets = rewriting.offsets[splice.parameter]
        if offsets[splice.parameter] != ZERO:
            at = positions.start(first)
            edits.append(Edit(at, at, f"{offsets[splice.parameter]} = {ZERO}\n{' ' * first.col_offset}"))
        for statement in pointer.assigned:
            end = positions.end(statement)
            target = _target(statement)
            sign = "" if isinstance(statement, ast.Assign) else "+" if isinstance(statement.op, ast.Add) else "-"
            value = rewriting.text(statement.value, {} if sign else offsets)
            edits.append(Edit(end, end, f"; {offsets[target]} {sign}= {value}"))
    accesses = _outermost(function, rewriting.accesses)
    edits += [positions.over(node, rewriting.text(node, {})) for node in accesses]
    added = dict.fromkeys(argument for splice in splices for argument in splice.arguments)
    at = positions.start(function.args.args[0])
    edits.append(Edit(at, at, "".join(f"{argument}, " for argument in added)))
    return edited(text, edits)


class _Rewriting:
    """Holds which calls are replaced, and what the offset of each pointer is called.

    Attributes:
        accesses: the replaced calls by their ids.
        offsets: by parameter, the names of offsets by those of pointers.
    """

    def __init__(self) -> None:
        self.accesses: dict[int, tuple[Splice, Access]] = {}
        self.offsets: dict[str, dict[str, str]] = {}

    def add(self, splice: Splice, pointer: Pointer) -> None:
        self.accesses |= {id(access.node): (splice, access) for access in pointer.accesses}
        names = {name: f"{name}_offset" for name in sorted(pointer.names)}
        if splice.parameter not in map(_target, pointer.assigned):
            names[splice.parameter] = ZERO
        self.offsets[splice.parameter] = names

    def text(self, node: ast.AST, names: Mapping[str, str]) -> str:
        """Returns the text of ``node`` with accesses replaced, and pointers among ``names`` by their offsets."""
        return ast.unparse(ast.fix_missing_locations(self._copied(node, names)))

    def _copied(self, node: Any, names: Mapping[str, str]) -> Any:
        if isinstance(node, list):
            return [self._copied(item, names) for item in node]
        if not isinstance(node, ast.AST):
            return node
        if id(node) in self.accesses:
            return self._call(*self.accesses[id(node)])
        if isinstance(node, ast.Name) and node.id in names:
            return ast.parse(names[node.id], mode="eval").body
        return type(node)(**{name: self._copied(value, names) for name, value in ast.iter_fields(node)})

    def _call(self, splice: Splice, access: Access) -> ast.Call:
        operands = [access.value, access.mask] if splice.kind == STORE else [access.mask, access.other]
        offset = self._copied(access.pointer, self.offsets[splice.parameter])
        values = [ast.Constant(None) if value is None else self._copied(value, {}) for value in operands]
        further = [ast.Name(argument, ast.Load()) for argument in splice.arguments]
        return ast.Call(ast.Name(splice.function, ast.Load()), [offset, *values, *further], [])


def _target(statement: ast.Assign | ast.AugAssign) -> str:
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    assert isinstance(target, ast.Name)
    return target.id


def _outermost(root: ast.AST, calls: Mapping[int, Any]) -> list[ast.Call]:
    """Lists the nodes among ``calls``, by their ids, that are within no other one."""
    listed: list[ast.Call] = []
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Call) and id(node) in calls:
            listed.append(node)
        else:
            stack.extend(ast.iter_child_nodes(node))
    return listed
