"""What ``examples/container`` does, in two environments at different paths: built here, served strictly there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jitgen import _data, settings
from jitgen.compilers import host

pytest.importorskip("build")
CHECKOUT = _data.checkout_directory()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHECKOUT is None or host.toolchain() is None, reason="needs the checkout and a compiler"),
]

ABSENT = ("triton", "jinja2", "click", "rich", "filelock", "platformdirs", "cutlass_library")
BLOCKER = f"""
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: it is not in this image", name=name)


sys.meta_path.insert(0, Absent())
"""


def environment(directory: Path, *, with_tools: bool, **settings_of_it: str) -> dict[str, str]:
    """Variables of a container whose root is ``directory``: its own home, packages and, with tools, a PATH."""
    kept = {name: value for name, value in os.environ.items() if name not in settings.SETTINGS and name != "CXX"}
    kept |= {"HOME": str(directory), "PYTHONPATH": str(directory / "packages"), "XDG_CACHE_HOME": f"{directory}/cache"}
    return kept | ({} if with_tools else {"PATH": str(directory / "nothing")}) | settings_of_it


def run(directory: Path, variables: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=directory, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_built_here_and_served_there(tmp_path: Path) -> None:
    assert CHECKOUT is not None
    builder, server = tmp_path / "builder", tmp_path / "far" / "away" / "server"
    wheels = tmp_path / "wheels"
    run(tmp_path, dict(os.environ), "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(CHECKOUT))
    for root in (builder, server):
        root.mkdir(parents=True)
        wheel, packages = str(next(wheels.iterdir())), str(root / "packages")
        install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", packages, wheel]
        run(tmp_path, dict(os.environ), *install)
        (root / "serve.py").write_text((CHECKOUT / "examples" / "container" / "serve.py").read_text())
    (server / "packages" / "sitecustomize.py").write_text(BLOCKER)

    recording = environment(builder, with_tools=True, JITGEN_RECORD="specs.json", JITGEN_CACHE_DIR="recording")
    target = "x86-64-v3" if "x86" in os.uname().machine else "cpu"
    recording |= {"JITGEN_CPU_TARGET": target} if target != "cpu" else {}
    assert "0 kernels" not in run(builder, recording, "serve.py")
    building = environment(builder, with_tools=True, JITGEN_CACHE_DIR="kernels")
    run(builder, building, "-m", "jitgen", "prewarm", "specs.json", "--target", target)
    run(builder, building, "-m", "jitgen", "cache", "verify")
    run(builder, building, "-m", "jitgen", "cache", "export", str(server / "kernels.zip"))

    serving = environment(
        server,
        with_tools=False,
        JITGEN_STRICT="1",
        JITGEN_CACHE_PATH="kernels.zip",
        JITGEN_CACHE_DIR=str(server / "none"),
        JITGEN_CXX="/nonexistent/g++",
        **({"JITGEN_CPU_TARGET": target} if target != "cpu" else {}),
    )
    for absent in ABSENT:
        done = subprocess.run([sys.executable, "-c", f"import {absent}"], env=serving, capture_output=True)
        assert done.returncode, f"{absent} is there"
    served = run(server, serving, "serve.py")
    assert "0 kernels compiled; imported: none" in served
    differences = [float(found) for found in re.findall(r"eager torch (\S+)", served)]
    assert len(differences) == 3
    # Values of magnitude below 8 in bfloat16, whose last place is 2^-5 there; swiglu's rounding comes before a sum.
    assert max(differences) <= 2 * 2**-5
    assert not (server / "none").exists()


def test_the_containerfile_does_what_the_test_does() -> None:
    assert CHECKOUT is not None
    text = (CHECKOUT / "examples" / "container" / "Containerfile").read_text()
    for step in ("JITGEN_RECORD=", "jitgen prewarm", "jitgen cache verify", "jitgen cache export", "JITGEN_STRICT=1"):
        assert step in text
