"""Finds the definition of a kernel in its text: its template, its parameters and its body."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jitgen.codegen.c_text.tokens import Token, closing_of, spelled, split_at_commas, tokens_of
from jitgen.codegen.c_text.types import NUMBERS
from jitgen.errors import UnsupportedError

_ATTRIBUTES = ("__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__block_size__")
"""What an entry in CUDA C++ says of its launches."""
_UNTYPED = ("const", "volatile", "struct", "__restrict__", "__restrict", "restrict", "typename", "__grid_constant__")


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
        aliases: (name, type) of the types that the file names, as far as they hold at the kernel.
        parameters: in their order.
        head: the tokens before the name.
        opening: where its first parameter would begin.
        body: the tokens of its body.
    """

    text: str
    name: str
    arguments: tuple[str, ...]
    templates: tuple[tuple[str, str], ...]
    aliases: tuple[tuple[str, str], ...]
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
        """Returns the type of ``parameter``: of an alias, or a parameter of the template, what it stands for."""
        aliases, spelled = dict(self.aliases), dict(self.templates).get(parameter.type, parameter.type)
        for _ in aliases:
            spelled = aliases.get(spelled, spelled)
        return spelled

    @property
    def attributes(self) -> tuple[tuple[Token, ...], ...]:
        """Returns what the head says of launches: a name, and its arguments in parentheses."""
        listed = []
        for number, token in enumerate(self.head):
            if token.text in _ATTRIBUTES:
                listed.append(self.head[number : closing_of(self.head, number + 1) + 1])
        return tuple(listed)

    def written_out(self, tokens: Sequence[Token]) -> str:
        """Returns the text of ``tokens`` outside of the template: with its arguments in place of its parameters."""
        substitutes = {
            name: argument if re.fullmatch(r"[\w: ]*", argument) else f"({argument})"
            for name, argument in self.templates
        }
        return spelled([replace(token, text=substitutes.get(token.text, token.text)) for token in tokens])


def parsed_entry(entry: str) -> tuple[str, tuple[str, ...]]:
    """Divides ``"name<float, 4>"`` into the name and the arguments of a template."""
    name, bracket, rest = entry.strip().partition("<")
    if not bracket:
        return name.strip(), ()
    inner = rest.rpartition(">")[0]
    arguments = split_at_commas(tokens_of(inner), angles=True)
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
        closing = closing_of(tokens, number + 1)
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
        body = tokens[behind + 1 : closing_of(tokens, behind)]
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
        for piece in split_at_commas(inside[1:], angles=True)
        if [other.text for other in piece] != ["void"]
    )
    aliases = _aliases(tokens, tokens.index(head[0]))
    return Definition(text, name, arguments, templates, aliases, parameters, head, inside[0].end, body)


def _aliases(tokens: Sequence[Token], kernel: int) -> tuple[tuple[str, str], ...]:
    """Returns (name, type) of each ``typedef`` and ``using`` whose scope token ``kernel`` is in. One that is under a
    condition of the preprocessor is left out, and so is a name of several types."""
    scopes: list[int] = []
    spelled: dict[str, set[str]] = {}
    where: dict[str, list[int]] = {}
    conditions = 0
    for number, token in enumerate(tokens[:kernel]):
        if token.kind == "directive":
            directive = re.match(r"\W*(if|endif)", token.text)
            conditions += 0 if directive is None else 1 if directive[1] == "if" else -1
        elif token.text == "{":
            scopes.append(number)
        elif token.text == "}" and scopes:
            scopes.pop()
        elif token.text in ("typedef", "using"):
            end = next((i for i in range(number, kernel) if tokens[i].text == ";"), kernel)
            words = [other.text for other in tokens[number + 1 : end]]
            if len(words) < 2 or (token.text == "using" and words[1] != "="):
                continue
            name, type_ = (words[-1], words[:-1]) if token.text == "typedef" else (words[0], words[2:])
            spelled.setdefault(name, set()).add("" if conditions else _joined(type_))
            where[name] = list(scopes)
    single = {name: types.pop() for name, types in spelled.items() if len(types) == 1}
    return tuple((name, type_) for name, type_ in single.items() if type_ and where[name] == scopes[: len(where[name])])


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
    for number, piece in enumerate(split_at_commas(inside[1:], angles=True)):
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
    if len(names) < 2 or not re.match(r"[A-Za-z_]\w*$", names[-1]) or names[-1] in NUMBERS:
        raise UnsupportedError(f"{where}: the parameter {spelled!r} has no name; give it one")
    is_pointer = "*" in texts
    before = texts[: texts.index("*")] if is_pointer else texts
    kind = names[: names.index("*")] if is_pointer else names[:-1]
    return Parameter(names[-1], _joined(kind), is_pointer, is_pointer and "const" in before, tokens[0].start)


def _joined(words: Sequence[str]) -> str:
    """Returns a type as one writes it: ``unsigned int``, ``jitgen::bfloat16``."""
    return re.sub(r" ?(::|<|>|,) ?", r"\1", " ".join(words).replace(": :", "::")).replace(",", ", ")
