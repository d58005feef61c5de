"""Calls from many threads, of many shapes, and a first call where nothing may compile."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import host
from jitgen.trace import run

pytestmark = pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")


def _mixed() -> list[tuple[Any, Any]]:
    """Decorated functions with the arguments of a call of a random size."""
    weight = torch.randn(24, 40)
    quantised = jitgen.quantize(torch.randn(24, 40), "int8")
    row = torch.randn(40)
    return [
        (jitgen.jit(lambda x: torch.sin(x) * row), ()),
        (jitgen.jit(lambda x: torch.softmax(x, -1)), ()),
        (jitgen.jit(lambda x, w: F.gelu(F.linear(x, w))), (weight,)),
        (jitgen.jit(lambda x, w: F.linear(x, w)), (quantised,)),
        (jitgen.jit(lambda x, scale: x * scale + 1), (1.5,)),
    ]


def _call_all(functions: list[tuple[Any, Any]], calls: int, seed: int, failures: list[str]) -> None:
    chosen = random.Random(seed)
    for _ in range(calls):
        function, others = chosen.choice(functions)
        x = torch.randn(chosen.choice((1, 2, 3, 7, 16)), 40)
        try:
            found, expected = function(x, *others), function.reference(x, *others)
        except Exception as error:
            failures.append(f"{function} of {tuple(x.shape)}: {error!r}")
            return
        if not torch.allclose(found, expected, atol=1e-3, rtol=1e-3):
            failures.append(f"{function} of {tuple(x.shape)}: {(found - expected).abs().max()}")


@pytest.mark.parametrize("calls", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_eight_threads_make_mixed_calls(calls: int) -> None:
    functions, failures = _mixed(), list[str]()
    threads = [threading.Thread(target=_call_all, args=(functions, calls, seed, failures)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("gradients", [False, True], ids=["values", "gradients"])
def test_first_calls_of_many_threads_share_a_trace(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has other sizes, and all of them trace at the same time."""
    count, traced = 16, set[int]()
    together = threading.Barrier(count, timeout=60)
    trace = run.trace

    def waits(*args: Any) -> Any:
        if threading.get_ident() not in traced:  # the first of this thread
            traced.add(threading.get_ident())
            together.wait()
        return trace(*args)

    monkeypatch.setattr(run, "trace", waits)
    function, results = jitgen.jit(lambda x: torch.sin(x) * 2), dict[int, bool]()

    def call(size: int) -> None:
        x = torch.randn(size, 3, requires_grad=gradients)
        found = function(x)
        if gradients:
            found = torch.autograd.grad(found.sum(), x)[0]
        expected = torch.cos(x) * 2 if gradients else torch.sin(x) * 2
        results[size] = torch.allclose(found, expected, atol=1e-6)

    threads = [threading.Thread(target=call, args=(size,)) for size in range(2, 2 + count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == count
    assert all(results.values())
    assert len(function.specializations) == (3 if gradients else 1)  # with gradients: values, what is saved, backward


@pytest.mark.slow
def test_first_calls_of_new_processes_may_be_in_threads() -> None:
    """Modules that calls import late are imported by one thread while another asks for their classes."""
    program = """
import sys, threading
sys.setswitchinterval(1e-5)
import torch, jitgen
functions = [jitgen.jit(lambda x, n=n: torch.sin(x) * n) for n in range(8)]
failures = []
def call(function):
    try:
        function(torch.ones(3))
        jitgen.quantize(torch.randn(8, 32), "int8")
    except Exception as error:
        failures.append(error)
threads = [threading.Thread(target=call, args=(function,)) for function in functions]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_memory_is_flat_over_many_calls_and_shapes() -> None:
    scaled = jitgen.jit(lambda x: x * 2 + 1)

    def calls(count: int, shapes: int) -> None:
        for index in range(count):
            scaled(torch.empty(1 + index % shapes, 3))

    tracemalloc.start()
    try:
        calls(4000, 2000)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        calls(20_000, 2000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000, "bytes"


@pytest.mark.parametrize("calls", [150, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("own_store")
def test_random_numbers_of_rows_compile_a_few_kernels(calls: int) -> None:
    compiled: list[Any] = []
    stop = jitgen.on_compile(compiled.append)
    try:
        linear = jitgen.jit(lambda x, w: F.relu(F.linear(x, w)))
        weight = torch.randn(16, 32)
        chosen = random.Random(0)
        for _ in range(calls):
            linear(torch.randn(chosen.randint(1, 600), 32), weight)
    finally:
        stop()
    assert 1 <= len(compiled) <= 12, "one for each bucket of rows, and one for a single row"


def test_a_first_call_under_capture_names_prewarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: tensors without memory stand for CUDA's, and the stream says that it captures."""
    from torch._subclasses import FakeTensorMode

    from jitgen.call.resolver import Resolver
    from jitgen.call.routing import Routing
    from jitgen.call.signature import Call

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 4, device="cuda")
    resolver = Resolver(lambda x: x + 1, Routing("shifted", None, None))
    with pytest.raises(jitgen.UnsupportedError, match=r"capture of a CUDA graph.*prewarm"):
        resolver.resolve(Call.unchecked([x], None))
