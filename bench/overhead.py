"""The time that a warm call takes on the host. Arguments have 64 elements, so that there is almost nothing to compute.

It is compared with the least that can be done from Python: on the CPU a call of an empty C function through ctypes and
``empty_like`` for the result, on a GPU one driver launch of an empty kernel. The other peers are ``torch.add``, a
Triton kernel launched by Triton, and torch.compile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from bench.measurement import Bench, Measurement, relative_error
from bench.timing import host_medians
from jitgen.compilers import routes
from jitgen.spec import KernelSource, host_target

ELEMENTS = 64


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def add_three(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return x + y + z


def run(bench: Bench) -> Iterator[Measurement]:
    x, y, z, out = (torch.randn(ELEMENTS, device=bench.device) for _ in range(4))
    peers = _peers(bench, x, y, out)
    for backend in bench.backends:
        two, three = jitgen.jit(backend=backend)(add), jitgen.jit(backend=backend)(add_three)
        calls: dict[str, partial[torch.Tensor]] = {
            "call, 2 arguments": partial(two, x, y),
            "call, 3 arguments": partial(three, x, y, z),
            "call, 2 arguments, out=": partial(two, x, y, out=out),
            "call, 2 arguments by keywords": partial(two, x=x, y=y),
            "plan, 2 arguments": partial(two.bind(x, y), x, y),
            "plan, 2 arguments, out=": partial(two.bind(x, y), x, y, out=out),
            "plan, 3 arguments, out=": partial(three.bind(x, y, z), x, y, z, out=out),
        }
        if backend == bench.backends[0]:  # that of undecorated models
            calls |= _layers(bench.device)
        references = {"2 arguments": x.double() + y, "3 arguments": x.double() + y + z}
        times = host_medians(calls | peers, bench.device)
        for name, call in calls.items():
            exact = next((exact for suffix, exact in references.items() if suffix in name), None)
            if exact is None:
                weight: Any = call.args[1] if len(call.args) > 1 else call.func.weight  # type: ignore[attr-defined]
                exact = call.args[0].double() @ weight.dequantize(torch.float64).t()
            error = relative_error(call(), exact)
            seconds = {"jitgen": times[name], **{peer: times[peer] for peer in peers}}
            yield Measurement("overhead", name, bench.device, backend, "float32", (ELEMENTS,), seconds, error)


def _layers(device: str) -> dict[str, partial[torch.Tensor]]:
    """Calls of an ``nn.Linear`` of ELEMENTS x ELEMENTS that ``quantize_`` has quantised, and of its
    product within a decorated function."""
    layer = torch.nn.Linear(ELEMENTS, ELEMENTS, bias=False, device=device)
    jitgen.quantize_(layer, "int4", 32)
    x = torch.randn(1, ELEMENTS, device=device)
    within = partial(jitgen.jit(F.linear), x, layer.weight)
    return {"quantised Linear": partial(layer, x), "int4 linear through jit": within}


def _peers(bench: Bench, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> dict[str, Callable[[], Any]]:
    peers: dict[str, Callable[[], Any]] = {"torch.add": partial(torch.add, x, y)}
    peers["torch.add, out="] = partial(torch.add, x, y, out=out)
    if bench.device == "cpu":
        empty = _empty_function()
        pointers = [tensor.data_ptr() for tensor in (x, y, out)]
        peers["empty_like + ctypes"] = lambda: (torch.empty_like(x), empty(*pointers))
    else:
        peers["driver launch"] = empty_launch()
        from bench.triton_add import add as triton_add

        peers["Triton launch"] = lambda: triton_add[(1,)](x, y, out, ELEMENTS, BLOCK=ELEMENTS)
    if bench.compile_peer:
        torch._dynamo.reset()
        peers["torch.compile"] = partial(torch.compile(add), x, y)
    return peers


def _empty_function() -> Callable[..., None]:
    """A C function that takes three pointers and does nothing, called through ctypes."""
    from jitgen.runtime import cpu

    text = 'extern "C" void nothing(const void*, const void*, void*) {}\n'
    artifact = _compile("cpp", KernelSource("nothing", "cpp", "host", host_target(), text))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / artifact.binary
        path.write_bytes(artifact.files[artifact.binary])
        return cpu.load(str(path), "nothing", "PPP")


def empty_launch() -> Callable[[], None]:
    """A launch of an empty kernel through the driver's bindings, on torch's current stream."""
    from jitgen.runtime import cuda

    text = 'extern "C" __global__ void nothing() {}\n'
    artifact = _compile("cuda", KernelSource("nothing", "cuda", "nvrtc", cuda.target_of(0), text))
    function = cuda.load(artifact.files[artifact.binary], "nothing", 0)
    launch = cuda.Launch(function, "", (), (1, 1, 1), (32, 1, 1))
    return lambda: launch(cuda.current_stream(0))


def _compile(backend: str, source: KernelSource) -> Any:
    return routes.module(backend, source.compiler).compile(source)
