"""What a measurement is, how it is taken, and the environment in which it was taken."""

from __future__ import annotations

import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.records import failure_of
from jitgen._version import __version__
from jitgen.deploy.measurements import cpu_model
from jitgen.spec import dtype_name


@dataclass(frozen=True)
class Bench:
    """How to measure.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        elements: the number of elements of the largest float32 tensor of a streaming case, which exceeds four times the
            last-level cache.
        budget: the time to spend on the timing of one case, in seconds.
        compile_peer: whether torch.compile is among the peers. Its compilations take most of the time of a run.
        repeats: the number of pairs of new processes for each figure of a cold start.
        backend: the only backend to measure; None for all that the device has.
        seed, cases: of a sweep: of its random sizes, and how many.
        seconds: of a sweep: after so many seconds no further case is begun; None means never.
        part: of a sweep: (n, m) measures every m-th case from the n-th on, so that m cards of a host share a sweep.
    """

    device: str
    elements: int
    budget: float
    compile_peer: bool
    repeats: int
    backend: str | None = None
    seed: int = 0
    cases: int = 40
    seconds: float | None = None
    part: tuple[int, int] = (1, 1)

    @property
    def backends(self) -> tuple[str, ...]:
        if self.backend is not None:
            return (self.backend,)
        return ("cpp",) if self.device == "cpu" else ("cuda", "triton")


@dataclass(frozen=True)
class Measurement:
    """One case on one backend, together with its peers.

    Attributes:
        group, name: which case it is.
        device, backend: ``"cpu"`` or ``"cuda"``, and the backend of jitgen.
        dtype, shape: the dtype and shape of the first input; empty if there is none.
        seconds: name of a subject -> median time of one call, in seconds. ``"jitgen"`` is one, the others are peers.
            There is none of a case that failed.
        error: ||out - reference|| / ||reference||, where the reference is float64 of the same inputs; None if nothing
            is compared.
        moved: the bytes that the case must read and write at least once; 0 if that is not meaningful.
        flops: the number of operations, counted as a user would.
        notes: what a reader must know, such as why a peer is absent, or what failed.
    """

    group: str
    name: str
    device: str
    backend: str
    dtype: str
    shape: tuple[int, ...]
    seconds: Mapping[str, float]
    error: float | None = None
    moved: int = 0
    flops: int = 0
    notes: tuple[str, ...] = ()

    @property
    def ratios(self) -> dict[str, float]:
        """The time of each peer divided by jitgen's; it is above 1 if jitgen is faster."""
        own = self.seconds.get("jitgen", math.nan)
        return {peer: time / own for peer, time in self.seconds.items() if peer != "jitgen"}

    @property
    def failure(self) -> str:
        """Why the case has no times; empty where it has them."""
        return failure_of({"seconds": self.seconds, "notes": self.notes})

    def to_json(self) -> dict[str, Any]:
        own = self.seconds.get("jitgen", math.inf)
        rates = {"bytes_per_second": self.moved / own, "flops_per_second": self.flops / own}
        return asdict(self) | {"ratios": self.ratios} | {name: rate for name, rate in rates.items() if rate}


MOST_ERROR = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-16}
"""Relative errors above which a result is wrong: rounded weights and results add up to 2^-8 at most in bfloat16 and to
2^-11 in float16; in float32 sums of 2^14 products in any order to 2^-16, as their errors' squares add up."""


def judged(measurement: Measurement) -> Measurement:
    """``measurement``; without its times, and with a note, where its result is wrong."""
    most = {dtype_name(dtype): error for dtype, error in MOST_ERROR.items()}.get(measurement.dtype)
    if most is None or measurement.failure or (measurement.error or 0.0) <= most:
        return measurement
    return replace(measurement, seconds={}, notes=(*measurement.notes, f"wrong: an error of {measurement.error:.1e}"))


def attempted(
    measurements: Iterator[Measurement], bench: Bench, group: str, name: str, dtype: str = "", shape: Sequence[int] = ()
) -> Iterator[Measurement]:
    """The ``measurements`` of one case, each ``judged``. If they end in an error, every backend that has none by then
    has one that says why; so the cases after this one are measured."""
    waiting = list(bench.backends)
    try:
        for measurement in measurements:
            waiting = [backend for backend in waiting if backend != measurement.backend]
            yield judged(measurement)
    except Exception as error:
        notes = (f"failed: {type(error).__name__}: {str(error)[:300]}",)
        for backend in waiting or bench.backends:
            yield Measurement(group, name, bench.device, backend, dtype, tuple(shape), {}, notes=notes)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; NaN if either contains one, so that unwritten elements are noticed."""
    difference = torch.linalg.vector_norm(out.double() - reference)
    return float(difference / torch.linalg.vector_norm(reference.double()))


def duration(seconds: float) -> str:
    """``seconds`` with three digits, in the largest unit of which it is at least 1, such as ``"12.3 us"``."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def condensed(ratios: Sequence[float]) -> str:
    """The geometric mean, the 5th percentile and the least of ``ratios``, in words."""
    ordered = sorted(ratios)
    mean, fifth = statistics.geometric_mean(ordered), ordered[len(ordered) // 20]
    return f"geometric mean {mean:.2f}, 5th percentile {fifth:.2f}, worst {ordered[0]:.2f} of {len(ordered)}"


def environment(bench: Bench, commit: str | None = None) -> dict[str, Any]:
    """The hardware, versions, commit and command, without which a figure cannot be interpreted.

    ``commit``: the commit of a copy that is not a git checkout; by default git is asked.
    """
    facts: dict[str, Any] = {
        "jitgen": __version__,
        "commit": commit or current_commit(),
        "command": shlex.join(["python", "-m", "jitgen", *sys.argv[1:]]),
        **versions(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "settings": asdict(bench),
    }
    if bench.device == "cpu":
        from jitgen.compilers import host
        from jitgen.runtime.cpu import last_level_cache
        from jitgen.spec import host_target

        facts |= {
            "target": str(host_target()),
            "last_level_cache": last_level_cache(),
            "compiler": str(host.toolchain()),
        }
    else:
        facts |= gpu_facts()
    return facts


def made(script: str, commit: str | None = None, device: str | None = None) -> dict[str, Any]:
    """What made a record of ``python -m script``: the command, the commit, versions, and the GPU or the processor.

    Args:
        commit: where there is no checkout.
        device: ``"cuda"`` or ``"cpu"``, what was measured; by default a GPU where there is one.
    """
    on_gpu = torch.cuda.is_available() if device is None else device == "cuda"
    return {
        "command": shlex.join(["python", "-m", script, *sys.argv[1:]]),
        "commit": commit or current_commit(),
        **versions(),
        **(gpu_facts() if on_gpu else {"cpu": cpu_model()}),
    }


def versions() -> dict[str, Any]:
    """The versions of Python, torch and Triton, and the system."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def gpu_facts() -> dict[str, Any]:
    """The first GPU with its driver, and the version of CUDA and of NVRTC."""
    from jitgen.compilers import nvrtc

    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "l2": gpu.L2_cache_size,
        "cuda": torch.version.cuda,
        "compiler": str(nvrtc.toolchain()),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
    }


def current_commit() -> str | None:
    """The commit of the checkout, followed by ``+`` if files differ from it; None outside of a checkout."""
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}{'+' if changed else ''}" if commit else None


def _output(*command: str) -> str | None:
    """What ``command`` prints; None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _triton_version() -> str | None:
    """The version of the installed Triton; None where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None
