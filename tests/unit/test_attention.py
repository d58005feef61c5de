"""Attention on the CPU against the same function in float64: rules, masks, shapes, strides, special values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import jitgen
from jitgen.deploy import row_variants
from jitgen.device import Device
from jitgen.spec import Target
from tests.attention import INF, MASKS, RULES, failure, formula, operands, sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plain(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


def check(function: Callable[..., Any], *args: torch.Tensor, kernels: int | None = 1, **keywords: Any) -> torch.Tensor:
    """The result of ``function``, compared with the same function of float64 tensors."""
    compiled = jitgen.jit(function) if not hasattr(function, "lower") else function
    if kernels is not None:
        assert len(compiled.lower(*args, **keywords).kernels) == kernels, compiled.lower(*args, **keywords).explain()
    found = compiled(*args, **keywords)
    wide = [a.double() if a.is_floating_point() else a for a in args]
    wanted = compiled.reference(*wide, **keywords)
    first, reference = (found[0], wanted[0]) if isinstance(found, tuple) else (found, wanted)
    wrong = failure(first, reference, *args[:3])
    assert wrong is None, wrong
    return found


shared = jitgen.jit(formula(["scale"], ["causal"]))
few = jitgen.jit(plain)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(DTYPES[:1]),
    st.integers(9, 140),
    st.integers(2, 230),
    st.integers(2, 70),
    st.integers(2, 70),
)
def test_shapes(dtype: torch.dtype, rows: int, keys: int, depth: int, width: int) -> None:
    check(shared, *operands((2, 3), rows, keys, depth, width, dtype))


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 8), st.integers(2, 300), st.integers(2, 70), st.integers(2, 70))
def test_shapes_of_few_rows(rows: int, keys: int, depth: int, width: int) -> None:
    check(few, *operands((3, 2), rows, keys, depth, width))


def hidden(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax((q @ k.mT).masked_fill(q[..., :1] * k[..., :1].mT > 0, -INF), -1) @ v


def summed(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT
    top = scores.amax(-1, keepdim=True)
    power = (scores - top).exp()
    return power @ v / power.sum(-1, keepdim=True), top, scores.logsumexp(-1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("function", [plain, hidden, summed, formula(["cap"], ["causal"])])
def test_a_single_key(function: Callable[..., Any], rows: int) -> None:
    check(function, *operands((2, 3), rows, 1, 24, 40))


@pytest.mark.quick(where=lambda dtype: dtype == torch.bfloat16)
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, rows: int) -> None:
    check(formula(["cap"], ["window"]), *operands((2, 2), rows, 100, 24, 40, dtype))


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.sampled_from(sorted(RULES)), max_size=3),
    st.lists(st.sampled_from(sorted(MASKS)), max_size=2, unique=True),
    st.sampled_from(DTYPES),
    st.sampled_from([(2, 100), (8, 33), (9, 96), (33, 97), (70, 230)]),
)
def test_grammar(rules: list[str], masks: list[str], dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    check(formula(rules, masks), *operands((2, 2), *sizes, 16, 20, dtype))


@pytest.mark.quick(where=lambda mask: mask in ("extrema", "blocks", "bits", "chosen"))
@pytest.mark.parametrize("mask", MASKS)
def test_masks_at_the_edges_of_tiles(mask: str) -> None:
    compiled = jitgen.jit(formula(["scale"], [mask]))
    for rows in (9, 15, 16, 17, 31, 33):
        for keys in (2, 15, 16, 17, 95, 97, 193):
            check(compiled, *operands((1, 2), rows, keys, 16, 16), kernels=None)


@pytest.mark.quick(where=lambda bias: bias == (3, 40, 50))
@pytest.mark.parametrize("bias", [(3, 40, 50), (2, 1, 1, 50), (40, 1), (3, 1, 1), (1,)])
def test_biases(bias: tuple[int, ...]) -> None:
    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v

    check(attend, *operands((2, 3), 40, 50, 16, 24), sample(bias))


def test_a_mask_of_documents_skips_tiles_and_a_row_without_keys_is_as_in_torch() -> None:
    def attend(q: Any, k: Any, v: Any, of_row: Any, of_key: Any) -> Any:
        s = q @ k.transpose(-1, -2)
        return torch.softmax(s.masked_fill(of_row[:, None] != of_key, -INF), -1) @ v

    q, k, v = operands((2, 1), 256, 200, 16, 16)
    of_row, of_key = torch.arange(256) // 52, torch.arange(200) // 45
    of_row[5] = 99
    found = check(attend, q, k, v, of_row, of_key)
    assert found[:, :, 5].isnan().all()
    # What a mask hides from all rows of a tile is not read: values of other documents may be anything.
    poisoned = v.clone()
    poisoned[:, :, 192:] = INF
    again = jitgen.jit(attend)(q, k, poisoned, of_row, of_key)
    assert torch.equal(again[:, :, 64:128], found[:, :, 64:128])


@pytest.mark.quick(where=lambda causal: causal)
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(causal: bool) -> None:
    @jitgen.jit
    def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=True)

    q, k, v = sample((2, 4, 20, 16)), sample((2, 2, 33, 16)), sample((2, 2, 33, 24))
    masks = [None] if causal else [None, sample((20, 33)) > 0, sample((20, 33))]
    if not causal:
        masks[1][7] = False
    for mask in masks:
        found = attend(q, k, v, mask)
        wide = mask.double() if mask is not None and mask.is_floating_point() else mask
        wanted = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), wide, is_causal=causal, enable_gqa=True
        )
        assert len(attend.lower(q, k, v, mask).kernels) == 1
        assert failure(found, wanted, q, k.repeat_interleave(2, 1), v) is None
    assert torch.equal(attend(q, k[:, :, :0], v[:, :, :0]), torch.zeros(2, 4, 20, 24))


def test_what_sdpa_refuses() -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask)

    q, k, v = operands((1, 2), 4, 5, 16, 16)
    for mask, words in ((torch.ones(4, 5).double(), "attn_mask"), (torch.ones(4, 6) > 0, "shapes|fit")):
        with pytest.raises(jitgen.TraceError, match=words):
            jitgen.jit(attend)(q, k, v, mask)
    with pytest.raises(jitgen.JitgenError, match="dropout_p"):
        jitgen.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))(q, k, v)


def test_strides_and_shared_heads() -> None:
    def repeated(q: Any, k: Any, v: Any) -> Any:
        return plain(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))

    packed = sample((2, 33, 3, 4, 16))
    q, k, v = (packed[:, :, part].transpose(1, 2) for part in range(3))
    check(few, q, k, v)
    compiled = jitgen.jit(repeated)
    for rows in (2, 6, 33):  # two heads of 2 rows are few, of 6 they are packed
        assert len(compiled.lower(q[:, :, :rows], k[:, :2], v[:, :2]).kernels) == 1
        found, wide = compiled(q[:, :, :rows], k[:, :2], v[:, :2]), (q[:, :, :rows].double(), k.double(), v.double())
        wanted = plain(wide[0], wide[1][:, :2].repeat_interleave(2, 1), wide[2][:, :2].repeat_interleave(2, 1))
        assert failure(found, wanted, q, k, v) is None
    check(few, q, k[:, :1], v[:, :1], kernels=None)
    check(few, q.flip(-1), k.flip(-1), v.transpose(-1, -2).contiguous().transpose(-1, -2), kernels=None)


def test_results_beside_and_after() -> None:
    def attend(q: Any, k: Any, v: Any, gate: Any) -> Any:
        s = q @ k.transpose(-1, -2)
        out = (torch.softmax(s, -1) @ v) * torch.sigmoid(gate)
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1), torch.logsumexp(s, -1)

    q, k, v = operands((2, 3), 20, 50, 16, 24)
    gate = sample((2, 3, 20, 24))
    compiled = jitgen.jit(attend)
    assert len(compiled.lower(q, k, v, gate).kernels) == 1
    found, wanted = compiled(q, k, v, gate), attend(q.double(), k.double(), v.double(), gate.double())
    torch.testing.assert_close(found[0].double(), wanted[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1].double(), wanted[1], atol=1e-5, rtol=1e-6)


def test_sinks() -> None:
    def attend(q: Any, k: Any, v: Any, sink: Any) -> Any:
        s = q @ k.transpose(-1, -2)
        both = torch.cat([s, sink[:, None, None].expand(s.shape[0], -1, s.shape[2], 1)], -1)
        return torch.softmax(both, -1)[..., :-1] @ v

    check(attend, *operands((2, 3), 20, 50, 16, 24), sample((3,)))


def test_special_values() -> None:
    q, k, v = operands((1, 2), 20, 40, 16, 16)
    for change in (INF, -INF, float("nan")):
        other = q.clone()
        other[0, 0, 5] = change
        check(few, other, k, v)
        other = k.clone()
        other[0, 1, 30] = change
        check(few, q, other, v)
    check(few, q * 1e4, k, v)
    for rows, keys in ((20, 0), (0, 40), (20, 1), (1, 40)):
        check(few, q[:, :, :rows], k[:, :, :keys], v[:, :, :keys], kernels=None)


def test_the_sum_beside_an_infinite_score_is_infinite() -> None:
    def both(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.transpose(-1, -2)
        return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)

    compiled, (q, k, v) = jitgen.jit(both), operands((1, 2), 20, 40, 16, 16)
    q[0, 0, 5], k[0, 0, 7] = INF, k[0, 0, 7].abs()
    k[0, 0, :7], k[0, 0, 8:] = -k[0, 0, :7].abs(), -k[0, 0, 8:].abs()
    assert len(compiled.lower(q, k, v).kernels) == 1
    found, wanted = compiled(q, k, v), compiled.reference(q, k, v)
    assert wanted[1][0, 0, 5] == INF
    torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("sizes", [(3, 0, 4, 4), (3, 5, 0, 4), (3, 5, 4, 0), (0, 5, 4, 4)])
def test_sizes_of_zero(sizes: tuple[int, int, int, int]) -> None:
    def both(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v), torch.logsumexp(q @ k.transpose(-1, -2), -1)

    compiled, (q, k, v) = jitgen.jit(both), operands((1, 2), *sizes)
    torch.testing.assert_close(compiled(q, k, v), both(q, k, v))


def test_float64() -> None:
    check(few, *operands((1, 2), 20, 40, 16, 24, torch.float64))


@pytest.mark.parametrize("rows", [3, 20])
def test_keys_are_split_where_rows_are_few_and_give_the_same_bits(rows: int) -> None:
    threads = torch.get_num_threads()
    q, k, v = operands((1, 1), rows, 1500, 16, 16)
    try:
        torch.set_num_threads(5)
        found = check(few, q, k, v)
        assert torch.equal(found, few(q, k, v))
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_one_kernel_says_why() -> None:
    q, k, v = operands((1, 2), 20, 40, 16, 16)

    def with_weights(q: Any, k: Any, v: Any) -> Any:
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        return weights @ v, weights

    text = jitgen.jit(with_weights).lower(q, k, v).explain()
    assert "products and a softmax: the scores or the probabilities are also needed in memory" in text
    found, wanted = jitgen.jit(with_weights)(q, k, v), with_weights(q.double(), k.double(), v.double())
    for each, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(each.double(), reference, atol=1e-5, rtol=0)
    deep = operands((1, 1), 4, 5, 600, 16)
    assert "more than 576" in few.lower(*deep).explain()
    check(few, *deep, kernels=3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("of_key", [True, False])
def test_keys_that_a_mask_in_memory_hides_from_all_rows_are_not_read(rows: int, of_key: bool) -> None:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask)

    q, k, v = operands((2, 3), rows, 200, 16, 24)
    visible = sample((2, 1, 1, 200) if of_key else (2, 1, rows, 200)) > 0
    visible[..., 70:] = False  # as of a cache that is not full
    visible[0, ..., :33], visible[1, ..., :16], visible[1, ..., 16:48] = False, False, True  # a whole piece is hidden
    visible[0, ..., 37] = True  # a row without keys would be 0
    for mask in (visible, visible[..., ::2].repeat_interleave(2, -1), visible.expand(2, 3, rows, 200)):
        check(attend, q, k, v, mask)
    poisoned = (q, *(torch.where(torch.arange(200)[:, None] < 80, x, float("nan")) for x in (k, v)), visible)
    assert torch.equal(jitgen.jit(attend)(*poisoned), jitgen.jit(attend)(q, k, v, visible))


@pytest.mark.parametrize(("rows", "keys", "live"), [(33, 100, 50), (40, 70, 69)])
@pytest.mark.parametrize("of_key", [True, False])
def test_what_lies_behind_the_length_of_a_cache_is_not_read(rows: int, keys: int, live: int, of_key: bool) -> None:
    def by_length(q: Any, k: Any, v: Any, length: Any) -> Any:
        hidden = torch.arange(k.shape[-2], device=k.device) >= length
        return torch.softmax((q @ k.mT).masked_fill(hidden, -INF), -1) @ v

    def by_mask(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask)

    attend = jitgen.jit(by_mask if of_key else by_length)
    of_rule = (torch.arange(keys) < live).expand(rows, keys) if of_key else torch.tensor(live)
    clean = operands((2, 3), rows, keys, 16, 24)
    unwritten = (clean[0], *(torch.where(torch.arange(keys)[:, None] < live, x, float("nan")) for x in clean[1:]))
    found, wanted = (
        (result := attend(*leaves, of_rule), *torch.autograd.grad(result.square().sum(), leaves))
        for leaves in ([x.clone().requires_grad_() for x in each] for each in (unwritten, clean))
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_what_is_skipped_is_said() -> None:
    def attend(q: Any, k: Any, v: Any, documents: Any) -> Any:
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        scores = (q @ k.transpose(-1, -2)).masked_fill((j > i) | (i - j > 9), -INF)
        return torch.softmax(torch.where(documents[:, None] == documents, scores, -INF), -1) @ v

    text = jitgen.jit(attend).lower(*operands((1, 2), 20, 20, 16, 16), torch.arange(20) // 7).explain()
    assert "skipped: tiles where ((j > i) or ((i - j) > 9)) for every row i and key j" in text
    assert "skipped: tiles where not ((int64 tensor[i] == int64 tensor[j])) for every row i and key j" in text


@pytest.mark.parametrize(
    ("backend", "target", "of_row", "shape", "is_skipped"),
    [
        ("cpp", "x86-64-v3", 128, (128, 128), True),
        ("cuda", "sm_90a", 128, (128, 128), False),
        ("triton", "sm_90a", 128, (128, 128), False),
        ("cuda", "sm_90a", 128, (1, 1, 1, 128), False),
        ("cuda", "sm_90a", 1, (1, 1, 1, 128), True),
        ("triton", "sm_90a", 128, (1, 1, 1, 128), True),
    ],
)
def test_what_is_not_skipped_is_not_said_to_be(
    backend: str, target: str, of_row: int, shape: tuple[int, ...], is_skipped: bool
) -> None:
    """A mask in memory is looked at before a tile is computed where it costs a byte a key, or on a CPU."""
    query, keys = (jitgen.TensorSpec((2, 4, rows, 64), torch.bfloat16) for rows in (of_row, 128))
    attend = jitgen.jit(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask))
    mask = jitgen.TensorSpec(shape, torch.bool)
    text = attend.lower(query, keys, keys, mask, backend=backend, target=target).explain()
    assert ("skipped: tiles where" in text) == is_skipped
    assert ("no tile is skipped" in text) != is_skipped


def test_other_sizes_compile_nothing() -> None:
    compiled = jitgen.jit(formula(["scale"], ["causal"]))
    for rows, keys, heads in ((40, 50, (2, 3)), (5, 50, (2, 3)), (20, 50, (2, 3))):  # the buckets of rows of a CPU
        compiled(*operands(heads, rows, keys, 16, 24))
    events: list[Any] = []
    unsubscribe = jitgen.on_compile(events.append)
    try:
        for rows, keys, heads in ((41, 51, (3, 2)), (300, 7, (4, 5)), (3, 999, (2, 7)), (31, 33, (5, 5))):
            check(compiled, *operands(heads, rows, keys, 16, 24))
    finally:
        unsubscribe()
    assert not events


def test_several_attentions_of_one_function() -> None:
    def twice(q: Any, k: Any, v: Any) -> Any:
        return plain(plain(q, k, v), k, v) - plain(q, v, k)

    q, k, v = operands((1, 2), 20, 40, 16, 16)
    compiled = jitgen.jit(twice)
    assert len(compiled.lower(q, k, v).kernels) == 3
    torch.testing.assert_close(compiled(q, k, v).double(), twice(q.double(), k.double(), v.double()), atol=1e-5, rtol=0)


def test_the_products_inside_name_no_buckets_of_their_own(tmp_path: Path) -> None:
    with jitgen.record(tmp_path / "specs.json"):
        function = jitgen.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
        function(*(torch.randn(2, 4, 5, 16) for _ in range(3)))
    (entry,) = json.loads((tmp_path / "specs.json").read_text())["entries"]
    cpu, cuda = Device(Target.parse("x86-64-v3"), "cpp"), Device(Target.parse("sm_90a"), "cuda")
    found = row_variants.variants(entry, cpu)
    # One row, or three ranges of numbers of rows; and each of batch, heads and keys may be 1. Two more, for each batch
    # and heads, keep as many keys as rows.
    assert len(found) == 4 * 8 + 2 * 4
    assert len(row_variants.variants(entry, cuda)) > len(found), "the cuda dialect has products and a softmax"
