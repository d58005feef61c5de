"""Adds what a decoder needs to ``torch.nn``: caches of keys and values, and the plain functions that they are made of.

The functions of ``jitgen.nn.functional`` are plain PyTorch and compose within ``@jitgen.jit``; ``KVCache`` and
``PagedKVCache`` hold the tensors and call generated kernels of these functions.
"""

from jitgen.nn.caches import KVCache, PagedKVCache

__all__ = ["KVCache", "PagedKVCache"]
