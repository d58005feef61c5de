"""C++ kernels compile for every level of x86-64, also for those that this processor does not have."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
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


def _weight(format: str | None = None, activation: str | None = None) -> TensorSpec:
    group = 128 if format else None
    return TensorSpec((256, 512), torch.bfloat16, format=format, group_size=group, activation=activation)


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
    "int3, int8 activations": (F.linear, (ROWS, _weight("int3", "int8"))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 3 * (HEADS,)),
    "attention backward": (_gradients, 4 * (HEADS,)),
    "norm": (lambda x, w: F.rms_norm(x, (512,), w), (ROWS, TensorSpec((512,), torch.bfloat16))),
    "scan": (lambda x: x.float().cumsum(-1), (ROWS,)),
    "sort": (lambda x: x.sort(-1)[0], (ROWS,)),
}


@pytest.mark.quick(
    where=lambda name, level: (level == "x86-64-v4" and "int3" not in name) or (name, level) == ("dense", "generic")
)
@pytest.mark.parametrize("level", CPU_LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile(name: str, level: str) -> None:
    function, arguments = CASES[name]
    for invariant in (False, True):
        lowered = jitgen.jit(batch_invariant=invariant)(function).lower(*arguments, backend="cpp", target=level)
        lowered.compile()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize(("dtype", "format"), [(torch.bfloat16, None), (torch.bfloat16, "int4"), (torch.int8, None)])
def test_matrix_registers_are_all_that_is_asked_for(dtype: torch.dtype, format: str | None, tmp_path: Path) -> None:
    """What runs where a processor has AMX_BF16 or AMX_INT8 has no dot product of AVX512_BF16 or AVX512_VNNI, which is
    not asked for there."""
    function = F.linear if dtype == torch.bfloat16 else torch._int_mm
    weight = _weight(format) if dtype == torch.bfloat16 else TensorSpec((512, 256), dtype)
    low = jitgen.jit(function).lower(TensorSpec((300, 512), dtype), weight, backend="cpp", target="x86-64-v4")
    library = tmp_path / "kernel.so"
    library.write_bytes(low.compile().asm["so"])
    text = subprocess.run(["objdump", "-dC", library], capture_output=True, text=True, check=True).stdout
    functions = text.split("\n\n")
    assert any(re.search(r"tdp(bf16ps|b[su][su]d)", body) for body in functions)
    for body in functions:
        if re.search("vdpbf16ps|vpdpbusd", body):
            assert "Matrices<" not in body.split("\n", 1)[0]
            assert "tdp" not in body
