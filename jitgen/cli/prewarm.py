"""Compiles the kernels of a manifest for named targets with ``jitgen prewarm``; the machine needs no such device.

What is built is shown as it is done: by a bar on a terminal, else by a line for each entry.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from jitgen.cli.show import json_option, print_json, print_table, say
from jitgen.console import is_terminal, printable

if TYPE_CHECKING:
    from jitgen.deploy.prewarm import Prewarmed, Progress


def _shard(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, int]:
    """Parses ``i/n`` as ``(i, n)``."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise click.BadParameter("expected i/n with 1 <= i <= n, such as 2/8")
    return int(match[1]), int(match[2])


@click.command()
@click.argument("manifest")
@click.option("--target", "targets", multiple=True, required=True, help="Such as sm_90a; give it again for another.")
@click.option("--jobs", type=click.IntRange(min=1), help="Worker processes, at most [default: what fits the machine].")
@click.option("--shard", default="1/1", metavar="I/N", callback=_shard, help="Build the I-th of N shares only.")
@click.option("--executor", metavar="URL", help="Build on a cluster's workers: dask://HOST:PORT of its scheduler.")
@json_option
def prewarm(
    manifest: str,
    targets: tuple[str, ...],
    jobs: int | None,
    shard: tuple[int, int],
    executor: str | None,
    as_json: bool,
) -> None:
    """Put every kernel of MANIFEST into the store. Exits 0 only when everything is there and loads.

    MANIFEST is a file that `jitgen.record`, or a program under JITGEN_RECORD=PATH, wrote; or the name of a manifest
    that jitgen ships, such as llama-3-8b.
    """
    from jitgen.deploy import executors
    from jitgen.deploy.prewarm import PrewarmReport
    from jitgen.deploy.prewarm import prewarm as build
    from jitgen.errors import JitgenError

    failure, started = None, time.monotonic()
    try:
        with executors.at(executor) if executor else nullcontext() as pool, progress() as tell:
            report = build(manifest, targets, jobs, shard=shard, executor=pool, progress=tell)
    except JitgenError as error:
        partial = getattr(error, "report", None)
        if not isinstance(partial, PrewarmReport):
            raise
        report, failure = partial, error
    if as_json:
        print_json({"complete": failure is None, "entries": [asdict(entry) for entry in report.entries]})
    else:
        print_table(
            ("function", "target", "", "key", "detail"),
            [(e.signature or e.name, e.target, e.origin, e.key[:12], first_line(e.detail)) for e in report.entries],
        )
    seconds = time.monotonic() - started
    rate = len(report.entries) / max(seconds, 1e-9)
    say(f"{len(report.entries)} entries in {seconds:.1f} s ({rate:.1f}/s): {report}", err=True)
    if failure is not None:
        say(f"Error: {failure}", err=True)
        sys.exit(1)


@contextmanager
def progress() -> Iterator[Progress]:
    """Provides a function that is told of every entry that is done. Everything is written to standard error."""
    if is_terminal(sys.stderr):
        with _bar() as tell:
            yield tell
    else:
        yield _line


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def _line(entry: Prewarmed, done: int, total: int) -> None:
    reason = f": {first_line(entry.detail)}" if entry.detail else ""
    width = len(str(total))
    say(
        f"[{done:{width}}/{total}] {entry.origin:8} {entry.seconds:6.2f} s  {entry.target}  "
        f"{entry.signature or entry.name}{reason}",
        err=True,
    )


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f}/s, {task.fields[failed]} failed"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    started, failed = time.monotonic(), 0
    with Bar(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task("", total=None, rate=0.0, failed=0)

        def tell(entry: Prewarmed, done: int, total: int) -> None:
            nonlocal failed
            what = escape(printable(f"{entry.signature or entry.name} for {entry.target}"))
            if entry.origin == "failed":
                failed += 1
                bar.console.print(f"[red]failed[/red] {what}: {escape(printable(first_line(entry.detail)))}")
            rate = done / max(time.monotonic() - started, 1e-9)
            bar.update(row, completed=done, total=total, description=what, rate=rate, failed=failed)

        yield tell
