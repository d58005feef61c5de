"""From a Python function to a graph: proxies, symbolic numbers, captured tensors, and one row per torch function."""
