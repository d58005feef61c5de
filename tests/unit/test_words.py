"""Checks the mechanical part of how jitgen is written: names, and the first sentences of docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import jitgen
from tests import modules as files

PACKAGE = Path(jitgen.__file__).parent

BANNED = {"beside", "each", "found", "given", "held", "of", "part", "parts", "turns"}
"""Names that say nothing of what they name, with and without an underscore before them."""

VERBS = frozenset(
    re.findall(
        r"\w+",
        """
    Accepts Accesses Accumulates Acts Adds Answers Appends Applies Asks Assembles Assigns Batches Begins Binds
    Broadcasts Builds
    Caches Calls Captures Changes Checks Chooses Claims Clamps Collects Combines Compares Compiles Composes Computes
    Connects Converts Convolves Copies Counts Cuts Decides Declares Decodes Decorates Defines Deletes Dequantises
    Derives Describes Differentiates Digests Disables Disassembles Divides Does Draws Drops Emits Encodes Ends Enters
    Estimates Evaluates Exchanges Expands Explains Exports Expresses Extends Finds Fits Fixes Flattens Follows Forbids
    Forgets Formats Frames Gathers Generates Gives Groups Guards Halves Handles Has Hears Holds Identifies Implements
    Imports Improves Indexes Inserts Integrates Interns Interpolates Inverts Joins Keeps Knows Launches Lays Lets Lists
    Loads Locates Locks Looks Lowers Maintains Makes Maps Marks Masks Matches Materialises Merges Mixes Models Moves
    Multiplies Narrows Normalises Notes Numbers Opens Orders Orients Packages Packs Pads Pairs Parses Partitions
    Permutes Pickles Plans Pools Prefetches Prepares Presents Prints Protects Proves Provides Puts Quantises Quotes
    Raises Reads Rearranges Rebuilds Recognises Recomputes Records Reduces Refers Refuses Registers Reinterprets
    Releases Remembers Removes Renames Renders Renumbers Replaces Replays Reports Represents Rescales Reshapes Resolves
    Restores Restricts Returns Rewrites Rotates Rounds Runs Samples Saves Says Scans Scatters Schedules Selects Sends
    Serves Sets Shares Shows Signs Slices Sorts Splits Spreads Stands States Stops Stores Substitutes Subtracts Suggests
    Sums Tabulates Takes Tells Times Traces Tracks Transposes Tries Trims Turns Undoes Unpacks Updates Views Warns
    Widens Wraps Writes Yields
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
        yield path.relative_to(PACKAGE.parent).as_posix(), files.tree(path)


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
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


def is_command(node: ast.AST) -> bool:
    """Tells whether a docstring is the help of a command, which the command line's users read: an imperative."""
    decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
    return any(re.match(r"\w+\.(command|group)\b", decorator) for decorator in decorators)


def test_names_say_what_they_name() -> None:
    banned = [
        f"{module}:{line}: {name}"
        for module, tree in modules()
        for line, name in names(tree)
        if name.strip("_") in BANNED
    ]
    assert not banned, "\n".join(banned)


def test_docstrings_start_with_a_sentence() -> None:
    phrases = []
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and not is_command(node):
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
