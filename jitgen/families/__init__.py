"""Holds the kernel families: which results a kernel computes, how it is laid out and scheduled, rendered and launched.

``family`` says what a family is, ``registry`` lists them in order, ``partition`` asks each what it claims of a graph.
Adding one takes another package with an object ``FAMILY``, and a row of the registry.
"""
