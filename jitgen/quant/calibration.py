"""Quantises a model by what it computes on some batches: ``jitgen.calibrate``.

Methods:

``"absmax"``, ``"percentile"``
    find one scale for the activations of each weight, which is stored with it: the largest magnitude over the largest
    code, or that which a percentage of magnitudes is below.
``"smoothquant"``
    divides columns of activations with large numbers, and multiplies the weights' (Xiao et al., "SmoothQuant"). The
    factors go into the weight of the norm before, where nothing but products reads what it returns: the model is run
    with them once, and keeps them where its result stays the same. Scales of activations are found at each call.
``"awq"``
    is the same with factors that minimise the error of each product, and scales of weights found by errors weighted
    with the mean squares of activations (Lin et al., "AWQ").
``"gptq"``
    quantises weights column by column, and moves what is lost to later columns (``feedback.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from jitgen import progress
from jitgen.errors import FallbackWarning, FormatError
from jitgen.quant.activations import ACTIVATIONS, SMALLEST_SCALE
from jitgen.quant.feedback import with_feedback
from jitgen.quant.formats import Format
from jitgen.quant.modules import QuantizationReport, quantize_layers
from jitgen.quant.observed import Observed, Observer, run
from jitgen.quant.qtensor import QTensor
from jitgen.quant.quantize import quantize

METHODS = ("absmax", "percentile", "smoothquant", "awq", "gptq")
STATIC = ("absmax", "percentile")
"""Methods that find scales of activations."""
MIGRATION = 0.5
"""SmoothQuant's alpha: how much of the range of activations goes to weights."""
EXPONENTS = tuple(step / 10 for step in range(10))
"""The powers of activations' magnitudes that AWQ's factors are tried with."""
SAME = 1e-3
"""The largest difference of a model's result, relative to its norm, with factors that change nothing but roundings."""
PRODUCT_BYTES = 1 << 30
"""Memory for sums of x^T x; weights for which it is not enough are observed in further runs of the batches."""


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = "absmax",
    *,
    format: str | Mapping[str, str | tuple[str, int | None] | None] = "int8",
    group_size: int | None = None,
    activation: str | Mapping[str, str | None] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    percentile: float = 99.9,
    embeddings: bool = False,
) -> QuantizationReport:
    """Quantises ``model`` in place by what it computes on ``batches``; the result is as that of ``quantize_``.

    Args:
        model: runs in eager torch; products in functions that ``jitgen.jit`` decorates are not seen.
        batches: what the model is called with: tensors, sequences of arguments, or mappings of them.
        method: ``"absmax"``, ``"percentile"``, ``"smoothquant"``, ``"awq"`` or ``"gptq"`` (this module's docstring).
        format, group_size, filter_fn, embeddings: as of ``quantize_``.
        activation: as of ``quantize_``; by default ``"int8"`` for the methods that find scales of activations.
        percentile: of ``"percentile"``, in percent.

    Returns:
        the report of ``quantize_``.

    Raises:
        FormatError: there is no such method, no batch, or none of the weights is seen. The model is then unchanged.
    """
    if method not in METHODS:
        raise FormatError(f"unknown method {method!r}; expected one of {', '.join(map(repr, METHODS))}")
    if not 0 < percentile <= 100:
        raise FormatError(f"percentile {percentile!r}; expected a number above 0 and up to 100")
    kinds = "int8" if activation is None and method in STATIC else activation
    calibration = _Calibration(model, list(batches), method, percentile)
    with progress.line(f"calibrating by {method}") as say:
        calibration.say = say
        return quantize_layers(
            model,
            format,
            group_size,
            filter_fn,
            make=calibration.make,
            activation=kinds,
            embeddings=embeddings,
            prepare=calibration.observe,
        )


class _Calibration:
    """Holds what is known of each weight."""

    def __init__(self, model: nn.Module, batches: list[Any], method: str, percentile: float) -> None:
        self.model, self.batches, self.method, self.percentile = model, batches, method, percentile
        self.say: Callable[[str], None] = lambda text: None
        self._observed: dict[int, Observed] = {}
        self._waiting: dict[str, torch.Tensor] = {}

    def observe(self, weights: dict[str, torch.Tensor]) -> None:
        """Runs the batches, and observes what ``weights`` multiply.

        Raises:
            FormatError: there are no batches, or they reach no weight.
        """
        if not self.batches:
            raise FormatError("there is no batch to calibrate with")
        self._run(weights if self.method != "gptq" else self._next(weights))
        unseen = [name for name, weight in weights.items() if id(weight) in self._observed and not self._rows(weight)]
        if len(unseen) == len(weights) - len(self._waiting):
            raise FormatError(
                f"the batches reach no product of {', '.join(unseen[:3]) or 'a weight'}: the model has to call "
                "F.linear in eager torch; kernels of functions that jitgen.jit decorates are not seen"
            )
        if unseen:
            warnings.warn(
                f"the batches do not reach {', '.join(unseen[:3])}{' and more' if len(unseen) > 3 else ''}: quantised "
                "without calibration",
                FallbackWarning,
                stacklevel=5,
            )
        if self.method in ("smoothquant", "awq"):
            self._migrate(weights)

    def _rows(self, weight: torch.Tensor) -> int:
        return self._observed[id(weight)].rows

    def _next(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Takes as many of ``weights`` as the memory for their sums is enough for; the others wait."""
        taken, size = dict[str, torch.Tensor](), 0
        for name, weight in weights.items():
            size += 4 * max(weight.shape) ** 2
            if taken and size > PRODUCT_BYTES:
                break
            taken[name] = weight
        self._waiting = {name: weight for name, weight in weights.items() if name not in taken}
        return taken

    def _run(self, weights: Mapping[str, torch.Tensor]) -> None:
        training = self.model.training
        self.model.eval()
        try:
            with Observer(weights, self.method == "gptq") as observer:
                for number in run(self.model, self.batches):
                    self.say(f"{number} of {len(self.batches)} batches")
                    observer.forget()
        finally:
            self.model.train(training)
        self._observed |= observer.records

    def make(
        self, parameter: torch.Tensor, dense: torch.Tensor, row: Format, group_size: int | None, kind: str | None
    ) -> QTensor:
        """Quantises a weight; see ``modules.Make``."""
        if id(parameter) not in self._observed:
            self._run(self._next(self._waiting))
        observed = self._observed.pop(id(parameter))
        if not observed.rows:
            return quantize(dense, row.name, group_size, activation=kind)
        if self.method == "gptq":
            assert observed.products is not None
            return with_feedback(dense, observed.products, row, group_size, kind)
        importance = observed.mean_squares if self.method == "awq" else None
        made = quantize(dense, row.name, group_size, activation=kind, importance=importance)
        if self.method not in STATIC or kind is None or ACTIVATIONS[kind].block:
            return made
        assert observed.largest is not None
        most = float(observed.largest.max()) if self.method == "absmax" else observed.percentile(self.percentile)
        return made.with_input_scale(max(most / ACTIVATIONS[kind].largest, SMALLEST_SCALE))

    # ------------------------------------------------------------------------------------------------------- migration

    def _migrate(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Moves factors from activations to weights, norm by norm, where the model's result stays the same."""
        parameters = {id(parameter): parameter for parameter in self.model.parameters()}
        readers: dict[tuple[int, int | None], list[torch.Tensor]] = {}
        for weight in weights.values():
            origin = self._observed[id(weight)].origin
            if origin is not None and origin[0] in parameters and (origin[1] is None or origin[1] in parameters):
                readers.setdefault(origin, []).append(weight)
        expected = self._result()
        for number, (origin, products) in enumerate(readers.items(), 1):
            self.say(f"{number} of {len(readers)} norms")
            of_norm: list[torch.Tensor] = [parameters[key] for key in origin if key is not None]
            if any(product.shape[-1] != of_norm[0].shape[0] for product in products):
                continue
            factors = self._factors(products)
            kept = [tensor.detach().clone() for tensor in (*of_norm, *products)]
            with torch.no_grad():
                for tensor in of_norm:
                    tensor.div_(factors.to(tensor.dtype))
                for product in products:
                    product.mul_(factors.to(product.dtype))
                if _distance(self._result(), expected) <= SAME:
                    self._move(products, factors)
                    continue
                for tensor, before in zip((*of_norm, *products), kept, strict=True):
                    tensor.copy_(before)

    def _move(self, products: list[torch.Tensor], factors: torch.Tensor) -> None:
        for product in products:
            observed = self._observed[id(product)]
            assert observed.largest is not None
            assert observed.squares is not None
            observed.largest, observed.squares = observed.largest / factors, observed.squares / factors.square()

    def _factors(self, products: list[torch.Tensor]) -> torch.Tensor:
        """Returns the factor of each column: of SmoothQuant, or the one of AWQ with the least error."""
        observed = [self._observed[id(product)] for product in products]
        largest = torch.stack([one.largest for one in observed if one.largest is not None]).amax(0).clamp(min=1e-5)
        weight = torch.cat([product.detach().float() for product in products])
        if self.method == "smoothquant":
            other = weight.abs().amax(0).clamp(min=1e-5)
            return (largest**MIGRATION / other ** (1 - MIGRATION)).clamp(min=1e-2, max=1e2)
        squares = torch.stack([one.mean_squares for one in observed]).mean(0)
        best, least = torch.ones_like(largest), None
        for exponent in EXPONENTS:
            factors = squares.sqrt().clamp(min=1e-4) ** exponent
            factors = (factors / (factors.max() * factors.min()).sqrt()).clamp(min=1e-2, max=1e2)
            rounded = quantize(weight * factors, "int4", 32 if weight.shape[1] >= 32 else None, method="absmax")
            error = ((rounded.dequantize(torch.float32) / factors - weight).square() * squares).sum()
            if least is None or error < least:
                best, least = factors, error
        return best

    def _result(self) -> list[torch.Tensor]:
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            batch = self.batches[0]
            if isinstance(batch, Mapping):
                result = self.model(**batch)
            else:
                result = self.model(*batch) if isinstance(batch, tuple | list) else self.model(batch)
        self.model.train(training)
        return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Returns the largest difference of two results, relative to the norm of the second; infinity for NaN."""
    pairs = [(one.float(), other.float()) for one, other in zip(ours, theirs, strict=True) if one.is_floating_point()]
    worst = max(((float((a - b).norm() / b.norm().clamp(min=1e-30))) for a, b in pairs), default=0.0)
    return worst if worst == worst else float("inf")
