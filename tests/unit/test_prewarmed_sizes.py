"""One recorded call of each family, prewarmed, serves every batch, number of rows and number of columns strictly.

Strides keep their structure: rows of a wider tensor, every second row, and transposed heads have other sizes too.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
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


def heads(x: torch.Tensor, weight: torch.Tensor, length: int) -> torch.Tensor:
    """[batch, length, width] to [batch, heads, length, length], with the length as a number, as Dynamo passes it."""
    states = F.linear(x, weight).view(x.shape[0], length, 4, -1).transpose(1, 2)
    ahead = torch.arange(length) > torch.arange(length)[:, None]
    return torch.softmax((states @ states.mT).masked_fill(ahead, -math.inf), -1)


def repeated(x: torch.Tensor, weight: torch.Tensor, times: int) -> torch.Tensor:
    """A number of rows that no tensor has."""
    return F.linear(x.expand(times, -1), weight)


def test_a_length_that_is_a_number_varies_with_the_sizes_that_equal_it(tmp_path: Path) -> None:
    lengths = (2, 12, 33, 70)
    served(
        heads, (torch.randn(2, 7, WIDTH), WEIGHT, 7), [(torch.randn(2, n, WIDTH), WEIGHT, n) for n in lengths], tmp_path
    )


def test_a_number_of_rows_varies(tmp_path: Path) -> None:
    x = torch.randn(1, WIDTH)
    served(repeated, (x, WEIGHT, 7), [(x, WEIGHT, times) for times in (1, 2, 12, 33, 300)], tmp_path)


def grouped(x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[rows, width] by the matrix of each row's id; no guard says that there are as many ids as rows."""
    order = ids.argsort(stable=True)
    ends = F.one_hot(ids, weight.shape[0]).sum(0).cumsum(0).int()
    products = F.grouped_mm(x[order], weight.mT, offs=ends)
    return torch.zeros_like(products).index_copy(0, order, products)


TOKENS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int], Arguments]]] = {
    "index_add": (
        lambda x, ids, values: x.index_add(0, ids, values),
        lambda n: (torch.randn(7, WIDTH), torch.arange(n) % 7, torch.randn(n, WIDTH)),
    ),
    "two of a token": (
        lambda x, ids, y: x.index_add(0, ids.flatten(), y.repeat_interleave(2, 0)),
        lambda n: (torch.randn(7, WIDTH), torch.arange(2 * n).view(n, 2) % 7, torch.randn(n, WIDTH)),
    ),
    "counts": (
        lambda ids: torch.zeros(6).scatter_add(0, ids, torch.ones_like(ids, dtype=torch.float32)),
        lambda n: (torch.arange(n) % 6,),
    ),
    "the expert of an id": (
        lambda x, w, i: F.linear(x, w[i]),
        lambda n: (torch.randn(n, 32), jitgen.quantize(torch.randn(6, 16, 32), "int8"), torch.tensor(2)),
    ),
    "experts": (grouped, lambda n: (torch.randn(n, 32), torch.arange(n) % 6, torch.randn(6, 16, 32))),
    "gradient of a bias": (lambda gradient: gradient.sum(0), lambda n: (torch.randn(n, WIDTH),)),
}
"""Functions of arguments that share a number of tokens, which is no size of the result, or of none alone."""


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_that_arguments_share(name: str, tmp_path: Path) -> None:
    function, arguments = TOKENS[name]
    served(function, arguments(5), [arguments(tokens) for tokens in (1, 2, 300)], tmp_path)


def test_what_a_number_fixes_is_said(tmp_path: Path) -> None:
    """The rows of ``mask`` are as many as those of ``x`` and the number together: no size varies alone."""

    def padded(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor, more: int) -> torch.Tensor:
        rows = torch.cat([x, x[:1].expand(more, -1)])
        return F.linear(rows * mask, weight)

    arguments = torch.randn(5, WIDTH), torch.randn(8, 1), WEIGHT, 3
    with jitgen.record(tmp_path / "specs.json"):
        jitgen.jit(padded)(*arguments)
    report = jitgen.prewarm(tmp_path / "specs.json", ["cpu"])
    (skipped,) = (entry for entry in report.entries if entry.origin == "skipped")
    assert "arguments that are numbers" in skipped.detail


@pytest.mark.slow
def test_a_decoder_compiled_for_any_length(tmp_path: Path) -> None:
    """Recorded at 7 tokens, it runs 12 and 33 strictly in another process."""
    pytest.importorskip("transformers")
    specs = tmp_path / "specs.json"
    environment = {**os.environ, "JITGEN_CACHE_DIR": str(tmp_path / "recorded"), "JITGEN_RECORD": str(specs)}
    command = [sys.executable, "-c", DECODER]
    subprocess.run([*command, "7"], env=environment, check=True, timeout=900)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JITGEN_CACHE_DIR", str(tmp_path / "deployed"))
        report = jitgen.prewarm(specs, ["cpu"])
    assert report.count("failed") == report.count("skipped") == 0
    environment |= {"JITGEN_CACHE_DIR": str(tmp_path / "deployed"), "JITGEN_STRICT": "1"}
    del environment["JITGEN_RECORD"]
    subprocess.run([*command, "7", "12", "33"], env=environment, check=True, timeout=900)


DECODER = """
import sys, torch, transformers, jitgen.dynamo.registration
torch.manual_seed(0)
config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=50)
model = transformers.LlamaForCausalLM(config).eval()
compiled = torch.compile(model, backend="jitgen", dynamic=True)
for length in map(int, sys.argv[1:]):
    tokens = torch.randint(0, 50, (1, length))
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
"""


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
