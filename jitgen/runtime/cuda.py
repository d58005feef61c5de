"""Loads and launches GPU kernels: cubins, from NVRTC or from Triton, through cuda-python's driver bindings.

``load`` loads a cubin on a device. A ``Launch`` is one kernel with its launch prepared, so that a warm call packs the
few values that vary and makes one driver call. Importing this module touches no GPU and no compiler. Neighbours:
``compilers/`` made the binaries, ``call/specialization.py`` prepares launches, and ``runtime/launcher.py`` writes
``Launch.__call__`` out into its launchers; ``runtime/residency.py`` checks what a kernel assumes before it is launched.
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

PARAMETER_BYTES = 4096
"""Bytes of parameters that a kernel may have by any driver."""
DRIVER_OF_LARGE_PARAMETERS = 12010
"""The first version of the driver, as ``cuDriverGetVersion`` gives it, by which a kernel may have 32,764 bytes, on
devices from compute capability 7.0 on (CUDA C++ Programming Guide, "Function Parameters")."""


class DriverError(JitgenError):
    """Reports that a call of the CUDA driver failed, or that a kernel assumes what a device does not have. The message
    says what was asked, and has the driver's name of the error.

    Attributes:
        status: the driver's ``CUresult`` as an integer; None where no call failed.
    """

    def __init__(self, message: str, status: int | None = None):
        self.status = status
        super().__init__(message)


# --------------------------------------------------------------------------------------------------------- devices


def current_stream(device: int) -> int:
    """Returns the raw handle of torch's current stream on ``device``. It takes 0.14 us, torch's ``current_stream`` 4.7
    us."""
    import torch

    return torch._C._cuda_getCurrentRawStream(device)


@functools.cache
def target_of(device: int) -> Target:
    """Returns the exact target of a device: ``sm_90a`` for an H200. Devices from capability 9.0 on have ``a``
    features."""
    major = _attribute("COMPUTE_CAPABILITY_MAJOR", device)
    minor = _attribute("COMPUTE_CAPABILITY_MINOR", device)
    return Target("cuda", f"sm_{major}{minor}{'a' if major >= 9 else ''}")


@functools.cache
def name_of(device: int) -> str:
    """Returns the driver's name of a device, such as ``NVIDIA H200``."""
    driver = bindings()
    handle = checked(driver.cuDeviceGet(device), f"opening CUDA device {device}")
    name: bytes = checked(driver.cuDeviceGetName(128, handle), f"reading the name of CUDA device {device}")
    return name.split(b"\0")[0].decode(errors="replace")


@functools.cache
def multiprocessors(device: int) -> int:
    """Returns how many streaming multiprocessors a device has."""
    return _attribute("MULTIPROCESSOR_COUNT", device)


def most_shared_bytes(device: int) -> int:
    """Returns the shared memory that a block may have, static and dynamic together, in bytes."""
    return _attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", device)


def _attribute(name: str, device: int) -> int:
    driver = bindings()
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    handle = checked(driver.cuDeviceGet(device), f"opening CUDA device {device}")
    return checked(driver.cuDeviceGetAttribute(attribute, handle), f"reading {name} of CUDA device {device}")


# --------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Function:
    """Refers to a kernel loaded on one device. It is never unloaded.

    Attributes:
        entry: the kernel's symbol.
        device: the CUDA ordinal, as in torch.
        shared_bytes: the most dynamic shared memory that a launch may use, in bytes.
        handle: the driver's ``CUfunction``.
        context: the device's primary context, the one torch uses.
        kernel: its name in the function that launches it, for messages.
    """

    entry: str
    device: int
    shared_bytes: int
    handle: Any
    context: Any
    kernel: str = ""

    @property
    def described(self) -> str:
        """Returns the kernel as messages name it."""
        return f"{self.kernel} ({self.entry})" if self.kernel else self.entry

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the function's CUDA context the calling thread's current one within this context."""
        with _current(self.context):
            yield


def load(binary: bytes, entry: str, device: int, shared_bytes: int = 0, parameter_bytes: int = 0) -> Function:
    """Loads a cubin into the primary context of ``device``. Every call loads it again; the caller remembers the result.

    Args:
        binary: a cubin for exactly this device's architecture.
        entry: the kernel's symbol in it.
        device: the CUDA ordinal.
        shared_bytes: the dynamic shared memory of its launches, in bytes. For more than 48 KiB the driver needs an
            attribute of the function, which is set here.
        parameter_bytes: the bytes of its struct of parameters, where it has one.

    Raises:
        DriverError: there is no driver, or one too old for so many parameters, the cubin is for another architecture or
            has no such entry, or a block of this device has less shared memory.
    """
    driver = bindings()
    what = f"kernel {entry} on CUDA device {device}"
    if parameter_bytes > PARAMETER_BYTES:
        _check_driver_of_large_parameters(parameter_bytes, what)
    ordinal = checked(driver.cuDeviceGet(device), f"opening CUDA device {device}")
    context = checked(driver.cuDevicePrimaryCtxRetain(ordinal), f"retaining the context of CUDA device {device}")
    with _current(context):
        module = checked(driver.cuModuleLoadData(binary), f"loading {what}")
        handle = checked(driver.cuModuleGetFunction(module, entry.encode()), f"finding {what}")
        if shared_bytes:
            static = function_attribute(handle, "SHARED_SIZE_BYTES", what)
            if static + shared_bytes > most_shared_bytes(device):
                raise DriverError(
                    f"{what} takes {static + shared_bytes} bytes of shared memory a block, and the device has "
                    f"{most_shared_bytes(device)}: it was made for another chip; clear the store's entries of it "
                    "(jitgen cache clear), or use backend='triton'"
                )
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            asked = f"asking for {shared_bytes} bytes of shared memory for {what}"
            checked(driver.cuFuncSetAttribute(handle, limit, shared_bytes), asked)
    return Function(entry, device, shared_bytes, handle, context)


def _check_driver_of_large_parameters(size: int, what: str) -> None:
    """Checks that the driver knows kernels of more than ``PARAMETER_BYTES`` of parameters, which this one takes."""
    version = checked(bindings().cuDriverGetVersion(), "reading the version of the CUDA driver")
    if version < DRIVER_OF_LARGE_PARAMETERS:
        raise DriverError(
            f"{what} takes {size} bytes of parameters; more than {PARAMETER_BYTES} need the driver of CUDA 12.1 (530) "
            f"or newer, and this one is of CUDA {version // 1000}.{version % 1000 // 10}: update the driver, use "
            "backend='triton', or give the function fewer tensors at once"
        )


def function_attribute(handle: Any, name: str, what: str) -> int:
    """Returns an attribute of a loaded kernel, such as ``NUM_REGS``; ``what`` names the kernel in an error."""
    driver = bindings()
    attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    value: int = checked(driver.cuFuncGetAttribute(attribute, handle), f"reading {name} of {what}")
    return value


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
"""The host memory of one launch: (argument buffer, launch config, address of the array of parameter addresses, that
array)."""

_TENSOR_MAP = "128s"  # of an encoded CUtensorMap
_IN_STRUCT = {"T": f"={_TENSOR_MAP}", "P": "=Q"}
"""Codes of values in a struct that need others than their own; its offsets are explicit, so there is no alignment."""


class Launch:
    """Holds one prepared launch: ``launch(stream, *varying)`` enqueues it and returns at once.

    Args:
        function: what to launch.
        parameters: the kernel's parameters as ``struct`` codes: ``P`` pointer, ``i`` int32, ``q`` int64, ``f``
            float32, ``d`` float64, ``T`` a tensor map (see ``tensor_map.py``; its value is 128 bytes). Triton's two
            trailing scratch pointers are ordinary ``P`` parameters.
        values: one value per parameter; None for one that varies: each call passes these, in parameter order.
        grid, block: in blocks and in threads.
        shared_bytes: dynamic shared memory per block, in bytes; at most what the function was loaded with.
        cluster: blocks per cluster, or None.
        pdl: programmatic dependent launch: the kernel may start before its predecessor in the stream has ended, and
            waits for it by ``griddepcontrol.wait``.
        cooperative: all blocks are resident at once, so that the grid may synchronise.
        struct_layout: where the kernel takes one struct: the offset of each parameter in it, in ascending order, and
            the bytes of the struct.

    A launch may be called by several threads at once. One ``struct`` call packs the varying values at the start of an
    argument frame. The driver reads every parameter through a pointer, so their order in the frame does not matter. In
    a struct it does: there that call also packs what lies between two varying values, because it would clear what it
    skips. ``between`` has these bytes, and None for each varying value. The driver call runs without the GIL, and a
    frame must not be rewritten during it; so frames come from a pool.
    """

    __slots__ = ("_constants", "_offsets", "_shape", "_size", "between", "call", "function", "handle", "pack", "pools")

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
        struct_layout: tuple[tuple[int, ...], int] | None = None,
    ):
        if len(parameters) != len(values):
            raise ValueError(f"{function.entry}: {len(values)} values for {len(parameters)} parameters")
        self.function = function
        self.handle = function.handle
        self.call = bindings().cuLaunchKernelEx
        self._shape = (grid, block, shared_bytes, cluster, pdl, cooperative)

        self.pools: dict[int, list[Frame]] = {}
        if struct_layout is not None:
            self._lay_out(parameters, values, *struct_layout)
            return
        varying = [index for index, value in enumerate(values) if value is None]
        fixed = [index for index, value in enumerate(values) if value is not None]
        codes = [_TENSOR_MAP if code == "T" else code for code in parameters]
        layout = [codes[index] for index in varying + fixed]
        ends = (struct.calcsize("".join(layout[: count + 1])) for count in range(len(layout)))
        starts = (end - struct.calcsize(code) for end, code in zip(ends, layout, strict=True))
        self._offsets = tuple(start for _, start in sorted(zip(varying + fixed, starts, strict=True)))
        self._size = struct.calcsize("".join(layout))
        self.pack = struct.Struct("".join(layout[: len(varying)])).pack_into
        self.between: tuple[bytes | None, ...] = (None,) * len(varying)
        self._constants = [(codes[index], self._offsets[index], values[index]) for index in fixed]

    def _lay_out(
        self, parameters: str, values: tuple[int | float | bytes | None, ...], offsets: tuple[int, ...], size: int
    ) -> None:
        """Prepares the packing of one struct."""
        codes = [_IN_STRUCT.get(code, f"={code}") for code in parameters]
        self._offsets, self._size = (0,), size
        image, self._constants = bytearray(size), []
        for code, offset, value in zip(codes, offsets, values, strict=True):
            if value is not None:
                struct.pack_into(code, image, offset, value)
                self._constants.append((code, offset, value))
        between: list[bytes | None] = []
        layout, end = "=", 0
        for code, offset, value in zip(codes, offsets, values, strict=True):
            if value is None:
                if offset > end:
                    between.append(bytes(image[end:offset]))
                    layout += f"{offset - end}s"
                between.append(None)
                layout, end = layout + code[1:], offset + struct.calcsize(code)
        self.between, self.pack = tuple(between), struct.Struct(layout).pack_into

    def __call__(self, stream: int, *varying: int | float | bytes) -> None:
        # runtime/launcher.py writes these lines into its launchers, which saves the call of this method.
        try:
            pool = self.pools[stream]
            frame = pool.pop()
        except (KeyError, IndexError):
            pool, frame = self.fresh(stream)
        if len(varying) < len(self.between):
            rest = iter(varying)
            varying = tuple(next(rest) if piece is None else piece for piece in self.between)
        self.pack(frame[0], 0, *varying)
        status = self.call(frame[1], self.handle, frame[2], 0)[0]
        if status:
            self.recover(frame, status)
        pool.append(frame)

    def fresh(self, stream: int) -> tuple[list[Frame], Frame]:
        """Returns the pool of frames that are not in use on ``stream``, and a new frame, which is not in the pool."""
        return self.pools.setdefault(stream, []), self._new_frame(stream)

    def recover(self, frame: Frame, status: Any) -> None:
        """Handles a failed launch: launches again in the function's own context, or raises DriverError."""
        _, config, addresses, _ = frame
        # The default stream belongs to the thread's current context. A thread that torch has not used yet has none, and
        # another's may be that of another device. The driver refuses both, so the context is set only after that.
        results = bindings().CUresult
        if status in (results.CUDA_ERROR_INVALID_CONTEXT, results.CUDA_ERROR_INVALID_HANDLE):
            with self.function.current():
                status = self.call(config, self.handle, addresses, 0)[0]
        if status:
            grid, block, shared_bytes, cluster, *_ = self._shape
            checked(
                (status,),
                f"launching kernel {self.function.described} on CUDA device {self.function.device} with grid {grid}, "
                f"block {block}, {shared_bytes} bytes of dynamic shared memory, cluster {cluster}",
            )

    def _new_frame(self, stream: int) -> Frame:
        buffer = (ctypes.c_uint64 * (self._size // 8 + 1))()
        for code, offset, value in self._constants:
            struct.pack_into(code, buffer, offset, value)
        base = ctypes.addressof(buffer)
        addresses = (ctypes.c_void_p * (len(self._offsets) + 1))(*(base + offset for offset in self._offsets))
        config = launch_config(*self._shape)
        config.hStream = stream
        return buffer, config, ctypes.addressof(addresses), addresses


def launch_config(
    grid: Dim3, block: Dim3, shared_bytes: int, cluster: Dim3 | None, pdl: bool, cooperative: bool
) -> Any:
    """Returns the driver's launch configuration, all but its stream."""
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
    """Returns the initialised ``cuda.bindings.driver``."""
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
    """Returns the value that a driver call returned with its status; a DriverError that says ``what`` was done if it
    failed."""
    status, *values = result
    if status:
        raise DriverError(_message(bindings(), status, what), int(status))
    return values[0] if values else None


def _message(driver: Any, status: Any, what: str) -> str:
    (_, name), (_, words) = driver.cuGetErrorName(status), driver.cuGetErrorString(status)
    if not name:
        return f"{what}: CUDA error {int(status)}"
    return f"{what}: {name.decode()} ({words.decode()})"
