"""Implements ``jitgen bench``, whose benchmarks are the package ``bench`` of a source checkout; a wheel does not have
them.

Where jitgen is imported from a checkout, ``bench`` is the command of ``bench/command.py``; elsewhere it says what it
needs.
"""

from __future__ import annotations

import importlib
import sys

import click

from jitgen._data import checkout_directory

NEEDS_CHECKOUT = (
    "bench: the benchmarks are not part of the installed package. They are in the folder bench/ of jitgen's source "
    "checkout: get one, go there, and run python -m jitgen bench"
)


@click.command("bench", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def without_checkout(arguments: tuple[str, ...]) -> None:
    """Time generated kernels and their peers. It needs a source checkout of jitgen, which has the benchmarks."""
    raise click.ClickException(NEEDS_CHECKOUT)


def command() -> click.Command:
    """Returns the command of the checkout that jitgen is imported from, or one that says that it needs a checkout."""
    checkout = checkout_directory()
    if checkout is None or not (checkout / "bench" / "command.py").is_file():
        return without_checkout
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    bench: click.Command = importlib.import_module("bench.command").bench
    return bench


bench = command()
