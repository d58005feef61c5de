"""Archives carry entries from store to store, and nothing else."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from store_samples import ARTIFACT, KEY, PLAN, PLAN_KEY, filled, numbered_key

from jitgen.errors import CacheError
from jitgen.store import Store, layout


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", layers=[])


def test_an_archive_carries_plans_with_their_artifacts(store: Store, tmp_path: Path) -> None:
    filled(store).put_artifact(replace(ARTIFACT, key=numbered_key(1)))
    archive = tmp_path / "store.tar"
    assert {entry.key for entry in store.export(archive, [PLAN_KEY])} == {KEY, PLAN_KEY}
    other = Store.open(tmp_path / "other", layers=[])
    result = other.import_(archive)
    assert {entry.key for entry in result.added} == {KEY, PLAN_KEY}
    assert all(entry.path.exists() for entry in result.added)
    assert other.get_plan(PLAN_KEY) == PLAN
    assert other.verify().clean
    assert not other.verify().leftovers
    again = other.import_(archive)
    assert not again.added
    assert len(again.present) == 2
    second = tmp_path / "second.tar"
    other.export(second, [PLAN_KEY])
    assert archive.read_bytes() == second.read_bytes()
    with pytest.raises(CacheError, match="not in the store"):
        store.export(archive, [numbered_key(7)])


def _tar(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, BytesIO(content))
    return path


def _link(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = "/etc/passwd"
    return info


ENTRY = f"{layout.VERSION}/artifact/ab/{KEY}"


@pytest.mark.parametrize(
    "members",
    [
        {"../escaped": b""},
        {"/escaped": b""},
        {f"{ENTRY}/../../../../../escaped": b""},
        {f"{ENTRY}/..": b""},
        {f"{ENTRY}/.hidden": b""},
        {f"{ENTRY}/deeper/kernel.cu": b""},
        {f"{layout.VERSION}/artifact/cd/{KEY}/kernel.cu": b""},
        {f"{layout.VERSION}/locks/{KEY}.lock": b""},
        {f"{ENTRY}/kernel.so": _link(f"{ENTRY}/kernel.so", tarfile.SYMTYPE)},
        {f"{ENTRY}/kernel.so": _link(f"{ENTRY}/kernel.so", tarfile.LNKTYPE)},
        {f"{ENTRY}/kernel.so": _link(f"{ENTRY}/kernel.so", tarfile.FIFOTYPE)},
    ],
    ids=[
        "parent",
        "absolute",
        "far parent",
        "dots",
        "hidden",
        "deeper",
        "misfiled",
        "lock",
        "symlink",
        "hard link",
        "fifo",
    ],
)
def test_a_malicious_archive_is_refused_whole(store: Store, tmp_path: Path, members: dict) -> None:
    filled(store)
    good = {f"{ENTRY}/{path.name}": path.read_bytes() for path in layout.artifact_path(store.root, KEY).iterdir()}
    outside = set(tmp_path.rglob("*"))
    other = Store.open(tmp_path / "other", layers=[])
    archive = _tar(tmp_path / "bad.tar", {**good, **members})
    with pytest.raises(CacheError, match="refused"):
        other.import_(archive)
    assert list(other.entries()) == []
    new = {path for path in tmp_path.rglob("*") if not path.is_relative_to(other.root)} - outside
    assert new == {archive}


def test_a_damaged_member_is_left_out_and_overwrites_nothing(store: Store, tmp_path: Path) -> None:
    filled(store)
    contents = {path.name: path.read_bytes() for path in layout.artifact_path(store.root, KEY).iterdir()}
    contents["kernel.cubin"] = b"replaced"
    plan = layout.plan_path(store.root, PLAN_KEY).read_bytes()
    members = {f"{ENTRY}/{name}": content for name, content in contents.items()}
    members[f"{layout.VERSION}/plan/cd/{PLAN_KEY}.json"] = plan
    archive = _tar(tmp_path / "mixed.tar", members)
    for target in (store, Store.open(tmp_path / "other", layers=[])):
        result = target.import_(archive)
        assert [finding.key for finding in result.damaged] == [KEY]
        assert target.get_plan(PLAN_KEY) == PLAN
    kept = store.get_artifact(KEY)
    assert kept is not None
    assert kept.artifact().files == ARTIFACT.files
    assert Store.open(tmp_path / "other", layers=[]).get_artifact(KEY) is None


@pytest.mark.parametrize("content", [b"", b"no tar at all" * 100, None], ids=["empty", "text", "cut"])
def test_what_is_no_archive_is_a_cache_error(store: Store, tmp_path: Path, content: bytes | None) -> None:
    archive = tmp_path / "store.tar"
    if content is None:
        filled(store).export(archive)
        content = archive.read_bytes()[:3000]
    archive.write_bytes(content)
    other = Store.open(tmp_path / "other", layers=[])
    with pytest.raises(CacheError, match="no archive"):
        other.import_(archive)
    with pytest.raises(CacheError, match="there is no archive"):
        other.import_(tmp_path / "absent.tar")
    assert list(other.entries()) == []
