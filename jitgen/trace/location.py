"""Locates the user's line that called a torch function, for error messages and for ``Node.location``."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

import torch

_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_REAL_TORCH = str(Path(torch.__file__).resolve().parent) + "/"
_TRITON = "/triton/runtime/"
"""What the paths of Triton's launchers have in them."""
_GENERATED = "<jitgen "
"""The start of the file names of functions that jitgen generates (``codegen/python.py``)."""


def user_location() -> str | None:
    """Returns ``"model.py:12"`` for the innermost frame that is neither jitgen's, torch's nor Triton's."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def raised_at(error: BaseException) -> str | None:
    """Returns ``"model.py:12"`` for the innermost such frame in which ``error`` was raised."""
    location, entry = None, error.__traceback__
    while entry is not None:
        if _is_users(entry.tb_frame):
            location = f"{entry.tb_frame.f_code.co_filename}:{entry.tb_lineno}"
        entry = entry.tb_next
    return location


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not (name.startswith((_OURS, _TORCH, _REAL_TORCH, _GENERATED, "<frozen")) or _TRITON in name)


def quote(location: str | None) -> str:
    """Quotes ``location`` for an error message, with the text of the line if its file can be read."""
    if location is None:
        return ""
    name, _, line = location.rpartition(":")
    text = linecache.getline(name, int(line)).strip()
    return f"\n  at {location}" + (f"\n    {text}" if text else "")
