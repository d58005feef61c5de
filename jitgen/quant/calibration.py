"""Quantises a model by what it computes on some batches: ``jitgen.calibrate``.

Methods:

``"absmax"``, ``"percentile"``
    find one scale for the activations of each weight, which is stored with it: the largest magnitude over the largest
    code, or that which a percentage of magnitudes is below.
``"smoothquant"``
    divides columns of activations with large numbers, and multiplies the weights' (``migration.py``). Scales of
    activations are found at each call. Where a model has no place for the factors, weights that quantise activations
    keep them: their format ends in ``.smoothed``.
``"awq"``
    is the same with factors that minimise the error of each product in its weight's format, and scales of weights found
    by errors weighted with the mean squares of activations.
``"gptq"``
    quantises weights column by column, and moves what is lost to later columns (``feedback.py``). The model is run
    again for the weights that multiply the same tensors, in the order of its calls, with all before them quantised:
    what a weight multiplies is then what it will multiply.

The model changes when everything is known, and not before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from jitgen import progress
from jitgen.errors import FallbackWarning, FormatError
from jitgen.quant.activations import SMALLEST_SCALE, check_activation, kind_of
from jitgen.quant.feedback import why_not, with_feedback
from jitgen.quant.migration import Factors, Migration
from jitgen.quant.modules import described, let_be_saved, replace_weight
from jitgen.quant.observed import Observed, Observer, Run, Squares, Substitute, run
from jitgen.quant.planned import Activations, Filter, Formats, Job, Plan, plan
from jitgen.quant.qtensor import QTensor
from jitgen.quant.quantize import quantize
from jitgen.quant.report import QuantizationReport, SkippedLayer

METHODS = ("absmax", "percentile", "smoothquant", "awq", "gptq")
STATIC = ("absmax", "percentile")
"""Methods that find scales of activations."""
MIGRATING = ("smoothquant", "awq")
"""Methods that move factors from activations to weights."""
PRODUCT_BYTES = 1 << 30
"""Memory for sums of x^T x in one run of the batches."""


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = "absmax",
    *,
    format: Formats = "int8",
    group_size: int | None = None,
    activation: Activations = None,
    filter_fn: Filter = None,
    percentile: float = 99.9,
    embeddings: bool = False,
    sequential: bool = True,
) -> QuantizationReport:
    """Quantises ``model`` in place by what it computes on ``batches``; the result is as that of ``quantize_``.

    Args:
        model: runs in eager torch; products in functions that ``jitgen.jit`` decorates are not seen.
        batches: what the model is called with: tensors, sequences of arguments, or mappings of them.
        method: ``"absmax"``, ``"percentile"``, ``"smoothquant"``, ``"awq"`` or ``"gptq"`` (this module's docstring).
        format, group_size, filter_fn, embeddings: as of ``quantize_``.
        activation: as of ``quantize_``; by default ``"int8"`` for the methods that find scales of activations, or
            ``"fp8_e4m3"`` where a weight's codes are numbers of that kind alone.
        percentile: of ``"percentile"``, in percent.
        sequential: whether ``"gptq"`` runs the model again for each set of weights that multiply the same tensors. With
            False it does so only for as many as memory asks for.

    Returns:
        the report of ``quantize_``, with what was migrated.

    Raises:
        FormatError: there is no such method, no batch, no weight to quantise, or none of them is seen or has a format
            of the method. Whatever is raised, by a batch too, the model is then unchanged.
    """
    if method not in METHODS:
        raise FormatError(f"unknown method {method!r}; expected one of {', '.join(map(repr, METHODS))}")
    if not 0 < percentile <= 100:
        raise FormatError(f"percentile {percentile!r}; expected a number above 0 and up to 100")
    planned = _for_method(plan(model, format, group_size, filter_fn, activation, embeddings), method, activation)
    with progress.line(f"calibrating by {method}") as say:
        calibration = _Calibration(model, list(batches), planned.jobs, method, percentile, say)
        calibration.observe()
        made, refused = calibration.quantised(sequential)
    for job, why in refused:
        if calibration.factors.concerns(job):
            raise FormatError(
                f"{job.names[0]} cannot be quantised with the factors that {method} gives it: {why}; take another "
                "format for it, or None"
            )
    skipped = [*planned.skipped, *(SkippedLayer(name, why) for job, why in refused for name in job.names)]
    layers = tuple(described(job, calibration.factors.scaled(job), weight) for job, weight in made)
    migrated = tuple(job.names[0] for job, _ in made if id(job.weight) in calibration.factors.columns)
    calibration.factors.divide(model)
    frozen = tuple(name for job, weight in made for name in replace_weight(job, weight))
    let_be_saved()
    return QuantizationReport(layers, tuple(skipped), frozen, planned.others, planned.unmatched, migrated)


class _Calibration:
    """Holds what is known of each weight. It leaves the model as it is."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        jobs: Sequence[Job],
        method: str,
        percentile: float,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.batches, self.jobs, self.method = model, batches, jobs, method
        self.percentile, self.say = percentile, say
        self.observed: dict[int, Observed] = {}
        self.factors = Factors()
        self.zeros: list[str] = []

    def observe(self) -> None:
        """Runs the batches, and observes what weights multiply.

        Raises:
            FormatError: there are no batches, or they reach no weight.
        """
        if not self.batches:
            raise FormatError("there is no batch to calibrate with")
        with Observer({job.names[0]: job.weight for job in self.jobs}) as observer:
            for number, batch in enumerate(self.batches, 1):
                run(self.model, batch)
                self.say(f"{number} of {len(self.batches)} batches")
                observer.forget()
        self.observed = observer.records
        unseen = [job.names[0] for job in self.jobs if not self.observed[id(job.weight)].rows]
        if len(unseen) == len(self.jobs):
            raise FormatError(
                f"the batches bring no rows to a product of {', '.join(unseen[:3]) or 'a weight'}: the model has to "
                "call F.linear in eager torch; kernels of functions that jitgen.jit decorates are not seen"
            )
        if unseen:
            warnings.warn(
                f"the batches do not reach {', '.join(unseen[:3])}{' and more' if len(unseen) > 3 else ''}: quantised "
                "without calibration",
                FallbackWarning,
                stacklevel=3,
            )
        if self.method in MIGRATING:
            self._migrate()

    def _migrate(self) -> None:
        """Finds the factors that move from activations to weights that can be quantised: others are left as they are,
        and so is whatever returns what they multiply."""
        seen = [job for job in self.jobs if self.observed[id(job.weight)].rows and _is_made(job)]
        parameters = {id(parameter): parameter for parameter in self.model.parameters()}
        migration = Migration(self.method, parameters, seen, self.observed, self._result)
        for number in migration.find():
            self.say(f"{number} norms and products asked for factors")
        self.factors = migration.factors
        if seen and not self.factors.columns and not self.factors.stored:
            warnings.warn(
                f"{self.method} moves nothing to weights: whatever returns an activation here is read by other "
                "operations too, or what lies between does not commute with factors of columns",
                FallbackWarning,
                stacklevel=4,
            )

    def _result(self, substitutes: Mapping[int, Substitute]) -> list[torch.Tensor]:
        """Returns the tensors of the model's result for the first batch."""
        with Run(substitutes):
            result = run(self.model, self.batches[0])
        return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def quantised(self, sequential: bool) -> tuple[list[tuple[Job, QTensor]], list[tuple[Job, str]]]:
        """Quantises all weights. Returns each with what it has become, and those for which a format is not made, with
        the reason."""
        made: dict[int, tuple[Job, QTensor]] = {}
        refused: list[tuple[Job, str]] = []
        substitutes: dict[int, Substitute] = {}
        for stage in self._stages(sequential) if self.method == "gptq" else [self.jobs]:
            sums = self._sums(stage, substitutes) if self.method == "gptq" else {}
            for job in stage:
                self.say(f"{len(made) + len(refused) + 1} of {len(self.jobs)} weights: {job.names[0]}")
                try:
                    weight = self._made(job, sums)
                except FormatError as error:
                    refused.append((job, str(error)))
                    continue
                made[id(job.weight)] = job, weight
                if self.method == "gptq":
                    substitutes[id(job.weight)] = _substitute(job, weight)
        if zeros := self.zeros:
            names = f"{', '.join(zeros[:3])}{' and more' if len(zeros) > 3 else ''}"
            warnings.warn(
                f"{self.method} finds no scale of what {names} multiply, which is 0 in the batches, or nearly all of "
                "it: each row has a scale of its own",
                FallbackWarning,
                stacklevel=3,
            )
        return [made[id(job.weight)] for job in self.jobs if id(job.weight) in made], refused

    def _stages(self, sequential: bool) -> list[list[Job]]:
        """Cuts the weights into those that one run of the batches is for, in the order of the model's calls."""
        ordered = sorted(self.jobs, key=lambda job: self.observed[id(job.weight)].first)
        shared: dict[int, list[Job]] = {}
        for job in ordered:
            shared.setdefault(self.observed[id(job.weight)].sharing, []).append(job)
        stages: list[list[Job]] = []
        left = 0
        for jobs in shared.values():
            left -= 4 * jobs[0].dense.shape[-1] ** 2
            if sequential or left < 0:
                stages.append([])
                left = PRODUCT_BYTES - 4 * jobs[0].dense.shape[-1] ** 2
            stages[-1] += jobs
        return stages

    def _sums(self, stage: Sequence[Job], substitutes: Mapping[int, Substitute]) -> Mapping[int, torch.Tensor]:
        """Runs the batches with what is quantised already, and sums x^T x of what the weights of ``stage`` multiply."""
        records = {id(job.weight): self.observed[id(job.weight)] for job in stage}
        squares = Squares(records, substitutes)
        for number, batch in enumerate(self.batches):
            if squares.begin(number):
                with squares:
                    run(self.model, batch)
        return squares.sums

    def _made(self, job: Job, sums: Mapping[int, torch.Tensor]) -> QTensor:
        """Quantises one weight."""
        observed, dense = self.observed[id(job.weight)], self.factors.scaled(job)
        if not observed.rows:
            return quantize(dense, job.row.name, job.group_size, activation=job.kind)
        if not observed.is_finite and self.method != "percentile":
            raise FormatError(
                "what the weight has multiplied in calibration is infinite or NaN, or its squares are: calibrate on "
                "batches whose activations are finite"
            )
        if self.method == "gptq":
            return with_feedback(dense, sums[observed.sharing], job.row, job.group_size, job.kind)
        importance = observed.mean_squares if self.method == "awq" else None
        factors = self.factors.stored.get(id(job.weight))
        dense = dense if factors is None else dense.detach().float() * factors
        made = quantize(dense, job.row.name, job.group_size, activation=job.kind, importance=importance)
        made = made if factors is None else made.with_smoothing(1 / factors)
        if made.dtype != job.weight.dtype:  # of a weight with factors, which is float32
            made = cast(QTensor, made.to(job.weight.dtype))
        if self.method not in STATIC or job.kind is None or kind_of(job.kind).block:
            return made
        assert observed.largest is not None
        most = float(observed.largest.max()) if self.method == "absmax" else observed.percentile(self.percentile)
        if not most:
            self.zeros.append(job.names[0])
            return made
        return made.with_input_scale(max(most / kind_of(job.kind).largest, SMALLEST_SCALE))


def _for_method(planned: Plan, method: str, activation: Activations) -> Plan:
    """Returns ``planned`` with the activations that ``method`` finds scales of, unless the user named one.

    Raises:
        FormatError: there is no weight to quantise, or none of a format of the method.
    """
    if not planned.jobs:
        raise FormatError(f"calibrate finds no weight to quantise: {_why_none(planned)}")
    if activation is None and method in STATIC:
        planned = replace(planned, jobs=tuple(_with_activation(job, method) for job in planned.jobs))
    reasons = [why_not(job.row) for job in planned.jobs] if method == "gptq" else [None]
    if reasons[0] is not None and all(reasons):
        raise FormatError(reasons[0])
    return planned


def _why_none(planned: Plan) -> str:
    """Returns why a plan has no weights: patterns that match no layer, and of layers why they stay as they are."""
    if not planned.skipped:
        return "the model has no layer that quantize_ takes, such as nn.Linear"
    more = f", and {len(planned.skipped) - 3} more" if len(planned.skipped) > 3 else ""
    patterns = [f"the pattern {pattern!r} matches no layer" for pattern in planned.unmatched]
    return "; ".join([*patterns, *(f"{layer.name}: {layer.reason}" for layer in planned.skipped[:3])]) + more


def _with_activation(job: Job, method: str) -> Job:
    """Returns ``job`` with the first kind of activations that its weight's codes are numbers of.

    Raises:
        FormatError: there is none.
    """
    for kind in ("int8", "fp8_e4m3"):
        with suppress(FormatError):
            return replace(job, kind=check_activation(kind, job.row, job.group_size))
    raise FormatError(
        f"{method} finds scales of activations, and not all codes of {job.row.name} are int8 or float8_e4m3fn, which "
        "products multiply; take another format or another method"
    )


def _is_made(job: Job) -> bool:
    """Returns whether the weight of ``job`` has its format at all: its columns may fit no blocks, its numbers no
    scales."""
    try:
        quantize(job.dense, job.row.name, job.group_size, method="absmax", activation=job.kind)
    except FormatError:
        return False
    return True


def _substitute(job: Job, made: QTensor) -> Substitute:
    """Returns what stands for the weight of ``job`` in the next runs."""
    dtype = job.weight.dtype

    def value() -> torch.Tensor:
        dense = made.dequantize(dtype)
        return dense.mT if job.transposed else dense

    return Substitute(value, made.activation, made.input_scale)
