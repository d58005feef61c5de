"""Products of codes compiled without a device: the instructions that multiply them, and what the assembler says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import disassemble, nvrtc, routes
from jitgen.spec import TensorSpec

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC and the headers of CUDA")
E4M3, M, N, K = torch.float8_e4m3fn, 3000, 2048, 4096


def product(x: Any, w: Any) -> Any:
    return (x.float() @ w.float().T).to(torch.bfloat16)


def blocks(q: Any, s: Any, p: Any, t: Any) -> Any:
    x = (q.float().unflatten(-1, (-1, 128)) * s.unsqueeze(-1)).flatten(-2)
    w = p.float().view(p.shape[0] // 128, 128, p.shape[1] // 128, 128) * t[:, None, :, None]
    return x @ w.view(p.shape).T


def linear(x: Any, w: Any) -> Any:
    return F.linear(x, w)


def low_bits(rows: int) -> tuple[Any, ...]:
    weight = TensorSpec((N, K), torch.bfloat16, format="int4", group_size=128, activation="int8")
    return linear, TensorSpec((rows, K), torch.bfloat16), weight


@pytest.mark.parametrize(
    ("target", "format", "instruction"),
    [
        *(("sm_100a", format, "tcgen05.mma.*block_scale") for format in ("mxfp8", "mxfp4")),
        *(("sm_120", "mxfp8", "mma.sync.*block_scale"), ("sm_120", "mxfp4", "bf16"), ("sm_90a", "mxfp8", "bf16")),
    ],
)
@pytest.mark.slow
def test_scales_of_32_columns_are_those_of_the_instruction(target: str, format: str, instruction: str) -> None:
    """Two products read the activation's scales; where a target has no such products, both operands are decoded."""
    weight = TensorSpec((256, 256), torch.bfloat16, format=format, activation="mxfp8")
    swiglu = jitgen.jit(lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b), backend="triton")
    for rows in (1, 300):
        low = swiglu.lower(TensorSpec((rows, 256), torch.bfloat16), weight, weight, target=target)
        scaled = "block_scale" in instruction
        assert ("by tl.dot_scaled" in low.explain()) == scaled
        assert ("the target has no products of them" in low.explain()) != scaled
        multiplied = re.findall(r"(?:tcgen05\.mma|mma\.sync|wgmma\.mma_async)\S*", low.compile().asm["ptx"])
        assert multiplied
        assert all(re.search(instruction, one) for one in multiplied)


@pytest.mark.parametrize(
    ("format", "group", "kind"),
    [("nvfp4", 16, "fp8_e4m3"), ("int2", 48, "int8"), ("fp8_e4m3", 80, "fp8_e4m3")],
)
@pytest.mark.quick(where=lambda format, group, kind: kind == "int8")
def test_groups_without_steps_of_32_columns_are_multiplied_as_float16(format: str, group: int, kind: str) -> None:
    """``tl.dot`` takes 32 columns of 8-bit operands at least. Of 48 columns a step has 16."""
    weight = TensorSpec((64, 480), torch.bfloat16, format=format, group_size=group, activation=kind)
    for rows, target in ((1, "sm_90a"), (300, "sm_80")):
        low = jitgen.jit(linear, backend="triton").lower(TensorSpec((rows, 480), torch.bfloat16), weight, target=target)
        assert "decoded to float16, because groups have no steps of 32 columns" in low.explain()
        assert re.search(r"(?:mma\.sync|wgmma\.mma_async)\S*f16\.f16", low.compile().asm["ptx"])


@pytest.mark.parametrize(("backend", "target"), [("cuda", "sm_90a"), ("cuda", "sm_80"), ("triton", "sm_90a")])
def test_activations_of_float64_are_quantised_in_blocks_too(backend: str, target: str) -> None:
    """Their sums are float32, of which the result is made."""
    weight = TensorSpec((128, 256), torch.float64, format="fp8_e4m3.rows128", activation="fp8_e4m3.block128")
    low = jitgen.jit(linear, backend=backend).lower(TensorSpec((5, 256), torch.float64), weight, target=target)
    low.compile()


def test_products_of_several_matrices_say_that_scales_of_32_columns_are_decoded() -> None:
    experts = TensorSpec((4, 64, 128), torch.bfloat16, format="mxfp8", activation="mxfp8")
    batched = jitgen.jit(lambda x, w: x @ w.mT, backend="triton")
    low = batched.lower(TensorSpec((4, 16, 128), torch.bfloat16), experts, target="sm_100a")
    assert "mxfp8 weights are decoded: kernels of several matrices have no products of them" in low.explain()


def codes(rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return product, TensorSpec((rows, K), dtype), TensorSpec((N, K), dtype)


SCALES = [TensorSpec(shape, torch.float32) for shape in ((M, K // 128), (N // 128, K // 128))]
KERNELS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "float8": (codes(M, E4M3), "sm_90a", r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3"),
    "int8": (codes(M, torch.int8), "sm_90a", r"IGMMA\.64x\d+x32\.S8\.S8"),
    "blocks": ((blocks, codes(M, E4M3)[1], SCALES[0], codes(M, E4M3)[2], SCALES[1]), "sm_90a", r"QGMMA"),
    "4 bits": (low_bits(M), "sm_90a", r"IGMMA\.64x\d+x32\.S8\.S8"),
    "4 bits, few rows": (low_bits(7), "sm_90a", r"IMMA\.16832\.S8\.S8"),
    "int8, few rows": (codes(7, torch.int8), "sm_80", r"IMMA\.16832\.S8\.S8"),
    "int8 elsewhere": (codes(M, torch.int8), "sm_80", r"IMMA\.16832\.S8\.S8"),
    "float8 elsewhere": (codes(M, E4M3), "sm_89", r"QMMA\.16832\.F32\.E4M3\.E4M3"),
}


MOST_SPILLED = 64
"""Bytes that the instructions around the loop over K store and load, once a tile: 16 instructions."""


def product_loops(sass: str, instruction: str) -> Iterator[str]:
    """Yields the innermost loop around each ``instruction``, from the target of a branch back to the branch."""
    for entry in sass.split("Function :")[1:]:
        lines = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*)", entry)]
        branches = [(at, re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)) for at, text in lines]
        loops = [(int(branch[1], 16), at) for at, branch in branches if branch and int(branch[1], 16) < at]
        for at, text in lines:
            if re.search(instruction, text):
                start, end = min(
                    (loop for loop in loops if loop[0] <= at <= loop[1]), key=lambda loop: loop[1] - loop[0]
                )
                yield "\n".join(text for address, text in lines if start <= address <= end)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.quick(where=lambda name: name in ("blocks", "4 bits", "int8 elsewhere"))
def test_codes_are_multiplied_by_their_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (function, *specs), target, instruction = KERNELS[name]
    logs: list[str] = []
    parse = nvrtc.parse_resources

    def kept(log: str, entry: str) -> dict[str, int]:
        logs.append(log)
        return parse(log, entry)

    monkeypatch.setattr(nvrtc, "parse_resources", kept)
    low = jitgen.jit(function, backend="cuda").lower(*specs, target=target).lowered
    artifact = nvrtc.compile(routes.prepare(low.render(len(low.program.kernels) - 1)[0]))
    # C7510 and C7512: wgmmas that the assembler has to serialise; C7508: a setmaxnreg it ignores.
    assert not re.search(r"C75\d\d|before its value", logs[0]), logs[0]
    if disassemble.find_tool() is None:
        assert artifact.meta["spill_bytes"] == 0
        return
    loops = list(product_loops(disassemble.sass(artifact.files["kernel.cubin"]), instruction))
    # What is needed once a tile, such as its number, may lie in local memory: NVRTC 13.5 spills that of float8.
    assert loops
    assert not any(re.search(r"\b(?:LDL|STL)\b", loop) for loop in loops)
    assert artifact.meta["spill_bytes"] <= MOST_SPILLED
