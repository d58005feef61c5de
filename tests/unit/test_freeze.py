"""What is told of a miss: how it differs from what the store has, and what builds it; and ``jitgen.freeze``."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import jitgen
from jitgen import misses, settings
from jitgen.cli.group import jitgen as command
from jitgen.compilers import host
from jitgen.store import Store, layout
from tests import fresh

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler"),
    pytest.mark.usefixtures("own_store"),
]


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    misses._described.clear()
    yield
    jitgen.freeze(None)


def gate(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.relu(x) * scale


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) @ w


def test_what_is_compiled_after_freeze_is_an_error_in_every_thread() -> None:
    served = jitgen.jit(gate)
    x = torch.randn(3, 5)
    served(x, 2.0)
    jitgen.freeze()
    assert torch.equal(jitgen.jit(gate)(x, 3.0), gate(x, 3.0)), "the store has it"
    failures: list[BaseException] = []

    def call() -> None:
        try:
            served(x.double(), 2.0)
        except jitgen.CacheMissError as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(failures) == 1
    jitgen.freeze(None)
    assert torch.equal(served(x.double(), 2.0), gate(x.double(), 2.0))


def test_or_a_warning() -> None:
    served = jitgen.jit(gate)
    jitgen.freeze("warn")
    x = torch.randn(3, 5)
    with pytest.warns(jitgen.CompileWarning, match="jitgen prewarm"):
        assert torch.equal(served(x, 2.0), gate(x, 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served(x, 3.0)
        jitgen.jit(gate)(x, 2.0)
    with pytest.raises(ValueError, match="'error', 'warn' or None"):
        jitgen.freeze("perhaps")
    assert settings.frozen() == "warn"


def test_the_command_that_a_miss_names_builds_it() -> None:
    served = jitgen.jit(gate)
    with jitgen.strict():
        for dtype in (torch.float32, torch.float64):
            with pytest.raises(jitgen.CacheMissError) as missed:
                served(torch.randn(3, 5, dtype=dtype), 2.0)
    line = next(line for line in str(missed.value).splitlines() if "to build it" in line)
    words = shlex.split(line.partition(": ")[2])
    assert words[:2] == ["jitgen", "prewarm"]
    assert len(json.loads(Path(words[2]).read_text())["entries"]) == 2, "all that this process missed"
    done = CliRunner().invoke(command, [*words[1:], "--jobs", "1"])
    assert done.exit_code == 0, done.output
    with jitgen.strict():
        for dtype in (torch.float32, torch.float64):
            served(torch.randn(3, 5, dtype=dtype), 2.0)


ABSENT = """
import os, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("filelock", "platformdirs", "jinja2", "click", "rich", "pygments", "backports"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import torch, jitgen
from jitgen.store import layout
layout.is_writable = lambda path: os.environ["WRITABLE"] == "1" and path.name != "store"  # not that of the checkout
@jitgen.jit
def gate(x, scale): return torch.relu(x) * scale
try:
    gate(torch.randn(3, 5), 2.0)
except jitgen.CacheMissError as error:
    print(error)
"""


@pytest.mark.parametrize("directory", [True, False], ids=["directory", "the user's"])
@pytest.mark.parametrize("writable", ["0", "1"])
def test_a_miss_is_one_where_packages_are_absent(directory: bool, writable: str, tmp_path: Path) -> None:
    """A process that only serves needs none of them, and leaves nothing in the temporary directory."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    variables = {**os.environ, "JITGEN_STRICT": "1", "WRITABLE": writable, "TMPDIR": str(temporary)}
    variables.pop("JITGEN_CACHE_DIR")
    variables |= {"JITGEN_CACHE_DIR": str(tmp_path / "kernels")} if directory else {"HOME": str(tmp_path)}
    done = fresh.run(ABSENT, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stderr
    assert "nothing is compiled in strict mode" in done.stdout
    assert "JITGEN_RECORD=specs.json, and then jitgen prewarm specs.json --target " in done.stdout
    assert ("platformdirs" in done.stderr) != directory
    assert not list(temporary.iterdir())


def test_misses_are_kept_in_the_store_for_a_day(
    own_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    manifest = layout.missed_path(own_store)

    def count(x: torch.Tensor) -> int:
        with jitgen.strict(), pytest.raises(jitgen.CacheMissError, match=re.escape(str(manifest))):
            jitgen.jit(gate)(x, 2.0)
        return len(json.loads(manifest.read_text())["entries"])

    assert count(torch.randn(3, 5)) == 1
    assert count(torch.randn(3, 5).double()) == 2
    os.utime(manifest, (0, 0))
    assert count(torch.randn(3, 5).int()) == 1
    assert not list(temporary.iterdir())
    Store(own_store).clear()
    assert not manifest.exists()


def missed(function: object, *arguments: object) -> str:
    with jitgen.strict(), pytest.raises(jitgen.CacheMissError) as error:
        jitgen.jit(function)(*arguments)  # type: ignore[arg-type,operator]
    return str(error.value)


def test_a_miss_says_how_the_nearest_entry_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(5, 64), torch.randn(64, 32)
    assert "has no usable entry of a function called product" in missed(product, x, w)
    misses._described.clear()
    jitgen.jit(product)(x, w)
    assert "it takes (float32" in missed(product, x.double(), w.double())
    assert "another bucket: its schedule is" in missed(product, torch.randn(500, 64), w)
    assert "strides or alignment" in missed(product, torch.randn(64, 5).t(), w)

    def changed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) @ w

    changed.__name__ = "product"
    assert "the function computes something else" in missed(changed, x, w)
    monkeypatch.setattr("jitgen.lowering.code_digest", lambda: "of another version")
    text = missed(product, x, w)
    assert "another version of jitgen's code" in text
    assert ";" not in text.splitlines()[1], "and that is the only difference"


def test_a_program_that_misses_at_every_call_searches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    monkeypatch.setattr(misses, "nearest", lambda *arguments: searched.append(arguments))
    served = jitgen.jit(gate)
    with jitgen.strict():
        for _ in range(3):
            with pytest.raises(jitgen.CacheMissError):
                served(torch.randn(3, 5), 2.0)
    assert len(searched) == 1


def test_a_miss_is_logged(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", "1")
    jitgen.jit(gate)(torch.randn(3, 5), 2.0)
    jitgen.jit(gate)(torch.randn(3, 5).double(), 2.0)
    assert "jitgen: a miss: gate: no kernel" in capfd.readouterr().err


def test_sources_are_shown_of_kernels_that_are_compiled_and_of_those_in_the_store(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITGEN_DEBUG", "3")
    for message in ("jitgen: compiled gate (jitgen_elementwise_", "jitgen: from the store: gate"):
        jitgen.jit(gate)(torch.randn(3, 5), 2.0)
        shown = capfd.readouterr().err
        assert message in shown
        assert shown.count(": template elementwise/") == 1


def why(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, ["cache", "why", *arguments])
    return done.exit_code, done.stdout


def test_cache_why_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model_of_why.py"
    file.write_text("import torch\ndef gate(x, s):\n    return torch.relu(x) * s\n")
    call = [f"{file}:gate", "--arg", "f32[M,64]", "--arg", "2.0"]
    code, text = why(*call)
    assert (code, "to build it: jitgen source" in text) == (1, True)
    words = shlex.split(next(line for line in text.splitlines() if "to build it" in line).partition(": ")[2])
    assert CliRunner().invoke(command, words[1:]).exit_code == 0
    code, text = why(*call)
    assert (code, text.startswith("present: plan")) == (0, True)
    code, text = why(*call, "--target", "sm_90a", "--json")
    [finding] = json.loads(text)
    assert (code, finding["state"]) == (1, "absent")
    assert "and this is for sm_90a" in finding["detail"]
    assert "s0_0 is the size of dimension 0 of tensor 0" in finding["detail"]
    done = CliRunner().invoke(command, ["cache", "why", call[0], "--arg", "f32[M,64]"])
    assert (done.exit_code, "missing a required argument: 's'" in done.stderr) == (2, True)


MODULES = """
import sys
import torch
before = set(sys.modules)
import jitgen
imported = [name for name in sys.modules if name.startswith("jitgen") and name not in before]
jitgen.jit
used = [name for name in sys.modules if name.startswith("jitgen") and name not in before]
print(len(imported), len(used), [name for name in used if name.startswith("jitgen.deploy.") or "schema" in name])
"""


def test_import_jitgen_imports_little() -> None:
    """Modules are counted, where milliseconds would depend on the machine: 143 took 142 ms, and 178 took 190; there are
    150. The families are packages alone, 18 modules; what they have is imported when it is called (``deferred``).
    Operators that torch must know to run what it has exported are five, and what a call changes outside of its function
    is three. The tracer and its rows wait for the first trace, the partition for the first graph. `import jitgen` alone
    has what must be there before a fork (``forks``) and before a weight is unpickled."""
    done = fresh.run(MODULES)
    imported, used, deploy = done.stdout.strip().split(" ", 2)
    assert int(imported) <= 8
    assert int(used) <= 150
    assert deploy == "['jitgen.deploy.record']"


@pytest.mark.parametrize("name", ["", "bench", "cache", "doctor", "prewarm", "source"])
def test_help_does_not_wait_for_torch(name: str) -> None:
    arguments = [*([name] if name else []), "--help"]
    program = (
        f"import sys, runpy; sys.orig_argv = ['python', '-m', 'jitgen']; sys.argv = ['-m', *{arguments!r}]\n"
        "try:\n    import jitgen.cli; jitgen.cli.main()\n"
        "finally:\n    print(sorted({'torch', 'rich', 'triton'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Usage: jitgen" in done.stdout
    assert done.stderr.strip() == "[]"
