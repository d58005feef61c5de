"""The kernels of some thousand random problems, for comparing two versions of jitgen by what they choose.

::

    python tests/schedules.py write before.json --problems 2000      # with one version of the code
    python tests/schedules.py compare before.json                    # with the other: exits 1 where one differs

A problem is a product, a reduction, or a pointwise function of random sizes and dtypes. Of its kernels on each route
the digest of the source (without its head, which describes the schedule in words), the options of the compiler, and the
launch are compared: two schedules that agree in these cannot be told apart. ``corpus.py`` compares the sources of some
hundred fixed functions, and shows their differences.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import _body

import jitgen

Spec = jitgen.TensorSpec
Function = Callable[..., Any]
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROUTES = (
    ("cpp", "x86-64-v3"),
    ("cpp", "x86-64-v4"),
    ("cuda", "sm_80"),
    ("cuda", "sm_89"),
    ("cuda", "sm_90a"),
    ("cuda", "sm_100a"),
    ("triton", "sm_80"),
    ("triton", "sm_90a"),
    ("triton", "gfx942"),
)


def _size(draw: random.Random, least: int, most: int) -> int:
    """Log-uniform; half of them multiples of 64."""
    size = round(math.exp(draw.uniform(math.log(least), math.log(most))))
    return -(-size // 64) * 64 if draw.random() < 0.5 else size


def linear(x: Any, w: Any) -> Any:
    return F.linear(x, w)


def swiglu(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def normed(x: Any, w: Any, bias: Any) -> Any:
    return F.gelu(F.linear(torch.relu(x), w, bias))


def separate(x: Any, q: Any, k: Any) -> Any:
    return F.linear(x, q), F.linear(x, k)


def transposed(x: Any, w: Any) -> Any:
    return x @ w


def softmax(x: Any) -> Any:
    return torch.softmax(x, -1)


def softmax_of_columns(x: Any) -> Any:
    return torch.softmax(x, 0)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def add_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
    h = x + residual
    return h, F.rms_norm(h, h.shape[-1:], weight, 1e-5)


def moments(x: Any) -> Any:
    return x.var(-1), x.amax(-1)


def column_sums(x: Any) -> Any:
    return x.sum(0)


def cumulated(x: Any) -> Any:
    return x.cumsum(-1)


def gelu(x: Any, y: Any) -> Any:
    return F.gelu(x) * y


def product(draw: random.Random) -> tuple[Function, tuple[Any, ...]]:
    rows, columns, length = _size(draw, 1, 8192), _size(draw, 16, 60000), _size(draw, 16, 30000)
    dtype = draw.choice(DTYPES)
    x = Spec((rows, length), dtype)
    if draw.random() < 0.15:
        matrices = _size(draw, 2, 300)
        x, w = Spec((matrices, rows, length), dtype), Spec((matrices, length, columns), dtype)
        return transposed, (x, w)
    format, group = draw.choice(((None, None), ("int4", 128), ("int4", 32), ("uint4", 64), ("int8", None)))
    if format:
        length = -(-length // 128) * 128
        x = Spec((rows, length), dtype)

    def weight(n: int) -> Any:
        return Spec((n, length), dtype, format=format, group_size=group)

    function = draw.choice((linear, linear, swiglu, normed, separate, transposed))
    if function is transposed:
        w = Spec((length, columns), dtype)
        return function, (x, w)
    if function is normed:
        return function, (x, weight(columns), Spec((columns,), dtype))
    others = {linear: (), swiglu: (columns,), separate: (_size(draw, 16, 60000),)}[function]
    return function, (x, weight(columns), *map(weight, others))


def rows(draw: random.Random) -> tuple[Function, tuple[Any, ...]]:
    count, length, dtype = _size(draw, 1, 100000), _size(draw, 1, 300000), draw.choice(DTYPES)
    x, vector = Spec((count, length), dtype), Spec((length,), dtype)
    function = draw.choice((softmax, softmax_of_columns, layer_norm, add_rms_norm, moments, column_sums, cumulated))
    others = {layer_norm: (vector, vector), add_rms_norm: (x, vector)}.get(function, ())
    return function, (x, *others)


def pointwise(draw: random.Random) -> tuple[Function, tuple[Any, ...]]:
    shape = (_size(draw, 1, 10000), _size(draw, 1, 10000))
    return gelu, (Spec(shape, draw.choice(DTYPES)), Spec(shape[1:], draw.choice(DTYPES)))


def chosen(seed: int, problem: int) -> dict[str, Any]:
    """What is generated for one problem, on each route."""
    draw = random.Random(f"{seed}/{problem}")
    function, arguments = draw.choices((product, rows, pointwise), (6, 4, 1))[0](draw)
    found: dict[str, Any] = {"of": f"{function.__name__}({', '.join(map(str, arguments))})"}
    for backend, target in ROUTES:
        try:
            low = jitgen.jit(function).lower(*arguments, backend=backend, target=target).lowered
        except jitgen.UnsupportedError as error:
            found[f"{backend} {target}"] = f"refused: {type(error).__name__}"
            continue
        kernels = []
        for number in range(len(low.program.kernels)):
            source, _ = low.render(number)
            text = "\n".join(_body(source.text))
            shape = low.launch(number)
            launch = [*shape.grid, *(shape.block if low.route.device.is_gpu else ()), shape.cluster, shape.any_cluster]
            launch += [shape.shared_bytes, sorted(shape.attributes), repr(shape.persistence)]
            digest = hashlib.sha256(f"{text}\n{source.options}".encode()).hexdigest()
            kernels.append([digest[:16], launch])
        found[f"{backend} {target}"] = kernels
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.verb == "write":
        numbers = range(options.first, options.first + options.problems)
        written = {"seed": options.seed, "problems": {number: chosen(options.seed, number) for number in numbers}}
        options.file.write_text(json.dumps(written))
        print(f"{options.problems} problems written")
        return 0
    before = json.loads(options.file.read_text())
    routes = differing = 0
    for number, old in before["problems"].items():
        new = json.loads(json.dumps(chosen(before["seed"], int(number))))
        routes += len(old) - 1
        for route in old.keys() | new.keys():
            if old.get(route) != new.get(route):
                differing += 1
                print(f"{new['of']}, {route}:\n  {old.get(route)}\n  {new.get(route)}")
    print(f"{len(before['problems'])} problems on {routes} routes, {differing} of them different")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
