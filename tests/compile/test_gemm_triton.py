"""Matrix products in Triton to binaries, without a GPU: every target, and what their machine code consists of."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import disassemble
from jitgen.compilers import triton as compiler
from jitgen.families.gemm.mainloops import TritonSchedule
from jitgen.spec import Artifact, KernelSource

TARGETS = ("sm_80", "sm_90a", "sm_100a", "gfx942")
FORMATS = (None, ("int4", 128), ("uint4", 64), ("int8", None))
ROWS = (1, 64, 2048)
"""One for each form there is, on large weights."""
CASES = [
    (target, format, rows)
    for target in TARGETS
    for format in (FORMATS if target == "sm_90a" else FORMATS[:2])
    for rows in (ROWS if target == "sm_90a" else ROWS[::2])
]
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def spec(shape: tuple[Any, ...], dtype: torch.dtype, format: tuple[str, int | None] | None = None) -> jitgen.TensorSpec:
    if format is None:
        return jitgen.TensorSpec(shape, dtype)
    return jitgen.TensorSpec(shape, dtype, format=format[0], group_size=format[1])


def lowered(
    function: Any, target: str, rows: int, columns: tuple[int, ...], format: Any = None, dtype: Any = torch.bfloat16
) -> tuple[KernelSource, TritonSchedule]:
    """The source of ``function`` of an activation of 4096 columns and weights of ``columns`` rows, and its schedule: of
    one kernel, or of its products where they are split along K."""
    weights = [spec((n, 4096), dtype, format) for n in columns]
    low = jitgen.jit(function, backend="triton").lower(
        spec((rows, 4096), dtype), *weights, target=target, backend="triton"
    )
    assert len(low._lowered.partitioned.program.kernels) == 1
    source, _ = low._lowered.render(0)
    return source, low._lowered.schedules[0]


def compiled(source: KernelSource) -> tuple[Artifact, str]:
    """The artifact and, for NVIDIA, its machine code; fails where registers were spilled."""
    artifact = compiler.compile(source)
    if artifact.binary != "kernel.cubin":
        return artifact, ""
    usage = disassemble.resource_usage(artifact.files[artifact.binary], source.name)
    assert usage["spill_bytes"] == 0
    assert usage["stack_bytes"] == 0
    return artifact, disassemble.sass(artifact.files[artifact.binary])


def linear(x: torch.Tensor, w: Any) -> torch.Tensor:
    return F.linear(x, w)


def swiglu(x: torch.Tensor, gate: Any, up: Any) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def projections(x: torch.Tensor, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, ...]:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v) * 0.5


@pytest.mark.parametrize(("target", "format", "rows"), CASES, ids=str)
@pytest.mark.quick(
    where=lambda target, format, rows: rows == 1 and format == FORMATS[1] and target in ("sm_90a", "gfx942")
)
def test_every_form_and_format_compiles(target: str, format: Any, rows: int) -> None:
    source, _ = lowered(linear, target, rows, (28672,), format)
    artifact, code = compiled(source)
    assert artifact.files[artifact.binary][:4] == b"\x7fELF"
    if target == "sm_80":
        assert "HMMA" in code
    if target != "gfx942":
        assert "LDGSTS" in code, "nothing is copied ahead of its use"


@pytest.mark.slow
@pytest.mark.parametrize("function", [swiglu, projections], ids=lambda function: function.__name__)
@pytest.mark.parametrize("format", [None, ("int4", 128)], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_several_products_are_one_kernel(function: Any, format: Any, rows: int) -> None:
    columns = (14336, 14336) if function is swiglu else (4096, 1024, 1024)
    compiled(lowered(function, "sm_90a", rows, columns, format)[0])


@pytest.mark.parametrize("format", [None, ("int4", 32)], ids=str)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.quick(where=lambda rows: rows == 64)
def test_float32_products_are_exact_ones(format: Any, rows: int) -> None:
    artifact, code = compiled(lowered(linear, "sm_90a", rows, (512,), format, torch.float32)[0])
    assert "HMMA" not in code
    assert b"tf32" not in artifact.files.get("kernel.ptx", b"")


# -------------------------------------------------------------------------------------------------------- machine code


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("format", FORMATS[:2], ids=str)
@pytest.mark.parametrize("rows", [512, 2048])
@pytest.mark.quick(where=lambda dtype, rows, format: (dtype, rows, format) == (torch.bfloat16, 512, FORMATS[1]))
def test_many_rows_are_warpgroup_products_on_hopper(dtype: torch.dtype, format: Any, rows: int) -> None:
    _, code = compiled(lowered(linear, "sm_90a", rows, (8192,), format, dtype)[0])
    assert "HGMMA" in code
    assert not re.search(r"\bHMMA", code)


def loop_over_k(code: str) -> list[str]:
    """The instructions of the longest loop of warpgroup products, without addresses and predicates."""
    found = re.findall(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\d+ )?(.*?)\s*;", code, re.MULTILINE)
    lines = [(int(address, 16), text) for address, text in found]
    loops = [
        [text for at, text in lines if int(branch[1], 16) <= at <= address]
        for address, text in lines
        if (branch := re.search(r"\bBRA\b.*(0x[0-9a-f]+)", text))
    ]
    return max((loop for loop in loops if any("HGMMA" in text for text in loop)), key=len)


def overwritten(loop: list[str]) -> list[str]:
    """Instructions that write a register which a warpgroup's product in flight still reads its weights from."""
    flying: list[range] = []
    found = []
    for text in loop + loop:
        name, _, arguments = text.partition(" ")
        if name.startswith("WARPGROUP.DEPBAR"):
            left = int(arguments.rpartition(",")[2], 16)
            flying = flying[max(0, len(flying) - left) :]
        elif name.startswith("HGMMA"):
            weights = re.match(r"R\d+, R(\d+),", arguments)
            flying.append(range(int(weights[1]), int(weights[1]) + 4) if weights else range(0))
        elif not name.startswith(("ST", "LDGSTS")) and (target := re.match(r"(?:P\w+, )*R(\d+)\b", arguments)):
            width = 4 if ".128" in name or name.endswith(".4") else 2 if ".64" in name or "WIDE" in name else 1
            written = range(int(target[1]), int(target[1]) + width)
            found += [text for operand in flying if set(operand) & set(written)]
    return found


@pytest.mark.parametrize("format", FORMATS[1:], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(64, 28672), (64, 4096), (256, 4096), (2048, 28672)])
@pytest.mark.quick(where=lambda rows, columns, format: (rows, columns, format) == (64, 4096, FORMATS[2]))
def test_weights_of_products_in_flight_are_left_alone(format: Any, rows: int, columns: int) -> None:
    """Nor does ptxas wait for each product by itself, as it does where accumulators might be defined elsewhere."""
    weight = spec((columns, 4096), torch.bfloat16, format)
    low = jitgen.jit(linear, backend="triton").lower(
        spec((rows, 4096), torch.bfloat16), weight, target="sm_90a", backend="triton"
    )
    loop = loop_over_k(compiled(low._lowered.render(0)[0])[1])
    assert overwritten(loop) == []
    assert sum(text.startswith("HGMMA") for text in loop) >= 4
    assert sum(bool(re.match(r"WARPGROUP.DEPBAR.*, 0x0", text)) for text in loop) == 1


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.quick(where=lambda rows: rows == 16)
def test_int4_weights_stay_in_registers(rows: int) -> None:
    """A warp's only stores to shared memory are those of its sums and of scales, not a word for each pair of weights.
    Triton 3.6 stores sums by words, later ones by four."""
    _, code = compiled(lowered(linear, "sm_90a", rows, (28672,), ("int4", 128))[0])
    loop = code[: code.index("STG")]
    weights = loop.count("HADD2") + loop.count("HFMA2")
    assert weights >= 32
    stores = re.findall(r"\bSTSM?(?:\.\w+)*", loop)
    assert sum(4 if store.endswith((".128", ".4")) else 1 for store in stores) < weights


def test_accesses_are_as_wide_as_strides_allow() -> None:
    _, wide = compiled(lowered(linear, "sm_90a", 1, (4096,))[0])
    assert "LDGSTS.E.BYPASS.128" in wide
    odd = jitgen.jit(linear, backend="triton").lower(
        spec((16, 4093), torch.bfloat16), spec((64, 4093), torch.bfloat16), target="sm_90a"
    )
    assert "LDGSTS.E.BYPASS.128" not in compiled(odd._lowered.render(0)[0])[1]


def test_plain_text_where_there_is_no_ptx() -> None:
    nvidia, _ = lowered(linear, "sm_80", 16, (4096,), ("int4", 128))
    amd, _ = lowered(linear, "gfx942", 16, (4096,), ("int4", 128))
    assert "inline_asm" in nvidia.text
    assert "inline_asm" not in amd.text


@pytest.mark.parametrize("length", [64, 2**17])
def test_int8_products_are_of_tensor_cores_unless_they_would_saturate(length: int) -> None:
    specs = spec(("M", length), torch.int8), spec((length, 128), torch.int8)
    low = jitgen.jit(torch._int_mm).lower(*specs, target="sm_80", backend="triton")
    assert ("tl.dot" in low.source) == (length < 2**17)
    if length < 2**17:
        assert "mma.sync.aligned.m16n8k32" in low.compile().asm["ptx"]
