"""Signs entries: ed25519 over the digest that an entry carries of itself (extra ``jitgen[signing]``).

A digest tells what was damaged, and nothing about who made it: whoever can write an entry can compute it anew. A
signature can be made only by whoever has the private key. ``JITGEN_SIGNING_KEY`` signs what this process writes;
``JITGEN_TRUSTED_KEYS`` names the public keys of which one must have signed what this process takes from layers, from a
remote and from archives and, under ``JITGEN_SIGNED_ONLY``, from its own store.
"""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jitgen import settings
from jitgen.errors import CacheError
from jitgen.store.files import Untrusted

_PURPOSE = b"jitgen store entry\0"
"""What precedes the digest in what is signed, so that no signature made for another purpose fits."""

_KEY_BYTES = 2**16
"""Bytes of a key's file that are read: a key has some hundred."""


@dataclass(frozen=True)
class Signer:
    """Signs with a private key.

    Attributes:
        name: the fingerprint of its public key.
    """

    name: str
    private: Any

    def sign(self, digest: str) -> dict[str, str]:
        """Returns the member ``signature`` of an entry with this digest."""
        signed = self.private.sign(_PURPOSE + digest.encode())
        return {"key": self.name, "ed25519": base64.b64encode(signed).decode()}


@dataclass(frozen=True)
class Trust:
    """Holds the public keys, by fingerprint, one of which must have signed an entry."""

    keys: tuple[tuple[str, Any], ...]

    def check(self, digest: str, signature: Any) -> None:
        """Raises Untrusted unless ``signature`` is that of ``digest`` by a trusted key."""
        from cryptography.exceptions import InvalidSignature

        if not isinstance(signature, dict):
            raise Untrusted("it is not signed")
        public = dict(self.keys).get(str(signature.get("key")))
        if public is None:
            raise Untrusted(f"it is signed by the key {str(signature.get('key'))[:60]!r}, which is not trusted")
        try:
            public.verify(base64.b64decode(str(signature.get("ed25519")), validate=True), _PURPOSE + digest.encode())
        except (InvalidSignature, ValueError):  # what is no base64 is a ValueError
            raise Untrusted("its signature does not fit") from None


def trusted() -> Trust | None:
    """Returns the keys of ``JITGEN_TRUSTED_KEYS``; None if none are named.

    Raises:
        CacheError: one of them cannot be read, or ``cryptography`` is not installed.
    """
    named = settings.get("JITGEN_TRUSTED_KEYS")
    if not named and settings.get("JITGEN_SIGNED_ONLY"):
        raise CacheError("JITGEN_SIGNED_ONLY is set and no key is trusted; name the public keys in JITGEN_TRUSTED_KEYS")
    return _trust(named) if named else None


def signer(path: str | None = None) -> Signer | None:
    """Returns the private key in the file ``path``, by default that of ``JITGEN_SIGNING_KEY``; None where none is
    named."""
    chosen = path or settings.get("JITGEN_SIGNING_KEY")
    return _signer(str(chosen)) if chosen else None


def make_key(path: Path) -> str:
    """Writes a new private key to ``path`` and its public key to ``path`` + ``.pub``; returns the public key.

    Raises:
        CacheError: one of the files exists, or cannot be written.
    """
    _require()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    encoded = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = base64.b64encode(_raw(private.public_key())).decode()
    try:
        for target, content in ((path, encoded), (path.with_name(path.name + ".pub"), f"{public}\n".encode())):
            with open(target, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(content)
    except OSError as error:
        raise CacheError(f"the key cannot be written to {path}: {error.strerror}") from error
    return public


@lru_cache
def _trust(named: tuple[str, ...]) -> Trust:
    _require()
    keys = [_public(text) for text in named]
    return Trust(tuple((_fingerprint(key), key) for key in keys))


def _public(text: str) -> Any:
    """Reads the public key that ``text`` is (base64 of its 32 bytes) or names (a file with that, PEM or OpenSSH's
    line)."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    content = text.encode()
    if len(text) != 44:  # base64 of 32 bytes
        try:
            with open(text, "rb") as file:
                content = file.read(_KEY_BYTES).strip()
        except OSError as error:
            raise CacheError(f"the trusted key {text} cannot be read: {error.strerror}") from error
    try:
        if content.startswith(b"-----"):
            key: Any = serialization.load_pem_public_key(content)
        elif content.startswith(b"ssh-ed25519 "):
            key = serialization.load_ssh_public_key(content)
        else:
            key = Ed25519PublicKey.from_public_bytes(base64.b64decode(content, validate=True))
    except ValueError as error:
        raise CacheError(f"the trusted key {text} is no ed25519 public key: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise CacheError(f"the trusted key {text} is no ed25519 public key")
    return key


@lru_cache
def _signer(path: str) -> Signer:
    _require()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        with open(path, "rb") as file:
            content = file.read(_KEY_BYTES)
        load: Any = (
            serialization.load_ssh_private_key if b"OPENSSH" in content[:60] else serialization.load_pem_private_key
        )
        private = load(content, password=None)
    except OSError as error:
        raise CacheError(f"the signing key {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise CacheError(f"the signing key {path} is no ed25519 private key without a password: {error}") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise CacheError(f"the signing key {path} is no ed25519 private key")
    return Signer(_fingerprint(private.public_key()), private)


def _raw(public: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    raw: bytes = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return raw


def _fingerprint(public: Any) -> str:
    return hashlib.sha256(_raw(public)).hexdigest()[:16]


def _require() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise CacheError(
            "signatures need the package cryptography; install it with: pip install 'jitgen[signing]'"
        ) from None
