"""Defines frozen descriptions that flow between the layers: dtypes, targets, tensor specs, kernel sources and
artifacts.

Everything here is a value: hashable or JSON-serializable, free of tensors, devices and paths. ``compilers/``,
``store/`` and ``runtime/`` meet in this module and never import one another.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jitgen import settings
from jitgen.errors import FormatError, UnsupportedError
from jitgen.settings import CPU_LEVELS

SCHEMA = 1
"""The version of the format of everything jitgen writes to disk. It is part of the request key and of the artifact key,
so that entries of an older format are never read."""

# ---------------------------------------------------------------------------------------------------------- dtypes

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""The supported dtypes, by torch's name for them."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

BITS_OF: dict[str, str] = {
    "float64": "int64",
    "float32": "int32",
    "float16": "int16",
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
}
"""The integer dtype in which kernels have the bits of a float."""

_SHORT_DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i8": "int8"}
_SHORT_DTYPES |= {"i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "f8e4m3": "float8_e4m3fn"}
_SHORT_DTYPES |= {"f8e5m2": "float8_e5m2", "float": "float32", "double": "float64", "half": "float16"}


COMPLEX_REMEDY = (
    "a kernel has no complex numbers: pass the pairs (torch.view_as_real(x), made once, outside) and multiply them as "
    "(a c - b d, a d + b c); for rotary embedding that is jitgen.nn.functional.rotary(x, freqs.real, freqs.imag, "
    "interleaved=True)"
)
"""What to write in place of complex tensors, such as those of the reference Llama's rotary embedding."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns ``"float32"`` for ``torch.float32``; UnsupportedError for a dtype that jitgen has no row for."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        if not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"{dtype!r:.80} is no torch.dtype; pass one, such as torch.float32")
        convert = "convert it before the call, .float()" if str(dtype).startswith("torch.float8") else ""
        remedy = f"\n  {COMPLEX_REMEDY if dtype.is_complex else convert}".rstrip()
        raise UnsupportedError(f"dtype {dtype} is not supported; jitgen knows {', '.join(DTYPES)}{remedy}")
    return name


def parse_dtype(text: str) -> torch.dtype:
    """Parses ``"bfloat16"``, ``"torch.bfloat16"`` or ``"bf16"``."""
    name = text.removeprefix("torch.")
    name = _SHORT_DTYPES.get(name, name)
    if name not in DTYPES:
        raise UnsupportedError(f"unknown dtype {text!r}; expected one of {', '.join([*DTYPES, *_SHORT_DTYPES])}")
    return DTYPES[name]


@functools.cache
def e4m3fn_saturates() -> bool:
    """Returns whether this torch converts what is too large for float8_e4m3fn to 448 (from 2.13 on) rather than to
    NaN."""
    with torch._C.DisableTorchFunction():
        return bool(torch.tensor(1e4).to(torch.float8_e4m3fn).float() == 448.0)


@functools.cache
def scales_by_integers() -> bool:
    """Returns whether ``ldexp`` of this torch scales floats by integers in their own dtype (from 2.13 on)."""
    with torch._C.DisableTorchFunction():
        half, exponent = torch.ones(1, dtype=torch.float16), torch.ones(1, dtype=torch.int32)
        return torch.ldexp(half, exponent).dtype == torch.float16


# --------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    """Describes what a kernel is compiled for.

    Attributes:
        kind: ``"cuda"``, ``"hip"``, ``"cpu"``, or ``"interpreter"`` (Triton's, on CPU tensors, for tests).
        arch: ``"sm_90a"`` (not the same as ``"sm_90"``), ``"gfx942"``, ``"x86-64-v4"``, ``"interpreter"``.
    """

    kind: str
    arch: str

    @staticmethod
    def parse(text: str | Target) -> Target:
        """Parses ``"sm_90a"``, ``"gfx942"``, ``"x86-64-v3"``; ``"cpu"`` is this host's level."""
        if isinstance(text, Target):
            return text
        if not isinstance(text, str):
            raise UnsupportedError(f"{text!r:.80} is no target; pass the name of one, such as 'sm_90a' or 'cpu'")
        if match := re.fullmatch(r"sm_(\d{2,3})([af]?)", text):
            capability, features = int(match.group(1)), match.group(2)
            if capability < OLDEST_CAPABILITY:
                raise UnsupportedError(
                    f"{text} is older than sm_{OLDEST_CAPABILITY} (Ampere), the first architecture that has the "
                    "bfloat16 and asynchronous copies that generated kernels use"
                )
            if capability in _CAPABILITIES and capability >= _FEATURES_FROM[features]:
                return Target("cuda", text)
        if text in _AMD:
            return Target("hip", text)
        if text == "cpu":
            return host_target()
        if text in CPU_LEVELS:
            return Target("cpu", text)
        if text == "interpreter":
            return Target("interpreter", text)
        raise UnsupportedError(
            f"unknown target {text!r}; expected an NVIDIA architecture "
            f"({', '.join(f'sm_{known}' for known in _CAPABILITIES)}, with an 'a' or 'f' behind it where it has such "
            f"features: sm_90a), an AMD one ({', '.join(_AMD)}), 'cpu' for this host, or a CPU level: "
            f"{', '.join(CPU_LEVELS)}"
        )

    @property
    def capability(self) -> int:
        """Returns the compute capability as an integer: 90 for sm_90a. Only for CUDA targets."""
        match = re.fullmatch(r"sm_(\d+)[af]?", self.arch)
        if match is None:
            raise UnsupportedError(f"{self.arch} is not an NVIDIA architecture")
        return int(match.group(1))

    @property
    def shared_bytes(self) -> int:
        """Returns the shared memory that one block may use, in bytes; for a target without any, the most of any NVIDIA
        target."""
        if self.kind == "hip":
            return _AMD_SHARED_KIB << 10
        if self.kind != "cuda":
            return max(_SHARED_KIB.values()) << 10
        return _SHARED_KIB[max(known for known in _SHARED_KIB if known <= self.capability)] << 10

    @property
    def overlaps_launches(self) -> bool:
        """Returns whether a kernel may start before its predecessor in the stream has ended (programmatic dependent
        launch)."""
        return self.kind == "cuda" and self.capability >= 90

    @property
    def has_warpgroup_products(self) -> bool:
        """Returns whether the tensor cores take ``wgmma`` instructions; only Hopper's do."""
        return self.kind == "cuda" and self.capability == 90

    def __str__(self) -> str:
        return self.arch


OLDEST_CAPABILITY = 80
"""The compute capability of the oldest NVIDIA architecture that kernels are made for."""
_CAPABILITIES = (80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121)
"""The known compute capabilities: those of NVRTC 13 (``nvrtcGetSupportedArchs``), and 101, NVRTC 12's name for 110."""
_FEATURES_FROM = {"": 0, "a": 90, "f": 100}
"""The first capability that has features of its own architecture (``sm_90a``) or family (``sm_100f``)."""
_AMD: tuple[str, ...] = (
    "gfx908",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1030",
    "gfx1031",
    "gfx1032",
    "gfx1100",
    "gfx1101",
    "gfx1102",
)
_AMD += ("gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153", "gfx1200", "gfx1201", "gfx1250")
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of one block in KiB, by the lowest compute capability that has it (CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability")."""
_AMD_SHARED_KIB = 64
_LEVEL_FLAGS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("x86-64-v2", {"cx16", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
)
_host_target: Target | None = None


def host_target() -> Target:
    """Returns this machine's CPU target: the highest level whose instruction sets the processor reports."""
    global _host_target
    chosen = settings.get("JITGEN_CPU_TARGET")
    if chosen:
        return Target("cpu", chosen)
    if _host_target is None:
        _host_target = Target("cpu", _detect_level())
    return _host_target


def runs_here(target: Target) -> bool:
    """Returns whether this processor has the instruction sets of a CPU ``target``."""
    if target.arch == "generic":
        return True
    levels = [level for level, _ in _LEVEL_FLAGS]
    here = _detect_level()
    return here in levels and target.arch in levels and levels.index(here) <= levels.index(target.arch)


@functools.cache
def _detect_level() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            line = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return "generic"
    flags = set(line.split())
    for position, (level, _) in enumerate(_LEVEL_FLAGS):
        if all(needed <= flags for _, needed in _LEVEL_FLAGS[position:]):
            return level
    return "generic"


# --------------------------------------------------------------------------------------------------- tensor specs

SYMBOL_HINT = 16
"""A number of elements. A symbolic size counts as a multiple of it when kernels are planned; see ``TensorSpec``."""


@dataclass(frozen=True)
class TensorSpec:
    """Describes a tensor without a device: enough to lower, render and compile.

    Args:
        shape: for each dimension an int, or a name such as ``"M"`` for a symbolic size. Equal names are equal sizes.
            Kernels are planned for symbolic sizes that are multiples of 16.
        dtype: element type; of a quantised weight, that of its dequantised elements.
        strides: in elements; None means contiguous.
        format: the format of a quantised weight of shape (N, K) or (experts, N, K), such as ``"int4"``; None for a
            dense tensor.
        group_size: columns that share a scale; None means one scale per row.
        alignment: of the data pointer, in bytes.
        activation: how products quantise what they multiply with a quantised weight, such as ``"int8"``; None for not.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32
    strides: tuple[int, ...] | None = None
    format: str | None = None
    group_size: int | None = None
    alignment: int = 16
    activation: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        dtype_name(self.dtype)
        if self.format is not None:
            self._check_format(self.format)
        elif self.group_size is not None or self.activation is not None:
            setting = (
                f"group_size {self.group_size!r}" if self.group_size is not None else f"activation {self.activation!r}"
            )
            raise FormatError(f"TensorSpec {setting} without a format; give one, such as 'int4'")
        for size in self.shape:
            if isinstance(size, str) and not size.isidentifier():
                raise UnsupportedError(f"symbolic size {size!r} is not a name; use one such as 'M'")
            if not isinstance(size, (int, str)) or (isinstance(size, int) and size < 0):
                raise UnsupportedError(f"size {size!r} is neither a non-negative int nor a name such as 'M'")
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise UnsupportedError(f"{len(self.strides)} strides for {len(self.shape)} dimensions")

    def _check_format(self, format: str) -> None:
        from jitgen.quant import activations, formats

        row = formats.find(format)
        object.__setattr__(self, "format", row.name)
        object.__setattr__(self, "group_size", formats.check_group_size(self.group_size, row))
        columns = self.shape[-1] if self.shape and isinstance(self.shape[-1], int) else None
        activations.check_activation(self.activation, row, self.group_size, columns)
        if len(self.shape) not in (2, 3) or self.strides is not None or not self.dtype.is_floating_point:
            raise FormatError(
                f"a quantised weight is a contiguous [N, K], or [experts, N, K], of a floating-point dtype, not "
                f"{list(self.shape)} of "
                f"{self.dtype}" + (f" with strides {self.strides}" if self.strides is not None else "")
            )
        if len(self.shape) == 3 and isinstance(self.shape[1], int):
            formats.check_matrices(row, self.shape[1])

    @staticmethod
    def parse(text: str) -> TensorSpec:
        """Parses ``"bf16[M,4096]"``, as the command line writes a spec.

        A quantised weight is ``"int4g128[14336,4096]"``, or ``"int4gK[14336,4096]"`` with one scale per row.
        """
        match = re.fullmatch(r"\s*([A-Za-z0-9_.]+)\s*\[([^\]]*)\]\s*", text)
        if match is None:
            raise UnsupportedError(
                f"cannot read {text!r} as a tensor; write dtype and sizes, such as 'bf16[M,4096]', or format, group "
                "size and sizes of a quantised weight, such as 'int4g128[14336,4096]'"
            )
        sizes = [size.strip() for size in match.group(2).split(",") if size.strip()]
        shape = tuple(int(size) if size.lstrip("-").isdigit() else size for size in sizes)
        quantised = re.fullmatch(r"(.+)g(\d+|K)", match.group(1))
        if quantised is not None:
            group = None if quantised.group(2) == "K" else int(quantised.group(2))
            return TensorSpec(shape, format=quantised.group(1), group_size=group)
        return TensorSpec(shape, parse_dtype(match.group(1)))

    def __str__(self) -> str:
        element = f"{self.format}g{self.group_size or 'K'}" if self.format is not None else dtype_name(self.dtype)
        return f"{element}[{', '.join(map(str, self.shape))}]"


def weight_tensors(format: str) -> tuple[str, ...]:
    """Returns the names of the tensors that a quantised weight of ``format`` consists of: codes, scales and perhaps
    others."""
    from jitgen.quant import formats

    return formats.find(format).tensor_names


# ------------------------------------------------------------------------------------------- sources and artifacts


@dataclass(frozen=True)
class Toolchain:
    """Identifies a compiler and its exact version.

    Attributes:
        compiler: ``"nvrtc"``, ``"triton"``, ``"gcc"``, ``"clang"``, ``"nvcc"``, ...
        version: as the compiler reports it.
        headers: (package, version) of the third-party headers that a source includes.
    """

    compiler: str
    version: str
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([f"{self.compiler} {self.version}", *(f"{n} {v}" for n, v in self.headers)])


@dataclass(frozen=True)
class KernelSource:
    """Holds one generated source, with everything else that decides what it compiles to.

    Attributes:
        name: the kernel's entry symbol, which follows from the text and the options.
        kernel: its name in the function that it was first made for, which only messages have.
        language: ``"cuda"``, ``"triton"`` or ``"cpp"``.
        compiler: the compiler of the route: ``"nvrtc"``, ``"triton"``, ``"host"`` or ``"load_inline"``.
        target: what it is compiled for.
        text: the source.
        headers: (include name, text) of every one of jitgen's own static headers that it includes, sorted by name.
        packages: distribution names of the third-party header packages that it includes.
        options: (name, JSON value) pairs of everything else that changes the binary: flags, warps, signature.
        template: the template it was rendered from.
    """

    name: str
    language: str
    compiler: str
    target: Target
    text: str
    headers: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    template: str = ""
    kernel: str = ""

    @property
    def described(self) -> str:
        """Returns the kernel as messages name it: its name in its function, and its entry symbol."""
        return f"{self.kernel} ({self.name})" if self.kernel else self.name

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)

    @functools.cached_property
    def known_keys(self) -> dict[Toolchain, str]:
        """Returns the artifact keys that were asked for: each is a digest of all headers."""
        return {}


def register_shortage(pool: Sequence[int], registers: int) -> str | None:
    """Explains what is wrong with how the warpgroups of a block deal their registers among themselves; None if nothing
    is.

    Args:
        pool: the registers of a thread of each warpgroup after the deal; empty where none are dealt.
        registers: what each thread has at the launch.
    """
    wanted, there = sum(pool), registers * len(pool)
    if wanted <= there:
        return None
    return (
        f"its {len(pool)} warpgroups have {registers} registers a thread, {there} together, and ask for "
        f"{' + '.join(map(str, pool))} = {wanted} (setmaxnreg)"
    )


def artifact_key(source: KernelSource, toolchain: Toolchain) -> str:
    """Returns the sha256 over the source, its headers, the toolchain's exact versions, the flags, the target and the
    schema.

    No path, time or build order goes into the key, so the same source has the same key on another machine.
    """
    known = source.known_keys
    if toolchain not in known:
        known[toolchain] = _artifact_key(source, toolchain)
    return known[toolchain]


def _artifact_key(source: KernelSource, toolchain: Toolchain) -> str:
    return digest(
        {
            "schema": SCHEMA,
            "name": source.name,
            "language": source.language,
            "target": [source.target.kind, source.target.arch],
            "text": source.text,
            "headers": [list(header) for header in source.headers],
            "options": [list(option) for option in source.options],
            "toolchain": [toolchain.compiler, toolchain.version, [list(pair) for pair in toolchain.headers]],
            "route": source.compiler,
        }
    )


def digest(value: Any) -> str:
    """Returns the sha256 of a JSON-serializable value, independent of the order of dicts."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Artifact:
    """Holds the result of compiling one source: files for the store, and the facts that a launch needs.

    Attributes:
        key: the artifact key.
        files: file name to content: the source (``kernel.cu|py|cpp``), the binary, and readable by-products.
        binary: the name of the file to load: ``kernel.cubin``, ``kernel.so``, ``kernel.hsaco`` or ``kernel.py``.
        meta: facts as JSON: entry name, target, toolchain and, for a GPU kernel, shared memory in bytes, warps and
            scratch memory.
    """

    key: str
    files: Mapping[str, bytes]
    binary: str
    meta: Mapping[str, Any] = field(default_factory=dict)


DIVISION = " (division by an integer)"
"""Ends the user's line of a check for a divisor that is 0."""
GROUPS = " (groups of a product)"
"""Ends the user's line of a check of offsets or ids of groups; other checks of kernels are for indices out of range."""
