"""What a quantised weight does not take is refused with what to do instead, and that works."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import jitgen
from jitgen.errors import FormatError, UnsupportedError

weight = jitgen.quantize(torch.randn(64, 64), "int8", 32)
experts = jitgen.quantize(torch.randn(2, 64, 64), "int8", 32)
x = torch.randn(3, 64)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a write": (lambda: weight.add_(1), r"w\.copy_\(jitgen\.quantize\(\.\.\., 'int8', 32\)\)"),
    "a write of elements": (lambda: weight.__setitem__(0, 1.0), r"w\.copy_"),
    "an initialisation": (lambda: torch.nn.init.normal_(weight), r"w\.copy_"),
    "new data": (lambda: setattr(weight, "data", x), r"w\.copy_"),
    "a join": (lambda: torch.cat([weight, weight]), r"torch\.cat\(\[w\.dequantize\(\), \.\.\.\]\)"),
    "a row": (lambda: weight[0], r"whole rows, w\[i:j\], and whole groups of 32 columns"),
    "a piece of a transpose": (lambda: weight.t()[:32], "before it is transposed"),
    "a shape": (lambda: weight.view(-1), "reshape the activation"),
    "memory": (lambda: weight.data_ptr(), r"jitgen\.save_quantized"),
    "numbers": (lambda: weight.numpy(), r"w\.dequantize\(\)\.numpy\(\)"),
    "a product of two": (lambda: F.linear(weight, weight), "dequantise the operand that is not the weight"),
    "a product of integers": (lambda: F.linear(x.long(), weight), "plain tensors of floats"),
    "a sum": (lambda: torch.einsum("ij,kj->ik", x, weight), r"F\.linear\(x, w\)"),
    "a product with experts": (lambda: F.linear(x, experts), r"F\.linear\(x, w\[i\]\)"),
    "a gradient": (lambda: weight.backward(), "takes no gradients"),
    "another like it": (lambda: torch.zeros_like(weight), r"torch\.zeros\(w\.shape"),
    "arithmetic": (lambda: weight * 2, r"use w\.dequantize\(\), a plain tensor, and jitgen\.quantize"),
    "a reduction": (lambda: weight.norm(), r"use w\.dequantize\(\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_error_says_what_to_do(case: str) -> None:
    call, remedy = REFUSED[case]
    with pytest.raises(UnsupportedError, match=remedy):
        call()


def test_the_remedies_work() -> None:
    other = weight.clone()
    other.copy_(jitgen.quantize(torch.ones(64, 64), "int8", 32))
    assert torch.equal(other.dequantize(), torch.ones(64, 64))
    assert jitgen.quantize(torch.cat([weight.dequantize(), weight.dequantize()]), "int8", 32).shape == (128, 64)
    assert torch.equal(weight[2:4].dequantize(), weight.dequantize()[2:4])
    assert torch.equal(weight[:, 32:].dequantize(), weight.dequantize()[:, 32:])
    torch.testing.assert_close(F.linear(x, experts[1]), F.linear(x, experts.dequantize()[1]))


def test_safetensors_says_how_a_weight_is_written(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="files of weights need safetensors")
    with pytest.raises(UnsupportedError, match=r"jitgen\.save_quantized\(state_dict, path\)"):
        safetensors.save_file({"w": weight}, tmp_path / "m.safetensors")
    jitgen.save_quantized({"w": weight}, tmp_path / "m.safetensors")
    assert torch.equal(jitgen.load_quantized(tmp_path / "m.safetensors")["w"], weight)
    assert weight.layout == "portable"
    assert weight.layout != "cpu"
    assert {weight.layout: 1} == {"portable": 1}


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "nf4", "mxfp8", "nvfp4"])
def test_the_older_format_of_torch_save(format: str) -> None:
    """It has the numbers after the pickle, so that tensors are read when a weight has been made of them already."""
    made = jitgen.quantize(torch.randn(64, 64), format)
    for trial in range(5):
        dirty = [torch.full((1 << 12,), float("nan")) for _ in range(20)]  # freed: what is allocated next may be NaN
        del dirty
        file = io.BytesIO()
        torch.save({"w": made}, file, _use_new_zipfile_serialization=False)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=bool(trial % 2))["w"], made)


class Subclass(torch.Tensor):
    """A plain subclass, as loaders of checkpoints have them."""


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, Subclass])
def test_numbers_of_any_class_are_checked_in_every_tensor(kind: type[torch.Tensor]) -> None:
    codes, scales = jitgen.quantize(torch.randn(64, 64), "int8", 32).tensors

    def made(codes: torch.Tensor, scales: torch.Tensor) -> jitgen.QTensor:
        return jitgen.QTensor((codes, scales), "int8", 32, (64, 64), torch.bfloat16)

    def of_kind(tensor: torch.Tensor) -> torch.Tensor:
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter(tensor, requires_grad=False)
        return tensor.as_subclass(kind)

    wrong = scales.clone()
    wrong[3, 1] = float("nan")
    made(of_kind(codes), of_kind(scales))
    for one, other in ((of_kind(codes), wrong), (codes, of_kind(wrong)), (of_kind(codes), of_kind(wrong))):
        with pytest.raises(FormatError, match="NaN"):
            made(one, other)
    made(codes.to("meta"), wrong.to("meta"))
    with FakeTensorMode() as mode:
        made(mode.from_tensor(codes), mode.from_tensor(wrong))
    make_fx(lambda codes, scales: made(codes, scales).tensors[0] + 1, tracing_mode="fake")(codes, wrong)


def test_numbers_of_a_pickle_are_checked_before_a_kernel_reads_them() -> None:
    made = jitgen.quantize(torch.randn(64, 64), "int8", 32)
    made.scales[0, 0] = float("nan")
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    with pytest.raises(FormatError, match="NaN"):
        loaded.with_layout("cpu")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, q: F.linear(x, q, q[:, 0]),
        lambda x, q: F.linear(x, q[:32], q[0][:32]),
        lambda x, q: F.linear(x, x, q[0][:3]),
        lambda x, q: torch.addmm(q[:3, :64], x, q.t()),
        lambda x, q: torch.addmv(q[:3, 0], x, x[0]),
    ],
)
def test_what_is_added_to_a_product_is_no_quantised_weight(function: Any) -> None:
    x, q = torch.randn(3, 64), jitgen.quantize(torch.randn(64, 64), "int4", 32)
    with pytest.raises(jitgen.UnsupportedError, match=r"is a quantised weight, or part of one.*dequantise it outside"):
        jitgen.jit(lambda x, q: function(x, q))(x, q)
