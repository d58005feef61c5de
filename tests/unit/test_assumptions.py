"""What guards amount to in words (``ir/assumptions.py``): the same sizes satisfy both, and no line is superfluous."""

from __future__ import annotations

import itertools
import random

import pytest

from jitgen.ir import symbols
from jitgen.ir.assumptions import assumptions
from jitgen.ir.graph import Guard
from jitgen.ir.symbols import Scalar, size_symbol

N, M, K = (size_symbol(number, 0) for number in range(3))


def guard(op: str, left: Scalar, right: Scalar, value: bool = True) -> Guard:
    expr = symbols.compare(op, left, right)
    assert isinstance(expr, symbols.Expr)
    return Guard(expr, value)


def test_a_fact_is_said_once() -> None:
    rest = symbols.mod(1, N)
    rolled = [
        guard("ne", symbols.sub(N, rest), N),
        guard("ge", symbols.sub(N, rest), 0),
        guard("le", 5, N),
        guard("le", rest, 0, False),
        guard("le", 5, rest, False),
        guard("le", N, 0, False),
        guard("ge", rest, 5, False),
        guard("ge", 0, rest, False),
    ]
    assert assumptions(rolled) == ("(1 % s0_0) >= 1", "(1 % s0_0) <= 4", "s0_0 >= 5")
    grouped = [guard("eq", symbols.mul(12, N), symbols.product((3, N, M, K))), guard("eq", N, 0, False)]
    assert assumptions(grouped) == ("s0_0 >= 1", "s1_0*s2_0 == 4")
    equal = [guard("eq", N, M), guard("eq", M, 8), guard("ge", K, N), Guard(symbols.floordiv(K, 4), 2)]
    assert assumptions(equal) == ("s0_0 == 8", "s1_0 == 8", "s2_0 >= 8", "(s2_0 // 4) == 2")
    assert assumptions([guard("ge", symbols.add(N, M), 4), guard("ge", N, 4)]) == ("s0_0 >= 4",)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_sizes_satisfy_guards_and_words(seed: int) -> None:
    draw = random.Random(seed)

    def number(depth: int = 2) -> Scalar:
        if depth == 0 or draw.random() < 0.3:
            return draw.choice((N, M, K, 0, 1, 2, 3, 5, -1))
        operation = draw.choice((symbols.add, symbols.sub, symbols.mul, symbols.floordiv, symbols.mod, symbols.minimum))
        divisor = draw.choice((2, 3, 4, N)) if operation in (symbols.floordiv, symbols.mod) else number(depth - 1)
        return operation(number(depth - 1), divisor)

    for _ in range(20):
        guards, traced = [], {f"s{index}_0": draw.randint(index == 0, 6) for index in range(3)}
        while len(guards) < draw.randint(1, 5):
            expr = symbols.compare(draw.choice(("eq", "ne", "lt", "le", "gt", "ge")), number(), number())
            if isinstance(expr, symbols.Expr):
                guards.append(Guard(expr, symbols.evaluate(expr, traced)))
        words = assumptions(guards)
        holds = compile(" and ".join(words) or "True", "", "eval")
        for sizes in itertools.product(range(1, 6), range(5), range(5)):
            environment = {f"s{index}_0": size for index, size in enumerate(sizes)}
            held = all(guard.holds(environment) for guard in guards)
            assert held == eval(holds, {}, environment), (guards, words, sizes)
