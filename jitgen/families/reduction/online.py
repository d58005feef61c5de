"""Fewer passes over a row: reductions of what an earlier reduction gave, taken beside it.

``online`` rewrites the body of a kernel whose passes read a row again, or whose blocks wait for one another after each
(``RowSchedule.online``). Two reductions that wait for another one of the same row become reductions of the row itself,
and so known a pass earlier:

- ``sum_exp``, the sum of exp(v - max v) where that maximum is finite: each place keeps the largest it has met and the
  sum scaled by it, and rescales the sum when a larger one comes (Milakov and Gimelshein, "Online normalizer calculation
  for softmax", 2018);
- ``deviations``, the sum of squared deviations of v from its mean: each place keeps its own mean and deviations from it
  (Welford, "Note on a method for calculating corrected sums of squares and products", 1962), which are combined as by
  Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979).

What a maximum or a mean that is not finite does to the formulas that are replaced is said by a line or two of row
values behind the reduction, so accumulating need not care.

The maximum and the sum themselves stay: they are a single operation an element. A kernel of which this saves no pass
is left as it is.
"""

from __future__ import annotations

import math

from jitgen.families.reduction.residency import passes
from jitgen.families.reduction.rewriting import Rewriting
from jitgen.ir.program import Kernel

SUM_EXP, DEVIATIONS, MEAN = "sum_exp", "deviations", "mean"
"""Kinds of ``reduce`` that only kernels have which this module rewrote, in Triton and CUDA C++ (the last: there)."""


def online(kernel: Kernel) -> Kernel:
    """``kernel``, or one of the same operands, results and parameters that walks its rows fewer times."""
    (body,) = kernel.bodies
    rewritten = _Online(kernel).kernel_rewritten() if body.row_rank else kernel
    return rewritten if passes(rewritten) < passes(kernel) else kernel


def with_means(kernel: Kernel) -> Kernel:
    """``kernel`` where the mean of what deviations are taken of is a reduction itself: who has these has that."""
    return _Means(kernel).kernel_rewritten() if kernel.bodies[0].row_rank else kernel


class _Means(Rewriting):
    """Quotients of a sum and the length replaced."""

    def __init__(self, kernel: Kernel):
        super().__init__(kernel)
        self.spread = {i.args[0] for i in self.instructions if (i.op, i.attr) == ("reduce", DEVIATIONS)}

    def rewrite(self, position: int) -> int | None:
        value = self.mean_of(position)
        if value not in self.spread:
            return None
        return self.emit(self.instructions[position], "reduce", self.at[value], attr=MEAN)


class _Online(Rewriting):
    """Sums of exponentials and of squares replaced."""

    def rewrite(self, position: int) -> int | None:
        instruction = self.instructions[position]
        if instruction.op != "reduce" or instruction.attr != "sum" or not instruction.dtype.startswith("float"):
            return None
        found = self._sum_exp(position)
        return self._deviations(position) if found is None else found

    def _sum_exp(self, position: int) -> int | None:
        """sum(exp(v - m)), where m is v's maximum, or that where it is finite and else some other number."""
        reduction = self.instructions[position]
        (power,) = reduction.args
        if not self.is_(power, "exp", reduction.dtype):
            return None
        (difference,) = self.instructions[power].args
        if not self.is_(difference, "sub", reduction.dtype):
            return None
        value, less = self.instructions[difference].args
        top = self._unguarded(less)
        if not self.is_(top, "reduce", reduction.dtype, "max") or self.instructions[top].args != (value,):
            return None
        if self.instructions[value].row:
            return None
        # Every term is exp(-inf - m), or one of them is exp(inf - m), or NaN: which it is, the maximum tells.
        total = self.emit(reduction, "reduce", self.at[value], attr=SUM_EXP)
        beyond = self.emit(reduction, "exp", self.emit(reduction, "sub", self.at[top], self.at[less]))
        return self.emit(reduction, "where", self.emit_finite(reduction, self.at[top]), total, beyond)

    def _unguarded(self, position: int) -> int:
        """m, of ``where(abs(m) < inf, m, number)``."""
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
        """sum(d * d), where d = v - sum(v) / length."""
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
        # Where a deviation overflows on the way, so would its square; beside a mean that is none, all are NaN.
        found = self.emit(reduction, "reduce", self.at[value], attr=DEVIATIONS)
        infinity = self.emit(reduction, "const", attr=math.inf)
        beyond = self.emit(reduction, "sub", infinity, self.emit(reduction, "abs", self.at[mean]))
        return self.emit(reduction, "where", self.emit_finite(reduction, found), found, beyond)
