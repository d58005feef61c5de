"""Checks the mechanical part of how jitgen is written: names, and the first sentences of docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import jitgen

PACKAGE = Path(jitgen.__file__).parent

NOT_READ: tuple[str, ...] = (
    "jitgen/__init__.py",
    "jitgen/__main__.py",
    "jitgen/_data.py",
    "jitgen/_version.py",
    "jitgen/api.py",
    "jitgen/call/derivative.py",
    "jitgen/checkpoints/",
    "jitgen/cli/",
    "jitgen/codegen/",
    "jitgen/compilers/",
    "jitgen/console.py",
    "jitgen/deploy/",
    "jitgen/device.py",
    "jitgen/dynamo/",
    "jitgen/errors.py",
    "jitgen/events.py",
    "jitgen/export/",
    "jitgen/families/",
    "jitgen/fields.py",
    "jitgen/fingerprint.py",
    "jitgen/forks.py",
    "jitgen/gradients/",
    "jitgen/huggingface/",
    "jitgen/inspect.py",
    "jitgen/ir/",
    "jitgen/kernel/",
    "jitgen/lowering.py",
    "jitgen/misses.py",
    "jitgen/nn/",
    "jitgen/paths.py",
    "jitgen/pipeline.py",
    "jitgen/progress.py",
    "jitgen/schedule/",
    "jitgen/scratch.py",
    "jitgen/settings.py",
    "jitgen/spec.py",
    "jitgen/trace/",
)
"""Where the rules do not hold yet: prefixes of paths. The list only becomes shorter."""

BANNED = {"beside", "each", "found", "of"}
"""Names that say nothing of what they name."""

VERBS = frozenset(
    re.findall(
        r"\w+",
        """
    Adds Applies Assembles Binds Builds Caches Calls Changes Checks Chooses Compiles Computes Converts Copies Counts
    Cuts Decides Decodes Defines Deletes Dequantises Describes Divides Emits Encodes Enters Exchanges Expands Explains
    Exports Extends Finds Fits Flattens Gathers Generates Gives Handles Has Holds Identifies Implements Improves Interns
    Joins Keeps Knows Launches Lets Lists Loads Locates Looks Lowers Maintains Makes Maps Marks Mixes Moves Multiplies
    Notes Numbers Opens Packs Pads Pairs Parses Pickles Prepares Prints Protects Provides Puts Quantises Raises Reads
    Rearranges Rebuilds Records Refers Refuses Registers Reinterprets Releases Remembers Removes Replaces Reports
    Represents Resolves Returns Rewrites Rounds Runs Says Scales Scans Sends Signs Sizes Stores Takes Tells Traces
    Tracks Trims Turns Undoes Updates Views Warns Wraps Writes Yields
    """,
    )
)
"""What a docstring may start with, its subject implied, as in the standard library."""

FINITE = frozenset(
    re.findall(
        r"\w+",
        """
    is are was were has have does do can may must cannot will would should becomes become makes takes gives keeps holds
    needs goes belongs consists depends comes gets stays varies differs says knows means stands begins ends counts reads
    writes computes returns
    """,
    )
)
"""Verbs that no plural noun looks like, one of which the first clause has to have where a subject is named."""

RELATIVE = frozenset(re.findall(r"\w+", "that which who whose where what how whether as if when why while for than"))
"""Words that begin another clause, whose verb is not that of the sentence."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE.parent).as_posix()
        if not name.startswith(NOT_READ):
            yield name, ast.parse(path.read_text())


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name


def is_sentence(text: str) -> bool:
    """Tells whether ``text`` starts with a verb, or has one before a word that begins another clause."""
    words = re.findall(r"``[^`]*``|[\w'-]+|[:;]", re.split(r"\n\n|[.!?](?=\s)", text, maxsplit=1)[0])
    if not words or words[0] in VERBS:
        return bool(words)
    for index, word in enumerate(words):
        if word.lower() in RELATIVE or word in ":;":
            return False
        if index and word.lower() in FINITE:
            return True
    return False


def test_names_say_what_they_name() -> None:
    banned = [f"{module}:{line}: {name}" for module, tree in modules() for line, name in names(tree) if name in BANNED]
    assert not banned, "\n".join(banned)


def test_docstrings_start_with_a_sentence() -> None:
    phrases = []
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text is not None and not is_sentence(text):
                    phrases.append(f"{module}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert not phrases, "\n".join(phrases)


def test_what_is_a_sentence() -> None:
    for text in (
        "Returns the names.",
        "A kernel is a list of instructions that threads run.",
        "``x`` has one row: it.",
    ):
        assert is_sentence(text), text
    for text in (
        "What is stored.",
        "The names that a plan has.",
        "Whether both are equal.",
        "Rows: how many it has.",
        "",
    ):
        assert not is_sentence(text), text


def test_what_is_not_read_exists() -> None:
    for prefix in NOT_READ:
        assert (PACKAGE.parent / prefix).exists(), prefix
