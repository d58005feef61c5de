"""The kernels of attention's gradients for Hopper compile without a device: what they claim, registers, products."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from backward_kernels import Backward

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import disassemble, nvrtc

needs_nvrtc = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")


def backward(q: Any, k: Any, v: Any, g: Any, top: Any, total: Any, delta: Any) -> Any:
    """Gradients of causal attention, from a row's greatest score, its sum and sum(g * result)."""
    scale = q.shape[-1] ** -0.5
    i, j = torch.arange(q.shape[-2], device=q.device)[:, None], torch.arange(k.shape[-2], device=q.device)
    s = ((q @ k.transpose(-1, -2)).float() * scale).masked_fill(j > i, float("-inf"))
    p = torch.exp(s - top) / total
    ds = (p * ((g @ v.transpose(-1, -2)).float() - delta) * scale).to(q.dtype)
    return ds @ k, ds.transpose(-1, -2) @ q, p.to(g.dtype).transpose(-1, -2) @ g


def lowered(
    depth: int, width: int, dtype: torch.dtype = torch.bfloat16, backend: str = "cuda", target: str = "sm_90a"
) -> Any:
    q, k, v, g = (
        TensorSpec((2, 8, rows, columns), dtype)
        for rows, columns in ((1000, depth), (900, depth), (900, width), (1000, width))
    )
    of_row = TensorSpec((2, 8, 1000, 1), torch.float32)
    return jitgen.jit(backward).lower(q, k, v, g, of_row, of_row, of_row, backend=backend, target=target)


def compiled(source: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """The artifact of ``source``, and what the assembler says."""
    logs: list[str] = []
    parse = nvrtc.parse_resources
    monkeypatch.setattr(nvrtc, "parse_resources", lambda log, name: (logs.append(log), parse(log, name))[1])
    found = nvrtc.compile(nvrtc.prepare(source))
    return found, logs[0]


@needs_nvrtc
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("depth", "width"), [(128, 128), (64, 64), (96, 96), (80, 128), (24, 40)])
@pytest.mark.quick(where=lambda depth, dtype: (depth, dtype) == (128, torch.bfloat16))
def test_generated_kernels_spill_nothing(
    depth: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = lowered(depth, width, dtype)
    assert len(low.kernels) == 2, low.explain()
    assert low.explain().count("wgmma, 128 rows a block") == 2
    for number in range(2):
        found, log = compiled(low.lowered.render(number)[0], monkeypatch)
        monkeypatch.undo()
        # C7510 and C7512: wgmmas that the assembler has to serialise; C7508: a setmaxnreg it ignores.
        assert not re.search(r"C75\d\d", log), log
        assert found.meta["spill_bytes"] == found.meta["stack_bytes"] == 0


CONFIGS = [
    Backward(),
    Backward(mask="full", stages=4),
    Backward(by_keys=False, tile=128, stages=2),
    Backward(depth=64, width=64, stages=4, overlap=True),
    Backward(by_keys=False, tile=128, depth=64, width=64, overlap=True, mask="window", element="float16"),
]


@needs_nvrtc
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.quick(where=lambda config: config == CONFIGS[0])
def test_the_mainloop(config: Backward, monkeypatch: pytest.MonkeyPatch) -> None:
    found, log = compiled(config.source(), monkeypatch)
    assert not re.search(r"C75\d\d", log), log
    assert found.meta["spill_bytes"] == found.meta["stack_bytes"] == 0
    assert config.shared_bytes <= 227 * 1024
    if disassemble.find_tool() is not None:
        code = disassemble.sass(found.files["kernel.cubin"])
        products = config.depth // 16 + config.width // 16 + config.tile // 16 * (2 if config.by_keys else 1)
        assert len(re.findall(r"\bHGMMA\b", code)) == products
        assert "UTMALDG" in code
        # Weights are computed while the second product runs.
        loop = code[code.index("HGMMA") :]
        assert loop.index("gsb0, 0x1") < loop.index("MUFU.EX2") < loop.index("gsb0, 0x0")


def test_what_the_cuda_dialect_leaves_to_others_says_why() -> None:
    for low, words in (
        (lowered(64, 64, target="sm_80"), "is for sm_90a, not for sm_80; backend='triton' has one"),
        (lowered(64, 64, torch.float32), "takes 16-bit operands of one dtype; backend='triton' takes others"),
        (lowered(192, 128), "heads of more than 128 elements"),
    ):
        assert words in low.explain(), low.explain()
        assert len(low.kernels) > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_backend_auto_has_two_kernels_everywhere(dtype: torch.dtype) -> None:
    for target in ("sm_80", "sm_90a"):
        low = lowered(64, 64, dtype, backend="auto", target=target)
        in_cuda = (target, dtype) == ("sm_90a", torch.bfloat16)
        assert [kernel.backend for kernel in low.kernels] == ["cuda" if in_cuda else "triton"] * 2, low.explain()


def test_the_backend_auto_takes_triton_for_a_backward_of_wide_heads_alone() -> None:
    """The forward of 256 elements has a kernel in CUDA, its backward in Triton alone."""
    low = lowered(256, 256, backend="auto")
    assert [kernel.backend for kernel in low.kernels] == ["triton"] * 2, low.explain()
    spec = TensorSpec((2, 8, 1000, 256), torch.bfloat16)
    forward = jitgen.jit(torch.nn.functional.scaled_dot_product_attention)
    assert [each.backend for each in forward.lower(spec, spec, spec, backend="auto", target="sm_90a").kernels] == [
        "cuda"
    ]
