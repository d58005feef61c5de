"""What the kernels of attention and of its gradients share: the rule of scores, and how its operands are addressed.

* ``heads``: heads that share keys, as a dimension of their own.
* ``narrow``, ``bounds``: the rule's index arithmetic in 32 bits, and which tiles its masks hide or leave open.
* ``addresses``, ``triton_tiles``: where elements are, and how many rows a program in Triton may have.
"""
