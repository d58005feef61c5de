"""The groups of cases, and the sizes that suit a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bench import (
    GROUPS,
    ahead,
    attention,
    batched,
    coldstart,
    columns,
    formats,
    intensity,
    overhead,
    packing,
    products,
    reductions,
    rows,
    streaming,
    sweep,
)
from bench.measurement import Bench, Measurement, attempted
from jitgen.errors import UnsupportedError

RUNS = {
    "streaming": streaming.run,
    "rows": rows.run,
    "columns": columns.run,
    "reductions": reductions.run,
    "products": products.run,
    "batched": batched.run,
    "attention": attention.run,
    "intensity": intensity.run,
    "overhead": overhead.run,
    "coldstart": coldstart.run,
    "compiles": coldstart.compiles,
    "sweep": sweep.run,
    "formats": formats.run,
    "packing": packing.run,
}
SWEEPS = {
    "products": sweep.products,
    "batched": sweep.batches,
    "attention": attention.sweep,
    "reductions": reductions.sweep,
}
"""What ``sweep`` together with the name of a group draws; alone it draws all kinds of ``sweep.CYCLE``."""
AHEAD = {
    "streaming": lambda bench: streaming.CASES,
    "rows": rows.cases,
    "columns": lambda bench: columns.CASES,
    "reductions": lambda bench: reductions.CASES,
}
"""The groups whose functions other processes can import, so that torch.compile can compile them in parallel."""


def configure(
    device: str | None = None,
    quick: bool = False,
    backend: str | None = None,
    seed: int = 0,
    cases: int = 40,
    seconds: float | None = None,
    part: tuple[int, int] = (1, 1),
) -> Bench:
    """A bench for ``device``, by default the best device of this machine.

    Args:
        quick: whether to measure with fewer repeats and without torch.compile. Tensors have the same sizes.
        backend, seed, cases, seconds, part: as ``Bench`` has them.

    Raises:
        UnsupportedError: this machine has no such device, or the device no such backend.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("bench: no CUDA device; `jitgen doctor` says what this machine has")
    if backend is not None and (backend == "cpp") != (device == "cpu"):
        raise UnsupportedError(
            f"bench: backend {backend!r} has no kernels for {device}; leave out --backend or name a --device"
        )
    if device == "cuda":
        cache = torch.cuda.get_device_properties(0).L2_cache_size
    else:
        from jitgen.runtime.cpu import last_level_cache

        cache = last_level_cache()
    elements = max(2**24, cache) + 2**16  # of 4 bytes each, so that they slightly exceed four times the cache
    budget, repeats = (0.4, 1) if quick else (1.0, 3)
    return Bench(device, elements, budget, not quick, repeats, backend, seed, cases, seconds, part)


def run(bench: Bench, names: Sequence[str] = (), jobs: int = 1) -> Iterator[Measurement]:
    """The measurements of the groups ``names``, or of all groups, one by one as they are taken. Where one fails that no
    case is attempted of by itself, the rest of its group is left out, and a measurement says so.

    ``jobs``: if above 1, that many processes first compile what torch.compile needs for the groups in ``AHEAD``.
    """
    default = GROUPS
    if jobs > 1 and bench.compile_peer:
        ahead.compile_ahead(
            [case for name in names or default if name in AHEAD for case in AHEAD[name](bench)], bench, jobs
        )
    runs = RUNS
    if "sweep" in names and len(names) > 1:
        names, runs = [name for name in names if name != "sweep"], SWEEPS
        unknown = ", ".join(name for name in names if name not in SWEEPS)
        if unknown:
            raise UnsupportedError(f"bench: no sweep of {unknown}; there is one of {', '.join(SWEEPS)}")
    for name in names or default:
        yield from attempted(runs[name](bench), bench, name, "the rest of the group")
