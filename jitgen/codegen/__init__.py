"""Turns bodies into source text: the template environment, and the tables of each dialect.

``dialect`` says what a dialect is; ``cpp``, ``cuda`` (both on ``c_like``) and ``triton`` are the dialects; ``printing``
prints the instructions of a body in one of them; ``text`` makes text safe to print into a source; ``environment``
renders a family's template around the printed lines. ``python`` writes the Python functions that calls run through.
"""
