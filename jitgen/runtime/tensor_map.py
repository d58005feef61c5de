"""Describes tensors for the copy engine (TMA) of sm_90 and later: tensor maps, kernel parameters of 128 bytes.

A ``TensorMap`` describes a tensor in a buffer, and the boxes of it that a kernel copies. The driver encodes it together
with the buffer's address. A launch packs the encoded bytes (parameter code ``T`` of ``cuda.Launch``). ``EncodedMaps``
remembers them by address, so that a warm call costs one dictionary look-up. In CUDA C++ the parameter is ``const
__grid_constant__ jitgen::TensorMap``. Neighbour: ``runtime/launcher.py`` writes the look-ups into launchers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jitgen.runtime import cuda

BYTES = 128
"""Size of an encoded map, in bytes."""
MOST_REMEMBERED = 4096
"""How many addresses an ``EncodedMaps`` remembers: 0.5 MiB of encoded maps; an allocator reuses far fewer."""

_ELEMENTS = {
    "uint8": ("UINT8", 1),
    "int8": ("UINT8", 1),
    "float8_e4m3fn": ("UINT8", 1),
    "float8_e5m2": ("UINT8", 1),
    "float16": ("FLOAT16", 2),
    "bfloat16": ("BFLOAT16", 2),
    "int32": ("INT32", 4),
    "uint32": ("UINT32", 4),
    "float32": ("FLOAT32", 4),
    "float64": ("FLOAT64", 8),
}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


@dataclass(frozen=True)
class TensorMap:
    """Describes one tensor for the copy engine. Sizes, strides and box are in torch's order, outermost dimension first.

    Elements outside the tensor are read as zeros, and are not written.

    Attributes:
        buffer: the number of the launch's buffer that contains the tensor.
        offset: bytes from the start of the buffer to the tensor.
        dtype: torch's name of the element type.
        sizes: of 1 to 5 dimensions, each at least 1.
        strides: in elements; the innermost is 1. The stride of a dimension of size 1 is ignored.
        box: elements that one copy moves along each dimension, at most 256.
        swizzle: the span in bytes within which 16-byte pieces of a box row are permuted in shared memory: 32, 64 or
            128, or 0 for no permutation.

    Raises:
        ValueError: sizes, strides or box violate a rule of the hardware. The buffer's address is not known here:
            together with ``offset`` it must be a multiple of 16, or ``encode`` raises.
    """

    buffer: int
    offset: int
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128

    def __post_init__(self) -> None:
        wrong = self._wrong()
        if wrong:
            raise ValueError(f"no tensor map of {self.dtype}{list(self.sizes)} with boxes {list(self.box)}: {wrong}")

    def _wrong(self) -> str | None:
        if self.dtype not in _ELEMENTS:
            return f"expected one of {', '.join(_ELEMENTS)}"
        if not 1 <= len(self.sizes) <= 5 or not len(self.sizes) == len(self.strides) == len(self.box):
            return "1 to 5 dimensions, each with a size, a stride and a box"
        if self.swizzle not in _SWIZZLES:
            return f"swizzle {self.swizzle}; expected one of {', '.join(map(str, _SWIZZLES))}"
        if not all(1 <= size < 2**32 for size in self.sizes):
            return "sizes are at least 1 and less than 2**32"
        if not all(1 <= size <= 256 for size in self.box):
            return "boxes are 1 to 256 elements in each dimension"
        if self.strides[-1] != 1 and self.sizes[-1] > 1:
            return f"innermost stride {self.strides[-1]}; it must be 1"
        row = self.box[-1] * self.element_bytes
        if row % 16 or (self.swizzle and row > self.swizzle):
            return f"a box row of {row} bytes; it must be a multiple of 16, and at most the swizzle"
        if any(stride % 16 or not 0 <= stride < 2**40 for stride in self.byte_strides):
            return f"strides of {', '.join(map(str, self.byte_strides))} bytes; they must be multiples of 16"
        return None

    @property
    def element_bytes(self) -> int:
        return _ELEMENTS[self.dtype][1]

    @cached_property
    def byte_strides(self) -> tuple[int, ...]:
        """Returns the strides in bytes of all dimensions but the innermost, outermost first."""
        rounded = -(-self.sizes[-1] * self.element_bytes // 16) * 16
        strides = zip(self.sizes[:-1], self.strides[:-1], strict=True)
        return tuple(rounded if size == 1 else stride * self.element_bytes for size, stride in strides)

    def encode(self, address: int) -> bytes:
        """Returns the encoded map for a buffer that starts at ``address`` on the device.

        Raises:
            DriverError: the driver refuses it, as for an address that is not a multiple of 16.
        """
        driver = cuda.bindings()
        name, _ = _ELEMENTS[self.dtype]
        rank = len(self.sizes)
        result = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
            rank,
            address + self.offset,
            [driver.cuuint64_t(size) for size in reversed(self.sizes)],
            [driver.cuuint64_t(stride) for stride in reversed(self.byte_strides)],
            [driver.cuuint32_t(size) for size in reversed(self.box)],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[self.swizzle]}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        made = cuda.checked(result, f"encoding a tensor map of {self.dtype}{list(self.sizes)} at {address:#x}")
        return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


class EncodedMaps(dict[int, bytes]):
    """Caches the encodings of one ``TensorMap`` by the address of its buffer; ``maps[address]`` encodes a missing
    one."""

    def __init__(self, description: TensorMap):
        super().__init__()
        self.description = description

    def __missing__(self, address: int) -> bytes:
        encoded = self.description.encode(address)
        if len(self) >= MOST_REMEMBERED:
            self.clear()
        self[address] = encoded
        return encoded
