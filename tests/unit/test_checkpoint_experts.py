"""Experts that a checkpoint has one by one, in a model that has them in parameters of three dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jitgen
from jitgen.errors import FallbackWarning, FormatError
from jitgen.quant.qtensor import QTensor
from tests import checkpoint_writers as writers

EXPERTS, WIDTH, HIDDEN = 3, 128, 48
MIXTRAL, QWEN = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))


class MixtralExperts(nn.Module):
    """Has the parameters of transformers' class of this name."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 2 * hidden, WIDTH))
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, WIDTH, hidden))


def model(hidden: int = HIDDEN) -> nn.Module:
    block = nn.Module()
    block.gate, block.experts = nn.Linear(WIDTH, EXPERTS, bias=False), MixtralExperts(hidden)
    return nn.ModuleDict({"mlp": block})


def dense(rows: int, columns: int) -> writers.Written:
    weight = torch.randn(rows, columns)
    return {"l.weight": weight}, weight


def in_fours(rows: int, columns: int) -> writers.Written:
    return writers.packed_integers(rows=rows, columns=columns, bits=4, group=16)


def of_tensors(rows: int, columns: int) -> writers.Written:
    state, weight = writers.float8(rows=rows, columns=columns, kind="tensor")
    return state | {"l.input_scale": torch.rand(1) + 0.1}, weight


def in_blocks(rows: int, columns: int) -> writers.Written:
    state, weight = writers.float8(-rows // 128 * -128, -columns // 128 * -128, "block", "weight_scale_inv")
    return state | {"l.weight": state["l.weight"][:rows, :columns].contiguous()}, weight[:rows, :columns]


def of_rows(rows: int, columns: int) -> writers.Written:
    return writers.int8_rows(rows=rows, columns=columns)


def checkpoint(write: Any, names: tuple[str, str, str], prefix: str, hidden: int) -> tuple[dict[str, Any], Any]:
    """Returns a state dict, and the matrices of every expert."""
    state: dict[str, Any] = {f"{prefix}gate.weight": torch.randn(EXPERTS, WIDTH)}
    matrices = []
    for index in range(EXPERTS):
        matrices.append([])
        for name, shape in zip(names, ((hidden, WIDTH), (hidden, WIDTH), (WIDTH, hidden)), strict=True):
            tensors, weight = write(*shape)
            matrices[-1].append(weight)
            state |= {key.replace("l.", f"{prefix}experts.{index}.{name}."): value for key, value in tensors.items()}
    return state, matrices


KINDS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "floats": (dense, {}, HIDDEN),
    "int4": (in_fours, {}, HIDDEN),
    "int8": (of_rows, {"quant_method": "compressed-tensors"}, HIDDEN),
    "fp8 blocks": (in_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, 256),
    "fp8 blocks of a few rows": (in_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, 192),
    "static fp8": (of_tensors, {"quant_method": "modelopt", "quant_algo": "FP8"}, HIDDEN),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("names", "prefix"), [(QWEN, "mlp."), (MIXTRAL, "block_sparse_moe.")])
def test_experts_are_stacked(kind: str, names: tuple[str, str, str], prefix: str) -> None:
    write, config, hidden = KINDS[kind]
    prefix = f"layers.0.{prefix}"
    state, matrices = checkpoint(write, names, prefix, hidden)
    into = nn.ModuleDict({"layers": nn.ModuleList([model(hidden)])})
    loaded = jitgen.load_quantized(state, model=into, config=config, dtype=torch.float32)
    experts: Any = into.get_submodule("layers.0.mlp.experts")
    leaves = ("down_proj", "gate_up_proj")
    assert sorted(loaded) == [
        f"layers.0.mlp.{name}" for name in (*(f"experts.{leaf}" for leaf in leaves), "gate.weight")
    ]
    for leaf in leaves:
        made = getattr(experts, leaf)
        chosen = slice(0, 2) if leaf == "gate_up_proj" else slice(2, 3)
        wanted = torch.stack([torch.cat(own[chosen]) for own in matrices])
        assert isinstance(made, QTensor) == (kind != "floats")
        if kind == "floats":
            assert torch.equal(made, wanted)
            continue
        assert torch.equal(made.dequantize(torch.bfloat16), wanted)
        if kind == "static fp8":
            stored = [
                state[f"{prefix}experts.{index}.{name}.input_scale"]
                for index in range(EXPERTS)
                for name in names[chosen]
            ]
            assert made.input_scale.item() == torch.cat(stored).max().item()
            assert "the largest of the experts" in loaded.report
            continue
        x = torch.randn(5, made.shape[2])
        product, expected = F.linear(x, made[1]), x.double() @ made[1].dequantize(torch.float64).T
        error = 0.1 if made.activation else 1e-5  # an e4m3 has four digits
        assert (product - expected).norm() <= error * expected.norm()


def test_experts_that_do_not_fit_are_an_error() -> None:
    state, _ = checkpoint(of_rows, QWEN, "mlp.", HIDDEN)
    config: dict[str, Any] = {}
    missing = {name: value for name, value in state.items() if ".2.up_proj" not in name}
    with pytest.raises(FormatError, match=r"there is no mlp.experts.2.up_proj.weight, of 3 experts"):
        jitgen.load_quantized(missing, model=model(), config=config)
    other = dense(HIDDEN, WIDTH)[0]["l.weight"]
    mixed = {name: value for name, value in state.items() if ".2.up_proj" not in name}
    with pytest.raises(FormatError, match="several sizes or kinds"):
        jitgen.load_quantized(mixed | {"mlp.experts.2.up_proj.weight": other}, model=model(), config=config)
    with pytest.raises(FormatError, match="the model has"):
        jitgen.load_quantized(state, model=model(64), config=config)


def test_parameters_that_are_missing_are_named() -> None:
    state, _ = checkpoint(of_rows, QWEN, "mlp.", HIDDEN)
    del state["mlp.gate.weight"]
    with pytest.raises(FormatError, match=r"it lacks mlp.gate.weight; rename="):
        jitgen.load_quantized(state, model=model())
    with pytest.warns(FallbackWarning, match=r"it lacks mlp.gate.weight; parameters that it lacks stay as they are"):
        jitgen.load_quantized(state, model=model(), strict=False)
