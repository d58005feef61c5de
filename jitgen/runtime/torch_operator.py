"""Load a kernel that was built as a torch operator.

Loading the library registers the operator; no compiler is needed. Neighbours: ``compile/load_inline.py`` built the
library, the store holds it, and ``compile/torch_operator.hpp`` documents the operator's arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from jitgen.errors import CacheError


def load(path: str, operator: str) -> Callable[..., None]:
    """``torch.ops.jitgen.<operator>``, registered by the library at ``path`` unless this process already has it.

    Raises:
        CacheError: the library does not load, or registers another operator.
    """
    if not hasattr(torch.ops.jitgen, operator):
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise CacheError(
                f"cannot load the operator library {path}: {error}. It needs the torch it was built with, or a later "
                "one; a deleted store entry is compiled again"
            ) from None
    if not hasattr(torch.ops.jitgen, operator):
        raise CacheError(f"{path} does not register jitgen::{operator}; delete this store entry, it is compiled again")
    return getattr(torch.ops.jitgen, operator).default
