"""Deployment: record what a program calls, compile it elsewhere, and serve without a compiler.

Run:   python examples/10_prewarm_and_strict.py
Shows: `record` writes a self-contained manifest; `prewarm` fills another store from it for named targets, without the
       program's code and without those machines; under `strict` a call that was not recorded raises instead of
       compiling. The same from a shell: JITGEN_RECORD=PATH, `jitgen prewarm PATH --target ...`, JITGEN_STRICT=1.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import jitgen

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def model(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.silu(x + bias) * x


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        manifest = Path(directory) / "specs.json"
        x, bias = torch.randn(64, 512, device=DEVICE), torch.randn(512, device=DEVICE)

        os.environ["JITGEN_CACHE_DIR"] = f"{directory}/development"
        with jitgen.record(manifest):
            jitgen.jit(model)(x, bias)
        recorded = json.loads(manifest.read_text())["entries"]
        print(f"recorded: {', '.join(entry['name'] for entry in recorded)} ({manifest.stat().st_size} bytes)")

        os.environ["JITGEN_CACHE_DIR"] = f"{directory}/deployment"
        here = [f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}a"] if GPU else ["cpu"]
        report = jitgen.prewarm(manifest, targets=[*here, "sm_80"] if GPU else [*here, "x86-64-v3"], jobs=2)
        for entry in report.entries:
            print(f"prewarmed: {entry.name} for {entry.target}: {entry.origin}, request key {entry.key[:12]}")

        with jitgen.strict():
            served = jitgen.jit(model)  # a function that this process has not resolved before
            torch.testing.assert_close(served(x, bias), model(x, bias))
            print("strict: the recorded call ran from the store")
            try:
                served(x.double(), bias.double())
            except jitgen.CacheMissError as error:
                print(f"strict: another dtype was refused: {str(error).splitlines()[0]}")
            else:
                raise AssertionError("a call that nobody prewarmed was compiled")


if __name__ == "__main__":
    main()
