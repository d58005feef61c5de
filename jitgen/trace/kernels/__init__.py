"""Traces launches of kernels that users wrote: their text with all that they call, what they write, and the nodes."""
