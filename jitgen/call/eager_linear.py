"""Runs ``F.linear`` with a quantised weight in eager torch as a generated kernel (``quant/eager.py`` says when).

Elsewhere it runs in torch, on the dequantised weight, which is counted, told once, and an error in strict mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from jitgen import console, settings
from jitgen.call.function import JitFunction
from jitgen.call.specialization import Specialization
from jitgen.errors import FallbackWarning, UnsupportedError
from jitgen.quant.eager import kernels


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def _linear_with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _embedding(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(indices, weight)


def _grouped(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, weight, offs)


@dataclass
class Fallback:
    """Counts the products with quantised weights that ran in torch, on the dequantised weight, for one reason.

    Attributes:
        reason: why jitgen could not run a kernel.
        remedy: what to do about it.
        calls: how often; under torch.compile, how often the call was compiled.
        kernels: none.
    """

    reason: str
    remedy: str
    calls: int = 0
    kernels: tuple[()] = ()


class QuantizedProducts:
    """Computes ``(x, weight, bias=None) -> y`` for ``F.linear`` with a quantised weight outside ``jitgen.jit``."""

    def __init__(self) -> None:
        self.embedding, self.grouped = JitFunction(_embedding), JitFunction(_grouped)
        self.plain, self.biased = JitFunction(_linear), JitFunction(_linear_with_bias)
        self._fallbacks: dict[str, Fallback] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def __repr__(self) -> str:
        return "<jitgen.quantized_linear>"

    @property
    def specializations(self) -> tuple[Specialization | Fallback, ...]:
        """Lists what this process has resolved, and then why calls ran in torch, and how many."""
        of_kernels = (made for kernel in (self.plain, self.biased, self.grouped) for made in kernel.specializations)
        return (*of_kernels, *self._fallbacks.values())

    def layout_of(self, weight: Any) -> str:
        """Returns the layout in which its kernels read ``weight``."""
        return self.plain.layout_of(weight)

    def note_fallback(self, reason: str, remedy: str) -> None:
        """Counts a product that runs in torch.

        Raises:
            UnsupportedError: in strict mode, which is for processes that must run generated kernels alone.
        """
        text = f"a product with a quantised weight runs in torch, on the dequantised weight: {reason}; {remedy}"
        if settings.is_strict():
            raise UnsupportedError(f"{text} (strict mode allows no product without a generated kernel)")
        fallback = self._fallbacks.setdefault(reason, Fallback(reason, remedy))
        fallback.calls += 1
        if fallback.calls == 1:
            console.warn(
                f"{text}. This is said once; jitgen.quantized_linear.specializations counts the calls",
                FallbackWarning,
                stacklevel=2,
            )


quantized_linear = QuantizedProducts()


def register() -> None:
    """Makes ``F.linear`` of a model after ``quantize_`` run generated kernels."""
    kernels.register(
        plain=quantized_linear.plain,
        biased=quantized_linear.biased,
        embedding=quantized_linear.embedding,
        grouped=quantized_linear.grouped,
        layout_of=quantized_linear.layout_of,
        note_fallback=quantized_linear.note_fallback,
    )
