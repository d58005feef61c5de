"""Grouped products beside float64 torch: references, and the inputs that kernels of every dialect are tried on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from jitgen.quant import activations

OFFSETS = {
    "ragged": (3, 3, 7, 30, 30),
    "one group": (0, 0, 30, 30, 30),
    "rows of none": (0, 5, 6, 6, 19),
    "no rows": (0, 0, 0, 0, 0),
}
"""Ends of 5 groups of 30 rows."""
ROWS, LENGTH, COLUMNS, GROUPS = 30, 96, 64, 5


def offsets(name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(OFFSETS[name], dtype=dtype)


def rows_of_groups(x: torch.Tensor, weight: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Rows of groups times the group's matrix (N, K) of ``weight``; rows behind the last group are 0."""
    begins = [0, *ends[:-1]]
    products = [x[b:e].double() @ w.double().T for b, e, w in zip(begins, ends, weight, strict=True)]
    rest = x.new_zeros(x.shape[0] - ends[-1], weight.shape[1], dtype=torch.float64)
    return torch.cat([*products, rest])


def lengths_of_groups(x: torch.Tensor, weight: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """A matrix for each range of columns of ``x`` (M, K) and of rows of ``weight`` (K, N)."""
    begins = [0, *ends[:-1]]
    return torch.stack([x[:, b:e].double() @ weight[b:e].double() for b, e in zip(begins, ends, strict=True)])


def product(x: Any, weight: Any, ends: Any) -> Any:
    return torch._grouped_mm(x, weight.transpose(-2, -1), ends)


def gated(x: Any, weight: Any, ends: Any, scales: Any) -> Any:
    gate, up = torch._grouped_mm(x, weight.transpose(-2, -1), ends).chunk(2, -1)
    return F.silu(gate) * up * scales[:, None]


def of_one_row(x: Any, weight: Any, ends: Any, order: Any) -> Any:
    """The rows of ``x`` (1, K) that experts of its token read."""
    return product(x[order // 2], weight, ends)


def two_products(x: Any, up: Any, down: Any, counts: Any) -> Any:
    """Rows by two matrices each, which are divided by ``counts``."""
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    return product(F.relu(product(x, up, ends)), down, ends)


def of_lengths(x: Any, weight: Any, ends: Any) -> Any:
    return torch._grouped_mm(x, weight, ends)


def chosen(x: Any, weight: Any, ids: Any) -> Any:
    """A row of ``x`` for each id, times the matrix (N, K) that it chooses."""
    return torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1) * 2


ACTIVATIONS = (
    ("int8", None, "int8"),
    ("int4", 32, "int8"),
    ("int4", 32, "fp8_e4m3"),
    ("fp8_e4m3", None, "fp8_e4m3"),
    ("fp8_e4m3.rows128", 128, None),
    ("fp8_e4m3.rows128", 128, "fp8_e4m3.block128"),
)
"""Formats, groups and activations of experts that are quantised on both sides, and with blocks of 128 x 128."""


def rows_as_quantized(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Rows in float64 as an activation's codes and scales have them."""
    if activation is None:
        return x.double()
    kind = activations.ACTIVATIONS[activation]
    scales = activations.scales_of(x, kind)
    return activations.values_of(activations.codes_of(x, scales, kind, False), scales, kind).double()


def failure(found: torch.Tensor, wanted: torch.Tensor, what: str) -> str | None:
    """What is wrong with ``found``, in words; None where nothing is."""
    if found.shape != wanted.shape:
        return f"{what}: {tuple(found.shape)}, not {tuple(wanted.shape)}"
    if not found.isfinite().all():
        return f"{what}: not finite"
    unit = {torch.float64: 1e-13, torch.float32: 1e-5}.get(found.dtype, 8e-3)
    error = (found.double() - wanted).abs().max().item() if found.numel() else 0.0
    most = unit * max(wanted.abs().max().item() if wanted.numel() else 0.0, 1.0)
    return None if error <= most else f"{what}: off by {error}"


SEVERAL_IDS: dict[str, Callable[..., Any]] = {
    "a row by several matrices": lambda x, w, ids: torch.einsum("td,tkhd->tkh", x, w[ids]),
    "a row for each matrix": lambda x, w, ids: torch.einsum("tkd,tkhd->tkh", x[:, None] * (ids[..., None] + 2), w[ids]),
    "matmul": lambda x, w, ids: x[:, None, None] @ w[ids].mT,
    "matrices first": lambda x, w, ids: w[ids] @ x[:, None, :, None],
    "columns": lambda x, w, ids: torch.einsum("td,tkdh->tkh", x, w.mT[ids]),
    "transposed behind": lambda x, w, ids: torch.einsum("td,tkdh->tkh", x, w[ids].mT),
}
"""Products of rows (T, 24) with matrices (E, 40, 24) that ids (T, k) choose; ``matrices first`` gives columns."""

CHOSEN: dict[str, Callable[..., Any]] = {
    "one id": lambda x, w, ids: F.linear(x, w[ids[0, 0]]) + torch.einsum("td,od->to", x, w[ids[0, 1]]),
    "one id on the left": lambda x, w, ids: w[ids[0, 0]] @ x.mT + (w[ids[0, 1]] @ x[0])[:, None],
    "transposes of one id": lambda x, w, ids: x @ w[ids[0, 0]].T + torch.mm(x, w[ids[0, 1]].contiguous().mT),
    "one id of batches": lambda x, w, ids: F.linear(x[:, None, None], w[ids[-1, -1]]),
    "einsum": lambda x, w, ids: torch.einsum("td,tkod->kto", x, w[ids]),
    "einsum, weighted": lambda x, w, ids: torch.einsum("tkod,td,tk->ot", w[ids], x, ids.to(x.dtype)),
    "einsum of several rows": lambda x, w, ids: torch.einsum("tmd,tkod->tkmo", x[:, None].expand(-1, 2, -1), w[ids]),
    "some": lambda x, w, ids: x @ w[1:3].mT,
    "some of some": lambda x, w, ids: x @ w[1:].mT[:3:2],
    "every second": lambda x, w, ids: w[1::2] @ x.mT,
    "some by einsum": lambda x, w, ids: torch.einsum("td,eod->teo", x, w[1:4]),
    "all": lambda x, w, ids: x @ w.mT + x[None] @ w.mT,
    "a vector": lambda x, w, ids: x[0] @ w.mT + w @ x[0],
}
"""Functions of x (3, K), matrices (5, N, K), and ids (3, 2)."""
