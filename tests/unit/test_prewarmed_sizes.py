"""One recorded call of each family, prewarmed, serves every batch, number of rows and number of columns strictly.

Strides keep their structure: rows of a wider tensor, every second row, and transposed heads have other sizes too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.deploy.row_variants import resized_strides

Arguments = tuple[Any, ...]
WIDTH = 24
"""Columns of what is no product of a batch."""
WEIGHT, BIAS = torch.randn(40, WIDTH), torch.randn(40)
QUANTIZED = jitgen.quantize(torch.randn(40, 64), "int4", 32)

ROWS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "dense": lambda rows, width: torch.randn(rows, width),
    "wider": lambda rows, width: torch.randn(rows, 2 * width)[:, :width],
    "every second": lambda rows, width: torch.randn(2 * rows, width)[::2],
    "transposed": lambda rows, width: torch.randn(width, rows).t(),
}
"""[rows, width] with different strides."""

BATCHES: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    "dense": lambda batch, rows, width: torch.randn(batch, rows, width),
    "heads": lambda batch, rows, width: torch.randn(rows, batch, width).transpose(0, 1),
    "cache": lambda batch, rows, width: torch.randn(batch, 512, width)[:, :rows],
}
"""[batch, rows, width] with different strides; ``cache`` has room for more rows."""

FAMILIES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[torch.Tensor], Arguments], int]] = {
    "elementwise": (lambda x, y: F.silu(x) * y, lambda x: (x, torch.randn(x.shape)), WIDTH),
    "reduction": (lambda x: F.softmax(x, -1), lambda x: (x,), WIDTH),
    "scan": (lambda x: torch.cumsum(x, -1), lambda x: (x,), WIDTH),
    "gemm": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda x: (x, WEIGHT, BIAS), WIDTH),
    "quantised gemm": (lambda x, w: F.linear(x, w), lambda x: (x, QUANTIZED), 64),
}


def served(function: Callable[..., torch.Tensor], recorded: Arguments, calls: list[Arguments], folder: Path) -> None:
    """Record one call, prewarm an empty store, and make ``calls`` strictly."""
    manifest = folder / "specs.json"
    with jitgen.record(manifest):
        jitgen.jit(function)(*recorded)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JITGEN_CACHE_DIR", str(folder / "deployed"))
        assert jitgen.prewarm(manifest, ["cpu"]).count("failed") == 0
        deployed = jitgen.jit(function)
        with jitgen.strict():
            for arguments in calls:
                dense = [a.dequantize() if isinstance(a, jitgen.QTensor) else a for a in arguments]
                torch.testing.assert_close(deployed(*arguments), function(*dense), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strides", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(where=lambda family, strides: strides == "wider" and family == "reduction")
def test_rows(family: str, strides: str, tmp_path: Path) -> None:
    function, arguments, width = FAMILIES[family]
    make = ROWS[strides]
    calls = [arguments(make(rows, width)) for rows in (1, 2, 3, 8, 9, 64, 65, 300, 1500)]
    served(function, arguments(make(5, width)), calls, tmp_path)


@pytest.mark.parametrize("function", [torch.bmm, lambda q, k: torch.softmax(torch.bmm(q, k), -1)])
@pytest.mark.parametrize("strides", BATCHES)
@pytest.mark.slow
def test_batches_of_products(function: Callable[..., torch.Tensor], strides: str, tmp_path: Path) -> None:
    """With transposed keys, as in attention; one row, one column or one matrix is a trace of its own."""

    def arguments(batch: int, rows: int, columns: int) -> Arguments:
        make = BATCHES[strides]
        return make(batch, rows, 16), make(batch, columns, 16).transpose(1, 2)

    sizes = [(b, m, n) for b in (1, 2, 40) for m in (1, 2, 9, 70) for n in (1, 2, 17, 300)]
    served(function, arguments(3, 5, 7), [arguments(*each) for each in sizes], tmp_path)


@pytest.mark.parametrize(
    ("sizes", "strides", "resized", "wanted"),
    [
        ((3, 4), (4, 1), (5, 4), (4, 1)),
        ((3, 4), (4, 1), (3, 6), (6, 1)),
        ((3, 4), (1, 3), (5, 4), (1, 5)),
        ((3, 4), (8, 1), (5, 4), (8, 1)),
        ((3, 4), (8, 1), (5, 9), (16, 1)),
        ((2, 3, 4, 5), (60, 5, 15, 1), (2, 3, 7, 5), (105, 5, 15, 1)),
        ((3, 4), (0, 1), (7, 4), (0, 1)),
        ((2, 3, 1, 5), (15, 5, 15, 1), (2, 3, 4, 5), (60, 5, 15, 1)),
        ((0, 4), (4, 1), (2, 4), (4, 1)),
    ],
)
def test_strides_keep_their_structure(
    sizes: tuple[int, ...], strides: tuple[int, ...], resized: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    assert tuple(resized_strides(sizes, strides, resized)) == wanted
