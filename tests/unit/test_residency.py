"""What a kernel assumes of a device is checked before its launch: an error with numbers and a remedy, not a hang."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jitgen
from jitgen.compilers import nvrtc
from jitgen.errors import CompileError
from jitgen.kernel.launch import LaunchShape, Persistence
from jitgen.runtime import cuda, residency
from jitgen.runtime.cuda import DriverError, Function
from jitgen.spec import KernelSource, Target, TensorSpec, register_shortage


class FakeDriver:
    """Enough of the bindings to load a kernel and to ask for its attributes."""

    def __init__(self, **facts: int):
        self.facts = {
            "NUM_REGS": 168,
            "MAX_THREADS_PER_BLOCK": 384,
            "SHARED_SIZE_BYTES": 1024,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
            "MULTIPROCESSOR_COUNT": 132,
            "clusters": 16,
            "blocks": 2,
        } | facts
        self.asked: list[int] = []
        # An attribute's value is its own name, without the prefix.
        self.CUfunction_attribute = _Names("CU_FUNC_ATTRIBUTE_")
        self.CUdevice_attribute = _Names("CU_DEVICE_ATTRIBUTE_")
        self.CUlaunchAttributeID = _Names("")
        self.CUlaunchConfig = SimpleNamespace
        self.CUlaunchAttribute = lambda: SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuFuncGetAttribute(self, attribute: str, handle: Any) -> tuple[int, int]:
        return 0, self.facts[attribute]

    def cuDeviceGetAttribute(self, attribute: str, device: Any) -> tuple[int, int]:
        return 0, self.facts[attribute]

    def cuFuncSetAttribute(self, handle: Any, attribute: str, value: int) -> tuple[int]:
        self.asked.append(value)
        return (0,)

    def cuOccupancyMaxActiveClusters(self, handle: Any, config: Any) -> tuple[int, int]:
        return 0, self.facts["clusters"]

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, handle: Any, threads: int, shared: int) -> tuple[int, int]:
        return 0, self.facts["blocks"]

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (0, name)


class _Names:
    def __init__(self, prefix: str):
        self.prefix = prefix

    def __getattr__(self, name: str) -> str:
        return name.removeprefix(self.prefix)


@pytest.fixture
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver(**getattr(request, "param", {}))
    for module in (cuda, residency):
        monkeypatch.setattr(module, "bindings", lambda: made)
    cuda.multiprocessors.cache_clear()
    yield made
    cuda.multiprocessors.cache_clear()


KERNEL = Function("jitgen_f", 0, 100_000, "handle", "context")
SHAPE = LaunchShape((264, 1, 1), (384, 1, 1), shared_bytes=100_000)


def test_what_fits_is_launched(driver: FakeDriver) -> None:
    residency.check(KERNEL, SHAPE, (24, 240, 240))
    residency.check(KERNEL, LaunchShape((264, 1, 1), (384, 1, 1), cluster=2), (40, 232, 232))
    residency.check(KERNEL, SHAPE, cooperative=True)


def test_more_registers_than_a_block_has(driver: FakeDriver) -> None:
    with pytest.raises(DriverError) as raised:
        residency.check(KERNEL, SHAPE, (32, 240, 240))
    assert str(raised.value) == (
        "kernel jitgen_f on CUDA device 0 would wait forever: its 3 warpgroups have 168 registers a thread, 504 "
        "together, and ask for 32 + 240 + 240 = 512 (setmaxnreg); this is a fault of jitgen: please report it, and use "
        "backend='triton' meanwhile"
    )


@pytest.mark.parametrize(
    ("pool", "registers", "short"),
    [
        *(((), 16, False), ((24, 240, 240), 168, False), ((40, 232, 232), 168, False), ((32, 160, 160), 128, False)),
        *(((32, 240, 240), 168, True), ((40, 232, 232), 160, True), ((32, 168, 160, 160), 128, True)),
    ],
)
def test_register_shortage(pool: tuple[int, ...], registers: int, short: bool) -> None:
    assert (register_shortage(pool, registers) is not None) is short


@pytest.mark.parametrize("driver", [{"MAX_THREADS_PER_BLOCK": 256}], indirect=True)
def test_more_threads_than_registers(driver: FakeDriver) -> None:
    with pytest.raises(DriverError, match=r"has registers for 256 threads a block, and is launched with 384; .*report"):
        residency.check(KERNEL, SHAPE)


def test_parameters_that_an_older_driver_does_not_pass(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, refused in ((12000, True), (12010, False), (13000, False)):
        monkeypatch.setattr(driver, "cuDriverGetVersion", lambda version=version: (0, version), raising=False)
        cuda.load(b"", "jitgen_f", 0, parameter_bytes=4096)
        if refused:
            with pytest.raises(DriverError, match=r"takes 4097 bytes of .* of CUDA 12\.0: update the driver, use"):
                cuda.load(b"", "jitgen_f", 0, parameter_bytes=4097)
        else:
            cuda.load(b"", "jitgen_f", 0, parameter_bytes=4097)


@pytest.mark.parametrize("driver", [{"clusters": 0}], indirect=True)
def test_a_cluster_that_does_not_run(driver: FakeDriver) -> None:
    shape = LaunchShape((264, 1, 1), (384, 1, 1), cluster=8, persistence=Persistence("clusters"))
    with pytest.raises(DriverError) as raised:
        residency.check(KERNEL, shape)
    assert str(raised.value) == (
        "clusters of 8 blocks of kernel jitgen_f on CUDA device 0 do not run (384 threads and 100000 bytes of dynamic "
        "shared memory a block): it has no room for one, as where it is divided into instances (MIG) or shared (MPS); "
        "use backend='triton', whose kernels have no clusters"
    )
    with pytest.raises(DriverError, match="do not run"):
        residency.resident_grid(KERNEL, shape)


@pytest.mark.parametrize("driver", [{"blocks": 1}], indirect=True)
def test_a_cooperative_grid_that_does_not_run_at_once(driver: FakeDriver) -> None:
    with pytest.raises(
        DriverError, match=r"its 264 blocks wait for one another, and the device runs 132 of them at once"
    ):
        residency.check(KERNEL, SHAPE, cooperative=True)
    residency.check(KERNEL, LaunchShape((132, 1, 1), (384, 1, 1)), cooperative=True)


def test_more_shared_memory_than_a_block_has(driver: FakeDriver) -> None:
    assert cuda.load(b"", "jitgen_f", 0, 231424).shared_bytes == 231424
    assert driver.asked == [231424]
    with pytest.raises(DriverError) as raised:
        cuda.load(b"", "jitgen_f", 0, 231425)
    assert str(raised.value).startswith(
        "kernel jitgen_f on CUDA device 0 takes 232449 bytes of shared memory a block, and the device has 232448: "
    )
    assert driver.asked == [231424]


# ------------------------------------------------------------------------------------------------ what a cubin says


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
@pytest.mark.parametrize(("requested", "waits"), [(240, True), (232, False)])
def test_a_kernel_that_asks_for_too_many_registers_does_not_compile(requested: int, waits: bool) -> None:
    text = f"""
extern "C" __global__ void __launch_bounds__(384, 1) jitgen_f(float* x) {{
  if (threadIdx.x >= 256) {{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    x[threadIdx.x] = 1.0f;
  }} else {{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 {requested};");
    x[threadIdx.x] = 2.0f;
  }}
}}
extern "C" __global__ void jitgen_g(float* x) {{ x[0] = 3.0f; }}
"""
    source = KernelSource("jitgen_f", "cuda", "nvrtc", Target("cuda", "sm_90a"), text)
    if waits:
        with pytest.raises(CompileError, match=r"jitgen_f would wait forever: its 3 warpgroups have 168 .* = 520"):
            nvrtc.compile(source)
    else:
        meta = nvrtc.compile(source).meta
        assert meta["register_pool"] == [40, 232, 232]
        assert "register_pool" not in meta["entries"]["jitgen_g"]


BF16 = torch.bfloat16
DEALING = {
    "dense": (F.linear, [TensorSpec((2048, 4096), BF16), TensorSpec((4096, 4096), BF16)]),
    "quantised": (
        *(F.linear, [TensorSpec((512, 4096), BF16), TensorSpec((512, 4096), BF16, format="int4", group_size=128)]),
    ),
    "attention": (F.scaled_dot_product_attention, [TensorSpec((2, 8, 512, 128), BF16)] * 3),
}


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
@pytest.mark.parametrize("name", DEALING)
def test_what_the_mainloops_ask_for_is_known(name: str) -> None:
    function, arguments = DEALING[name]
    low = jitgen.jit(function, backend="cuda").lower(*arguments, target="sm_90a")
    kernel = low.compile()._kernels[0]  # where K is split, the sum follows
    pool, registers = kernel.artifact.meta["register_pool"], kernel.artifact.meta["registers"]
    assert len(pool) >= 2
    assert registers * len(pool) - sum(pool) in range(8 * len(pool))
