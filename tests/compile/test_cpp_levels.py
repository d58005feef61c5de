"""C++ kernels compile for every level of x86-64, also for those that this processor does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import host
from jitgen.spec import CPU_LEVELS

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a C++ compiler")

HEADS = TensorSpec((2, 4, 100, 64), torch.bfloat16)
ROWS = TensorSpec(("M", 512), torch.bfloat16)
FEW = TensorSpec((2, 512), torch.bfloat16)


def _weight(format: str | None = None) -> TensorSpec:
    group = 128 if format else None
    return TensorSpec((256, 512), torch.bfloat16, format=format, group_size=group)


def _gradients(q: Any, k: Any, v: Any, g: Any) -> Any:
    weights = torch.softmax(q @ k.mT, -1)
    return (weights * (g @ v.mT)).mT @ q, weights.mT @ g


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "dense": (F.linear, (ROWS, _weight())),
    "dense, two rows": (F.linear, (FEW, _weight())),
    "int4": (F.linear, (ROWS, _weight("int4"))),
    "uint4, two rows": (F.linear, (FEW, _weight("uint4"))),
    "int8": (F.linear, (ROWS, _weight("int8"))),
    "int8, two rows": (F.linear, (FEW, _weight("int8"))),
    "nf4": (F.linear, (ROWS, _weight("nf4"))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 3 * (HEADS,)),
    "attention backward": (_gradients, 4 * (HEADS,)),
    "norm": (lambda x, w: F.rms_norm(x, (512,), w), (ROWS, TensorSpec((512,), torch.bfloat16))),
    "scan": (lambda x: x.float().cumsum(-1), (ROWS,)),
    "sort": (lambda x: x.sort(-1)[0], (ROWS,)),
}


@pytest.mark.quick(where=lambda name, level: level == "x86-64-v4" or (name, level) == ("dense", "generic"))
@pytest.mark.parametrize("level", CPU_LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile(name: str, level: str) -> None:
    function, arguments = CASES[name]
    for invariant in (False, True):
        lowered = jitgen.jit(batch_invariant=invariant)(function).lower(*arguments, backend="cpp", target=level)
        lowered.compile()
