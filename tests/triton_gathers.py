"""Gathers and scatters in Triton, under Triton's interpreter on CPU tensors.

``tests/unit/test_gathers.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from tests import gathers
from tests.interpreter import Check, serve

CHECKS: dict[str, Check] = {
    "reads": lambda: gathers.read_failures("triton"),
    "reads of nothing": lambda: gathers.empty_failures("triton"),
    "integers": lambda: gathers.integer_failures("triton"),
    "updates": lambda: gathers.update_failures("triton"),
    "writes": lambda: gathers.write_failures("triton"),
    "assignments": lambda: gathers.assignment_failures("triton"),
}

if __name__ == "__main__":
    serve(CHECKS)
