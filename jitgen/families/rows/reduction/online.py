"""Saves passes over a row: a reduction that depends on another one is accumulated online, in the same pass.

``online`` rewrites the body of a kernel whose passes read the row from memory, or whose blocks wait for one another
after each pass (``GpuRows.online``). Two kinds of reduction that depend on another one of the same row become
reductions of the row's elements, whose results are known a pass earlier:

- ``sum_exp``, the sum of exp(v - max v) where that maximum is finite. Each accumulator keeps the largest value it has
  met and the sum scaled by it, and rescales the sum when a larger value comes (Milakov and Gimelshein, "Online
  normalizer calculation for softmax", 2018).
- ``deviations``, the sum of squared deviations of v from its mean. Each accumulator keeps a mean of its own and the
  deviations from it (Welford, "Note on a method for calculating corrected sums of squares and products", 1962); two are
  combined as by Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances",
  1979).

The original formulas give infinities and NaN where the maximum or the mean is not finite. A few row values behind the
reduction reproduce that, so that accumulation need not.

The maximum and the sum themselves stay, at one operation for each element. A kernel that would have as many passes as
before is left as it is.
"""

from __future__ import annotations

import math

from jitgen.families.rows.reduction.residency import passes
from jitgen.families.rows.reduction.rewriting import Rewriting
from jitgen.ir.program import Kernel

SUM_EXP, DEVIATIONS, MEAN = "sum_exp", "deviations", "mean"
"""Kinds of ``reduce`` that only rewritten kernels have: the first two in Triton and CUDA C++, the mean in CUDA C++."""


def online(kernel: Kernel) -> Kernel:
    """Returns ``kernel``, or one with the same operands, results and parameters and fewer passes."""
    (body,) = kernel.bodies
    rewritten = _Online(kernel).kernel_rewritten() if body.row_rank else kernel
    return rewritten if passes(rewritten) < passes(kernel) else kernel


def with_means(kernel: Kernel) -> Kernel:
    """Makes each mean of values whose deviations are reduced too a reduction itself.

    The accumulator of the deviations has the mean, so that no sum is needed.
    """
    return _Means(kernel).kernel_rewritten() if kernel.bodies[0].row_rank else kernel


class _Means(Rewriting):
    """Replaces the quotients of a sum and the length."""

    def __init__(self, kernel: Kernel):
        super().__init__(kernel)
        self.spread = {i.args[0] for i in self.instructions if (i.op, i.attr) == ("reduce", DEVIATIONS)}

    def rewrite(self, position: int) -> int | None:
        value = self.mean_of(position)
        if value not in self.spread:
            return None
        return self.emit(self.instructions[position], "reduce", self.at[value], attr=MEAN)


class _Online(Rewriting):
    """Replaces sums of exponentials and of squared deviations."""

    def rewrite(self, position: int) -> int | None:
        instruction = self.instructions[position]
        if instruction.op != "reduce" or instruction.attr != "sum" or not instruction.dtype.startswith("float"):
            return None
        replacement = self._sum_exp(position)
        return self._deviations(position) if replacement is None else replacement

    def _sum_exp(self, position: int) -> int | None:
        """Computes sum(exp(v - m)), where m is v's maximum, or that if it is finite and else a finite number."""
        reduction = self.instructions[position]
        (power,) = reduction.args
        if not self.is_(power, "exp", reduction.dtype):
            return None
        (difference,) = self.instructions[power].args
        if not self.is_(difference, "sub", reduction.dtype):
            return None
        value, subtrahend = self.instructions[difference].args
        top = self._unguarded(subtrahend)
        if not self.is_(top, "reduce", reduction.dtype, "max") or self.instructions[top].args != (value,):
            return None
        if self.instructions[value].row:
            return None
        # Where the maximum is not finite, every term is exp(-inf - m), or some term is exp(inf - m) or NaN. The maximum
        # tells which.
        total = self.emit(reduction, "reduce", self.at[value], attr=SUM_EXP)
        not_finite = self.emit(reduction, "exp", self.emit(reduction, "sub", self.at[top], self.at[subtrahend]))
        return self.emit(reduction, "where", self.emit_finite(reduction, self.at[top]), total, not_finite)

    def _unguarded(self, position: int) -> int:
        """Returns the position of m if ``where(abs(m) < inf, m, number)`` is at ``position``; else ``position``."""
        guard = self.instructions[position]
        if guard.op != "where":
            return position
        condition, value, otherwise = (self.instructions[a] for a in guard.args)
        if condition.op != "lt" or otherwise.op != "const" or not math.isfinite(otherwise.attr):
            return position
        size, limit = (self.instructions[a] for a in condition.args)
        guarded = size.op == "abs" and size.args == guard.args[1:2] and limit.op == "const" and limit.attr == math.inf
        return guard.args[1] if guarded and value.op == "reduce" else position

    def _deviations(self, position: int) -> int | None:
        """Computes sum(d * d), where d = v - sum(v) / length."""
        reduction = self.instructions[position]
        (square,) = reduction.args
        if not self.is_(square, "mul", reduction.dtype):
            return None
        deviation, same = self.instructions[square].args
        if deviation != same or not self.is_(deviation, "sub", reduction.dtype):
            return None
        value, mean = self.instructions[deviation].args
        if self.mean_of(mean) != value or self.instructions[mean].dtype != reduction.dtype:
            return None
        # A result that is not finite comes from a deviation whose square overflows, or from a mean that is not finite:
        # infinity less the mean is infinite in the first case and NaN in the second.
        deviations = self.emit(reduction, "reduce", self.at[value], attr=DEVIATIONS)
        infinity = self.emit(reduction, "const", attr=math.inf)
        not_finite = self.emit(reduction, "sub", infinity, self.emit(reduction, "abs", self.at[mean]))
        return self.emit(reduction, "where", self.emit_finite(reduction, deviations), deviations, not_finite)
