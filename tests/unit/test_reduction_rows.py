"""Every row of torch's reductions and normalisations, and its losses, by every name and with torch's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from numeric import widened
from operations import canonical, spellings

import jitgen
from jitgen.trace import table

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **options: Any) -> Call:
    return args, options


DIMS = (call(-1), call(dim=0), call(1, True), call(dim=-1, keepdim=True))
SEVERAL = (*DIMS, call((0, 2)), call(dim=[1, 2], keepdim=True))
WHOLE = (call(),)
WEIGHT, BIAS = torch.randn(2, 37)
TARGET = torch.randint(4, (37,))
OTHER = torch.randn(3, 4, 37)
REDUCTIONS = tuple(call(OTHER, reduction=reduction) for reduction in ("none", "mean", "sum"))

CALLS: dict[str, tuple[Call, ...]] = {
    "sum": (*SEVERAL, *WHOLE, call(-1, dtype=torch.float64), call(dtype=torch.float32)),
    "mean": (*SEVERAL, *WHOLE, call(-1, dtype=torch.float64)),
    "prod": (*DIMS, *WHOLE, call(-1, dtype=torch.float64)),
    "amax": (*SEVERAL, *WHOLE),
    "amin": (*SEVERAL, *WHOLE),
    "aminmax": (call(dim=-1), call(dim=0, keepdim=True), *WHOLE),
    "max": (*DIMS, *WHOLE),
    "min": (*DIMS, *WHOLE),
    "argmax": (*DIMS, *WHOLE),
    "argmin": (*DIMS, *WHOLE),
    "any": (*DIMS, *WHOLE),
    "all": (*DIMS, *WHOLE),
    "count_nonzero": (call(-1), call(dim=0), *WHOLE),
    "var": (*SEVERAL, *WHOLE, call(-1, False), call(dim=-1, unbiased=False), call(-1, correction=2), call(False)),
    "std": (*SEVERAL, *WHOLE, call(-1, False), call(dim=-1, correction=0), call(False)),
    "var_mean": (call(-1), call(dim=(0, 2), correction=0), call(-1, keepdim=True)),
    "std_mean": (call(-1), call(dim=(0, 2), correction=0), call(-1, keepdim=True)),
    "norm": (call(), call(1, -1), call(2, 0), call(dim=-1, keepdim=True), call(float("inf"), -1), call(3, -1)),
    "linalg_norm": (call(dim=-1), call(1, dim=0), call(float("-inf"), dim=-1, keepdim=True)),
    "linalg_vector_norm": (call(), call(2, -1), call(0, 1), call(3.5, dim=(0, 2)), call(1, -1, True)),
    "normalize": (call(), call(dim=-1), call(p=1.0, dim=0), call(2.0, -1, 1e-3)),
    "softmax": (call(-1), call(dim=0), call(1), call(-1, dtype=torch.float32)),
    "log_softmax": (call(-1), call(dim=0), call(1), call(-1, dtype=torch.float64)),
    "logsumexp": (call(-1), call(dim=0, keepdim=True), call((0, 2)), call((1, 2), True)),
    "rms_norm": (call((37,)), call((37,), WEIGHT), call((37,), weight=WEIGHT, eps=1e-3), call((4, 37))),
    "layer_norm": (call((37,)), call((37,), WEIGHT, BIAS), call((37,), weight=WEIGHT), call((4, 37), eps=1e-3)),
    "group_norm": (call(2), call(4, torch.randn(4), torch.randn(4)), call(1, weight=torch.randn(4), eps=1e-3)),
    "cosine_similarity": (call(OTHER), call(OTHER, -1), call(OTHER[0, 0], dim=0, eps=1e-3)),
    **dict.fromkeys(("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"), REDUCTIONS),
    "binary_cross_entropy_with_logits": REDUCTIONS,
    **dict.fromkeys(("soft_margin_loss", "poisson_nll_loss", "hinge_embedding_loss"), REDUCTIONS),
    "kl_div": tuple(call(OTHER.softmax(-1), reduction=how) for how in ("none", "mean", "sum", "batchmean")),
    "nll_loss": (
        *(call(TARGET, reduction=reduction) for reduction in ("none", "mean", "sum")),
        call(TARGET, WEIGHT[:4]),
    ),
    "cross_entropy": (
        *(call(TARGET, reduction=reduction) for reduction in ("none", "mean", "sum")),
        call(TARGET, ignore_index=2),
        call(TARGET, label_smoothing=0.1),
        call(TARGET, WEIGHT[:4].abs(), ignore_index=1),
        call(TARGET, WEIGHT[:4].abs(), label_smoothing=0.25, reduction="none"),
        call(torch.randn(37, 4).softmax(1), label_smoothing=0.1),
    ),
}
"""Arguments after an input of (3, 4, 37); of (37, 4) where a target has classes."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
MODULES = {f"jitgen.trace.{name}" for name in ("reductions", "normalizations")}
NAMES = sorted(name for name, row in table.rows().items() if row.function.__module__ in MODULES)


def test_every_reduction_has_sample_calls() -> None:
    assert NAMES
    assert {canonical(name) for name in NAMES} <= {canonical(name) for name in CALLS}


QUICK = (
    *("prod", "aminmax", "count_nonzero", "std_mean", "linalg_vector_norm", "log_softmax", "group_norm"),
    *("cosine_similarity", "huber_loss", "cross_entropy"),
)
"""Of names that are lowered alike, one; the plain sums, extrema and softmax are tested in every dialect elsewhere."""


@pytest.mark.parametrize("every", [False, True], ids=["first call", "every call"])
@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.quick(where=lambda name, every: not every and name in QUICK)
def test_rows_agree_with_torch(name: str, every: bool) -> None:
    """By every name and with all arguments, or by the first one that torch has and with the first."""
    x, agreed = torch.randn((37, 4) if name in ("cross_entropy", "nll_loss") else (3, 4, 37)), 0
    linalg = [
        (f"linalg.{short}", getattr(torch.linalg, short)) for short in [name.removeprefix("linalg_")] if short != name
    ]
    for label, function in [*spellings(name), *linalg]:
        for args, options in CALLS[name]:
            if agreed and not every:
                return
            try:
                plain = function(x, *args, **options)
            except (RuntimeError, TypeError):
                continue  # not a form this spelling has
            exact = function(x.double(), *widened(list(args)), **{k: widened(v) for k, v in options.items()})
            got = jitgen.jit(bound(function, args, options))(x)
            compare(got, plain, exact, (label, args, options))
            agreed += 1
    assert agreed >= len(CALLS[name])


def bound(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
    def applied(x: torch.Tensor) -> Any:
        return function(x, *args, **options)

    return applied


def compare(got: Any, plain: Any, exact: Any, where: object) -> None:
    if not isinstance(plain, torch.Tensor):
        assert len(got) == len(plain), where
        for parts in zip(got, plain, exact, strict=True):
            compare(*parts, where)
        return
    assert (got.dtype, got.shape) == (plain.dtype, plain.shape), where
    if got.is_floating_point():
        close = TOLERANCE[got.dtype] if exact.dtype == torch.float64 else TOLERANCE[torch.float32]
        torch.testing.assert_close(got.double(), exact.double(), rtol=close, atol=close, msg=str(where))
    else:
        assert torch.equal(got, plain), where
