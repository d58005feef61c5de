"""The store: an entry comes back whole or not at all, and can be looked after."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_samples import ARTIFACT, KEY, PLAN, PLAN_KEY, cut, filled, flip, make_old, numbered_key

from jitgen.errors import CacheError
from jitgen.spec import Artifact, digest
from jitgen.store import Store, layout


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", layers=[])


# ------------------------------------------------------------------------------------------------------- round trip


def test_an_artifact_comes_back_whole(store: Store) -> None:
    assert store.get_artifact(KEY) is None
    put = store.put_artifact(ARTIFACT)
    got = store.get_artifact(KEY)
    assert got is not None
    assert got == put
    assert got.read() == got.path().read_bytes() == ARTIFACT.files["kernel.cubin"]
    assert got.text("kernel.cu") == ARTIFACT.files["kernel.cu"].decode()
    assert got.meta == {"entry": "double_square", "shared_bytes": 1024, "cluster": [1, 1, 1]}
    assert got.artifact().files == ARTIFACT.files


def test_the_entry_is_a_directory_one_can_read(store: Store) -> None:
    directory = store.put_artifact(ARTIFACT).directory
    assert directory == store.root / layout.VERSION / "artifact" / "ab" / KEY
    meta = json.loads((directory / "meta.json").read_text())
    assert meta["key"] == KEY
    for name, record in meta["files"].items():
        content = (directory / name).read_bytes()
        assert record == {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def test_a_plan_comes_back_as_json_has_it(store: Store) -> None:
    assert store.get_plan(PLAN_KEY) is None
    store.put_plan(PLAN_KEY, {"artifacts": (KEY,), "sizes": {10: "ten", 2: "two"}})
    assert store.get_plan(PLAN_KEY) == {"artifacts": [KEY], "sizes": {"10": "ten", "2": "two"}}
    store.put_plan(PLAN_KEY, PLAN)
    assert store.get_plan(PLAN_KEY) == PLAN


def test_a_whole_artifact_is_not_written_again(store: Store) -> None:
    first = store.put_artifact(ARTIFACT)
    before = first.path().stat()
    store.put_artifact(replace(ARTIFACT, meta={"entry": "another"}))
    assert first.path().stat() == before
    assert store.get_artifact(KEY) == first


def test_stores_of_equal_entries_are_equal_files(store: Store, tmp_path: Path) -> None:
    other = Store.open(tmp_path / "elsewhere", layers=[])
    for one in (store, other):
        filled(one)
    ours = {entry.path.relative_to(store.root): entry.size for entry in store.entries()}
    assert ours == {entry.path.relative_to(other.root): entry.size for entry in other.entries()}


@pytest.mark.parametrize("key", ["", "ab", "../../etc", KEY.upper(), KEY + "0", "g" * 64])
def test_a_bad_key_is_refused(store: Store, key: str) -> None:
    with pytest.raises(CacheError, match="64 lowercase hex"):
        store.get_artifact(key)
    with pytest.raises(CacheError, match="64 lowercase hex"):
        store.put_plan(key, PLAN)


@pytest.mark.parametrize("name", ["../kernel.cu", "a/b", ".hidden", "meta.json", ""])
def test_a_bad_file_name_is_refused(store: Store, name: str) -> None:
    with pytest.raises(CacheError, match="name of a file"):
        store.put_artifact(Artifact(KEY, {name: b"", "kernel.so": b""}, "kernel.so"))
    with pytest.raises(CacheError, match="not among its files"):
        store.put_artifact(Artifact(KEY, {"kernel.cu": b""}, "kernel.so"))


def test_a_hit_is_quick(store: Store) -> None:
    store.put_artifact(Artifact(KEY, {"kernel.cu": b"x" * 10_000, "kernel.cubin": os.urandom(90_000)}, "kernel.cubin"))
    best = min(_timed(lambda: store.get_artifact(KEY)) for _ in range(50))
    assert best < 1e-3


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ----------------------------------------------------------------------------------------------------------- damage


def _edited(change: Callable[[dict[str, Any]], object], *, reseal: bool = True) -> Callable[[Path], None]:
    """A change of a JSON file, with its own digest made to fit unless it is to be caught by that."""

    def edit(path: Path) -> None:
        body = json.loads(path.read_text())
        change(body)
        if reseal:
            del body["digest"]
            body["digest"] = digest(body)
        path.write_text(json.dumps(body))

    return edit


def _as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def _emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _filled_with(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "binary missing": ("kernel.cubin", Path.unlink),
    "source missing": ("kernel.cu", Path.unlink),
    "binary cut": ("kernel.cubin", cut),
    "binary empty": ("kernel.cubin", _filled_with(b"")),
    "binary flipped": ("kernel.cubin", flip),
    "source flipped": ("kernel.cu", flip),
    "binary a directory": ("kernel.cubin", _as_directory),
    "meta missing": ("meta.json", Path.unlink),
    "meta cut": ("meta.json", cut),
    "meta empty": ("meta.json", _filled_with(b"")),
    "meta not text": ("meta.json", _filled_with(b"\xff\xfe\x00")),
    "meta a list": ("meta.json", _filled_with(b"[]")),
    "meta too deep": ("meta.json", _filled_with(b"[" * 100_000)),
    "meta edited": ("meta.json", _edited(lambda body: body["meta"].update(shared_bytes=2048), reseal=False)),
    "another key": ("meta.json", _edited(lambda body: body.update(key="0" * 64))),
    "another schema": ("meta.json", _edited(lambda body: body.update(schema=0))),
    "a plan's kind": ("meta.json", _edited(lambda body: body.update(kind="plan"))),
    "files a list": ("meta.json", _edited(lambda body: body.update(files=["kernel.cu"]))),
    "binary a list": ("meta.json", _edited(lambda body: body.update(binary=["kernel.cubin"]))),
    "a path out of it": ("meta.json", _edited(lambda body: body["files"].update({"../x": {"sha256": "", "size": 0}}))),
    "an empty directory": ("", _emptied),
    "a file in its place": ("", _as_file),
}
"""What is harmed in an artifact's directory, and how."""


@pytest.mark.parametrize(("name", "harm"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_artifact_is_a_miss_until_it_is_written_again(
    store: Store, name: str, harm: Callable[[Path], object]
) -> None:
    harm(store.put_artifact(ARTIFACT).directory / name)
    assert store.get_artifact(KEY) is None
    result = store.verify()
    assert not result.clean
    assert [finding.key for finding in result.damaged] == [KEY]
    assert [finding.state for finding in store.why(KEY)] == ["damaged"]
    store.put_artifact(ARTIFACT)
    stored = store.get_artifact(KEY)
    assert stored is not None
    assert stored.artifact().files == ARTIFACT.files
    assert store.verify().clean
    assert not store.verify().leftovers


PLAN_DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": _filled_with(b""),
    "flipped": flip,
    "a directory": _as_directory,
    "another key": _edited(lambda body: body.update(key=KEY)),
    "no plan": _edited(lambda body: body.pop("plan")),
}


@pytest.mark.parametrize("harm", PLAN_DAMAGE.values(), ids=PLAN_DAMAGE.keys())
def test_a_damaged_plan_is_a_miss_until_it_is_written_again(store: Store, harm: Callable[[Path], object]) -> None:
    filled(store)
    harm(layout.plan_path(store.root, PLAN_KEY))
    assert store.get_plan(PLAN_KEY) is None
    assert [finding.key for finding in store.verify().damaged] == [PLAN_KEY]
    store.put_plan(PLAN_KEY, PLAN)
    assert store.get_plan(PLAN_KEY) == PLAN
    assert store.verify().clean


def test_what_is_altered_after_the_look_up_is_an_error(store: Store) -> None:
    stored = store.put_artifact(ARTIFACT)
    flip(stored.path("kernel.cu"))
    with pytest.raises(CacheError, match="altered while in use"):
        stored.read("kernel.cu")
    assert stored.read() == ARTIFACT.files["kernel.cubin"]
    with pytest.raises(CacheError, match=r"no file 'kernel\.ptx'"):
        stored.read("kernel.ptx")


# ------------------------------------------------------------------------------------------------------ maintenance


def test_prune_takes_the_least_recently_used_first(store: Store) -> None:
    for number in range(4):
        entry = store.put_artifact(replace(ARTIFACT, key=numbered_key(number)))
        make_old(entry.directory, 86400.0 * (4 - number))
        store.put_plan(numbered_key(10 + number), {"artifacts": [numbered_key(number)]})
    assert store.get_artifact(numbered_key(0)) is not None, "which marks it as used"
    total = sum(entry.size for entry in store.entries())
    result = store.prune(total - 1)
    assert result.size_before == total
    assert [entry.key for entry in result.removed] == [numbered_key(1), numbered_key(11)]
    assert {entry.key for entry in store.entries("")} == {numbered_key(n) for n in (0, 2, 3, 10, 12, 13)}
    assert result.size_after == sum(entry.size for entry in store.entries())
    assert not store.prune(total).removed
    store.prune(0)
    assert list(store.entries()) == []


def test_verify_tells_incomplete_plans_and_leftovers_from_damage(store: Store) -> None:
    store.put_plan(PLAN_KEY, PLAN)
    (layout.staging_path(store.root) / "left").mkdir()
    result = store.verify()
    assert result.clean
    assert [finding.key for finding in result.incomplete] == [PLAN_KEY]
    assert [path.name for path in result.leftovers] == ["left"]


def test_clear_removes_other_versions_too(store: Store) -> None:
    filled(store)
    (store.root / "v0" / "artifact").mkdir(parents=True)
    assert store.clear() == 2
    assert sorted(path.name for path in store.root.iterdir()) == [layout.VERSION]


def test_peeking_and_walking_do_not_mark_as_used(store: Store) -> None:
    filled(store)
    for entry in store.entries():
        make_old(entry.path)
    used = {entry.key: entry.used for entry in store.entries()}
    assert all(store.peek(entry) for entry in store.entries())
    assert used == {entry.key: entry.used for entry in store.entries()}
    assert [entry.key for entry in store.entries(KEY[:5])] == [KEY]
