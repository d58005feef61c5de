"""Reports with ``jitgen doctor`` what this machine can run and compile, what is missing, and how to get it.

Every check is a small function that yields rows. A check that raises becomes a row itself, because people run doctor
when something is broken.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from jitgen import settings
from jitgen.cli.show import in_units, json_option, print_json, print_table

OK, MISSING, NOTE = "ok", "missing", "note"


@dataclass(frozen=True)
class Row:
    """Reports one finding. ``state`` is ``ok``, ``missing`` (``remedy`` then says how to get it) or ``note``
    (information)."""

    topic: str
    name: str
    state: str
    value: str
    remedy: str = ""


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """What this machine can run and compile, and how to get what is missing."""
    rows = examine()
    abilities = {"runs": _able(rows, "run"), "compiles": _able(rows, "compile")}
    if as_json:
        print_json({**abilities, "checks": [asdict(row) for row in rows]})
        return
    print_table(
        ("topic", "what", "", "found", "how to get it"),
        [(row.topic, row.name, row.state, row.value, row.remedy) for row in rows],
    )
    for verb, names in abilities.items():
        click.echo(f"{verb}: {', '.join(names) or 'nothing'}")


def examine() -> list[Row]:
    """Returns the rows of all checks, in the order in which they are printed."""
    rows: list[Row] = []
    for topic, check in CHECKS:
        try:
            rows.extend(check())
        except Exception as error:  # a broken installation must not hide the other rows
            name = check.__name__.strip("_").replace("_", " ")
            rows.append(Row(topic, name, MISSING, f"{type(error).__name__}: {error}", "see the message"))
    return rows


def _able(rows: list[Row], topic: str) -> list[str]:
    """Lists what this machine is able to do of ``topic``, ``"run"`` or ``"compile"``."""
    return [f"{row.name} ({row.value})" for row in rows if row.topic == topic and row.state == OK]


# ------------------------------------------------------------------------------------------------------------ run


def _python() -> Iterator[Row]:
    yield Row("python", platform.python_implementation(), OK, f"{platform.python_version()} on {platform.platform()}")


def _torch() -> Iterator[Row]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    yield Row("python", "torch", OK, f"{torch.__version__}, {build}")


def _gpus() -> Iterator[Row]:
    import torch

    if not torch.cuda.is_available():
        remedy = "needs an NVIDIA GPU with its driver"
        if torch.version.cuda is None:
            remedy += " and a CUDA build of torch (pytorch.org)"
        yield Row("run", "cuda", MISSING, "no CUDA device; kernels for one can still be compiled", remedy)
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{in_units(gpu.total_memory)}, {gpu.multi_processor_count} multiprocessors"
        yield Row("run", f"cuda:{index}", OK, f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {memory}")


def _driver_bindings() -> Iterator[Row]:
    name, version = "cuda-bindings (launches GPU kernels)", _distribution("cuda-bindings")
    yield _present_or("python", name, version, "pip install cuda-python")


def _cpu() -> Iterator[Row]:
    import torch

    from jitgen.spec import host_target

    yield Row("run", "cpu", OK, f"{host_target()}, {torch.get_num_threads()} threads of {os.cpu_count()}")


def _interpreter() -> Iterator[Row]:
    if settings.interpreting_triton():
        yield Row("run", "triton interpreter", NOTE, "TRITON_INTERPRET=1: Triton kernels run on the CPU, slowly")


# -------------------------------------------------------------------------------------------------------- compile


def _host_compiler() -> Iterator[Row]:
    from jitgen.compilers import host

    remedy = "install g++ or clang++ (apt install g++), or set JITGEN_CXX"
    yield _present_or("compile", "cpp", host.toolchain(), remedy)


def _triton() -> Iterator[Row]:
    from jitgen.compilers import triton

    yield _present_or("compile", "triton", triton.toolchain(), "pip install triton")


def _nvrtc() -> Iterator[Row]:
    from jitgen.compilers import nvrtc

    yield _present_or("compile", "cuda", nvrtc.toolchain(), nvrtc.missing() or "")
    for package, name in (("cuda", "CUDA and CCCL headers"), ("nvidia-cutlass", "CUTLASS headers")):
        headers = nvrtc.find_headers(package)
        versions = ", ".join(" ".join(pair) for pair in headers.versions) if headers else None
        yield _present_or("headers", name, versions, nvrtc.missing((package,)) or "")


def _load_inline() -> Iterator[Row]:
    from torch.utils import cpp_extension

    nvcc = find_nvcc(cpp_extension.CUDA_HOME)
    purpose = "only compiler='load_inline' on GPUs needs it"
    if nvcc is None:
        yield Row("tools", "nvcc", MISSING, "not found", f"install a CUDA toolkit and set CUDA_HOME; {purpose}")
    else:
        home = Path(os.path.realpath(nvcc)).parents[1]
        named = f"={home}" if (home / "include" / "cuda_runtime.h").is_file() else " to its toolkit"  # nvcc is a script
        hint = "" if cpp_extension.CUDA_HOME else f"torch's extensions do not use it: set CUDA_HOME{named}; {purpose}"
        yield Row("tools", "nvcc", OK, nvcc, hint)
    ninja = _distribution("ninja") if cpp_extension.is_ninja_available() else None
    remedy = "pip install ninja; only compiler='load_inline' needs it"
    yield _present_or("tools", "ninja", ninja or shutil.which("ninja"), remedy)


def find_nvcc(home: str | None, usual: Path = Path("/usr/local")) -> str | None:
    """Finds an ``nvcc``: of ``home``, of CUDA_HOME or CUDA_PATH, on PATH, of a toolkit below ``usual``, or of a
    package.

    Args:
        home: where torch looks, which is nowhere if it is built without CUDA.
    """
    homes = [home_ for home_ in (home, settings.cuda_home()) if home_]
    toolkits = [usual / "cuda", *sorted(usual.glob("cuda-*"), key=_version, reverse=True)]
    packages = [Path(entry, "nvidia", name) for entry in sys.path for name in ("cu13", "cuda_nvcc")]
    return (
        shutil.which("nvcc", path=_path_of(*map(Path, homes)))
        or shutil.which("nvcc")
        or shutil.which("nvcc", path=_path_of(*toolkits, *packages))
    )


def _path_of(*homes: Path) -> str:
    """Returns a search path for toolkits' programs; without any, one that leads nowhere."""
    return os.pathsep.join(str(home / "bin") for home in homes) or os.devnull


def _version(toolkit: Path) -> list[int]:
    """Returns the version in the name of a toolkit's directory, such as cuda-13.0."""
    return [int(number) for number in re.findall(r"\d+", toolkit.name)]


def _disassembler() -> Iterator[Row]:
    from jitgen.compilers import disassemble

    remedy = "comes with Triton (pip install triton) and with the CUDA toolkit; only exe.asm['sass'] needs it"
    yield _present_or("tools", "cuobjdump", disassemble.find_tool(), remedy)


# ---------------------------------------------------------------------------------------------- store and settings


def _store() -> Iterator[Row]:
    from jitgen.store import Store, StoredArtifact
    from jitgen.store.layout import nearest_ancestor

    store = Store.open()
    entries = [entry for entry in store.entries() if not entry.layer]
    size = in_units(sum(entry.size for entry in entries))
    yield Row("store", str(store.root), OK, f"{len(entries)} entries, {size}")
    try:  # in /proc, say, permissions do not tell
        os.rmdir(tempfile.mkdtemp(prefix=".doctor-", dir=nearest_ancestor(store.root)))
    except OSError as error:
        problem = f"the store cannot be written: {error.strerror}"
        yield Row("store", "writing", MISSING, problem, "set JITGEN_CACHE_DIR to a place of yours")
    for layer in store.layers:
        state, value, remedy = OK, "a read-only layer", ""
        if not os.path.lexists(layer):
            state, value, remedy = MISSING, "there is no such directory or bundle", "correct JITGEN_CACHE_PATH"
        elif not os.access(layer, os.R_OK | (os.X_OK if layer.is_dir() else 0)):
            state, value, remedy = MISSING, "this user may not read it", f"chmod -R a+rX {layer}, by its owner"
        yield Row("store", str(layer), state, value, remedy)
    artifacts = (store.peek(entry) for entry in store.entries() if entry.kind == "artifact")
    built = Counter(str(a.meta.get("toolchain", "unknown")) for a in artifacts if isinstance(a, StoredArtifact))
    for toolchain, count in built.most_common():
        yield Row("store", "built by", NOTE, f"{toolchain}: {count} artifacts")


def _settings() -> Iterator[Row]:
    for name, setting in settings.SETTINGS.items():
        try:
            value: Any = settings.get(name)
        except ValueError as error:
            yield Row("settings", name, MISSING, str(error), f"correct or unset {name}")
            continue
        if value != setting.default:
            yield Row("settings", name, NOTE, str(value), setting.doc)


CHECKS: tuple[tuple[str, Callable[[], Iterator[Row]]], ...] = (
    ("python", _python),
    ("python", _torch),
    ("python", _driver_bindings),
    ("run", _gpus),
    ("run", _cpu),
    ("run", _interpreter),
    ("compile", _host_compiler),
    ("compile", _triton),
    ("compile", _nvrtc),
    ("tools", _load_inline),
    ("tools", _disassembler),
    ("store", _store),
    ("settings", _settings),
)
"""The checks, each with the topic of the row that is printed if the check itself fails."""


def _present_or(topic: str, name: str, value: object, remedy: str) -> Row:
    """Makes a row that is ``ok`` if ``value`` is truthy, and otherwise ``missing``."""
    return Row(topic, name, OK, str(value)) if value else Row(topic, name, MISSING, "not found", remedy)


def _distribution(name: str) -> str | None:
    """Returns the version of an installed distribution; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
