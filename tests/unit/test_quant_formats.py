"""Formats and layouts: codes, scales and zero-points mean what the table says, and every layout keeps all of them."""

from __future__ import annotations

import math
import re

import pytest
import torch

import jitgen
from jitgen.errors import FormatError, UnsupportedError
from jitgen.quant import layouts
from jitgen.quant.formats import FORMATS, check_group_size, find, geometry
from jitgen.quant.layouts import portable
from jitgen.quant.quantize import sqnr
from jitgen.spec import TensorSpec

GROUPS = (32, 64, 128, 96, None)
TILED = ("int8", "int4", "uint4")
"""Formats that have kernels and layouts of their own."""
VARIED = (
    *("int3", "int1", "ternary", "uint7", "fp6_e2m3", "nf4", "mxfp8", "nvfp4", "uint5.float16.floatzeros"),
    *("fp8_e4m3.rows128", "int4.tensor", "uint2.float32", "int6.e8m0"),
)
"""Formats in bit planes, of every kind of codes, zero-points and scales, and qualifiers."""
SHAPES = ((1, 1), (16, 128), (17, 129), (5, 64), (48, 32), (33, 200), (0, 64), (3, 0), (0, 0), (2, 1000))


def groups_of(format: str) -> tuple[int | None, ...]:
    """The group sizes among ``GROUPS`` that a format has."""
    only = find(format).group_size
    return GROUPS if only is None else (only,)


def codes_of(format: str, tensors: tuple[torch.Tensor, ...]) -> list[list[int]]:
    """The portable layout read as its docstring says, in plain Python."""
    row = find(format)
    result = []
    for line in tensors[0].tolist():
        stream = sum((byte & 0xFF) << (8 * place) for place, byte in enumerate(line))
        codes = []
        for place in range(8 * len(line) // row.bits):
            code = stream >> (place * row.bits) & ((1 << row.bits) - 1)
            codes.append(code - (1 << row.bits) if row.signed and code >> (row.bits - 1) else code)
        result.append(codes)
    return result


def decoded(weight: jitgen.QTensor) -> torch.Tensor:
    """(value - zero) * scale in float64, padded columns included."""
    plain = weight.with_layout("portable")
    row, sizes = find(plain.format), geometry(plain.group_size, plain.token.weight_shape)
    codes = torch.tensor(codes_of(plain.format, plain.tensors), dtype=torch.long)
    values = row.values[codes.reshape(sizes.rows, sizes.padded_columns) % (1 << row.bits)]

    def expanded(tensor: torch.Tensor) -> torch.Tensor:
        """One number for each element, of rows that may share them."""
        rows = torch.arange(sizes.rows) // (row.scale_rows or max(sizes.rows, 1))
        return tensor[rows].repeat_interleave(sizes.group, 1)

    scales = plain.scales
    if row.scale == "e8m0":
        scales = 2.0 ** (scales.double() - 127)
    if row.scale == "e4m3":
        scales = scales.view(torch.float8_e4m3fn)
    if plain.zeros is not None:
        values = values - expanded(plain.zeros.double())
    values = values * expanded(scales.double())
    return values if plain.tensor_scale is None else values * plain.tensor_scale.double()


@pytest.mark.parametrize("format", [*TILED, *VARIED])
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.quick(where=lambda format: format in ("uint4", "int3", "nvfp4", "fp8_e4m3.rows128"))
def test_a_layout_keeps_everything(layout: str, format: str) -> None:
    row, found = find(format), layouts.find(layout)
    for group_size in groups_of(format):
        for shape in SHAPES:
            tensors = portable.empty(row, group_size, shape, "cpu")
            # Any codes and scales whatever, not only those that quantising gives.
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.normal_()
                else:
                    tensor.random_()
            packed = found.pack(row, group_size, shape, tensors)
            assert len(packed) == len(tensors)
            assert all(tensor.is_contiguous() for tensor in packed)
            back = found.unpack(row, group_size, shape, packed)
            portable.check(row, group_size, shape, back)
            columns = shape[1]
            first, second = (portable.unpack_codes(row, codes)[:, :columns] for codes in (tensors[0], back[0]))
            assert torch.equal(first, second), shape
            rows = 1 if shape[0] else 0  # a weight without rows keeps no factor
            for expected, tensor in zip(tensors[1:], back[1:], strict=True):
                assert not rows or torch.equal(expected, tensor), shape


@pytest.mark.parametrize("format", [*TILED, *VARIED])
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.quick(where=lambda format: format in ("uint4", "int3", "nvfp4"))
def test_a_layout_is_an_exact_inverse_for_quantised_weights(layout: str, format: str) -> None:
    for group_size in groups_of(format):
        for shape in SHAPES:
            plain = jitgen.quantize(torch.randn(shape), format, group_size)
            there = jitgen.quant.qtensor.QTensor(
                plain.with_layout(layout).tensors, format, group_size, shape, plain.dtype, layout=layout
            )
            back = there.with_layout("portable")
            assert all(torch.equal(*pair) for pair in zip(plain.tensors, back.tensors, strict=True))
            assert torch.equal(there.dequantize(), plain.dequantize())
            assert there.nbytes == sum(part.nbytes for part in there.tensors)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.quick(where=lambda layout: layout in ("portable", "mma"))
def test_a_layout_works_on_the_meta_device(layout: str) -> None:
    for format in (*TILED, *VARIED):
        group = groups_of(format)[0]
        real = jitgen.quantize(torch.randn(17, 129), format, group, layout=layout)
        meta = jitgen.quantize(torch.randn(17, 129, device="meta"), format, group, layout=layout)
        assert [(part.shape, part.dtype) for part in meta.tensors] == [
            (part.shape, part.dtype) for part in real.tensors
        ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", [*FORMATS, *VARIED])
@pytest.mark.quick(where=lambda format, dtype: dtype == torch.bfloat16 or format in TILED)
def test_dequantising_is_the_formula(format: str, dtype: torch.dtype) -> None:
    cases = [(shape, group) for shape in SHAPES for group in groups_of(format)]
    for shape, group_size in cases if format in TILED else cases[:: 5 if len(cases) > 20 else 2]:
        weight = jitgen.quantize(torch.randn(shape).to(dtype), format, group_size)
        exact = decoded(weight)
        assert exact.shape[1] == geometry(group_size, shape).padded_columns
        if 0 in find(format).values and find(format).zeros != "float":
            assert not exact[:, shape[1] :].any(), "padded columns decode to 0"
        exact = exact[:, : shape[1]]
        assert torch.equal(weight.dequantize(torch.float64), exact)
        found = weight.dequantize()
        assert found.dtype == dtype
        assert found.shape == shape
        if dtype == torch.float64:
            assert torch.equal(found, exact)
        else:  # (value - zero) * scale * tensor_scale, each rounded to float32, and then to the dtype
            unit = torch.finfo(dtype).eps / 2 + (0 if format in TILED else 3 * torch.finfo(torch.float32).eps / 2)
            tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            assert ((found.double() - exact).abs() <= unit * exact.abs() + tiny).all()


@pytest.mark.parametrize("format", FORMATS)
def test_every_code_is_decoded(format: str) -> None:
    row = FORMATS[format]
    low = -(1 << (row.bits - 1)) if row.signed else 0
    codes = torch.arange(low, low + (1 << row.bits)).repeat(2, 32)[:, : 32 * ((1 << row.bits) // 32 + 1)]
    packed = portable.pack_codes(row, codes)
    assert packed.dtype == row.storage_dtype
    assert torch.equal(portable.unpack_codes(row, packed).long(), codes)
    assert torch.equal(portable.unpack_codes(row, portable.pack_codes(row, codes.float())).long(), codes)
    assert codes_of(format, (packed,)) == codes.tolist()
    values = portable.decode_codes(row, packed, torch.float64)
    assert torch.equal(values.nan_to_num(7777), row.values[codes % (1 << row.bits)].nan_to_num(7777))
    unsigned = portable.unsigned_codes(row, packed)
    assert torch.equal(portable.from_unsigned_codes(row, unsigned), packed)


def test_the_values_of_codes_are_those_of_their_specifications() -> None:
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        assert torch.equal(
            FORMATS[name].values.nan_to_num(7777), torch.arange(256).byte().view(dtype).double().nan_to_num(7777)
        )
    # OCP Microscaling Formats (MX) Specification 1.0, tables 4 to 6: the magnitudes.
    assert FORMATS["fp4_e2m1"].values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert FORMATS["fp6_e2m3"].values[[1, 7, 8, 31]].tolist() == [0.125, 0.875, 1, 7.5]
    assert FORMATS["fp6_e3m2"].values[[1, 3, 4, 31]].tolist() == [0.0625, 0.1875, 0.25, 28]
    for name in ("fp4_e2m1", "fp6_e2m3", "fp6_e3m2"):
        half = len(FORMATS[name].values) // 2
        assert torch.equal(FORMATS[name].values[half:], -FORMATS[name].values[:half])
    assert FORMATS["int1"].values.tolist() == [-1, 1]
    assert FORMATS["int3"].values.tolist() == [0, 1, 2, 3, -4, -3, -2, -1]
    assert FORMATS["uint2"].values.tolist() == [0, 1, 2, 3]
    assert FORMATS["nf4"].values[[0, 7, 15]].tolist() == [-1, 0, 1]


def test_nibbles_lie_low_first() -> None:
    codes = torch.tensor([[1, -2, 7, -8]])
    assert portable.pack_codes(FORMATS["int4"], codes).tolist() == [[0xE1, 0x87]]


@pytest.mark.parametrize(
    ("format", "group_size", "least"),
    [
        *(("int8", group, 43.0) for group in (32, 64, 128)),
        *(("int4", group, least) for group, least in ((32, 21.0), (64, 20.3), (128, 19.7))),
        *(("uint4", group, least) for group, least in ((32, 21.3), (64, 20.5), (128, 19.8))),
        # One scale for 1024 columns: their largest of a normal distribution is 3.2 sigma, hence 42.3 dB at most.
        *(("int8", None, 41.5), ("int4", None, 18.7), ("uint4", None, 18.7)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sqnr_of_normal_data(format: str, group_size: int | None, least: float, dtype: torch.dtype) -> None:
    weight = torch.randn(256, 1024).to(dtype)
    quantised = jitgen.quantize(weight, format, group_size)
    noise = weight.double() - quantised.dequantize(torch.float64)
    found = 10 * torch.log10(weight.double().square().sum() / noise.square().sum()).item()
    assert found >= least
    assert sqnr(weight, quantised) == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize("format", TILED)
def test_the_scale_is_at_least_as_good_as_the_plain_one(format: str) -> None:
    row = FORMATS[format]
    for scale in (1e-30, 1e-4, 1.0, 1e4, *((1e20, 1e36) if row.scale_limit == math.inf else ())):
        weight = torch.randn(64, 64).mul_(scale) + scale * torch.rand(64, 1)
        low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True).clamp(min=0)
        step = (high - low) / 15 if row.zero_point else weight.abs().amax(1, keepdim=True) / row.high
        step = step.to(row.scale_dtype).double()
        zero = (-low / step).round().clamp(row.low, row.high) if row.zero_point else 0
        plain = ((weight.double() / step).round() + zero).clamp(row.low, row.high).sub(zero) * step
        error = (jitgen.quantize(weight, format, 64).dequantize(torch.float64) - weight.double()).square().sum(1)
        assert (error <= (plain - weight.double()).square().sum(1) * (1 + 1e-4)).all(), scale


@pytest.mark.parametrize("format", [name for name, row in FORMATS.items() if row.scale_limit < math.inf])
def test_scales_beyond_what_kernels_take_are_refused(format: str) -> None:
    limit = FORMATS[format].scale_limit
    with pytest.raises(FormatError, match=re.escape(f"below {limit:g}")):
        jitgen.quantize(torch.full((4, 64), 1e6 * limit), format, 64)


@pytest.mark.parametrize("format", [*TILED, *(f"int{bits}" for bits in (2, 3, 5, 6, 7)), "uint3", "uint6"])
def test_zeros_and_what_the_codes_hold_are_exact(format: str) -> None:
    row = FORMATS[format]
    assert not jitgen.quantize(torch.zeros(4, 64), format, 32).dequantize().any()
    sparse = torch.randn(8, 64)
    sparse[:, ::3] = 0
    assert not jitgen.quantize(sparse, format, 32).dequantize()[:, ::3].any()
    for sign in (1, -1):
        integers = torch.randint(int(row.low), int(row.high) + 1, (8, 64)).float() * sign
        integers[:, 0], integers[:, 1] = row.low * sign, row.high * sign
        integers -= 5 * sign if row.zero_point else 0
        assert torch.equal(jitgen.quantize(integers, format, 64).dequantize(), integers)


def test_codes_stay_within_the_formats_range() -> None:
    weight = torch.randn(64, 256) * 1e3
    weight[0, :] = 5.0
    for format, row in FORMATS.items():
        values = portable.decode_codes(row, jitgen.quantize(weight, format, groups_of(format)[0]).codes, torch.float64)
        assert values.min() >= row.low
        assert values.max() <= row.high


def test_a_weight_is_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 100)
    whole = {format: jitgen.quantize(weight, format, groups_of(format)[0]) for format in (*TILED, *VARIED)}
    monkeypatch.setitem(jitgen.quant.decode.CHUNK_ELEMENTS, "cpu", 700)
    for format, expected in whole.items():
        found = jitgen.quantize(weight, format, groups_of(format)[0])
        assert all(torch.equal(*pair) for pair in zip(found.tensors, expected.tensors, strict=True))
        assert torch.equal(found.dequantize(), expected.dequantize())


def test_any_strides_and_gradients_are_welcome() -> None:
    weight = torch.randn(96, 40)
    expected = jitgen.quantize(weight, "int4", 32)
    for same in (weight.t().contiguous().t(), weight.clone().requires_grad_(), torch.nn.Parameter(weight)):
        found = jitgen.quantize(same, "int4", 32)
        assert all(torch.equal(*pair) for pair in zip(found.tensors, expected.tensors, strict=True))
        assert not found.requires_grad


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", [*TILED, *VARIED])
def test_values_that_are_not_finite_are_refused(format: str, bad: float) -> None:
    weight = torch.randn(8, 40)
    weight[5, 39] = bad
    with pytest.raises(FormatError, match="NaN or infinite"):
        jitgen.quantize(weight, format, groups_of(format)[0])


def test_values_too_large_for_the_scale_are_refused() -> None:
    with pytest.raises(FormatError, match="too large"):
        jitgen.quantize(torch.full((2, 32), 1e300, dtype=torch.float64), "int8", 32)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.randn(4), "1 dimensions"),
        (torch.randn(2, 4, 4, 4), "4 dimensions"),
        (torch.ones(4, 4, dtype=torch.int8), "torch.int8"),
        (torch.ones(4, 4, dtype=torch.bool), "torch.bool"),
        (torch.ones(4, 4).to(torch.float8_e4m3fn), "float8"),
        (torch.ones(4, 4, dtype=torch.complex64), "complex64"),
        (torch.ones(4, 4).to_sparse(), "to_dense"),
        ([[1.0]], "not list"),
    ],
)
def test_what_is_no_weight_is_refused(weight: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        jitgen.quantize(weight, "int4", 32)  # type: ignore[arg-type]


def test_quantising_twice_is_refused() -> None:
    with pytest.raises(FormatError, match="dequantize"):
        jitgen.quantize(jitgen.quantize(torch.randn(4, 4), "int8"), "int4")


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(FormatError, match="int8, int4, uint4"):
        jitgen.quantize(torch.randn(4, 4), "int9")
    with pytest.raises(FormatError, match="int8, int4, uint4"):
        jitgen.quantize(torch.randn(4, 4), None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=", ".join(layouts.LAYOUTS)):
        jitgen.quantize(torch.randn(4, 4), "int4", layout="sideways")


@pytest.mark.parametrize("group_size", [0, -32, 16, 48, 33, 1.5, "32", True])
def test_bad_group_sizes_are_refused(group_size: object) -> None:
    with pytest.raises(FormatError, match="32, 64, 128"):
        check_group_size(group_size)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="group_size"):
        jitgen.quantize(torch.randn(4, 96), "int4", group_size)  # type: ignore[arg-type]


def test_specs_of_quantised_weights() -> None:
    spec = TensorSpec((14336, 4096), torch.bfloat16, format="int4", group_size=128)
    assert str(spec) == "int4g128[14336, 4096]"
    assert TensorSpec.parse("int4g128[14336,4096]") == TensorSpec((14336, 4096), format="int4", group_size=128)
    assert TensorSpec.parse("int8gK[N, K]") == TensorSpec(("N", "K"), format="int8")
    assert TensorSpec.parse("int8[4,4]").format is None
    for made in ("uint4g32[8, 64]", "int8gK[8, 64]"):
        assert str(TensorSpec.parse(made)) == made
    with pytest.raises(FormatError, match="int8, int4, uint4"):
        TensorSpec.parse("int9g32[4,4]")
    with pytest.raises(FormatError, match="32, 64, 128"):
        TensorSpec.parse("int4g12[4,4]")
    with pytest.raises(FormatError, match=r"\[N, K\]"):
        TensorSpec((4,), format="int4")
    with pytest.raises(FormatError, match="strides"):
        TensorSpec((4, 4), strides=(1, 4), format="int4")
    with pytest.raises(FormatError, match="floating"):
        TensorSpec((4, 4), torch.int8, format="int4")
    with pytest.raises(FormatError, match="without a format"):
        TensorSpec((4, 4), group_size=32)


def test_a_weight_below_every_scale_is_refused() -> None:
    with pytest.raises(FormatError, match="too small"):
        jitgen.quantize(torch.full((4, 64), 1e-9), "int4.float16", 32)
    assert not jitgen.quantize(torch.zeros(4, 64), "int4.float16", 32).dequantize().any()


def test_scales_that_kernels_in_cuda_do_not_multiply_by_are_refused() -> None:
    weight = torch.randn(32, 64).clamp(-1, 1)
    weight[:, ::32] = 4.0  # the largest magnitude of each group: its scale is 1
    fits = jitgen.quantize(weight * 2.0**17, "mxfp4")
    assert torch.equal(fits.with_layout("mma").dequantize(), fits.dequantize())
    beyond = jitgen.quantize(weight * 2.0**18, "mxfp4")
    with pytest.raises(FormatError, match=r"scale above 2\^17"):
        beyond.with_layout("mma")
    assert beyond.with_layout("interleaved").dequantize().isfinite().all()
