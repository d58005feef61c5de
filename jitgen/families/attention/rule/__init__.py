"""Shares what the kernels of attention and of its gradients have in common: the rule of a tile, and how its operands
are addressed.

* ``views``, ``heads``, ``region``, ``body``: views behind a result, heads that share keys, what a rule ends at and
  operands in memory, and the lowering of a tile.
* ``narrow``, ``bounds``: the rule's index arithmetic in 32 bits, and which tiles its masks hide or leave open.
* ``layout``, ``launch``, ``schedule``, ``blocks``: strides and parameters, launches and their work, what schedules have
  in common, and blocks of a program in Triton.
* ``context``, ``addresses``, ``triton``, ``cuda``, ``cpp``, ``wgmma``: what the templates of both read.
"""
