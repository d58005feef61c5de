"""Small C++ sources around one function of the static headers, compiled and called on tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jitgen.codegen import environment
from jitgen.compilers import host
from jitgen.runtime import cpu
from jitgen.spec import KernelSource, Target

TARGETS = [Target("cpu", arch) for arch in ("x86-64-v4", "x86-64-v3", "x86-64-v2", "generic")]
ON_TARGETS = [t if t.arch == "x86-64-v3" else pytest.param(t, marks=pytest.mark.slow) for t in TARGETS]
"""The same as parameters: that with AVX2 is quick."""

TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.bool: "bool",
}
"""The compute dtypes, as C++ names them."""

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)


def source(text: str, target: Target, name: str = "kernel", **options: object) -> KernelSource:
    """``text`` with the headers it includes, as a source for the host compiler."""
    headers = environment.headers(environment.family_folder("reduction"), text)
    return KernelSource(name, "cpp", "host", target, text, headers, options=tuple(sorted(options.items())))


def loop(name: str, expression: str, operands: list[str], result: str) -> str:
    """A C++ function ``name`` that stores ``expression``, over operands ``x0``, ``x1``, ..., into its last pointer."""
    pointers = [f"const {operand}* p{i}" for i, operand in enumerate(operands)] + [f"{result}* out"]
    values = " ".join(f"const {operand} x{i} = p{i}[n];" for i, operand in enumerate(operands))
    return f"""
extern "C" void {name}({", ".join(pointers)}, int64_t count) {{
#pragma omp simd
  for (int64_t n = 0; n < count; ++n) {{ {values} out[n] = {expression}; }}
}}
"""


class Library:
    """The functions of one source, compiled for one target; each is called on tensors of equal size."""

    def __init__(self, text: str, target: Target, directory: Path):
        artifact = host.compile(source(text, target))
        self._path = directory / artifact.binary
        self._path.write_bytes(artifact.files[artifact.binary])
        self._entry = functools.cache(lambda name, count: cpu.load(str(self._path), name, "P" * count + "q"))

    def __call__(self, name: str, *operands: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        held = [operand.contiguous() for operand in operands]
        # Poisoned: an element that is not written shows.
        out = torch.full((held[0].numel() * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)
        entry: Callable[..., None] = self._entry(name, len(held) + 1)
        entry(*(operand.data_ptr() for operand in held), out.data_ptr(), held[0].numel())
        return out
