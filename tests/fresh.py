"""Programs that tests run in a process of their own, which has imported torch and done nothing else.

Importing torch takes longer than most of these programs do. One process imports it for all of them and forks for each:
a program finds the modules of ``python -c 'import torch'``, its own environment, arguments and working directory, and
an empty standard input. What torch reads when it is imported or loaded, such as ``OMP_NUM_THREADS`` and ``LD_PRELOAD``,
is as it is for the tests; a program that depends on it takes ``subprocess``.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

seconds = 0.0
"""Processor time that all programs of this run took so far."""
_process: subprocess.Popen[str] | None = None


def run(
    program: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Runs ``program`` as ``subprocess.run([sys.executable, "-c", program, *arguments], ...)`` would, with its output.

    Raises:
        subprocess.TimeoutExpired: after ``timeout`` seconds, in which case it is killed.
    """
    global _process, seconds
    if _process is None:
        _process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(_process.communicate)
    assert _process.stdin is not None
    assert _process.stdout is not None
    request = [program, arguments, dict(os.environ if env is None else env), str(cwd or os.getcwd()), timeout]
    try:
        print(json.dumps(request), file=_process.stdin, flush=True)
        status, output, errors, took = json.loads(_process.stdout.readline())
    except BaseException:  # the test hangs, or this process was interrupted: its answer is not the next one's
        atexit.unregister(_process.communicate)
        _process.kill()
        _process = None
        raise
    seconds += took
    command = [sys.executable, "-c", program, *arguments]
    if status is None:
        raise subprocess.TimeoutExpired(command, timeout, output, errors)
    return subprocess.CompletedProcess(command, status, output, errors)


def _serve() -> None:
    import torch  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGALRM, _expire)
    before = sum(os.times()[:2])  # the first program has the import in its time
    for request in sys.stdin:
        program, arguments, environment, directory, timeout = json.loads(request)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if not child:
                _become(program, arguments, environment, directory, output, errors)
            signal.setitimer(signal.ITIMER_REAL, timeout)
            try:
                _, ended, usage = os.wait4(child, 0)
                status: int | None = os.waitstatus_to_exitcode(ended)
            except TimeoutError:
                os.killpg(child, signal.SIGKILL)
                (_, _, usage), status = os.wait4(child, 0), None
            signal.setitimer(signal.ITIMER_REAL, 0)
            texts = [file.read() for file in (output, errors) if not file.seek(0)]
        print(json.dumps([status, *texts, before + usage.ru_utime + usage.ru_stime]), flush=True)
        before = 0.0


def _expire(*_: Any) -> None:
    raise TimeoutError


def _become(
    program: str,
    arguments: list[str],
    environment: dict[str, str],
    directory: str,
    output: IO[str],
    errors: IO[str],
) -> None:
    """Runs ``program`` in this process, which then ends."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), output.fileno(), errors.fileno())):
        os.dup2(file, stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    # After the script's directory, sys.path has PYTHONPATH's directories.
    own = sum(1 for _ in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    os.environ.clear()
    os.environ.update(environment)
    sys.path[: 1 + own] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    os.chdir(directory)
    tempfile.tempdir = None
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = ModuleType("__main__")
    status = 0
    try:
        exec(compile(program, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream_object in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # the program has another one, or none
            stream_object.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
