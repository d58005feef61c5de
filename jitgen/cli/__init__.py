"""Implements the command line: ``jitgen ...`` and ``python -m jitgen ...``.

``group`` has the table of commands, each of which is a file; ``show`` prints their results, as JSON for programs. This
package is outermost: it may import everything, and nothing imports it.
"""

from __future__ import annotations


def main() -> None:
    """Runs a command and exits with its status."""
    from jitgen.cli.group import jitgen

    jitgen(prog_name="jitgen")
