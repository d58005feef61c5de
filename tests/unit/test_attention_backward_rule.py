"""The rule of a tile of attention's backward in CUDA: phases, words, factors, and values that are what they were."""

from __future__ import annotations

import math

from jitgen.families.attention.backward.context import merged
from jitgen.families.attention.backward.pairs import BOTH, Rule, products_behind, rule_of
from jitgen.ir.body import Instruction as I

FLOAT = "float32"
NUMBERS = {"scores": 1.5, "gradients": -0.7, "top": 2.25, "total": 3.5, "delta": 0.4}
"""Of a pair of rows: products 0 and 1, and numbers of a row, operands 0 to 2."""


def weight(scale: float) -> list[I]:
    """exp(S scale - top) / total."""
    return [
        I("contract", (), FLOAT, 0),
        I("const", (), FLOAT, scale),
        I("mul", (0, 1), FLOAT),
        I("load", (), FLOAT, 0),
        I("sub", (2, 3), FLOAT),
        I("exp", (4,), FLOAT),
        I("load", (), FLOAT, 1),
        I("div", (5, 6), FLOAT),
    ]


def dscore(scale: float) -> list[I]:
    """P (dP - delta) scale."""
    return [
        *weight(scale),
        I("contract", (), FLOAT, 1),
        I("load", (), FLOAT, 2),
        I("sub", (8, 9), FLOAT),
        I("mul", (7, 10), FLOAT),
        I("mul", (11, 1), FLOAT),
    ]


def value(rule: Rule, position: int) -> float:
    """What is at ``position`` for ``NUMBERS``."""
    instruction = rule.instructions[position]
    values = [value(rule, argument) for argument in instruction.args]
    if instruction.op == "contract":
        return NUMBERS[("scores", "gradients")[instruction.attr]]
    if instruction.op == "load":
        return NUMBERS[("top", "total", "delta")[instruction.attr]]
    found = {
        "const": lambda: instruction.attr,
        "mul": lambda: values[0] * values[1],
        "sub": lambda: values[0] - values[1],
        "add": lambda: values[0] + values[1],
        "div": lambda: values[0] / values[1],
        "eq": lambda: values[0] == values[1],
        "where": lambda: values[1] if values[0] else values[2],
        "reciprocal": lambda: 1 / values[0],
        "exp2_normal": lambda: 2.0 ** values[0],
    }
    return float(found[instruction.op]())


def both(level: str, factored: bool) -> Rule:
    instructions, (of_dscore, of_weight) = merged([dscore(0.25), weight(0.25)])
    kinds = dict.fromkeys(range(3), level)
    return rule_of(instructions, of_weight, (of_dscore,), 0, kinds, factored)


def test_values_stay() -> None:
    wanted = math.exp(NUMBERS["scores"] * 0.25 - NUMBERS["top"]) / NUMBERS["total"]
    for factored in (False, True):
        rule = both("key", factored)
        factor = value(rule, rule.factor) if rule.factor is not None else 1.0
        assert rule.first is not None
        assert math.isclose(value(rule, rule.first), wanted, rel_tol=1e-12)
        found = value(rule, rule.second[0]) * factor
        assert math.isclose(found, wanted * (NUMBERS["gradients"] - NUMBERS["delta"]) * 0.25, rel_tol=1e-12)
        assert (rule.factor is not None) is factored


def test_few_instructions_for_a_pair_and_few_words_of_a_row() -> None:
    rule = both("key", True)
    assert len(rule.words("key")) == 3
    assert not rule.words("row")
    assert rule.kept == rule.first  # dS is computed from the weight
    pairs = [
        rule.instructions[p].op
        for p in sorted({*rule.first_phase, *rule.second_phase})
        if rule.levels[p] == BOTH and rule.instructions[p].op != "contract"
    ]
    assert sorted(pairs) == ["exp2_normal", "mul", "mul", "mul", "sub", "sub"]
    assert products_behind(rule.instructions, rule.kept) == {0}
    assert not any(rule.instructions[p].op == "contract" and rule.instructions[p].attr == 0 for p in rule.second_phase)


def test_a_rule_of_one_product_is_one_phase() -> None:
    instructions, (root,) = merged([weight(0.5)])
    rule = rule_of(instructions, None, (root,), 0, dict.fromkeys(range(3), "row"), True)
    assert rule.kept == rule.second[0]
    assert rule.second_phase == ()
    assert len(rule.words("row")) == 2
