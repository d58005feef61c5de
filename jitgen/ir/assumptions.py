"""Says what the guards of a graph amount to, for people: one line for each fact about sizes.

A trace asks whether ``n >= 1``, ``0 >= n`` and ``n != 0``, each where some function needs it, and keeps all three as
guards (``ir/graph.py``), which are what a call is checked by. Here a fact that follows from the others is left out.
Neighbours: ``Lowered.__str__`` and ``explain()`` print the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jitgen.ir import symbols
from jitgen.ir.graph import Guard
from jitgen.ir.symbols import Expr, Scalar, Size

Terms = tuple[tuple[int, Expr], ...]
"""An integer sum: coefficients, of which the first is positive, and what they multiply."""

_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def assumptions(guards: Iterable[Guard]) -> tuple[str, ...]:
    """Returns the facts that ``guards`` state, each in words of Python, without those that follow from others."""
    compared, others = [], []
    for guard in guards:
        comparison = _comparison(guard)
        (others.append(str(guard)) if comparison is None else compared.append(comparison))
    equal = _equalities(compared)
    facts: dict[Terms, _Range] = {}
    for op, difference in compared:
        _note(facts, op, symbols.substitute(difference, equal))
    for terms in list(facts):
        _divide(facts, terms)
    texts = [f"{name} == {value}" for name, value in sorted(equal.items(), key=lambda pair: _numbers(pair[0]))]
    texts += [text for terms, known in facts.items() for text in known.described(terms, facts)]
    return tuple(dict.fromkeys([*texts, *others]))


def _comparison(guard: Guard) -> tuple[str, Size] | None:
    """Returns ``guard`` as (a comparison, the integer that it compares with 0); None if it is about other numbers."""
    expr = guard.expr
    if expr.kind == "int":
        return "eq", symbols.sub(expr, guard.value)  # type: ignore[return-value]
    if expr.op not in _OPPOSITE or any(symbols.kind_of(arg) != "int" for arg in expr.args):
        return None
    return (expr.op if guard.value else _OPPOSITE[expr.op]), symbols.sub(*expr.args)  # type: ignore[return-value]


def _equalities(compared: Iterable[tuple[str, Size]]) -> dict[str, Scalar]:
    """Returns what symbols are equal to: a number, or a symbol of an earlier input."""
    equal: dict[str, Scalar] = {}
    for op, difference in compared:
        solved = _equality(symbols.substitute(difference, equal)) if op == "eq" else None
        if solved is not None:
            equal = {name: symbols.substitute(value, dict([solved])) for name, value in equal.items()} | dict([solved])
    return equal


def _equality(difference: Scalar) -> tuple[str, Scalar] | None:
    """Returns the symbol, and its value, of which ``difference == 0`` says that they are equal."""
    constant, terms = symbols.terms_of(difference)
    names = [(atom, coefficient) for atom, coefficient in terms.items() if atom.op == "symbol"]
    if len(names) != len(terms) or not names:
        return None
    if len(names) == 1 and constant % names[0][1] == 0:
        return names[0][0].args[0], -constant // names[0][1]
    if len(names) == 2 and not constant and names[0][1] == -names[1][1]:
        earlier, later = sorted((atom for atom, _ in names), key=lambda atom: _numbers(atom.args[0]))
        return later.args[0], earlier
    return None


def _numbers(name: str) -> tuple[int, ...]:
    """Returns the numbers in ``name``, by which symbols are in order: of a size, its input and its dimension."""
    return tuple(map(int, re.findall(r"\d+", name)))


@dataclass
class _Range:
    """Holds what is known of an integer: its bounds, None where there is none, and values that it does not have."""

    low: int | None = None
    high: int | None = None
    others: set[int] = field(default_factory=set)

    def tighten(self) -> None:
        while self.low in self.others or self.high in self.others:
            self.low = self.low if self.low not in self.others else self.low + 1
            self.high = self.high if self.high not in self.others else self.high - 1

    def described(self, terms: Terms, facts: dict[Terms, _Range]) -> Iterator[str]:
        """Yields what is known in words, unless every such integer of sizes is so."""
        if self.low is not None and self.low == self.high:
            yield _words(terms, "==", self.low)
            return
        if self.low is not None and not _is_at_least(terms, self.low, facts):
            yield _words(terms, ">=", self.low)
        negated = tuple((-times, atom) for times, atom in terms)
        if self.high is not None and not _is_at_least(negated, -self.high, facts):
            yield _words(terms, "<=", self.high)
        for other in sorted(self.others):
            if (self.low is None or other > self.low) and (self.high is None or other < self.high):
                yield _words(terms, "!=", other)


def _note(facts: dict[Terms, _Range], op: str, difference: Scalar) -> None:
    """Adds to ``facts`` that ``difference`` compares with 0 by ``op``."""
    constant, coefficients = symbols.terms_of(difference)
    if not coefficients:
        return
    common = math.gcd(*coefficients.values())
    ordered = sorted(coefficients.items(), key=lambda pair: repr(pair[0]))
    sign = 1 if ordered[0][1] > 0 else -1
    terms = tuple((sign * coefficient // common, atom) for atom, coefficient in ordered)
    known = facts.setdefault(terms, _Range(low=0 if all(map(symbols.is_nonnegative, (_sum(terms),))) else None))
    bound = -sign * constant  # of the terms, times what they have in common
    if sign < 0:
        op = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}.get(op, op)
    if op in ("ge", "gt", "eq"):
        low = bound // common + 1 if op == "gt" else -(-bound // common)
        known.low = low if known.low is None else max(known.low, low)
    if op in ("le", "lt", "eq"):
        high = -(-bound // common) - 1 if op == "lt" else bound // common
        known.high = high if known.high is None else min(known.high, high)
    if op == "ne" and bound % common == 0:
        known.others.add(bound // common)
    known.tighten()


def _divide(facts: dict[Terms, _Range], terms: Terms) -> None:
    """Divides a fact about products by what all of them have in common, where that is known to be no 0."""
    known = facts[terms]
    if not (known.low == known.high == 0):
        return
    factors = [list(atom.args if atom.op == "product" else (atom,)) for _, atom in terms]
    shared = [atom for atom in dict.fromkeys(factors[0]) if all(atom in others for others in factors)]
    shared = [atom for atom in shared if (facts.get(((1, atom),)) or _Range()).low not in (None, 0)]
    if not shared:
        return
    for atom in shared:
        for others in factors:
            others.remove(atom)
    rest = symbols.total(
        symbols.mul(times, symbols.product(rest)) for (times, _), rest in zip(terms, factors, strict=True)
    )
    del facts[terms]
    _note(facts, "eq", rest)


def _is_at_least(terms: Terms, low: int, facts: dict[Terms, _Range]) -> bool:
    """Returns whether ``terms`` are at least ``low`` by what is known of their atoms."""
    least = 0
    for times, atom in terms:
        if times < 0:
            return low <= 0 and _are_divisor_and_remainder(terms, facts)
        known = facts.get(((1, atom),)) if len(terms) > 1 else None
        if known is None and not symbols.is_nonnegative(atom):
            return False
        least += times * ((known.low if known else None) or 0)
    return low <= least


def _are_divisor_and_remainder(terms: Terms, facts: dict[Terms, _Range]) -> bool:
    """Returns whether ``terms`` are ``n - m % n`` with an ``n`` of at least 1."""
    divisor, *others = sorted(terms, key=lambda term: term[0], reverse=True)
    if divisor[0] != 1 or [(times, atom.op) for times, atom in others] != [(-1, "mod")]:
        return False
    known = facts.get((divisor,))
    return others[0][1].args[1] == divisor[1] and known is not None and (known.low or 0) > 0


def _sum(terms: Iterable[tuple[int, Expr]]) -> Size:
    return symbols.total(symbols.mul(times, atom) for times, atom in terms)  # type: ignore[return-value]


def _words(terms: Terms, op: str, number: int) -> str:
    """Prints a fact with what is subtracted on the other side."""
    left = _sum((times, atom) for times, atom in terms if times > 0)
    right = symbols.add(_sum((-times, atom) for times, atom in terms if times < 0), number)
    return f"{_plain(left)} {op} {_plain(right)}"


def _plain(value: Scalar) -> str:
    text = symbols.format_expr(value)
    return text[1:-1] if isinstance(value, Expr) and value.op == "sum" else text
