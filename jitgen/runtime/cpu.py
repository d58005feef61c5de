"""Loads a compiled CPU kernel and makes it callable with raw pointers.

The kernel's OpenMP symbols are resolved when it is loaded, to the runtime that torch has loaded; this module imports
torch first, through ``jitgen.spec``. Neighbours: ``compilers/host.py`` made the shared object, the store holds it, and
``runtime/launcher.py`` calls the function that ``load_packed`` returns.

ctypes takes about 90 ns to convert each argument of a call. So a kernel exports ``<entry>_packed``
(``templates/common/include/jitgen/entry.hpp``), which takes all arguments in one buffer, the image of its struct
``Params``: a call with eight arguments then takes 0.3 us instead of 0.9 us.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import jitgen.spec  # noqa: F401  torch first: its OpenMP runtime is what the kernel's symbols resolve to
from jitgen.errors import CacheError
from jitgen.runtime import library

SLOTS = {"P": "P", "q": "q", "d": "d", "i": "i4x", "f": "f4x"}
"""Parameter letter -> ``struct`` format of its slot of eight bytes: pointer, int64, double, int32, float."""


def packer(parameters: str) -> Callable[..., bytes]:
    """Returns a function that packs the arguments of a call into the buffer that ``load_packed``'s function takes."""
    # Only the mode "@" has P. Its native alignment adds no padding, since every slot has eight bytes.
    return struct.Struct("@" + "".join(SLOTS[letter] for letter in parameters)).pack


NO_MEMORY = -1
"""The status of a kernel whose scratch memory could not be allocated (``jitgen/memory.hpp``)."""


def load_packed(library: str | bytes, entry: str) -> Callable[[bytes], int] | None:
    """Returns ``<entry>_packed`` of a shared object, a function of one packed buffer; None if it has none.

    Args:
        library: the bytes of the shared object, or the path of one.

    Returns:
        a function that returns 0; the number of a region, from 1, that met an index out of range; or ``NO_MEMORY``.

    This is the cheapest call; a launcher packs pointers, sizes and scalars itself.
    """
    import ctypes

    function = getattr(_open(library, entry), f"{entry}_packed", None)
    if function is not None:
        function.argtypes = (ctypes.c_char_p,)
        function.restype = ctypes.c_int32
    return function


def load(path: str, entry: str, parameters: str) -> Callable[..., None]:
    """Returns the kernel ``entry`` of the shared object at ``path``.

    Args:
        parameters: one letter for each parameter: ``P`` pointer (an int, as ``Tensor.data_ptr()`` gives), ``q`` int64,
            ``i`` int32, ``d`` double, ``f`` float.

    Returns:
        a function of these arguments; it releases the GIL while the kernel runs.

    Raises:
        CacheError: the file does not load, or lacks the entry.
    """
    packed = load_packed(path, entry)
    return _unpacked_call(path, entry, parameters) if packed is None else _packed_call(packed, packer(parameters))


def _packed_call(packed: Callable[[bytes], int], pack: Callable[..., bytes]) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        if packed(pack(*arguments)) == NO_MEMORY:
            raise MemoryError("a kernel's scratch memory cannot be allocated")

    return call


def _unpacked_call(path: str, entry: str, parameters: str) -> Callable[..., None]:
    import ctypes

    types = {"P": ctypes.c_void_p, "q": ctypes.c_int64, "d": ctypes.c_double, "i": ctypes.c_int32, "f": ctypes.c_float}
    function = getattr(_open(path, entry), entry, None)
    if function is None:
        raise CacheError(f"{path} has no entry {entry!r}; delete this store entry, and it is compiled again")
    function.argtypes = tuple(types[letter] for letter in parameters)
    function.restype = None
    return function


def _open(shared_object: str | bytes, entry: str) -> Any:
    import ctypes
    import os

    try:
        with library.file_of(shared_object, entry) as path:
            return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        name = shared_object if isinstance(shared_object, str) else entry
        raise CacheError(
            f"cannot load the kernel {name}: {error}. It was built for another system or is damaged; "
            "`jitgen cache verify` finds such entries, and a deleted one is compiled again"
        ) from None


_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@functools.cache
def last_level_cache() -> int:
    """Returns the size in bytes of the largest cache of a core, as Linux reports it, else 32 MiB.

    Kernels that move more bytes write their results with non-temporal stores, which bypass the caches.
    """
    return max(_caches_of_core(), default=32 * 2**20)


def _caches_of_core() -> Iterator[int]:
    import os

    with contextlib.suppress(OSError):
        for entry in os.listdir(_CACHES):
            with contextlib.suppress(OSError, ValueError), open(f"{_CACHES}/{entry}/size") as file:
                size = file.read().strip()
                yield int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)


THREADS_BYTES = 256 * 2**10
THREADS_FLOPS = 2**19
"""Bytes moved and floating-point operations from which on a kernel runs on several threads."""


def worth_threads(moved: int, flops: int) -> bool:
    """Returns whether a kernel that moves ``moved`` bytes and does ``flops`` operations runs faster on several threads.

    Starting a parallel region takes about 20 us.
    """
    return moved >= THREADS_BYTES or flops >= THREADS_FLOPS
