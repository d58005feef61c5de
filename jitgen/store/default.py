"""The store that a call uses when it names none."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

from jitgen import settings
from jitgen.store.store import Store

_stores: dict[Any, Store] = {}


def default_store() -> Store:
    """The store of the settings.

    If it cannot be written, the result is a temporary store with that one as a layer, and a warning says so; in strict
    mode, which writes nothing, it is the store itself.
    """
    configured = (settings.get("JITGEN_CACHE_DIR"), settings.get("JITGEN_CACHE_PATH"))
    store = _stores.get(configured)
    if store is None:
        store = Store.open()
        if not store.writable and not settings.is_strict():
            warnings.warn(
                f"the store {store.root} cannot be written: what is compiled now is kept for this process only. "
                "Set JITGEN_CACHE_DIR to a directory you own",
                stacklevel=2,
            )
            store = Store.open(tempfile.mkdtemp(prefix="jitgen-store-"), layers=[store.root, *store.layers])
        _stores[configured] = store
    return store
