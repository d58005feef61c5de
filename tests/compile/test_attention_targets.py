"""Attention kernels compile for every target, without any of its devices."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import jitgen
from jitgen import TensorSpec
from jitgen.compilers import disassemble, nvrtc
from jitgen.nn import functional
from tests.attention import formula

MOST_SPILLED = 64
"""Bytes that a block of three warpgroups, of 160 registers a thread, may spill outside of its loop."""


def attend(q: Any, k: Any, v: Any) -> Any:
    return formula(["scale", "distance"], ["causal"])(q, k, v)


@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a", "gfx942"])
@pytest.mark.quick(where=lambda target, depth: (target, depth) == ("sm_90a", 128))
def test_triton_compiles_without_spills(target: str, depth: int) -> None:
    spec = TensorSpec((2, 8, 1000, depth), torch.bfloat16)
    report = jitgen.jit(attend).lower(spec, spec, spec, backend="triton", target=target).compile().report
    assert not any(each["spill_bytes"] for each in report)


def over_pages(q: Any, keys: Any, values: Any, of_keys: Any, of_values: Any, table: Any, start: Any) -> Any:
    k, v = (
        functional.dequantized(functional.paged(codes, table), functional.paged(scales, table), q.dtype)
        for codes, scales in ((keys, of_keys), (values, of_values))
    )
    return functional.attend(q, k, v, start)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "gfx942"])
@pytest.mark.slow
def test_pages_of_codes_compile_without_spills(target: str) -> None:
    q = TensorSpec((2, 32, 1, 128), torch.bfloat16)
    codes, scales = TensorSpec((500, 8, 16, 128), torch.int8), TensorSpec((500, 8, 16), torch.float32)
    table, start = TensorSpec((2, 256), torch.int64), TensorSpec((2,), torch.int64)
    low = jitgen.jit(over_pages).lower(q, codes, codes, scales, scales, table, start, backend="triton", target=target)
    assert len(low.kernels) == 2, low.explain()
    assert not any(each["spill_bytes"] for each in low.compile().report)


@pytest.mark.quick(where=lambda backend: backend == "cuda")
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_an_append_with_its_rotation_compiles_as_one_kernel(backend: str) -> None:
    def append(qkv: Any, cos: Any, sin: Any, keys: Any, values: Any, start: Any) -> Any:
        q, k, v = (x.unflatten(-1, (-1, 128)).transpose(1, 2) for x in qkv.split([4096, 1024, 1024], -1))
        functional.append(keys, functional.rotary(k, cos, sin), start)
        functional.append(values, v, start)
        return functional.rotary(q, cos, sin)

    qkv, angles = TensorSpec((2, 16, 6144), torch.bfloat16), TensorSpec((16, 64), torch.float32)
    cache, start = TensorSpec((2, 8, 4096, 128), torch.bfloat16), TensorSpec((2,), torch.int64)
    low = jitgen.jit(append).lower(qkv, angles, angles, cache, cache, start, backend=backend, target="sm_90a")
    assert len(low.kernels) == 1
    assert not any(each["spill_bytes"] for each in low.compile().report)


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v2"])
@pytest.mark.quick(where=lambda target, rows: (target, rows) == ("x86-64-v4", 100))
def test_cpp_compiles_for_every_level(target: str, rows: int) -> None:
    spec, keys = TensorSpec((2, 8, rows, 64), torch.bfloat16), TensorSpec((2, 8, 1000, 64), torch.bfloat16)
    jitgen.jit(attend).lower(spec, keys, keys, backend="cpp", target=target).compile()


WIDTHS = [
    *((64, 64, 1000), (128, 128, 1000), (96, 192, 100), (256, 256, 300)),
    *((64, 256, 1000), (20, 70, 300), (128, 128, 1)),
]
"""(D, E, M) of kernels for Hopper."""


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("depth", "width", "rows"), WIDTHS)
@pytest.mark.quick(where=lambda dtype, depth: (dtype, depth) == (torch.bfloat16, 128))
def test_cuda_compiles_without_spills(
    depth: int, width: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[str] = []
    parse = nvrtc.parse_resources
    monkeypatch.setattr(nvrtc, "parse_resources", lambda log, name: (logs.append(log), parse(log, name))[1])
    query, key, value = (
        TensorSpec((2, 8, n, size), dtype) for n, size in ((rows, depth), (1000, depth), (1000, width))
    )
    function = attend if rows > 1 else formula(["scale"], [])
    low = jitgen.jit(function).lower(query, key, value, backend="cuda", target="sm_90a")
    source = low.lowered.render(0)[0]
    found = nvrtc.compile(nvrtc.prepare(source))
    # C7510 and C7512: wgmmas that the assembler has to serialise; C7508: a setmaxnreg it ignores.
    assert not re.search(r"C75\d\d", logs[0]), logs[0]
    if rows == 1:
        assert found.meta["spill_bytes"] == 0
        return
    if disassemble.find_tool() is not None:
        code = disassemble.sass(found.files["kernel.cubin"])
        # The warps that copy come last. They have few registers, and time.
        computing = code[: code.rindex("USETMAXREG")]
        three = low.lowered.schedules[0].warpgroups == 3
        assert len(re.findall(r"\bSTL\b", computing)) <= (MOST_SPILLED // 4 if three else 0)
        assert len(re.findall(r"\bHGMMA\b", code)) >= 4
        # A wait for products before the weights are computed would leave the tensor cores idle meanwhile.
        loop = code[code.index("gsb0, 0x1") :]
        assert loop.index("MUFU.EX2") < loop.index("gsb0, 0x0")


def test_what_the_cuda_dialect_leaves_to_others_says_why() -> None:
    def lowered(target: str, dtype: torch.dtype = torch.bfloat16, depth: int = 64) -> Any:
        spec = TensorSpec((2, 8, 1000, depth), dtype)
        return jitgen.jit(attend).lower(spec, spec, spec, backend="cuda", target=target)

    assert len(lowered("sm_90a").kernels) == 1
    for low, words in (
        (lowered("sm_80"), "an attention kernel for sm_90a, not for sm_80; backend='triton' has one"),
        (lowered("sm_90a", torch.float32), "keys and values of 16 bits; backend='triton' has one for float32"),
        (lowered("sm_90a", depth=512), "heads of more than 256 elements; backend='triton' takes up to 512"),
    ):
        assert words in low.explain()
        assert len(low.kernels) == 3


@pytest.mark.quick(where=lambda target, dtype: (target, dtype) == ("sm_80", torch.bfloat16))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_100a", "gfx942"])
def test_the_backend_auto_has_one_kernel_everywhere(target: str, dtype: torch.dtype) -> None:
    spec = TensorSpec((2, 8, 1000, 64), dtype)
    low = jitgen.jit(attend).lower(spec, spec, spec, target=target)
    (kernel,) = low.kernels
    in_cuda = (target, dtype) == ("sm_90a", torch.bfloat16)
    assert kernel.backend == ("cuda" if in_cuda else "triton")
    assert ("by triton: " in low.explain()) is not (in_cuda or target == "gfx942")
    spills = [each["spill_bytes"] for each in low.compile().report]
    if target == "gfx942":
        assert spills == [None]  # Triton tells of no spills there
    else:
        # Where a cluster shares masked tiles, the warp that copies, of 40 registers a thread, spills some of them.
        assert all(bytes_ <= (128 if in_cuda else 0) for bytes_ in spills)


def test_what_a_quantised_weight_is_laid_out_for_stays_the_backend() -> None:
    def project(q: Any, k: Any, v: Any, weight: Any) -> Any:
        return torch.nn.functional.linear(attend(q, k, v), weight)

    spec, weight = TensorSpec((2, 8, 1000, 64), torch.bfloat16), TensorSpec((64, 64), torch.bfloat16, format="int8")
    low = jitgen.jit(project).lower(spec, spec, spec, weight, target="sm_80")
    assert {kernel.backend for kernel in low.kernels} == {"cuda"}


@pytest.mark.slow
def test_latent_keys_compile_without_spills() -> None:
    def latent(q: Any, keys: Any) -> Any:
        return torch.softmax(q @ keys.mT * 0.05, -1) @ keys[..., :512]

    query, keys = TensorSpec((4, 128, 576), torch.bfloat16), TensorSpec((4, 5000, 576), torch.bfloat16)
    low = jitgen.jit(latent).lower(query, keys, target="sm_90a")
    assert len(low.kernels) == 1
    assert not any(each["spill_bytes"] for each in low.compile().report)
