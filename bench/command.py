"""``jitgen bench`` prints a table of measurements, and writes JSON with everything needed to repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bench import GROUPS, NOT_BY_DEFAULT, records
from jitgen import progress
from jitgen.cli.show import print_table

if TYPE_CHECKING:
    from bench.measurement import Measurement


@click.command()
@click.argument("names", nargs=-1, type=click.Choice((*GROUPS, *NOT_BY_DEFAULT)))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: the best one here.")
@click.option("--json", "path", type=click.Path(path_type=Path, dir_okay=False), help="Also write JSON to this file.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), help="Also write SVG plots to this folder.")
@click.option("--quick", is_flag=True, help="Fewer repeats, and without torch.compile.")
@click.option("--backend", type=click.Choice(["cuda", "triton", "cpp"]), help="Default: all that the device has.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random sizes of sweep.")
@click.option("--cases", type=click.IntRange(1), default=40, show_default=True, help="How many sizes sweep draws.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="After so many seconds sweep begins no further case; default: never.",
)
@click.option(
    "--part",
    type=(click.IntRange(1), click.IntRange(1)),
    metavar="N M",
    default=(1, 1),
    help="Of sweep, every M-th case from the N-th on, for M cards of a host; python -m bench.records joins the files.",
)
@click.option("--commit", help="The commit to record; default: the checkout's.")
@click.option(
    "--jobs", type=click.IntRange(1), default=1, hidden=True, help="Compile torch.compile's in so many first."
)
def bench(
    names: tuple[str, ...],
    device: str | None,
    path: Path | None,
    plot: Path | None,
    quick: bool,
    backend: str | None,
    seed: int,
    cases: int,
    seconds: float | None,
    part: tuple[int, int],
    commit: str | None,
    jobs: int,
) -> None:
    """Time generated kernels and their peers in this process.

    NAMES are groups; if there is none, all but sweep, formats, packing and compiles. Sweep measures matrix products
    and, on a GPU, attention of random sizes, and with the name of a group, products, batched, attention or reductions,
    cases of that group. Exits with 1 where a case failed or computed something wrong, after all others.
    """
    from bench import attention, formats, packing, reductions, sweep
    from bench.measurement import environment
    from bench.suite import configure, run

    if part[0] > part[1]:
        raise click.UsageError(f"--part {part[0]} {part[1]}: there are {part[1]} parts")
    configuration = configure(device, quick, backend, seed, cases, seconds, part)
    facts = environment(configuration, commit)
    click.echo("\n".join(f"{name}: {value}" for name, value in facts.items() if name != "settings"), err=True)
    measurements: list[Measurement] = []
    try:  # before anything is measured
        if path is not None:
            records.write(path, records.record(facts, measurements, complete=False))
        if plot is not None:
            plot.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{error.filename} cannot be written: {error.strerror}") from error
    with progress.line("measuring") as say:
        for measurement in run(configuration, names, jobs):
            measurements.append(measurement)
            case = f"{measurement.group}: {measurement.name} {measurement.dtype} {measurement.backend}"
            say(f"{len(measurements)} done, the last {case}")
            if path is not None:  # after each, so that a run that is stopped has lost nothing
                records.write(path, records.record(facts, measurements, complete=False))
    if path is not None:
        records.write(path, records.record(facts, measurements, complete=True))
    if plot is not None:
        _draw(plot, measurements)
    print_table(
        ("group", "case", "backend", "dtype", "jitgen", "rate", "error", "peers"), list(map(_row, measurements))
    )
    timed = [measurement for measurement in measurements if not measurement.failure]
    for line in sweep.summary(measurements):
        click.echo(line)
    for module in (attention, reductions, formats, packing):
        for line in module.summary(timed):
            click.echo(line)
    if failed := records.failures([measurement.to_json() for measurement in measurements]):
        click.echo("\n".join(records.told(failed, len(measurements))), err=True)
        raise click.exceptions.Exit(1)


def _draw(directory: Path, measurements: Sequence[Measurement]) -> None:
    """Write the plots of ``measurements``."""
    from bench.plots import plots

    for name, text in plots([measurement.to_json() for measurement in measurements]).items():
        (directory / name).write_text(text, encoding="utf-8")


def _row(measurement: Measurement) -> tuple[str, ...]:
    """The cells of a measurement. A peer is shown by its time as a multiple of jitgen's."""
    from bench.measurement import duration

    own = measurement.seconds.get("jitgen")
    rates = []
    if measurement.moved and own:
        rates.append(f"{measurement.moved / own / 1e9:.1f} GB/s")
    if measurement.flops and own:
        rates.append(f"{measurement.flops / own / 1e9:.0f} GFLOP/s")
    return (
        measurement.group,
        measurement.name,
        measurement.backend,
        measurement.dtype,
        duration(own) if own else "failed",
        ", ".join(rates),
        "" if measurement.error is None else f"{measurement.error:.1e}",
        ", ".join(f"{peer} {ratio:.2f}x" for peer, ratio in measurement.ratios.items()),
    )
