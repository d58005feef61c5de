"""Defines the kinds of scan: how an element of a row is combined with those before it.

A kind is an associative operation with an identity, so that a row may be combined in tiles: a tile is scanned by
itself, and the *state* of all tiles before it, which is carried along the row, is combined with each of its results
(Blelloch, "Prefix Sums and Their Applications", CMU-CS-90-190, 1990). A state has one component or two:

=============  ======================================================================================================
``sum``        the sum; a float32 sum is carried from tile to tile in float64, so that its error does not grow with
               the number of tiles
``prod``       the product
``max``        the greatest element so far, ``min`` the smallest. NaN is beyond every number. Of equal elements it is
               the later one, which matters for -0.0 and 0.0
``argmax``     where that element stands, counted from the row's beginning, and ``argmin``; the state is the element
               and its index. The later one of equal elements, and the latest NaN, as in torch
``logsumexp``  the logarithm of the sum of exponentials; the state is the greatest element ``top`` and the sum of
               exp(x - top) (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018)
=============  ======================================================================================================
"""

from __future__ import annotations

import math

import torch

from jitgen.ir.ops import FLOATS
from jitgen.spec import DTYPES

SCANS = ("sum", "prod", "max", "min", "argmax", "argmin", "logsumexp")
"""What a ``scan`` node computes."""

PLACES = ("argmax", "argmin")
"""The kinds whose results say where an element stands."""

EXTREMA = {"max": "max", "min": "min", "argmax": "max", "argmin": "min"}
"""The kinds that follow one element of the row, with the order by which it is chosen."""


def carry_dtype(kind: str, dtype: str) -> str:
    """Returns the dtype in which the first component of a state is carried along a row, of elements of compute
    ``dtype``."""
    return "float64" if kind == "sum" and dtype in FLOATS else dtype


def identity(kind: str, dtype: str) -> bool | int | float:
    """Returns the first component, of compute ``dtype``, of the state of no elements."""
    if kind in ("sum", "prod"):
        return int(kind == "prod")
    low = EXTREMA.get(kind, "max") == "max"
    if dtype in FLOATS:
        return -math.inf if low else math.inf
    limits = torch.iinfo(DTYPES[dtype])
    return limits.min if low else limits.max
