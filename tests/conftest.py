"""What every test shares: the store of their kernels, which of them are slow, and the switch for golden sources."""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import compiled_once, fresh, hangs, interpreter
from tests.covering import covering_array
from tests.hangs import pytest_configure, pytest_runtest_protocol  # noqa: F401  (hooks)

# Before anything imports torch: threads that spin while they wait take the other worker's processors.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests start many processes. Without bytecode each would compile all of jitgen again, in 0.3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

CHECKOUT = Path(__file__).parents[1]
KEPT = CHECKOUT / "cache" / "test-store"
KEPT_BYTES = 1 << 30
"""Of the kept store, at most; what was not used for longest goes first."""

QUICK_SECONDS = 20.0
"""Processor time of a test that is not marked slow, from which on it is warned of. `make test` has 600 s for all, and
says at its end what they took."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden sources instead of comparing")
    hangs.add_option(parser)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that Dynamo compiled before or during a test is seen outside of it."""
    import torch

    importlib.import_module("jitgen.dynamo.registration")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ----------------------------------------------------------------------------------------------------------- the store


@pytest.fixture(scope="session", autouse=True)
def session_store() -> Iterator[Path]:
    """The store of tests that have none of their own; a test of compile events or of the store takes ``own_store``."""
    with tempfile.TemporaryDirectory(prefix="jitgen-tests-") as temporary, pytest.MonkeyPatch.context() as patched:
        store = _kept_store()
        try:
            store.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:  # a checkout that cannot be written
            store = Path(temporary)
        patched.setenv("JITGEN_CACHE_DIR", str(store))
        # No test cuts the power. The disk is waited for nine times a kernel, in 0.03 s.
        patched.setattr(os, "fsync", lambda descriptor: None)
        compiler = shutil.which(compiled_once.PROGRAM)
        objects = store.parent / "objects"
        if compiler is not None:
            patched.setenv("PATH", compiled_once.on_path(compiler, str(objects), temporary))
            _compile_within(patched, str(Path(temporary, compiled_once.PROGRAM)), compiler, str(objects))
        yield store
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        _prune(store, objects)


def _compile_within(patched: pytest.MonkeyPatch, stand_in: str, compiler: str, objects: str) -> None:
    """Has this process do what the program ``stand_in`` would, where that is the compiler: it need not be started."""
    from jitgen.compilers import host

    run = host._run

    def run_or_compile(source: Any, directory: Path, arguments: list[str]) -> str:
        if arguments[0] == stand_in and compiled_once.compiled(compiler, objects, arguments[1:], f"{directory}/"):
            return ""
        return run(source, directory, arguments)

    patched.setattr(host, "_run", run_or_compile)


def _kept_store() -> Path:
    """Where this run's kernels are kept for the next one.

    A store's keys cover a kernel's source, headers, flags and compiler, and a plan's all code that generates. They do
    not cover the code that compiles, stores and loads, so each state of that has a directory.
    """
    from jitgen.fingerprint import folders_digest

    return KEPT / folders_digest(*(CHECKOUT / "jitgen" / name for name in ("compilers", "store", "runtime")))[:16]


def _prune(store: Path, objects: Path) -> None:
    from jitgen.store import Store

    Store(store).prune(KEPT_BYTES)
    compiled_once.prune(str(objects))
    for other in KEPT.glob("*"):
        if other not in (store, objects):
            shutil.rmtree(other, ignore_errors=True)


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of this test's own."""
    store = tmp_path / "store"
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(store))
    return store


@pytest.fixture(autouse=True)
def own_flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test marked ``optimised`` has the kernels that users have, whatever ``make test`` adds."""
    if request.node.get_closest_marker("optimised") is not None:
        monkeypatch.delenv("JITGEN_CXXFLAGS", raising=False)


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """A test that has jitgen log goes back on it; else every later miss is compared with 2,000 plans of the store."""
    yield
    assert not logging.getLogger("jitgen").isEnabledFor(logging.INFO), "this test leaves logging enabled"


# ----------------------------------------------------------------------------------------------- quick and slow tests


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``quick``, the cases for which its condition does not hold are slow; of one marked ``covering``,
    those that are in no covering array."""
    addresses = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addresses:
        raise pytest.UsageError(
            f"names of tests that are others in each process, which pytest-xdist refuses: {addresses}"
        )
    covering: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") is not None and item.get_closest_marker("slow") is None:
            covering.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for mark in item.iter_markers("quick"):
            where, case = mark.kwargs["where"], item.callspec.params  # type: ignore[attr-defined]
            if not where(**{name: case[name] for name in inspect.signature(where).parameters}):
                item.add_marker(pytest.mark.slow)

    for cases in covering.values():
        (strength,) = cases[0].get_closest_marker("covering").args  # type: ignore[union-attr]
        chosen = covering_array([case.callspec.params for case in cases], strength)  # type: ignore[attr-defined]
        for number in set(range(len(cases))) - chosen:
            cases[number].add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Takes what is in memory now out of the garbage collector's sight. Going through all of torch and all tests takes
    half a second, and every refused trace has them gone through (``jitgen/trace/escapes.py``)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # no test leaves much, and looking for it so often takes a hundredth of a run


FROZEN_AT = 150_000
"""Objects since the last freeze, from which on those that a collection leaves are taken for ones that stay."""


def pytest_runtest_logstart(nodeid: str) -> None:
    """Takes it out of sight between two files too, where one has imported much or has parsed all of jitgen."""
    global _file
    before, _file = _file, nodeid.partition("::")[0]
    if before != _file and len(gc.get_objects()) > FROZEN_AT:
        gc.collect()
        gc.freeze()


_file = ""


# ------------------------------------------------------------------------------------------------------ processor time

SHOWN = 8
"""Files that the summary names."""
_started = pytest.StashKey[float]()
_seconds_of_files: Counter[str] = Counter()


def _processor_seconds() -> float:
    """Of this process, of those that it has waited for, and of those that interpret Triton or run programs; other load
    does not stretch it as it does the wall clock."""
    return sum(os.times()[:4]) + interpreter.seconds + fresh.seconds


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_started] = _processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Warn of a test that takes too long for `make test`."""
    before = _processor_seconds()
    try:
        return (yield)
    finally:
        seconds = _processor_seconds() - before
        if seconds > QUICK_SECONDS and not {mark.name for mark in item.iter_markers()} & {"slow", "gpu"}:
            text = f"{item.nodeid} took {seconds:.0f} s of processor time: make it quicker, or mark cases of it slow"
            item.warn(pytest.PytestWarning(text))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor seconds", _processor_seconds() - item.stash[_started]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that reports: workers send what they have measured with their reports."""
    if report.when == "teardown":
        _seconds_of_files[report.nodeid.partition("::")[0]] += dict(report.user_properties)["processor seconds"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    most = ", ".join(f"{Path(name).stem} {seconds:.0f}" for name, seconds in _seconds_of_files.most_common(SHOWN))
    terminalreporter.write_line(f"processor time of tests: {_seconds_of_files.total():.0f} s; most of it: {most}")
