"""What plans amount to beside the least that a function needs: a table that planners tighten, and the numbers of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from bench.layers import LAYERS
from jitgen.balance import Balance
from jitgen.inspect import Lowered
from jitgen.lowering import CallFacts
from jitgen.nn import functional

half, single = torch.bfloat16, torch.float32


def spec(*shape: int, dtype: torch.dtype = half, **options: Any) -> Any:
    return jitgen.TensorSpec(shape, dtype, **options)


HIDDEN, HEADS, GROUPS, WIDTH, INNER = 1024, 8, 2, 128, 2816


def decoder_layer(x, first, wq, wk, wv, wo, second, gate, up, down):  # type: ignore[no-untyped-def]
    def heads(h: Any, weight: Any, count: int) -> Any:
        return F.linear(h, weight).view(h.shape[0], h.shape[1], count, WIDTH).transpose(1, 2)

    h = F.rms_norm(x, (HIDDEN,), first, 1e-5)
    q, k, v = heads(h, wq, HEADS), heads(h, wk, GROUPS), heads(h, wv, GROUPS)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(o.transpose(1, 2).flatten(2), wo)
    h = F.rms_norm(x, (HIDDEN,), second, 1e-5)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def decoder_arguments(rows: int, **weights: Any) -> tuple[Any, ...]:
    q, kv = HEADS * WIDTH, GROUPS * WIDTH
    products = [spec(q, HIDDEN, **weights), *2 * [spec(kv, HIDDEN, **weights)], spec(HIDDEN, q, **weights)]
    mlp = [*2 * [spec(INNER, HIDDEN, **weights)], spec(HIDDEN, INNER, **weights)]
    return spec(1, rows, HIDDEN), spec(HIDDEN), *products, spec(HIDDEN), *mlp


def rope_layer(normed: bool = False, joined: bool = False, place: bool = False) -> Callable[..., Any]:
    """A decoder layer with a rotary embedding.

    Args:
        normed: whether heads of queries and keys are normalised, as in Qwen3.
        joined: whether keys and values are appended to a cache by ``cat``, and returned.
        place: whether they are appended to one in place, at positions that a tensor tells.
    """

    def layer(  # type: ignore[no-untyped-def]
        x, first, wq, wk, wv, wo, second, gate, up, down, cos, sin, of_q, of_k, keys=None, values=None, start=None
    ):
        def heads(h: Any, weight: Any, count: int, norm: Any = None) -> Any:
            y = F.linear(h, weight).view(h.shape[0], h.shape[1], count, WIDTH)
            return (y if norm is None else F.rms_norm(y, (WIDTH,), norm, 1e-5)).transpose(1, 2)

        h = F.rms_norm(x, (HIDDEN,), first, 1e-5)
        q = rope(heads(h, wq, HEADS, of_q if normed else None), cos, sin)
        k, v = rope(heads(h, wk, GROUPS, of_k if normed else None), cos, sin), heads(h, wv, GROUPS)
        if joined:
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        if place:
            functional.append(keys, k, start)
            functional.append(values, v, start)
            o = functional.attend(q, keys, values, start)
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=not joined, enable_gqa=True)
        x = x + F.linear(o.transpose(1, 2).flatten(2), wo)
        h = F.rms_norm(x, (HIDDEN,), second, 1e-5)
        x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        return (x, k, v) if joined else x

    return layer


def rope_arguments(rows: int, cache: int = 0) -> tuple[Any, ...]:
    kept = 2 * [spec(1, GROUPS, cache, WIDTH)] if cache else []
    return (*decoder_arguments(rows), *2 * [spec(rows, WIDTH)], *2 * [spec(WIDTH)], *kept)


def appending_arguments(rows: int) -> tuple[Any, ...]:
    return (*rope_arguments(rows, cache=2048), spec(1, dtype=torch.int64))


def residual_blocks(x, *weights):  # type: ignore[no-untyped-def]
    for w1, w2 in zip(weights[::2], weights[1::2], strict=True):
        x = x + F.linear(F.silu(F.linear(x, w1)), w2)
    return x


def normed_blocks(x, *weights):  # type: ignore[no-untyped-def]
    for w1, w2 in zip(weights[::2], weights[1::2], strict=True):
        x = x + F.linear(F.silu(F.linear(F.rms_norm(x, x.shape[-1:]), w1)), w2)
    return x


def adamw(p, g, m, v):  # type: ignore[no-untyped-def]
    p.mul_(1 - 1e-5)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m / 0.1, (v / 0.001).sqrt().add_(1e-8), value=-1e-3)


def momentum(p, g, m):  # type: ignore[no-untyped-def]
    m.mul_(0.9).add_(g)
    p.sub_(0.1 * m)


def momenta(p1, p2, p3, g1, g2, g3, m1, m2, m3):  # type: ignore[no-untyped-def]
    for p, g, m in ((p1, g1, m1), (p2, g2, m2), (p3, g3, m3)):
        momentum(p, g, m)


def two_views_of_a_scan(x):  # type: ignore[no-untyped-def]
    left, right = x.cumsum(-1).chunk(2, -1)
    return left.relu(), right * 2


def best_eight(x):  # type: ignore[no-untyped-def]
    values, indices = x.topk(8)
    return values.softmax(-1), indices


def router(x, weight):  # type: ignore[no-untyped-def]
    values, indices = F.softmax(F.linear(x, weight).float(), -1).topk(8, -1)
    return (values / values.sum(-1, keepdim=True)).to(x.dtype), indices


def softmax_and_scan(x):  # type: ignore[no-untyped-def]
    p = x.softmax(-1)
    return p, p.cumsum(-1)


def entropy(x):  # type: ignore[no-untyped-def]
    p = x.softmax(-1)
    return -(p * p.log()).sum(dtype=torch.float32)


def three_views_of_a_softmax(x):  # type: ignore[no-untyped-def]
    p = x.softmax(-1)
    return p, p[0] * 2, p.T.contiguous()


def three_views_of_a_product(x, w):  # type: ignore[no-untyped-def]
    y = F.linear(x, w)
    half_way = y.shape[1] // 2
    return y[:, :half_way].relu(), y[:, half_way:].sigmoid(), y.T.contiguous()


def rope(x, cos, sin):  # type: ignore[no-untyped-def]
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def norm_rope_gate(x, weight, cos, sin, gate):  # type: ignore[no-untyped-def]
    return rope(F.rms_norm(x, x.shape[-1:], weight), cos, sin) * torch.sigmoid(gate)


def qkv_of_one_activation(x, q, k, v):  # type: ignore[no-untyped-def]
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def two_slices(a, b):  # type: ignore[no-untyped-def]
    k = a.new_empty(*a.shape[:-1], a.shape[-1] + b.shape[-1])
    k[..., : a.shape[-1]].copy_(a)
    k[..., a.shape[-1] :].copy_(b)
    return k


def append(cache, k):  # type: ignore[no-untyped-def]
    cache[:, 100:101].copy_(k * 2)


def rows_swapped(x):  # type: ignore[no-untyped-def]
    before = x[5].clone()
    x[5] = x[6]
    x[6] = before


def scan_steps(x, decay):  # type: ignore[no-untyped-def]
    h, results = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device), []
    for step in range(8):
        h = h * decay[:, step] + x[:, step]
        results.append(h.tanh())
    return torch.stack(results, 1)


@dataclass(frozen=True)
class Row:
    """A function, and what its plan amounts to at most.

    Attributes:
        operations, bytes: in units of the least.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    kernels: int
    operations: float
    bytes: float


square = spec(1024, 1024)
head = [spec(2, 8, 512, 64)] * 3
images = spec(8, 64, 32, 32)
ROWS = {
    "decoder layer, 1 row": Row(decoder_layer, decoder_arguments(1), 7, 1.0, 1.0),
    "decoder layer, 64 rows": Row(decoder_layer, decoder_arguments(64), 8, 1.0, 1.22),
    "decoder layer, 512 rows": Row(decoder_layer, decoder_arguments(512), 7, 1.0, 1.79),
    "decoder layer, int4, 1 row": Row(decoder_layer, decoder_arguments(1, format="int4", group_size=128), 7, 1.0, 1.01),
    "decoder layer, int4, 512 rows": Row(
        decoder_layer, decoder_arguments(512, format="int4", group_size=128), 7, 1.0, 3.45
    ),
    "decoder layer with rope, 64 rows": Row(rope_layer(), rope_arguments(64), 9, 1.0, 1.24),
    "decoder layer with rope, 512 rows": Row(rope_layer(), rope_arguments(512), 8, 1.0, 1.95),
    "decoder layer with norms of heads and rope, 512 rows": Row(rope_layer(True), rope_arguments(512), 8, 1.0, 1.95),
    "decoder layer that joins a cache, 1 row": Row(
        rope_layer(joined=True), rope_arguments(1, cache=2048), 8, 1.0, 1.08
    ),
    "decoder layer that joins a cache, with norms of heads, 1 row": Row(
        rope_layer(True, joined=True), rope_arguments(1, cache=2048), 8, 1.0, 1.08
    ),
    "decoder layer that appends to a cache, 1 row": Row(rope_layer(place=True), appending_arguments(1), 8, 1.0, 1.01),
    "decoder layer that appends to a cache, with norms of heads, 1 row": Row(
        rope_layer(True, place=True), appending_arguments(1), 8, 1.0, 1.01
    ),
    "decoder layer that appends to a cache, with norms of heads, 16 rows": Row(
        rope_layer(True, place=True), appending_arguments(16), 8, 1.0, 1.03
    ),
    "residual blocks": Row(residual_blocks, (spec(256, 512), *8 * [spec(512, 512)]), 8, 1.0, 2.0),
    "residual blocks with norms": Row(normed_blocks, (spec(256, 512), *8 * [spec(512, 512)]), 12, 1.0, 2.45),
    "gelu": Row(F.gelu, (square,), 1, 1.0, 1.0),
    "softmax": Row(lambda x: torch.softmax(x, -1), (square,), 1, 1.09, 1.0),
    "softmax of columns": Row(lambda x: torch.softmax(x, 0), (square,), 1, 1.09, 1.0),
    "log_softmax": Row(lambda x: torch.log_softmax(x, -1), (spec(64, 32000),), 1, 1.67, 1.0),
    "cross entropy": Row(F.cross_entropy, (spec(64, 32000), spec(64, dtype=torch.int64)), 2, 2.43, 1.0),
    "layer norm": Row(
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), (square, spec(1024), spec(1024)), 1, 1.58, 1.0
    ),
    "group norm": Row(lambda x: F.group_norm(x, 8), (images,), 1, 1.81, 1.0),
    "group norm with weights": Row(
        lambda x, w, b: F.silu(F.group_norm(x, 8, w, b)), (images, spec(64), spec(64)), 2, 1.34, 1.5
    ),
    "mean and variance": Row(lambda x: (x.mean(-1), x.var(-1)), (square,), 1, 1.5, 1.0),
    "sum of all": Row(lambda x: x.sum(), (square,), 2, 1.01, 1.01),
    "rope": Row(rope, (spec(1, 512, 8, 128), spec(512, 1, 128), spec(512, 1, 128)), 1, 1.0, 1.0),
    "norm, rope and gate": Row(
        norm_rope_gate,
        (spec(512, 8, 128), spec(128), spec(512, 1, 128), spec(512, 1, 128), spec(512, 8, 128)),
        1,
        1.08,
        1.0,
    ),
    "linear": Row(F.linear, (square, square), 1, 1.0, 1.0),
    "linear, few rows": Row(F.linear, (spec(4, 1024), square), 1, 1.0, 1.0),
    "linear, bias and gelu": Row(lambda x, w, b: F.gelu(F.linear(x, w, b)), (square, square, spec(1024)), 1, 1.0, 1.0),
    "swiglu": Row(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), (square, square, square), 1, 1.0, 1.0),
    "q, k and v": Row(qkv_of_one_activation, (square, square, spec(256, 1024), spec(256, 1024)), 1, 1.0, 1.0),
    "attention": Row(F.scaled_dot_product_attention, (*head,), 1, 0.97, 1.0),
    "attention, one row": Row(F.scaled_dot_product_attention, (spec(2, 8, 1, 64), *head[1:]), 1, 0.97, 1.0),
    "adamw": Row(adamw, tuple(4 * [spec(1024, 1024, dtype=single)]), 1, 1.12, 1.0),
    "momentum": Row(momentum, tuple(3 * [spec(1024, 1024, dtype=single)]), 1, 1.0, 1.0),
    "momentum of three": Row(momenta, tuple(9 * [spec(1024, 1024, dtype=single)]), 1, 1.0, 1.0),
    "two views of a scan": Row(two_views_of_a_scan, (spec(256, 4096, dtype=single),), 1, 1.5, 1.0),
    "best eight": Row(best_eight, (spec(256, 1024, dtype=single),), 2, 1.08, 1.03),
    "router": Row(router, (spec(64, 2048), spec(128, 2048)), 3, 1.0, 1.38),
    "softmax and its sum so far": Row(softmax_and_scan, (square,), 2, 1.93, 1.34),
    "entropy": Row(entropy, (square,), 2, 1.06, 1.01),
    "three views of a softmax": Row(three_views_of_a_softmax, (square,), 2, 1.09, 1.34),
    "three views of a product": Row(three_views_of_a_product, (square, square), 2, 1.0, 1.76),
    "embedding": Row(F.embedding, (spec(64, dtype=torch.int64), spec(32000, 1024)), 1, 1.0, 1.0),
    "cat": Row(lambda x, y: torch.cat([x, y * 2], 1), (square, square), 1, 1.0, 1.0),
    "keys of two slices": Row(two_slices, (spec(2, 512, 8, 128), spec(2, 512, 1, 64)), 1, 1.0, 1.0),
    "appending to a cache": Row(append, (spec(2, 4096, 128), spec(2, 1, 128)), 1, 1.0, 1.0),
    "a row that is updated": Row(lambda x: x[5].add_(1), (square,), 1, 1.0, 1.0),
    "a diagonal that is updated": Row(lambda x: x.diagonal().mul_(2), (square,), 1, 1.0, 1.0),
    "a column divided by its norm": Row(lambda x: x[:, 3].div_(x[:, 3].norm()), (square,), 2, 1.34, 2.01),
    "rows that change places": Row(rows_swapped, (square,), 3, 1.0, 2.0),
    "eight steps of a recurrence": Row(
        scan_steps, (spec(4096, 8, dtype=single), spec(4096, 8, dtype=single)), 1, 1.0, 1.0
    ),
}


def lowered(function: Callable[..., Any], *arguments: Any) -> Lowered:
    return jitgen.jit(function).lower(*arguments, backend="cuda", target="sm_90a")


@pytest.mark.parametrize("name", ROWS)
def test_a_plan_wastes_no_more_than_it_did(name: str) -> None:
    row = ROWS[name]
    balance = lowered(row.function, *row.arguments).balance
    assert balance.kernels <= row.kernels, f"{name}: {balance}"
    assert balance.operations_ratio <= row.operations + 0.005, f"{name}: {balance}"
    assert balance.bytes_ratio <= row.bytes + 0.005, f"{name}: {balance}"


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_as_few_kernels_as_it_was(name: str) -> None:
    layer = LAYERS[name]
    balance = lowered(layer.function, *layer.specs(64)).balance
    assert balance.kernels <= layer.kernels, f"{name}: {balance}"
    assert balance.operations_ratio <= 1.005, f"{name}: {balance}"


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("cpp", "x86-64-v3")])
def test_a_backward_computes_each_product_once(backend: str, target: str, batch: int) -> None:
    """Two for each of seven weights. Beside these, attention computes its own products again."""
    x, *others = rope_arguments(64)
    arguments: list[Any] = [spec(batch, *x.shape[1:]), *others]
    arguments[:10] = [torch.empty(one.shape, dtype=half, requires_grad=True) for one in arguments[:10]]
    backward = jitgen.jit(rope_layer()).lower(*arguments, backend=backend, target=target).backward
    assert backward is not None
    families = [kernel.family for kernel in backward.lowered.program.kernels]
    assert (families.count("gemm"), families.count("attention_backward")) == (14, 2), backward.explain()
    assert backward.balance.operations_ratio <= 1.1, str(backward.balance)


@pytest.mark.parametrize(("name", "kernels"), [("Llama", 9), ("Qwen3", 11), ("Phi", 7)])
def test_a_forward_of_training_computes_activations_in_epilogues(name: str, kernels: int) -> None:
    """The products that its backward reads are second results of the kernels that complete what the forward reads."""
    layer = LAYERS[name]
    arguments = [torch.empty(one.shape, dtype=half, requires_grad=True) for one in layer.specs(512)]
    balance = lowered(layer.function, *arguments).balance
    assert balance.kernels <= kernels, str(balance)
    assert balance.operations_ratio <= 1.01, str(balance)


def _mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _normed(x: Any, first: Any, norm: Any, second: Any) -> Any:
    y = x + F.linear(x, first)
    return F.linear(F.rms_norm(y, y.shape[-1:], norm), second)


BACKWARDS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int]] = {
    "a product": (F.linear, [(512, 1024), (2048, 1024)], 2),
    "SwiGLU": (_mlp, [(512, 1024), (2048, 1024), (2048, 1024), (1024, 2048)], 7),
    "a norm": (_normed, [(512, 1024), (1024, 1024), (1024,), (1024, 1024)], 8),
}


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("cuda", "sm_80"), ("triton", "sm_90a")])
@pytest.mark.parametrize("of", BACKWARDS)
def test_gradients_are_neither_copied_nor_computed_again(of: str, backend: str, target: str) -> None:
    """The gradient of a 16-bit result is what its products read, and where they read it along K alone, it is copied
    from the one that is computed."""
    function, shapes, kernels = BACKWARDS[of]
    arguments = [torch.empty(shape, dtype=half, requires_grad=True) for shape in shapes]
    backward = jitgen.jit(function).lower(*arguments, backend=backend, target=target).backward
    assert backward is not None
    assert backward.balance.kernels <= kernels, backward.explain()
    assert backward.balance.operations_ratio <= 1.01, str(backward.balance)


RETURNED: dict[str, tuple[Callable[..., Any], int]] = {
    "an activation": (lambda x, w: ((y := x @ w), torch.relu(y) @ w), 2),
    "the mean of rows": (lambda x, w: ((y := x @ w), y.float().mean(-1)), 2),
    "a slice, which would be a product of a slice": (lambda x, w: ((y := x @ w), y[:, :64].relu() @ w[:64]), 3),
    "a softmax, beside which attention would compute it": (lambda x, w: ((y := x @ w), torch.softmax(y, -1) @ w), 3),
}


@pytest.mark.parametrize("of", RETURNED)
def test_a_product_that_is_returned_and_read_is_computed_once(of: str) -> None:
    function, kernels = RETURNED[of]
    balance = lowered(function, square, square).balance
    assert (balance.kernels, round(balance.operations_ratio, 1)) == (kernels, 1.0), str(balance)


def test_a_transposed_activation_is_read_as_it_lies_by_tensor_maps() -> None:
    """The gradient of a result is an argument of the backward, and transposed the activation of a weight's gradient."""

    def gradient(dy: Any, x: Any) -> Any:
        return dy.mT @ x

    def families(*specs: Any, backend: str = "cuda") -> list[str]:
        low = jitgen.jit(gradient).lower(*specs, backend=backend, target="sm_90a")
        return [kernel.family for kernel in low.lowered.program.kernels]

    low = lowered(gradient, spec(511, 4096), spec(511, 2048))
    assert [kernel.family for kernel in low.lowered.program.kernels] == ["gemm"]
    assert low.lowered.schedules[0].path == "wgmma_dense"
    assert "x_transposed = true" in low.source
    assert families(*[spec(512, 4096, dtype=single)] * 2) == ["gemm"]
    assert families(*[spec(512, 4096)] * 2, backend="triton") == ["gemm"]


def _at(offset: int, rows: int, columns: int, stride: int) -> torch.Tensor:
    """Returns a matrix whose rows begin ``stride`` elements apart, the first one ``offset`` elements into a buffer."""
    return torch.empty(offset + rows * stride, dtype=half).as_strided((rows, columns), (stride, 1), offset)


@pytest.mark.parametrize(
    ("name", "activation", "columns", "path", "copied"),
    [
        ("some columns of an aligned one", _at(0, 512, 4092, 4104), 4096, "wgmma_dense", False),
        ("one that begins at 8 bytes", _at(4, 512, 4096, 4104), 4096, "wgmma_dense", True),
        ("lines that begin at multiples of 8 bytes", _at(0, 512, 4096, 4100), 4096, "wgmma_dense", True),
        ("the same, too few for a copy", _at(4, 64, 256, 264), 256, "dense", False),
        ("M that no copy aligns, for too few columns to transpose it", _at(0, 512, 4100, 4100), 1024, "dense", False),
        ("M that no copy aligns, for many columns", _at(0, 512, 4100, 4100), 4096, "wgmma_dense", True),
        ("neither M nor K", _at(0, 511, 4100, 4100), 14336, "dense", False),
    ],
)
def test_where_slices_of_a_transposed_activation_begin_decides(
    name: str, activation: torch.Tensor, columns: int, path: str, copied: bool
) -> None:
    """Tensor maps describe what begins, line by line, at multiples of 16 bytes; a copy is worth it or not."""
    weight = spec(len(activation), columns)
    low = lowered(lambda x, w: x.mT @ w, activation, weight)
    assert [kernel.family for kernel in low.lowered.program.kernels] == ["elementwise"] * copied + ["gemm"], name
    assert low.lowered.schedules[-1].path == path
    assert ("copied before its product: " in low.explain()) == copied


def test_slices_of_other_activations() -> None:
    """Along K, and of quantised weights, whose kernels read an activation along K alone."""

    def path(function: Any, x: torch.Tensor, w: Any) -> str:
        return jitgen.jit(function).lower(x, w, backend="cuda", target="sm_90a").lowered.schedules[-1].path

    weight = spec(4096, 2048, format="int4", group_size=128)
    assert path(F.linear, _at(4, 2048, 4096, 4104), spec(4096, 4096)) == "wgmma_dense"
    assert path(F.linear, _at(4, 2048, 4096, 4104), _at(4, 4096, 4096, 4104)) == "dense"
    assert path(F.linear, _at(4, 2048, 2048, 2056), weight) == "wgmma_quantized"
    assert path(lambda x, w: F.linear(x.mT, w), _at(0, 2048, 512, 512), weight) == "wgmma_quantized"
    narrow = spec(512, 2048, format="int4", group_size=128)
    assert path(lambda x, w: F.linear(x.mT, w), _at(0, 2048, 512, 512), narrow) == "mma"


@pytest.mark.parametrize(
    ("name", "function", "weight", "rows", "path", "copied"),
    [
        ("along K, at 8 bytes", F.linear, _at(4, 4096, 2048, 2056), 512, "wgmma_dense", True),
        ("along N, at 8 bytes", torch.matmul, _at(4, 2048, 4096, 4104), 512, "wgmma_dense", True),
        ("for few rows", F.linear, _at(4, 4096, 2048, 2056), 16, "dense", False),
        ("too few columns for a copy", F.linear, _at(4, 256, 256, 264), 64, "dense", False),
        ("N that no copy aligns", torch.matmul, _at(0, 2048, 4100, 4100), 128, "dense", False),
        ("N that is aligned by a copy along K", torch.matmul, _at(0, 2048, 4100, 4100), 8192, "wgmma_dense", True),
        ("N and K that no copy aligns", torch.matmul, _at(0, 2052, 4100, 4100), 8192, "dense", False),
    ],
)
def test_where_slices_of_a_weight_begin_decides(
    name: str, function: Any, weight: torch.Tensor, rows: int, path: str, copied: bool
) -> None:
    length = weight.shape[function is F.linear]
    low = lowered(lambda x, w: function(x, w), spec(rows, length), weight)
    assert [kernel.family for kernel in low.lowered.program.kernels] == ["elementwise"] * copied + ["gemm"], name
    assert low.lowered.schedules[-1].path == path
    assert ("rows that no tensor map describes: copied before its product: " in low.explain()) == copied


def test_rows_of_a_batch_invariant_product_have_one_mainloop() -> None:
    """Also where a slice that no tensor map describes would be copied for many rows, or a matrix along M is described
    for some numbers of rows."""

    def paths(function: Any, x: torch.Tensor, w: Any) -> list[str]:
        low = jitgen.jit(function, batch_invariant=True).lower(x, w, backend="cuda", target="sm_90a")
        return [schedule.path for schedule in low.lowered.schedules if hasattr(schedule, "path")]

    aligned, a_slice = spec(1024, 1024), _at(4, 1024, 1024, 1032)
    int4 = spec(1024, 1024, format="int4", group_size=128)
    for rows in (1, 8, 63, 64, 1024, 1025):
        assert paths(lambda x, w: F.linear(x, w), _at(4, rows, 1024, 1032), aligned) == ["wgmma_dense"]
        assert paths(lambda x, w: F.linear(x, w), spec(rows, 1024), a_slice) == ["dense"]
        assert paths(lambda x, w: F.linear(x.mT, w), spec(1024, rows), aligned) == ["wgmma_dense"]
        assert paths(lambda x, w: F.linear(x.mT, w), spec(1024, rows), int4) == ["wgmma_quantized"]


@pytest.mark.parametrize("weight", ["bfloat16", "int4"])
def test_rows_of_a_batch_invariant_grouped_product_have_one_mainloop(weight: str) -> None:
    """Also where there is one token, whose row others read in place."""
    format = {} if weight == "bfloat16" else {"format": weight, "group_size": 64}

    def path(tokens: int, batch_invariant: bool) -> str:
        def experts(x: Any, order: Any, w: Any, offsets: Any) -> Any:
            return torch._grouped_mm(x[order // 2], w.transpose(-2, -1), offsets)

        operands = (spec(tokens, 512), spec(2 * tokens, dtype=torch.int64), spec(8, 256, 512, **format))
        function = jitgen.jit(experts, batch_invariant=batch_invariant)
        low = function.lower(*operands, spec(8, dtype=torch.int32), backend="cuda", target="sm_90a")
        return low.lowered.schedules[-1].path

    assert path(1, True) == path(2, True) == path(300, True)
    assert path(1, False) != path(300, False)


def test_a_plan_follows_from_where_its_own_call_begins() -> None:
    """So that a request key does not depend on the calls before."""

    def gradient(dy: Any, x: Any) -> Any:
        return dy.mT @ x

    weight, function = spec(512, 4096), jitgen.jit(gradient)
    activations = [_at(0, 512, 4096, 4104), _at(4, 512, 4096, 4104), _at(0, 512, 4096, 4096), _at(0, 512, 4092, 4104)]
    plans = [function.lower(x, weight, backend="cuda", target="sm_90a") for x in activations]
    for x, plan in zip(activations, plans, strict=True):
        alone = jitgen.jit(gradient).lower(x, weight, backend="cuda", target="sm_90a")
        assert plan.lowered.key == alone.lowered.key
    whole = plans[0].lowered.partitioned
    applies = [
        whole.applies_to(CallFacts(plan.lowered.environment, plan.lowered.memories[:2]), plan.lowered.route.device)
        for plan in plans
    ]
    assert applies == [True, False, True, True]


def test_a_gradient_that_two_products_read_is_stored_once() -> None:
    """As a product's result, or as a pointwise function of one: along its rows, as the gradient of a weight reads it,
    and along its columns, as that of what is before it."""

    def mlp(x: Any, up: Any, down: Any) -> Any:
        return F.linear(F.silu(F.linear(x, up)), down)

    arguments = [
        torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((512, 1024), (2048, 1024), (1024, 2048))
    ]
    backward = jitgen.jit(mlp).lower(*arguments, backend="cuda", target="sm_90a").backward
    assert backward is not None
    families = [kernel.family for kernel in backward.lowered.program.kernels]
    assert families.count("gemm") == 4
    assert len(families) <= 5


@pytest.mark.parametrize("shape", [(1, 1, 4096), (1, 3, 4096)])
def test_a_row_is_read_once_and_in_whole_accesses(shape: tuple[int, ...]) -> None:
    """However many dimensions of one index a tensor has, and whatever adds and drops them."""

    def norm(x: Any, weight: Any) -> Any:
        return x + F.rms_norm(x.reshape(-1, 4096).unsqueeze(0), (4096,), weight, 1e-5).reshape(x.shape)

    low = lowered(norm, spec(*shape), spec(4096))
    (kernel,), (schedule,) = low.lowered.program.kernels, low.lowered.schedules
    assert [operand.kind for operand in kernel.bodies[0].operands] == ["load", "load", "store"]
    assert schedule.vector == 8


def least(function: Callable[..., Any], *arguments: Any) -> tuple[int, int]:
    """Bytes and operations that a function needs at least."""
    balance = lowered(function, *arguments).balance
    return balance.least_moved, balance.least_flops


def test_each_input_is_read_and_each_result_written_once() -> None:
    x, w = spec(30, 40), spec(20, 40)
    assert least(lambda x: x * 2, x) == (2 * 1200 * 2, 1200)
    assert least(F.linear, x, w) == (2 * (1200 + 800 + 600), 2 * 30 * 20 * 40)
    assert least(lambda x, w: (F.linear(x, w), F.linear(x, w) + 1), x, w) == (2 * (2000 + 1200), 2 * 24000 + 600)
    assert least(lambda x: x.sum(-1), x) == (2 * (1200 + 30), 1200)
    assert least(lambda x: x.cumsum(-1), x) == (2 * 2 * 1200, 1200)
    assert least(lambda x: x + x.t().contiguous().t(), x)[0] == 2 * 2400


def test_only_what_is_needed_counts() -> None:
    x = spec(30, 40)
    assert least(lambda x: (x * 2)[:, :10], x) == (2 * 2 * 300, 300)
    assert least(lambda x: (x * 2, (x * 2)[0]), x) == (2 * 2400, 1200)
    assert least(lambda x, w: F.linear(x, w)[:, :10], x, spec(20, 40))[1] == 2 * 30 * 10 * 40
    assert least(lambda x: x.sort(-1)[0][:, :4], x)[0] == 2 * (1200 + 120)
    assert least(lambda x, i: x[i] * 2, x, spec(3, dtype=torch.int64)) == (2 * 2 * 120 + 24, 120)
    assert least(lambda x: x[:, :4], x) == (0, 0)
    assert least(lambda x: (x[:, :4], x[:, 1:5] + 1), x) == (2 * 2 * 120, 120)


def test_an_update_writes_what_it_changes() -> None:
    def decay(x: Any) -> Any:
        return x.mul_(0.5)

    assert least(decay, spec(30, 40)) == (2 * 2400, 1200)
    assert least(append, spec(2, 4096, 128), spec(2, 1, 128)) == (2 * 512, 256)
    assert least(lambda x, y: x.copy_(y), spec(30, 40), spec(30, 40)) == (2 * 2400, 0)
    assert least(lambda x, y: x.copy_(y) * 2, spec(30, 40), spec(30, 40)) == (3 * 2400, 1200)


def test_elements_that_several_operands_read_are_moved_once() -> None:
    for function in (
        lambda x, w: x[:, :1] + x @ w,
        lambda x, w: x @ w + x[:, :1],
        lambda x, w: x[:, :1] * x + w.t(),
        lambda x, w: x[1:] - x[:-1],
        lambda x, w: x.t() @ x,
    ):
        balance = lowered(function, square, square).balance
        assert balance.kernels == 1
        assert 1 <= balance.bytes_ratio < 1.01, str(balance)
    two_columns = lowered(lambda x: x[:, :1] - x[:, 2:3], square).balance
    assert two_columns.bytes_ratio == 1, str(two_columns)


def test_index_arithmetic_is_no_operation() -> None:
    def chosen(x: Any, i: Any) -> Any:
        return x[(i + 1) % 7] * 2

    balance = lowered(chosen, spec(7, 500), spec(4096, dtype=torch.int64)).balance
    assert balance.flops == balance.least_flops == 4096 * 500
    assert balance.bytes_ratio == 1  # a row that is chosen twice is read once
    counted = lowered(lambda x, i: x[i] + i[:, None], spec(7, 500), spec(40, dtype=torch.int64)).balance
    assert counted.flops == counted.least_flops == 40 * 500


def test_explanations_end_with_the_balance() -> None:
    low = lowered(three_views_of_a_product, square, square)
    last = low.explain().splitlines()[-1]
    assert last == f"balance: {low.balance}"
    assert re.fullmatch(
        r"balance: \d kernels; [\d.]+ MB moved, \d\.\d\d of the least; [\d.]+ GFLOP, \d\.\d\d of the least", last
    )


def test_a_plan_that_does_less_than_was_traced_is_told_as_the_least() -> None:
    function = jitgen.jit(lambda x: torch.zeros_like(x) + x.sum())
    balance = function.lower(spec(64, 64, dtype=single), backend="cpp", target="x86-64-v3").balance
    assert 0 < balance.flops < 2 * 64 * 64
    assert balance.operations_ratio < 1.0
    assert str(balance).endswith("FLOP, 1.00 of the least")


def test_balances_add_up() -> None:
    one = Balance(3, 200, 3000, 100, 2000)
    assert one + one == one * 2 == Balance(6, 400, 6000, 200, 4000)
    assert (one.bytes_ratio, one.operations_ratio) == (2.0, 1.5)
    assert str(one) == "3 kernels; 200 B moved, 2.00 of the least; 3 kFLOP, 1.50 of the least"
    assert str(Balance()) == "0 kernels; 0 B moved, 1.00 of the least; 0 FLOP, 1.00 of the least"


def test_a_report_sums_the_layers() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.silu(self.up(x)))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    with torch.no_grad():
        torch.compile(model, backend="jitgen")(torch.randn(5, 16))
    report = jitgen.report(model)
    (program,) = report.programs
    assert len(program.layers) == 3
    assert program.balance.least_flops >= 2 * 2 * 5 * 16 * 40
    assert report.balance == program.balance * 3
    assert f"balance of {program.program}, 3 layers: {program.balance}" in str(report)
    assert f"balance of all: {report.balance}" in str(report)
