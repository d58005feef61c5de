"""A pytest plugin by which ``tools/gpu_test.py`` sees what every worker runs, so that it can kill one that hangs.

It is loaded with ``-p tests.watched``, and ``WATCHED`` names a folder. In it

* ``running/<pid>`` has the test that a worker runs: when it began, on the monotonic clock, and its name;
* ``reports`` has a line of JSON for every report of a test, as the process that collects them gets them;
* ``collected`` has the names of all tests of the run;
* ``killed`` has the tests whose workers ``tools/gpu_test.py`` has killed, which it writes;
* ``slowest`` has the names of tests that took long in an earlier run, the slowest first; the workers begin with these;
* ``only`` has the names of the tests that are run, where it is there.

A kernel that failed leaves a CUDA context in which every later call fails too. So a worker ends after such a test, and
pytest-xdist replaces it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import cards

FOLDER = "WATCHED"
"""The environment variable that names the folder."""
CASES_KILLED = "WATCHED_CASES"
"""The environment variable that says how many cases of one test may be killed before the others are not run."""
ONLY = "only"
"""The file that names the tests of a run."""
CARDS = "WATCHED_CARDS"
"""The environment variable that names the cards over which the workers are spread."""
NOT_RUN = "not run: other cases of this test were killed"
"""Why a test is skipped of which as many cases were killed."""
WAIT = re.compile(r"^.*\ba wait of more than .*$", re.MULTILINE)
"""What a kernel with bounded waits writes before it ends (``jitgen/waits.cuh``)."""
CONTEXT_LOST = 70
"""The exit status of a worker whose CUDA context a test has destroyed."""


def function_of(test: str) -> str:
    """The name of a test without the parameters of its case."""
    return test.partition("[")[0]


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def _folder() -> Path:
    return Path(os.environ[FOLDER])


if _is_worker() and CARDS in os.environ:  # before anything asks for a card
    os.environ.update(
        cards.variables(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), tuple(os.environ[CARDS].split(",")))
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only = _folder() / ONLY
    if only.exists():
        names = set(only.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
        items[:] = [item for item in items if item.nodeid in names]
    slowest = _folder() / "slowest"
    if slowest.exists():
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        order = spread([item.nodeid for item in items], slowest.read_text().splitlines(), workers)
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in order]


def spread(tests: Sequence[str], slowest: Sequence[str], workers: int) -> list[str]:
    """Orders ``tests`` so that each of ``workers`` begins with its part of the ``slowest``.

    A test that takes a minute and begins last holds up the end by a minute. ``--dist worksteal`` gives every worker an
    equal run of consecutive tests, and the slow ones are dealt to the beginnings of these.
    """
    there, known = set(tests), set(slowest)
    slow = [test for test in slowest if test in there]
    others = iter([test for test in tests if test not in known])
    ordered: list[str] = []
    for worker in range(workers):
        end = len(tests) * (worker + 1) // workers
        ordered += slow[worker::workers]
        ordered += itertools.islice(others, max(end - len(ordered), 0))
    return [*ordered, *others]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    running = _folder() / "running" / str(os.getpid())
    partial = running.with_name(f".{running.name}")  # the file is there only with all of its text
    partial.write_text(f"{time.monotonic()} {item.nodeid}")
    partial.rename(running)
    try:
        result = yield
        if _is_worker() and context_is_lost():
            os._exit(CONTEXT_LOST)
        return result
    finally:
        running.unlink(missing_ok=True)


def context_is_lost() -> bool:
    """Whether this process has a CUDA context in which nothing can be computed any more."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test of which too many cases were killed: the others would take the time limit, too."""
    try:
        killed = (_folder() / "killed").read_text().splitlines()
    except FileNotFoundError:
        return
    if sum(function_of(test) == function_of(item.nodeid) for test in killed) >= int(os.environ[CASES_KILLED]):
        pytest.skip(NOT_RUN)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _is_worker():
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "seconds": report.duration}
    if report.failed:
        told = getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or str(report.longrepr)
        waits = WAIT.search("\n".join(text for _, text in report.sections))
        line["error"] = f"{waits[0].strip()}: {told}" if waits else told
    elif NOT_RUN in reason:
        line["outcome"] = "not run"
    with (_folder() / "reports").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    (_folder() / "collected").write_text("\n".join(ids))
