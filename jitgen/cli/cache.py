"""Implements ``jitgen cache``: ls, show, verify, prune, export, import, unprotect, keygen, clear, path, why.

Each command calls a method of ``jitgen.store.Store``. Like a commit in git, a key may be abbreviated to any unambiguous
prefix of four or more digits. The exit status is 0, or 1 if an entry is damaged or missing, or 2 if the store cannot be
used.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jitgen import settings
from jitgen.cli.group import SuggestingGroup
from jitgen.cli.show import age, answer, in_units, json_option, print_json, print_table, say

if TYPE_CHECKING:
    from jitgen.store import Entry, Store

_SHORTEST_PREFIX = 4
"""The fewest hex digits by which a key may be abbreviated."""


def _open() -> Store:
    """Opens the store, which is imported when a command runs, so that ``--help`` does not wait for torch."""
    from jitgen.store import Store

    return Store.open()


@click.group(cls=SuggestingGroup)
def cache() -> None:
    """Look into the on-disk store, check it, trim it, carry it elsewhere."""


@cache.command("ls")
@click.argument("prefix", default="")
@click.option("--kind", type=click.Choice(["artifact", "plan"]), help="Only these entries.")
@json_option
def list_entries(prefix: str, kind: str | None, as_json: bool) -> None:
    """List the entries, the layers' too, whose key starts with PREFIX."""
    store = _open()
    entries = [entry for entry in store.entries(prefix) if kind in (None, entry.kind)]
    if as_json:
        print_json([asdict(entry) | {"what": _what(store, entry)} for entry in entries])
        return
    now = time.time()
    print_table(
        ("kind", "key", "size", "used", "what"),
        [(e.kind, e.key[:12], in_units(e.size), age(now - e.used), _what(store, e)) for e in entries],
    )


@cache.command()
@click.argument("key")
@click.argument("file", required=False)
@json_option
def show(key: str, file: str | None, as_json: bool) -> None:
    """Show the entry KEY; with FILE, print that file of an artifact, such as kernel.cu."""
    store = _open()
    entry = _find(store, key)
    content = store.peek(entry)
    if content is None:
        raise click.ClickException(f"{entry.kind} {entry.key} is damaged; `jitgen cache why {key}` says how")
    if not isinstance(content, dict) and file:
        click.echo(content.read(file), nl=False)
        return
    if not isinstance(content, dict):
        facts: dict[str, Any] = {
            "kind": entry.kind,
            "key": entry.key,
            "directory": str(content.directory),
            "binary": content.binary,
            "files": {name: record.size for name, record in content.files.items()},
            "meta": dict(content.meta),
        }
    else:
        facts = {"kind": entry.kind, "key": entry.key, "path": str(entry.path), "plan": content}
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts)


@cache.command()
@click.option("--repair", is_flag=True, help="Remove what is damaged; it is compiled again when it is asked for.")
@json_option
def verify(repair: bool, as_json: bool) -> None:
    """Read every entry. Exits 0 when all are whole, 1 when something is damaged, 2 when the store is unusable."""
    store = _open()
    result = store.verify()
    if repair:
        for finding in result.damaged:
            store.remove(finding.kind, finding.key)
        store.empty_quarantine()
    findings = (*result.damaged, *result.incomplete)
    answer(
        as_json,
        asdict(result) | {"clean": result.clean, "repaired": repair},
        *(f"{finding.state}: {finding.kind} {finding.key}: {finding.detail}" for finding in findings),
        f"{result.checked} entries read, {len(result.damaged)} damaged{' and removed' if repair else ''}, "
        f"{len(result.incomplete)} incomplete, {len(result.leftovers)} leftovers to sweep, "
        f"{len(result.quarantined)} in quarantine",
    )
    sys.exit(0 if result.clean or repair else 1)


def _size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Returns the number of bytes that ``--limit`` gives, such as ``20G``."""
    try:
        return None if text is None else int(settings.SETTINGS["JITGEN_CACHE_LIMIT"].parse(text))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@cache.command()
@click.option("--limit", callback=_size, help="Bytes to keep, such as 500M or 20G (default: JITGEN_CACHE_LIMIT).")
@json_option
def prune(limit: int | None, as_json: bool) -> None:
    """Remove the least recently used entries until the store fits the limit, and sweep leftovers."""
    result = _open().prune(limit)
    sizes = f"{in_units(result.size_before)} before, {in_units(result.size_after)} now"
    spared = f", {result.spared} in use or protected" if result.spared else ""
    answer(as_json, asdict(result), f"{len(result.removed)} entries removed{spared}; {sizes}")


@cache.command("export")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("keys", nargs=-1)
@click.option("--sign", type=click.Path(exists=True, dir_okay=False), help="Sign every entry with this private key.")
@json_option
def export_entries(path: Path, keys: tuple[str, ...], sign: str | None, as_json: bool) -> None:
    """Write entries to the bundle PATH: all, or those of KEYS with the artifacts their plans name.

    A bundle can be imported, or be named in JITGEN_CACHE_PATH as it is. The same entries make the same bytes.
    """
    from jitgen.store import signing

    store = _open()
    signer = signing.signer(sign) if sign else None
    written = store.export(path, [_find(store, key).key for key in keys] if keys else None, signer)
    text = f"{len(written)} entries, {in_units(path.stat().st_size)} in {path}"
    answer(as_json, [asdict(entry) for entry in written], text)


@cache.command("import")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--protect", metavar="NAME", help="Keep prune from removing these entries, until `unprotect NAME`.")
@json_option
def import_entries(path: Path, protect: str | None, as_json: bool) -> None:
    """Take in the entries of the bundle PATH. Exits 1 when some were damaged; the others are taken in."""
    store = _open()
    if protect:
        from jitgen.store import protection

        protection.check_name(protect)
    result = store.import_(path)
    if protect:
        store.protect(protect, [entry.key for entry in (*result.added, *result.present)])
    answer(
        as_json,
        asdict(result),
        *(f"damaged: {finding.kind} {finding.key}: {finding.detail}" for finding in result.damaged),
        f"{len(result.added)} added, {len(result.present)} here already, {len(result.damaged)} damaged",
    )
    sys.exit(1 if result.damaged else 0)


@cache.command()
@click.argument("name")
@json_option
def unprotect(name: str, as_json: bool) -> None:
    """Let prune remove again what `import --protect NAME` protected. Exits 1 if nothing has that name."""
    known = _open().unprotect(name)
    text = f"{name} is no longer protected" if known else f"nothing is protected as {name}"
    answer(as_json, {"unprotected": known}, text)
    sys.exit(0 if known else 1)


@cache.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def keygen(path: Path, as_json: bool) -> None:
    """Make an ed25519 key: the private one in PATH, the public one in PATH.pub.

    JITGEN_SIGNING_KEY=PATH signs what is compiled, and `cache export --sign PATH` what is exported. Where
    JITGEN_TRUSTED_KEYS names the public key, layers and archives must be signed with it.
    """
    from jitgen.store import signing

    public = signing.make_key(path)
    answer(as_json, {"private": path, "public": public}, public)


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(yes: bool, as_json: bool) -> None:
    """Remove every entry of the store."""
    store = _open()
    if not yes:
        click.confirm(f"Remove every entry of {store.root}?", abort=True, err=True)
    removed = store.clear()
    answer(as_json, {"removed": removed}, f"{removed} entries removed from {store.root}")


@cache.command("path")
@json_option
def show_path(as_json: bool) -> None:
    """Print where the store is."""
    store = _open()
    answer(as_json, {"root": store.root, "layers": store.layers, "writable": store.writable}, store.root)


@cache.command()
@click.argument("subject", metavar="KEY_OR_FUNCTION")
@click.option("--target", help="Of FUNCTION: such as sm_90a (default: cpu, this host).")
@click.option("--arg", "texts", multiple=True, metavar="[NAME=]VALUE", help="Of FUNCTION: an argument, as of `source`.")
@json_option
def why(subject: str, target: str | None, texts: tuple[str, ...], as_json: bool) -> None:
    """Say what the store and its layers have of KEY, or of a call of FUNCTION, and what is the matter with it.

    FUNCTION is FILE_OR_MODULE:FUNCTION. Of a call that misses, it is said how the nearest entry differs. Exits 1 if it
    is a miss. `jitgen cache why model.py:gate --target sm_90a --arg 'bf16[M,4096]' --arg 2.0`
    """
    store, missing = _open(), ""
    if ":" in subject:
        key, missing = _of_call(store, subject, target, texts)
    else:
        key = subject if len(subject) == 64 else _find(store, subject).key
    findings = store.why(key)
    present = any(finding.state == "present" for finding in findings)
    if as_json:
        absent = {"kind": "plan", "key": key, "path": store.root, "state": "absent", "detail": missing, "layer": False}
        print_json([asdict(finding) for finding in findings] + ([absent] if missing else []))
    else:
        for finding in findings:
            owner = "layer" if finding.layer else "store"
            say(f"{finding.state}: {finding.kind} in the {owner}, {finding.path}: {finding.detail}")
        if missing:
            say(missing)
        elif not findings:
            directories = ", ".join(map(str, (store.root, *store.layers)))
            say(f"absent: {key} is in none of {directories}")
    sys.exit(0 if present else 1)


def _of_call(store: Store, function: str, target: str | None, texts: tuple[str, ...]) -> tuple[str, str]:
    """Returns the request key of a call and, unless the store has it, how the nearest entry differs and what builds
    it."""
    import shlex

    from jitgen import misses
    from jitgen.cli.source import load_function, lower

    lowered = lower(load_function(function), texts, target, None).lowered
    if store.get_plan(lowered.key) is not None:
        return lowered.key, ""
    words = ["jitgen", "source", function, "--target", str(lowered.route.target)]
    words += [word for text in texts for word in ("--arg", text)]
    kind = {"cpu": "asm", "cuda": "ptx"}.get(lowered.route.target.kind, "amdgcn")
    return lowered.key, misses.described(lowered, store, lambda: shlex.join([*words, "--asm", kind]))


def _find(store: Store, prefix: str) -> Entry:
    """Returns the one entry whose key starts with ``prefix``."""
    lowered = prefix.lower()
    if len(lowered) < _SHORTEST_PREFIX or set(lowered) - set("0123456789abcdef"):
        raise click.UsageError(f"{prefix!r} is no key: give {_SHORTEST_PREFIX} or more of its 64 hex digits")
    entries: dict[tuple[str, str], Entry] = {}
    for entry in store.entries(lowered):
        entries.setdefault((entry.kind, entry.key), entry)
    if not entries:
        raise click.ClickException(f"no entry of {store.root} or its layers starts with {prefix}")
    if len(entries) > 1:
        candidates = "".join(f"\n  {kind} {key}" for kind, key in entries)
        raise click.ClickException(f"{prefix} is ambiguous:{candidates}")
    return next(iter(entries.values()))


def _what(store: Store, entry: Entry) -> str:
    """Describes an entry in a few words: what was compiled, for which target, by which toolchain."""
    content = store.peek(entry)
    if content is None:
        return "damaged"
    if not isinstance(content, dict):
        facts = (content.meta.get(name) for name in ("entry", "target", "toolchain"))
        return " ".join(str(fact) for fact in facts if fact)
    return f"{len(content.get('artifacts', ()))} artifacts"


def _print_facts(facts: Mapping[str, Any], indent: int = 0) -> None:
    """Prints nested facts, one to a line, indented by ``indent`` spaces."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            say(f"{' ' * indent}{name}:")
            _print_facts(value, indent + 2)
        else:
            say(f"{' ' * indent}{name}: {value}")
