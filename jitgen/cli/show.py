"""Prints the results of commands: JSON for programs, a table on a terminal, tab-separated columns in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from jitgen.console import is_terminal, printable

json_option: Callable[[Any], Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON, for a program.")


def print_json(value: Any) -> None:
    """Prints ``value`` as JSON. What JSON has no type for, such as a path, is printed as a string."""
    click.echo(json.dumps(value, indent=2, default=str))


def answer(as_json: bool, facts: Any, *lines: object) -> None:
    """Prints ``facts`` as JSON where that is asked for, else ``lines``."""
    if as_json:
        print_json(facts)
    for line in () if as_json else lines:
        say(line)


def say(text: object, *, err: bool = False) -> None:
    """Prints a line, or lines, in which a store, a manifest or an archive may be quoted."""
    click.echo(printable(str(text)), err=err)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, with a header on a terminal; in a pipe each row is one tab-separated line, for cut and awk."""
    if not is_terminal(sys.stdout):
        for row in rows:
            say("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)


def in_units(size: float) -> str:
    """Returns ``size``, in bytes, in the unit that suits it, such as ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age(seconds: float) -> str:
    """Returns how long ago ``seconds`` is, in the largest unit that fits, such as ``"3 h ago"``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
