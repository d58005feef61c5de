"""Takes positive factors that all scores share out of the rule.

exp(f s - max(f s)) is exp(f (s - max s)) for a positive f, and a kernel multiplies the difference with log2(e) anyway.
So a rule that ends in a multiplication costs no instruction for it: the usual scale of scores, and the cap of a capped
one. A mask may come after it, because -inf remains -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jitgen.families.attention.rule.bounds import masks_of, reachable
from jitgen.ir.body import Instruction, unvarying

Instructions = tuple[Instruction, ...]
FLOAT = "float32"


@dataclass(frozen=True)
class Scaled:
    """Holds a rule, and the factor with which its scores are still to be multiplied.

    Attributes:
        rule: its last instruction is the score.
        factor: the last of these instructions is the factor; empty for 1.
        linear: whether scores are the accumulators and masks, so that these can be multiplied with a factor that is not
            positive. The factor is positive where this is False.
    """

    rule: Instructions
    factor: Instructions
    linear: bool


def scaled(rule: Sequence[Instruction]) -> Scaled:
    """Splits the positive factor of its scores off ``rule``."""
    rule = with_products_of_factors(rule)
    uniform = unvarying(rule, lambda load: False)
    uses = [0] * len(rule)
    for instruction in rule:
        for argument in instruction.args:
            uses[argument] += 1
    masks = masks_of(rule)
    chain: list[int] = []
    factors: list[int] = []
    position = len(rule) - 1
    while not chain or uses[position] == 1:
        instruction = rule[position]
        if position in masks:
            following = instruction.args[3 - masks[position]]
        elif instruction.op == "mul" and sum(uniform[argument] for argument in instruction.args) == 1:
            following, factor = sorted(instruction.args, key=lambda argument: uniform[argument])
            factors.append(factor)
        else:
            break
        chain.append(position)
        position = following
    linear = rule[position].op == "contract" and (not chain or uses[position] == 1)
    if not factors or not (linear or all(_is_positive(rule[factor]) for factor in factors)):
        return Scaled(rule, (), linear and not factors)
    dropped = {p: next(a for a in rule[p].args if not uniform[a]) for p in chain if p not in masks}
    return Scaled(_without(rule, dropped), _product(rule, factors), linear)


def with_products_of_factors(rule: Sequence[Instruction]) -> Instructions:
    """Turns quotients by what is the same for all scores into products, and products of such products into one."""
    rewritten: list[Instruction] = []
    uniform: list[bool] = []
    at: dict[int, int] = {}

    def emit(instruction: Instruction) -> int:
        rewritten.append(instruction)
        operands = all(uniform[argument] for argument in instruction.args)
        uniform.append(instruction.is_number or (instruction.is_pointwise and operands))
        return len(rewritten) - 1

    for number, instruction in enumerate(rule):
        moved = replace(instruction, args=tuple(at[argument] for argument in instruction.args))
        if moved.op == "div" and moved.dtype == FLOAT and uniform[moved.args[1]] and not uniform[moved.args[0]]:
            inverse = emit(Instruction("reciprocal", (moved.args[1],), FLOAT, None, moved.location))
            moved = replace(moved, op="mul", args=(moved.args[0], inverse))
        if moved.op == "mul" and moved.dtype == FLOAT and sum(uniform[argument] for argument in moved.args) == 1:
            value, factor = sorted(moved.args, key=lambda argument: uniform[argument])
            inner = rewritten[value]
            if inner.op == "mul" and sum(uniform[argument] for argument in inner.args) == 1:
                value, first = sorted(inner.args, key=lambda argument: uniform[argument])
                factor = emit(Instruction("mul", (first, factor), FLOAT, None, moved.location))
            moved = replace(moved, args=(value, factor))
        at[number] = emit(moved)
    return reachable(rewritten, len(rewritten) - 1)


def _is_positive(instruction: Instruction) -> bool:
    return instruction.op == "const" and 0 < instruction.attr < float("inf")


def _without(rule: Sequence[Instruction], dropped: dict[int, int]) -> Instructions:
    """Replaces each instruction in ``dropped`` by the operand to which it maps."""
    kept: list[Instruction] = []
    at: dict[int, int] = {}
    for number, instruction in enumerate(rule):
        if number in dropped:
            at[number] = at[dropped[number]]
            continue
        at[number] = len(kept)
        kept.append(replace(instruction, args=tuple(at[argument] for argument in instruction.args)))
    return reachable(kept, at[len(rule) - 1])


def _product(rule: Sequence[Instruction], factors: Sequence[int]) -> Instructions:
    instructions, product = list(rule), factors[0]
    for factor in factors[1:]:
        instructions.append(Instruction("mul", (product, factor), FLOAT))
        product = len(instructions) - 1
    return reachable(instructions, product)
