"""Times ordinary functions that are several kernels, and counts these: ``python -m bench.plans --json plans.json``.

What is measured is the plan: how many kernels a function is, what they move and compute, and how long they take. The
cases are decoder layers of Llama-3-8B's sizes (dense bfloat16 and int4), chains of residual blocks, optimisers written
as loops over lists of parameters, and results that are read through several views. The peers are eager torch and
torch.compile, and for optimisers torch's functions of lists, in the same process and on the same data; a figure is the
median time of a call in microseconds, in a CUDA graph on a GPU. An error is relative, in norm, against eager torch in
float64. The file is written after every case.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import jitgen
from bench.measurement import made, relative_error
from bench.records import end, write
from bench.timing import medians

Function = Callable[..., Any]
CACHE = 2048
"""Positions of the cache of a decoder's step."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder layer.

    Attributes:
        hidden: width of the residual stream.
        heads, kv_heads: heads of queries, and of keys and values.
        width: width of a head.
        inner: width of the MLP.
    """

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    inner: int = 14336


@dataclass(frozen=True)
class Case:
    """A function with its arguments.

    Attributes:
        arguments: of a call.
        reference: the same in float64, for eager torch; empty where the dtypes are what is tested.
        updates: whether the function changes its arguments, which are then what is compared.
        foreach: the same by torch's functions of lists (``torch._foreach_*``), a peer.
    """

    name: str
    function: Function
    arguments: tuple[Any, ...]
    reference: tuple[Any, ...] = ()
    updates: bool = False
    foreach: Function | None = None


def decoder_layer(sizes: Sizes) -> Function:
    """Returns a decoder layer in plain PyTorch, with a product of its own for each of q, k, v, gate and up."""

    def heads(x: Tensor, weight: Tensor, count: int) -> Tensor:
        return F.linear(x, weight).view(x.shape[0], x.shape[1], count, sizes.width).transpose(1, 2)

    def layer(x, first, wq, wk, wv, wo, second, gate, up, down):
        h = F.rms_norm(x, (sizes.hidden,), first, 1e-5)
        q, k, v = heads(h, wq, sizes.heads), heads(h, wk, sizes.kv_heads), heads(h, wv, sizes.kv_heads)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(o.transpose(1, 2).flatten(2), wo)
        h = F.rms_norm(x, (sizes.hidden,), second, 1e-5)
        return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    return layer


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def decoder_step(sizes: Sizes, norms_of_heads: bool) -> Function:
    """Returns a step of decoding over a cache, to which keys and values are appended in place. Heads are rotated, and
    those of queries and keys may be normalised before, as in Qwen3."""

    def heads(x: Tensor, weight: Tensor, count: int, norm: Tensor | None = None) -> Tensor:
        y = F.linear(x, weight).view(x.shape[0], x.shape[1], count, sizes.width)
        return (y if norm is None else F.rms_norm(y, (sizes.width,), norm, 1e-5)).transpose(1, 2)

    def step(x, first, wq, wk, wv, wo, second, gate, up, down, cos, sin, of_q, of_k, keys, values, start):
        h = F.rms_norm(x, (sizes.hidden,), first, 1e-5)
        q = rotated(heads(h, wq, sizes.heads, of_q if norms_of_heads else None), cos, sin)
        k = rotated(heads(h, wk, sizes.kv_heads, of_k if norms_of_heads else None), cos, sin)
        keys.index_copy_(2, start, k)
        values.index_copy_(2, start, heads(h, wv, sizes.kv_heads))
        seen = torch.arange(keys.shape[2], device=x.device)[None] <= start
        o = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        x = x + F.linear(o.transpose(1, 2).flatten(2), wo)
        h = F.rms_norm(x, (sizes.hidden,), second, 1e-5)
        return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    return step


def residual_blocks(count: int, norm: bool) -> Function:
    """Returns ``count`` residual blocks of two products each."""

    def blocks(x: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        for w1, w2 in zip(first, second, strict=True):
            h = F.rms_norm(x, (x.shape[-1],)) if norm else x
            x = x + F.linear(F.silu(F.linear(h, w1)), w2)
        return x

    return blocks


def adamw(parameters, gradients, means, squares, rate: float = 1e-3):
    """AdamW's step as a loop over parameters, with the corrections of the first step."""
    for p, g, m, v in zip(parameters, gradients, means, squares, strict=True):
        p.mul_(1 - rate * 0.01)
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.addcdiv_(m / 0.1, (v / 0.001).sqrt().add_(1e-8), value=-rate)


def momentum(parameters, gradients, means):
    for p, g, m in zip(parameters, gradients, means, strict=True):
        m.mul_(0.9).add_(g)
        p.sub_(0.1 * m)


def moving_average(averages, parameters):
    for a, p in zip(averages, parameters, strict=True):
        a.lerp_(p, 0.01)


def adamw_of_lists(parameters, gradients, means, squares, rate: float = 1e-3):
    torch._foreach_mul_(parameters, 1 - rate * 0.01)
    torch._foreach_lerp_(means, gradients, 0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, gradients, gradients, value=0.001)
    roots = torch._foreach_sqrt(torch._foreach_div(squares, 0.001))
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(parameters, torch._foreach_div(means, 0.1), roots, value=-rate)


def momentum_of_lists(parameters, gradients, means):
    torch._foreach_mul_(means, 0.9)
    torch._foreach_add_(means, gradients)
    torch._foreach_add_(parameters, means, alpha=-0.1)


def moving_average_of_lists(averages, parameters):
    torch._foreach_lerp_(averages, parameters, 0.01)


def views_of_a_scan(x: Tensor) -> tuple[Tensor, Tensor]:
    left, right = x.cumsum(-1).chunk(2, -1)
    return left.relu(), right * 2


def best_eight(x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(8)
    return values.softmax(-1), indices


def router(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Which 8 of 128 experts take a token, and by which factors."""
    values, indices = logits.softmax(-1).topk(8)
    return values / values.sum(-1, keepdim=True), indices


def softmax_thrice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p = x.softmax(-1)
    return p, p[0] * 2, p.T.contiguous()


def product_thrice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = F.linear(x, w)
    half = y.shape[1] // 2
    return y[:, :half].relu(), y[:, half:].sigmoid(), y.T.contiguous()


def newton_schulz(x: Tensor) -> Tensor:
    """Five steps towards the nearest orthogonal matrix, as Muon takes them."""
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias))


def row(tensors: Sequence[Tensor]) -> None:
    (x,) = tensors
    x[5].add_(1)


def column(tensors: Sequence[Tensor]) -> None:
    (x,) = tensors
    x[:, 3].mul_(0.5)


def cases(device: str, sizes: Sizes, rows: Sequence[int]) -> list[Case]:
    """All cases, with random data of ``device``."""
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    return [*_decoders(sizes, rows, kind), *_blocks(sizes, kind), *_updates(device), *_others(rows, kind)]


def _weight(columns: int, length: int, kind: dict[str, Any]) -> Tensor:
    return torch.randn(columns, length, **kind) / length**0.5


def _decoders(sizes: Sizes, rows: Sequence[int], kind: dict[str, Any]) -> Iterator[Case]:
    """Decoder layers and steps, with dense weights and with weights of int4."""
    q, kv = sizes.heads * sizes.width, sizes.kv_heads * sizes.width
    norms = [torch.rand(sizes.hidden, **kind) + 0.5 for _ in range(2)]
    shapes = [(q, sizes.hidden), (kv, sizes.hidden), (kv, sizes.hidden), (sizes.hidden, q)]
    products = [_weight(*shape, kind) for shape in shapes]
    inner = [_weight(sizes.inner, sizes.hidden, kind) for _ in range(2)]
    dense = [norms[0], *products, norms[1], *inner, _weight(sizes.hidden, sizes.inner, kind)]
    int4: list[Any] = [each if each.dim() == 1 else jitgen.quantize(each, "int4", group_size=128) for each in dense]
    restored = [each if each.dim() == 1 else each.dequantize(torch.float64) for each in int4]
    forms = (("dense", dense, dense), ("int4", int4, restored))
    layer = decoder_layer(sizes)
    for count in rows:
        x = torch.randn(1, count, sizes.hidden, **kind)
        for form, weights, wide in forms:
            exact = (x.double(), *(each.double() for each in wide))
            yield Case(f"decoder layer, {count} rows, {form}", layer, (x, *weights), exact)
    x = torch.randn(1, 1, sizes.hidden, **kind)
    others = [torch.randn(1, sizes.width, **kind) for _ in range(2)]
    others += [torch.rand(sizes.width, **kind) + 0.5 for _ in range(2)]
    others += [torch.randn(1, sizes.kv_heads, CACHE, sizes.width, **kind) for _ in range(2)]
    start = torch.tensor([CACHE - 50], device=kind["device"])
    for norms_of_heads in (False, True):
        step = decoder_step(sizes, norms_of_heads)
        name = f"decoder step{', norms of heads' * norms_of_heads}"
        for form, weights, wide in forms:
            exact = (*(each.double() for each in (x, *wide, *others)), start)
            yield Case(f"{name}, {form}", step, (x, *weights, *others, start), exact)


def _blocks(sizes: Sizes, kind: dict[str, Any]) -> Iterator[Case]:
    width = sizes.hidden // 4
    first, second = ([_weight(*shape, kind) for _ in range(8)] for shape in ((2 * width, width), (width, 2 * width)))
    x = torch.randn(64, width, **kind)
    chain = (x.double(), [w.double() for w in first], [w.double() for w in second])
    for norm in (True, False):
        name = f"eight residual blocks, {'with' if norm else 'without'} norm"
        yield Case(name, residual_blocks(8, norm), (x, first, second), chain)


def _updates(device: str) -> Iterator[Case]:
    """Optimisers, and a row and a column that are changed in place."""
    small = [2**16, 4096, 2**16 + 24, 1000, 2**17]

    def lists(count: int, counts: Sequence[int], number: int) -> tuple[list[Tensor], ...]:
        lengths = [counts[index % len(counts)] for index in range(count)]
        return tuple([torch.rand(length, device=device) for length in lengths] for _ in range(number))

    for words, count, counts in (
        ("one tensor of 2^20", 1, [2**20]),
        ("5 tensors", 5, small),
        ("50 tensors", 50, small),
    ):
        yield Case(f"AdamW, {words}", adamw, lists(count, counts, 4), updates=True, foreach=adamw_of_lists)
    yield Case("momentum, 5 tensors", momentum, lists(5, small, 3), updates=True, foreach=momentum_of_lists)
    averages = lists(5, small, 2)
    yield Case("moving average, 5 tensors", moving_average, averages, updates=True, foreach=moving_average_of_lists)
    yield Case("a row of 4096", row, ([torch.rand(4096, 2048, device=device)],), updates=True)
    yield Case("a column of 2048", column, ([torch.rand(4096, 2048, device=device)],), updates=True)


def _others(rows: Sequence[int], kind: dict[str, Any]) -> Iterator[Case]:
    """Results that are read through several views, routers, norms and products."""
    device = kind["device"]
    x = torch.randn(2048, 4096, device=device)
    for function in (views_of_a_scan, best_eight, softmax_thrice):
        yield Case(function.__name__.replace("_", " "), function, (x,), (x.double(),))
    for count in rows:
        logits = torch.randn(count, 128, device=device)
        yield Case(f"router, {count} rows", router, (logits,), (logits.double(),))
    images, scales = torch.randn(4, 320, 64, 64, **kind), torch.randn(2, 320, device=device)
    parameters = (images, *scales.to(kind["dtype"]))
    yield Case("group norm and SiLU", group_norm, parameters, tuple(each.double() for each in parameters))
    x = torch.randn(1024, 4096, **kind)
    yield Case("Newton-Schulz, five steps", newton_schulz, (x,), (x.double(),))
    x, w = torch.randn(512, 1024, **kind), _weight(4096, 1024, kind)
    yield Case("product thrice", product_thrice, (x, w), (x.double(), w.double()))


def counts(function: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Kernels, bytes and operations of a call, as jitgen counts them."""
    lowered = function.lower(*arguments).lowered
    work = [lowered.work(number) for number in range(len(lowered.program.kernels))]
    names = [kernel.family for kernel in lowered.program.kernels]
    return {
        "kernels": len(work),
        "families": {name: names.count(name) for name in dict.fromkeys(names)},
        "bytes": sum(each.moved for each in work),
        "operations": sum(each.flops for each in work),
    }


def error(case: Case, function: Function) -> float:
    """The largest relative error among the results of ``function``, or among the arguments that it changes."""
    if case.updates:
        results, wanted = (
            [[tensor.to(dtype, copy=True) for tensor in tensors] for tensors in case.arguments]
            for dtype in (torch.float32, torch.float64)
        )
        function(*results)
        case.function(*wanted)
        results, wanted = ([tensor for tensors in lists for tensor in tensors] for lists in (results, wanted))
    else:
        results, wanted = function(*case.arguments), case.function(*(case.reference or case.arguments))
    pairs = zip(*((each,) if isinstance(each, Tensor) else each for each in (results, wanted)), strict=True)
    return max(relative_error(result, reference.double()) for result, reference in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--small", action="store_true", help="a layer of hidden 256 with 4 heads, for a CPU")
    parser.add_argument("--only", nargs="+", default=[""], help="the cases whose names have one of these words")
    parser.add_argument("--seconds", type=float, default=0.4, help="to spend on the timing of a case")
    parser.add_argument("--without-inductor", action="store_true")
    parser.add_argument("--backend", help="of jitgen; by default that of the device")
    parser.add_argument("--commit", help="the commit to record")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = Sizes(256, 4, 2, 64, 512) if options.small else Sizes()
    record = made("bench.plans", options.commit, options.device) | {"what": __doc__.splitlines()[0]}
    rows: list[dict[str, Any]] = []
    for case in cases(options.device, sizes, options.rows):
        if not any(word in case.name for word in options.only):
            continue
        row: dict[str, Any] = {"case": case.name}
        try:
            own: Any = jitgen.jit(backend=options.backend)(case.function)
            row |= counts(own, case.arguments)
            with torch.no_grad():
                row["error"] = error(case, own)
                ways: dict[str, Function] = {"jitgen": own}
                if "int4" not in case.name:
                    ways["eager"] = case.function
                    if case.foreach is not None:
                        ways["foreach"] = case.foreach
                    if not options.without_inductor:
                        ways["torch.compile"] = torch.compile(case.function, dynamic=False)
                calls = {way: [functools.partial(call, *case.arguments)] for way, call in ways.items()}
                seconds = medians(calls, options.device, options.seconds)
            row["us"] = {way: round(time * 1e6, 2) for way, time in seconds.items()}
        except Exception as exception:  # a case that a tree cannot run is a row as well
            row["failed"] = f"{type(exception).__name__}: {exception}".splitlines()[0]
        rows.append(row)
        print(*(f"{key} {value:.3g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
        if options.json:
            write(options.json, record | {"rows": rows})
    end(rows)


if __name__ == "__main__":
    main()
