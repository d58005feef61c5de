"""Computes attention and its gradients: two families that compute a rule of scores, over tiles that never reach memory.

* ``forward``: a softmax between two products, in one walk over the keys.
* ``backward``: products with a function of other products, which are computed again a tile at a time.
* ``rule``: what both need; it imports neither, and they do not import each other.
"""
