"""Shows what ``jitgen prewarm`` builds: a bar on a terminal, else one line for each entry."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jitgen.cli.show import say
from jitgen.console import is_terminal, printable

if TYPE_CHECKING:
    from jitgen.deploy.prewarm import Prewarmed, Progress


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
