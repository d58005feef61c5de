"""``QTensor`` stands where a weight stands: in modules, state dicts, pickles and matrix products, and nowhere else."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import jitgen
from jitgen import _data
from jitgen.compilers import host
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant.layouts import LAYOUTS
from jitgen.quant.qtensor import QTensor
from jitgen.quant.storage import Stored
from jitgen.quant.token import intern
from tests import fresh

FORMATS = ("int8", "int4", "uint4", "int3", "uint2.floatzeros", "fp8_e4m3.tensor", "nvfp4")
"""Of the formats those with kernels of their own, and others of every kind of tensors."""


def quantised(
    format: str = "int4",
    shape: tuple[int, int] = (24, 100),
    dtype: torch.dtype = torch.float32,
    layout: str = "portable",
) -> QTensor:
    group = None if format == "nvfp4" else 32
    return jitgen.quantize(torch.randn(shape).to(dtype), format, group, layout=layout)


def same(one: QTensor, other: QTensor) -> bool:
    return one.token is other.token and all(map(torch.equal, one.tensors, other.tensors))


def apart(one: QTensor, other: QTensor) -> bool:
    return all(a.data_ptr() != b.data_ptr() for a, b in zip(one.tensors, other.tensors, strict=True))


def test_it_is_a_tensor_of_the_weights_shape() -> None:
    weight = quantised("uint4", dtype=torch.bfloat16)
    assert isinstance(weight, torch.Tensor)
    assert weight.shape == torch.Size((24, 100))
    assert isinstance(weight.shape, torch.Size)
    assert weight.dtype == torch.bfloat16
    assert weight.device == torch.device("cpu")
    assert (weight.format, weight.group_size, weight.layout) == ("uint4", 32, "portable")
    assert (weight.size(0), weight.size(), weight.dim(), weight.ndim, weight.numel(), len(weight)) == (
        *(24, weight.shape, 2, 2, 2400, 24),
    )
    assert weight.stride() == (100, 1)
    assert weight.is_floating_point()
    assert weight.is_contiguous()
    assert not weight.requires_grad
    assert weight.grad is None
    assert weight.is_leaf
    assert not weight.is_cuda
    assert [type(part) for part in weight.tensors] == [torch.Tensor] * 3
    assert weight.nbytes == sum(part.nbytes for part in weight.tensors) == 24 * (64 + 4 * 2 + 4)
    assert weight.codes is weight.tensors[0]
    assert weight.scales is weight.tensors[1]
    assert weight.zeros is weight.tensors[2]
    assert quantised("int4").zeros is None


def test_repr_says_what_it_is() -> None:
    weight = quantised()
    expected = "QTensor(int4, group_size=32, shape=(24, 100), layout='portable', dtype=torch.float32, device='cpu'"
    assert repr(weight) == str(weight) == f"{weight}" == expected + ")"
    assert repr(weight.t()) == expected.replace("(24, 100)", "(100, 24)") + ", transposed)"
    assert repr(nn.Parameter(weight, requires_grad=False)) == expected + ", Parameter)"


def test_tokens_of_alike_are_one_object() -> None:
    one, other = quantised(), quantised()
    assert one.token is other.token
    assert hash(one.token) == hash(other.token)
    assert nn.Parameter(one, requires_grad=False).token is one.token
    different = [
        quantised("int8"),
        quantised("uint4"),
        quantised(shape=(24, 101)),
        quantised(dtype=torch.float16),
        jitgen.quantize(torch.randn(24, 100), "int4", 64),
        jitgen.quantize(torch.randn(24, 100), "int4"),
        one.t(),
        one.to("meta"),
    ]
    assert len({tensor.token for tensor in [one, *different]}) == 1 + len(different)
    assert pickle.loads(pickle.dumps(one.token)) is one.token
    assert copy.deepcopy(one.token) is one.token
    assert intern(*one.token.facts()) is one.token
    assert one.token.replace(transposed=True) is one.t().token


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_with_layout(format: str, layout: str) -> None:
    weight = quantised(format)
    there = weight.with_layout(layout)
    assert there.layout == layout
    assert there.format == format
    assert (there is weight) == (layout == "portable")
    assert torch.equal(there.dequantize(), weight.dequantize())
    again = weight.with_layout(layout)
    assert all(one is other for one, other in zip(there.tensors, again.tensors, strict=True)), "converted once"
    assert all(one is other for one, other in zip(there.with_layout("portable").tensors, weight.tensors, strict=True))
    for alias in (weight.t(), weight.detach(), nn.Parameter(weight, requires_grad=False), weight.half()):
        assert alias.with_layout(layout).tensors[0] is there.tensors[0]


def test_unknown_layouts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="portable"):
        quantised().with_layout("diagonal")


# ------------------------------------------------------------------------------------------- copies, moves, modules


@pytest.mark.parametrize("format", FORMATS)
def test_moves_and_casts(format: str) -> None:
    weight = quantised(format)
    assert weight.to("cpu") is weight
    assert weight.cpu() is weight
    assert weight.to(torch.float32) is weight
    for cast in (
        weight.to(torch.bfloat16),
        weight.bfloat16(),
        weight.to(dtype=torch.bfloat16),
        weight.to("cpu", torch.bfloat16),
        weight.to(torch.empty(0, dtype=torch.bfloat16)),
    ):
        assert cast.dtype == torch.bfloat16
        assert cast.tensors[0] is weight.tensors[0]
        assert cast.dequantize().dtype == torch.bfloat16
        assert torch.equal(cast.dequantize(torch.float32), weight.dequantize())
    assert weight.half().float().token is weight.token
    assert weight.double().dequantize().dtype == torch.float64
    moved = weight.to("meta", torch.float16)
    assert (moved.device.type, moved.dtype, moved.shape) == ("meta", torch.float16, weight.shape)
    assert all(part.is_meta for part in moved.tensors)
    assert moved.dequantize().is_meta
    for twin in (weight.clone(), torch.clone(weight), weight.to("cpu", copy=True), copy.deepcopy(weight)):
        assert same(twin, weight)
        assert apart(twin, weight)
    for alias in (weight.detach(), weight.data, weight.contiguous()):
        assert same(alias, weight)
        assert alias.tensors is weight.tensors
    with pytest.raises(UnsupportedError, match=r"torch\.int8"):
        weight.to(torch.int8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_copy_between_layouts(format: str, layout: str) -> None:
    target, source = quantised(format, layout=layout), quantised(format)
    tensors, elsewhere = target.tensors, {name: target.with_layout(name) for name in LAYOUTS}
    assert target.copy_(source) is target
    assert target.tensors is tensors
    assert torch.equal(target.dequantize(), source.dequantize())
    for name, converted in elsewhere.items():
        assert same(converted, source.with_layout(name)), "a converted copy follows"
    back = quantised(format)
    back.copy_(target)
    assert same(back, source)


def test_copies_that_would_convert_are_refused() -> None:
    weight = quantised()
    with pytest.raises(UnsupportedError, match="format, group size and shape"):
        weight.copy_(quantised("int8"))
    with pytest.raises(UnsupportedError, match="format, group size and shape"):
        weight.copy_(jitgen.quantize(torch.randn(24, 100), "int4", 64))
    with pytest.raises(UnsupportedError, match=r"jitgen\.quantize"):
        weight.copy_(torch.randn(24, 100))
    with pytest.raises(UnsupportedError, match="dequantize"):
        torch.randn(24, 100).copy_(weight)


def test_a_parameter() -> None:
    weight = quantised()
    parameter = nn.Parameter(weight, requires_grad=False)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, QTensor)
    assert parameter.tensors is weight.tensors
    assert not isinstance(weight, nn.Parameter)
    twin = copy.deepcopy(parameter)
    assert isinstance(twin, nn.Parameter)
    assert same(twin, parameter)
    assert apart(twin, parameter)
    assert parameter.requires_grad_(False) is parameter
    for refused in (
        lambda: nn.Parameter(weight),
        lambda: weight.requires_grad_(),
        lambda: setattr(weight, "requires_grad", True),
    ):
        with pytest.raises(UnsupportedError, match="requires_grad=False"):
            refused()
    weight.requires_grad = False


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 24)
        self.second = nn.Linear(100, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.first.weight = self.second.weight = nn.Parameter(quantised(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x) + self.second(x))


def test_a_module_moves_and_is_copied() -> None:
    model = Tied()
    x = torch.randn(3, 100)
    expected = model(x)
    twin = copy.deepcopy(model)
    assert twin.first.weight is twin.second.weight
    assert isinstance(twin.first.weight, nn.Parameter)
    assert torch.equal(twin(x), expected)
    model.to(torch.float64)
    assert model.first.weight is model.second.weight
    assert model.first.weight.dtype == model.norm.weight.dtype == torch.float64
    assert isinstance(model.first.weight, nn.Parameter)
    torch.testing.assert_close(model(x.double()), expected.double(), atol=1e-4, rtol=1e-4)
    model.double().float().to("cpu").cpu()
    torch.testing.assert_close(model(x), expected)
    model.requires_grad_(False).eval()
    assert {name for name, _ in model.named_parameters()} == {
        *("first.weight", "first.bias", "norm.weight", "norm.bias"),
    }
    model.to("meta")
    assert model.first.weight.device.type == "meta"
    model.to_empty(device="cpu")
    assert model.first.weight.device.type == "cpu"
    model.load_state_dict(twin.state_dict())
    torch.testing.assert_close(model(x), expected)  # another kernel, where nothing takes gradients


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.covering(1)
def test_state_dicts(layout: str, assign: bool) -> None:
    source, target = Tied(), Tied()
    weight = target.first.weight.with_layout(layout)
    target.first.weight = target.second.weight = nn.Parameter(weight, requires_grad=False)
    state = source.state_dict()
    assert isinstance(state["first.weight"], QTensor)
    assert target.load_state_dict(state, assign=assign).missing_keys == []
    assert target.first.weight.layout == ("portable" if assign else layout)
    assert torch.equal(target.first.weight.dequantize(), source.first.weight.dequantize())
    x = torch.randn(2, 100)
    assert torch.equal(target(x), source(x))


def test_loading_plain_weights_into_quantised_ones_says_what_to_do() -> None:
    model = Tied()
    state = model.state_dict() | {"first.weight": torch.randn(24, 100)}
    with pytest.raises(RuntimeError, match=r"jitgen\.quantize"):
        model.load_state_dict(state)


# ----------------------------------------------------------------------------------------------------- serialization


def saved(value: object, **options: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_pickles(format: str, layout: str) -> None:
    weight = quantised(format, dtype=torch.bfloat16, layout=layout)
    plain = weight.with_layout("portable")
    for back in (
        saved(weight, weights_only=True),
        saved({"w": [weight]}, weights_only=True)["w"][0],  # type: ignore[index]
        saved(weight, weights_only=False),
        pickle.loads(pickle.dumps(weight)),
    ):
        assert isinstance(back, QTensor)
        assert same(back, plain), "stored in the portable layout"
    parameter = nn.Parameter(weight.t(), requires_grad=False)
    back = saved(parameter, weights_only=True)
    assert isinstance(back, nn.Parameter)
    assert torch.equal(back.dequantize(), parameter.dequantize())
    assert saved(weight, map_location="meta", weights_only=True).device.type == "meta"  # type: ignore[attr-defined]


def test_a_whole_module_in_a_file() -> None:
    model, x = Tied(), torch.randn(2, 100)
    back = pickle.loads(pickle.dumps(model))
    assert back.first.weight is back.second.weight
    assert torch.equal(back(x), model(x))
    state = saved(model.state_dict(), weights_only=True)
    loaded = Tied()
    loaded.load_state_dict(state)  # type: ignore[arg-type]
    assert torch.equal(loaded(x), model(x))


def test_a_file_is_read_where_jitgen_is_imported_and_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"w": quantised()}, path)
    script = f"import torch, jitgen; print(torch.load({str(path)!r}, weights_only=True)['w'].format)"
    done = fresh.run(script, cwd=_data.checkout_directory())
    assert done.stdout.strip() == "int4"


def test_parts_that_do_not_fit_are_refused() -> None:
    weight = quantised("uint4")
    codes, scales, zeros = weight.tensors
    make: Callable[..., QTensor] = lambda *tensors: QTensor(tensors, "uint4", 32, (24, 100), torch.float32)  # noqa: E731
    assert same(make(codes, scales, zeros), weight)
    for tensors in (
        (codes, scales),
        (codes, scales, zeros, zeros),
        (codes[1:], scales, zeros),
        (codes.to(torch.int8), scales, zeros),
        (codes, scales.float(), zeros),
        (codes, scales.t().contiguous().t(), zeros),
        (codes, scales, zeros.int()),
    ):
        with pytest.raises(FormatError, match=r"codes uint8\[24, 64\], scales bfloat16\[24, 4\], zeros uint8\[24, 4\]"):
            make(*tensors)
    with pytest.raises(FormatError, match="meta"):
        make(codes, scales, zeros.to("meta"))
    with pytest.raises(UnsupportedError, match="floating"):
        QTensor(weight.tensors, "uint4", 32, (24, 100), torch.int8)


# -------------------------------------------------------------------------------------------------- matrix products


def close(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: QTensor,
    added: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> None:
    """``found`` against float64: the weight, the product and the sum are rounded once each to x's dtype at most."""
    dense = weight.dequantize(torch.float64)
    exact, sizes = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    exact, sizes = exact * alpha, sizes * alpha
    if added is not None:
        exact, sizes = exact + beta * added.double(), sizes + (beta * added.double()).abs()
    accumulation = x.shape[-1] * torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    bound = sizes * (1.5 * torch.finfo(x.dtype).eps + accumulation)
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= bound).all()


PRODUCTS = (
    *((format, torch.float32, "portable") for format in FORMATS),
    *(("int4", dtype, "portable") for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    *(("uint4", torch.float64, layout) for layout in LAYOUTS),
)


@pytest.mark.parametrize(("format", "dtype", "layout"), PRODUCTS)
@pytest.mark.quick(
    where=lambda format, dtype, layout: (
        (format, dtype) in (("int8", torch.float32), ("int4", torch.bfloat16)) or layout == "cpu"
    )
)
def test_products_with_a_weight(format: str, dtype: torch.dtype, layout: str) -> None:
    weight = quantised(format, layout=layout)
    dense = weight.dequantize(dtype)
    bias = torch.randn(24).to(dtype)
    for shape in ((100,), (3, 100), (2, 5, 100), (0, 100)):
        x = torch.randn(shape).to(dtype)
        for found in (
            F.linear(x, weight),
            F.linear(input=x, weight=weight),
            x @ weight.T,
            x @ weight.t(),
            x @ weight.mT,
            x.matmul(weight.t()),
            torch.matmul(x, weight.t()),
            torch.matmul(x, torch.t(weight)),
            torch.matmul(x, weight.transpose(0, 1)),
            torch.matmul(x, torch.transpose(weight, -1, -2)),
            torch.matmul(x, weight.permute(1, 0)),
        ):
            assert found.dtype == dtype
            assert type(found) is torch.Tensor
            close(found, x, weight)
        close(F.linear(x, weight, bias), x, weight, bias)
    x = torch.randn(3, 100).to(dtype)
    close(torch.mm(x, weight.t()), x, weight)
    close(x.mm(weight.t()), x, weight)
    full = torch.randn(3, 24).to(dtype)
    for operands in ((bias, {}), (full, {}), (bias, {"alpha": 2}), (full, {"beta": 0.5})):
        added, options = operands
        close(torch.addmm(added, x, weight.t(), **options), x, weight, added, **options)  # type: ignore[arg-type]
        close(added.addmm(x, weight.t(), **options), x, weight, added, **options)  # type: ignore[attr-defined]
        close(torch.addmm(input=added, mat1=x, mat2=weight.t(), **options), x, weight, added, **options)  # type: ignore
    close(torch.matmul(input=x, other=weight.t()), x, weight)
    # The weight on the left, or as it lies.
    y = torch.randn(3, 24).to(dtype)
    torch.testing.assert_close(y @ weight, y @ dense)
    torch.testing.assert_close(F.linear(y, weight.t()), y @ dense)
    close((weight @ x.t()).t(), x, weight)
    close(torch.mm(weight, x.t()).t(), x, weight)
    close(weight @ x[0], x[0], weight)
    close(torch.mv(weight, x[0]), x[0], weight)
    assert (weight @ x.t()).is_contiguous()


@pytest.mark.parametrize(("format", "layout"), [("uint4", "portable"), ("int4", "cpu"), ("int8", "mma")])
def test_rows_of_a_weight_are_weights(format: str, layout: str) -> None:
    weight = quantised(format, layout=layout)
    dense = weight.dequantize()
    x = torch.randn(3, 100)
    takes: tuple[Callable[[torch.Tensor], object], ...] = (
        lambda w: w[3:20],
        lambda w: w[5:],
        lambda w: w[::7, :],
        lambda w: w[9:9],
        lambda w: w[torch.tensor([4, 0, 4]), ...],
        lambda w: w.chunk(5),
        lambda w: torch.split(w, [7, 17], dim=0),
        lambda w: w.split(10, -2),
        lambda w: torch.narrow(w, 0, 2, 11),
        lambda w: w.index_select(0, torch.tensor([23, 1])),
        lambda w: w.tensor_split(3),
    )
    for take in takes:
        taken, expected = take(weight), take(dense)
        pieces = taken if isinstance(taken, tuple) else (taken,)
        wanted = expected if isinstance(expected, tuple | list) else (expected,)
        for piece, want in zip(pieces, wanted, strict=True):
            assert isinstance(piece, QTensor)
            assert torch.equal(piece.dequantize(), want)
            close(F.linear(x, piece), x, piece)
    first = weight[:2]
    first.copy_(weight[2:4])
    assert torch.equal(weight.dequantize(), dense), "rows are a weight of their own"
    for columns in (lambda w: w[:, 3:], lambda w: w.chunk(2, 1), lambda w: w.narrow(1, 0, 33)):
        with pytest.raises(UnsupportedError, match="multiples of 32"):
            columns(weight)
    for same in (lambda w: w[...], lambda w: w[()], lambda w: w[:, :], lambda w: w[..., :]):
        assert torch.equal(same(weight).dequantize(), dense)
    assert torch.equal(weight[..., 0:32].dequantize(), dense[:, :32])
    assert torch.equal(weight[np.array([3, 1])].dequantize(), dense[[3, 1]])
    for other in (lambda w: w.t()[:8], lambda w: w[:, ::2], lambda w: w[:, 3], lambda w: w[None]):
        with pytest.raises(UnsupportedError, match="quantised weight"):
            other(weight)


@pytest.mark.parametrize("format", [*FORMATS, "int1", "nf4", "uint6"])
def test_columns_of_a_weight_are_weights(format: str) -> None:
    weight = quantised(format)
    dense = weight.dequantize()
    takes: tuple[Callable[..., object], ...] = (
        lambda w: w[:, 32:64],
        lambda w: w[3:20, 64:],
        lambda w: w.narrow(1, 32, 68),
        lambda w: w.split([64, 36], 1),
        lambda w: torch.split(w, 32, dim=-1),
    )
    for take in takes[:1] + takes[2:] if format == "fp8_e4m3.tensor" else takes:
        taken, expected = take(weight), take(dense)
        pieces = taken if isinstance(taken, tuple) else (taken,)
        wanted = expected if isinstance(expected, (tuple, list)) else (expected,)
        for piece, want in zip(pieces, wanted, strict=True):
            assert isinstance(piece, QTensor)
            assert torch.equal(piece.dequantize(), want)
            assert same(pickle.loads(pickle.dumps(piece)), piece)
    whole = jitgen.quantize(torch.randn(5, 100), "int4")
    assert torch.equal(whole[:, 7:50].dequantize(), whole.dequantize()[:, 7:50]), "a row's scale is for any columns"


def test_rows_that_share_scales_are_cut_where_these_end() -> None:
    weight = jitgen.quantize(torch.randn(300, 256), "fp8_e4m3.rows128", 128)
    dense = weight.dequantize()
    for rows in (slice(128, 256), slice(256, None), slice(0, 128)):
        assert torch.equal(weight[rows].dequantize(), dense[rows])
    with pytest.raises(UnsupportedError, match="128 share"):
        weight[5:]
    one = jitgen.quantize(torch.randn(20, 64), "int8.tensor")
    assert torch.equal(one[3:9].dequantize(), one.dequantize()[3:9])


def test_transposing() -> None:
    weight = quantised()
    turned = weight.t()
    assert turned.shape == (100, 24)
    assert turned.stride() == (1, 100)
    assert turned.transposed
    assert turned.token.weight_shape == (24, 100)
    assert torch.equal(turned.dequantize(), weight.dequantize().t())
    assert turned.t().token is weight.token
    assert turned.tensors is weight.tensors
    assert weight.transpose(0, 0).token is weight.token
    assert weight.permute(0, 1).token is weight.token
    assert weight.permute((1, 0)).token is turned.token
    assert same(copy.deepcopy(turned), turned)
    with pytest.raises(UnsupportedError, match="permute"):
        weight.permute(0, 0)


def test_gradients_flow_to_activations() -> None:
    weight, x = quantised(), torch.randn(3, 100, requires_grad=True)
    F.linear(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(3, -1))


def test_autocast() -> None:
    """The kernel's product, and no product of the dequantised weight in torch."""
    weight, x = quantised(), torch.randn(3, 100, requires_grad=True)
    bias = torch.randn(weight.shape[0])
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error", jitgen.FallbackWarning)
        found = F.linear(x, weight, bias)
    assert torch.equal(found, F.linear(x.bfloat16(), weight, bias.bfloat16()))
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda w: w + 1, "add"),
        (lambda w: 2 * w, "mul"),
        (lambda w: w.add_(1), "add_"),
        (lambda w: torch.relu(w), "relu"),
        (lambda w: w[0], "getitem"),
        (lambda w: w.__setitem__(0, 1), "setitem"),
        (lambda w: w.sum(), "sum"),
        (lambda w: w.view(-1), "view"),
        (lambda w: w.reshape(-1), "reshape"),
        (lambda w: w.view(torch.int32), "view"),
        (lambda w: w.t().reshape(-1, w.shape[0]), "reshape"),
        (lambda w: torch.cat([w, w]), "cat"),
        (lambda w: w.numpy(), "numpy"),
        (lambda w: w.tolist(), "tolist"),
        (lambda w: w.data_ptr(), "data_ptr"),
        (lambda w: w == w, "eq"),
        (lambda w: bool(w), "bool"),
        (lambda w: list(w), "iter|unbind"),
        (lambda w: F.linear(w, w), "linear"),
        (lambda w: w @ w.t(), "matmul"),
        (lambda w: F.linear(torch.ones(1, 100, dtype=torch.long), w), "linear"),
        (lambda w: torch.bmm(w, w), "bmm"),
        (lambda w: nn.init.zeros_(w), "zero_"),
    ],
)
def test_anything_else_is_refused_by_name(operation: Callable[[QTensor], object], name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"(?s)({name}).* of a quantised weight, QTensor.* is not supported; "):
        operation(quantised())


# ---------------------------------------------------------------------------------------------------------- tracing


def test_leaves_of_an_argument_tree() -> None:
    weight = quantised("uint4")
    node = Stored(weight.tensors, weight.token)
    leaves, tree = pytree.tree_flatten(((node, 1.5), {"w": node}))
    assert len(leaves) == 7
    assert leaves[1] is weight.tensors[1]
    other = quantised("uint4")
    assert pytree.tree_flatten(((Stored(other.tensors, other.token), 2), {"w": node}))[1] == tree
    turned = Stored(weight.tensors, weight.t().token)
    assert pytree.tree_flatten(((turned, 2), {"w": node}))[1] != tree
    (back, _), _ = pytree.tree_unflatten(["a", "b", "c", 2, "d", "e", "f"], tree)
    assert isinstance(back, Stored)
    assert (back.tensors, back.token) == (("a", "b", "c"), weight.token)
    assert weight.stored_in("portable").tensors is weight.tensors
    assert hash(tree) == hash(pytree.tree_flatten(((node, 2), {"w": node}))[1])


@pytest.mark.slow
def test_torch_compile() -> None:
    model, x = Tied().requires_grad_(False), torch.randn(3, 100)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))


@pytest.mark.parametrize("format", [*FORMATS, "fp8_e4m3.rows128", "nf4", "int5"])
@pytest.mark.quick(where=lambda format: format in ("int4", "uint4", "nvfp4", "int5", "fp8_e4m3.rows128"))
def test_an_embedding_looks_up_rows(format: str) -> None:
    group = None if format == "nvfp4" else 32
    weight = jitgen.quantize(torch.randn(200, 96).bfloat16(), format, group)
    layer = nn.Embedding(200, 96)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    for index in (torch.randint(0, 200, (3, 4)), torch.tensor([], dtype=torch.long), torch.tensor(199).int()):
        found = layer(index)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, weight.dequantize()[index.long()])
    with pytest.raises(IndexError, match="rows 7 to 200 of an embedding of 200 rows"):
        layer(torch.tensor([200, 7]))


@pytest.mark.parametrize("copied", [torch.clone, lambda weight: weight.to("cpu", copy=True), copy.deepcopy])
def test_a_copy_made_while_another_thread_converts_the_weight_is_whole(copied: Callable[[QTensor], QTensor]) -> None:
    """Tensors and token are read at once: a copy with the codes of one layout and the token of another is wrong."""
    weight = quantised(shape=(16, 64))
    expected = weight.dequantize()
    stop = threading.Event()

    def convert() -> None:
        while not stop.is_set():
            weight.relayout_("cpu")
            weight.relayout_("portable")

    thread, interval = threading.Thread(target=convert), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        copies = [copied(weight) for _ in range(200)]
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert all(torch.equal(one.dequantize(), expected) for one in copies)


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_a_weight_is_unflattened_and_flattened_again_after_a_call() -> None:
    weight = jitgen.quantize(torch.randn(32, 64), "int4", group_size=32)
    expected = weight.dequantize()
    for _ in range(2):
        names, token = weight.__tensor_flatten__()
        weight = QTensor.__tensor_unflatten__({name: getattr(weight, name) for name in names}, token, None, None)
        assert torch.equal(weight.dequantize(), expected)
        F.linear(torch.randn(3, 64), weight)
        assert weight.layout == "cpu"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("format", ["int8", "uint4", "fp8_e4m3", "nf4"])
def test_matrices_of_a_weight_that_is_overwritten_have_the_new_values(format: str, rows: int, transposed: bool) -> None:
    """Of whole blocks of 16 rows a matrix shares the weight's memory; all keep tensors of other layouts."""
    weight, other = (jitgen.quantize(torch.randn(2, rows, 64), format, 32) for _ in range(2))
    taken = weight.mT[1] if transposed else weight[1]
    kept = [taken.portable_codes, taken.with_layout("cpu"), weight[0], weight[1]]
    weight.copy_(other)
    expected = other.dequantize()
    for found in (weight, weight[1], taken.T if transposed else taken, kept[1].T if transposed else kept[1]):
        torch.testing.assert_close(found.dequantize(), expected if found is weight else expected[1], rtol=0, atol=0)
    torch.testing.assert_close(kept[2].dequantize(), expected[0], rtol=0, atol=0)
    torch.testing.assert_close(taken.portable_codes, other[1].portable_codes, rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match="write to the whole weight"):
        taken.copy_(other.mT[1] if transposed else other[1])


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda w: w.view(3, -1, 64),
    "reshape": lambda w: torch.reshape(w, (3, w.shape[0] // 3, 64)),
    "unflatten": lambda w: w.unflatten(0, (-1, w.shape[0] // 3)),
    "flatten": lambda w: w.view(3, -1, 64).flatten(0, 1).view(3, w.shape[0] // 3, 64),
}


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("rows", [8, 16, 40])
@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4"])
def test_rows_of_a_weight_are_divided_among_matrices(format: str, rows: int) -> None:
    """As DeepSeek-V4's projection of the attention's results has them: one matrix for each group of heads."""
    weight, x = jitgen.quantize(torch.randn(3 * rows, 64), format), torch.randn(3, 5, 64)
    dense = weight.dequantize(torch.float64)
    for view in VIEWS.values():
        assert torch.equal(view(weight).dequantize(), view(weight.dequantize()))

        def product(x: torch.Tensor, weight: torch.Tensor, view: Callable[..., torch.Tensor] = view) -> torch.Tensor:
            return torch.bmm(x, view(weight).transpose(1, 2))

        functions = {"eager": product, "jit": jitgen.jit(lambda x, weight, view=view: product(x, weight, view))}
        for name, function in functions.items():
            if name == "jit" and rows % 16:
                with pytest.raises(UnsupportedError, match="those of several matrices begin at multiples of 16"):
                    function(x, weight)
                continue
            torch.testing.assert_close(function(x, weight).double(), product(x.double(), dense), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.parametrize("view", [lambda w: w.view(24, 128), lambda w: w.view(96, 32)], ids=["wider", "narrower"])
def test_columns_of_a_weight_are_not_rows(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = jitgen.quantize(torch.randn(48, 64), "int8", 32)
    with pytest.raises(UnsupportedError, match=r"w\.view\(g, -1, K\) divides"):
        view(weight)
    with pytest.raises(UnsupportedError, match="stands for"):
        jitgen.jit(lambda x, w: x @ view(w).T)(torch.randn(5, view(weight.dequantize()).shape[1]), weight)


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
def test_a_weight_whose_first_call_is_in_inference_mode_is_trained_through_and_loaded_later() -> None:
    model, other = nn.Linear(64, 32), nn.Linear(64, 32)
    for each in (model, other):
        jitgen.quantize_(each, "int8")
    x = torch.randn(3, 64)
    with torch.inference_mode():
        model(x)
        jitgen.jit(lambda x, weight: F.linear(x, weight))(x, model.weight)
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, model.weight.dequantize().sum(0).expand(3, 64))
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), other(x))
