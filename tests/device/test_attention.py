"""Attention on a GPU, in CUDA and in Triton, against the same function of float64: rules, masks, shapes, strides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from tests.attention import INF, MASKS, RULES, failure, formula, operands, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

BF16, F16 = torch.bfloat16, torch.float16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BACKENDS = ["cuda", "triton"] if HOPPER else ["triton"]
backends = pytest.mark.parametrize("backend", BACKENDS)


def plain(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.cuda() for tensor in tensors]


def random_operands(source: random.Random, *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    seed = source.randrange(10**6)
    return on_gpu(*(sample(shape, dtype, seed + number) for number, shape in enumerate(shapes)))


def check(
    function: Callable[..., Any], *args: torch.Tensor, backend: str, kernels: int | None = 1, **keywords: Any
) -> torch.Tensor:
    """The result of ``function``, written into poison and compared with the same function of float64 tensors."""
    compiled = jitgen.jit(function, backend=backend)
    if kernels is not None:
        low = compiled.lower(*args, **keywords)
        assert len(low.kernels) == kernels, low.explain()
    wanted = compiled.reference(*(a.double() if a.is_floating_point() else a for a in args), **keywords)
    found = torch.full(wanted.shape, float("nan"), dtype=args[2].dtype, device="cuda")
    if keywords:
        found = compiled(*args, **keywords)
    else:
        compiled.bind(*args)(*args, out=found)
    wrong = failure(found, wanted, *args[:3], rounded=args[2].element_size() == 2)
    assert wrong is None, (wrong, [tuple(a.shape) for a in args], compiled.lower(*args, **keywords).explain())
    return found


@backends
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("depth", "width"),
    [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 256), (24, 40), (20, 70), (80, 16)],
)
def test_heads(depth: int, width: int, dtype: torch.dtype, backend: str) -> None:
    for rows, keys in ((200, 300), (33, 129), (320, 128)):
        check(plain, *on_gpu(*operands((2, 2), rows, keys, depth, width, dtype)), backend=backend)


@backends
def test_random_shapes(backend: str) -> None:
    source = random.Random(7)
    for number in range(24):
        rows, keys = (int(2 ** source.uniform(0, 10)) for _ in range(2))
        depth, width = (source.choice((64, 128, 8 * source.randrange(2, 24))) for _ in range(2))
        batch = (source.randrange(1, 4), source.randrange(1, 4))
        shapes = (*batch, rows, depth), (*batch, keys, depth), (*batch, keys, width)
        rules, mask = source.sample(sorted(RULES), number % 3), source.choice(sorted(MASKS))
        check(formula(rules, [mask][: number % 2]), *random_operands(source, *shapes), backend=backend, kernels=None)


@backends
@pytest.mark.parametrize("mask", MASKS)
def test_masks_at_the_edges_of_tiles(mask: str, backend: str) -> None:
    function = formula(["scale"], [mask])
    for rows in (63, 64, 65, 127, 128, 129, 193):
        for keys in (1, 127, 128, 129, 400):
            check(function, *on_gpu(*operands((1, 2), rows, keys, 64, 64, BF16)), backend=backend, kernels=None)


@backends
@pytest.mark.parametrize("rules", [["scale"], ["cap"], ["scale", "distance"], ["alternate"], ["cap", "distance"]])
def test_rules(rules: list[str], backend: str) -> None:
    for mask in ([], ["causal"], ["window", "prefix"]):
        check(formula(rules, mask), *on_gpu(*operands((2, 3), 300, 400, 64, 128, BF16)), backend=backend)


@backends
def test_factors_of_any_sign(backend: str) -> None:
    def attend(q: Any, k: Any, v: Any, scale: float, cap: float) -> Any:
        s = q @ k.transpose(-1, -2) * scale
        if cap:
            s = cap * torch.tanh(s / cap)
        return torch.softmax(s, -1) @ v

    args = on_gpu(*operands((1, 2), 150, 200, 64, 64, BF16))
    for scale in (0.25, -0.25, 0.0):
        for cap in (0.0, 5.0, -5.0):
            check(attend, *args, backend=backend, scale=scale, cap=cap)


@backends
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 32, 200])
def test_scaled_dot_product_attention(rows: int, causal: bool, backend: str) -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=True)

    q, k, v = on_gpu(sample((2, 8, rows, 64), BF16), sample((2, 2, 333, 64), BF16), sample((2, 2, 333, 96), BF16))
    masks = [None] if causal else [None, sample((rows, 333)).cuda() > 0, sample((rows, 333), BF16).cuda()]
    if not causal:
        masks[1][rows // 2] = False
    for mask in masks:
        wide = mask.double() if mask is not None and mask.is_floating_point() else mask
        wanted = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), wide, is_causal=causal, enable_gqa=True
        )
        found = jitgen.jit(attend, backend=backend)(q, k, v, mask)
        wrong = failure(found, wanted, q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), rounded=True)
        assert wrong is None, wrong
    assert torch.equal(
        jitgen.jit(attend, backend=backend)(q, k[:, :, :0], v[:, :, :0]).cpu(), torch.zeros(2, 8, rows, 96, dtype=BF16)
    )


@backends
@pytest.mark.parametrize("keys", [1, 50, 1024, 4093, 9000])
def test_a_mask_of_a_cache(keys: int, backend: str) -> None:
    """Keys are not read before the first and behind the last that it shows, but for those of the same tiles."""

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    source, tile = random.Random(keys), 128
    for batch in (1, 3, 9):
        q, k, v = random_operands(source, (batch, 8, 1, 128), (batch, 2, keys, 128), (batch, 2, keys, 128))
        mask = torch.zeros(batch, 1, 1, keys, dtype=torch.bool, device="cuda")
        ends = [sorted((source.randrange(keys + 1), source.randrange(keys + 1))) for _ in range(batch)]
        ends[-1] = [0, keys]
        for number, (first, end) in enumerate(ends):
            mask[number, ..., first:end] = True
        wanted = attend(q.double(), k.double(), v.double(), mask)
        bounds = q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        for number, (first, end) in enumerate(ends):
            for tensor in (k, v) if first < end else ():
                tensor[number, :, : max(0, first - 15) // tile * tile] = float("nan")
                tensor[number, :, -(-(end + 15) // tile) * tile :] = float("nan")
        compiled = jitgen.jit(attend, backend=backend)
        found = compiled(q, k, v, mask)
        wrong = failure(found, wanted, *bounds, rounded=True)
        assert wrong is None, (wrong, batch, ends)
        assert torch.equal(found, compiled(q, k, v, mask))


@backends
def test_strides(backend: str) -> None:
    packed = sample((2, 150, 3, 4, 64), BF16).cuda()
    q, k, v = (packed[:, :, number].transpose(1, 2) for number in range(3))
    check(plain, q, k, v, backend=backend)
    check(plain, q, k[:, :1].expand(-1, 4, -1, -1), v[:, :1].expand(-1, 4, -1, -1), backend=backend, kernels=None)
    check(lambda q, k, v: plain(q.flip(-1), k.flip(-1), v), q, k, v, backend=backend, kernels=None)
    check(lambda q, k, v: plain(q, k.flip(-2), v.flip(-2)), q, k, v, backend=backend, kernels=None)
    check(plain, q, k, v.transpose(-1, -2).contiguous().transpose(-1, -2), backend=backend, kernels=None)
    check(plain, q[..., 1:], k[..., 1:], v[..., 3:], backend=backend, kernels=None)
    many = sample((2, 3, 2, 2, 70, 64), BF16).cuda().permute(3, 1, 0, 2, 4, 5)
    check(plain, many, many, many, backend=backend, kernels=None)


@backends
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 20, 33])
def test_heads_that_share_keys_and_split_keys(rows: int, backend: str) -> None:
    def repeated(q: Any, k: Any, v: Any) -> Any:
        return plain(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))

    for keys in (100, 700, 5000):
        q, k, v = on_gpu(
            sample((2, 8, rows, 128), BF16), sample((2, 2, keys, 128), BF16), sample((2, 2, keys, 64), BF16)
        )
        wanted = repeated(q.double(), k.double(), v.double())
        compiled = jitgen.jit(repeated, backend=backend)
        found = compiled(q, k, v)
        wrong = failure(found, wanted, q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), rounded=True)
        assert wrong is None, (wrong, keys, compiled.lower(q, k, v).explain())
        assert torch.equal(found, compiled(q, k, v))


@backends
def test_results_beside_and_after(backend: str) -> None:
    def attend(q: Any, k: Any, v: Any, gate: Any, sink: Any) -> Any:
        s = (q @ k.transpose(-1, -2)).float()
        both = torch.cat([s, sink[:, None, None].expand(s.shape[0], -1, s.shape[2], 1)], -1)
        out = (torch.softmax(both, -1)[..., :-1].to(v.dtype) @ v) * torch.sigmoid(gate)
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1), torch.logsumexp(s, -1)

    for rows, keys in ((200, 300), (3, 900)):
        q, k, v = on_gpu(*operands((2, 3), rows, keys, 64, 128, BF16))
        gate, sink = sample((2, 3, rows, 128), BF16).cuda(), sample((3,)).cuda()
        found = jitgen.jit(attend, backend=backend)(q, k, v, gate, sink)
        s = q.double() @ k.double().transpose(-1, -2)
        both = torch.cat([s, sink.double()[:, None, None].expand(2, -1, rows, 1)], -1)
        wanted = (torch.softmax(both, -1)[..., :-1] @ v.double()) * torch.sigmoid(gate.double())
        wrong = failure(found[0], wanted.transpose(1, 2).reshape(2, rows, -1), q, k, v, rounded=True)
        assert wrong is None, wrong
        torch.testing.assert_close(found[1].double(), torch.logsumexp(s, -1), atol=2e-5, rtol=1e-6)


@backends
def test_a_query_that_is_computed(backend: str) -> None:
    def attend(q: Any, k: Any, v: Any, weight: Any) -> Any:
        return plain(q * weight, k, v)

    q, k, v = on_gpu(*operands((2, 2), 200, 300, 64, 64, BF16))
    weight = torch.tensor([0.5, 2.0], dtype=BF16, device="cuda").repeat(32)  # products that are exact
    check(attend, q, k, v, weight, backend=backend)


@backends
def test_documents(backend: str) -> None:
    def attend(q: Any, k: Any, v: Any, of_row: Any, of_key: Any) -> Any:
        s = q @ k.transpose(-1, -2)
        return torch.softmax(s.masked_fill(of_row[:, None] != of_key, -INF), -1) @ v

    q, k, v = on_gpu(*operands((2, 1), 300, 500, 64, 64, BF16))
    of_row, of_key = on_gpu(torch.arange(300) // 64, torch.arange(500) // 99)
    of_row[5] = 99
    assert check(attend, q, k, v, of_row, of_key, backend=backend)[:, :, 5].isnan().all()


@backends
def test_special_values(backend: str) -> None:
    q, k, v = on_gpu(*operands((1, 2), 150, 200, 64, 64, BF16))
    for change in (INF, -INF, float("nan")):
        other = q.clone()
        other[0, 0, 5] = change
        check(plain, other, k, v, backend=backend)
        other = k.clone()
        other[0, 1, 30] = change
        check(plain, q, other, v, backend=backend)
    check(plain, q * 1e3, k, v, backend=backend)
    for rows, keys in ((150, 0), (0, 200), (150, 1), (1, 200), (1, 1)):
        check(plain, q[:, :, :rows], k[:, :, :keys], v[:, :, :keys], backend=backend, kernels=None)


@backends
@pytest.mark.parametrize(("depth", "width"), [(64, 64), (128, 128), (120, 136), (248, 248), (32, 96)])
def test_few_blocks_of_many_rows(depth: int, width: int, backend: str) -> None:
    """Blocks of a cluster share the keys of a block of rows, under masks too, in equal bits at every call; results have
    row statistics beside them."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = (q @ k.transpose(-1, -2)).float() * 0.2
        return torch.softmax(s, -1).to(v.dtype) @ v, torch.logsumexp(s, -1)

    source = random.Random(depth)
    for heads, rows, keys in ((1, 200, 1500), (3, 65, 3001), (2, 23, 2900), (7, 330, 777)):
        shapes = (1, heads, rows, depth), (1, heads, keys, depth), (1, heads, keys, width)
        operands_ = random_operands(source, *shapes)
        for masks in ([], ["causal"], ["window"]):
            function = formula(["scale"], masks)
            found = check(function, *operands_, backend=backend, kernels=None)
            assert torch.equal(found, check(function, *operands_, backend=backend, kernels=None))
        result, logarithms = jitgen.jit(attend, backend=backend)(*operands_)
        wanted, wanted_logarithms = attend(*(operand.double() for operand in operands_))
        assert failure(result, wanted, *operands_, rounded=True) is None
        torch.testing.assert_close(logarithms, wanted_logarithms, rtol=1e-5, atol=1e-4)


@backends
def test_many_blocks_and_the_same_bits(backend: str) -> None:
    function = formula(["scale"], ["causal"])
    q, k, v = on_gpu(sample((3, 20, 700, 64), BF16), sample((3, 20, 900, 64), BF16), sample((3, 20, 900, 64), BF16))
    found = check(function, q, k, v, backend=backend)
    for _ in range(3):
        assert torch.equal(found, check(function, q, k, v, backend=backend))


@backends
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("keys", [1, 7, 47, 77, 129, 160])
def test_many_rows_of_few_keys(keys: int, dtype: torch.dtype, backend: str) -> None:
    """As of images to a short text: blocks with several sets of keys, and blocks of fewer pieces than warpgroups."""

    def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    source = random.Random(keys)
    for batch, heads, shared, rows, depth, width in (
        *((3, 8, 2, 1001, 128, 128), (40, 6, 6, 129, 64, 64), (2, 5, 1, 300, 80, 48), (1, 1, 1, 65, 96, 120)),
        *((1, 4, 4, 4097, 40, 128), (7, 3, 3, 64, 128, 64)),
    ):
        shapes = (batch, heads, rows, depth), (batch, shared, keys, depth), (batch, shared, keys, width)
        q, k, v = random_operands(source, *shapes, dtype=dtype)
        shown = torch.rand(batch, 1, 1, keys, device="cuda") > 0.3
        shown[..., keys // 2] = True
        spread = q.transpose(1, 2).contiguous().transpose(1, 2)
        repeated = [operand.repeat_interleave(heads // shared, 1) for operand in (k, v)]
        for query, masks in ((q, []), (spread, []), (q, [shown])):
            wanted = attend(q.double(), k.double(), v.double(), *masks)
            found = jitgen.jit(attend, backend=backend)(query, k, v, *masks)
            wrong = failure(found, wanted, q, *repeated, rounded=True)
            assert wrong is None, (wrong, query.shape, k.shape, v.shape, len(masks))


@backends
@pytest.mark.parametrize("mask", [[], *([name] for name in MASKS)])
def test_rules_of_few_keys(mask: list[str], backend: str) -> None:
    def beside(q: Any, k: Any, v: Any) -> Any:
        s = (q @ k.transpose(-1, -2)).float() * 0.2
        return torch.softmax(s, -1).to(v.dtype) @ v, torch.logsumexp(s, -1)

    for rows, keys, depth in ((200, 77, 64), (1030, 128, 128), (70, 33, 128), (333, 150, 64)):
        args = on_gpu(*operands((2, 3), rows, keys, depth, depth, BF16))
        for rules in (["scale"], ["cap", "distance"]):
            found = check(formula(rules, mask), *args, backend=backend, kernels=None)
            assert torch.equal(found.nan_to_num(), check(formula(rules, mask), *args, backend=backend).nan_to_num())
        result, logarithms = jitgen.jit(beside, backend=backend)(*args)
        wanted, wanted_logarithms = beside(*(operand.double() for operand in args))
        assert failure(result, wanted, *args, rounded=True) is None
        torch.testing.assert_close(logarithms, wanted_logarithms, rtol=1e-5, atol=1e-4)
