"""Checks launches of users' kernels in a manifest: their attributes, and the text of the kernel.

The text comes from anywhere, and Triton's front end evaluates it while it compiles. So it may hold functions for the
GPU and nothing else: imports of Triton's language, constants, and functions whose names are all defined in the text,
are Triton's own, or count (``range``, ``min``); no attribute leads from Triton's modules to others, and none begins
with an underscore. What ``trace/kernels/triton_module.py`` writes is of this form.

A kernel in CUDA C++ or C++ is compiled, and runs where a function launches the same text. A compiler reads files, so
the text includes none by a path, and assembles none; its flags only say how it is compiled.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jitgen.codegen.c_text.definition import definition_of
from jitgen.codegen.c_text.files import MOST_HEADERS, is_harmless_flag
from jitgen.codegen.c_text.tokens import is_expression
from jitgen.deploy import expression_schema as expressions
from jitgen.errors import UnsupportedError
from jitgen.fields import Field, shown
from jitgen.ir import symbols
from jitgen.ir.launches import CONFIG, CONSTANT, DOUBLE, FLOAT, INT, TENSOR, TRITON, UNSPECIALIZED

if TYPE_CHECKING:
    from jitgen.deploy.node_schema import Node

TEXT_LIMIT = 1_000_000
"""Characters of a kernel's text."""
PARAMETER_LIMIT = 512
CONFIG_LIMIT = 1024
"""Parameters of a kernel, and configurations of an autotuner."""
_HEADER = re.compile(r"(?!/)(?!.*(^|/)\.\.(/|$))[A-Za-z0-9_./+-]{1,200}")
"""The name of a header: a path below the folders that a compiler searches."""
_BUILTINS = ("range", "min", "max", "abs", "len", "float", "int", "bool", "print", "isinstance", "tuple", "slice")
_MODULES: tuple[str, ...] = ("triton", "triton.language", "math", "triton.language.extra.libdevice")
_MODULES += ("triton.language.extra.cuda", "triton.language.extra.cuda.libdevice", "triton.language.math")
_THROUGH = ("language", "math", "extra", "cuda", "hip", "libdevice", "standard")
"""Attributes of Triton's modules that are modules which a kernel may use."""
_OF_TRITON = ("jit", "language", "cdiv", "next_power_of_2")


def check(node: Node) -> None:
    """Checks the attributes of the launch ``node``."""
    kernel, parameters, configs, written, unset, strides, result = node.attributes(7)
    language, entry, text, *others = kernel.items(5, 3)
    is_triton = language.one_of(("triton", "cuda", "cpp")) == TRITON
    if is_triton:
        for other in others:
            other.items(0)
    else:
        node.require(len(others) == 2, "a kernel in C++ has headers and flags")
    operands = range(len(node.operands))
    listed = [number.integer(0, len(operands)) for number in written.items(len(operands), 1)]
    node.require(listed == sorted(set(listed)), "what it writes is in ascending order, each operand once")
    for number in unset.items(len(listed)):
        node.require(number.integer(0, len(operands)) in listed, "it does not write what nobody has set")
    node.require(result.integer(0, len(operands)) in listed, "it is the new value of an operand that is not written")
    operand = node.operands[result.value]
    node.has_shape(operand.shape)
    node.has_dtype(operand.dtype)
    for told, tensor in zip(strides.items(len(operands), len(operands)), node.operands, strict=True):
        if told.value is not None:
            for number in told.items(len(tensor.shape), len(tensor.shape)):
                expressions.scalar(number, node.environment)
    chosen = {name for name, how in _parameters(node, parameters, range(len(operands))) if how == CONFIG}
    for config in configs.items(CONFIG_LIMIT, 1):
        constants, options, grid = config.items(3, 3)
        names = {_constant(constant) for constant in constants.items(PARAMETER_LIMIT)}
        node.require(names == chosen, "a configuration has other constants than its kernel asks for")
        for option in options.items(4):
            name, number = option.items(2, 2)
            name.one_of(("num_warps", "num_stages", "num_ctas", "maxnreg"))
            number.integer(1, 1025)
        count = 7 if language.value == "cuda" else 3
        for size in grid.items(count, count):
            expressions.scalar(size, node.environment)
    if not is_triton:
        _check_c(node, parameters, entry, text, *others)
        return
    why = refusal(str(text.value)[:TEXT_LIMIT]) if isinstance(text.value, str) else "it is no text"
    if why is not None or len(text.value) > TEXT_LIMIT or not str(entry.value).isidentifier():
        text.refuse(f"is no text of a kernel: {why}")


def _check_c(node: Node, parameters: Field, entry: Field, text: Field, headers: Field, flags: Field) -> None:
    """Checks the text of a kernel in CUDA C++ or C++, its headers and its flags."""
    language = node.attributes(7)[0].items(5, 3)[0].value
    texts = [("", text)]
    for header in headers.items(MOST_HEADERS):
        name, content = header.items(2, 2)
        if not isinstance(name.value, str) or not _HEADER.fullmatch(name.value):
            name.refuse("is no name of a header")
        texts.append((str(name.value), content))
    for _, content in texts:
        why = c_refusal(content.value, str(language))
        if why is not None:
            content.refuse(f"is no text of a kernel: {why}")
    for flag in flags.items(PARAMETER_LIMIT):
        if not isinstance(flag.value, str) or not is_harmless_flag(flag.value):
            flag.refuse("is no flag that a kernel may be compiled with")
    try:
        definition = definition_of(text.value, str(entry.value), language=str(language))
    except UnsupportedError as error:
        entry.refuse(f"names no kernel of the text: {error}")
    passed = [parameter.items(3, 3)[0].value for parameter in parameters.items(PARAMETER_LIMIT, 1)]
    node.require(passed == [other.name for other in definition.parameters], "it has other parameters than its kernel")


def c_refusal(text: Any, language: str) -> str | None:
    """Explains why ``text`` may not be compiled; None where it may."""
    if not isinstance(text, str) or len(text) > TEXT_LIMIT:
        return "it is no text, or too long"
    if any(ord(character) < 9 for character in text):
        return "it has control characters"
    # What is looked for is refused in strings and comments too, so that nobody has to tell what these are.
    joined = re.sub(r"\\[^\S\n]*\n", "", text)
    if re.search(r"\r(?!\n)|#[^\S\n]*/\*", joined):
        return "it has a carriage return, or a comment within a directive"
    for directive in re.finditer(r"#[^\S\n]*(embed|include|include_next|import)\b([^\n]*)", joined):
        named = re.fullmatch(r"\s*[<\"]([^>\"]+)[>\"]\s*(//.*|/\*.*)?", directive[2])
        if directive[1] != "include" or named is None or not _HEADER.fullmatch(named[1]):
            return f"it has {directive[0].strip()[:80]!r}, which names no header"
    for asked in re.finditer(r"\b__has_(include|include_next|embed)\b([^\n]{0,210})", joined):
        named = re.match(r"\s*\(\s*[<\"]([^>\"]+)[>\"]\s*\)", asked[2])
        if asked[1] == "embed" or named is None or not _HEADER.fullmatch(named[1]):
            return f"it has {asked[0].strip()[:80]!r}, which names no header"
    if re.search(r"(?m)(^|\*/)[^\S\n]*#[^\S\n]*(line\b|\d)", joined):
        return "it says that lines are of another file, which a compiler would quote"
    if re.search(r"%:|\?\?[=/]|\bincbin\b|\bGCC\s+(dependency|pch_preprocess)\b", joined):
        return "it has a directive in another spelling, or assembles a file"
    if language == "cpp" and re.search(r"\b(asm|__asm|__asm__)\b|##", joined):
        return "it has assembly, or joins words"
    return None


def expression_refusal(text: Any, dialect: str, names: Sequence[str]) -> str | None:
    """Explains why ``text`` is no expression over ``names`` that may be compiled; None where it is one."""
    if dialect != TRITON:
        why = c_refusal(text, dialect)
        return why or (None if is_expression(text) else "it is no expression")
    if not isinstance(text, str) or "\n" in text.strip() or len(text) > TEXT_LIMIT:
        return "it is no text, or has several lines"
    imports = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n"
    return refusal(f"{imports}@triton.jit\ndef own({', '.join(names)}):\n    return ({text.strip()})\n")


def _parameters(node: Node, parameters: Field, operands: range) -> Iterator[tuple[str, str]]:
    for parameter in parameters.items(PARAMETER_LIMIT, 1):
        name, how, value = parameter.items(3, 3)
        if not isinstance(name.value, str) or not name.value.isidentifier():
            name.refuse("is no name of a parameter")
        kind = how.one_of((TENSOR, INT, UNSPECIALIZED, FLOAT, DOUBLE, CONSTANT, CONFIG))
        if kind == TENSOR:
            value.integer(0, len(operands))
        elif kind == CONSTANT:
            _text_of_constant(value)
        elif kind != CONFIG:
            number = expressions.scalar(value, node.environment)
            node.require(symbols.kind_of(number) in ("int", "float"), f"{name.value} is no number")
        yield name.value, kind


def _constant(constant: Field) -> str:
    name, text = constant.items(2, 2)
    _text_of_constant(text)
    return str(name.value)


def _text_of_constant(text: Field) -> None:
    try:
        expression = ast.parse(str(text.value), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        text.refuse(f"{shown(text.value)} is no constant")
    if not isinstance(expression, ast.Name) and not _is_constant(expression):
        text.refuse(f"{shown(text.value)} is no constant")


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return all(map(_is_constant, node.elts))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    if isinstance(node, ast.Call):  # float("inf"), tl.constexpr(128)
        name = ast.unparse(node.func)
        return name in ("float", "tl.constexpr") and len(node.args) == 1 and _is_constant(node.args[0])
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "tl" and not node.attr.startswith("_")
    return isinstance(node, ast.Constant)


def refusal(text: str) -> str | None:
    """Explains why ``text`` is not one of a module of kernels; None where it is one."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "it does not parse"
    modules: set[str] = set()
    defined: set[str] = set()
    functions: list[ast.FunctionDef] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            if any(alias.name not in _MODULES for alias in statement.names):
                return f"line {statement.lineno} imports another module than Triton's language"
            modules |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            if not _is_tritons(statement.module) or any(alias.name.startswith("_") for alias in statement.names):
                return f"line {statement.lineno} imports from another module than Triton's language"
            defined |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            (target, *others) = statement.targets
            if others or not isinstance(target, ast.Name) or not _is_constant(statement.value):
                return f"line {statement.lineno} is no constant"
            defined.add(target.id)
        elif isinstance(statement, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in statement.decorator_list]
            if decorators not in (["triton.jit"], ["triton.jit(noinline=True)"]):
                return f"line {statement.lineno} defines a function that is not under @triton.jit"
            functions.append(statement)
            defined.add(statement.name)
        else:
            return f"line {statement.lineno} is a statement that is neither a function nor a constant"
    if defined & {"triton", "tl"}:
        return "it redefines Triton"
    for function in functions:
        why = _function_refusal(function, modules, defined)
        if why is not None:
            return why
    return None


def _is_tritons(module: str | None) -> bool:
    return module is not None and (module == "triton" or f"{module}.".startswith("triton.language."))


_NODES: Sequence[type[ast.AST]] = (
    *(ast.Import, ast.ImportFrom, ast.Lambda, ast.ClassDef, ast.AsyncFunctionDef, ast.Global, ast.Nonlocal, ast.Await),
    *(ast.Yield, ast.YieldFrom, ast.Try, ast.Delete, ast.NamedExpr, ast.AsyncFor, ast.AsyncWith),
)
"""What no kernel has."""


def _function_refusal(function: ast.FunctionDef, modules: set[str], defined: set[str]) -> str | None:
    own = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    if own & modules:
        return f"line {function.lineno} has a variable with the name of a module"
    for default in (*function.args.defaults, *filter(None, function.args.kw_defaults)):
        if not _is_constant(default):
            return f"line {default.lineno} has a default that is no constant"
    for node in ast.walk(function):
        where = f"line {getattr(node, 'lineno', function.lineno)}"
        if isinstance(node, tuple(_NODES)) or (isinstance(node, ast.FunctionDef) and node is not function):
            return f"{where} has a {type(node).__name__}"
        if isinstance(node, ast.Name) and node.id not in own | modules | defined and node.id not in _BUILTINS:
            return f"{where} reads {node.id!r:.40}, which the text does not define"
        if isinstance(node, ast.Attribute) and not _is_harmless(node, modules - own):
            return f"{where} reads {ast.unparse(node)[:80]!r}"
        if isinstance(node, ast.keyword) and node.arg is not None and node.arg.startswith("_"):
            return f"{where} passes {node.arg!r:.40}"
    return None


def _is_harmless(node: ast.Attribute, modules: set[str]) -> bool:
    """Returns whether an attribute is one of a value of a kernel, or leads to something of Triton's language."""
    chain = [node.attr]
    value = node.value
    while isinstance(value, ast.Attribute):
        chain.insert(0, value.attr)
        value = value.value
    if any(name.startswith("_") for name in chain):
        return False
    if not isinstance(value, ast.Name) or value.id not in modules:
        return True
    if value.id == "triton" and chain[0] not in _OF_TRITON:
        return False
    return all(name in _THROUGH for name in chain[:-1]) or chain[0] not in ("core", "random", "target_info")
