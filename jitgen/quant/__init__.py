"""Holds quantised weights: formats, the layouts of their codes in memory, and the tensor that stores them.

``formats`` is the table of formats, ``layouts`` the table of memory layouts, with one module each. ``storage`` has the
tensors of one weight, ``functions`` what torch may do with it, ``qtensor`` the class ``QTensor``, which is the weight.
``quantize`` makes a ``QTensor`` of a weight, ``modules`` does so for every Linear of a model, ``io`` writes and reads
files, ``eager`` is the product with a weight outside ``jitgen.jit``. ``remedies`` says what to do instead of a function
that torch may not do with a weight, ``distributed`` broadcasts weights among processes.

Importing this package imports neither ``qtensor`` nor anything that needs it: a program without quantised weights never
looks for them among its arguments (``weights.exist``).
"""

from __future__ import annotations

from typing import Any

import torch


def rebuild(*facts: Any) -> Any:
    """Returns a ``QTensor`` from the arguments its pickle stores: those of ``qtensor.rebuild``."""
    from jitgen.quant import qtensor  # only a checkpoint that has a quantised weight needs it

    return qtensor.rebuild(*facts)


# After ``import jitgen`` alone, torch.load(weights_only=True) reads checkpoints of quantised weights.
torch.serialization.add_safe_globals([rebuild])
