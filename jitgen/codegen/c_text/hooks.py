"""Finds the hooks of a kernel, and says why no rule may stand at one.

A *hook* is where a rule may be spliced: ``JITGEN_PROLOGUE(x[i], row, column)`` in place of a load, and
``out[i] = JITGEN_EPILOGUE(value, row, column);``, a store. Without a rule either macro is its first argument. The
index alone says which element it is; the row is a guess at where in the tensor that lies.

Neighbours: ``families/launch/hooks.py`` rewrites the text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jitgen.codegen.c_text.definition import Definition
from jitgen.codegen.c_text.tokens import CONTINUED, Token, closing_of, is_qualified, spelled, split_at_commas, tokens_of
from jitgen.codegen.c_text.types import dtypes_of

PROLOGUE, EPILOGUE = "JITGEN_PROLOGUE", "JITGEN_EPILOGUE"


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
        is_behind_loop: whether it is in no loop, and a loop ends before it.
    """

    parameter: str
    kind: str
    start: int
    index: tuple[int, int]
    value: tuple[int, int]
    rest: int
    is_behind_loop: bool = False


@functools.lru_cache(64)
def macros_of(texts: tuple[str, ...]) -> dict[str, list[Token]]:
    """Returns by its name what each macro of ``texts`` is replaced by, without its parameters and members."""
    macros: dict[str, list[Token]] = {}
    for text in texts:
        for token in tokens_of(text):
            words = tokens_of(CONTINUED.sub("", token.text).lstrip("#%:")) if token.kind == "directive" else ()
            if len(words) < 2 or words[0].text != "define":
                continue
            by, own = words[2:], set[str]()
            if by and by[0].text == "(" and by[0].start == words[1].end:
                closing = closing_of(by, 0)
                own, by = {other.text for other in by[:closing] if other.kind == "name"}, by[closing + 1 :]
            free = [w for n, w in enumerate(by) if w.text not in own and not (w.kind == "name" and is_qualified(by, n))]
            macros.setdefault(words[1].text, []).extend(free)
    return macros


def _end_of_statement(tokens: Sequence[Token], number: int) -> int:
    """Returns the place of the last token of the statement at ``number``."""
    while number < len(tokens) and (tokens[number].kind == "directive" or _is_attribute(tokens, number)):
        number = closing_of(tokens, number) + 1
    first = tokens[number].text if number < len(tokens) else ""
    if first == "{":
        return closing_of(tokens, number)
    if first == "do":
        return _end_of_statement(tokens, number + 1)
    if first in ("for", "while", "if", "switch"):
        condition = number + 1
        while condition < len(tokens) and tokens[condition].text in ("constexpr", "consteval", "!"):
            condition += 1
        has_one = condition < len(tokens) and tokens[condition].text == "("  # ``if consteval`` has none
        end = _end_of_statement(tokens, closing_of(tokens, condition) + 1 if has_one else condition)
        has_else = first == "if" and end + 1 < len(tokens) and tokens[end + 1].text == "else"
        return _end_of_statement(tokens, end + 2) if has_else else end
    while number < len(tokens) and tokens[number].text != ";":
        number = closing_of(tokens, number) + 1
    return number


def _is_attribute(tokens: Sequence[Token], number: int) -> bool:
    """Returns whether an attribute, such as ``[[likely]]``, begins at ``number``."""
    return [token.text for token in tokens[number : number + 2]] == ["[", "["]


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
    reader = _Reader(definition, others)
    hooks = [hook for number in range(len(definition.body) - 1) if (hook := reader.hook(number)) is not None]
    reader.refuse_other_uses()
    return hooks, reader.refusals


class _Reader:
    """Reads a kernel's body for hooks, and notes why no rule may stand at those of a parameter."""

    def __init__(self, definition: Definition, others: Sequence[str]) -> None:
        self.definition, self.body = definition, definition.body
        self.macros = macros_of((definition.text, *others))
        self.pointers = {parameter.name for parameter in definition.parameters if parameter.is_pointer}
        self.refusals: dict[str, str] = {}
        self.explained: set[int] = set()
        """Where the elements begin that hooks stand for."""
        self.loops = [
            range(number, _end_of_statement(self.body, number) + 1)
            for number, token in enumerate(self.body)
            if token.text in ("for", "while", "do") and token.kind == "name"
        ]

    def refuse(self, name: str, token: Token, why: str) -> None:
        line = self.definition.line_of(token.start)
        self.refusals.setdefault(name, f"{why}, in line {line}: {self.definition.quoted(token.start)}")

    def hook(self, number: int) -> Hook | None:
        """Returns the hook whose macro is token ``number``; None where no rule may replace it."""
        body, token = self.body, self.body[number]
        if token.text not in (PROLOGUE, EPILOGUE) or body[number + 1].text != "(":
            return None
        closing = closing_of(body, number + 1)
        arguments = split_at_commas(body[number + 2 : closing])
        mentioned = [other.text for other in body[number + 2 : closing] if other.text in self.pointers]
        if len(arguments) != 3:
            for name in mentioned:
                self.refuse(name, token, f"{token.text} takes a value, a row and a column")
            return None
        value = arguments[0]
        if token.text == PROLOGUE:
            element, start = value, token.start
            is_element = len(value) > 3 and value[1].text == "[" and closing_of(value, 1) == len(value) - 1
            if value[0].text not in self.pointers or not is_element:
                for name in mentioned:
                    self.refuse(name, token, f"{PROLOGUE} takes an element, such as {name}[i]")
                return None
        else:
            target = _target(body, number)
            ends = closing + 1 < len(body) and body[closing + 1].text == ";"
            if target is None or body[target].text not in self.pointers or not ends:
                return None
            element, start = body[target : number - 1], body[target].start
        name, index = element[0].text, element[2:-1]
        self.explained.add(element[0].start)
        if len(split_at_commas(index)) != 1 or any(_changes(piece, self.macros) for piece in (index, *arguments[1:])):
            self.refuse(name, token, "the index, the row or the column of a hook changes a variable")
        of_index, of_value = ((piece[0].start, piece[-1].end) for piece in (index or element, value))
        is_behind = any(loop.stop <= number for loop in self.loops) and not any(number in loop for loop in self.loops)
        rest = body[number + 2 + len(value)].end
        return Hook(name, token.text, start, of_index, of_value, rest, is_behind)

    def refuse_other_uses(self) -> None:
        """Refuses the pointers that the kernel uses outside of their hooks, in directives or by macros."""
        for number, token in enumerate(self.body):
            is_used = token.text in self.pointers and token.kind == "name" and token.start not in self.explained
            if is_used and not is_qualified(self.body, number):
                self.refuse(token.text, token, f"{token.text} is used outside of its hooks")
            if token.kind == "directive":
                for name in self.pointers:
                    if re.search(rf"\b{name}\b", token.text):
                        self.refuse(name, token, f"{name} is used in a directive")
        for macro, replacement in _reached(self.body, self.macros).items():
            words = {macro, *(token.text for token in replacement)}
            joins = "##" in spelled(replacement)
            for name in self.pointers:
                if name in words or joins:
                    self.refusals.setdefault(
                        name, f"the macro {macro} {'joins words' if joins else f'is or uses {name}'}"
                    )


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


def hook_refusal(definition: Definition, parameter: str, kind: str, others: Sequence[str] = ()) -> str:
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
