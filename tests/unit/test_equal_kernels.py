"""Equal kernels are one: of one program or of several, they have one source, one artifact and one loaded function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.errors import CompileError
from jitgen.runtime import cpu
from tests import jitgen_cases

ROUTES = {"cpp": "x86-64-v3", "cuda": "sm_90a", "triton": "sm_90a"}
needs_compiler = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


def experts(x: Any, *weights: Any) -> Any:
    return tuple(torch.softmax(F.silu(F.linear(x, weight)), -1) for weight in weights)


def first(x: Any, y: Any) -> Any:
    return torch.tanh(x * 0.37) + y


def second(scale: float, unused: Any, a: Any, b: Any) -> Any:
    return torch.tanh(b * 0.37) + a


@pytest.fixture
def compiled() -> Any:
    events: list[jitgen.CompileEvent] = []
    unsubscribe = jitgen.on_compile(events.append)
    yield events
    unsubscribe()


@pytest.mark.parametrize("backend", ROUTES)
def test_kernels_of_repeated_structure_have_one_source_each(backend: str) -> None:
    spec = jitgen.TensorSpec
    arguments = spec((64, 256), torch.bfloat16), *4 * [spec((512, 256), torch.bfloat16)]
    low = jitgen.jit(experts).lower(*arguments, backend=backend, target=ROUTES[backend])
    names, entries = [k.name for k in low.kernels], [k.entry for k in low.kernels]
    assert len(set(names)) == len(names) > len(set(entries))
    assert len(set(entries)) == len({k.source for k in low.kernels})
    text = low.explain()
    for name, entry in zip(names, entries, strict=True):
        assert re.search(rf"^  {name} \({entry}\): ", text, re.M)


@needs_compiler
def test_equal_kernels_are_compiled_once(
    compiled: list[jitgen.CompileEvent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    function = jitgen.jit(experts)
    x, weights = torch.randn(5, 48), [torch.randn(33, 48) for _ in range(4)]
    for found, expected in zip(function(x, *weights), experts(x, *weights), strict=True):
        torch.testing.assert_close(found, expected)
    kernels = function.specializations[0].kernels
    assert len(kernels) > len(weights)
    assert len(compiled) == len({kernel.key for kernel in kernels}) == len({kernel.entry for kernel in kernels}) == 2
    assert {event.entry for event in compiled} == {kernel.entry for kernel in kernels}
    assert {event.name for event in compiled} <= {kernel.name for kernel in kernels}


@needs_compiler
def test_functions_share_an_equal_kernel(
    compiled: list[jitgen.CompileEvent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    loads: list[str] = []
    load = cpu.load_packed
    monkeypatch.setattr(cpu, "load_packed", lambda found, entry: loads.append(entry) or load(found, entry))
    x, y = torch.randn(7, 11), torch.randn(7, 11)
    torch.testing.assert_close(jitgen.jit(first)(x, y), first(x, y))
    other = jitgen.jit(second)
    torch.testing.assert_close(other(0.5, x, x, y), second(0.5, x, x, y))
    assert len(compiled) == len(loads) == 1
    (kernel,) = other.specializations[0].kernels
    assert (kernel.name, kernel.origin) == ("second", "store")


def test_an_identity_has_all_that_is_computed() -> None:
    def lowered(function: Any, *arguments: Any) -> str:
        return jitgen_cases.lowered(function, *arguments).identity(0)

    x, y = torch.randn(7, 11), torch.randn(7, 11)
    assert lowered(first, x, y) == lowered(second, 0.5, x, x, y)
    others: list[tuple[Any, ...]] = [
        (lambda x, y: torch.tanh(x * 0.38) + y, x, y),
        (lambda x, y: torch.tanh(x * 0.37) + x, x, y),
        (lambda x, y: torch.tanh(x * 0.37) + y, x.double(), y.double()),
        (lambda x, y: torch.tanh(x * 0.37) + y, x, y[:1]),
        (lambda x, y: torch.tanh(x * 0.37) + y, x, y.t().contiguous().t()),
        (lambda x, y: torch.tanh(x * 0.37) - y, x, y),
    ]
    identities = [lowered(*arguments) for arguments in others]
    assert len({lowered(first, x, y), *identities}) == len(others) + 1


@needs_compiler
def test_an_error_names_the_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(host, "_arguments", lambda source, tools: ("-fno-such-flag",))

    def named_by_the_user(x: torch.Tensor) -> torch.Tensor:
        return x * 0.7131

    with pytest.raises(CompileError, match=r"named_by_the_user \(jitgen_elementwise_[0-9a-f]{8}\)"):
        jitgen.jit(named_by_the_user)(torch.randn(5))
