"""Counts what plans of models amount to: ``python -m bench.balances --json docs/measured/balances.json``.

Thirteen kinds of models of transformers, tiny and with random weights in bfloat16 (``tests/huggingface.py``), are
traced by ``torch.compile(backend="jitgen")``, and each program that they need is lowered for a CPU and for sm_90a. A
row has the kernels, and the bytes and operations in units of the least that the programs need (``jitgen/balance.py``).
A program that several layers share is counted once. Then decoder layers as ten families of models write them
(``bench/layers.py``, of Llama-3-8B's sizes), chains of residual blocks, and training steps of layers are lowered in the
same way. Nothing is compiled, and no device is needed. The file is written after every model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import jitgen
from bench.layers import LAYERS
from bench.measurement import made
from bench.records import write
from jitgen.balance import Balance
from jitgen.compilers import routes
from jitgen.deploy import manifest, manifest_schema
from jitgen.lowering import Route
from jitgen.spec import Target

TARGETS = {"cpu": ("x86-64-v3", "cpp"), "sm_90a": ("sm_90a", "cuda")}
ROWS_OF_LAYERS = (1, 64, 512)
TRAINED = ("Llama", "Qwen3")


def programs(model: torch.nn.Module, inputs: dict[str, Any], folder: Path) -> list[Any]:
    """The specialisations that a forward needs. Torch computes it, because there is no compiler to build kernels."""
    torch._dynamo.reset()
    path = folder / "programs.json"
    with torch.no_grad(), jitgen.record(path), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(model, backend="jitgen")(**inputs)
    entries = manifest_schema.read(path)
    path.unlink()
    return list(entries)


def ratios(balance: Balance) -> dict[str, float]:
    """Operations and bytes in units of the least."""
    return {"operations": round(balance.operations_ratio, 3), "bytes": round(balance.bytes_ratio, 3)}


def layers() -> Iterator[dict[str, Any]]:
    """A row for each layer, number of rows and target, and for training steps of ``TRAINED``."""
    for target, (arch, backend) in TARGETS.items():
        for name, layer in LAYERS.items():
            for rows in ROWS_OF_LAYERS:
                balance = jitgen.jit(layer.function).lower(*layer.specs(rows), target=arch, backend=backend).balance
                yield {"layer": name, "rows": rows, "target": target, "kernels": balance.kernels} | ratios(balance)
        for name in TRAINED:
            layer, rows = LAYERS[name], ROWS_OF_LAYERS[-1]
            specs: list[Any] = layer.specs(rows)
            trained = 1 + len(layer.weights)  # and not the angles of the rotary embedding
            arguments = [
                torch.empty(spec.shape, dtype=spec.dtype, requires_grad=number < trained)
                for number, spec in enumerate(specs)
            ]
            forward = jitgen.jit(layer.function).lower(*arguments, target=arch, backend=backend)
            assert forward.backward is not None
            steps = {"forward of training": forward.balance, "backward": forward.backward.balance}
            for step, balance in steps.items():
                row = {"layer": f"{name}, {step}", "rows": rows, "target": target, "kernels": balance.kernels}
                yield row | ratios(balance)


def main() -> None:
    from tests import huggingface

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--models", nargs="*", default=list(huggingface.MAKERS), help="names; all of them by default")
    arguments = parser.parse_args()
    os.environ["JITGEN_CXX"] = "false"
    rows: list[dict[str, Any]] = []
    record = made("bench.balances", device="cpu") | {"rows": rows, "layers": list(layers())}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            model = huggingface.made(name).to(torch.bfloat16)
            inputs = {
                key: value.to(torch.bfloat16) if value.is_floating_point() else value
                for key, value in huggingface.inputs(name, model, 2, 64).items()
            }
            entries = programs(model, inputs, Path(folder))
            for target, (arch, backend) in TARGETS.items():
                route = Route(backend, routes.default_compiler(backend), Target.parse(arch), automatic=True)
                total = sum((manifest.relower(entry, route).balance for entry in entries), Balance())
                row = {"model": name, "target": target, "programs": len(entries), "kernels": total.kernels}
                rows.append(row | ratios(total))
                print(rows[-1], flush=True)
            write(arguments.json, record)


if __name__ == "__main__":
    main()
