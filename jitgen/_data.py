"""Locates jitgen's own data files: templates, shipped manifests, measured choices.

A source checkout's top-level ``templates/`` and ``cache/`` come first: an editable install would otherwise serve the
copies that were made when it was installed. In a wheel they lie under ``jitgen/_data``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jitgen import settings


@cache
def checkout_directory() -> Path | None:
    """Returns the source checkout that this package is imported from, if it is one."""
    checkout = Path(__file__).resolve().parents[1]
    is_checkout = (checkout / "pyproject.toml").is_file() and (checkout / "templates").is_dir()
    return checkout if is_checkout else None


def templates_directory() -> Path:
    """Returns the directory of templates: ``JITGEN_TEMPLATES``, else the checkout's own, else the wheel's."""
    chosen = settings.get("JITGEN_TEMPLATES")
    return Path(chosen) if chosen else data_directory("templates")


def data_directory(name: str) -> Path:
    """Returns the directory of ``"templates"``, ``"cache/manifests"`` or ``"cache/tuned"``."""
    return (checkout_directory() or Path(__file__).resolve().parent / "_data") / name
