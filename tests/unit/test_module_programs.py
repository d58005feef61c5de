"""Random modules with gradients (``tests/module_programs.py``) under ``torch.compile(backend="jitgen")``."""

from __future__ import annotations

import pytest

from jitgen.compilers import host
from tests.module_programs import difference

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(host.toolchain() is None, reason="needs a host compiler"),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_modules(seed: int) -> None:
    """Even seeds are of float64, odd ones use autocast."""
    assert difference(seed, "jitgen") is None
