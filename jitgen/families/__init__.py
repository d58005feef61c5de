"""Kernel families: for each, when it applies, how it is laid out, its template's context, and its launch."""
