"""A few small attention kernels, each launched once, for compute-sanitizer: ``compute-sanitizer --tool racecheck python
tools/attention_check.py``. They are tensor copies and element copies, masks, packed heads, and keys of a cluster.

racecheck follows no mbarrier. It reports one pair of accesses: of the first ticket of a block, which consumers read,
and of the last one, which the producer writes over it. Before that it waits for ``query_empty``, at which each
warp of the consumers arrives after it has read the ticket.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import jitgen
from tests.attention import failure, formula, operands

CASES = ((200, 300, 64, 64), (33, 129, 20, 70), (130, 260, 128, 128), (3, 700, 64, 64))
"""(M, N, D, E); the last has few rows, so that its keys are split."""

for rows, keys, depth, width in CASES:
    args = [tensor.cuda() for tensor in operands((1, 2), rows, keys, depth, width, torch.bfloat16)]
    compiled = jitgen.jit(formula(["scale"], ["causal"] if rows > 3 else []), backend="cuda")
    wanted = compiled.reference(*(tensor.double() for tensor in args))
    print(rows, keys, depth, width, failure(compiled(*args), wanted, *args, rounded=True) or "right")
