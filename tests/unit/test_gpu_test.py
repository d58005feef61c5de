"""``make gpu-test`` ends although tests hang, names these, and reports the others; its record, and what it is of."""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import fresh
from tests.watched import spread
from tools import cards, device_record, gpu_code, gpu_test, processes

CHECKOUT = gpu_code.CHECKOUT

TESTS = '''
import ctypes, fcntl, os, signal, time
from pathlib import Path
import pytest

BUSY = Path(__file__).with_name("busy")

def hang():
    """As a kernel that never ends: in C, with the interpreter's lock held and all signals blocked."""
    if os.environ.get("JITGEN_DEBUG") == "5":
        os.write(2, b"jitgen_f: block: [0,0,0], thread: [1,0,0] `block_full` a wait of more than 2^34 cycles\\n")
        raise RuntimeError("device-side assert triggered")
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    file = BUSY.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    while True:
        ctypes.PyDLL(None).sleep(1000)

def card_is_taken():
    """Whether a test hangs: it holds a lock, which ends with its process."""
    try:
        with BUSY.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False

@pytest.mark.parametrize("number", range(8))
def test_right(number):
    pass

def test_wrong():
    assert 1 + 1 == 3

def test_left_out():
    pytest.skip("needs another card")

def test_waits_for_the_card():
    Path(__file__).with_name("waits").touch()
    begun = time.time()
    while time.time() < begun + 1 or card_is_taken():
        time.sleep(0.05)

def test_hangs():
    waits = Path(__file__).with_name("waits")
    while not waits.exists():
        time.sleep(0.05)
    hang()

def test_ends_its_process():
    os._exit(3)

def test_after_them():
    pass
'''


def run(tmp_path: Path, text: str, workers: int, limits: gpu_test.Limits, only: Sequence[str] = ()) -> dict[str, Any]:
    (tmp_path / "test_fake.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    # A process of its own: this one's pytest is not what is tested.
    code = f"""
import json, sys
from tools import gpu_test
found = gpu_test.run_all([], ["test_fake.py"], {workers}, gpu_test.{limits!r}, {only!r})
open("found", "w").write(json.dumps(found))
"""
    done = fresh.run(code, cwd=tmp_path, env=_environment())
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "found").read_text())
    return found


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "WATCHED"))}
    return kept | {"PYTHONPATH": str(CHECKOUT)}


def test_a_test_that_hangs_is_named_and_the_others_are_reported(tmp_path: Path) -> None:
    found = run(tmp_path, TESTS, 3, gpu_test.Limits(test=4.0, whole=200.0))
    assert found["hangs"] == ["test_fake.py::test_hangs"]
    wait = "jitgen_f: block: [0,0,0], thread: [1,0,0] `block_full` a wait of more than 2^34 cycles"
    assert found["waits"] == {"test_fake.py::test_hangs": f"{wait}: RuntimeError: device-side assert triggered"}
    assert set(found["killed_once"]) <= {"test_fake.py::test_waits_for_the_card"}
    assert set(found["failures"]) == {"test_fake.py::test_wrong", "test_fake.py::test_ends_its_process"}
    assert "crashed" in found["failures"]["test_fake.py::test_ends_its_process"]
    assert "1 + 1" in found["failures"]["test_fake.py::test_wrong"]
    assert (found["passed"], found["skipped"], found["not_run"]) == (10, 1, 0)
    assert "failed" in found["closing"][0]


@pytest.mark.slow
def test_of_a_test_whose_cases_hang_few_take_the_limit(tmp_path: Path) -> None:
    text = TESTS.partition("def test_wrong")[0].replace("    pass", "    hang() if number else None")
    found = run(tmp_path, text, 2, gpu_test.Limits(test=2.0, whole=90.0, cases=2))
    assert found["passed"] == 1
    assert 2 <= len(found["hangs"]) <= 4
    assert found["not_run"] == 7 - len(found["hangs"])
    assert set(found["hangs"]).isdisjoint(found["left_out"])


def test_all_end_when_the_time_is_over(tmp_path: Path) -> None:
    text = TESTS.partition("def test_wrong")[0].replace("    pass", "    hang()")
    found = run(tmp_path, text, 2, gpu_test.Limits(test=60.0, whole=10.0))
    assert found["not_run"] == 8
    assert len(found["interrupted"]) == 2
    assert found["closing"] == []
    assert found["seconds"] < 60


def test_what_was_left_out_is_run_later_and_added_to_the_record(tmp_path: Path) -> None:
    right = TESTS.partition("def test_wrong")[0]
    wrong = right.replace("    pass", "    hang() if number % 2 else None")
    first = f"{wrong}\ndef test_last(): assert False\n"
    before = run(tmp_path, first, 2, gpu_test.Limits(test=60.0, whole=10.0))
    assert before["left_out"]
    now = before["left_out"]
    after = run(tmp_path, f"{right}\ndef test_last(): pass\n", 2, gpu_test.Limits(), now)
    assert (after["passed"], after["failed"], after["not_run"]) == (len(now), 0, 0)
    both = gpu_test.joined(before, after)
    ran = 9 - len(now)
    assert (both["passed"] + both["failed"], both["not_run"], both["left_out"]) == (9, 0, [])
    assert both["failed"] == len(both["failures"]) == before["failed"]
    assert len(both["slowest"]) >= ran
    assert both["seconds"] == before["seconds"] + after["seconds"]
    assert (both["runs"], gpu_test.joined(both, after)["runs"]) == (2, 3)


def test_a_record_is_continued_only_by_a_run_of_the_same_code_card_and_versions(tmp_path: Path) -> None:
    facts = dict.fromkeys(gpu_test.SAME, "one")
    path = tmp_path / "device-tests-h100.json"
    with pytest.raises(SystemExit, match=r"there is no .* run without it"):
        gpu_test.continued(path, facts)
    record = facts | {"left_out": ["tests/device/test_sort.py::test_order"]}
    path.write_text(json.dumps(record))
    assert gpu_test.continued(path, facts) == record
    for name in gpu_test.SAME:
        with pytest.raises(SystemExit, match=f"{name} was one and is another"):
            gpu_test.continued(path, facts | {name: "another"})
    path.write_text(json.dumps(record | {"left_out": []}))
    with pytest.raises(SystemExit, match="left nothing out"):
        gpu_test.continued(path, facts)


def test_workers_begin_with_what_was_slow() -> None:
    tests = [f"test_{number}" for number in range(20)]
    ordered = spread(tests, ["test_19", "gone", "test_7", "test_0", "test_12"], 3)
    assert sorted(ordered) == sorted(tests)
    shares = [ordered[20 * worker // 3 : 20 * (worker + 1) // 3] for worker in range(3)]
    assert [share[:2] for share in shares] == [["test_19", "test_12"], ["test_7", "test_5"], ["test_0", "test_13"]]
    assert spread(tests, [], 3) == tests
    assert spread(tests[:1], tests, 3) == tests[:1]


def test_where_tests_that_need_a_gpu_are() -> None:
    marked = {
        path.relative_to(CHECKOUT).as_posix()
        for path in (CHECKOUT / "tests").rglob("test_*.py")
        if "pytest.mark." + "gpu" in path.read_text()
    }
    assert {path for path in marked if not path.startswith("tests/device/")} == set(gpu_test.PATHS) - {"tests/device"}


# ------------------------------------------------------------------------------------------------------ the record


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("AMD Instinct", "amd-instinct"),
    ],
)
def test_short_names_of_cards(name: str, card: str) -> None:
    assert device_record.card_of(name) == card


def test_a_record_says_what_was_tested_and_what_has_changed_since(tmp_path: Path) -> None:
    sources = {"jitgen/spec.py": "1", "jitgen/cli/show.py": "2", "templates/scan/scan.cu.j2": "3"}
    sources |= {"templates/scan/scan.cpp.j2": "4", "templates/common/include/jitgen/ptx.cuh": "5"}
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = gpu_code.digests(tmp_path)
    assert {folder: sorted(names) for folder, names in found.items()} == {
        "jitgen": ["spec.py"],
        "templates/common/include/jitgen": ["ptx.cuh"],
        "templates/scan": ["scan.cu.j2"],
    }
    record = {"card": "NVIDIA H100 80GB HBM3", "commit": "1a2b3c4", "gpu_code": found, "hangs": []}
    path = device_record.write("tests", record, tmp_path / "records")
    assert path is not None
    assert path.name == "device-tests-h100.json"
    assert json.loads(path.read_text()) == record
    assert list(gpu_code.notices(tmp_path / "records", tmp_path, ["h100"])) == []
    (tmp_path / "jitgen/cli/show.py").write_text("another page")
    assert list(gpu_code.notices(tmp_path / "records", tmp_path, ["h100"])) == []
    (tmp_path / "templates/common/include/jitgen/ptx.cuh").write_text("another wait")
    (tmp_path / "jitgen/ir.py").write_text("new")
    (tmp_path / "jitgen/spec.py").unlink()
    (notice,) = gpu_code.notices(tmp_path / "records", tmp_path, ["h100"])
    assert notice == (
        "device-tests-h100.json was recorded at commit 1a2b3c4; files that decide what runs on a GPU have changed "
        "since (3): jitgen/ir.py, jitgen/spec.py, templates/common/include/jitgen/ptx.cuh"
    )


def test_no_card_no_record(tmp_path: Path) -> None:
    assert device_record.write("tests", {"card": None}, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_processes_are_spread_over_the_cards_and_see_all_of_them() -> None:
    firsts = [cards.variables(worker, ("4", "6", "7"))["CUDA_VISIBLE_DEVICES"] for worker in range(4)]
    assert firsts == ["4,6,7", "6,7,4", "7,4,6", "4,6,7"]
    assert cards.variables(1, ("0",)) == cards.variables(1, ()) == {}
    jobs: queue.Queue[processes.Job] = queue.Queue()
    for name in "abc":
        jobs.put(processes.Job(name, [sys.executable, "-c", "pass"], silence=60.0))
    finished = list(processes.run(jobs, 2, time.monotonic() + 60))
    assert sorted((each.job.name, each.status) for each in finished) == [("a", 0), ("b", 0), ("c", 0)]


def test_what_is_not_gpu_code_exists() -> None:
    """A name of the list that is gone would hide that its successor counts."""
    assert [name for name in gpu_code.FOR_OTHERS if not (CHECKOUT / name).exists()] == []
    found = list(gpu_code.files())
    assert "templates/attention_backward/include/jitgen/attention_backward.cuh" in found
    assert {"jitgen/runtime/cuda.py", "jitgen/ir/graph.py", "jitgen/compilers/nvrtc.py"} <= set(found)


def test_a_card_without_a_record_and_a_run_that_was_not_clean_are_told(tmp_path: Path) -> None:
    record = {"commit": "1a2b3c4", "gpu_code": gpu_code.digests(tmp_path), "failed": 0, "hangs": [], "not_run": 0}
    (tmp_path / "device-tests-h100.json").write_text(json.dumps(record))
    assert list(gpu_code.notices(tmp_path, tmp_path, ["h100"])) == []
    (missing,) = gpu_code.notices(tmp_path, tmp_path, ["h100", "h200"])
    assert "no h200 has run the tests" in missing
    for what in ({"hangs": ["test_x"]}, {"failed": 2}, {"not_run": 1}, {"clean": False}):
        (tmp_path / "device-tests-h100.json").write_text(json.dumps(record | what))
        (unclean,) = gpu_code.notices(tmp_path, tmp_path, ["h100"])
        assert "not clean" in unclean
