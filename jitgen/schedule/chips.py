"""Records what is known of each chip: its multiprocessors, memories and rates, with the source of every number.

Code that chooses schedules has no numbers of a chip; it reads them here, from ``Device.chip`` and ``Device.model``
(``device.py``). Three kinds of numbers are told apart:

* properties of a chip are fields of ``Chip`` or ``CpuLevel``;
* constants of a model that was fitted to timings stand beside that model, which says on which chip they were taken;
* numbers of an algorithm, such as the threads of a warp, stand where the algorithm is.

A *target* such as ``sm_90a`` says what is compiled for. Several chips run it (H100 and H200), and the first of them in
``CHIPS`` is its default. A process that has the device knows the exact one (``runtime/cuda.py``, ``chip_of``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields

from jitgen.spec import DTYPES, Target, digest

MIB = 2**20


LAUNCH = 1.6e-6
"""Seconds that one more kernel takes: fitted to products that end in a second kernel (``gemm/triton_tiles.py``)."""
CORE_CLOCK, CORE_MEMORY = 3e9, 10e9
"""Hz, and bytes/s, of one core while all cores of a server are at work: 40 to 80 GB/s of four to eight channels, shared
by as many cores (docs/measured/cpu.md has 29 to 41 GB/s with four). Only their ratio matters to a plan."""


@dataclass(frozen=True)
class Rates:
    """Says how fast work is done, by which plans are compared (``cost.py``).

    Attributes:
        memory: bytes/s.
        vector: operations/s outside of matrix units.
        products: operations/s of products by the dtype of their operands; those without one are done at ``vector``.
        launch: seconds that one more kernel takes.
    """

    memory: float
    vector: float
    products: Mapping[str, float]
    launch: float = LAUNCH

    def matrix(self, dtype: str) -> float:
        """Returns the operations/s of products whose operands are ``dtype``."""
        return self.products.get(dtype, self.vector)


@dataclass(frozen=True)
class Chip:
    """Records one GPU. A number of None has not been measured or published.

    Attributes:
        name: the vendor's, as it begins in the driver's name of the device.
        targets: the architectures that run on it, as ``Target.arch`` names them.
        multiprocessors: NVIDIA's SMs, AMD's compute units.
        shared_bytes: shared memory that one block may use, in bytes.
        multiprocessor_shared_bytes: shared memory of a multiprocessor, in bytes.
        l2_bytes: the second-level cache, in bytes.
        bandwidth: of its memory, in bytes/s.
        vector: of float32 arithmetic outside of the matrix units, in FLOP/s.
        matrix: of dense bfloat16 products in the matrix units, in FLOP/s.
        clusters: pairs of the blocks of a cluster and the clusters that are resident at once, with one block on each
            multiprocessor. A cluster lies within one group of multiprocessors (a GPC), and groups differ in size, so
            that they are fewer than the number of multiprocessors suggests.
        clock: of the multiprocessors under load, in Hz.
        read_rate: bytes/s that a kernel was measured to read at most; see ``reads``.
        matrix_rate: FLOP/s that a bfloat16 product reaches at most.
        modelled_as: the name of the chip by whose record schedules are chosen; empty for itself. Tables and models were
            fitted on an H200, so that a chip keeps its choices until they have been measured on it. On an H100 they
            have been: constants of its own would gain 0.8 % (docs/devices.md), and cost it the kernels of an H200.
        sources: pairs of the name of a field and where its number comes from.
    """

    name: str
    targets: tuple[str, ...]
    multiprocessors: int
    shared_bytes: int
    multiprocessor_shared_bytes: int
    l2_bytes: int
    bandwidth: float
    vector: float
    matrix: float
    clusters: tuple[tuple[int, int], ...] = ()
    clock: float | None = None
    read_rate: float | None = None
    matrix_rate: float | None = None
    modelled_as: str = ""
    sources: tuple[tuple[str, str], ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)

    @functools.cached_property
    def digest(self) -> str:
        """Returns the sha256 of the numbers, which is part of request keys. The name and the sources are left out."""
        left_out = ("name", "targets", "modelled_as", "sources")
        return digest({field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out})

    @functools.cached_property
    def resident_clusters(self) -> dict[int, int]:
        """Maps the blocks of a cluster to the clusters that are resident at once (see ``clusters``)."""
        return dict(self.clusters)

    def rows_that_occupy(self, share: float) -> int:
        """Returns the largest power of two that is at most ``share`` of the multiprocessors: so many rows, one to a
        block, leave the others idle."""
        return 1 << (int(self.multiprocessors * share).bit_length() - 1)

    @property
    def reads(self) -> float:
        """Returns the bytes/s that a kernel reads at most, as far as is known: measured, or the bandwidth of the
        memory."""
        return self.read_rate or self.bandwidth

    @functools.cached_property
    def rates(self) -> Rates:
        half = self.matrix_rate or self.matrix
        return Rates(self.reads, self.vector, {"bfloat16": half, "float16": half})

    @property
    def microsecond_cycles(self) -> float:
        """Returns the cycles of the multiprocessors in a microsecond; ValueError if the clock is not known."""
        if self.clock is None:
            raise ValueError(f"the clock of {self.name} is not known")
        return self.clock / 1e6


@dataclass(frozen=True)
class CpuLevel:
    """Records a level of the x86-64 psABI, or any other processor. It says nothing of a CPU's cores, clock and memory.

    Attributes:
        name: as ``Target.arch``.
        vector_bytes: bytes of a vector register.
        vector_registers: vector registers that an instruction can name.
        source: of both.
    """

    name: str
    vector_bytes: int
    vector_registers: int
    source: str

    @property
    def floats(self) -> int:
        """Returns how many float32 elements a vector has."""
        return self.vector_bytes // 4

    @functools.cached_property
    def rates(self) -> Rates:
        """Returns those of one core: a vector operation a cycle, in products two multiply-adds."""
        vector = self.floats * CORE_CLOCK
        return Rates(CORE_MEMORY, vector, dict.fromkeys(DTYPES, 4 * vector))


_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture"
_BLACKWELL = "Blackwell Tuning Guide"
_ADA = "NVIDIA Ada GPU Architecture"


def _nvidia(sheet: str, paper: str, l2: str = "") -> tuple[tuple[str, str], ...]:
    """Lists the sources of the numbers that every record of an NVIDIA chip has."""
    rates = tuple((name, sheet) for name in ("bandwidth", "vector", "matrix"))
    shared = tuple((name, _GUIDE) for name in ("shared_bytes", "multiprocessor_shared_bytes"))
    return (("multiprocessors", paper), *shared, ("l2_bytes", l2 or paper), *rates)


H200 = Chip(
    "NVIDIA H200",
    ("sm_90a", "sm_90"),
    multiprocessors=132,
    shared_bytes=227 * 1024,
    multiprocessor_shared_bytes=228 * 1024,
    l2_bytes=60 * MIB,
    bandwidth=4.8e12,
    vector=67e12,
    matrix=989e12,
    clusters=((1, 132), (2, 66), (3, 39), (4, 30), (5, 22), (6, 17), (7, 15), (8, 15)),
    clock=1750e6,
    read_rate=4.4e12,
    matrix_rate=798e12,
    sources=(
        *_nvidia("NVIDIA H200 data sheet", _HOPPER, "the driver, docs/measured/h200-sweep.json"),
        ("clusters", "cuOccupancyMaxActiveClusters on an H200, driver 580"),
        ("clock", "fitted with the models of families/gemm/wgmma_tiles.py to timings on an H200"),
        ("read_rate", "measured on an H200: docs/measured/h200.json, ragged add in bfloat16"),
        ("matrix_rate", "measured on an H200: cuBLAS, 8192 x 8192 x 8192"),
    ),
)
H100 = Chip(
    "NVIDIA H100",
    ("sm_90a", "sm_90"),
    multiprocessors=132,
    shared_bytes=227 * 1024,
    multiprocessor_shared_bytes=228 * 1024,
    l2_bytes=50 * MIB,
    bandwidth=3.35e12,
    vector=67e12,
    matrix=989e12,
    clusters=H200.clusters,
    read_rate=3.04e12,
    matrix_rate=719e12,
    modelled_as=H200.name,
    sources=(
        *_nvidia("NVIDIA H100 data sheet, SXM", _HOPPER),
        ("clusters", "cuOccupancyMaxActiveClusters on an H100: docs/measured/h100-candidates-held-out.json"),
        ("read_rate", "measured on an H100: the same, an addition in bfloat16"),
        ("matrix_rate", "measured on an H100: the same, cuBLAS, 8192 x 8192 x 8192"),
    ),
)
A100 = Chip(
    "NVIDIA A100",
    ("sm_80",),
    multiprocessors=108,
    shared_bytes=163 * 1024,
    multiprocessor_shared_bytes=164 * 1024,
    l2_bytes=40 * MIB,
    bandwidth=2.039e12,
    vector=19.5e12,
    matrix=312e12,
    modelled_as=H200.name,
    sources=_nvidia("NVIDIA A100 data sheet, SXM 80 GB", "NVIDIA A100 Tensor Core GPU Architecture"),
)
L4 = Chip(
    "NVIDIA L4",
    ("sm_89",),
    multiprocessors=58,
    shared_bytes=99 * 1024,
    multiprocessor_shared_bytes=100 * 1024,
    l2_bytes=48 * MIB,
    bandwidth=300e9,
    vector=30.3e12,
    matrix=121e12,
    modelled_as=H200.name,
    sources=_nvidia("NVIDIA L4 data sheet", _ADA),
)
RTX_4090 = Chip(
    "NVIDIA GeForce RTX 4090",
    ("sm_89",),
    multiprocessors=128,
    shared_bytes=99 * 1024,
    multiprocessor_shared_bytes=100 * 1024,
    l2_bytes=72 * MIB,
    bandwidth=1.008e12,
    vector=82.6e12,
    matrix=165.2e12,
    modelled_as=H200.name,
    sources=_nvidia(f"{_ADA}, appendix A (float32 accumulation)", _ADA),
)
B200 = Chip(
    "NVIDIA B200",
    ("sm_100a", "sm_100f", "sm_100"),
    multiprocessors=148,
    shared_bytes=227 * 1024,
    multiprocessor_shared_bytes=228 * 1024,
    l2_bytes=126 * MIB,
    bandwidth=7.7e12,
    vector=75e12,
    matrix=2250e12,
    modelled_as=H200.name,
    sources=_nvidia("NVIDIA HGX B200 data sheet, for one GPU", "NVIDIA Blackwell B200, two dies of 74", _BLACKWELL),
)
MI300X = Chip(
    "AMD Instinct MI300X",
    ("gfx942",),
    multiprocessors=304,
    shared_bytes=64 * 1024,
    multiprocessor_shared_bytes=64 * 1024,
    l2_bytes=32 * MIB,
    bandwidth=5.3e12,
    vector=163.4e12,
    matrix=1307.4e12,
    modelled_as=H200.name,
    sources=(
        *((name, "AMD Instinct MI300X data sheet") for name in ("multiprocessors", "bandwidth", "vector", "matrix")),
        *((name, "AMD CDNA 3 ISA guide") for name in ("shared_bytes", "multiprocessor_shared_bytes")),
        ("l2_bytes", "AMD CDNA 3 white paper: 4 MiB for each of eight dies"),
    ),
)

CHIPS = (H200, H100, A100, L4, RTX_4090, B200, MI300X)
"""Every chip with a record. Of those that run a target the first is its default."""

CPU_LEVELS = {
    level.name: level
    for level in (
        CpuLevel("x86-64-v4", 64, 32, "Intel SDM volume 1, AVX-512"),
        CpuLevel("x86-64-v3", 32, 16, "Intel SDM volume 1, AVX2"),
        CpuLevel("x86-64-v2", 16, 16, "Intel SDM volume 1, SSE"),
        CpuLevel("generic", 16, 16, "the least of the SIMD extensions in use: SSE2, NEON"),
    )
}
"""The levels of ``spec.CPU_LEVELS``."""


def named(name: str) -> Chip:
    """Returns the chip called ``name``; KeyError where there is none."""
    for chip in CHIPS:
        if chip.name == name:
            return chip
    raise KeyError(name)


def chips(target: Target) -> tuple[Chip, ...]:
    """Returns the chips that run ``target``, its default first."""
    return tuple(chip for chip in CHIPS if target.arch in chip.targets)


def default(target: Target) -> Chip | None:
    """Returns the chip that ``target`` stands for where no device says otherwise; None where none has a record."""
    return next(iter(chips(target)), None)


def of_device(target: Target, name: str, multiprocessors: int) -> Chip | None:
    """Returns the chip of a device by target, driver's name and number of multiprocessors; the target's default if no
    record agrees, as for an H100 PCIe, which has fewer multiprocessors than an H100 SXM."""
    for chip in chips(target):
        if name.startswith(chip.name) and chip.multiprocessors == multiprocessors:
            return chip
    return default(target)
