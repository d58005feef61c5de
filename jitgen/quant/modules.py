"""``quantize_`` quantises the weight of every ``nn.Linear`` of a model in place, and reports what it did.

It works on one weight after another, and a weight's dense numbers are released as soon as it is quantised, so that
memory never holds the model twice.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from jitgen import progress
from jitgen.errors import FormatError
from jitgen.quant import layouts
from jitgen.quant.formats import Format, check_group_size, find
from jitgen.quant.qtensor import QTensor
from jitgen.quant.quantize import check_method, quantize, sqnr


@dataclass(frozen=True)
class QuantizedLayer:
    """One weight that was quantised.

    Attributes:
        names: the fully qualified names of the layers that use it; a tied weight has more than one.
        shape: (N, K).
        sqnr: the ratio of signal to quantisation noise, in dB.
        bytes_before, bytes_after: the size of the weight, in bytes.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    format: str
    group_size: int | None
    sqnr: float
    bytes_before: int
    bytes_after: int

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class SkippedLayer:
    """One Linear that was not quantised, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class QuantizationReport:
    """What ``quantize_`` did; ``str`` of it is a table.

    Attributes:
        layers, skipped: each weight that was quantised, and each Linear that was not.
        frozen_biases: the names of the biases of quantised layers that were trainable and are not any more.
    """

    layers: tuple[QuantizedLayer, ...]
    skipped: tuple[SkippedLayer, ...]
    frozen_biases: tuple[str, ...] = ()

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        rows = [("layer", "shape", "format", "SQNR", "bytes before", "after")]
        rows += [
            (
                " = ".join(layer.names),
                "x".join(map(str, layer.shape)),
                f"{layer.format} {f'g{layer.group_size}' if layer.group_size else 'per row'}",
                "exact" if math.isinf(layer.sqnr) else f"{layer.sqnr:.1f} dB",
                f"{layer.bytes_before:,}",
                f"{layer.bytes_after:,}",
            )
            for layer in self.layers
        ]
        rows.append((f"{len(self.layers)} weights", "", "", "", f"{self.bytes_before:,}", f"{self.bytes_after:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
        lines += [f"left as it was: {skip.name}: {skip.reason}" for skip in self.skipped]
        if self.frozen_biases:
            frozen = ", ".join(self.frozen_biases[:3]) + (", ..." if len(self.frozen_biases) > 3 else "")
            lines.append(
                f"no longer trainable: {len(self.frozen_biases)} biases ({frozen}); a layer with a trainable bias runs "
                "in torch, on the dequantised weight. trainable_bias=True leaves them as they are"
            )
        return "\n".join(lines)


def _aligned(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    """The cells of ``row``, each padded to its column's width; the first three columns are text, the others numbers."""
    for column, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield text.ljust(width) if column < 3 else text.rjust(width)


def quantize_(
    model: nn.Module,
    format: str | Mapping[str, str | tuple[str, int | None] | None],
    group_size: int | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    layout: str | None = None,
    method: str = "mse",
    trainable_bias: bool = False,
) -> QuantizationReport:
    """Quantise the weight of every ``nn.Linear`` of ``model`` in place. The model is called as before.

    Args:
        model: the weights of its Linears become Parameters that are ``QTensor``s and take no gradients. A weight that
            several Linears share is quantised once and remains shared. The biases of these Linears take no gradients
            either: a layer whose bias does runs in torch, on the dequantised weight.
        format, group_size, layout, method: the same arguments as those of ``jitgen.quantize``. ``format`` may be a
            mapping from patterns of fully qualified names (``fnmatch``: ``"*.down_proj"``) to a format, to (format,
            group size), or to None for layers that are left as they are. The first pattern that matches decides, and
            ``group_size`` is for those without one of their own. Layers that none matches are left as they are.
        filter_fn: ``(module, fully qualified name) -> bool`` selects the Linears to quantise; None selects all.
        trainable_bias: whether a bias that requires grad continues to.

    Returns:
        a report with the SQNR and the size of every weight, every Linear that was not quantised, with the reason, and
        the biases that are no longer trainable.

    Raises:
        FormatError: there is no such format, group size or method. UnsupportedError: there is no such layout. In either
            case the model is unchanged.
    """
    choices = _choices(format, group_size)
    check_method(method)
    layouts.find(layout or "portable")
    users = _users(model)
    wanted: dict[int, list[tuple[str, nn.Linear]]] = {}
    skipped: list[SkippedLayer] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        choice = _choice(choices, name)
        if filter_fn is not None and not filter_fn(module, name):
            reason: str | None = "filter_fn"
        else:
            reason = _obstacle(module, users) if choice is not None else "no pattern gives it a format"
        if reason is None:
            wanted.setdefault(id(module.weight), []).append((name, module))
        else:
            skipped.append(SkippedLayer(name, reason))
    layers: list[QuantizedLayer] = []
    frozen: list[str] = []
    with progress.line(f"quantising to {', '.join(sorted({row.name for _, row, _ in choices if row}))}") as say:
        for number, owners in enumerate(wanted.values(), 1):
            names = tuple(name for name, _ in owners)
            say(f"{number} of {len(wanted)} weights: {names[0]}")
            weight = owners[0][1].weight
            if len(owners) < len(users[id(weight)]):
                skipped += [SkippedLayer(name, "tied to a weight that filter_fn keeps") for name in names]
                continue
            chosen = {_choice(choices, name) for name in names}
            if len(chosen) > 1:
                reason = "tied to a weight to which another pattern gives another format"
                skipped += [SkippedLayer(name, reason) for name in names]
                continue
            ((row, group_size),) = (choice for choice in chosen if choice is not None)
            try:
                quantised = quantize(weight, row.name, group_size, layout=layout, method=method)
            except FormatError as error:
                skipped += [SkippedLayer(name, str(error)) for name in names]
                continue
            shape = (weight.shape[0], weight.shape[1])
            noise = sqnr(weight, quantised)
            layers.append(QuantizedLayer(names, shape, row.name, group_size, noise, weight.nbytes, quantised.nbytes))
            parameter = nn.Parameter(quantised, requires_grad=False)
            for name, module in owners:
                module.weight = parameter
                if module.bias is not None and module.bias.requires_grad and not trainable_bias:
                    module.bias.requires_grad_(False)
                    frozen.append(f"{name}.bias".lstrip("."))
    return QuantizationReport(tuple(layers), tuple(skipped), tuple(frozen))


def _choices(
    format: str | Mapping[str, str | tuple[str, int | None] | None], group_size: int | None
) -> list[tuple[str, Format | None, int | None]]:
    """(pattern, format or None, group size) in the order in which they are tried."""
    if isinstance(format, Mapping):
        given = [(key, value if isinstance(value, tuple) else (value, group_size)) for key, value in format.items()]
    else:
        given = [("*", (format, group_size))]
    found: list[tuple[str, Format | None, int | None]] = []
    for pattern, (name, group) in given:
        row = None if name is None else find(name)
        found.append((pattern, row, None if row is None else check_group_size(group, row)))
    return found


def _choice(choices: list[tuple[str, Format | None, int | None]], name: str) -> tuple[Format, int | None] | None:
    """The format and group size of the layer called ``name``; None where it is left as it is."""
    for pattern, row, group_size in choices:
        if fnmatch.fnmatchcase(name, pattern):
            return None if row is None else (row, group_size)
    return None


def _users(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """``id`` of a parameter -> the modules that have it, each with the parameter's name in the module."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((module, name))
    return users


def _obstacle(module: nn.Linear, users: dict[int, list[tuple[nn.Module, str]]]) -> str | None:
    """The reason why the weight of ``module`` cannot be quantised; None if it can."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is not a plain parameter (a parametrisation, or weight norm); remove that first"
    if isinstance(weight, QTensor):
        return f"quantised already, as {weight.format}"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight has no shape yet; run the model once first"
    if weight.device.type == "meta":
        return "its weight is on the meta device; load it first"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight itself"
    other = next((type(user).__name__ for user, name in users[id(weight)] if not _is_linear_weight(user, name)), None)
    if other is not None:
        return f"its weight is tied to that of a module of type {other}, which reads it itself"
    return None


def _is_linear_weight(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name == "weight"
