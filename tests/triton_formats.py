"""Matrix products in Triton with weights of every low-bit format; ``tests/unit/test_gemm_formats.py`` runs them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from jitgen.quant.formats import FORMATS, find
from tests.interpreter import Check, serve
from tests.triton_matmuls import DTYPES, SHAPES, TILES, compare, linear, quantized, reads_quantized, three

VARIED = ("int4.float16", "uint3.float16.floatzeros", "fp8_e4m3.rows128", "int8.tensor", "int4.e8m0", "int4.e4m3")
GROUPS = (32, 64, None)


def products(format: str) -> Iterator[str | None]:
    """Some of the forms and dtypes: every one of them with some format."""
    torch.manual_seed(sum(map(ord, format)))
    number = [*FORMATS, *VARIED].index(format)
    forms = [form for form in TILES if reads_quantized(form)]
    cases = list(itertools.product(forms, DTYPES.values()))
    for place, (form, dtype) in list(enumerate(cases))[number % 5 :: 5]:
        m, n, k = SHAPES[place % 3]
        group = find(format).group_size or GROUPS[(number + place) % 3]
        tile = replace(TILES[form], slice_k=16) if group == 16 else TILES[form]
        wrong = compare(linear, torch.randn(m, k).to(dtype), quantized(n, k, format, group), tile=tile)
        yield wrong and f"{form} {dtype} {m} {n} {k} groups of {group}: {wrong}"
    weights = [quantized(40, 160, format, find(format).group_size or 32) for _ in range(3)]
    yield compare(lambda x, a, b, c: three(x, a, b, c), torch.randn(5, 160).bfloat16() / 4, *weights)


CHECKS: dict[str, Check] = {format: partial(products, format) for format in (*FORMATS, *VARIED)}


if __name__ == "__main__":
    serve(CHECKS)
