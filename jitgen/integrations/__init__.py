"""Serves generated kernels through other programs; each module here needs the program that it is named after.

Neighbours: ``huggingface/`` is what transformers and the kernels package call.
"""
