"""Loads a kernel that was built as a torch operator.

Loading the library registers the operator; no compiler is needed. Neighbours: ``compilers/load_inline.py`` built the
library, the store holds it, and ``compilers/torch_operator.hpp`` documents the operator's arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from jitgen.errors import CacheError
from jitgen.runtime import library


def load(content: bytes | str, operator: str) -> Callable[..., None]:
    """Returns ``torch.ops.jitgen.<operator>``, which the library registers unless this process already has it.

    Args:
        content: the bytes of the library, or its path.

    Raises:
        CacheError: the library does not load, or registers another operator.
    """
    if not hasattr(torch.ops.jitgen, operator):
        try:
            with library.file_of(content, operator) as path:
                ctypes.CDLL(path)  # torch.ops.load_library would resolve the path, which memory files have none of
        except OSError as error:
            raise CacheError(
                f"cannot load the operator library of jitgen::{operator}: {error}. It needs the torch that it was "
                "built with, or a later one; a deleted store entry is compiled again"
            ) from None
    if not hasattr(torch.ops.jitgen, operator):
        raise CacheError(
            f"the library does not register jitgen::{operator}; delete this store entry, it is compiled again"
        )
    return getattr(torch.ops.jitgen, operator).default
