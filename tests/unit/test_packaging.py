"""The wheel: pure Python, with templates and cache data inside, at home in a directory that has no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jitgen import _data, settings
from jitgen._version import __version__
from jitgen.compilers import host

pytest.importorskip("build")
pytest.importorskip("hatchling")

CHECKOUT = _data.checkout_directory()
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="needs the source checkout")


def files_under(directory: Path) -> set[str]:
    """Relative paths of what a wheel is to carry of ``directory``."""
    paths = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(directory).as_posix() for path in paths}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(CHECKOUT)]
    built = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but the wheel in it; its dependencies are this environment's."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True)
    return target


def run_installed(installed: Path, directory: Path, *arguments: str) -> str:
    """What Python prints when it runs ``arguments`` in ``directory`` with the installed wheel and no settings."""
    environment = {name: value for name, value in os.environ.items() if name not in settings.SETTINGS}
    environment |= {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(directory / "cache"), "HOME": str(directory)}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name == f"jitgen-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"jitgen-{__version__}.dist-info/METADATA").decode()
        entry_points = archive.read(f"jitgen-{__version__}.dist-info/entry_points.txt").decode()
    assert not [name for name in names if name.endswith((".so", ".pyd", ".cubin"))]
    assert {name.partition("/")[0] for name in names} == {"jitgen", f"jitgen-{__version__}.dist-info"}
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert "jitgen = jitgen.cli:main" in entry_points


@pytest.mark.parametrize("name", ["templates", "cache/manifests", "cache/tuned"])
def test_the_wheel_carries_the_data(wheel: Path, name: str) -> None:
    assert CHECKOUT is not None
    prefix = f"jitgen/_data/{name}/"
    with zipfile.ZipFile(wheel) as archive:
        carried = {member.removeprefix(prefix) for member in archive.namelist() if member.startswith(prefix)}
    assert carried
    assert carried == files_under(CHECKOUT / name)


def test_nothing_of_a_store_is_shipped(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "/store/v" in name]


@pytest.mark.slow
def test_the_installed_wheel_finds_its_data(installed: Path, tmp_path: Path) -> None:
    script = "from jitgen import _data\nprint(_data.templates_directory(), _data.data_directory('cache/tuned'))\n"
    templates, tuned = map(Path, run_installed(installed, tmp_path, "-c", script).split())
    assert templates == installed / "jitgen" / "_data" / "templates"
    assert CHECKOUT is not None
    assert files_under(templates) == files_under(CHECKOUT / "templates")
    assert tuned.is_dir()


@pytest.mark.slow
def test_the_installed_wheel_has_the_command(installed: Path, tmp_path: Path) -> None:
    printed = run_installed(installed, tmp_path, "-m", "jitgen", "cache", "path").strip()
    if sys.platform == "linux":
        assert Path(printed) == tmp_path / "cache" / "jitgen"
    assert __version__ in run_installed(installed, tmp_path, "-m", "jitgen", "--version")


def test_a_checkout_uses_its_own_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert CHECKOUT is not None
    monkeypatch.delenv("JITGEN_TEMPLATES", raising=False)
    assert _data.templates_directory() == CHECKOUT / "templates"
    assert _data.data_directory("cache/manifests") == CHECKOUT / "cache" / "manifests"
    monkeypatch.setenv("JITGEN_TEMPLATES", str(tmp_path))
    assert _data.templates_directory() == tmp_path


KERNEL = """
import sys
import torch
import jitgen

compiled = []
jitgen.on_compile(compiled.append)

@jitgen.jit
def gate(x, y):
    return torch.relu(x) * y

x, y = torch.randn(5, 33), torch.randn(33)
torch.testing.assert_close(gate(x, y), torch.relu(x) * y)
print(jitgen.__file__, len(compiled), "jinja2" in sys.modules)
"""


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.slow
def test_the_installed_wheel_runs_a_kernel(installed: Path, tmp_path: Path) -> None:
    place, compiled, rendered = run_installed(installed, tmp_path, "-c", KERNEL).split()
    assert Path(place).is_relative_to(installed)
    assert (compiled, rendered) == ("1", "True")
    assert run_installed(installed, tmp_path, "-c", KERNEL).split()[1:] == ["0", "False"]


@pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler")
@pytest.mark.slow
def test_the_installed_wheel_has_the_checkouts_keys(installed: Path, tmp_path: Path) -> None:
    script = "import jitgen, torch\nprint(jitgen.jit(torch.nn.functional.silu).lower(torch.empty(4)).key)\n"
    theirs = run_installed(installed, tmp_path, "-c", script).strip()
    ours = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=CHECKOUT, check=True
    ).stdout.strip()
    assert theirs == ours
