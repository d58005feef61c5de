"""What the tests of the store put into it, and how they harm it."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from jitgen.spec import Artifact
from jitgen.store import Store

KEY = "ab" + "0" * 62
PLAN_KEY = "cd" + "1" * 62
ARTIFACT = Artifact(
    KEY,
    {"kernel.cu": b"__global__ void double_square() {}\n", "kernel.cubin": bytes(range(256)) * 40},
    "kernel.cubin",
    {"entry": "double_square", "shared_bytes": 1024, "cluster": (1, 1, 1)},
)
PLAN = {"artifacts": [KEY], "toolchains": ["nvrtc 13.3"], "kernels": [{"grid": ["ceil(M / 4)", 1, 1]}]}


def filled(store: Store) -> Store:
    """The store, with one artifact and the plan that names it."""
    store.put_artifact(ARTIFACT)
    store.put_plan(PLAN_KEY, PLAN)
    return store


def numbered_key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def make_old(path: Path, seconds: float = 7200.0) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    """Change one bit and no size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
