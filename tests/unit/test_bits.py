"""Bits of tensors taken for those of another dtype by ``view(dtype)``, in kernels, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitgen
from jitgen.errors import UnsupportedError
from jitgen.ir.rounding import NARROW
from jitgen.spec import BITS_OF, DTYPES
from tests.bits import same, tensor, words
from tests.interpreter import Interpreter
from tests.triton_bits import wrong_updates

BACKENDS = ("cpp", "triton")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if request.param == "triton" else "0")
    backend: str = request.param
    return backend


@pytest.mark.parametrize("source", DTYPES)
def test_every_dtype_as_every_other(backend: str, source: str) -> None:
    x = tensor(DTYPES[source])
    others = [dtype for dtype in DTYPES.values() if dtype not in (x.dtype, torch.bool)]
    results = jitgen.jit(lambda x: [x.view(dtype).clone() for dtype in others], backend=backend)(x)
    for result, dtype in zip(results, others, strict=True):
        assert same(result, x.view(dtype)), dtype


@pytest.mark.parametrize("narrow", NARROW)
def test_every_word_of_a_narrow_float(backend: str, narrow: str) -> None:
    """What is read from memory and what is stored keep the bits of a NaN, which may be packed codes."""
    x = words(DTYPES[narrow])
    integer, ids = DTYPES[BITS_OF[narrow]], torch.randint(0, len(x), (5,))
    others = [dtype for dtype in DTYPES.values() if dtype not in (x.dtype, torch.bool)]

    def read(x: torch.Tensor, ids: torch.Tensor) -> Any:
        codes = x.view(torch.uint8)
        moved = [x.T.view(integer) + 1, x.T.contiguous().view(integer) + 1, x[2:, ::2].view(integer) + 1]
        chosen = [x[ids].view(torch.uint8) >> 4, codes[ids] & 15]
        return [x.view(dtype).clone() for dtype in others] + moved + chosen + [codes >> 4, x.isnan()]

    def stored(*xs: torch.Tensor) -> Any:
        bits = x.view(integer)
        made = [y.view(narrow_dtype).clone() for y in xs]
        return [*made, torch.cat([(bits ^ 1).view(x.dtype), made[0]], 1), (bits ^ 3).view(x.dtype).T.contiguous()]

    narrow_dtype = x.dtype
    xs = [x.view(dtype) for dtype in others]
    for function, arguments in ((read, (x, ids)), (stored, xs)):
        results = jitgen.jit(function, backend=backend)(*arguments)
        for number, (result, want) in enumerate(zip(results, function(*arguments), strict=True)):
            assert same(result, want), (function, number)


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("language", BACKENDS)
def test_every_word_is_updated(language: str, narrow: str) -> None:
    wrong = Interpreter("tests.triton_bits")[narrow] if language == "triton" else [*wrong_updates(narrow, language)]
    assert not wrong


def test_a_byte_is_true_unless_it_is_zero() -> None:
    x = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    got = jitgen.jit(lambda x: x.view(torch.bool) | False)(x)
    assert got.tolist() == [False, True, True, True]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 4), (2, 3, 20), (4097,)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    exponents = jitgen.jit(lambda x: ((x.view(torch.int32) >> 23) & 255) - 127)
    assert torch.equal(exponents(x), ((x.view(torch.int32) >> 23) & 255) - 127)
    halves = jitgen.jit(lambda x: x.view(torch.int16) + 0)
    assert torch.equal(halves(x), x.view(torch.int16))
    twice = torch.cat([x, x], -1)
    if x.numel():  # torch views no tensor without rows so
        assert torch.equal(jitgen.jit(lambda x: x.view(torch.int64) + 0)(twice), twice.view(torch.int64))


def test_updates_beside_bits_are_refused_with_a_remedy() -> None:
    def of_the_bits(x: torch.Tensor) -> torch.Tensor:
        x.view(torch.int32).bitwise_and_(1 << 30)
        return x

    def of_the_tensor(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32)
        x.mul_(2)
        return bits + 1

    def stored(x: torch.Tensor) -> Any:
        before = x.view(torch.int32).clone()
        x.copy_((x.view(torch.int32) & (1 << 30)).view(x.dtype))
        return before, x.view(torch.int32) + 1

    for function in (of_the_bits, of_the_tensor):
        with pytest.raises(UnsupportedError, match=r"x\.copy_\(bits\.view\(x\.dtype\)\)"):
            jitgen.jit(function)(torch.randn(3, 4))
    x = torch.randn(3, 4)
    y = x.clone()
    got, want = jitgen.jit(stored)(x), stored(y)
    assert torch.equal(x, y)
    assert all(map(torch.equal, got, want))


def test_what_the_function_computes_is_rounded_as_it_is_stored() -> None:
    x = torch.randn(4, 64).bfloat16()

    def function(x: torch.Tensor) -> Any:
        y = x * 1.7
        return y.view(torch.int16) + 0, (x.float().softmax(-1).half()).view(torch.int16) + 0

    got, want = jitgen.jit(function)(x), function(x)
    assert torch.equal(got[0], want[0])
    assert (got[1] - want[1]).abs().max() <= 1


def test_a_quantised_weight_has_none() -> None:
    weight = jitgen.quantize(torch.randn(64, 64), "int4", group_size=32)
    with pytest.raises(UnsupportedError, match="of a quantised weight"):
        jitgen.jit(lambda x, w: x @ w.view(torch.int8).T)(torch.randn(3, 64), weight)


def test_a_power_of_two_by_its_bits() -> None:
    """The scale of the MX formats, as it is written with bits."""
    x = torch.randn(8, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        bits = x.abs().amax(-1, keepdim=True).view(torch.int32) & 0x7F800000
        return x / bits.view(torch.float32)

    assert torch.equal(jitgen.jit(function)(x), function(x))


def test_there_and_back_is_the_tensor_itself() -> None:
    x = torch.randn(4, 6)
    result = jitgen.jit(lambda x: x.view(torch.int32).view(torch.float32)[1:])(x)
    assert result.data_ptr() == x[1:].data_ptr()


def test_no_gradient_flows_through_bits() -> None:
    def function(x: torch.Tensor) -> Any:
        scale = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
        return x * scale, x.view(torch.int32) + 1, x.view(torch.bfloat16) * 1

    ours, theirs = (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    got, want = jitgen.jit(function)(ours), function(theirs)
    assert [result.requires_grad for result in got] == [result.requires_grad for result in want] == [True, False, False]
    got[0].sum().backward()
    want[0].sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_of_a_captured_tensor() -> None:
    weight = torch.randn(4, 6)
    x = torch.randn(4, 6)
    function = jitgen.jit(lambda x: x + (weight.view(torch.int32) & 1) + weight.view(6, 4).T.reshape(4, 6))
    assert torch.equal(function(x), x + (weight.view(torch.int32) & 1) + weight.view(6, 4).T.reshape(4, 6))


@pytest.mark.parametrize("dialect", ["cuda", "triton"])
def test_they_compile_for_a_gpu(dialect: Any, own_store: Any) -> None:
    pytest.importorskip("triton" if dialect == "triton" else "cuda.bindings")

    def function(x: torch.Tensor) -> Any:
        return [x.view(dtype).clone() for dtype in (torch.int32, torch.uint8, torch.float16, torch.float64)]

    jitgen.jit(function).lower(torch.randn(4, 8), target="sm_90a", backend=dialect).compile()
