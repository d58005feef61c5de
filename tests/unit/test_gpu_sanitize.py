"""``make gpu-sanitize``: what its cases reach, how it reads what a tool says, and how a process that hangs ends."""

from __future__ import annotations

import queue
import sys
import time
from pathlib import Path

import pytest

import jitgen
from jitgen.compilers import nvrtc
from jitgen.families import registry
from jitgen.spec import Target
from tests import sanitized, sanitized_control
from tools import gpu_sanitize, processes
from tools.processes import Finished, Job


@pytest.mark.parametrize("backend", sanitized.BACKENDS)
def test_cases_have_kernels_of_every_family(backend: str) -> None:
    families = set()
    for problem in sanitized.PROBLEMS:
        # Two problems of products at most lower in half the time, and all of the others.
        if problem.case.startswith("gemm") and problem.case not in ("gemm few rows", "gemm wgmma"):
            continue
        lowered = jitgen.jit(problem.function, backend=backend).lower(*problem.tensors(), target="sm_90a")
        families |= {kernel.template.partition("/")[0] for kernel in lowered.kernels}
    assert "attention backward" in sanitized.CASES
    for_cpus, of_users = {"convolution"}, {"launch"}
    assert families == {family.name for family in registry.FAMILIES} - {"attention_backward"} - for_cpus - of_users


@pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")
@pytest.mark.parametrize("tool", gpu_sanitize.TOOLS)
def test_controls_compile(tool: str) -> None:
    kernel = sanitized_control.source(tool, Target("cuda", "sm_90a"))
    assert kernel.name.startswith("jitgen")
    assert nvrtc.compile(kernel).files["kernel.cubin"]


RIGHT = "0 of 3 results are wrong"


def finished(name: str, status: int | None, *lines: str) -> Finished:
    return Finished(Job(name, (), 1.0), status, lines, 2.0)


@pytest.mark.parametrize(
    ("name", "status", "lines", "clean", "closing"),
    [
        ("none, scan, cuda", 0, (RIGHT,), True, RIGHT),
        ("memcheck, scan, cuda", 0, ("========= ERROR SUMMARY: 0 errors",), False, "ERROR SUMMARY: 0 errors"),
        ("none, scan, cuda", 1, ("1 of 3 results are wrong",), False, "1 of 3 results are wrong"),
        ("memcheck, scan, cuda", 0, (RIGHT, "========= ERROR SUMMARY: 0 errors"), True, "ERROR SUMMARY: 0 errors"),
        ("memcheck, scan, cuda", 9, ("========= ERROR SUMMARY: 3 errors",), False, "ERROR SUMMARY: 3 errors"),
        ("memcheck, scan, cuda", 0, (RIGHT,), False, RIGHT),
        (
            *("racecheck, scan, triton", 0),
            (RIGHT, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
            *(True, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
        ),
        ("synccheck, scan, cuda", None, ("problem 0",), False, "killed after 2 s; the last line: problem 0"),
        ("memcheck, control, cuda", 9, ("========= ERROR SUMMARY: 64 errors",), True, "ERROR SUMMARY: 64 errors"),
        (
            *("memcheck, control, cuda", 0),
            ("========= ERROR SUMMARY: 0 errors",),
            *(False, "the error of the control was not found: ERROR SUMMARY: 0 errors"),
        ),
    ],
)
def test_what_a_tool_says(name: str, status: int | None, lines: tuple[str, ...], clean: bool, closing: str) -> None:
    row = gpu_sanitize.judged(finished(name, status, *lines))
    assert (row["clean"], row["closing"]) == (clean, closing)
    assert ("details" in row) is not clean


def test_a_process_that_is_silent_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"""
import subprocess, time
print("begun", flush=True)
process = subprocess.Popen(["sleep", "1000"])
open({str(child)!r}, "w").write(str(process.pid))
time.sleep(1000)
"""
    jobs: queue.Queue[Job] = queue.Queue()
    jobs.put(Job("hangs", (sys.executable, "-c", code), silence=1.5))
    jobs.put(Job("talks", (sys.executable, "-c", "import time\nfor _ in range(8): print(_); time.sleep(.25)"), 1.5))
    jobs.put(Job("fails", (sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"), 30.0))
    found = {each.job.name: each for each in processes.run(jobs, 2, time.monotonic() + 60)}
    assert (found["hangs"].status, found["hangs"].lines) == (None, ("begun",))
    assert (found["talks"].status, len(found["talks"].lines)) == (0, 8)
    assert (found["fails"].status, found["fails"].lines) == (3, ("why",))
    stat = Path(f"/proc/{child.read_text()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_at_the_deadline_nothing_runs_any_more() -> None:
    jobs: queue.Queue[Job] = queue.Queue()
    for number in range(4):
        jobs.put(Job(str(number), ("sleep", "1000"), silence=100.0))
    began = time.monotonic()
    found = list(processes.run(jobs, 2, began + 1.0))
    assert [each.status for each in found] == [None, None]
    assert jobs.qsize() == 2
    assert time.monotonic() - began < 20
