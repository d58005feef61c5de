"""Convolves images with filters on a CPU, with the pointwise operations that follow.

A kernel's single body has the axes of a ``convolve`` node: rows, groups, outputs and pixels. The windows of the images
are an axis of one contraction: the mainloop (``templates/convolution/include/jitgen/convolution.hpp``) reads them at
computed addresses, and they are never in memory as a whole. On a GPU a convolution is a product with the windows
(``families/windows.py``).
"""

from __future__ import annotations

from jitgen.families.deferred import deferred, family_in

NAME = "convolution"

FAMILY = family_in(__name__, NAME, work=deferred(__name__, "layout.work"))
