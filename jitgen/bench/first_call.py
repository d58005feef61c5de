"""``coldstart`` runs this in a new process, as ``first_call.py BACKEND DEVICE``.

It prints the seconds that the import and the first call took, as JSON. If DEVICE is ``""``, it compiles for sm_90a
instead of calling. BACKEND may be ``torch.compile``.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

started = time.perf_counter()
import jitgen  # noqa: E402  the import is what is timed

imported = time.perf_counter()


def gated(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y + bias


def main(backend: str, device: str) -> None:
    shapes = ((4096, 333), (4096, 333), (333,))
    function: Any = torch.compile(gated) if backend == "torch.compile" else jitgen.jit(backend=backend)(gated)
    if not device:
        specs = [jitgen.TensorSpec(shape) for shape in shapes]
        begun = time.perf_counter()
        function.lower(*specs, target="sm_90a").compile()
        ended = time.perf_counter()
    else:
        inputs = [torch.randn(shape, device=device) for shape in shapes]
        expected = gated(*inputs)
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        wait()
        begun = time.perf_counter()
        result = function(*inputs)
        wait()
        ended = time.perf_counter()
        torch.testing.assert_close(result, expected)
    print(json.dumps({"import": imported - started, "call": ended - begun}))


main(*sys.argv[1:])
