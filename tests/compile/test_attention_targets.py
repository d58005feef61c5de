"""Attention kernels compile for every target, without any of its devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen import TensorSpec
from jitgen.nn import functional
from tests.attention import formula


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
@pytest.mark.quick(where=lambda target: target == "sm_90a")
def test_pages_of_codes_compile_without_spills(target: str) -> None:
    q = TensorSpec((2, 32, 1, 128), torch.bfloat16)
    codes, scales = TensorSpec((500, 8, 16, 128), torch.int8), TensorSpec((500, 8, 16), torch.float32)
    table, start = TensorSpec((2, 256), torch.int64), TensorSpec((2,), torch.int64)
    low = jitgen.jit(over_pages).lower(q, codes, codes, scales, scales, table, start, backend="triton", target=target)
    assert len(low.kernels) == 2, low.explain()
    assert not any(each["spill_bytes"] for each in low.compile().report)


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


def test_the_cuda_dialect_says_that_it_has_no_kernel() -> None:
    spec = TensorSpec((2, 8, 1000, 64), torch.bfloat16)
    low = jitgen.jit(attend).lower(spec, spec, spec, backend="cuda", target="sm_90a")
    assert "the cuda dialect has no attention kernel; backend='triton' has one" in low.explain()
    assert len(low.kernels) == 3
