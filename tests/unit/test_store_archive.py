"""Archives carry entries from store to store, and nothing else."""

from __future__ import annotations

import copy
import multiprocessing
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_samples import ARTIFACT, KEY, PLAN, PLAN_KEY, filled, flip, numbered_key

from jitgen.errors import CacheError
from jitgen.store import Store, bundle, layout

zstd = bundle._zstd()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", layers=[])


def test_an_archive_carries_plans_with_their_artifacts(store: Store, tmp_path: Path) -> None:
    filled(store).put_artifact(replace(ARTIFACT, key=numbered_key(1)))
    archive = tmp_path / "store.zip"
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
    second = tmp_path / "second.zip"
    other.export(second, [PLAN_KEY])
    assert archive.read_bytes() == second.read_bytes()
    with pytest.raises(CacheError, match="not in the store"):
        store.export(archive, [numbered_key(7)])


def _bundle(path: Path, members: dict[str, bytes], **facts: Any) -> Path:
    """A zip file of zstd frames; ``facts``: attributes of the last member's entry in the directory."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(f"{name}.zst")
            info.external_attr = 0o644 << 16
            if name == list(members)[-1]:
                for fact, value in facts.items():
                    setattr(info, fact, value)
            archive.writestr(info, zstd.compress(content))
    return path


ENTRY = f"{layout.VERSION}/artifact/ab/{KEY}"


BAD_NAMES = {
    "parent": "../escaped",
    "absolute": "/escaped",
    "far parent": f"{ENTRY}/../../../../../escaped",
    "dots": f"{ENTRY}/..",
    "hidden": f"{ENTRY}/.hidden",
    "deeper": f"{ENTRY}/deeper/kernel.cu",
    "misfiled": f"{layout.VERSION}/artifact/cd/{KEY}/kernel.cu",
    "lock": f"{layout.VERSION}/locks/{KEY}.lock",
    "plan elsewhere": f"{layout.VERSION}/plan/ab/{PLAN_KEY}.json",
    "twice": f"{ENTRY}/meta.json",
    "of control characters": f"{ENTRY}/\x1b[2Jkernel.cu",
}
LINK, FIFO = 0o120777 << 16, 0o010644 << 16


def _refused(store: Store, tmp_path: Path, make: Callable[[dict[str, bytes]], Path], match: str = "refused") -> None:
    """Nothing is imported of an archive that ``make`` makes of the good members and something else."""
    filled(store)
    good = {f"{ENTRY}/{path.name}": path.read_bytes() for path in layout.artifact_path(store.root, KEY).iterdir()}
    outside = set(tmp_path.rglob("*"))
    other = Store.open(tmp_path / "other", layers=[])
    archive = make(good)
    with pytest.raises(CacheError, match=match):
        other.import_(archive)
    with pytest.raises(CacheError, match=match):
        Store.open(tmp_path / "third", layers=[archive]).get_artifact(KEY)
    assert list(other.entries()) == []
    new = {path for path in tmp_path.rglob("*") if not path.is_relative_to(other.root)} - outside
    assert new == {archive}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES.keys())
def test_a_malicious_archive_is_refused_whole(store: Store, tmp_path: Path, name: str) -> None:
    def make(good: dict[str, bytes]) -> Path:
        path = _bundle(tmp_path / "bad.zip", good)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(zipfile.ZipInfo(f"{name}.zst"), zstd.compress(b"x"))
        return path

    _refused(store, tmp_path, make)


@pytest.mark.parametrize(
    "facts", [{"external_attr": LINK}, {"external_attr": FIFO}, {"compress_type": zipfile.ZIP_DEFLATED}]
)
def test_a_member_that_is_no_plain_file_is_refused(store: Store, tmp_path: Path, facts: dict[str, Any]) -> None:
    _refused(store, tmp_path, lambda good: _bundle(tmp_path / "bad.zip", good, **facts))


def test_members_in_one_place_are_refused(store: Store, tmp_path: Path) -> None:
    """As in a bomb whose members share what they unpack."""

    def make(good: dict[str, bytes]) -> Path:
        path = _bundle(tmp_path / "bad.zip", good)
        with zipfile.ZipFile(path, "a") as archive:
            info = copy.copy(archive.infolist()[0])
            info.filename = info.orig_filename = f"{ENTRY}/other.zst"
            archive.filelist.append(info)
            archive.writestr(f"{ENTRY}/last.zst", zstd.compress(b"x"))  # so that the directory is written anew
        return path

    _refused(store, tmp_path, make)


def test_a_member_ends_where_its_frame_ends(store: Store, tmp_path: Path) -> None:
    filled(store)
    good = {f"{ENTRY}/{path.name}": path.read_bytes() for path in layout.artifact_path(store.root, KEY).iterdir()}
    path = tmp_path / "odd.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in good.items():
            archive.writestr(f"{name}.zst", zstd.compress(content) + b"and more")
    [damaged] = Store.open(tmp_path / "other", layers=[]).import_(path).damaged
    assert "has something after its end" in damaged.detail


def test_an_export_follows_no_link(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which somebody else may have put into a directory such as ``/tmp``."""
    (tmp_path / "precious").write_text("kept")
    opened = open

    def replaced(path: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        if str(path).startswith(str(tmp_path / ".out.zip")):
            Path(path).symlink_to(tmp_path / "precious")
        return opened(path, mode, *arguments, **more)

    filled(store)
    monkeypatch.setattr("builtins.open", replaced)
    with pytest.raises(CacheError, match="cannot write the archive"):
        store.export(tmp_path / "out.zip")
    assert (tmp_path / "precious").read_text() == "kept"


def test_of_a_damaged_entry_a_layer_s_copy_is_exported(store: Store, tmp_path: Path) -> None:
    layer = filled(Store.open(tmp_path / "layer", layers=[]))
    flip(filled(store).put_artifact(ARTIFACT).path())
    found = Store.open(store.root, layers=[layer.root])
    assert {entry.key for entry in found.export(tmp_path / "all.zip")} == {KEY, PLAN_KEY}
    assert len(Store.open(tmp_path / "other", layers=[]).import_(tmp_path / "all.zip").added) == 2


def test_sizes_and_counts_have_limits(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that unpacks to much is refused by what it says of itself, before anything is unpacked."""
    monkeypatch.setattr(bundle, "FILE_LIMIT", 20_000)
    _refused(store, tmp_path, lambda good: _bundle(tmp_path / "bad.zip", {**good, f"{ENTRY}/big": bytes(20_001)}))


@pytest.mark.parametrize("limit", ["MEMBER_LIMIT", "ENTRY_LIMIT", "TOTAL_LIMIT", "FILES_LIMIT"])
def test_an_archive_over_a_limit_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(bundle, limit, 2)
    _refused(store, tmp_path, lambda good: _bundle(tmp_path / "bad.zip", good))


def test_a_directory_over_its_limit_is_not_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "DIRECTORY_LIMIT", 100)
    _refused(store, tmp_path, lambda good: _bundle(tmp_path / "bad.zip", good), match="no archive")


def test_a_frame_that_lies_about_its_size_takes_no_memory(store: Store, tmp_path: Path) -> None:
    """The header of the frame says 16 bytes, and it unpacks to 40 MB."""
    compressor = zstd.ZstdCompressor()
    compressor.set_pledged_input_size(None)
    bomb = compressor.compress(bytes(40_000_000)) + compressor.flush()
    small = zstd.compress(bytes(16))
    assert bomb[:4] == small[:4]
    head = zstd.get_frame_info(small)
    assert head.decompressed_size == 16
    # Single segment, content size of one byte: descriptor 0x20, then the size.
    lying = bomb[:4] + b"\x20\x10" + bomb[6:]
    filled(store)
    contents = {f"{ENTRY}/{path.name}": path.read_bytes() for path in layout.artifact_path(store.root, KEY).iterdir()}
    path = _bundle(tmp_path / "lies.zip", {name: c for name, c in contents.items() if "cubin" not in name})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(f"{ENTRY}/kernel.cubin.zst"), lying)
    tracemalloc.start()
    result = Store.open(tmp_path / "other", layers=[]).import_(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [finding.key for finding in result.damaged] == [KEY]
    assert peak < 10_000_000


def test_a_damaged_member_is_left_out_and_overwrites_nothing(store: Store, tmp_path: Path) -> None:
    filled(store)
    contents = {path.name: path.read_bytes() for path in layout.artifact_path(store.root, KEY).iterdir()}
    contents["kernel.cubin"] = b"replaced"
    plan = layout.plan_path(store.root, PLAN_KEY).read_bytes()
    members = {f"{ENTRY}/{name}": content for name, content in contents.items()}
    members[f"{layout.VERSION}/plan/cd/{PLAN_KEY}.json"] = plan
    archive = _bundle(tmp_path / "mixed.zip", members)
    for target in (store, Store.open(tmp_path / "other", layers=[])):
        result = target.import_(archive)
        assert [finding.key for finding in result.damaged] == [KEY]
        assert target.get_plan(PLAN_KEY) == PLAN
    kept = store.get_artifact(KEY)
    assert kept is not None
    assert kept.artifact().files == ARTIFACT.files
    assert Store.open(tmp_path / "other", layers=[]).get_artifact(KEY) is None


@pytest.mark.parametrize("content", [b"", b"no zip at all" * 100, None], ids=["empty", "text", "cut"])
def test_what_is_no_archive_is_a_cache_error(store: Store, tmp_path: Path, content: bytes | None) -> None:
    archive = tmp_path / "store.zip"
    if content is None:
        filled(store).export(archive)
        content = archive.read_bytes()[:-700]
    archive.write_bytes(content)
    other = Store.open(tmp_path / "other", layers=[])
    with pytest.raises(CacheError, match="no archive"):
        other.import_(archive)
    with pytest.raises(CacheError, match="there is no archive"):
        other.import_(tmp_path / "absent.zip")
    assert list(other.entries()) == []


def test_a_bundle_is_a_layer_without_being_unpacked(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "bundle.zip"
    filled(store).export(path)
    served = Store.open(tmp_path / "other", layers=[path])
    found = served.get_artifact(KEY)
    assert found is not None
    assert found.artifact().files == ARTIFACT.files
    assert found.text("kernel.cu") == ARTIFACT.files["kernel.cu"].decode()
    assert served.get_plan(PLAN_KEY) == PLAN
    assert served.get_plan(numbered_key(5)) is None
    assert [(entry.kind, entry.layer) for entry in served.entries()] == [("artifact", True), ("plan", True)]
    assert [finding.state for finding in served.why(PLAN_KEY)] == ["present"]
    assert all(served.peek(entry) is not None for entry in served.entries())
    assert not served.root.exists()


def test_processes_share_a_bundle_after_a_fork(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "bundle.zip"
    keys = [numbered_key(number) for number in range(40)]
    for key in keys:
        store.put_artifact(replace(ARTIFACT, key=key))
    store.export(path)
    served = Store.open(tmp_path / "other", layers=[path])
    assert served.get_artifact(keys[0]) is not None

    def read() -> None:
        for _ in range(10):
            assert all(served.get_artifact(key) is not None for key in keys)

    readers = [multiprocessing.get_context("fork").Process(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    read()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [0] * 3
