"""Lists the readers in the order in which they are asked; a tensor belongs to the first that claims it."""

from __future__ import annotations

from jitgen.checkpoints import (
    awq,
    bitsandbytes,
    compressed_tensors,
    gguf,
    gptq,
    hqq,
    modelopt,
    native,
    quark,
    scaled,
    torchao,
)
from jitgen.checkpoints.source import Reader

READERS: tuple[Reader, ...] = (
    native.READER,
    gguf.READER,
    torchao.READER,
    awq.READER,
    gptq.READER,
    hqq.READER,
    bitsandbytes.READER,
    compressed_tensors.READER,
    modelopt.READER,
    quark.READER,
    scaled.READER,
)

LABELS: frozenset[str] = frozenset().union(*(reader.labels for reader in READERS))
"""Every ``quant_method`` that some reader is for."""
