"""Knows the dtypes in which torch functions compute under ``torch.autocast``, and follows them.

The tables are those of ``aten/src/ATen/autocast_mode.h``; ``tests/unit/test_autocast.py`` holds them against torch's
dispatcher. Functions that are in no table compute in the dtypes of their arguments; what torch composes of functions
that are in one is traced as such a composition, or is in a table itself (``einsum``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from jitgen.ir.graph import Node
from jitgen.spec import dtype_name
from jitgen.trace.sequences import rebuilt

_LOSSES = (
    *("cosine_embedding_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss"),
    *("mse_loss", "multi_margin_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "poisson_nll_loss", "smooth_l1_loss"),
    "multilabel_margin_loss",
    *("soft_margin_loss", "triplet_margin_loss", "binary_cross_entropy_with_logits", "cross_entropy_loss"),
)
_PRODUCTS = (
    *("addbmm", "addmm", "baddbmm", "bmm", "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "prelu", "einsum"),
    "scaled_dot_product_attention",
    *("linalg_vecdot", *(f"conv{kind}{count}d" for kind in ("", "_transpose") for count in (1, 2, 3)), "conv_tbc"),
)
_RESAMPLED = (
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *(f"{kind}{count}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for count in (1, 2, 3)),
)

LOWER: Mapping[str, frozenset[str]] = {
    "cpu": frozenset(_PRODUCTS),
    "cuda": frozenset((*_PRODUCTS, "addmv", "mv", "addr", "chain_matmul", "linalg_multi_dot")),
}
"""Functions that compute in the dtype of autocast, by device."""

FLOAT32: Mapping[str, frozenset[str]] = {
    "cpu": frozenset(
        (
            *(*_LOSSES, "binary_cross_entropy", "prod", "cdist", "trace", "quantile", "nanquantile"),
            "fake_quantize_per_tensor_affine",
            *("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
            *("avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d"),
            *("max_unpool2d", "max_unpool3d"),
        )
    ),
    "cuda": frozenset(
        (
            *_LOSSES,
            *_RESAMPLED,
            *("cdist", "dist", "erfinv", "linalg_matrix_norm", "matrix_norm", "native_layer_norm", "pdist", "renorm"),
            *(
                "acos",
                "arccos",
                "asin",
                "arcsin",
                "cosh",
                "exp",
                "expm1",
                "log",
                "log10",
                "log1p",
                "log2",
                "reciprocal",
            ),
            *("rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__", "square", "softplus", "layer_norm", "group_norm"),
            *("rms_norm", "cosine_similarity", "logsumexp", "prod", "softmax", "log_softmax", "cumprod", "cumsum"),
            *("sum", "norm", "linalg_vector_norm", "vector_norm", "linalg_norm", "normalize"),
        )
    ),
}
"""Functions that compute in float32 where their arguments have fewer bits."""

WIDEST: Mapping[str, frozenset[str]] = {
    "cpu": frozenset(("cat", "concat", "concatenate", "stack", "index_copy")),
    "cuda": frozenset(
        (
            *("addcdiv", "addcmul", "atan2", "arctan2", "dot", "vdot", "inner", "bilinear", "cross"),
            *("grid_sampler", "index_put", "scatter_add", "tensordot"),
        )
    ),
}
"""Functions that compute in float32 where one of their arguments is float32, and else in the dtype of autocast."""

REFUSED: Mapping[str, frozenset[str]] = {"cpu": frozenset(), "cuda": frozenset(("binary_cross_entropy",))}
"""Functions that raise an error."""


CONVERTED = ("float32", "float16", "bfloat16")
"""The dtypes of tensors that autocast converts; others are left as they are."""


def settings() -> tuple[torch.dtype | None, ...] | None:
    """Returns the state of autocast as a part of signatures: its dtype on a CPU and on a GPU; None if it is
    disabled."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return dtype("cpu"), dtype("cuda")


def dtype(device: str) -> torch.dtype | None:
    """Returns the dtype of autocast on a type of device; None if it is disabled there."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@contextmanager
def disabled(device: str) -> Iterator[None]:
    """Disables autocast like ``torch.autocast(device, enabled=False)``, without importing much of torch during a
    trace."""
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)


def target(name: str, device: str, arguments: Iterable[Any]) -> str | None:
    """Returns the dtype to which autocast converts floating arguments of the function ``name``; None if it does not.

    Raises:
        TypeError: torch refuses the call.
    """
    lower = dtype(device)
    if lower is None:
        return None
    name = name.rpartition(" ")[2].rpartition(".")[2]
    name = f"__{name}__" if f"__{name}__" in FLOAT32[device] | LOWER[device] else name  # of an operator
    if name in REFUSED[device]:
        raise TypeError("unsafe to autocast, as in torch; use binary_cross_entropy_with_logits")
    if name in LOWER[device]:
        return dtype_name(lower)
    if name in FLOAT32[device]:
        return "float32"
    if name in WIDEST[device]:
        widest = dtype_name(lower)
        for dtype_ in (node.dtype for node in _nodes(arguments) if node.dtype in CONVERTED):
            if "float32" in (widest, dtype_):
                widest = "float32"
            elif dtype_ != widest:
                raise TypeError(f"autocast to {widest} does not take {dtype_} tensors here, as in torch")
        return widest
    return None


def converted(value: Any, dtype: str, cast: Callable[[Node, str], Node]) -> Any:
    """Converts every tensor in ``value`` that autocast converts to ``dtype``; a quantised weight is of any dtype."""
    if isinstance(value, (list, tuple)):
        return rebuilt(value, [converted(item, dtype, cast) for item in value])
    if isinstance(value, Node) and value.dtype in CONVERTED and not value.is_weight:
        return cast(value, dtype)
    return value


def _nodes(values: Iterable[Any]) -> Iterable[Node]:
    for value in values:
        if isinstance(value, Node):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _nodes(value)
