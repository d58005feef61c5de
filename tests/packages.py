"""Models that packages are made of, and processes that run them; for tests on the CPU and on a GPU."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from tests import fresh

QUICK: dict[str, Any] = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
"""Options of Inductor under which it compiles a small model in a few seconds."""


@jitgen.jit
def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.rms_norm(x, (64,), weight))


class Model(nn.Module):
    """A decorated function and two quantised layers."""

    def __init__(self, format: str = "int4") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.up, self.down = nn.Linear(64, 48), nn.Linear(48, 64, bias=False)
        jitgen.quantize_(self.eval().requires_grad_(False), format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.silu(self.up(normed(x, self.weight)))) + x
        return found


def exported(model: nn.Module, x: torch.Tensor, most: int | None = None) -> torch.export.ExportedProgram:
    shapes = ({0: torch.export.Dim("rows", min=2, max=most)},) if most else None
    with torch.no_grad():
        return torch.export.export(model, (x,), dynamic_shapes=shapes)


def run_elsewhere(path: Path, text: str, *arguments: str) -> str:
    """The output of a process in which ``import jitgen`` is impossible; ``m`` is the package."""
    begin = f"""
        import sys
        sys.modules["jitgen"] = None
        import torch
        m = torch._inductor.aoti_load_package({str(path)!r})
    """
    program = textwrap.dedent(begin) + textwrap.dedent(text)
    done = fresh.run(program, *arguments)
    if done.returncode:
        pytest.fail(f"the process ended with {done.returncode}:\n{done.stderr}", pytrace=False)
    return done.stdout


class Product(nn.Module):
    """A product large enough for the tensor cores and the copy engine of sm_90a."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 256, dtype=torch.bfloat16))
        self.work = jitgen.jit(lambda x, weight: F.silu(x @ weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work(x, self.weight)  # type: ignore[no-any-return]
