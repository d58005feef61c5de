"""Computes with symbolic host scalars: sizes, numeric arguments, and integer arithmetic over them.

An ``Expr`` is an immutable tree over symbols. ``s2_0`` is the size of dimension 0 of tensor input 2, ``a1`` the value
of numeric argument 1; ``rng_seed`` and ``rng_offset`` are drawn at the call. Plain Python numbers stand for constants,
so most code never sees an ``Expr`` for a static size.

Integer sums and products have a normal form (a constant plus sorted ``coefficient * atom`` terms), so that ``n - n // 2
+ n // 2`` is ``n``, and equal sizes that were computed differently compare equal. Float arithmetic is never
reassociated.

Neighbours: a trace wraps an ``Expr`` in a number that user code computes with (``trace/numbers.py``); shapes and guards
of ``ir/graph.py`` hold them as data.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

Number = int | float | bool


@dataclass(frozen=True, slots=True)
class Expr:
    """Represents one node of an expression tree.

    Attributes:
        op: ``"symbol"``, ``"sum"``, ``"product"``, or a name of ``_EVALUATE``.
        args: the operands, ``Expr`` or numbers. Of a symbol, its name. Of a sum, the constant and then pairs of
            coefficient and atom. Of a product, its atoms.
        kind: the Python type of the value: ``"int"``, ``"float"`` or ``"bool"``.
        nodes: how many nodes the tree has, a repeated subtree counted each time.
    """

    op: str
    args: tuple[Any, ...]
    kind: str = "int"
    nodes: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)
    _text: list[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        leaves = (leaf for arg in self.args for leaf in (arg if isinstance(arg, tuple) else (arg,)))
        object.__setattr__(self, "nodes", 1 + sum(leaf.nodes for leaf in leaves if isinstance(leaf, Expr)))
        # Made once each: terms are found by their hash and sorted by their text, again and again.
        object.__setattr__(self, "_hash", hash((self.op, self.args, self.kind)))
        object.__setattr__(self, "_text", [])

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Expr) or self._hash != other._hash:
            return False
        return (self.op, self.args, self.kind) == (other.op, other.args, other.kind)

    def __reduce__(self) -> Any:  # the hash of a text differs from process to process
        return Expr, (self.op, self.args, self.kind)

    def __repr__(self) -> str:
        return format_expr(self)


Size = int | Expr
Scalar = int | float | bool | Expr


def symbol(name: str, kind: str = "int") -> Expr:
    return Expr("symbol", (name,), kind)


def size_symbol(tensor: int, dim: int) -> Expr:
    return symbol(f"s{tensor}_{dim}")


def argument_symbol(index: int, kind: str) -> Expr:
    return symbol(f"a{index}", kind)


MOST_NODES = 200
"""The most nodes of an expression with which a trace goes on computing. A size that is computed from itself twice, and
that repeatedly, is a tree of exponential size, which would never be compared or printed to its end. Expressions of
models have some tens of nodes."""


def is_too_long(value: Scalar) -> bool:
    """Returns whether a trace should take the number of the current call, with a guard, in place of ``value``."""
    return isinstance(value, Expr) and value.nodes > MOST_NODES


SEED, OFFSET = symbol("rng_seed"), symbol("rng_offset")
"""What a call draws from torch's generator, if its kernels make random numbers (``runtime/random.py``). Neither is
known before the call, so no size, guard or schedule may depend on one."""
DRAWN = (SEED.args[0], OFFSET.args[0])


def is_known_at_the_call(name: str) -> bool:
    """Returns whether a symbol has a value only when the kernels are launched: numeric arguments, and what a call
    draws."""
    return name.startswith("a") or name in DRAWN


def kind_of(value: Scalar) -> str:
    return value.kind if isinstance(value, Expr) else type(value).__name__


# ------------------------------------------------------------------------------------------- integer normal form


def terms_of(value: Scalar) -> tuple[int, dict[Expr, int]]:
    """Splits ``value`` into (constant, {atom: coefficient})."""
    if not isinstance(value, Expr):
        return int(value), {}
    if value.op == "sum":
        constant, *pairs = value.args
        return constant, {atom: coefficient for coefficient, atom in pairs}
    return 0, {value: 1}


def _sum(constant: int, terms: Mapping[Expr, int]) -> Size:
    nonzero = sorted(((c, atom) for atom, c in terms.items() if c), key=lambda pair: repr(pair[1]))
    if not nonzero:
        return constant
    if constant == 0 and len(nonzero) == 1 and nonzero[0][0] == 1:
        return nonzero[0][1]
    return Expr("sum", (constant, *nonzero))


def _factors(value: Scalar) -> tuple[int, tuple[Expr, ...]] | None:
    """Splits ``value`` into (coefficient, atoms); None if it is a sum of several terms."""
    constant, terms = terms_of(value)
    if not terms:
        return constant, ()
    if constant or len(terms) > 1:
        return None
    ((atom, coefficient),) = terms.items()
    return coefficient, atom.args if atom.op == "product" else (atom,)


def _product(coefficient: int, atoms: tuple[Expr, ...]) -> Size:
    if not atoms or coefficient == 0:
        return coefficient
    ordered = tuple(sorted(atoms, key=repr))
    return _sum(0, {ordered[0] if len(ordered) == 1 else Expr("product", ordered): coefficient})


def _both_int(left: Scalar, right: Scalar) -> bool:
    return kind_of(left) in ("int", "bool") and kind_of(right) in ("int", "bool")


def _call(op: str, left: Scalar, right: Scalar, kind: str) -> Scalar:
    if not isinstance(left, Expr) and not isinstance(right, Expr):
        return _EVALUATE[op](left, right)
    return Expr(op, (left, right), kind)


def _numeric_kind(left: Scalar, right: Scalar) -> str:
    return "int" if _both_int(left, right) else "float"


def add(left: Scalar, right: Scalar) -> Scalar:
    if not _both_int(left, right):
        return _call("add", left, right, "float")
    constant, terms = terms_of(left)
    other, more = terms_of(right)
    merged = dict(terms)
    for atom, coefficient in more.items():
        merged[atom] = merged.get(atom, 0) + coefficient
    return _sum(constant + other, merged)


def mul(left: Scalar, right: Scalar) -> Scalar:
    if not _both_int(left, right):
        return _call("mul", left, right, "float")
    for value, factor in ((left, right), (right, left)):
        if not isinstance(factor, Expr):
            constant, terms = terms_of(value)
            times = int(factor)
            return _sum(constant * times, {atom: c * times for atom, c in terms.items()})
    assert isinstance(left, Expr)
    assert isinstance(right, Expr)
    first, second = _factors(left) or (1, (left,)), _factors(right) or (1, (right,))
    return _product(first[0] * second[0], first[1] + second[1])


def neg(value: Scalar) -> Scalar:
    return mul(value, -1) if kind_of(value) != "float" else _call("mul", value, -1.0, "float")


def sub(left: Scalar, right: Scalar) -> Scalar:
    return add(left, neg(right)) if _both_int(left, right) else _call("sub", left, right, "float")


def floordiv(left: Scalar, right: Scalar) -> Scalar:
    if _both_int(left, right):
        if not isinstance(right, Expr) and right > 0:
            constant, terms = terms_of(left)
            divisor = int(right)
            if constant % divisor == 0 and all(c % divisor == 0 for c in terms.values()):
                return _sum(constant // divisor, {atom: c // divisor for atom, c in terms.items()})
        dividend, divisors = _factors(left), _factors(right)
        if dividend and divisors and divisors[0] and dividend[0] % divisors[0] == 0:
            remaining = Counter(dividend[1])
            remaining.subtract(divisors[1])
            if min(remaining.values(), default=0) >= 0:
                return _product(dividend[0] // divisors[0], tuple(remaining.elements()))
    return _call("floordiv", left, right, _numeric_kind(left, right))


def mod(left: Scalar, right: Scalar) -> Scalar:
    if _both_int(left, right) and not isinstance(right, Expr) and right > 0:
        constant, terms = terms_of(left)
        if all(c % right == 0 for c in terms.values()):
            return constant % int(right)
    return _call("mod", left, right, _numeric_kind(left, right))


def truediv(left: Scalar, right: Scalar) -> Scalar:
    return _call("truediv", left, right, "float")


def power(left: Scalar, right: Scalar) -> Scalar:
    if _both_int(left, right) and not isinstance(right, Expr) and 0 <= right <= 8:
        result: Scalar = 1
        for _ in range(int(right)):
            result = mul(result, left)
        return result
    kind = "int" if _both_int(left, right) and not isinstance(right, Expr) and right >= 0 else "float"
    return _call("pow", left, right, kind)


def minimum(left: Scalar, right: Scalar) -> Scalar:
    return left if left == right else _call("min", left, right, _numeric_kind(left, right))


def maximum(left: Scalar, right: Scalar) -> Scalar:
    return left if left == right else _call("max", left, right, _numeric_kind(left, right))


def compare(op: str, left: Scalar, right: Scalar) -> Scalar:
    """Compares, by one of eq, ne, lt, le, gt, ge; the result is a bool if the normal forms decide it."""
    if _both_int(left, right):
        difference = sub(left, right)
        if not isinstance(difference, Expr):
            return _EVALUATE[op](difference, 0)
        if op in ("ge", "lt") and is_nonnegative(difference):
            return op == "ge"
        if op in ("le", "gt") and is_nonnegative(neg(difference)):
            return op == "le"
    return _call(op, left, right, "bool")


def is_nonnegative(value: Scalar) -> bool:
    """Returns whether ``value`` is provably at least 0. Sizes are, and so are sums, products and quotients of sizes."""
    if not isinstance(value, Expr):
        return value >= 0
    if value.op == "symbol":
        return value.args[0].startswith("s")
    if value.op == "sum":
        return value.args[0] >= 0 and all(c >= 0 and is_nonnegative(atom) for c, atom in value.args[1:])
    if value.op in ("product", "floordiv", "mod", "min", "max"):
        return value.kind == "int" and all(map(is_nonnegative, value.args))
    return False


def total(values: Iterable[Scalar]) -> Scalar:
    """Returns the sum of ``values``."""
    none: Scalar = 0
    return reduce(add, values, none)


def product(sizes: Any) -> Size:
    result: Scalar = 1
    for size in sizes:
        result = mul(result, size)
    return result  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------ evaluation and text

INTEGER_BITS = 2**16
"""Bits of an integer power or product, at most: sizes need 63, and those of sizes can be too large to compute at all.
"""


def _mul(left: Any, right: Any) -> Any:
    both = type(left) is int and type(right) is int  # what a trace has for a number answers by fixing it
    if both and left.bit_length() + right.bit_length() > INTEGER_BITS:
        raise OverflowError(f"an integer product of more than {INTEGER_BITS} bits")
    return left * right


def _pow(left: Any, right: Any) -> Any:
    if type(left) is int and type(right) is int and left.bit_length() * right > INTEGER_BITS:
        raise OverflowError(f"an integer power of more than {INTEGER_BITS} bits")
    return left**right


_EVALUATE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": _mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
    "pow": _pow,
    "min": min,
    "max": max,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/", "pow": "**"}
_SIGNS |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def evaluate(value: Scalar, environment: Mapping[str, Number]) -> Any:
    """Evaluates ``value``, in which each symbol has its value in ``environment``."""
    if not isinstance(value, Expr):
        return value
    if value.op == "symbol":
        return environment[value.args[0]]
    if value.op == "sum":
        constant, *pairs = value.args
        return constant + sum(c * evaluate(atom, environment) for c, atom in pairs)
    if value.op == "product":
        return reduce(_mul, (evaluate(atom, environment) for atom in value.args))
    left, right = value.args
    return _EVALUATE[value.op](evaluate(left, environment), evaluate(right, environment))


def evaluated(values: Iterable[Any], environment: Mapping[str, Number]) -> tuple[Any, ...]:
    """Evaluates each of ``values``, such as the sizes of a shape; what is no expression stays as it is."""
    return tuple(evaluate(value, environment) for value in values)


def substitute(value: Scalar, replacements: Mapping[str, Scalar]) -> Scalar:
    """Replaces symbols of ``value`` by name; the result is in normal form."""
    if not isinstance(value, Expr):
        return value
    if value.op == "symbol":
        return replacements.get(value.args[0], value)
    if value.op == "sum":
        result: Scalar = value.args[0]
        for coefficient, atom in value.args[1:]:
            result = add(result, mul(coefficient, substitute(atom, replacements)))
        return result
    if value.op == "product":
        return product(substitute(atom, replacements) for atom in value.args)
    left, right = (substitute(argument, replacements) for argument in value.args)
    rebuild = _REBUILD.get(value.op)
    if rebuild is not None:
        return rebuild(left, right)
    return compare(value.op, left, right) if value.kind == "bool" else _call(value.op, left, right, value.kind)


_REBUILD: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "add": add,
    "sub": sub,
    "mul": mul,
    "floordiv": floordiv,
    "mod": mod,
    "truediv": truediv,
    "pow": power,
    "min": minimum,
    "max": maximum,
}


def symbols_of(value: Scalar) -> Iterator[str]:
    """Yields the names of the symbols in ``value``."""
    if isinstance(value, Expr):
        if value.op == "symbol":
            yield value.args[0]
        for argument in value.args:
            for leaf in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(leaf, Expr):
                    yield from symbols_of(leaf)


def format_expr(value: Scalar) -> str:
    """Prints ``value`` as Python text in which symbols are variables; ``eval`` of it gives the same number."""
    if not isinstance(value, Expr):
        return repr(value)
    if not value._text:
        value._text.append(_formatted(value))
    return value._text[0]


def _formatted(value: Expr) -> str:
    """Prints ``value`` from the texts of its arguments."""
    if value.op == "symbol":
        return str(value.args[0])
    if value.op == "sum":
        constant, *pairs = value.args
        terms = [format_expr(a) if c == 1 else f"{c}*{format_expr(a)}" for c, a in pairs]
        return "(" + " + ".join([*terms, *([repr(constant)] if constant else [])]) + ")"
    if value.op == "product":
        return "*".join(format_expr(atom) for atom in value.args)
    left, right = map(format_expr, value.args)
    if value.op in ("min", "max"):
        return f"{value.op}({left}, {right})"
    if value.op == "pow":  # binds before a product's stars and a number's sign
        left = f"({left})"
    if isinstance(value.args[1], Expr) and value.args[1].op == "product":
        right = f"({right})"
    return f"({left} {_SIGNS[value.op]} {right})"


def to_json(value: Scalar) -> Any:
    """Encodes ``value`` as JSON. Floats become hexadecimal text, so that they are exact and may be NaN or infinite."""
    if isinstance(value, Expr):
        arguments = [[c, to_json(a)] for c, a in value.args[1:]] if value.op == "sum" else None
        if arguments is not None:
            return {"op": "sum", "args": [value.args[0], *arguments]}
        plain = value.args if value.op == "symbol" else [to_json(argument) for argument in value.args]
        return {"op": value.op, "args": list(plain), "kind": value.kind}
    return {"float": value.hex()} if isinstance(value, float) else value


def from_json(data: Any) -> Any:
    """Decodes what ``to_json`` encoded."""
    if not isinstance(data, dict):
        return data
    if "float" in data:
        return float.fromhex(data["float"])
    if data["op"] == "sum":
        constant, *pairs = data["args"]
        return Expr("sum", (constant, *((c, from_json(a)) for c, a in pairs)))
    arguments = data["args"] if data["op"] == "symbol" else [from_json(argument) for argument in data["args"]]
    return Expr(data["op"], tuple(arguments), data["kind"])
