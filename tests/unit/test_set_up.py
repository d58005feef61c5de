"""What `make` sets up before a verb runs; nothing is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jitgen import _data

CHECKOUT = _data.checkout_directory()
if CHECKOUT is None or shutil.which("make") is None:
    pytest.skip("needs the checkout and make", allow_module_level=True)
INPUTS = ("Makefile", "pyproject.toml", "constraints.txt", "tools/environment.sh")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout as far as set-up reads it."""
    for name in INPUTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(Path(str(CHECKOUT)) / name, tmp_path / name)
    return tmp_path


def make(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make with a compiler that exists, unless ``variables`` say otherwise."""
    ignored = ("PYTHON", "BASE_PYTHON", "TORCH", "MAKECMDGOALS", "MAKEFLAGS", "MAKELEVEL", "JITGEN_CXX")
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    environment |= {"CXX": sys.executable} | variables
    return subprocess.run(["make", *arguments], cwd=directory, env=environment, capture_output=True, text=True)


def installs(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "environment.sh venv" in line]


def set_up(clone: Path, *stamps: str) -> None:
    (clone / ".venv").mkdir(exist_ok=True)
    for name in stamps:
        (clone / ".venv" / f"{name}.stamp").touch()


@pytest.mark.parametrize(("verb", "what"), [("demo", "demo"), ("test", "dev"), ("lint", "dev")])
def test_a_verb_sets_up_what_it_needs(clone: Path, verb: str, what: str) -> None:
    assert installs(make(clone, "-n", verb)) == [f"tools/environment.sh venv .venv {what}"]


def test_it_is_done_once_and_again_where_what_it_read_has_changed(clone: Path) -> None:
    set_up(clone, "demo", "dev")
    assert installs(make(clone, "-n", "demo")) == installs(make(clone, "-n", "test")) == []
    later = (clone / ".venv" / "dev.stamp").stat().st_mtime + 5
    for name in ("pyproject.toml", "constraints.txt"):
        set_up(clone, "demo", "dev")
        os.utime(clone / name, (later, later))
        assert len(installs(make(clone, "-n", "demo"))) == len(installs(make(clone, "-n", "test"))) == 1
        os.utime(clone / name, (0, 0))


def test_what_the_demo_set_up_is_not_all_that_tests_need(clone: Path) -> None:
    set_up(clone, "demo")
    assert installs(make(clone, "-n", "demo")) == []
    assert len(installs(make(clone, "-n", "test"))) == 1


def test_an_environment_of_the_users_is_checked_and_left_alone(clone: Path) -> None:
    done = make(clone, "-n", "test", f"PYTHON={sys.executable}")
    assert installs(done) == []
    assert f"environment.sh check {sys.executable} dev" in done.stdout


def test_what_it_lacks_is_named(clone: Path) -> None:
    bare = clone / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -I -S "$@"\n')  # type: ignore[attr-defined]
    bare.chmod(0o755)
    done = make(clone, "test", f"PYTHON={bare}")
    assert done.returncode != 0
    assert "lacks torch" in done.stderr
    assert f"{bare} -m pip install '.[cuda,dev]'" in done.stderr


@pytest.mark.parametrize("verb", ["demo", "test"])
def test_without_a_compiler_one_line_says_how_to_get_one(clone: Path, verb: str) -> None:
    if verb == "demo" and Path("/dev/nvidiactl").exists():
        pytest.skip("the demo runs on the GPU")
    done = make(clone, verb, CXX="/nonexistent/g++")
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("make"))
    assert "apt install g++" in line
    assert not (clone / ".venv").exists(), "nothing is installed before"


FAKE = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"-m pip"*) echo "Looking in indexes"; echo "ERROR: no route to $PIP_FAILS" >&2; [ -z "$PIP_FAILS" ] ;;
    *--version*) echo "Python 3.11.0" ;;
esac
"""
"""A Python that makes environments of itself, and a pip that fails where PIP_FAILS says at what."""


@pytest.fixture
def fake(clone: Path) -> str:
    path = clone / "fake"
    path.write_text(FAKE)
    path.chmod(0o755)
    return str(path)


def test_set_up_is_a_line_for_each_step(clone: Path, fake: str) -> None:
    done = make(clone, "venv", BASE_PYTHON=fake)
    assert done.returncode == 0, done.stderr
    assert [line.split(" ")[0] for line in done.stdout.splitlines()] == ["==>"] * 4
    assert done.stderr == ""
    assert "Looking in indexes" in (clone / ".venv" / "pip.log").read_text()


def test_another_torch_has_an_environment_of_its_own(clone: Path, fake: str) -> None:
    """It needs other versions of Triton, setuptools and CUDA's packages than those that are pinned."""
    done = make(clone, "venv", "TORCH=2.11.0", BASE_PYTHON=fake)
    assert done.returncode == 0, done.stderr
    pinned = (clone / "constraints.txt").read_text().splitlines()
    constraints = (clone / ".venv-torch-2.11.0" / "constraints.txt").read_text().splitlines()
    others = [line for line in pinned if not line.startswith(("torch", "triton", "setuptools", "cuda-", "nvidia-cuda"))]
    assert constraints == [*others, "torch==2.11.0"]
    assert not (clone / ".venv").exists()
    assert "environment.sh venv .venv-torch-2.11.0 dev" in make(clone, "-Bn", "test", "TORCH=2.11.0").stdout


def test_what_pip_says_is_shown_where_it_fails(clone: Path, fake: str) -> None:
    done = make(clone, "venv", BASE_PYTHON=fake, PIP_FAILS="the index")
    assert done.returncode != 0
    assert "ERROR: no route to the index" in done.stderr
    assert "Set-up could not install torch==2.13.0" in done.stderr
    assert "make venv PYTHON=python3" in done.stderr
    assert not (clone / ".venv" / "dev.stamp").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_checkout_is_said_to_be_one(clone: Path, fake: str) -> None:
    clone.chmod(0o555)
    try:
        done = make(clone, "demo", BASE_PYTHON=fake)
    finally:
        clone.chmod(0o755)
    assert done.returncode != 0
    assert "it is read-only" in done.stderr


def test_an_old_python_is_refused(clone: Path) -> None:
    old = clone / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make(clone, "demo", BASE_PYTHON=str(old))
    assert done.returncode != 0
    assert "Python 3.10 or later" in done.stderr
