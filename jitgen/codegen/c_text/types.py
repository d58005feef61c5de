"""Tells which types of C++ are dtypes: what a pointer's elements are, and whether a number is an integer."""

from __future__ import annotations

_INTEGERS = {
    "int8": ("signed char", "char", "int8_t"),
    "uint8": ("unsigned char", "uint8_t", "uint8"),
    "int16": ("short", "short int", "int16_t"),
    "int32": ("int", "int32_t", "signed", "signed int"),
    "int64": ("long long", "long long int", "long", "long int", "int64_t", "ptrdiff_t", "ssize_t"),
    "bool": ("bool", "jitgen::boolean"),
}
_FLOATS = {
    "float32": ("float",),
    "float64": ("double",),
    "float16": ("half", "__half", "_Float16", "jitgen::float16"),
    "bfloat16": ("nv_bfloat16", "__nv_bfloat16", "__bf16", "jitgen::bfloat16"),
    "float8_e4m3fn": ("__nv_fp8_e4m3", "jitgen::float8_e4m3fn"),
    "float8_e5m2": ("__nv_fp8_e5m2", "jitgen::float8_e5m2"),
}
_DTYPES = {name: dtype for dtype, names in (_INTEGERS | _FLOATS).items() for name in names}
_UNSIGNED = {
    "int16": ("unsigned short", "unsigned short int", "uint16_t"),
    "int32": ("unsigned", "unsigned int", "uint32_t", "uint"),
    "int64": (
        "unsigned long long",
        "unsigned long long int",
        "unsigned long",
        "unsigned long int",
        "uint64_t",
        "size_t",
    ),
}
_SAME_BYTES: dict[str, tuple[str, ...]] = {name: (dtype,) for dtype, names in _UNSIGNED.items() for name in names}
"""Types whose elements are those of several dtypes, or of a signed one."""
NUMBERS = frozenset({*_DTYPES, *_SAME_BYTES})
_SAME_BYTES |= {"char": ("int8", "uint8", "bool"), "unsigned char": ("uint8", "bool"), "uint8_t": ("uint8", "bool")}


def _without_std(type_name: str) -> str:
    return type_name.removeprefix("::").removeprefix("std::")


def dtypes_of(type_name: str) -> tuple[str, ...]:
    """Returns the dtypes of tensors that a pointer to ``type_name`` takes; none where nobody can tell."""
    type_name = _without_std(type_name)
    if type_name in _SAME_BYTES:
        return _SAME_BYTES[type_name]
    return (_DTYPES[type_name],) if type_name in _DTYPES else ()


def is_integer(type_name: str) -> bool | None:
    """Returns whether a number of type ``type_name`` is an integer; None where nobody can tell."""
    type_name = _without_std(type_name)
    if any(type_name in names for names in (*_UNSIGNED.values(), *_INTEGERS.values())):
        return True
    return False if any(type_name in names for names in _FLOATS.values()) else None


def range_of(type_name: str) -> tuple[int, int] | None:
    """Returns the least and the greatest number of an integer type, as far as int64 has them, which numbers of calls
    are; None for bool, which takes any, and for types of which nobody can tell."""
    type_name = _without_std(type_name)
    for dtype, names in _INTEGERS.items():
        if type_name in names and dtype != "bool":
            bits = int(dtype.lstrip("uint"))
            return (0, 2**bits - 1) if dtype == "uint8" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    unsigned = next((dtype for dtype, names in _UNSIGNED.items() if type_name in names), None)
    return None if unsigned is None else (0, 2 ** min(int(unsigned.lstrip("int")), 63) - 1)
