"""Tells whether something observes torch's calls, and so must see one operator where kernels run: dispatch modes, and
``torch.jit.trace``.

Launches call no function of torch's that a mode would see. ``make_fx`` would record their results as constants, and a
counter of operations would miss them. So a call under a mode is the operator ``jitgen::call`` (``traced_call.py``).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from jitgen.errors import UnsupportedError

modes = torch._C._len_torch_dispatch_stack
"""Returns how many dispatch modes are active."""
is_recording = torch._C._is_tracing
"""Returns whether ``torch.jit.trace`` records."""


def are_there() -> bool:
    """Returns whether anyone observes."""
    return bool(modes() or is_recording())


def refuse_recording(name: str) -> None:
    """Raises UnsupportedError within ``torch.jit.trace``, whose graphs take no list of tensors of symbolic sizes."""
    if is_recording():
        raise UnsupportedError(
            f"{name}: torch.jit.trace would record the result of this call as a constant; use torch.export.export, or "
            "trace the function's .reference"
        )


def refuse_proxies(name: str) -> None:
    """Raises UnsupportedError where a call that cannot be an operator would be recorded as a constant."""
    refuse_recording(name)
    tensors: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if modes() and tensors is not None and tensors.get_proxy_mode() is not None:
        raise UnsupportedError(
            f"{name}: within make_fx neither a plan nor a call with out= can be recorded; call the function itself"
        )
