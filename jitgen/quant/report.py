"""Reports what ``quantize_`` and ``calibrate`` have done to a model; ``str`` of a report is a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


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
        migrated: the names of the weights whose columns have factors that their activations had.
    """

    layers: tuple[QuantizedLayer, ...]
    skipped: tuple[SkippedLayer, ...]
    frozen_biases: tuple[str, ...] = ()
    others: tuple[SkippedLayer, ...] = ()
    unmatched: tuple[str, ...] = ()
    migrated: tuple[str, ...] = ()

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
        if self.migrated:
            lines.append(f"factors of activations are in {len(self.migrated)} weights: {', '.join(self.migrated[:3])}")
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
