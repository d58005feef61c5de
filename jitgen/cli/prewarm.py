"""``jitgen prewarm`` compiles the kernels of a manifest for named targets; the machine needs no such device."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from jitgen.cli.show import json_option, print_json, print_table


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--target", "targets", multiple=True, required=True, help="Such as sm_90a; give it again for another.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(min=1), help="Kernels compiled at a time.")
@json_option
def prewarm(manifest: Path, targets: tuple[str, ...], jobs: int, as_json: bool) -> None:
    """Put every kernel of MANIFEST into the store. Exits 0 only when everything is there.

    A manifest is written by `jitgen.record`, or by a program that runs under JITGEN_RECORD=PATH.
    """
    from jitgen.deploy.prewarm import PrewarmReport
    from jitgen.deploy.prewarm import prewarm as build
    from jitgen.errors import JitgenError

    failure = None
    try:
        report = build(manifest, targets, jobs)
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
            [(e.name, e.target, e.origin, e.key[:12], _first_line(e.detail)) for e in report.entries],
        )
        click.echo(str(report), err=True)
    if failure is not None:
        click.echo(f"Error: {failure}", err=True)
        sys.exit(1)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
