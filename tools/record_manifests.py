"""Write the manifests of known models that jitgen ships: ``cache/manifests/<model>.json``.

Run:   python tools/record_manifests.py [MODEL ...]        (make manifests)

A manifest has what the layers of a model compute, in bfloat16 with dense, int8 and int4 weights:

- every ``nn.Linear``, as an undecorated model calls it after ``jitgen.quantize_`` (with one batch of rows, and with
  batches of sequences);
- the functions ``linear``, ``swiglu``, ``down_residual`` and ``rms_norm`` below, for programs that decorate functions
  of these names and bodies.

Nothing is computed here: tensors are described by their sizes. One recorded number of rows stands for all others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import jitgen
from jitgen.call import eager_linear
from jitgen.call.function import JitFunction
from jitgen.spec import SCHEMA

DIRECTORY = Path(__file__).resolve().parents[1] / "cache" / "manifests"
Tensor = torch.Tensor


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder layer with gated MLP and grouped-query attention, as its publisher states them.

    Attributes:
        hidden, inner: columns of the residual stream, and of the MLP between its projections.
        heads, kv_heads: of queries, and of keys and values; each has ``head`` columns.
        epsilon: of the RMS norms.
        bias: whether the projections to queries, keys and values add one.
        source: who states it: the repository whose ``config.json`` does, and the publication.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    epsilon: float
    source: str
    head: int = 128
    bias: bool = False

    @property
    def projections(self) -> dict[tuple[int, int], bool]:
        """Sizes [N, K] of the weights of a layer, each once, and whether that projection adds a bias."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        sizes = {(queries, self.hidden): self.bias, (keys, self.hidden): self.bias}
        # Qwen's output projection has the sizes of its query projection, and no bias.
        return sizes | {
            size: sizes.get(size, False)
            for size in ((self.hidden, queries), (self.inner, self.hidden), (self.hidden, self.inner))
        }


MODELS = {
    "llama-3-8b": Model(4096, 14336, 32, 8, 1e-5, "meta-llama/Meta-Llama-3-8B; arXiv:2407.21783, table 3"),
    "llama-3-70b": Model(8192, 28672, 64, 8, 1e-5, "meta-llama/Meta-Llama-3-70B; arXiv:2407.21783, table 3"),
    "granite-8b": Model(4096, 12800, 32, 8, 1e-5, "ibm-granite/granite-3.0-8b-base, model card"),
    "qwen2.5-7b": Model(3584, 18944, 28, 4, 1e-6, "Qwen/Qwen2.5-7B; arXiv:2412.15115, table 1", bias=True),
}

FORMATS: tuple[tuple[str | None, int | None], ...] = ((None, None), ("int8", None), ("int4", 128))
"""Formats of the weights and their group sizes; the first is dense."""

ROWS = (16,)
SEQUENCES = (2, 8)
"""Rows of x, as one dimension and as two: the sizes of 1 and all larger ones follow when the manifest is prewarmed."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def down_residual(x: Tensor, down: Tensor, residual: Tensor) -> Tensor:
    return F.linear(x, down) + residual


def calls(model: Model) -> Iterator[tuple[JitFunction, list[Any]]]:
    """Every function, with specs of its arguments."""

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (model.hidden,), weight, model.epsilon)

    def dense(*sizes: int) -> jitgen.TensorSpec:
        return jitgen.TensorSpec(sizes, torch.bfloat16)

    for rows in (ROWS, SEQUENCES):
        hidden, inner = dense(*rows, model.hidden), dense(*rows, model.inner)
        yield jitgen.jit(rms_norm), [hidden, dense(model.hidden)]
        for format, group in FORMATS:

            def weight(n: int, k: int, format: str | None = format, group: int | None = group) -> jitgen.TensorSpec:
                return jitgen.TensorSpec((n, k), torch.bfloat16, format=format, group_size=group)

            for (n, k), bias in model.projections.items():
                x = dense(*rows, k)
                if format is None:
                    yield jitgen.jit(linear), [x, weight(n, k)]
                else:
                    yield JitFunction(eager_linear._linear), [x, weight(n, k)]
                    if bias:
                        yield JitFunction(eager_linear._linear_with_bias), [x, weight(n, k), dense(n)]
            up = weight(model.inner, model.hidden)
            yield jitgen.jit(swiglu), [hidden, up, up]
            yield jitgen.jit(down_residual), [inner, weight(model.hidden, model.inner), hidden]


def recorded(model: Model) -> list[Any]:
    """The entries of every call.

    Each is recorded on its own: within one recording, calls that the kernels of one target do not tell apart are one
    entry, and those of another target may.
    """
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, (function, arguments) in enumerate(calls(model)):
            path = Path(directory) / f"{number}.json"
            with jitgen.record(path):
                function.lower(*arguments, target="sm_90a")
            for entry in json.loads(path.read_text())["entries"]:
                found[json.dumps(entry, sort_keys=True)] = entry
    return [found[text] for text in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    options = parser.parse_args()
    for name in options.models or MODELS:
        path = options.directory / f"{name}.json"
        entries = recorded(MODELS[name])
        lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        path.write_text(f'{{"schema":{SCHEMA},"entries":[\n{lines}\n]}}\n')
        print(f"{path}: {len(entries)} entries, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
