"""Records what the weights of a model multiply while it runs on batches of a calibration in eager torch, and can
replace some of its Parameters for the run.

``F.linear`` and ``addmm`` are seen by a mode of torch, whatever module calls them. Products within a function that
``jitgen.jit`` decorates are not: its kernels run without torch. The model itself is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from jitgen.quant.activations import quantized

SAMPLES = 1 << 16
"""Magnitudes that a weight keeps of each batch, of which percentiles are taken."""
SAMPLED_ROWS, SAMPLED_CALLS = 32, 4
"""Rows of an activation that a weight keeps of each of its first calls, with which products are tried."""
CANDIDATES = 4
"""Products before one that are asked whether it multiplies what they return, where that is no norm's result."""


@dataclass(frozen=True)
class Source:
    """Identifies the Parameters of a norm or of a Linear, which returned an activation.

    Attributes:
        weight, bias: their ids.
        is_linear: whether the weight is a matrix, whose rows are the columns of the result.
    """

    weight: int
    bias: int | None
    is_linear: bool = False


@dataclass
class Observed:
    """Holds what one weight has multiplied.

    Attributes:
        rows: how many rows.
        calls: how often it was called in each batch, by the number of the batch.
        first: the number of products of the run before its first one.
        largest: the largest magnitude of each column, [K].
        squares: the sum of squares of each column, [K].
        magnitudes: samples of |x|, one tensor for each call.
        samples: some rows of the first calls, in the dtype of the activation.
        products: the sum of x^T x, [K, K], if asked for.
        sharing: the id of the first weight in the model's order that multiplies the same tensors.
        sources: what may have returned what it multiplies, the likeliest first.
        bias: the id of what it adds.
    """

    rows: int = 0
    calls: dict[int, int] = field(default_factory=dict)
    first: int = 0
    largest: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    magnitudes: list[torch.Tensor] = field(default_factory=list)
    samples: list[torch.Tensor] = field(default_factory=list)
    products: torch.Tensor | None = None
    sharing: int = 0
    sources: tuple[Source, ...] = ()
    bias: int | None = None

    def add(self, x: torch.Tensor) -> None:
        """Adds what is known of each column of ``x`` (..., K)."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if not len(rows):
            return
        if len(self.samples) < SAMPLED_CALLS:
            self.samples.append(rows[:: -(-len(rows) // SAMPLED_ROWS)].clone())
        rows = rows.float()
        self.rows += len(rows)
        largest, squares = rows.abs().amax(0), rows.square().sum(0)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.squares = squares if self.squares is None else self.squares + squares
        flat = rows.abs().flatten()
        self.magnitudes.append(flat[:: max(1, len(flat) // SAMPLES)].cpu())

    @property
    def is_finite(self) -> bool:
        """Returns whether no activation was infinite or NaN, nor are sums of their squares."""
        return self.squares is None or bool(self.squares.isfinite().all())

    @property
    def mean_squares(self) -> torch.Tensor:
        """Returns the mean square of each column, [K]."""
        assert self.squares is not None
        return self.squares / max(self.rows, 1)

    def percentile(self, percent: float) -> float:
        """Returns the magnitude that ``percent`` of the samples are below."""
        values = torch.cat(self.magnitudes).sort().values
        return float(values[min(len(values) - 1, int(len(values) * percent / 100))])


@dataclass(frozen=True)
class Substitute:
    """Takes the place of a Parameter.

    Attributes:
        value: makes the tensor that is read instead of it.
        activation, input_scale: how what it multiplies is quantised.
    """

    value: Callable[[], torch.Tensor]
    activation: str | None = None
    input_scale: torch.Tensor | None = None

    def multiplied(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` as its products have it."""
        return x if self.activation is None else quantized(x, self.activation, self.input_scale).to(x.dtype)


class Enough(BaseException):
    """Ends a run of the model that has met every product asked for."""


class Run(TorchFunctionMode):
    """Runs a model with ``substitutes`` for Parameters, by their ids, within this context."""

    def __init__(self, substitutes: Mapping[int, Substitute]) -> None:
        super().__init__()
        self.substitutes = substitutes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.computed(func, args, kwargs or {})

    def computed(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Calls ``func``, with the substitutes of its arguments."""
        if not any(id(value) in self.substitutes for value in (*args, *named.values())):
            return func(*args, **named)
        operand = _operands(func, args, named)
        x, weight = operand if operand is not None else (None, None)
        substitute = self.substitutes.get(id(weight))

        def replaced(value: Any) -> Any:
            if value is x and x is not None and substitute is not None:
                return substitute.multiplied(x)
            known = self.substitutes.get(id(value))
            return value if known is None else known.value()

        return func(*map(replaced, args), **{name: replaced(value) for name, value in named.items()})


class Observer(Run):
    """Records the products of ``weights``, Parameters by name, within this context."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__({})
        self.records = {id(weight): Observed() for weight in weights.values()}
        self._kept = dict(weights)
        self._batch, self._count = 0, 0
        self._scaled: dict[int, tuple[torch.Tensor, Source]] = {}
        """By the id of a tensor, and with it so that the id stays its own: what has returned it."""
        self._readers: dict[int, tuple[torch.Tensor, int]] = {}
        """By the id of a tensor, and with it, the id of the first weight that multiplies it."""
        self._linears: list[Source] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        operand = _operands(func, args, named)
        if operand is not None and id(operand[1]) in self.records:
            self._observe(*operand, _bias(func, args, named))
        result = self.computed(func, args, named)
        source = _scales(func, args, named)
        if source is not None and isinstance(result, torch.Tensor):
            self._scaled[id(result)] = result, source
        return result

    def _observe(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        observed = self.records[id(weight)]
        if not observed.calls:
            observed.first, observed.sharing = self._count, self._readers.setdefault(id(x), (x, id(weight)))[1]
            observed.bias = None if bias is None else id(bias)
            norm = self._scaled.get(id(x))
            observed.sources = (norm[1],) if norm is not None else tuple(self._linears[: -CANDIDATES - 1 : -1])
        self._count += 1
        observed.calls[self._batch] = observed.calls.get(self._batch, 0) + 1
        observed.add(x)
        self._linears.append(Source(id(weight), observed.bias, is_linear=True))

    def forget(self) -> None:
        """Releases the tensors of a batch."""
        self._batch += 1
        self._scaled.clear()
        self._readers.clear()
        self._linears.clear()


class Squares(Run):
    """Sums x^T x of what ``weights`` multiply, in float32, by the id of the first of those that multiply the same.

    Args:
        records: of these weights, as an ``Observer`` of the same batches has them.
    """

    def __init__(self, records: Mapping[int, Observed], substitutes: Mapping[int, Substitute]) -> None:
        super().__init__(substitutes)
        self.sums: dict[int, torch.Tensor] = {}
        self._records = records
        self._left = 0

    def begin(self, batch: int) -> bool:
        """Begins a batch; returns whether it has any of the products."""
        self._left = sum(record.calls.get(batch, 0) for record in self._records.values())
        return self._left > 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        operand = _operands(func, args, named)
        record = None if operand is None else self._records.get(id(operand[1]))
        if operand is not None and record is not None:
            if id(operand[1]) == record.sharing:
                self._add(operand[0], record.sharing, self.substitutes.get(id(operand[1])))
            self._left -= 1
            if not self._left:
                raise Enough
        return self.computed(func, args, named)

    def _add(self, x: torch.Tensor, key: int, substitute: Substitute | None) -> None:
        rows = (x if substitute is None else substitute.multiplied(x)).detach().reshape(-1, x.shape[-1]).float()
        if len(rows):
            products = rows.T @ rows
            self.sums[key] = self.sums[key].add_(products) if key in self.sums else products


def _operands(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the activation and the weight of a product."""
    if func is F.linear:
        bound = dict(zip(("input", "weight"), args, strict=False)) | {key: named[key] for key in named if key != "bias"}
        return (bound["input"], bound["weight"]) if "weight" in bound else None
    if func in (torch.addmm, torch.Tensor.addmm) and len(args) == 3:
        return args[1], args[2]
    return None


def _bias(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns what a product adds."""
    if func is F.linear:
        bias = named.get("bias", args[2] if len(args) > 2 else None)
        return bias if isinstance(bias, torch.Tensor) else None
    return args[0] if isinstance(args[0], torch.Tensor) else None


def _scales(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Source | None:
    """Returns the Parameters by which a norm multiplies and which it adds; None for other operations."""
    name = (resolve_name(func) or "").rpartition(".")[2]
    if func in (F.layer_norm, getattr(F, "rms_norm", None)):
        bound = dict(zip(("input", "shape", "weight", "bias"), args, strict=False)) | dict(named)
        weight, bias = bound.get("weight"), bound.get("bias") if func is F.layer_norm else None
        return None if weight is None else Source(id(weight), None if bias is None else id(bias))
    if name in ("mul", "__mul__", "__rmul__", "multiply"):
        ones = [value for value in args if isinstance(value, torch.nn.Parameter) and value.dim() == 1]
        return Source(id(ones[0]), None) if len(ones) == 1 else None
    return None


def run(model: torch.nn.Module, batch: Any) -> Any:
    """Returns what ``model`` computes of ``batch``: a tensor, a sequence of arguments or a mapping of them; in the mode
    of evaluation, and without gradients. None where a mode has seen ``Enough``."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(batch, Mapping):
                return model(**batch)
            return model(*batch) if isinstance(batch, tuple | list) else model(batch)
    except Enough:
        return None
    finally:
        for module in training:
            module.training = True
