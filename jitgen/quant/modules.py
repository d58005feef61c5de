"""Quantises the weights of a model's layers in place with ``quantize_``, and reports what it did.

Layers are every ``nn.Linear``, transformers' ``Conv1D`` (GPT-2), the matrices of experts that a mixture of experts of a
known class has in one parameter of three dimensions (``experts.py``), and every ``nn.Embedding`` where that is asked
for. It works on one weight after another, and a weight's dense numbers are released as soon as it is quantised, so that
memory never holds the model twice.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from jitgen import progress
from jitgen.errors import FormatError
from jitgen.quant import layouts
from jitgen.quant.activations import check_activation
from jitgen.quant.experts import experts_of, rank
from jitgen.quant.formats import Format, check_group_size, find
from jitgen.quant.layers import QuantizedLinear
from jitgen.quant.qtensor import QTensor
from jitgen.quant.quantize import check_method, quantize, sqnr


@dataclass(frozen=True)
class QuantizedLayer:
    """Describes one weight that was quantised.

    Attributes:
        names: the fully qualified names of the layers that use it; a tied weight has more than one.
        shape: (N, K), or (experts, N, K).
        sqnr: the ratio of signal to quantisation noise, in dB.
        bytes_before, bytes_after: the size of the weight, in bytes.
        activation: how products quantise what they multiply with it; None where they leave it as it is.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    format: str
    group_size: int | None
    sqnr: float
    bytes_before: int
    bytes_after: int
    activation: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class SkippedLayer:
    """Describes one layer or parameter that was not quantised, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class QuantizationReport:
    """Reports what ``quantize_`` did; ``str`` of it is a table.

    Attributes:
        layers, skipped: each weight that was quantised, and each layer that was not.
        frozen_biases: the names of the biases of quantised layers that were trainable and are not any more.
        others: parameters of two and more dimensions that belong to no layer that is quantised.
        unmatched: the patterns of ``format`` and ``activation`` that match the name of no layer, such as one with a
            typing error.
    """

    layers: tuple[QuantizedLayer, ...]
    skipped: tuple[SkippedLayer, ...]
    frozen_biases: tuple[str, ...] = ()
    others: tuple[SkippedLayer, ...] = ()
    unmatched: tuple[str, ...] = ()

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
                f"{layer.format} {f'g{layer.group_size}' if layer.group_size else 'per row'}"
                + (f", activations {layer.activation}" if layer.activation else ""),
                "exact" if math.isinf(layer.sqnr) else f"{layer.sqnr:.1f} dB",
                f"{layer.bytes_before:,}",
                f"{layer.bytes_after:,}",
            )
            for layer in self.layers
        ]
        rows.append((f"{len(self.layers)} weights", "", "", "", f"{self.bytes_before:,}", f"{self.bytes_after:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
        lines += [f"left as it was: {skip.name}: {skip.reason}" for skip in (*self.skipped, *self.others)]
        lines += [f"the pattern {pattern!r} matches no layer" for pattern in self.unmatched]
        if self.frozen_biases:
            frozen = ", ".join(self.frozen_biases[:3]) + (", ..." if len(self.frozen_biases) > 3 else "")
            lines.append(
                f"no longer trainable: {len(self.frozen_biases)} biases ({frozen}); trainable_bias=True leaves them as "
                "they are, and a call of such a layer then records its gradients, some 100 us more on the host"
            )
        return "\n".join(lines)


def _aligned(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    """Yields the cells of ``row``, each padded to its column's width; the first three columns are text, the others
    numbers."""
    for column, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield text.ljust(width) if column < 3 else text.rjust(width)


@dataclass(frozen=True)
class _Layer:
    """Refers to a module whose weight is quantised.

    Attributes:
        name: what patterns and the report call it: the module's name, with that of the parameter for experts.
        leaf: the name of the parameter in the module.
        transposed: whether the module has its weight as (K, N).
    """

    name: str
    module: nn.Module
    leaf: str = "weight"
    transposed: bool = False

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.module._parameters[self.leaf]  # type: ignore[assignment]
        return weight


def quantize_(
    model: nn.Module,
    format: str | Mapping[str, str | tuple[str, int | None] | None],
    group_size: int | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    layout: str | None = None,
    method: str = "mse",
    activation: str | Mapping[str, str | None] | None = None,
    trainable_bias: bool = False,
    embeddings: bool = False,
    experts: str | Collection[str] = (),
) -> QuantizationReport:
    """Quantises the weights of ``model``'s layers in place. The model is called as before.

    Args:
        model: the weights of its Linears, ``Conv1D``s and experts become Parameters that are ``QTensor``s and take no
            gradients. A weight that several of them share is quantised once and remains shared. Their biases take no
            gradients either, so that a call records none: that takes some 100 us more on the host.
        format, group_size, layout, method: the same arguments as those of ``jitgen.quantize``. ``format`` may be a
            mapping from patterns of fully qualified names (``fnmatch``: ``"*.down_proj"``) to a format, to (format,
            group size), or to None for layers that are left as they are. The first pattern that matches decides, and
            ``group_size`` is for those without one of their own. Layers that none matches are left as they are.
        filter_fn: ``(module, fully qualified name) -> bool`` selects the layers to quantise; None selects all.
        activation: the same argument as that of ``jitgen.quantize``, or a mapping from patterns to it; layers that no
            pattern matches leave activations as they are.
        trainable_bias: whether a bias that requires grad continues to.
        embeddings: whether ``nn.Embedding``s are quantised too; one whose weight is also a Linear's shares its codes.
            Where not, a Linear whose weight is an embedding's is left as it is.
        experts: patterns of the fully qualified names of further parameters of three dimensions that are experts, in
            classes that are not known (``quant/experts.py``). Such a class uses them as ``w[i]`` in a product, in
            ``bmm`` or in ``grouped_mm``, and says by an attribute ``is_transposed`` whether ``w[i]`` is (K, N).

    Returns:
        a report with the SQNR and the size of every weight, everything of two or more dimensions that was not
        quantised, with the reason, the biases that are no longer trainable, and the patterns that match no layer.

    Raises:
        FormatError: there is no such format, group size, method or activation, a layer's format has no kernels for its
            activation, or ``model`` is no module. UnsupportedError: there is no such layout. In either case the model
            is unchanged.
    """
    make = partial(_quantized, layout=layout, method=method)
    check_method(method)
    layouts.find(layout or "portable")
    return quantize_layers(
        model,
        format,
        group_size,
        filter_fn,
        make=make,
        activation=activation,
        trainable_bias=trainable_bias,
        embeddings=embeddings,
        experts=experts,
    )


Make = Callable[[torch.Tensor, torch.Tensor, Format, int | None, str | None], QTensor]
"""Quantises a weight: its Parameter, the dense (N, K), format, group size and kind of activations."""


def _quantized(
    parameter: torch.Tensor,
    dense: torch.Tensor,
    row: Format,
    group_size: int | None,
    kind: str | None,
    *,
    layout: str | None,
    method: str,
) -> QTensor:
    return quantize(dense, row.name, group_size, layout=layout, method=method, activation=kind)


def quantize_layers(
    model: nn.Module,
    format: str | Mapping[str, str | tuple[str, int | None] | None],
    group_size: int | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    *,
    make: Make,
    activation: str | Mapping[str, str | None] | None = None,
    trainable_bias: bool = False,
    embeddings: bool = False,
    experts: str | Collection[str] = (),
    prepare: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> QuantizationReport:
    """Quantises the weights of ``model`` as ``quantize_`` does, each by ``make``. ``prepare`` is called before anything
    changes with the Parameters that will be, by the names of their layers."""
    if not isinstance(model, nn.Module):
        raise FormatError(
            f"quantize_ takes a torch.nn.Module, not {type(model).__name__}; jitgen.quantize makes a weight of a tensor"
        )
    choices, activations = _choices(format, group_size), _activations(activation)
    users = _users(model)
    candidates = list(_layers(model, embeddings, (experts,) if isinstance(experts, str) else experts))
    taken = {(id(layer.module), layer.leaf) for layer in candidates}
    wanted: dict[int, list[_Layer]] = {}
    skipped: list[SkippedLayer] = []
    for layer in candidates:
        choice = _choice(choices, layer.name)
        if filter_fn is not None and not filter_fn(layer.module, layer.name):
            reason: str | None = "filter_fn"
        else:
            reason = _obstacle(layer, users, taken) if choice is not None else "no pattern gives it a format"
        if reason is None:
            wanted.setdefault(id(layer.weight), []).append(layer)
            assert choice is not None
            check_activation(_activation(activations, layer.name), *choice)
        else:
            skipped.append(SkippedLayer(layer.name, reason))
    if prepare is not None:
        prepare({owners[0].name: owners[0].weight for owners in wanted.values()})
    layers: list[QuantizedLayer] = []
    frozen: list[str] = []
    with progress.line(f"quantising to {', '.join(sorted({row.name for _, row, _ in choices if row}))}") as say:
        for number, owners in enumerate(wanted.values(), 1):
            names = tuple(layer.name for layer in owners)
            say(f"{number} of {len(wanted)} weights: {names[0]}")
            weight = owners[0].weight
            if len(owners) < len(users[id(weight)]):
                kept = "filter_fn keeps" if filter_fn is not None else "has another use, which stays as it is"
                skipped += [SkippedLayer(name, f"tied to a weight that {kept}") for name in names]
                continue
            chosen = {_choice(choices, name) for name in names}
            quantised_by = {_activation(activations, name) for name in names}
            if len(chosen) > 1 or len(quantised_by) > 1:
                what = "format" if len(chosen) > 1 else "activation"
                reason = f"tied to a weight to which another pattern gives another {what}"
                skipped += [SkippedLayer(name, reason) for name in names]
                continue
            ((row, group_size),) = (choice for choice in chosen if choice is not None)
            (kind,) = quantised_by
            transposed = owners[0].transposed
            dense = weight.mT if transposed else weight
            try:
                quantised = make(weight, dense, row, group_size, kind)
            except FormatError as error:
                skipped += [SkippedLayer(name, str(error)) for name in names]
                continue
            noise = sqnr(dense, quantised)
            size = weight.nbytes, quantised.nbytes
            made = quantised.format
            layers.append(
                QuantizedLayer(names, tuple(dense.shape), made, group_size, noise, *size, quantised.activation)
            )
            parameter = nn.Parameter(quantised.mT if transposed else quantised, requires_grad=False)
            for layer in owners:
                setattr(layer.module, layer.leaf, parameter)
                QuantizedLinear.convert(layer.module)
                if not trainable_bias and freeze_bias(layer.module):
                    frozen.append(f"{layer.name}.bias".lstrip("."))
    return QuantizationReport(
        tuple(layers),
        tuple(skipped),
        tuple(frozen),
        tuple(_others(model, taken, embeddings)),
        (*_unmatched(format, candidates), *_unmatched(activation, candidates)),
    )


def _unmatched(choice: str | Mapping[str, Any] | None, layers: Sequence[_Layer]) -> tuple[str, ...]:
    """Returns the patterns of a mapping that match no layer's name."""
    patterns = choice if isinstance(choice, Mapping) else ()
    return tuple(
        pattern for pattern in patterns if not any(fnmatch.fnmatchcase(layer.name, pattern) for layer in layers)
    )


def _layers(model: nn.Module, embeddings: bool, experts: Collection[str]) -> Iterator[_Layer]:
    """Yields the layers that ``quantize_`` knows, in the order of the model."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear) or (embeddings and type(module) is nn.Embedding):
            yield _Layer(name, module)
        elif kind == "Conv1D" and not isinstance(module, nn.Conv1d) and rank(module, "weight") == 2:
            yield _Layer(name, module, transposed=True)
        else:
            for leaf, transposed in experts_of(module, name, experts).items():
                yield _Layer(f"{name}.{leaf}".lstrip("."), module, leaf, transposed)


def _others(model: nn.Module, taken: set[tuple[int, str]], embeddings: bool) -> Iterator[SkippedLayer]:
    """Yields parameters of two and more dimensions in modules that are no layers to ``quantize_``."""
    for name, module in model.named_modules():
        for leaf in module._parameters:
            if (id(module), leaf) not in taken and rank(module, leaf) >= 2:
                reason = f"a parameter of {type(module).__name__}"
                if isinstance(module, nn.Embedding):
                    reason += ", which embeddings=True quantises" if not embeddings else ", which reads it itself"
                elif rank(module, leaf) == 3:
                    reason += ", which experts=... quantises where it is used as w[i] alone"
                yield SkippedLayer(f"{name}.{leaf}".lstrip("."), reason)


def _choices(
    format: str | Mapping[str, str | tuple[str, int | None] | None], group_size: int | None
) -> list[tuple[str, Format | None, int | None]]:
    """Lists (pattern, format or None, group size) in the order in which they are tried."""
    if isinstance(format, Mapping):
        stated = [(key, value if isinstance(value, tuple) else (value, group_size)) for key, value in format.items()]
    else:
        stated = [("*", (format, group_size))]
    choices: list[tuple[str, Format | None, int | None]] = []
    for pattern, (name, group) in stated:
        row = None if name is None else find(name)
        choices.append((pattern, row, None if row is None else check_group_size(group, row)))
    return choices


def _choice(choices: list[tuple[str, Format | None, int | None]], name: str) -> tuple[Format, int | None] | None:
    """Returns the format and group size of the layer called ``name``; None if it is left as it is."""
    for pattern, row, group_size in choices:
        if fnmatch.fnmatchcase(name, pattern):
            return None if row is None else (row, group_size)
    return None


def _activations(activation: str | Mapping[str, str | None] | None) -> list[tuple[str, str | None]]:
    """Lists (pattern, kind of activation or None) in the order in which they are tried."""
    return list(activation.items()) if isinstance(activation, Mapping) else [("*", activation)]


def _activation(activations: list[tuple[str, str | None]], name: str) -> str | None:
    """Returns how the layer called ``name`` quantises its activation."""
    return next((kind for pattern, kind in activations if fnmatch.fnmatchcase(name, pattern)), None)


def freeze_bias(module: nn.Module) -> bool:
    """Makes the bias of a quantised layer untrainable; returns whether it was trainable."""
    bias = module._parameters.get("bias")
    if bias is None or not bias.requires_grad:
        return False
    bias.requires_grad_(False)
    return True


def _users(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Maps the ``id`` of a parameter to the modules that have it, each with the parameter's name there."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((module, name))
    return users


def _obstacle(layer: _Layer, users: dict[int, list[tuple[nn.Module, str]]], taken: set[tuple[int, str]]) -> str | None:
    """Returns the reason why the weight of ``layer`` cannot be quantised; None if it can."""
    weight = layer.module._parameters.get(layer.leaf)
    if weight is None:
        return "its weight is not a plain parameter (a parametrisation, or weight norm); remove that first"
    if isinstance(weight, QTensor):
        return f"quantised already, as {weight.format}"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight has no shape yet; run the model once first"
    if weight.device.type == "meta":
        return "its weight is on the meta device; load it first"
    if isinstance(layer.module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight itself"
    if isinstance(layer.module, nn.Embedding) and layer.module.max_norm is not None:
        return "its max_norm changes the weight"
    others = [type(user).__name__ for user, name in users[id(weight)] if (id(user), name) not in taken]
    if others:
        remedy = "; embeddings=True quantises both" if others[0] == "Embedding" else ""
        return f"its weight is tied to that of a module of type {others[0]}, which reads it itself{remedy}"
    return None
