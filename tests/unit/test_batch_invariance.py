"""A row's bits do not depend on how many rows come with it, where that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.spec import TensorSpec, host_target

needs_compiler = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
ROWS = 130


def _linear(x: Any, w: Any, b: Any) -> Any:
    return F.gelu(F.linear(x, w, b))


def _gate(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _case(name: str, dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if name == "dense":
        return _linear, (torch.randn(96, 256, dtype=dtype), torch.randn(96, dtype=dtype))
    if name == "dense along n":
        return (lambda x, w: torch.softmax(x @ w, -1)), (torch.randn(256, 90, dtype=dtype),)
    if name == "rows":
        return (lambda x, w: F.rms_norm(x, (256,), w).cumsum(-1)), (torch.randn(256, dtype=dtype),)
    weights = (jitgen.quantize(torch.randn(96, 256, dtype=dtype), name, group_size=32) for _ in range(2))
    return _gate, tuple(weights)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("dense", torch.float32),
        ("dense", torch.bfloat16),
        ("dense along n", torch.float32),
        ("rows", torch.float32),
        ("int4", torch.bfloat16),
        ("int8", torch.float32),
    ],
)
@pytest.mark.quick(where=lambda name, dtype: (name, dtype) in (("dense", torch.float32), ("int4", torch.bfloat16)))
def test_every_number_of_rows_gives_a_row_the_same_bits(name: str, dtype: torch.dtype) -> None:
    function, others = _case(name, dtype)
    invariant = jitgen.jit(batch_invariant=True)(function)
    x = torch.randn(ROWS, 256, dtype=dtype)
    expected = invariant(x, *others)
    usual = jitgen.jit(function)(x, *others).float()
    # The same sums of 256 terms in another order: roundings that are independent add up to the root of their number,
    # in each of two factors. The result is rounded once more in each.
    bound = 2 * torch.finfo(dtype).eps + 2 * 256**0.5 * torch.finfo(torch.float32).eps
    assert (expected.float() - usual).norm() <= bound * usual.norm()
    for rows in range(1, ROWS):
        assert torch.equal(invariant(x[:rows].clone(), *others), expected[:rows]), rows


@needs_compiler
@pytest.mark.slow
def test_attention_and_batches_of_products() -> None:
    q, k, v = (torch.randn(70, 4, length, 32) for length in (9, 33, 33))
    attention = jitgen.jit(batch_invariant=True)(F.scaled_dot_product_attention)
    expected = attention(q, k, v)
    for batch in (1, 2, 3, 8, 33):
        assert torch.equal(attention(q[:batch], k[:batch], v[:batch]), expected[:batch])
    for queries in (1, 2, 5, 8):
        assert torch.equal(attention(q[:, :, :queries].clone(), k, v), expected[:, :, :queries])
    products = jitgen.jit(batch_invariant=True)(torch.bmm)
    a, b = torch.randn(70, 130, 40), torch.randn(70, 40, 24)
    expected = products(a, b)
    for batch in (1, 2, 9, 70):
        for rows in (1, 3, 64, 65):
            assert torch.equal(products(a[:batch, :rows].clone(), b[:batch]), expected[:batch, :rows])


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("weight", ["dense", "int4", "rows"])
def test_a_gpu_has_one_schedule_for_all(backend: str, weight: str) -> None:
    invariant = jitgen.jit(backend=backend, batch_invariant=True)(
        (lambda x, w: torch.softmax(x * w[0], -1)) if weight == "rows" else F.linear
    )
    w: Any = TensorSpec((4096, 4096), torch.bfloat16)
    if weight == "int4":
        w = TensorSpec((4096, 4096), torch.bfloat16, format="int4", group_size=128)
    found = set()
    for rows in (2, 3, 8, 9, 16, 17, 64, 65, 200, 1000, 8192):
        x = TensorSpec((rows, 4096), torch.bfloat16)
        lowered = invariant.lower(x, w, target="sm_90a")
        found.add((lowered.source, str(lowered.explain())))
    sources = {source for source, _ in found}
    assert len(sources) == 1


@pytest.mark.parametrize("length", [4096, 4092])
def test_an_activation_along_its_rows_has_one_mainloop(length: int) -> None:
    """Where tensor maps describe it for some numbers of rows alone, it is copied for others, or read by none."""
    invariant = jitgen.jit(backend="cuda", batch_invariant=True)(lambda x, w: x.T @ w)
    tiles = set()
    for rows in (1, 2, 3, 8, 9, 64, 65, 1000):
        x, w = (TensorSpec((length, columns), torch.bfloat16) for columns in (rows, 1024))
        product = invariant.lower(x, w, target="sm_90a").kernels[-1]
        tiles.add(product.source.splitlines()[1])
    assert len(tiles) == 1


@needs_compiler
@pytest.mark.usefixtures("own_store")
def test_a_setting_asks_for_it_and_manifests_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JITGEN_BATCH_INVARIANT", "1")
    asked = jitgen.jit(F.linear)
    assert asked.route(torch.device("cpu")).batch_invariant
    assert not jitgen.jit(batch_invariant=False)(F.linear).route(torch.device("cpu")).batch_invariant
    x, w = torch.randn(3, 64), torch.randn(8, 64)
    path = tmp_path / "specs.json"
    with jitgen.record(path):
        asked.lower(x, w)
    monkeypatch.delenv("JITGEN_BATCH_INVARIANT")
    assert all(entry["batch_invariant"] for entry in json.loads(path.read_text())["entries"])
    assert jitgen.prewarm(path, [host_target()]).count("compiled") == 1
    with jitgen.strict():
        jitgen.jit(batch_invariant=True)(F.linear)(x, w)
        with pytest.raises(jitgen.CacheMissError):
            jitgen.jit(F.linear)(x, w)
