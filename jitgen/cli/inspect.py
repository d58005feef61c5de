"""Writes a page about a function with ``jitgen inspect``: its IR, kernels, their origin, resources and machine code."""

from __future__ import annotations

from pathlib import Path

import click

from jitgen import settings
from jitgen.cli.source import arguments_option, load_function, lower


@click.command()
@click.argument("function", metavar="FILE_OR_MODULE:FUNCTION")
@click.option("--html", "path", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The page's file.")
@click.option("--target", "targets", multiple=True, help="Such as sm_90a; may be repeated (default: cpu, this host).")
@arguments_option
@click.option(
    "--backend", type=click.Choice(settings.BACKENDS), help="Default: the function's own, else by the target."
)
@click.option("--compile/--no-compile", default=True, help="Compile, for registers and machine code (default).")
def inspect(
    function: str, path: Path, targets: tuple[str, ...], texts: tuple[str, ...], backend: str | None, compile: bool
) -> None:
    """Write a self-contained HTML page about a call of FUNCTION with these arguments.

    Arguments are as `jitgen source` takes them. `jitgen inspect model.py:gate --arg 'bf16[M,4096]' --html gate.html`
    """
    from jitgen.cli import page

    function_ = load_function(function)
    lowered = [lower(function_, texts, target, backend) for target in targets or ("cpu",)]
    text, problems = page.render(
        getattr(function_.function, "__qualname__", function_.name), function_.function, lowered, compile
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    for problem in problems:
        click.echo(problem, err=True)
    click.echo(str(path))
