"""The command line: ``jitgen ...`` and ``python -m jitgen ...``.

``group`` holds the table of commands, one file each; ``show`` prints their answers, as JSON where a program reads.
Outermost layer: it may import everything, and nothing imports it.
"""

from __future__ import annotations


def main() -> None:
    """The entry point; exits with the command's status."""
    from jitgen.cli.group import jitgen

    jitgen(prog_name="jitgen")
