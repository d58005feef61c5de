"""Opens the store that a call uses when it names none. It never fails a call: what cannot be written is kept in
memory."""

from __future__ import annotations

from typing import Any

from jitgen import settings
from jitgen.errors import CacheError
from jitgen.store import layout, notice, signing
from jitgen.store.sources import layer_source
from jitgen.store.store import Store

_stores: dict[Any, Store] = {}

_SETTINGS = (
    "JITGEN_CACHE_DIR",
    "JITGEN_CACHE_PATH",
    "JITGEN_CACHE_REMOTE",
    "JITGEN_TRUSTED_KEYS",
    "JITGEN_SIGNED_ONLY",
)


def default_store() -> Store:
    """Returns the store of the settings.

    If its directory is unusable (there is no home, or it is another user's, or no directory), a warning says so, once,
    and the result is a store without a directory, which keeps what is compiled in memory and still reads the layers. A
    directory that cannot be written is noticed when something is to be written (``Store.keep_artifact``).

    Raises:
        CacheError: ``JITGEN_TRUSTED_KEYS`` cannot be used: nothing is loaded then.
    """
    configured = tuple(settings.get(name) for name in _SETTINGS)
    store = _stores.get(configured)
    if store is None:
        store = _stores[configured] = _open()
    return store


def _open() -> Store:
    signing.trusted()
    layers = []
    for layer in map(layout.absolute, settings.get("JITGEN_CACHE_PATH")):
        try:
            layout.check_layer(layer)
            layer_source(layer)
            layers.append(layer)
        except CacheError as problem:
            notice.once(f"layer {layer}", f"{problem}. It is not read")
    try:
        return Store.open(layers=layers)
    except CacheError as problem:
        # The same topic as that of a store that cannot be written: one warning is enough.
        notice.once(
            f"unwritable {layout.NOWHERE}", f"{problem}. Until then this process keeps what it compiles in memory"
        )
        return Store(layout.NOWHERE, tuple(layers), settings.get("JITGEN_CACHE_REMOTE"))
