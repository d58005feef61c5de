"""``coldstart`` runs this in a new process, as ``first_call.py BACKEND DEVICE [KERNEL]``.

It prints the seconds that the import and the first call took, as JSON. If DEVICE is ``""``, it compiles KERNEL, one of
``KERNELS``, for sm_90a instead of calling, and also prints the seconds of processor time of both. BACKEND may be
``torch.compile``.
"""

import json
import resource
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F


def processor() -> float:
    """The seconds of processor time of this process and of those it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


started, busy = time.perf_counter(), processor()
import jitgen  # noqa: E402  the import is what is timed

imported = time.perf_counter()

SHAPES = ((4096, 333), (4096, 333), (333,))


def gated(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y + bias


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, -1)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.softmax(q @ k.mT * 0.125, -1) @ v


def spec(*shape: int, **quantized: Any) -> jitgen.TensorSpec:
    return jitgen.TensorSpec(shape, torch.bfloat16, **quantized)


INT4 = {"format": "int4", "group_size": 128}
KERNELS: dict[str, Any] = {
    "pointwise": (gated, [jitgen.TensorSpec(shape) for shape in SHAPES]),
    "softmax": (softmax, [spec(4096, 4096)]),
    "dense product": (product, [spec(1024, 4096), spec(4096, 4096)]),
    "int4 product": (product, [spec(1024, 4096), spec(4096, 4096, **INT4)]),
    "int4 product of a row": (product, [spec(1, 4096), spec(4096, 4096, **INT4)]),
    "attention": (attention, [spec(1, 32, 4096, 64)] * 3),
}
"""By name, a function and the specs of its arguments."""


def compiled(backend: str, kernel: str) -> dict[str, float]:
    """The seconds of a compilation for sm_90a."""
    function, specs = KERNELS[kernel]
    begun = time.perf_counter()
    jitgen.jit(backend=backend)(function).lower(*specs, target="sm_90a").compile()
    return {"call": time.perf_counter() - begun, "processor": processor() - busy}


def called(backend: str, device: str) -> dict[str, float]:
    """The seconds of a call."""
    inputs = [torch.randn(shape, device=device) for shape in SHAPES]
    function: Any = torch.compile(gated) if backend == "torch.compile" else jitgen.jit(backend=backend)(gated)
    expected = gated(*inputs)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    result = function(*inputs)
    wait()
    ended = time.perf_counter()
    torch.testing.assert_close(result, expected)
    return {"call": ended - begun}


def main(backend: str, device: str, kernel: str = "pointwise") -> None:
    found = called(backend, device) if device else compiled(backend, kernel)
    print(json.dumps({"import": imported - started} | found))


main(*sys.argv[1:])
