"""Factors of scores that leave a rule: the rule and its factor give the scores that the whole rule gives."""

from __future__ import annotations

import math

import pytest

from jitgen.families.attention.forward.scales import scaled
from jitgen.ir.body import Instruction

FLOAT = "float32"
ACCUMULATOR = Instruction("contract", (), FLOAT, 0)
SCALAR = Instruction("scalar", (), FLOAT, 0)


def const(value: float) -> Instruction:
    return Instruction("const", (), FLOAT, value)


def op(name: str, *args: int, dtype: str = FLOAT) -> Instruction:
    return Instruction(name, args, dtype)


def run(instructions: tuple[Instruction, ...], accumulator: float, hides: bool = False) -> float:
    functions = {
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "add": lambda a, b: a + b,
        "tanh": math.tanh,
        "reciprocal": lambda a: 1 / a,
        "where": lambda c, a, b: a if c else b,
    }
    sources = {"contract": accumulator, "scalar": 0.37, "load": hides}
    found: list[float] = []
    for i in instructions:
        if i.op == "const":
            found.append(i.attr)
        elif i.op in sources:
            found.append(sources[i.op])
        else:
            found.append(functions[i.op](*(found[argument] for argument in i.args)))
    return found[-1]


MASK = (Instruction("load", (), "bool", 3), const(-math.inf))
RULES = {
    "nothing": ((ACCUMULATOR,), 0, True),
    "a scale": ((ACCUMULATOR, SCALAR, op("mul", 0, 1)), 1, True),
    "a quotient": ((ACCUMULATOR, SCALAR, op("div", 0, 1)), 1, True),
    "several": ((ACCUMULATOR, SCALAR, op("mul", 1, 0), const(3.0), op("div", 2, 3), op("mul", 4, 1)), 1, True),
    "behind a mask": ((ACCUMULATOR, SCALAR, op("mul", 0, 1), *MASK, op("where", 3, 4, 2)), 1, True),
    "a cap": ((ACCUMULATOR, const(20.0), op("div", 0, 1), op("tanh", 2), op("mul", 3, 1)), 1, False),
    "a cap of unknown sign": ((ACCUMULATOR, SCALAR, op("div", 0, 1), op("tanh", 2), op("mul", 3, 1)), 0, False),
    "a negative number": ((ACCUMULATOR, const(-2.0), op("tanh", 0), op("mul", 2, 1)), 0, False),
    "a score that is used twice": ((ACCUMULATOR, SCALAR, op("mul", 0, 1), op("tanh", 2), op("add", 2, 3)), 0, False),
}


@pytest.mark.parametrize("name", RULES)
def test_rule_and_factor_give_the_whole_rule(name: str) -> None:
    rule, factors, linear = RULES[name]
    found = scaled(rule)
    assert bool(found.factor) == bool(factors)
    assert found.linear is linear
    for accumulator in (-3.5, 0.0, 1.25, 40.0):
        for hides in (False, True):
            factor = run(found.factor, accumulator) if found.factor else 1.0
            assert run(found.rule, accumulator, hides) * factor == pytest.approx(
                run(rule, accumulator, hides), rel=1e-12
            )
    if found.linear and factors:
        assert all(i.op in ("contract", "load", "const", "where") for i in found.rule)


def test_products_of_factors_are_one_factor() -> None:
    rule = (ACCUMULATOR, SCALAR, op("mul", 0, 1), const(5.0), op("div", 2, 3), op("tanh", 4), op("add", 5, 0))
    found = scaled(rule).rule
    assert sum(i.op == "mul" and 0 in i.args for i in found) + sum(i.op == "div" for i in found) == 1
    assert run(found, 2.0) == pytest.approx(run(rule, 2.0), rel=1e-12)
