"""Tensor maps without a device: what is refused, how a launcher passes them, and that warm calls encode nothing."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.runtime import tensor_map
from jitgen.runtime.cuda import Function, Launch
from jitgen.runtime.launcher import Allocation, LaunchSpec, Step, make_launcher
from jitgen.runtime.tensor_map import EncodedMaps, TensorMap
from jitgen.spec import TensorSpec


def described(**changes: Any) -> TensorMap:
    fields: dict[str, Any] = {
        "buffer": 0,
        "offset": 0,
        "dtype": "bfloat16",
        "sizes": (100, 4096),
        "strides": (4096, 1),
        "box": (64, 64),
    }
    return TensorMap(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int4"}, "expected one of uint8, int8, float8_e4m3fn"),
        ({"sizes": (100,)}, "1 to 5 dimensions"),
        ({"swizzle": 48}, "swizzle 48; expected one of 0, 32, 64, 128"),
        ({"sizes": (0, 4096)}, "sizes are at least 1"),
        ({"box": (512, 64)}, "boxes are 1 to 256"),
        ({"strides": (1, 100)}, "innermost stride 100"),
        ({"box": (64, 128)}, "a box row of 256 bytes"),
        ({"box": (64, 4)}, "a box row of 8 bytes"),
        ({"strides": (4097, 1)}, "strides of 8194 bytes; they must be multiples of 16"),
    ],
)
def test_what_the_hardware_cannot_copy_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"no tensor map of") as caught:
        described(**changes)
    assert message in str(caught.value)


def test_the_stride_of_a_single_row_is_of_no_account() -> None:
    assert described(sizes=(1, 100), strides=(1, 1), box=(64, 64)).byte_strides == (208,)
    assert described(swizzle=0, dtype="int32", sizes=(4, 256), strides=(256, 1), box=(4, 128)).byte_strides == (1024,)


def test_addresses_are_encoded_once_and_forgotten_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def encode(self: TensorMap, address: int) -> bytes:
        calls.append(address)
        return bytes(tensor_map.BYTES)

    monkeypatch.setattr(TensorMap, "encode", encode)
    monkeypatch.setattr(tensor_map, "MOST_REMEMBERED", 2)
    maps = EncodedMaps(described())
    for address in (16, 32, 16, 32, 48, 48, 16):
        assert len(maps[address]) == tensor_map.BYTES
    assert calls == [16, 32, 48, 16]


class FakeDriver:
    """Enough of the bindings for a ``Launch`` to reach its driver call."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self) -> FakeDriver:
        return self

    class CUlaunchConfig:
        pass

    CUlaunchAttributeID = None

    def cuLaunchKernelEx(self, config: Any, handle: Any, addresses: int, extra: int) -> tuple[int]:
        self.seen.append(addresses)
        return (0,)


def test_a_launch_passes_maps_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("jitgen.runtime.cuda.bindings", driver)
    fixed, varying = bytes(range(128)), bytes(reversed(range(128)))
    launch = Launch(Function("k", 0, 0, None, None), "TPTi", (None, None, fixed, 7), (1, 1, 1), (1, 1, 1))
    launch(0, varying, 0x1234)
    slots = (ctypes.c_uint64 * 4).from_address(driver.seen[0])
    assert ctypes.string_at(slots[0], 128) == varying
    assert struct.unpack("P", ctypes.string_at(slots[1], 8)) == (0x1234,)
    assert ctypes.string_at(slots[2], 128) == fixed
    assert struct.unpack("i", ctypes.string_at(slots[3], 4)) == (7,)


def test_a_launcher_looks_maps_up_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr("jitgen.runtime.cuda.bindings", driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(TensorMap, "encode", lambda self, address: struct.pack("qq", address, self.offset) + bytes(112))
    launch = Launch(Function("k", 0, 0, None, None), "TPP", (None, None, None), (1, 1, 1), (1, 1, 1))
    step = Step("cuda", launch, ((0, 0), (1, 8)), maps=(described(offset=32),))
    result = Allocation((4,), (1,), torch.float32)
    spec = LaunchSpec("f", torch.device("cpu", 0), 1, 0, (), (result,), (step,), (1,))
    call = make_launcher(spec)
    assert "maps0_0[p0]" in call.source  # type: ignore[attr-defined]
    x = torch.zeros(4)
    y = call(x, x.data_ptr())
    slots = (ctypes.c_uint64 * 3).from_address(driver.seen[0])
    assert struct.unpack("qq", ctypes.string_at(slots[0], 16)) == (x.data_ptr(), 32)
    assert struct.unpack("P", ctypes.string_at(slots[2], 8)) == (y.data_ptr() + 8,)


BF16 = torch.bfloat16
PRODUCTS: dict[str, tuple[Any, list[TensorSpec]]] = {
    "dense": (F.linear, [TensorSpec((4096, 4096), BF16), TensorSpec((4096, 4096), BF16)]),
    "quantised": (
        F.linear,
        [TensorSpec((4096, 4096), BF16), TensorSpec((4096, 4096), BF16, format="int4", group_size=128)],
    ),
    "batched": (torch.bmm, [TensorSpec((8, 512, 512), BF16), TensorSpec((8, 512, 512), BF16)]),
    "attention": (F.scaled_dot_product_attention, [TensorSpec((2, 8, 512, 64), BF16)] * 3),
    "attention of some rows": (
        F.scaled_dot_product_attention,
        [TensorSpec((2, 8, rows, 64), BF16) for rows in (40, 512, 512)],
    ),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_torch_operator_gets_no_tensor_maps(product: str) -> None:
    """It takes tensors and numbers alone, so kernels for it are those that copy without maps."""
    function, specs = PRODUCTS[product]
    for compiler, has_maps in ((None, True), ("load_inline", False)):
        call = jitgen.jit(lambda *operands: function(*operands), backend="cuda", compiler=compiler)
        lowered = call.lower(*specs, target="sm_90a").lowered
        assert any(lowered.arguments(number).maps for number in range(len(lowered.program.kernels))) == has_maps
