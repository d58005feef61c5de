"""Reads the text of a kernel that a user wrote in CUDA C++ or C++: its definition, its parameters and its hooks.

The text is divided into tokens, not parsed: comments, strings and directives are known for what they are, and brackets
match. That is enough to find a function and what its parameters are called, and to say of a pointer that the function
uses it in its hooks alone.

A *hook* is where a rule may be spliced: ``JITGEN_PROLOGUE(x[i], row, column)`` in place of a load, and
``out[i] = JITGEN_EPILOGUE(value, row, column);``, a store. Without a rule either macro is its first argument. The
column counts along the tensor's last dimension, the row along all others.

Neighbours: ``trace/kernels/c_kernel.py`` reads a user's file, ``families/launch/hooks.py`` rewrites the text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jitgen.errors import UnsupportedError

PROLOGUE, EPILOGUE = "JITGEN_PROLOGUE", "JITGEN_EPILOGUE"
_TOKEN = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
      | (?P<string>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)"
                   |(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|(?:u8|[uUL])?'(?:\\.|[^'\\\n])*')
      | (?P<name>[A-Za-z_]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*)
      | (?P<line>[\r\n]+)
      | (?P<space>(?:[^\S\r\n]|\\[^\S\n]*\n)+)
      | (?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(
    r"""(?:\#|%:)(?:\\[^\S\n]*\n|//(?:\\\n|[^\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[^\n])*""",
    re.DOTALL,
)
"""A directive, where nothing but space and comments stands before it in its line."""
_CONTINUED = re.compile(r"\\[^\S\n]*\n")
"""The end of a line that the next one continues."""
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_ATTRIBUTES = ("__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__block_size__")
"""What an entry in CUDA C++ says of its launches."""
_UNTYPED = ("const", "volatile", "struct", "__restrict__", "__restrict", "restrict", "typename", "__grid_constant__")


@dataclass(frozen=True)
class Token:
    """Holds one token.

    Attributes:
        kind: ``"name"``, ``"number"``, ``"string"``, ``"mark"`` or ``"directive"``.
        start, end: in the text.
    """

    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Parameter:
    """Describes a parameter of a kernel.

    Attributes:
        name: in the text.
        type: without qualifiers; of a pointer, that of its elements.
        is_pointer: whether it takes a tensor.
        is_const: whether the kernel only reads the tensor.
        start: of its text.
    """

    name: str
    type: str
    is_pointer: bool
    is_const: bool
    start: int

    def __str__(self) -> str:
        return f"{'const ' * self.is_const}{self.type}{'*' * self.is_pointer} {self.name}"


@dataclass(frozen=True)
class Definition:
    """Locates the definition of a kernel in its text.

    Attributes:
        text: of the file.
        name: with namespaces.
        arguments: of its template, if it is one.
        templates: (name, argument) of each of the template's parameters.
        parameters: in their order.
        head: the tokens before the name.
        opening: where its first parameter would begin.
        body: the tokens of its body.
    """

    text: str
    name: str
    arguments: tuple[str, ...]
    templates: tuple[tuple[str, str], ...]
    parameters: tuple[Parameter, ...]
    head: tuple[Token, ...]
    opening: int
    body: tuple[Token, ...]

    @property
    def line(self) -> int:
        return self.line_of(self.head[0].start if self.head else self.opening)

    def line_of(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1

    def quoted(self, position: int) -> str:
        """Returns the line at ``position``, for messages."""
        return self.text.split("\n")[self.line_of(position) - 1].strip()

    @property
    def called(self) -> str:
        """Returns how it is called: with the arguments of its template."""
        return f"{self.name}<{', '.join(self.arguments)}>" if self.arguments else self.name

    def type_of(self, parameter: Parameter) -> str:
        """Returns the type of ``parameter``, where that is a parameter of the template by its argument."""
        return dict(self.templates).get(parameter.type, parameter.type)

    @property
    def attributes(self) -> tuple[tuple[Token, ...], ...]:
        """Returns what the head says of launches: a name, and its arguments in parentheses."""
        listed = []
        for number, token in enumerate(self.head):
            if token.text in _ATTRIBUTES:
                listed.append(self.head[number : _match(self.head, number + 1) + 1])
        return tuple(listed)

    def written_out(self, tokens: Sequence[Token]) -> str:
        """Returns the text of ``tokens`` outside of the template: with its arguments in place of its parameters."""
        substitutes = {
            name: argument if re.fullmatch(r"[\w: ]*", argument) else f"({argument})"
            for name, argument in self.templates
        }
        return spelled([replace(token, text=substitutes.get(token.text, token.text)) for token in tokens])


@dataclass(frozen=True)
class Hook:
    """Locates a hook, and the pointer that it stands for.

    Attributes:
        parameter: the pointer's.
        kind: ``PROLOGUE`` or ``EPILOGUE``.
        start: of the statement, or of the macro.
        index: where the element's index begins and ends.
        value: where the first argument begins and ends.
        rest: behind the comma that follows it.
    """

    parameter: str
    kind: str
    start: int
    index: tuple[int, int]
    value: tuple[int, int]
    rest: int


@functools.lru_cache(256)
def tokens_of(text: str) -> tuple[Token, ...]:
    """Returns the tokens of ``text``, without comments and space."""
    tokens, position, begins_line = [], 0, True
    while position < len(text):
        directive = _DIRECTIVE.match(text, position) if begins_line else None
        match = directive or _TOKEN.match(text, position)
        assert match is not None
        kind = "directive" if directive else "string" if match.lastgroup == "delimiter" else str(match.lastgroup)
        if kind not in ("comment", "space", "line"):
            tokens.append(Token(kind, match[0], position, match.end()))
        begins_line = kind == "line" or (begins_line and kind in ("comment", "space"))
        position = match.end()
    return tuple(tokens)


def is_qualified(tokens: Sequence[Token], number: int) -> bool:
    """Returns whether token ``number`` is a member, or a name of a namespace: no variable that has this name."""
    marks = ""
    for position in range(number - 1, -1, -1):
        token, behind = tokens[position], tokens[position + 1]
        if token.kind != "mark" or (marks and token.end != behind.start):
            break
        marks = token.text + marks
    # ``n-->x`` compares, and ``n--->x`` is a member of a pointer that is decremented.
    return marks.endswith((".", "::")) or re.search(r"(?<!-)-(--)*>$", marks) is not None


def spelled(tokens: Sequence[Token]) -> str:
    """Returns the text of ``tokens`` without comments, on one line."""
    text = ""
    for number, token in enumerate(tokens):
        text += " " * (number > 0 and tokens[number - 1].end != token.start) + token.text
    return text


def is_expression(text: str) -> bool:
    """Returns whether ``text`` can be one expression, without commas outside of brackets."""
    tokens, opened = tokens_of(text), list[str]()
    for token in tokens:
        mark = token.text if token.kind == "mark" else ""
        if token.kind == "directive" or mark == ";" or (mark == "," and not opened):
            return False
        if mark in _CLOSING:
            opened.append(_CLOSING[mark])
        elif mark in _CLOSING.values() and (not opened or opened.pop() != mark):
            return False
    return bool(tokens) and not opened


def _match(tokens: Sequence[Token], opening: int) -> int:
    """Returns where the bracket at ``opening`` is closed; ``len(tokens)`` where it is not."""
    depth = 0
    for number in range(opening, len(tokens)):
        text = tokens[number].text if tokens[number].kind == "mark" else ""
        depth += (text in _CLOSING) - (text in _CLOSING.values())
        if depth == 0:
            return number
    return len(tokens)


def _split(tokens: Sequence[Token], angles: bool = False) -> list[tuple[Token, ...]]:
    """Divides ``tokens`` at the commas outside of brackets.

    Args:
        angles: whether ``<`` is a bracket too.
    """
    pieces: list[list[Token]] = [[]]
    depth = 0
    opened, closed = ("(", "[", "{") + ("<",) * angles, (")", "]", "}") + (">",) * angles
    for token in tokens:
        if token.kind == "mark":
            depth += (token.text in opened) - (token.text in closed)
            if token.text == "," and depth == 0:
                pieces.append([])
                continue
        pieces[-1].append(token)
    return [tuple(piece) for piece in pieces if piece]


def parsed_entry(entry: str) -> tuple[str, tuple[str, ...]]:
    """Divides ``"name<float, 4>"`` into the name and the arguments of a template."""
    name, bracket, rest = entry.strip().partition("<")
    if not bracket:
        return name.strip(), ()
    inner = rest.rpartition(">")[0]
    arguments = _split(tokens_of(inner), angles=True)
    return name.strip(), tuple(inner[piece[0].start : piece[-1].end] for piece in arguments)


@functools.lru_cache(256)
def definition_of(text: str, entry: str, file: str = "the source", language: str = "cuda") -> Definition:
    """Returns the definition of ``entry``, a function's name, with namespaces and template arguments where it has them.

    Raises:
        UnsupportedError: the text has none, or several, or its parameters are none that a launch passes.
    """
    name, arguments = parsed_entry(entry)
    bare = name.rpartition("::")[2]
    tokens = tokens_of(text)
    listed, others = [], []
    for number, token in enumerate(tokens[:-1]):
        if token.kind != "name" or tokens[number + 1].text != "(":
            continue
        closing = _match(tokens, number + 1)
        behind = closing + 1
        while behind < len(tokens) and tokens[behind].text in ("noexcept", "const"):
            behind += 1
        if behind >= len(tokens) or tokens[behind].text != "{":
            continue
        first = _start_of(tokens, number)
        head = tokens[first:number]
        if not head:
            continue  # a statement such as ``if (...) {``
        is_kernel = language != "cuda" or any(other.text == "__global__" for other in head)
        if not is_kernel or token.text != bare:
            others += [token.text] if is_kernel else []
            continue
        body = tokens[behind + 1 : _match(tokens, behind)]
        listed.append((head, tokens[number + 1 : closing], body))
    what = "__global__ function" if language == "cuda" else "function"
    if not listed:
        known = f"it defines {', '.join(dict.fromkeys(others))}" if others else f"it defines no {what}"
        raise UnsupportedError(f"{file} defines no {what} {bare}; {known}")
    if len(listed) > 1:
        lines = " and ".join(str(text.count("\n", 0, head[0].start) + 1) for head, _, _ in listed)
        raise UnsupportedError(f"{file} defines {bare} in lines {lines}; give the kernel a name of its own")
    head, inside, body = listed[0]
    templates = _template_of(head, arguments)
    line = text.count("\n", 0, head[0].start) + 1
    if len(templates) < len(arguments) or (templates and not arguments):
        raise UnsupportedError(
            f"{file}:{line}: {bare} is {'a' if templates else 'no'} template"
            + (f"; name its arguments, as in '{bare}<{', '.join(name for name, _ in templates)}>'" if templates else "")
        )
    parameters = tuple(
        _parameter(piece, f"{file}:{text.count(chr(10), 0, piece[0].start) + 1}")
        for piece in _split(inside[1:], angles=True)
        if [other.text for other in piece] != ["void"]
    )
    return Definition(text, name, arguments, templates, parameters, head, inside[0].end, body)


def _start_of(tokens: Sequence[Token], number: int) -> int:
    """Returns the first token of the declaration whose name is ``number``."""
    first = number
    while first and tokens[first - 1].kind != "directive" and tokens[first - 1].text not in (";", "{", "}"):
        first -= 1
    return first


def _template_of(head: Sequence[Token], arguments: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Returns (name, argument) of the parameters of the template that ``head`` begins; some may have defaults."""
    if not head or head[0].text != "template":
        return ()
    depth, inside = 0, []
    for token in head[1:]:
        depth += (token.text == "<") - (token.text == ">")
        if depth == 0:
            break
        inside.append(token)
    listed = []
    for number, piece in enumerate(_split(inside[1:], angles=True)):
        declared = [token.text for token in piece]
        end = declared.index("=") if "=" in declared else len(declared)
        default = " ".join(declared[end + 1 :])
        listed.append((declared[end - 1], arguments[number] if number < len(arguments) else default))
    return tuple(listed)


def _parameter(tokens: Sequence[Token], where: str) -> Parameter:
    texts = [token.text for token in tokens]
    if "[" in texts:  # ``float x[]`` is a pointer
        texts = [*texts[: texts.index("[") - 1], "*", texts[texts.index("[") - 1]]
    names = [text for text in texts if text not in _UNTYPED]
    spelled = " ".join(texts)
    if "&" in texts or "(" in texts or "=" in texts or texts.count("*") > 1:
        raise UnsupportedError(
            f"{where}: the parameter {spelled!r} is neither a pointer to elements nor a number; "
            "pass tensors and numbers"
        )
    if len(names) < 2 or not re.match(r"[A-Za-z_]\w*$", names[-1]) or names[-1] in _NUMBERS:
        raise UnsupportedError(f"{where}: the parameter {spelled!r} has no name; give it one")
    is_pointer = "*" in texts
    before = texts[: texts.index("*")] if is_pointer else texts
    kind = names[: names.index("*")] if is_pointer else names[:-1]
    return Parameter(names[-1], _joined(kind), is_pointer, is_pointer and "const" in before, tokens[0].start)


def _joined(words: Sequence[str]) -> str:
    """Returns a type as one writes it: ``unsigned int``, ``jitgen::bfloat16``."""
    return re.sub(r" ?(::|<|>|,) ?", r"\1", " ".join(words).replace(": :", "::")).replace(",", ", ")


# -------------------------------------------------------------------------------------------------------------- types

_INTEGERS = {
    "int8": ("signed char", "char", "int8_t"),
    "uint8": ("unsigned char", "uint8_t", "uint8"),
    "int16": ("short", "short int", "int16_t"),
    "int32": ("int", "int32_t", "signed", "signed int"),
    "int64": ("long long", "long long int", "long", "long int", "int64_t", "ptrdiff_t", "ssize_t"),
    "bool": ("bool", "jitgen::boolean"),
}
_FLOATS = {
    "float32": ("float",),
    "float64": ("double",),
    "float16": ("half", "__half", "_Float16", "jitgen::float16"),
    "bfloat16": ("nv_bfloat16", "__nv_bfloat16", "__bf16", "jitgen::bfloat16"),
    "float8_e4m3fn": ("__nv_fp8_e4m3", "jitgen::float8_e4m3fn"),
    "float8_e5m2": ("__nv_fp8_e5m2", "jitgen::float8_e5m2"),
}
_DTYPES = {name: dtype for dtype, names in (_INTEGERS | _FLOATS).items() for name in names}
_UNSIGNED = {
    "int16": ("unsigned short", "unsigned short int", "uint16_t"),
    "int32": ("unsigned", "unsigned int", "uint32_t", "uint"),
    "int64": (
        "unsigned long long",
        "unsigned long long int",
        "unsigned long",
        "unsigned long int",
        "uint64_t",
        "size_t",
    ),
}
_SAME_BYTES: dict[str, tuple[str, ...]] = {name: (dtype,) for dtype, names in _UNSIGNED.items() for name in names}
"""Types whose elements are those of several dtypes, or of a signed one."""
_NUMBERS = frozenset({*_DTYPES, *_SAME_BYTES})
_SAME_BYTES |= {"char": ("int8", "uint8", "bool"), "unsigned char": ("uint8", "bool"), "uint8_t": ("uint8", "bool")}


def _without_std(type_name: str) -> str:
    return type_name.removeprefix("::").removeprefix("std::")


def dtypes_of(type_name: str) -> tuple[str, ...]:
    """Returns the dtypes of tensors that a pointer to ``type_name`` takes; none where nobody can tell."""
    type_name = _without_std(type_name)
    if type_name in _SAME_BYTES:
        return _SAME_BYTES[type_name]
    return (_DTYPES[type_name],) if type_name in _DTYPES else ()


def is_integer(type_name: str) -> bool | None:
    """Returns whether a number of type ``type_name`` is an integer; None where nobody can tell."""
    type_name = _without_std(type_name)
    if any(type_name in names for names in (*_UNSIGNED.values(), *_INTEGERS.values())):
        return True
    return False if any(type_name in names for names in _FLOATS.values()) else None


# -------------------------------------------------------------------------------------------------------------- hooks


@functools.lru_cache(64)
def macros_of(texts: tuple[str, ...]) -> dict[str, list[Token]]:
    """Returns by its name what each macro of ``texts`` is replaced by, without its parameters and members."""
    macros: dict[str, list[Token]] = {}
    for text in texts:
        for token in tokens_of(text):
            words = tokens_of(_CONTINUED.sub("", token.text).lstrip("#%:")) if token.kind == "directive" else ()
            if len(words) < 2 or words[0].text != "define":
                continue
            by, own = words[2:], set[str]()
            if by and by[0].text == "(" and by[0].start == words[1].end:
                closing = _match(by, 0)
                own, by = {other.text for other in by[:closing] if other.kind == "name"}, by[closing + 1 :]
            free = [w for n, w in enumerate(by) if w.text not in own and not (w.kind == "name" and is_qualified(by, n))]
            macros.setdefault(words[1].text, []).extend(free)
    return macros


def _reached(tokens: Sequence[Token], macros: Mapping[str, list[Token]]) -> dict[str, list[Token]]:
    """Returns the macros that ``tokens`` use, themselves or by other macros."""
    reached: dict[str, list[Token]] = {}
    waiting = list(tokens)
    while waiting:
        name = waiting.pop().text
        if name in macros and name not in reached:
            reached[name] = macros[name]
            waiting += macros[name]
    return reached


def _changes(tokens: Sequence[Token], macros: Mapping[str, list[Token]]) -> bool:
    """Returns whether the expression ``tokens`` changes a variable, or has directives in it."""
    for listed in (tokens, *_reached(tokens, macros).values()):
        text = spelled([token for token in listed if token.kind != "string"])
        if re.search(r"\+\+|--|(?<![=!<>])=(?!=)|<<=|>>=|#", text):
            return True
    return False


def hooks_of(definition: Definition, others: Sequence[str] = ()) -> tuple[list[Hook], dict[str, str]]:
    """Returns the hooks in the kernel's body, and why no rule may stand at those of a parameter, by its name.

    Args:
        others: texts that may define macros too: headers, and the flags of a compiler as directives.
    """
    body = definition.body
    macros = macros_of((definition.text, *others))
    pointers = {parameter.name: parameter for parameter in definition.parameters if parameter.is_pointer}
    hooks: list[Hook] = []
    explained: set[int] = set()
    refusals: dict[str, str] = {}

    def refuse(name: str, token: Token, why: str) -> None:
        line = definition.line_of(token.start)
        refusals.setdefault(name, f"{why}, in line {line}: {definition.quoted(token.start)}")

    for number, token in enumerate(body[:-1]):
        if token.text not in (PROLOGUE, EPILOGUE) or body[number + 1].text != "(":
            continue
        closing = _match(body, number + 1)
        arguments = _split(body[number + 2 : closing])
        mentioned = [other.text for other in body[number + 2 : closing] if other.text in pointers]
        if len(arguments) != 3:
            for name in mentioned:
                refuse(name, token, f"{token.text} takes a value, a row and a column")
            continue
        value = arguments[0]
        if token.text == PROLOGUE:
            name, element, start = value[0].text, value, token.start
            is_element = len(value) > 3 and value[1].text == "[" and _match(value, 1) == len(value) - 1
            if name not in pointers or not is_element:
                for name in mentioned:
                    refuse(name, token, f"{PROLOGUE} takes an element, such as {name}[i]")
                continue
        else:
            target = _target(body, number)
            ends = closing + 1 < len(body) and body[closing + 1].text == ";"
            if target is None or body[target].text not in pointers or not ends:
                continue
            name, element, start = body[target].text, body[target : number - 1], body[target].start
        explained.add(element[0].start)
        index = element[2:-1]
        if len(_split(index)) != 1 or any(_changes(piece, macros) for piece in (index, *arguments[1:])):
            refuse(name, token, "the index, the row or the column of a hook changes a variable")
        of_index, of_value = ((piece[0].start, piece[-1].end) for piece in (index or element, value))
        hooks.append(Hook(name, token.text, start, of_index, of_value, body[number + 2 + len(value)].end))
    for number, token in enumerate(body):
        is_used = token.text in pointers and token.kind == "name" and token.start not in explained
        if is_used and not is_qualified(body, number):
            refuse(token.text, token, f"{token.text} is used outside of its hooks")
        if token.kind == "directive":
            for name in pointers:
                if re.search(rf"\b{name}\b", token.text):
                    refuse(name, token, f"{name} is used in a directive")
    for macro, replacement in _reached(body, macros).items():
        words = {macro, *(token.text for token in replacement)}
        joins = "##" in spelled(replacement)
        for name in pointers:
            if name in words or joins:
                refusals.setdefault(name, f"the macro {macro} {'joins words' if joins else f'is or uses {name}'}")
    return hooks, refusals


def _target(body: Sequence[Token], number: int) -> int | None:
    """Returns the pointer that the statement ``name[index] = <macro at number>`` stores to; None where it is none."""
    if number < 4 or body[number - 1].text != "=" or body[number - 2].text != "]":
        return None
    depth = 0
    for position in range(number - 2, -1, -1):
        depth += (body[position].text == "]") - (body[position].text == "[")
        if depth == 0:
            break
    target = position - 1
    before = body[target - 1].text if target > 0 else ";"
    return target if target >= 0 and before in (";", "{", "}", ")", "else", ":") else None


def refusal(definition: Definition, parameter: str, kind: str, others: Sequence[str] = ()) -> str:
    """Explains why no rule may stand at the hooks of ``parameter``; empty if one may.

    Args:
        others: as in ``hooks_of``.
    """
    hooks, refusals = hooks_of(definition, others)
    if not any(hook.kind == kind and hook.parameter == parameter for hook in hooks):
        element = f"{PROLOGUE}({parameter}[i], row, column)"
        store = f"{parameter}[i] = {EPILOGUE}(value, row, column);"
        return f"it has no hook for it, such as {element if kind == PROLOGUE else store}"
    (own,) = (other for other in definition.parameters if other.name == parameter)
    if not dtypes_of(definition.type_of(own)):
        return f"nobody can tell of which dtype {own.type} is"
    if any(hook.kind != kind and hook.parameter == parameter for hook in hooks):
        return f"{parameter} has hooks of both kinds"
    return refusals.get(parameter, "")


# --------------------------------------------------------------------------------------------------------------- files

_files: dict[str, tuple[str, int]] = {}
"""Where each text is that this process has read: the file, and the line there of its first one."""


def note_file(text: str, file: str, line: int) -> None:
    """Remembers where ``text`` is, for messages: no key, and no source, has a path."""
    _files[text] = file, line


def location_of(text: str, line: int) -> str:
    """Returns file and line of line ``line`` of ``text``; another process may know the line alone."""
    file, first = _files.get(text, ("the kernel's text", 1))
    return f"{file}:{first - 1 + line}"


# ------------------------------------------------------------------------------------------------------------ includes

MOST_HEADERS = 512
"""Headers of the user's own that a kernel may include."""
_GAP = r"(?:\\[^\S\n]*\n|/\*.*?\*/|[^\S\n])*"
"""Space, comments and ends of continued lines within a directive."""
_WORD = r"(?:\\[^\S\n]*\n)*".join("include")
_INCLUDE = re.compile(rf'(?:\#|%:){_GAP}{_WORD}{_GAP}(?P<open>[<"])(?P<name>[^>"\n]+)[>"]', re.DOTALL)


def includes_of(text: str) -> Iterator[tuple[str, bool, tuple[int, int]]]:
    """Yields what ``text`` includes: the name, whether it is in quotes, and where the name is."""
    for token in tokens_of(text):
        if token.kind == "directive" and (match := _INCLUDE.match(token.text)):
            span = token.start + match.start("name"), token.start + match.end("name")
            yield match["name"], match["open"] == '"', span


_FLAGS = re.compile(
    r"""-D[A-Za-z_]\w*(=[^\s]*)? | -U[A-Za-z_]\w* | -W(?![alp]$)[\w=-]* | -O[0-3s] | -lineinfo
      | -mprefer-vector-width=\w+ | -mtune=(?!native)[\w-]+ | -mno-fma
      | --?use_fast_math | --?(ftz|prec-div|prec-sqrt|fmad)=(true|false) | --?maxrregcount=\d+
      | --?std=(c|gnu)\+\+(1[47yz]|2\w) | --?extra-device-vectorization | -f(no-)?fast-math | -f(no-)?unroll-loops
      | -f(no-)?associative-math | -f(no-)?reciprocal-math | -f(no-)?finite-math-only | -ffp-contract=\w+
      | -f(no-)?tree-vectorize | -fopenmp-simd | -f(no-)?strict-aliasing | -f(no-)?inline""",
    re.VERBOSE,
)


def is_harmless_flag(flag: str) -> bool:
    """Returns whether a compiler's ``flag`` decides how a kernel is compiled, and reads, writes or runs nothing.

    None depends on the machine, or asks for instructions that the target does not tell of. None chooses C++ before
    2014, whose tokens are others.
    """
    return _FLAGS.fullmatch(flag) is not None
