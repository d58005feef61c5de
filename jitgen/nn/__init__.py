"""Adds to ``torch.nn`` what a decoder needs, caches of keys and values and the plain functions that they are made of,
and Linears that train in 8-bit floats.

The functions of ``jitgen.nn.functional`` are plain PyTorch and compose within ``@jitgen.jit``; ``KVCache`` and
``PagedKVCache`` hold the tensors and call generated kernels of these functions, and ``Float8Linear`` those of its own.
"""

from jitgen.nn.caches import KVCache, PagedKVCache
from jitgen.nn.float8 import Float8Linear, convert_linears

__all__ = ["Float8Linear", "KVCache", "PagedKVCache", "convert_linears"]
