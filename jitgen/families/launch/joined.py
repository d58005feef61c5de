"""Makes one kernel of two in Triton that a user wrote, where the second reads only what the same program of the first
has stored.

That is proved from their texts. The first stores one tensor, once, outside of loops and branches; the second loads it
at the same offsets, under the same mask, on the same grid. Offsets and masks are compared as sums and as text, with
each name replaced by what it is assigned, once, and each parameter by what is passed. Then the value that is stored
takes the place of what is loaded: no other program has a part in it, and memory none. (An element that several threads
store has no one value, in either case.) Else there are two kernels, and ``explain()`` says why.

Neighbours: ``claim.py`` asks; ``splices.py`` has what a kernel does with a pointer.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitgen.codegen.edits import Edit, Positions, Renamed, edited
from jitgen.device import Device
from jitgen.families.family import Partition, Question
from jitgen.families.launch import NAME, accumulators, splices
from jitgen.families.launch.layout import parameter_of
from jitgen.families.launch.splices import Access, function_of, pointer_of
from jitgen.ir.attributes import KernelText, LaunchAttrs
from jitgen.ir.graph import Node, topological
from jitgen.ir.index import Index
from jitgen.ir.launches import CONFIG, CONSTANT, TENSOR, TRITON, Config
from jitgen.ir.nodes import LAUNCH
from jitgen.ir.program import Decision

BETWEEN = "jitgen_between"
"""What the second kernel reads of the first."""
_PURE = ("program_id", "num_programs", "arange", "cdiv", "minimum", "maximum", "full", "zeros")
"""Functions of Triton's whose results follow from their arguments and the program."""
_ELEMENTS = {
    "float32": "tl.float32",
    "float64": "tl.float64",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    **{f"int{bits}": f"tl.int{bits}" for bits in (8, 16, 32, 64)},
}


class _Apart(Exception):
    """Says why two kernels stay two."""


@dataclass(frozen=True)
class Joined(Question):
    """Asks whether two kernels are one."""

    placements = ("one kernel", "two kernels")
    first: str
    second: str
    refusal: str

    def __str__(self) -> str:
        return f"{self.first} and {self.second}, which reads what it stores"

    def decide(self, device: Device) -> Decision:
        """Returns whether they are."""
        if self.refusal:
            return Decision(False, self.refusal)
        return Decision(True, "each program reads only what the same program has stored")


def joined(values: Sequence[Node], partition: Partition) -> Sequence[Node]:
    """Returns ``values`` with pairs of launches as one, where that is proved right."""
    known: set[Node] = set()
    while True:
        pair = next(_pairs(values, known), None)
        if pair is None:
            return values
        first, seconds, number = pair
        known.add(seconds[0])
        attrs, refusal = None, ""
        try:
            attrs = _joined_attrs(first, seconds[0], number)
        except _Apart as reason:
            refusal = str(reason)
        names = first.attrs.kernel.entry, seconds[0].attrs.kernel.entry
        if not partition.decide(NAME, Joined(*names, refusal)).fused or attrs is None:
            continue
        operands, made, places = attrs
        memo = {}
        for second in seconds:
            own = made._replace(result=places[second.attrs.result])
            memo[id(second)] = partition.mover.builder.like(second, tuple(operands), second.shape, tuple(own))
        values = [partition.mover.substituted(value, dict(memo)) for value in values]


def _pairs(values: Sequence[Node], known: set[Node]) -> Any:
    """Yields (first, results of the second, operand of the second): pairs of which the second alone reads the first."""
    index = Index(values)
    roots = set(values)
    for node in topological(values):
        if node.kind is not LAUNCH or node in roots or node.attrs.kernel.language != TRITON:
            continue
        users = list(index.users[node])
        if not users or any(user.kind is not LAUNCH or user in known for user in users):
            continue
        launches = {(user.inputs, user.attrs._replace(result=-1)) for user in users}
        if len(launches) == 1 and users[0].attrs.kernel.language == TRITON and len(node.attrs.written) == 1:
            yield node, users, users[0].inputs.index(node)


def _joined_attrs(first: Node, second: Node, number: int) -> tuple[list[Node], LaunchAttrs, dict[int, int]]:
    """Returns the operands and the attributes of the launch that does what these two do, and which of its operands each
    of the second's is.

    Raises:
        _Apart: it is not proved that one would.
    """
    config = _common_config(first, second, number)
    entry, text, names = _Joining(first, second, number, _ELEMENTS[first.dtype]).text()
    operands = _Operands()
    places_of_first = operands.add(first, first.attrs.result)
    places = operands.add(second, number)
    written = tuple(sorted(places[value] for value in second.attrs.written))
    made = LaunchAttrs(
        KernelText(TRITON, entry, text),
        (*_parameters(first.attrs, places_of_first, {}), *_parameters(second.attrs, places, names)),
        (((), config.options, config.grid),),
        written,
        written,
        tuple(operands.strides),
        written[0],
    )
    return operands.nodes, made, places


def _common_config(first: Node, second: Node, number: int) -> Config:
    """Returns the configuration of two launches that may be one by what is known of them besides their texts."""
    a, b = first.attrs, second.attrs
    if len(a.configs) != 1 or len(b.configs) != 1:
        raise _Apart("one of them has several configurations")
    config, other = Config(*a.configs[0]), Config(*b.configs[0])
    if config.grid != other.grid:
        raise _Apart("their grids differ")
    if config.options != other.options:
        raise _Apart("their options, such as num_warps, differ")
    if a.result not in a.unset or set(b.written) - set(b.unset):
        raise _Apart("a tensor that one of them writes had values before")
    if first.dtype not in _ELEMENTS:
        raise _Apart(f"what is stored is {first.dtype}")
    if sum(how == TENSOR and value == number for _, how, value in b.parameters) != 1:
        raise _Apart("the second gets the tensor twice")
    if (sums := accumulators.sums_of_a_thread(a)) >= accumulators.MANY:
        raise _Apart(f"each thread of the first holds {sums} sums of a product, and few threads hide what follows")
    return config


class _Operands:
    """Collects the operands of two launches, and the strides that they are told. One operand serves both for a tensor
    that is only read; what is written has no values to be known by."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.strides: list[Any] = []
        self._read: dict[Node, int] = {}

    def add(self, launch: Node, dropped: int) -> dict[int, int]:
        """Adds the operands of ``launch`` except ``dropped``; returns the place of each."""
        attrs, places = launch.attrs, dict[int, int]()
        for _, how, value in attrs.parameters:
            if how == TENSOR and value != dropped and value not in places:
                places[value] = self._place(launch.inputs[value], attrs.strides[value], value in attrs.written)
        return places

    def _place(self, node: Node, told: Any, is_written: bool) -> int:
        if not is_written and node in self._read:
            place = self._read[node]
            if self.strides[place] != told:
                raise _Apart("they are told different strides of one tensor")
            return place
        self.nodes.append(node)
        self.strides.append(told)
        if not is_written:
            self._read[node] = len(self.nodes) - 1
        return len(self.nodes) - 1


def _parameters(
    attrs: LaunchAttrs, places: Mapping[int, int], names: Mapping[str, str]
) -> Iterator[tuple[str, str, Any]]:
    """Yields the parameters of one of two launches as those of the launch of both, where operands are at ``places``."""
    constants = dict(Config(*attrs.configs[0]).constants)
    for name, how, value in attrs.parameters:
        if how == TENSOR and value not in places:
            continue
        if how == CONFIG:
            how, value = CONSTANT, constants[name]
        yield names.get(name, name), how, places[value] if how == TENSOR else value


class _Joining:
    """Holds two kernels whose texts become one."""

    def __init__(self, first: Node, second: Node, number: int, element: str) -> None:
        self.texts = first.attrs.kernel.text, second.attrs.kernel.text
        self.entries = first.attrs.kernel.entry, second.attrs.kernel.entry
        self.positions = tuple(map(Positions, self.texts))
        self.functions = tuple(function_of(*pair) for pair in zip(self.texts, self.entries, strict=True))
        self.pointers = parameter_of(first.attrs, first.attrs.result), parameter_of(second.attrs, number)
        self.nodes, self.element = (first, second), element
        for function in self.functions:
            if any(isinstance(node, ast.Return) for node in ast.walk(function)):
                raise _Apart(f"{function.name} returns early")

    def text(self) -> tuple[str, str, Mapping[str, str]]:
        """Returns the entry, the module's text, and new names of the second's parameters."""
        store, loads = self._accesses()
        forms = _Forms(self.functions[0], self.nodes[0]), _Forms(self.functions[1], self.nodes[1])
        offset, mask = forms[0].offset(store.pointer, self.pointers[0]), forms[0].mask(store.mask)
        for load in loads:
            if forms[1].offset(load.pointer, self.pointers[1]) != offset:
                raise _Apart("they use other offsets")
            if mask is not None and forms[1].mask(load.mask) != mask:
                raise _Apart("the second may read elements that the first has masked out")
        names = self._renamed()
        pieces = self._module()
        edits = self._edits(0, {}), self._edits(1, names)
        shape = forms[0].written_offset(store.pointer, self.pointers[0])
        value = self._plain(store.value, 0, {})
        stored = f"tl.cast({value}, {self.element})"
        stored = f"{BETWEEN}, _ = tl.broadcast({stored}, {shape})" if shape else f"{BETWEEN} = {stored}"
        edits[0].append(self.positions[0].over(store.node, stored))
        for load in loads:
            edits[1].append(self.positions[1].over(load.node, self._loaded(load, names)))
        bodies = [self._body(which, edits[which]) for which in (0, 1)]
        arguments = []
        for which, function in enumerate(self.functions):
            for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
                if argument.arg == self.pointers[which]:
                    continue
                name = names.get(argument.arg, argument.arg) if which else argument.arg
                annotation = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
                arguments.append(f"{name}{annotation}")
        entry = "_".join(self.entries)
        head = f"@triton.jit\ndef {entry}({', '.join(arguments)}):\n"
        middle = f"    # {self.entries[1]}, which reads what the same program has stored\n"
        return entry, "\n\n\n".join([*pieces, head + bodies[0] + middle + bodies[1]]) + "\n", names

    def _accesses(self) -> tuple[Access, list[Access]]:
        for which, kind in ((0, splices.STORE), (1, splices.LOAD)):
            refusal = splices.refusal(self.texts[which], self.entries[which], self.pointers[which], kind)
            if refusal:
                raise _Apart(refusal)
        stores = pointer_of(self.texts[0], self.entries[0], self.pointers[0], splices.STORE).accesses
        outermost = [s.value for s in self.functions[0].body if isinstance(s, ast.Expr)]
        if len(stores) != 1 or stores[0].node not in outermost:
            raise _Apart(f"{self.entries[0]} stores it several times, or in a loop or a branch")
        loads = pointer_of(self.texts[1], self.entries[1], self.pointers[1], splices.LOAD).accesses
        return stores[0], loads

    def _renamed(self) -> dict[str, str]:
        """Returns new names of what the second calls as the first does."""
        own, other = (_locals(function) for function in self.functions)
        modules = [set(_defined(text)) for text in self.texts]
        if own & modules[1] or other & modules[0]:
            raise _Apart("a variable of one has the name of a function of the other")
        names = {}
        for name in sorted(other & own):
            number = 2
            while f"{name}_{number}" in own | other | modules[0] | modules[1]:
                number += 1
            names[name] = f"{name}_{number}"
        return names

    def _module(self) -> list[str]:
        """Returns what the texts define besides the kernels."""
        known: dict[str, str] = {}
        for text, entry in zip(self.texts, self.entries, strict=True):
            for name, piece in _defined(text).items():
                if name != entry and known.setdefault(name, piece) != piece:
                    raise _Apart(f"they mean different things by {name}")
        imports = [piece for piece in known.values() if piece.startswith(("import ", "from "))]
        others = [piece for piece in known.values() if piece not in imports]
        return ["\n".join(imports), *others]

    def _edits(self, which: int, names: Mapping[str, str]) -> list[Edit]:
        """Returns the edits that rename variables, and take out what computes pointers to the tensor."""
        function, parameter = self.functions[which], self.pointers[which]
        kind = splices.LOAD if which else splices.STORE
        pointer = pointer_of(self.texts[which], self.entries[which], parameter, kind)
        gone = [*pointer.assigned, *(access.node for access in pointer.accesses)]
        within = {id(inner) for node in gone for inner in ast.walk(node)}
        over = self.positions[which].over
        edits = [over(statement, "pass") for statement in pointer.assigned]
        for node in ast.walk(function):
            if id(node) in within:
                continue
            if isinstance(node, ast.Attribute) and ast.unparse(node) == f"{parameter}.dtype.element_ty":
                edits.append(over(node, self.element))
                within |= {id(inner) for inner in ast.walk(node)}
            elif isinstance(node, ast.Name) and node.id in pointer.names:
                raise _Apart(f"{function.name} uses {node.id} otherwise")
            elif isinstance(node, ast.Name) and node.id in names:
                edits.append(over(node, names[node.id]))
        return edits

    def _loaded(self, load: Access, names: Mapping[str, str]) -> str:
        if load.other is None or load.mask is None:
            return BETWEEN
        mask, other = (self._plain(node, 1, names) for node in (load.mask, load.other))
        return f"tl.where({mask}, {BETWEEN}, tl.cast({other}, {self.element}))"

    def _plain(self, node: ast.expr | None, which: int, names: Mapping[str, str]) -> str:
        """Returns the text of ``node`` without the pointer, of which it may ask the dtype."""
        parameter = self.pointers[which]
        text = ast.unparse(Renamed(names).visit(_copy(node))) if node is not None else "0"
        pointer = names.get(parameter, parameter)
        text = text.replace(f"{pointer}.dtype.element_ty", self.element)
        if any(isinstance(other, ast.Name) and other.id == pointer for other in ast.walk(ast.parse(text, mode="eval"))):
            raise _Apart(f"{self.entries[which]} uses {parameter} otherwise")
        return text

    def _body(self, which: int, edits: Sequence[Edit]) -> str:
        function = self.functions[which]
        body = function.body
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(body) > 1:
            first = body[1]
        if first.lineno == function.lineno:
            raise _Apart(f"{function.name} is one line")
        whole = "\n".join(self.positions[which].lines[: body[-1].end_lineno])
        lines = edited(whole, edits).split("\n")[first.lineno - 1 :]
        return textwrap.indent(textwrap.dedent("\n".join(lines)), "    ") + "\n"


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def _locals(function: ast.FunctionDef) -> set[str]:
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}


def _defined(text: str) -> dict[str, str]:
    """Returns the text of each statement of a module, by the name that it defines."""
    lines = text.split("\n")
    defined = {}
    for node in ast.parse(text).body:
        start = min([node.lineno, *(other.lineno for other in getattr(node, "decorator_list", ()))])
        piece = "\n".join(lines[start - 1 : node.end_lineno])
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            defined[node.names[0].asname or node.names[0].name] = piece
        elif isinstance(node, ast.Assign):
            defined[ast.unparse(node.targets[0])] = piece
        elif isinstance(node, ast.FunctionDef):
            defined[node.name] = piece
    return defined


class _Forms:
    """Writes expressions of a kernel so that equal ones of two kernels have one text."""

    def __init__(self, function: ast.FunctionDef, node: Node) -> None:
        attrs = node.attrs
        constants = dict(Config(*attrs.configs[0]).constants)
        self.passed = {
            name: f"<{constants[name] if how == CONFIG else value}>" for name, how, value in attrs.parameters
        }
        self.passed |= {
            name: f"<tensor {id(node.inputs[value])}>" for name, how, value in attrs.parameters if how == TENSOR
        }
        stored = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.stored = set(stored)
        self.assigned = {
            statement.targets[0].id: statement.value
            for statement in function.body
            if isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
            and stored.count(statement.targets[0].id) == 1
        }

    def mask(self, mask: ast.expr | None) -> str | None:
        return None if mask is None else self._form(mask)

    def offset(self, pointer: ast.expr, parameter: str) -> list[str]:
        """Returns what is added to ``parameter``, in a fixed order."""
        added: list[str] = []
        for summand in self._summands(pointer, parameter, True):
            added += [self._form(term) for term in self._summands(summand, "", True)]
        return sorted(added)

    def written_offset(self, pointer: ast.expr, parameter: str) -> str:
        """Returns what is added to ``parameter``, as the kernel has it."""
        return " + ".join(f"({ast.unparse(term)})" for term in self._summands(pointer, parameter, False))

    def _summands(self, node: ast.expr, parameter: str, expands: bool) -> list[ast.expr]:
        """Lists what is added up to ``node``, without ``parameter``.

        Args:
            expands: whether names that are no pointers are replaced too.
        """
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [*self._summands(node.left, parameter, expands), *self._summands(node.right, parameter, expands)]
        if isinstance(node, ast.Name) and node.id == parameter:
            if parameter in self.stored:
                raise _Apart(f"{parameter} itself is advanced")
            return []
        if isinstance(node, ast.Name) and node.id in self.assigned and node.id not in self.passed:
            value = self.assigned[node.id]
            reads_pointer = bool(parameter) and self._reads(value, parameter)
            if expands or reads_pointer:
                return self._summands(value, parameter, expands)
        return [node]

    def _reads(self, node: ast.expr, parameter: str) -> bool:
        names = {other.id for other in ast.walk(node) if isinstance(other, ast.Name)}
        return parameter in names or any(
            self._reads(self.assigned[name], parameter) for name in names if name in self.assigned
        )

    def _form(self, node: ast.expr) -> str:
        """Returns the text of ``node`` with names replaced by what they are.

        Raises:
            _Apart: something in it has no one value.
        """
        if isinstance(node, ast.Constant):
            return repr(node.value)
        if isinstance(node, ast.Name):
            if node.id in self.passed and node.id not in self.stored:
                return self.passed[node.id]
            if node.id in self.assigned and node.id not in self.passed:
                return self._form(self.assigned[node.id])
            raise _Apart(f"{node.id} is assigned several times, or outside of the kernel")
        if isinstance(node, ast.BinOp):
            return f"({self._form(node.left)} {type(node.op).__name__} {self._form(node.right)})"
        if isinstance(node, ast.UnaryOp):
            return f"({type(node.op).__name__} {self._form(node.operand)})"
        if isinstance(node, ast.Compare):
            operations = zip(node.ops, node.comparators, strict=True)
            compared = " ".join(f"{type(op).__name__} {self._form(other)}" for op, other in operations)
            return f"({self._form(node.left)} {compared})"
        if isinstance(node, ast.Subscript) and ast.unparse(node.slice).strip("()") in (":, None", "None, :"):
            return f"{self._form(node.value)}[{ast.unparse(node.slice)}]"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in [f"tl.{name}" for name in _PURE]:
            arguments = [*map(self._form, node.args)]
            named = [(keyword.arg, self._form(keyword.value)) for keyword in node.keywords]
            is_single = len(arguments) + len(named) == 1  # ``tl.program_id(axis=0)`` is ``tl.program_id(0)``
            arguments += [form if is_single else f"{name}={form}" for name, form in named]
            return f"{ast.unparse(node.func)}({', '.join(arguments)})"
        raise _Apart(f"nobody can tell what {ast.unparse(node)[:60]} is")
