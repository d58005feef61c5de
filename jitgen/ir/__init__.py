"""Defines the intermediate representation, from a traced graph to the instructions that a dialect prints.

``symbols`` (sizes) -> ``nodes`` (the table of kinds) -> ``graph`` (nodes) -> ``views`` (movements pushed to the inputs)
-> ``regions`` (what one kernel computes) -> ``body`` (a region as instructions) -> ``program`` (kernels over numbered
buffers). The passes between them belong to ``families/partition.py``.
"""
