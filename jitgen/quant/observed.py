"""Records what the weights of a model multiply, while it runs on a calibration's batches in eager torch.

``F.linear`` and ``addmm`` are seen by a mode of torch, whatever module calls them. Products within a function that
``jitgen.jit`` decorates are not: its kernels run without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, resolve_name

SAMPLES = 1 << 16
"""Magnitudes that a weight keeps of each batch, of which percentiles are taken."""


@dataclass
class Observed:
    """Holds what one weight has multiplied.

    Attributes:
        rows: how many rows.
        largest: the largest magnitude of each column, [K].
        squares: the sum of squares of each column, [K].
        magnitudes: samples of |x|, one tensor for each call.
        products: the sum of x^T x, [K, K], if asked for.
        origin: the ids of the Parameters that the operation before has multiplied, and added: a norm's.
    """

    rows: int = 0
    largest: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    magnitudes: list[torch.Tensor] = field(default_factory=list)
    products: torch.Tensor | None = None
    origin: tuple[int, int | None] | None = None

    def add(self, x: torch.Tensor, with_products: bool) -> None:
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if not len(rows):
            return
        self.rows += len(rows)
        largest, squares = rows.abs().amax(0), rows.square().sum(0)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.squares = squares if self.squares is None else self.squares + squares
        flat = rows.abs().flatten()
        self.magnitudes.append(flat[:: max(1, len(flat) // SAMPLES)].cpu())
        if with_products:
            products = rows.T @ rows
            self.products = products if self.products is None else self.products.add_(products)

    @property
    def mean_squares(self) -> torch.Tensor:
        """Returns the mean square of each column, [K]."""
        assert self.squares is not None
        return self.squares / max(self.rows, 1)

    def percentile(self, percent: float) -> float:
        """Returns the magnitude that ``percent`` of the samples are below."""
        values = torch.cat(self.magnitudes).sort().values
        return float(values[min(len(values) - 1, int(len(values) * percent / 100))])


class Observer(TorchFunctionMode):
    """Records the products of ``weights`` within this context.

    Args:
        weights: Parameters by name.
        products: whether to sum x^T x.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], products: bool = False) -> None:
        super().__init__()
        self.records = {id(weight): Observed() for weight in weights.values()}
        self._kept, self._products = dict(weights), products
        self._scaled: dict[int, tuple[torch.Tensor, tuple[int, int | None]]] = {}
        """By the id of a tensor, and with it so that the id stays its own: the Parameters of the norm it is of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        operand = _operands(func, args, named)
        if operand is not None and id(operand[1]) in self.records:
            x, observed = operand[0], self.records[id(operand[1])]
            observed.add(x, self._products)
            known = self._scaled.get(id(x))
            observed.origin = known[1] if known is not None else None
        result = func(*args, **named)
        parameters = _scales(func, args, named)
        if parameters is not None and isinstance(result, torch.Tensor):
            self._scaled[id(result)] = result, parameters
        return result

    def forget(self) -> None:
        """Releases the tensors of a batch."""
        self._scaled.clear()


def _operands(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the activation and the weight of a product."""
    if func is F.linear:
        bound = dict(zip(("input", "weight"), args, strict=False)) | {key: named[key] for key in named if key != "bias"}
        return (bound["input"], bound["weight"]) if "weight" in bound else None
    if func in (torch.addmm, torch.Tensor.addmm) and len(args) == 3:
        return args[1], args[2]
    return None


def _scales(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """Returns the ids of the Parameters by which a norm multiplies and which it adds; None for other operations."""
    name = (resolve_name(func) or "").rpartition(".")[2]
    if func in (F.layer_norm, getattr(F, "rms_norm", None)):
        bound = dict(zip(("input", "shape", "weight", "bias"), args, strict=False)) | dict(named)
        weight, bias = bound.get("weight"), bound.get("bias") if func is F.layer_norm else None
        return None if weight is None else (id(weight), None if bias is None else id(bias))
    if name in ("mul", "__mul__", "__rmul__", "multiply"):
        ones = [value for value in args if isinstance(value, torch.nn.Parameter) and value.dim() == 1]
        return (id(ones[0]), None) if len(ones) == 1 else None
    return None


def run(model: Callable[..., Any], batches: Iterable[Any]) -> Iterable[int]:
    """Calls ``model`` with each batch, a tensor, a sequence of arguments or a mapping of them; yields how many."""
    for number, batch in enumerate(batches, 1):
        with torch.no_grad():
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, tuple | list):
                model(*batch)
            else:
                model(batch)
        yield number
