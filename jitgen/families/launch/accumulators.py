"""Counts the sums that a user's Triton kernel holds for a product, since a rule behind it runs on few threads.

A tile of 128 x 256 sums is 128 registers of each of 256 threads, so that a multiprocessor has one block, and nothing
hides the instructions of what follows the product.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping

from jitgen.families.launch.schedule import USUAL
from jitgen.families.launch.splices import function_of
from jitgen.ir.attributes import LaunchAttrs
from jitgen.ir.launches import CONFIG, CONSTANT, TRITON, Config
from jitgen.kernel.operands import WARP

MANY = 128
"""Sums of a thread from which on few threads are resident: behind 64 of them, in tiles of 128 x 64, a GELU cost
nothing, and behind 128, in tiles of 128 x 256, 48 us (4096 x 4096 elements, docs/measured/h100-own-kernels.json)."""
SHARE_OF_VECTOR = 0.056
"""The share of a chip's rate of vector operations that a rule reaches behind so many sums: bias, GELU and residual of
4096 x 4096 elements took 58 us behind a product in tiles of 128 x 256 (H200, docs/measured/h200-own-kernels.json)."""


def sums_of_a_thread(attrs: LaunchAttrs) -> int:
    """Returns how many sums of a product a thread holds, in the first configuration; 0 where nobody can tell, or the
    kernel has no products."""
    own = attrs.kernel
    if own.language != TRITON or not has_products(own.text):
        return 0
    config = Config(*attrs.configs[0])
    chosen = dict(config.constants)
    texts = {name: text for name, how, text in attrs.parameters if how == CONSTANT}
    texts |= {name: chosen[name] for name, how, _ in attrs.parameters if how == CONFIG}
    known = {name: int(text) for name, text in texts.items() if text.isdigit()}
    warps = dict(config.options).get("num_warps", USUAL["num_warps"])
    return _largest(own.text, own.entry, tuple(sorted(known.items()))) // (warps * WARP)


def has_products(text: str) -> bool:
    """Returns whether a kernel multiplies tiles."""
    return ".dot(" in text or ".dot_scaled(" in text


@functools.lru_cache(256)
def _largest(text: str, entry: str, known: tuple[tuple[str, int], ...]) -> int:
    """Returns the elements of the largest tile of zeros that the kernel makes, where its sizes are known."""
    names = dict(known)
    names |= {name: value for name, value in _constants(text).items() if name not in names}
    largest = 0
    for node in ast.walk(function_of(text, entry)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("tl.zeros", "tl.full"):
            continue
        if not node.args or not isinstance(node.args[0], (ast.Tuple, ast.List)):
            continue
        sizes = [_number(size, names) for size in node.args[0].elts]
        if None not in sizes:
            largest = max(largest, math.prod(size for size in sizes if size is not None))
    return largest


def _constants(text: str) -> dict[str, int]:
    """Returns the integers that a module defines."""
    constants = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
            if isinstance(value, ast.Constant) and type(value.value) is int:
                constants[node.targets[0].id] = value.value
    return constants


def _number(node: ast.expr, names: Mapping[str, int]) -> int | None:
    """Returns the integer that ``node`` is; None where nobody can tell."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.FloorDiv)):
        left, right = _number(node.left, names), _number(node.right, names)
        if left is None or not right:
            return None
        return left * right if isinstance(node.op, ast.Mult) else left // right
    return None
