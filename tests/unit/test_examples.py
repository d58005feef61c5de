"""Every example runs as its head says, in a directory of its own; the demo with an empty store, and again."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from jitgen import _data, settings
from jitgen.compilers import host

CHECKOUT = _data.checkout_directory()
LADDER = sorted((CHECKOUT / "examples").glob("[0-9]*")) if CHECKOUT else []
EXAMPLES = [path for path in LADDER if path.suffix == ".py"]  # test_minilm.py runs the one that is a directory
pytestmark = pytest.mark.skipif(not EXAMPLES or host.toolchain() is None, reason="needs the checkout and a compiler")


def run(example: Path, directory: Path, *arguments: str, store: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in settings.SETTINGS}
    environment |= {"JITGEN_CACHE_DIR": str(store), "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, str(example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_it_runs(example: Path, tmp_path: Path, session_store: Path) -> None:
    assert run(example, tmp_path, store=session_store)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.quick(where=lambda example: example.name[:2] in ("03", "06", "09"))
def test_it_runs_here(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported torch already."""
    for name in settings.SETTINGS.keys() - {"JITGEN_CACHE_DIR", "JITGEN_CXXFLAGS"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.quick(where=lambda options: "--steps 3" in options)
@pytest.mark.parametrize(
    "options", ["--steps 3 --width 32 --layers 1 --batch 2 --sample 5", "--steps 60 --batch 4 --sample 50"]
)
def test_training_by_each_way_has_the_losses_of_eager_torch(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(CHECKOUT / "examples" / "15_train_char_gpt.py"))  # type: ignore[operator]
    runs = example["main"](options.split())
    for way in ("jit", "compile"):
        assert runs[way].losses[:3] == pytest.approx(runs["eager"].losses[:3], rel=1e-4)
        assert runs[way].final == pytest.approx(runs["eager"].final, rel=0.02)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_its_head_says_how_to_run_it_and_what_it_shows(example: Path) -> None:
    head = ast.get_docstring(ast.parse(example.read_text())) or ""
    assert f"python examples/{example.name}" in head
    assert "\nShows: " in head


def test_they_are_a_ladder() -> None:
    numbers = [path.name[:2] for path in LADDER]
    assert numbers == sorted(set(numbers))
    assert all(number.isdigit() for number in numbers)


@pytest.mark.slow
def test_the_second_run_of_the_demo_compiles_nothing(tmp_path: Path) -> None:
    first = run(EXAMPLES[0], tmp_path, store=tmp_path / "store")
    assert "2 kernels compiled" in first
    second = run(EXAMPLES[0], tmp_path, store=tmp_path / "store")
    assert "Nothing was compiled" in second
    assert second.count("came from the store") >= 2
    assert "compiled by" not in second


def test_the_plot(tmp_path: Path, session_store: Path) -> None:
    pytest.importorskip("matplotlib")
    example = next(path for path in EXAMPLES if "repeated_multiply" in path.name)
    run(example, tmp_path, "plot.png", store=session_store)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
