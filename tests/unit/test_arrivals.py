"""However a quantised weight comes into a process, products with it run generated kernels.

Each way runs in a process of its own that has imported nothing of jitgen but what the way says. Strict mode and an
empty store make it quick: what would run a kernel raises ``CacheMissError`` instead of compiling one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import jitgen
from jitgen import _data

LOADED = "torch.load(f'{d}/module.pt', weights_only=False)"
NET = "torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)).eval().requires_grad_(False)"
WAYS = {
    "a pickled module": f"m = {LOADED}",
    "pickle.load": "import pickle; m = pickle.load(open(f'{d}/module.pkl', 'rb'))",
    "a state dict, assigned": (
        f"import jitgen; m = {NET}; m.load_state_dict(torch.load(f'{{d}}/state.pt', weights_only=True), assign=True)"
    ),
    "a weight in F.linear": f"w = {LOADED}[0].weight; m = lambda x: F.linear(x, w)",
    "a weight in x @ w.T": f"w = {LOADED}[0].weight; m = lambda x: x @ w.T",
    "rows of an embedding": f"w = {LOADED}[0].weight; m = lambda x: F.embedding(torch.arange(3), w)",
    "torch.compile": f"m = torch.compile({LOADED}, backend='eager')",
    "a file, by the reader's module": (
        f"from jitgen.checkpoints.load import load_quantized as load; m = {NET}; load(f'{{d}}/m.safetensors', model=m)"
    ),
    "a file, by the module of files": (
        f"from jitgen.quant.io import load_quantized as load; m = {NET}; "
        "m.load_state_dict(load(f'{d}/m.safetensors'), assign=True)"
    ),
    "the class": (
        "from jitgen.quant.qtensor import QTensor; t = torch.load(f'{d}/tensors.pt'); "
        "w = QTensor(t, 'int4', 32, (64, 64), torch.float32); m = lambda x: F.linear(x, w)"
    ),
    "the function": (
        "from jitgen.quant.quantize import quantize; w = quantize(torch.eye(64), 'int8'); m = lambda x: F.linear(x, w)"
    ),
    "the module of models": f"from jitgen.quant.modules import quantize_; m = {NET}; quantize_(m, 'int8')",
    "an exported program": "m = torch.export.load(f'{d}/program.pt2').module()",
}
RUN = """
import os, sys
import torch, torch.nn.functional as F
d, ways = sys.argv[1], sys.argv[2:]
for number, way in enumerate(ways):  # this process runs no operation of torch, so that its forks may use OpenMP
    child = os.fork()
    if not child:
        result = "torch, without a word"
        try:
            with torch.no_grad():
                scope = {"torch": torch, "F": F, "d": d}
                exec(way, scope)
                scope["m"](torch.randn(3, 64))
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"[:200].splitlines()[0]
        sys.stdout.write(f"{number} {result}\\n")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pickle

    directory = tmp_path_factory.mktemp("arrivals")
    model = eval(NET)
    jitgen.quantize_(model, "int4", 32)
    torch.save(model, directory / "module.pt")
    torch.save(model.state_dict(), directory / "state.pt")
    torch.save(model[0].weight.tensors, directory / "tensors.pt")
    (directory / "module.pkl").write_bytes(pickle.dumps(model))
    jitgen.save_quantized(model, directory / "m.safetensors")
    torch.export.save(torch.export.export(model, (torch.randn(3, 64),)), directory / "program.pt2")
    return directory


def test_every_way_reaches_kernels(files: Path, tmp_path: Path) -> None:
    environment = {"JITGEN_STRICT": "1", "JITGEN_CACHE_DIR": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(files), *WAYS.values()],
        env=environment,
        cwd=_data.checkout_directory(),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    results = {way: found.get(str(number), "no answer") for number, way in enumerate(WAYS)}
    silent = {way: result for way, result in results.items() if not result.startswith("CacheMissError")}
    assert not silent, done.stderr
