"""Lists the commands. A command is imported when it is run, so that ``jitgen --help`` imports none of them.

To add a command, write ``cli/<name>.py`` with a click command of that name, and add a row to ``COMMANDS``.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

from jitgen._version import __version__
from jitgen.console import printable
from jitgen.errors import CacheError, JitgenError

COMMANDS = {
    "bench": ("jitgen.cli.bench:bench", "Time generated kernels beside eager torch, torch.compile and copies."),
    "cache": ("jitgen.cli.cache:cache", "Look into the on-disk store, check it, trim it, carry it elsewhere."),
    "doctor": ("jitgen.cli.doctor:doctor", "What this machine can run and compile, and how to get what is missing."),
    "inspect": ("jitgen.cli.inspect:inspect", "Write an HTML page: a function's IR, kernels, registers, roofline."),
    "prewarm": ("jitgen.cli.prewarm:prewarm", "Compile a manifest's kernels for named targets; needs no GPU."),
    "source": ("jitgen.cli.source:source", "Print the source generated for a function and a target; needs no GPU."),
    "tune": ("jitgen.cli.tune:tune", "Measure schedules on this machine and keep the winners of a manifest's kernels."),
}
"""For each command, its ``module:object`` and its line in ``jitgen --help``."""


class Unusable(click.ClickException):
    """Reports that the store or a manifest cannot be used. The exit status is 2, the same as for a wrong argument."""

    exit_code = 2


class SuggestingGroup(click.Group):
    """Suggests, for a command that does not exist, those that may have been meant."""

    def resolve_command(self, context: click.Context, words: list[str]) -> Any:
        try:
            return super().resolve_command(context, words)
        except click.UsageError as error:
            close = difflib.get_close_matches(words[0], self.list_commands(context))
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {' or '.join(close)}?", context) from None


class LazyGroup(SuggestingGroup):
    """Groups the commands in ``COMMANDS``, and turns jitgen's errors into a message and an exit status."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(context)])

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except CacheError as error:
            raise Unusable(printable(str(error))) from error
        except JitgenError as error:
            raise click.ClickException(printable(str(error))) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jitgen")
def jitgen() -> None:
    """jitgen: a JIT kernel compiler for PyTorch."""
