"""The time of a first call in a new process, with an empty store and from the store, and of ``import jitgen``.

Every figure is a median over pairs of new processes that run ``first_call.py``. The first process of a pair fills a
store of its own, and the second reads it. On a machine without a GPU, kernels of the GPU backends are compiled only.

``compiles`` measures what the first compile of several kernels for sm_90a takes, in a new process with an empty store.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.measurement import Bench, Measurement
from jitgen import settings
from jitgen.compilers import routes

_SCRIPT = Path(__file__).with_name("first_call.py")
_CHECKOUT = Path(__file__).resolve().parents[1]


def run(bench: Bench) -> Iterator[Measurement]:
    backends = [
        name for name in ("cpp", "cuda", "triton") if routes.module(name, routes.default_compiler(name)).toolchain()
    ]
    imports = []
    for backend in backends if bench.device == "cpu" else bench.backends:
        runs = backend in bench.backends
        cold, warm = [], []
        # After this process Python's byte code is cached, as it is after the first use of any package.
        _process(backend, bench.device if runs else "")
        for _ in range(bench.repeats):
            with tempfile.TemporaryDirectory() as store:
                first, second = (_process(backend, bench.device if runs else "", store) for _ in range(2))
            cold.append(first["call"])
            warm.append(second["call"])
            imports.append(second["import"])
        peers = (
            {"torch.compile": _process("torch.compile", bench.device)["call"]} if bench.compile_peer and runs else {}
        )
        what = "first call" if runs else "first compile for sm_90a"
        for name, found in ((f"{what}, empty store", cold), (f"{what}, from the store", warm)):
            seconds = {"jitgen": statistics.median(found), **peers}
            yield Measurement("coldstart", name, bench.device, backend, "float32", (4096, 333), seconds)
    seconds = {"jitgen": statistics.median(imports)}
    notes = ("beyond the time of `import torch`",)
    yield Measurement("coldstart", "import jitgen", bench.device, "", "", (), seconds, notes=notes)


COMPILED = {
    "cuda": ("pointwise", "softmax", "dense product", "int4 product", "int4 product of a row", "attention"),
    "triton": ("pointwise", "softmax", "dense product", "int4 product"),
}
"""The kernels of ``first_call.py`` whose compiles are timed, by backend."""


def compiles(bench: Bench) -> Iterator[Measurement]:
    """The import of jitgen and the first compile of each of ``COMPILED``, in seconds on the clock, and in a note those
    of processor time."""
    for backend, kernels in COMPILED.items():
        _process(backend, "")
        for kernel in kernels:
            found = [_process(backend, "", kernel=kernel) for _ in range(bench.repeats)]
            seconds = {"jitgen": statistics.median(each["import"] + each["call"] for each in found)}
            busy = statistics.median(each["processor"] for each in found)
            notes = (f"{busy:.2f} s of processor time",)
            yield Measurement("compiles", kernel, bench.device, backend, "", (), seconds, notes=notes)


def _process(backend: str, device: str, store: str | None = None, kernel: str = "pointwise") -> dict[str, float]:
    """The times, in seconds, that ``first_call.py`` prints in a new process; ``store``: by default an empty one."""
    removed = {*settings.SETTINGS, "PYTHONDONTWRITEBYTECODE"}
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    with tempfile.TemporaryDirectory() as private:
        environment["JITGEN_CACHE_DIR"] = store or f"{private}/store"
        # The peers' caches must be empty as well.
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{private}/inductor", "TRITON_CACHE_DIR": f"{private}/triton"}
        environment["PYTHONPATH"] = os.pathsep.join([str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # As text, because the directory of a script is first on the path, where this package's modules would shadow
        # others of the same name.
        command = [sys.executable, "-c", _SCRIPT.read_text(), backend, device, kernel]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"first_call.py {backend} {device} failed:\n{done.stderr}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times
