"""Updates of several arguments in Triton, under Triton's interpreter; ``tests/unit/test_updates.py`` runs them."""

from __future__ import annotations

from functools import partial

from tests.interpreter import Check, serve
from tests.updates import CASES, failures

CHECKS: dict[str, Check] = {
    name: partial(failures, case, "triton") for name, case in CASES.items() if "bfloat16" not in name
}

if __name__ == "__main__":
    serve(CHECKS)
