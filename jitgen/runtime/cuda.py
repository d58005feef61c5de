"""The launcher of every GPU kernel: a cubin, from NVRTC or from Triton, through cuda-python's driver bindings.

``load`` puts a cubin on a device; a ``Launch`` is one kernel with everything about its launch prepared, so that a warm
call packs the few values that vary and makes one driver call. Nothing here touches a GPU at import, and the compilers
are not needed. Neighbours: ``pipeline.py`` builds launches from stored plans; ``compile/`` made the binaries.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jitgen.errors import JitgenError
from jitgen.spec import Target

Dim3 = tuple[int, int, int]


class DriverError(JitgenError):
    """The CUDA driver refused; the message says what was asked of it, and the driver's name and words for why.

    Attributes:
        status: the driver's ``CUresult`` as an integer, or None where there is no driver to ask.
    """

    def __init__(self, message: str, status: int | None = None):
        self.status = status
        super().__init__(message)


# --------------------------------------------------------------------------------------------------------- devices


def current_stream(device: int) -> int:
    """The raw handle of torch's current stream on ``device``: 0.14 us, a thirtieth of ``torch.cuda``'s object."""
    import torch

    return torch._C._cuda_getCurrentRawStream(device)


@functools.cache
def target_of(device: int) -> Target:
    """The exact target of a device: ``sm_90a`` for an H200. From capability 9.0 the ``a`` features are there."""
    major = _attribute("COMPUTE_CAPABILITY_MAJOR", device)
    minor = _attribute("COMPUTE_CAPABILITY_MINOR", device)
    return Target("cuda", f"sm_{major}{minor}{'a' if major >= 9 else ''}")


@functools.cache
def multiprocessors(device: int) -> int:
    """How many streaming multiprocessors a device has."""
    return _attribute("MULTIPROCESSOR_COUNT", device)


def _attribute(name: str, device: int) -> int:
    driver = bindings()
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    handle = checked(driver.cuDeviceGet(device), f"opening CUDA device {device}")
    return checked(driver.cuDeviceGetAttribute(attribute, handle), f"reading {name} of CUDA device {device}")


# --------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Function:
    """A kernel loaded on one device. It stays loaded as long as the process.

    Attributes:
        entry: the kernel's symbol.
        device: the CUDA ordinal, as torch counts.
        shared_bytes: dynamic shared memory it may ask for.
        handle: the driver's ``CUfunction``.
        context: the device's primary context, the one torch uses.
    """

    entry: str
    device: int
    shared_bytes: int
    handle: Any
    context: Any

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Within this the function's context is the calling thread's, whatever it was before."""
        with _current(self.context):
            yield


def load(binary: bytes, entry: str, device: int, shared_bytes: int = 0) -> Function:
    """Load a cubin into the primary context of ``device``. The caller keeps the result; each call loads anew.

    Args:
        binary: a cubin for exactly this device's architecture.
        entry: the kernel's symbol in it.
        device: the CUDA ordinal.
        shared_bytes: dynamic shared memory its launches will ask for; over 48 KiB the driver must be told.

    Raises:
        DriverError: no driver, a cubin for another architecture, no such entry, or more shared memory than there is.
    """
    driver = bindings()
    what = f"kernel {entry} on CUDA device {device}"
    ordinal = checked(driver.cuDeviceGet(device), f"opening CUDA device {device}")
    context = checked(driver.cuDevicePrimaryCtxRetain(ordinal), f"retaining the context of CUDA device {device}")
    with _current(context):
        module = checked(driver.cuModuleLoadData(binary), f"loading {what}")
        handle = checked(driver.cuModuleGetFunction(module, entry.encode()), f"finding {what}")
        if shared_bytes:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            asked = f"asking for {shared_bytes} bytes of shared memory for {what}"
            checked(driver.cuFuncSetAttribute(handle, limit, shared_bytes), asked)
    return Function(entry, device, shared_bytes, handle, context)


def resident_clusters(function: Function, threads: int, cluster: int) -> int:
    """How many clusters of ``cluster`` blocks of ``threads`` threads a device has under way at once, 1 at least.

    Fewer than its multiprocessors could hold: a cluster lies within one group of them, and groups differ in size.
    """
    driver = bindings()
    config = _config((cluster, 1, 1), (threads, 1, 1), function.shared_bytes, (cluster, 1, 1), False, False)
    with function.current():
        found = driver.cuOccupancyMaxActiveClusters(function.handle, config)
    most: int = checked(found, f"asking how many clusters of {cluster} blocks of {function.entry} a device holds")
    return max(1, most)


@contextlib.contextmanager
def _current(context: Any) -> Iterator[None]:
    driver = bindings()
    checked(driver.cuCtxPushCurrent(context), "making a CUDA context current")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


# -------------------------------------------------------------------------------------------------------- launching


Frame = tuple[Any, Any, int, Any]
"""One launch's memory: (argument buffer, launch config, address of the array of parameter addresses, that array)."""

_TENSOR_MAP = "128s"  # of an encoded CUtensorMap


class Launch:
    """One prepared launch: ``launch(stream, *varying)`` enqueues it and returns at once.

    Args:
        function: what to launch.
        parameters: the kernel's parameters as ``struct`` codes: ``P`` pointer, ``i`` int32, ``q`` int64, ``f``
            float32, ``d`` float64, ``T`` a tensor map (see ``tensor_map.py``; its value is 128 bytes). Triton's two
            trailing scratch pointers are ordinary ``P`` parameters.
        values: one value per parameter; None where it varies and is given at each call, in parameter order.
        grid, block: in blocks and in threads.
        shared_bytes: dynamic shared memory per block; at most what the function was loaded with.
        cluster: blocks per cluster, or None.
        pdl: programmatic dependent launch: the kernel may start before the one ahead of it in the stream has ended,
            and waits for it where it must (``griddepcontrol.wait``).
        cooperative: all blocks are resident at once, so that the grid may synchronise.

    A launch may be called from many threads at once. Varying values are packed side by side at the head of an
    argument frame, by one ``struct`` call, and the driver reads every parameter through a pointer into the frame,
    whatever its place; frames are pooled, because a frame in use must not be rewritten while the driver call runs
    outside the interpreter lock.
    """

    __slots__ = ("_constants", "_offsets", "_shape", "_size", "call", "function", "handle", "pack", "pools")

    def __init__(
        self,
        function: Function,
        parameters: str,
        values: tuple[int | float | bytes | None, ...],
        grid: Dim3,
        block: Dim3,
        shared_bytes: int = 0,
        cluster: Dim3 | None = None,
        pdl: bool = False,
        cooperative: bool = False,
    ):
        if len(parameters) != len(values):
            raise ValueError(f"{function.entry}: {len(values)} values for {len(parameters)} parameters")
        self.function = function
        self.handle = function.handle
        self.call = bindings().cuLaunchKernelEx
        self._shape = (grid, block, shared_bytes, cluster, pdl, cooperative)

        varying = [place for place, value in enumerate(values) if value is None]
        fixed = [place for place, value in enumerate(values) if value is not None]
        codes = [_TENSOR_MAP if code == "T" else code for code in parameters]
        layout = [codes[place] for place in varying + fixed]
        ends = (struct.calcsize("".join(layout[: count + 1])) for count in range(len(layout)))
        starts = (end - struct.calcsize(code) for end, code in zip(ends, layout, strict=True))
        self._offsets = tuple(start for _, start in sorted(zip(varying + fixed, starts, strict=True)))
        self._size = struct.calcsize("".join(layout))
        self.pack = struct.Struct("".join(layout[: len(varying)])).pack_into
        self._constants = [(codes[place], self._offsets[place], values[place]) for place in fixed]
        self.pools: dict[int, list[Frame]] = {}

    def __call__(self, stream: int, *varying: int | float | bytes) -> None:
        # runtime/launcher.py writes these lines into its launchers, which saves them this call.
        try:
            pool = self.pools[stream]
            frame = pool.pop()
        except (KeyError, IndexError):
            pool, frame = self.fresh(stream)
        self.pack(frame[0], 0, *varying)
        status = self.call(frame[1], self.handle, frame[2], 0)[0]
        if status:
            self.recover(frame, status)
        pool.append(frame)

    def fresh(self, stream: int) -> tuple[list[Frame], Frame]:
        """The idle frames of launches on ``stream``, and a new one that is not among them."""
        return self.pools.setdefault(stream, []), self._new_frame(stream)

    def recover(self, frame: Frame, status: Any) -> None:
        """What to do when the driver refused a launch: try in the function's own context, or raise DriverError."""
        _, config, addresses, _ = frame
        # The default stream means the thread's current context, which is none in a thread that torch has not used
        # yet, or another device's. Both are refused rather than launched wrongly, so only then is it set.
        results = bindings().CUresult
        if status in (results.CUDA_ERROR_INVALID_CONTEXT, results.CUDA_ERROR_INVALID_HANDLE):
            with self.function.current():
                status = self.call(config, self.handle, addresses, 0)[0]
        if status:
            grid, block, shared_bytes, cluster, *_ = self._shape
            checked(
                (status,),
                f"launching kernel {self.function.entry} on CUDA device {self.function.device} with grid {grid}, "
                f"block {block}, {shared_bytes} bytes of dynamic shared memory, cluster {cluster}",
            )

    def _new_frame(self, stream: int) -> Frame:
        buffer = (ctypes.c_uint64 * (self._size // 8 + 1))()
        for code, offset, value in self._constants:
            struct.pack_into(code, buffer, offset, value)
        base = ctypes.addressof(buffer)
        addresses = (ctypes.c_void_p * (len(self._offsets) + 1))(*(base + offset for offset in self._offsets))
        config = _config(*self._shape)
        config.hStream = stream
        return buffer, config, ctypes.addressof(addresses), addresses


def _config(grid: Dim3, block: Dim3, shared_bytes: int, cluster: Dim3 | None, pdl: bool, cooperative: bool) -> Any:
    """The driver's launch configuration, all but its stream."""
    driver = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    kinds = driver.CUlaunchAttributeID
    attributes = []
    if cluster:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = cluster
        attributes.append(attribute)
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    if attributes:
        config.attrs = attributes
        config.numAttrs = len(attributes)
    return config


# ----------------------------------------------------------------------------------------------------------- driver


@functools.cache
def bindings() -> Any:
    """The initialised ``cuda.bindings.driver``."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DriverError("cuda-bindings is not installed; pip install cuda-python") from None
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError
        raise DriverError(f"this machine has no CUDA driver: {error}") from None
    if status:
        raise DriverError(_message(driver, status, "initialising CUDA"), int(status))
    return driver


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The value beside a driver call's status, or DriverError saying ``what`` was being done."""
    status, *values = result
    if status:
        raise DriverError(_message(bindings(), status, what), int(status))
    return values[0] if values else None


def _message(driver: Any, status: Any, what: str) -> str:
    (_, name), (_, words) = driver.cuGetErrorName(status), driver.cuGetErrorString(status)
    if not name:
        return f"{what}: CUDA error {int(status)}"
    return f"{what}: {name.decode()} ({words.decode()})"
