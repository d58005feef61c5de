"""On a GPU: packages that run where jitgen cannot be imported. Inductor compiles for half a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packages import QUICK, Model, Product, exported, run_elsewhere
from torch import nn

import jitgen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(scope="module")
def _torch_runs_packages(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where a package that has nothing of jitgen ends its process: with torch 2.11 for CUDA 13 the constructor of
    any model was seen to."""
    path = tmp_path_factory.mktemp("plain") / "model.pt2"
    x = torch.randn(5, 64, device="cuda")
    program = torch.export.export(nn.Linear(64, 64, device="cuda"), (x,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=QUICK)
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; torch._inductor.aoti_load_package({str(path)!r})"], check=False
    )
    if done.returncode:
        pytest.skip(f"torch {torch.__version__} ends with {done.returncode} where it loads a package of its own")


@pytest.mark.usefixtures("_torch_runs_packages")
@pytest.mark.parametrize("model", [Model, Product])
def test_a_package_runs_on_a_gpu(model: type[nn.Module], tmp_path: Path) -> None:
    made = model().eval().requires_grad_(False).cuda()
    width, dtype = (64, torch.float32) if model is Model else (512, torch.bfloat16)
    x = torch.randn(5, width, dtype=dtype, device="cuda")
    path = jitgen.package(exported(made, x, 300), tmp_path / "model.pt2", **QUICK)
    inputs = [torch.randn(rows, width, dtype=dtype, device="cuda") for rows in (2, 16, 17, 128, 300)]
    torch.save((inputs, [made(each) for each in inputs]), tmp_path / "expected.pt")
    run_elsewhere(
        Path(path),
        """
        inputs, expected = torch.load(sys.argv[1])
        for x, y in zip(inputs, expected):
            torch.testing.assert_close(m(x), y)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.testing.assert_close(m(inputs[0]), expected[0])
        again = torch._inductor.aoti_load_package(sys.argv[2])
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(len(inputs)) as threads:  # each call may be the first that its thread makes of CUDA
            for found, y in zip(threads.map(again, inputs * 20), expected * 20):
                torch.testing.assert_close(found, y)
        """,
        str(tmp_path / "expected.pt"),
        path,
    )
