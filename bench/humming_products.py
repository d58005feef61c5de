"""Products by humming, another generator of kernels for quantised weights, as a peer of ``products.py``.

humming takes N as a multiple of its tile and pads a weight that is not one. Its heuristic's configuration for the rows
at hand is compiled alone, where its layers would compile one for each range of rows.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from copy import deepcopy
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from bench.timing import Call

if TYPE_CHECKING:
    from bench.products import Product

DTYPES = {"int4": "int4", "int8": "int8", "fp8_e4m3": "float8e4m3"}
"""humming's name of each format that it has."""
COLUMNS, MOST_PADDING = (256, 128), 1 / 32
"""N is padded to a multiple of the first of these that lengthens it by at most this share, or of the last: its tiles
are as wide, and its products faster with wider ones."""
LENGTH = 128
"""What K is padded to a multiple of."""


def multiplies(product: Product) -> bool:
    """Whether humming is there, and has this product."""
    return product.format in DTYPES and product.weights == 1 and importlib.util.find_spec("humming") is not None


def compiled(product: Product, rows: int) -> None:
    """Compiles the kernel of this many rows into humming's cache, and those that quantise and arrange a weight."""
    from humming.kernel.humming import HummingKernel  # type: ignore[import-not-found]
    from humming.schema import BaseWeightSchema  # type: ignore[import-not-found]
    from humming.transform import prepare_layer_config  # type: ignore[import-not-found]

    options = _options(product)
    schema = BaseWeightSchema.from_config({"quant_method": "humming", **options.pop("weight_config")})
    config = prepare_layer_config(weight_schema=schema, **options)
    HummingKernel.prepare_kernels(config.to_str(), {"gemm_type": "dense"}, [(0, 1 << 30, _tuning(config, rows))])
    _arranged(product.format, product.group, product.dtype)


@cache
def _arranged(format: str, group: int, dtype: torch.dtype) -> None:
    """Quantises and arranges a small weight."""
    from bench.products import Product, linear

    dense = torch.randn(COLUMNS[0], LENGTH, dtype=dtype, device="cuda")
    _layer(Product("", linear, 1, format, (COLUMNS[0], LENGTH), dtype, group), dense)


def calls(product: Product, x: torch.Tensor, weights: Sequence[Any]) -> Sequence[Call]:
    """A call for each copy of the weights, which are quantised again."""
    (weight,) = weights[0]
    layer = _layer(product, weight.dequantize(x.dtype))
    tuning = json.dumps(_tuning(layer.humming_config, len(x)), default=lambda value: value.value)
    options = {"compute_config": json.dumps({"gemm_type": "dense"}), "tuning_config": tuning}
    return [partial(each, x, **options) for each in (layer, *(deepcopy(layer) for _ in weights[1:]))]


def _layer(product: Product, dense: torch.Tensor) -> Any:
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    layer = HummingLayer(**_options(product)).cuda()
    layer.load_from_unquantized(dense)
    layer.transform()
    return layer


def _options(product: Product) -> dict[str, Any]:
    columns, length = product.shape
    return {
        "shape_n": columns,
        "shape_k": length,
        "weight_config": {"dtype": DTYPES[product.format or ""], "group_size": product.group},
        "pad_n_to_multiple": next((c for c in COLUMNS if -columns % c <= MOST_PADDING * columns), COLUMNS[-1]),
        "pad_k_to_multiple": LENGTH,
        "torch_dtype": product.dtype,
    }


def _tuning(config: Any, rows: int) -> dict[str, Any]:
    """The configuration that humming's heuristic takes for so many rows."""
    from humming.tune import get_heuristics_config  # type: ignore[import-not-found]

    return dict(get_heuristics_config(config, shape_m=rows, gemm_type="dense"))
