"""Harm the store at random, and measure it: no wrong result, no hung process, no lost kernel.

Run:   python tools/store_trial.py [faults] [storm] [prune] [first-call] [workers] [--json docs/measured/store.json]

faults      one fault at a time in a store of real kernels, by an ordinary user, and then a call that needs the kernel,
            in a process of its own: its result must be the right one, in time, and the kernel be there afterwards.
storm       16 processes call 50 kernels each while processes are killed by SIGKILL, in random order.
prune       `prune` of 8,000 entries.
first-call  `import jitgen` over `import torch`, and the first call in a new process whose kernel is in the store.
workers     prewarming 100 kernels with one worker process and with two.

Compilers are run once for each kernel; after that their output is remembered, so that a thousand faults take minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import jitgen
from bench.measurement import current_commit, versions
from jitgen import spec
from jitgen.compilers import bounds, host
from jitgen.compilers.workers import WorkerProcesses
from jitgen.deploy import work
from jitgen.deploy.measurements import cpu_model
from jitgen.store import Store, default, layout, lock, usage  # noqa: F401  before privileges are given up

KERNELS = 12
NOBODY = 65534
SECONDS = 30
"""A call that takes longer hangs."""
X = torch.linspace(-3, 3, 77)


def function(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of its own for each number."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * (number + 1.0) + x

    f.__name__ = f"f{number}"
    return f


# ----------------------------------------------------------------------------------------------------- remembered


_remembered: dict[str, spec.Artifact] = {}
_really_compile = host.compile


def _compile(source: spec.KernelSource) -> spec.Artifact:
    if source.text not in _remembered:
        _remembered[source.text] = _really_compile(source)
    return _remembered[source.text]


def filled(directory: Path, count: int) -> list[str]:
    """The request keys of ``count`` kernels, in the store at ``directory`` from now on."""
    os.environ["JITGEN_CACHE_DIR"] = str(directory)
    host.compile = _compile  # type: ignore[assignment]
    for number in range(count):
        jitgen.jit(function(number))(X)
    return [jitgen.jit(function(number)).lower(X).key for number in range(count)]


def in_child(action: Callable[[], None]) -> str:
    """What became of ``action`` in a process of its own: right, wrong (AssertionError), error, or hung."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        code = 0
        try:
            default._stores.clear()
            action()
        except AssertionError:
            code = 1
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            code = 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "hung" if os.WTERMSIG(status) == signal.SIGALRM else "error"
    return ("right", "wrong", "error")[os.WEXITSTATUS(status)]


def call(number: int) -> None:
    warnings.simplefilter("ignore")
    if not torch.equal(jitgen.jit(function(number))(X), function(number)(X)):
        raise AssertionError


# --------------------------------------------------------------------------------------------------------- faults


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, random.randrange(path.stat().st_size + 1))


def removed(path: Path) -> None:
    path.unlink()


def without_rights(path: Path) -> None:
    path.chmod(0)


def directory_without_rights(path: Path) -> None:
    path.parent.chmod(0)


def open_to_all(path: Path) -> None:
    path.parent.chmod(0o777)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def clock(path: Path) -> None:
    then = time.time() + random.choice((-1, 1)) * 10 * 365 * 86400
    os.utime(path, (then, then))


def full_disk(path: Path) -> None:
    """Where the store is on a file system of its own; elsewhere this is a file that is removed."""
    path.unlink()
    store = next(parent.parent for parent in path.parents if parent.name == layout.VERSION)
    if os.path.ismount(store.parent):
        with contextlib.suppress(OSError), open(store.parent / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)


def other_time(path: Path) -> None:
    path.unlink()


FAULTS = (
    *(flip, cut, removed, without_rights, directory_without_rights, open_to_all),
    *(fifo, link, directory, clock, full_disk, other_time),
)


def after(fault: Callable[[Path], None], number: int) -> Callable[[], None]:
    """The call after a fault, one of which is of the process rather than of a file."""

    def action() -> None:
        if fault is other_time:
            now, jump = time.time, random.choice((-1, 1)) * 10 * 365 * 86400
            time.time = lambda: now() + jump
        call(number)

    return action


def faults(count: int, directory: Path) -> dict[str, Any]:
    keys = filled(directory, KERNELS)
    store = Store.open(directory, layers=[])
    outcomes: Counter[str] = Counter()
    each: Counter[str] = Counter()
    lost = 0
    for step in range(count):
        number, fault = random.randrange(KERNELS), random.choice(FAULTS)
        each[fault.__name__] += 1
        fault(random.choice(files_of(store, keys[number])))
        outcomes[in_child(after(fault, number))] += 1
        for path in [directory, *directory.rglob("*")]:  # what took rights away gives them back
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        (directory.parent / "filler").unlink(missing_ok=True)
        if work.why_unusable(store, keys[number]) is not None:
            outcomes["rebuilt by the next call"] += in_child(lambda number=number: call(number)) == "right"
        lost += work.why_unusable(store, keys[number]) is not None
        if step % 100 == 99:
            print(f"  {step + 1} faults: {dict(outcomes)}, {lost} lost", file=sys.stderr)
    lost += sum(work.why_unusable(store, key) is not None for key in keys)
    names = ("right", "wrong", "hung", "error", "rebuilt by the next call")
    return {
        "faults": count,
        "of each kind": dict(sorted(each.items())),
        **{name: outcomes[name] for name in names},
        "lost": lost,
        "verify clean": store.verify().clean,
    }


def files_of(store: Store, key: str) -> list[Path]:
    plan = layout.plan_path(store.root, key)
    content = store.get_plan(key)
    assert content is not None
    folders = [layout.artifact_path(store.root, artifact) for artifact in content["artifacts"]]
    return [plan, *(path for folder in folders for path in folder.iterdir())]


def as_ordinary_user(trial: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """``trial`` in a process of an ordinary user, where a file without rights cannot be read.

    Its store is on a small file system of its own, where one can be mounted.
    """
    with tempfile.TemporaryDirectory(prefix="jitgen-trial-") as temporary:
        place, answer = Path(temporary) / "mounted", Path(temporary) / "answer.json"
        place.mkdir()
        options = "size=8m,mode=700"
        mounted = not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=False
        ).returncode
        try:
            filled(place / "store", KERNELS)  # imports and compiles all that is needed
            if os.geteuid() == 0:
                for path in (Path(temporary), *Path(temporary).rglob("*")):
                    os.chown(path, NOBODY, NOBODY)
            child = os.fork()
            if child == 0:
                try:
                    if os.geteuid() == 0:
                        os.setgroups([])
                        os.setgid(NOBODY)
                        os.setuid(NOBODY)
                    default._stores.clear()
                    os.environ["HOME"] = tempfile.tempdir = temporary
                    answer.write_text(json.dumps(trial(place / "store")))
                except BaseException as error:
                    sys.stderr.write(f"{type(error).__name__}: {error}\n")
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            return {"user": NOBODY if os.geteuid() == 0 else os.geteuid(), "tmpfs": mounted} | json.loads(
                answer.read_text()
            )
        finally:
            if mounted:  # this process still has a file of it open
                subprocess.run(["umount", "--lazy", str(place)], check=False)


# ---------------------------------------------------------------------------------------------------------- storm


def storm(processes: int, kernels: int, kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="jitgen-trial-") as temporary:
        filled(Path(temporary) / "remember", kernels)
        directory = Path(temporary) / "store"
        os.environ["JITGEN_CACHE_DIR"] = str(directory)
        log = Path(temporary) / "wrong"

        def slow(source: spec.KernelSource) -> spec.Artifact:
            time.sleep(random.uniform(0.02, 0.2))
            return _compile(source)

        def work_of_one() -> None:
            random.seed(os.getpid())
            default._stores.clear()
            host.compile = slow  # type: ignore[assignment]
            order = random.sample(range(kernels), kernels)
            for number in order:
                try:
                    call(number)
                except BaseException as error:
                    with open(log, "a") as file:
                        file.write(f"{type(error).__name__}: {error}\n")

        def start() -> int:
            child = os.fork()
            if child == 0:
                try:
                    work_of_one()
                finally:
                    os._exit(0)
            return child

        started = time.monotonic()
        living = {start() for _ in range(processes)}
        killed = 0
        while killed < kills:
            time.sleep(random.uniform(0.005, 0.05))
            victim = random.choice(sorted(living))
            os.kill(victim, signal.SIGKILL)
            _, status = os.waitpid(victim, 0)
            killed += os.WIFSIGNALED(status)
            living = (living - {victim}) | {start()}
        for child in living:
            os.waitpid(child, 0)
        store = Store.open(directory, layers=[])
        found = Counter(entry.kind for entry in store.entries())
        result = store.verify()
        return {
            "processes": processes,
            "kernels": kernels,
            "killed": killed,
            "seconds": round(time.monotonic() - started, 1),
            "wrong or failed": log.read_text().splitlines() if log.exists() else [],
            "plans": found["plan"],
            "artifacts": found["artifact"],
            "verify clean": result.clean,
            "leftovers to sweep": len(result.leftovers),
        }


# ----------------------------------------------------------------------------------------------------- measurements


def prune(entries: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="jitgen-trial-") as temporary:
        store = Store.open(Path(temporary) / "store", layers=[])
        artifact = spec.Artifact("0" * 64, {"kernel.cu": b"x" * 100, "kernel.cubin": b"y" * 400}, "kernel.cubin")
        store.put_artifact(artifact)
        template = layout.artifact_path(store.root, artifact.key)
        for number in range(entries):
            key = spec.digest(number)
            target = layout.artifact_path(store.root, key)
            shutil.copytree(template, target)
        total = sum(entry.size for entry in store.entries())
        started, processor = time.monotonic(), time.process_time()
        gone = len(store.prune(total // 2).removed)
        return {
            "entries": entries,
            "removed": gone,
            "seconds": round(time.monotonic() - started, 2),
            "processor seconds": round(time.process_time() - processor, 2),
        }


FIRST = """
import time
import torch
x = torch.linspace(-3, 3, 77)
def now():
    return time.perf_counter(), time.process_time()
times = [now()]
import jitgen
times.append(now())
@jitgen.jit
def f(x):
    return torch.relu(x) * 3.0 + x
times.append(now())
f(x)
times.append(now())
for before, after in zip(times, times[1:]):
    print(*(end - start for start, end in zip(before, after)))
"""


def first_call(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="jitgen-trial-") as temporary:
        environment = {**os.environ, "JITGEN_CACHE_DIR": f"{temporary}/store", "OMP_NUM_THREADS": "1"}
        rows = []
        for _ in range(repeats + 1):  # the first of them compiles
            done = subprocess.run(
                [sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, check=True
            )
            rows.append([float(word) * 1e3 for word in done.stdout.split()])
        steps = ("import jitgen over torch", "decorate the first function", "first call, from the store")
        names = [f"{step}, {kind}" for step in steps for kind in ("ms", "ms of processor time")]
        columns = zip(*rows[1:], strict=True)
        return {
            name: {"minimum": round(min(column), 1), "median": round(statistics.median(column), 1)}
            for name, column in zip(names, columns, strict=True)
        }


def workers(kernels: int) -> dict[str, Any]:
    """Seconds of prewarming with one worker and with two, each with an empty store."""
    host.compile = _really_compile  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(prefix="jitgen-trial-") as temporary:
        manifest = Path(temporary) / "specs.json"
        with jitgen.record(manifest):
            for number in range(kernels // 2):  # each for many rows and for one
                jitgen.jit(function(number)).lower(torch.randn(5, 7).t())
        seconds, compiled = {}, 0
        for count in (1, 2):
            store = Store.open(f"{temporary}/store-{count}", layers=[])
            with WorkerProcesses(count, bounds.WORKER_BYTES) as pool:
                for future in [pool.submit(time.sleep, 0.5) for _ in range(count)]:  # every worker has started
                    future.result()
                started = time.monotonic()
                report = jitgen.prewarm(manifest, ["cpu"], store=store, executor=pool)
                seconds[count] = time.monotonic() - started
                compiled = report.count("compiled")
        return {
            "kernels": compiled,
            "one worker, s": round(seconds[1], 1),
            "two workers, s": round(seconds[2], 1),
            "ratio": round(seconds[1] / seconds[2], 2),
        }


TRIALS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "faults": lambda options: as_ordinary_user(lambda place: faults(options.faults, place)),
    "storm": lambda options: storm(16, 50, options.kills),
    "prune": lambda options: prune(8000),
    "first-call": lambda options: first_call(9),
    "workers": lambda options: workers(100),
}


def facts() -> dict[str, Any]:
    return {
        "jitgen": jitgen.__version__,
        "command": "python " + " ".join(sys.argv),
        "commit": current_commit(),
        "cpu": cpu_model(),
        **versions(),
        "processors": bounds.processors(),
        "load average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"of {', '.join(TRIALS)}; default: all")
    parser.add_argument("--faults", type=int, default=1200)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(options.seed)
    results = {}
    for name in options.trials or TRIALS:
        results[name] = {"environment": facts(), **TRIALS[name](options)}
        print(json.dumps({name: results[name]}, indent=1))
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(known | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
