"""Signed entries: whoever can write a layer or an archive cannot make this process load what they like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from store_samples import ARTIFACT, KEY, PLAN, PLAN_KEY, filled

from jitgen.cli.group import jitgen as command
from jitgen.errors import CacheError, CacheWarning
from jitgen.spec import digest
from jitgen.store import Store, layout, notice, signing

pytest.importorskip("cryptography")
pytestmark = pytest.mark.filterwarnings("ignore::jitgen.errors.CacheWarning")


@pytest.fixture(autouse=True)
def _told_nothing_yet() -> None:
    notice.forget()


@pytest.fixture
def key(tmp_path: Path) -> tuple[Path, str]:
    """A private key's file, and its public key."""
    path = tmp_path / "key.pem"
    return path, signing.make_key(path)


@pytest.fixture
def unsigned(tmp_path: Path) -> Store:
    return filled(Store.open(tmp_path / "unsigned", layers=[]))


@pytest.fixture
def signed(tmp_path: Path, key: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Store:
    with monkeypatch.context() as patch:
        patch.setenv("JITGEN_SIGNING_KEY", str(key[0]))
        return filled(Store.open(tmp_path / "signed", layers=[]))


def reads(tmp_path: Path, layer: Path) -> bool:
    """Whether a process takes both entries from the layer."""
    store = Store.open(tmp_path / "reader", layers=[layer])
    return store.get_artifact(KEY) is not None and store.get_plan(PLAN_KEY) == PLAN


def test_a_layer_must_be_signed_by_a_trusted_key(
    tmp_path: Path, signed: Store, unsigned: Store, key: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reads(tmp_path, signed.root)
    assert reads(tmp_path, unsigned.root)
    other = signing.make_key(tmp_path / "other.pem")
    for named in (key[1], str(key[0]) + ".pub", f"{other}:{key[1]}"):
        monkeypatch.setenv("JITGEN_TRUSTED_KEYS", named)
        assert reads(tmp_path, signed.root)
        assert not reads(tmp_path, unsigned.root)
    monkeypatch.setenv("JITGEN_TRUSTED_KEYS", other)
    assert not reads(tmp_path, signed.root)


def test_what_an_attacker_reseals_is_not_taken(
    tmp_path: Path, signed: Store, key: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests fit, and the signature is the one that was there."""
    path = layout.artifact_path(signed.root, KEY) / "meta.json"
    body = json.loads(path.read_text())
    signature = body.pop("signature")
    del body["digest"]
    body["meta"]["shared_bytes"] = 1
    path.write_text(json.dumps({**body, "digest": digest(body), "signature": signature}))
    assert reads(tmp_path, signed.root), "digests alone do not tell"
    monkeypatch.setenv("JITGEN_TRUSTED_KEYS", key[1])
    with pytest.warns(CacheWarning, match="its signature does not fit"):
        assert not reads(tmp_path, signed.root)


@pytest.mark.parametrize("signature", [None, 7, {}, {"key": 1}, {"key": "x", "ed25519": "y"}])
def test_a_signature_of_any_form_is_read(tmp_path: Path, key: tuple[Path, str], signature: object) -> None:
    trust = signing._trust((key[1],))
    name = trust.keys[0][0]
    for value in (signature, {"key": name, "ed25519": "?"}, {"key": name}, {"key": name, "ed25519": "\u00e9"}):
        with pytest.raises(signing.Untrusted):
            trust.check("0" * 64, value)


def test_a_store_of_signed_entries_only(
    tmp_path: Path, signed: Store, unsigned: Store, key: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITGEN_TRUSTED_KEYS", key[1])
    assert Store.open(unsigned.root, layers=[]).get_artifact(KEY) is not None, "its own entries need no signature"
    monkeypatch.setenv("JITGEN_SIGNED_ONLY", "1")
    refusing = Store.open(unsigned.root, layers=[])
    assert refusing.get_artifact(KEY) is None
    assert layout.artifact_path(refusing.root, KEY).exists(), "it is not damaged, and not set aside"
    with pytest.raises(CacheError, match="JITGEN_SIGNING_KEY"):
        refusing.put_plan(PLAN_KEY, PLAN)
    assert refusing.keep_artifact(ARTIFACT).read() == ARTIFACT.files["kernel.cubin"]
    assert Store.open(signed.root, layers=[]).get_artifact(KEY) is not None
    monkeypatch.setenv("JITGEN_SIGNING_KEY", str(key[0]))
    filled(refusing)
    assert Store.open(unsigned.root, layers=[]).verify().clean


def test_archives_are_signed_by_signing_their_entries(
    tmp_path: Path, unsigned: Store, key: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, sealed = tmp_path / "plain.zip", tmp_path / "sealed.zip"
    monkeypatch.setenv("JITGEN_CACHE_DIR", str(unsigned.root))
    for arguments in ([str(plain)], [str(sealed), "--sign", str(key[0])]):
        assert CliRunner().invoke(command, ["cache", "export", *arguments]).exit_code == 0
    monkeypatch.setenv("JITGEN_TRUSTED_KEYS", key[1])
    assert reads(tmp_path, sealed)
    assert not reads(tmp_path, plain)
    target = Store.open(tmp_path / "target", layers=[])
    refused = target.import_(plain)
    assert not refused.added
    assert {finding.detail for finding in refused.damaged} == {"it is not signed"}
    assert len(target.import_(sealed).added) == 2
    assert reads(tmp_path, target.root), "the signatures are kept"


def test_an_export_signs_nothing_that_its_reader_would_not_take(
    tmp_path: Path, unsigned: Store, key: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else whoever can write a layer would have it signed by who trusts nobody but a key."""
    monkeypatch.setenv("JITGEN_TRUSTED_KEYS", key[1])
    store = Store.open(tmp_path / "mine", layers=[unsigned.root], remote=f"file://{tmp_path}/remote")
    signer = signing.signer(str(key[0]))
    with pytest.warns(CacheWarning, match=r"2 entries are not in .*artifact ab0000000000: it is not signed"):
        assert store.export(tmp_path / "all.zip", signer=signer) == []
    for chosen in (signer, None):
        with pytest.raises(CacheError, match="it is not signed"):
            store.export(tmp_path / "one.zip", [KEY], chosen)
    assert not (tmp_path / "one.zip").exists()
    assert not store.share(PLAN_KEY)


@pytest.mark.parametrize("named", ["/nonexistent", "/dev/zero", "A" * 44, __file__])
def test_a_key_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str) -> None:
    """Nothing is loaded for want of a key, rather than everything."""
    monkeypatch.setenv("JITGEN_TRUSTED_KEYS", named)
    with pytest.raises(CacheError, match="key"):
        Store.open(tmp_path / "store", layers=[])
    monkeypatch.setenv("JITGEN_TRUSTED_KEYS", "")
    monkeypatch.setenv("JITGEN_SIGNED_ONLY", "1")
    with pytest.raises(CacheError, match="JITGEN_TRUSTED_KEYS"):
        Store.open(tmp_path / "store", layers=[])
