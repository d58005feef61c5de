"""Checkpoints whose activations are quantised: what the config says of them, and the products."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import jitgen
from jitgen.errors import FormatError
from jitgen.quant.activations import quantized
from tests import checkpoint_writers as writers

SCALE = torch.tensor([0.02])


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))


def groups(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """A config of compressed-tensors whose weights have what their tensors say."""
    arguments = {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": True, "symmetric": True, **more}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": None, "input_activations": arguments}},
    }


def float8(kind: str = "row", suffix: str = "weight_scale") -> dict[str, torch.Tensor]:
    return writers.float8(kind=kind, suffix=suffix)[0]


def int8() -> dict[str, torch.Tensor]:
    return writers.int8_rows()[0]


STATED: dict[str, tuple[Any, dict[str, Any], bool, str | None, str]] = {
    "int8 for each token": (int8, groups(8, "int", "token"), False, "int8", "int8"),
    "static int8": (int8, groups(8, "int", "tensor", dynamic=False), True, "int8", "int8.static"),
    "int8 and int4": (
        lambda: writers.packed_integers(group=32)[0],
        groups(8, "int", "token"),
        False,
        "int8",
        "int4",
    ),
    "fp8 for each token": (float8, groups(8, "float", "token"), False, "fp8_e4m3", "fp8_e4m3.bfloat16"),
    "static fp8": (
        lambda: float8("tensor"),
        groups(8, "float", "tensor", dynamic=False),
        True,
        "fp8_e4m3",
        "fp8_e4m3.bfloat16.tensor.static",
    ),
    "fp8 in groups of 128": (
        float8,
        groups(8, "float", "group", group_size=128),
        False,
        "fp8_e4m3.block128",
        "fp8_e4m3.bfloat16",
    ),
    "fine-grained fp8": (
        lambda: float8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        False,
        "fp8_e4m3.block128",
        "fp8_e4m3.bfloat16.rows128",
    ),
    "ModelOpt's fp8": (
        lambda: float8("tensor"),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        True,
        "fp8_e4m3",
        "fp8_e4m3.bfloat16.tensor.static",
    ),
    "FBGEMM's fp8": (
        float8,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        False,
        "fp8_e4m3.most1200",
        "fp8_e4m3.bfloat16",
    ),
    "powers of two": (
        lambda: float8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        False,
        "fp8_e4m3.block128.powers",
        "fp8_e4m3.bfloat16.rows128",
    ),
    "Quark's fp8": (
        lambda: float8("tensor"),
        {"quant_method": "quark", "global_quant_config": {"input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False}}},
        True,
        "fp8_e4m3",
        "fp8_e4m3.bfloat16.tensor.static",
    ),
    "weights alone": (float8, {"quant_method": "compressed-tensors"}, False, None, "fp8_e4m3.bfloat16"),
    "4 bits": (int8, groups(4, "int", "token"), False, None, "int8.bfloat16"),
    "zero-points": (int8, groups(8, "int", "tensor", dynamic=False, symmetric=False), True, None, "int8.bfloat16"),
}


@pytest.mark.parametrize("kind", STATED)
@pytest.mark.quick(where=lambda kind: kind in ("int8 for each token", "static fp8", "fine-grained fp8", "4 bits"))
def test_products_do_as_the_checkpoint_says(kind: str) -> None:
    write, config, static, activation, format = STATED[kind]
    state = write() | ({"l.input_scale": SCALE} if static else {})
    loaded = jitgen.load_quantized(state, config=config)
    weight = loaded["l.weight"]
    assert (weight.activation, weight.format) == (activation, format)
    assert list(loaded) == ["l.weight"]
    dense = weight.dequantize(torch.float64)
    x = torch.randn(5, weight.shape[1])
    rounded = x if activation is None else quantized(x, activation, SCALE if static else None)
    wanted = rounded.double() @ dense.T
    assert ((F.linear(x, weight) - wanted).abs() <= 1e-5 * wanted.abs().amax(-1, keepdim=True)).all()
    words = {"4 bits": "left as floats", "zero-points": "left as floats", "weights alone": "as they are"}
    assert words.get(kind, f"{activation}, static" if static else activation) in loaded.report


def test_the_caller_may_say_otherwise() -> None:
    state, config = int8(), groups(8, "int", "token")
    assert jitgen.load_quantized(state, config=config, activation=None)["l.weight"].activation is None
    packed = writers.packed_integers()[0]
    assert jitgen.load_quantized(packed, activation="int8")["l.weight"].activation == "int8"
    with pytest.raises(FormatError, match=r"l.weight: activation='fp8_e4m3'"):
        jitgen.load_quantized(state, activation="fp8_e4m3")
    with pytest.raises(FormatError, match="unknown activation 'int7'"):
        jitgen.load_quantized(state, activation="int7")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_an_error(scale: float) -> None:
    state = int8() | {"l.input_scale": torch.tensor(scale)}
    with pytest.raises(FormatError, match=r"l.input_scale"):
        jitgen.load_quantized(state, config=groups(8, "int", "tensor", dynamic=False))
    state["l.input_scale"] = torch.ones(3)
    with pytest.raises(FormatError, match="is not one scale"):
        jitgen.load_quantized(state, config=groups(8, "int", "tensor", dynamic=False))


def test_a_static_scale_that_is_missing_is_said() -> None:
    loaded = jitgen.load_quantized(int8(), config=groups(8, "int", "tensor", dynamic=False))
    assert loaded["l.weight"].activation == "int8"
    assert "there is no l.input_scale" in loaded.report


def test_a_bound_of_scales_saturates_what_is_beyond() -> None:
    state, config = float8(), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 12.5}
    weight = jitgen.load_quantized(state, config=config)["l.weight"]
    assert weight.activation == "fp8_e4m3.most12.5"
    x = torch.randn(6, weight.shape[1])
    x[1::2] *= 40
    scales = x.abs().amax(-1, keepdim=True).clamp(max=12.5) / 448
    values = (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scales
    wanted = values @ weight.dequantize(torch.float64).T
    # A quotient and a product by the reciprocal may round few values to neighbouring codes, 2^-3 apart.
    assert ((F.linear(x, weight) - wanted).norm() <= 1e-2 * wanted.norm()).all()
    stored = jitgen.load_quantized(state | {"l.input_scale_ub": torch.tensor([3.0])}, config=config)
    assert stored["l.weight"].activation == "fp8_e4m3.most3"
    for bound in (0.0, -1.0, float("nan"), "a"):
        with pytest.raises(FormatError, match="activation_scale_ub is"):
            jitgen.load_quantized(state, config=config | {"activation_scale_ub": bound})


@pytest.mark.parametrize("name", ["fp8_e4m3.most", "fp8_e4m3.most0", "int8.mostx", "mxfp8.most3", "fp8_e4m3.most-1", 3])
def test_a_bound_that_is_none_is_an_error(name: Any) -> None:
    with pytest.raises(FormatError, match="unknown activation"):
        jitgen.quantize(torch.randn(16, 64), "fp8_e4m3", activation=name)


def test_static_scales_have_the_name_that_transformers_gives_them() -> None:
    state = float8("tensor", "weight_scale_inv") | {"l.activation_scale": SCALE}
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    loaded = jitgen.load_quantized(state, config=config)
    assert list(loaded) == ["l.weight"]
    assert loaded["l.weight"].input_scale.item() == pytest.approx(0.02)
    del state["l.activation_scale"]
    assert "there is no l.input_scale" in jitgen.load_quantized(state, config=config).report


def test_scales_that_are_powers_of_two_are_read() -> None:
    state = float8("block", "weight_scale_inv")
    powers = state["l.weight_scale_inv"].float().log2().ceil().exp2()
    found = [
        jitgen.load_quantized(state | {"l.weight_scale_inv": scales}, dtype=torch.float32)["l.weight"].dequantize()
        for scales in (powers, powers.to(torch.float8_e8m0fnu))
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_of_four_bits_may_lie_in_bytes(symmetric: bool) -> None:
    codes = torch.randint(-8, 8, (48, 128), dtype=torch.int8)
    scales, zeros = torch.rand(48, 4) + 0.1, torch.randint(-8, 8, (48, 4), dtype=torch.int8)
    state = {"l.weight": codes, "l.weight_scale": scales}
    state |= {} if symmetric else {"l.weight_zero_point": zeros}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric}
    config = groups(8, "int", "token")
    config["config_groups"]["group_0"]["weights"] = weights
    weight = jitgen.load_quantized(state, config=config)["l.weight"]
    assert (weight.format, weight.activation) == ("int4.float32" if symmetric else "uint4.float32", "int8")
    steps = codes.float().unflatten(1, (4, 32)) - (0 if symmetric else zeros.float().unsqueeze(-1))
    assert torch.equal(weight.dequantize(torch.float32), (steps * scales.unsqueeze(-1)).flatten(1))
    with pytest.raises(FormatError, match="codes from -8 to 100"):
        jitgen.load_quantized(state | {"l.weight": codes.index_fill(1, torch.tensor(0), 100)}, config=config)


@pytest.mark.parametrize("symmetric", [{}, {"symmetric": True}, {"symmetric": False}], ids=str)
def test_static_zero_points_of_activations_are_not_dropped(symmetric: dict[str, bool]) -> None:
    config = groups(8, "int", "tensor", dynamic=False, **symmetric)
    state = int8() | {"l.input_scale": SCALE, "l.input_zero_point": torch.tensor([7], dtype=torch.int8)}
    loaded = jitgen.load_quantized(state, config=config)
    assert loaded["l.weight"].activation is None
    assert "left as floats" in loaded.report
    zero = state | {"l.input_zero_point": torch.zeros(1, dtype=torch.int8)}
    kind = None if symmetric.get("symmetric") is False else "int8"
    assert jitgen.load_quantized(zero, config=config)["l.weight"].activation == kind


@pytest.mark.parametrize("others", ["Linear", "k"])
def test_a_weight_that_no_pattern_names_has_the_activations_of_its_class(others: str) -> None:
    config = groups(8, "float", "token")
    pattern = config["config_groups"]["group_0"] | {"targets": ["re:.*down"]}
    of_class = pattern | {"input_activations": pattern["input_activations"] | {"type": "int"}, "targets": [others]}
    state = {f"{name}.{last}": value for name in ("down", "k", "q") for last, value in packed_of("l").items()}
    config["config_groups"] = {"group_0": pattern, "group_1": of_class}
    loaded = jitgen.load_quantized(state, config=config)
    kinds = [loaded[f"{name}.weight"].activation for name in ("down", "k")]
    assert kinds == ["fp8_e4m3", "int8"]
    if others == "Linear":
        assert loaded["q.weight"].activation == "int8"


def packed_of(prefix: str) -> dict[str, torch.Tensor]:
    """int4 weights, which take activations of either kind, by the last of their names."""
    return {name.removeprefix(f"{prefix}."): value for name, value in writers.packed_integers(group=32)[0].items()}


def test_layers_of_mixed_precision_have_their_own_activations() -> None:
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    config["quantized_layers"] = {"l": {"quant_algo": "FP8"}, "m": {"quant_algo": "W4A16_AWQ"}}
    state = float8("tensor") | {"l.input_scale": SCALE}
    state |= {f"m.{name.removeprefix('l.')}": value for name, value in int8().items()}
    loaded = jitgen.load_quantized(state, config=config)
    assert (loaded["l.weight"].activation, loaded["m.weight"].activation) == ("fp8_e4m3", None)
    assert loaded["l.weight"].input_scale.item() == pytest.approx(0.02)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_blocks_of_32_with_powers_of_two_are_mxfp8(kind: torch.dtype) -> None:
    codes, powers = torch.randn(48, 96).to(torch.float8_e4m3fn), torch.randint(-9, 9, (48, 3))
    state = {"l.weight": codes, "l.weight_scale": (powers + 127).to(torch.uint8).view(kind)}
    wanted = (codes.double().unflatten(1, (3, 32)) * powers.double().exp2().unsqueeze(-1)).flatten(1)
    mx = groups(8, "float", "group", group_size=32, scale_dtype="torch.uint8")
    for config, activation in (
        ({}, None),
        (mx, "mxfp8"),
        (groups(8, "float", "group", group_size=32), None),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "mxfp8"),
    ):
        weight = jitgen.load_quantized(state, config=config)["l.weight"]
        assert (weight.format, weight.group_size, weight.activation) == ("mxfp8", 32, activation)
        assert torch.equal(weight.dequantize(torch.float64), wanted)


def test_scales_of_blocks_may_have_dimensions_of_one() -> None:
    state = float8("block")
    scales = state["l.weight_scale"]
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    weights = [
        jitgen.load_quantized(state | {"l.weight_scale": stored}, config=config)["l.weight"]
        for stored in (scales, scales[:, None, :, None])
    ]
    assert torch.equal(*weights)
    assert weights[0].activation is None


@pytest.mark.parametrize("kind", ["modelopt nvfp4", "float-quantized", "int-quantized", "static int8"])
def test_factors_of_columns_stay_beside_the_weight(kind: str) -> None:
    """``pre_quant_scale`` of ModelOpt: ``x * factors`` is quantised, and multiplied by the codes."""
    if kind == "static int8":
        state, config = int8() | {"l.input_scale": SCALE}, groups(8, "int", "tensor", dynamic=False)
    else:
        state, config = writers.EXACT[kind][0]()[0], {}
    plain = jitgen.load_quantized(state, config=config)["l.weight"]
    factors = torch.rand(plain.shape[1]) + 0.5
    loaded = jitgen.load_quantized(state | {"l.pre_quant_scale": factors}, config=config)
    assert list(loaded) == ["l.weight"]
    weight = loaded["l.weight"]
    assert ".smoothed" in weight.format
    assert (weight.activation, weight.group_size) == (plain.activation, plain.group_size)
    x = torch.randn(5, weight.shape[1])
    rounded = x * factors
    if weight.activation is not None:
        rounded = quantized(rounded, weight.activation, SCALE)
    wanted = rounded.double() @ plain.dequantize(torch.float64).T
    assert ((F.linear(x, weight) - wanted).abs() <= 1e-5 * wanted.abs().amax(-1, keepdim=True)).all()
    ones = jitgen.load_quantized(state | {"l.pre_quant_scale": torch.ones_like(factors)}, config=config)
    assert ones["l.weight"].format == plain.format


def test_scales_of_a_cache_belong_to_no_weight() -> None:
    state = float8("tensor") | {"l.input_scale": SCALE, "l.k_scale": torch.ones(()), "l.v_scale": torch.ones(())}
    shape = state["l.weight"].shape
    model = torch.nn.ModuleDict({"l": torch.nn.Linear(shape[1], shape[0], bias=False)})
    loaded = jitgen.load_quantized(state, model=model, config={"quant_method": "modelopt", "quant_algo": "FP8"})
    assert loaded.left_out == ("l.k_scale", "l.v_scale")
    assert "2 scales of a cache" in loaded.report


def test_files_of_jitgen_keep_theirs(tmp_path: Any) -> None:
    layer = torch.nn.Linear(64, 32)
    jitgen.quantize_(layer, "int8", activation="int8")
    jitgen.save_quantized(layer, tmp_path / "own.safetensors")
    assert jitgen.load_quantized(tmp_path / "own.safetensors")["weight"].activation == "int8"
    assert jitgen.load_quantized(tmp_path / "own.safetensors", activation=None)["weight"].activation is None


@pytest.mark.parametrize(("key", "told"), [("act_quant_kwargs", {"_type": "QuantizeTensorToFloat8Kwargs"}), ("", None)])
def test_torchao(key: str, told: Any, tmp_path: Any) -> None:
    tensors, metadata, _ = writers.flattened_torchao()
    facts = json.loads(metadata["l.weight"])
    facts["_data"] |= {key: told} if key else {}
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata | {"l.weight": json.dumps(facts)})
    weight = jitgen.load_quantized(tmp_path / "model.safetensors")["l.weight"]
    assert weight.activation == ("fp8_e4m3" if key else None)
