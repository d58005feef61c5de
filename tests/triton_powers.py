"""16-bit rows in Triton's interpreter: softmax and the exponentials it is made of, to the last place.

``tests/unit/test_powers.py`` runs them, as ``tests/interpreter.py`` says.
"""

from __future__ import annotations

from collections.abc import Iterator

import jitgen
from tests import sixteen_bits
from tests.interpreter import Check, serve
from tests.triton_reductions import quick_reductions

LENGTHS = (1, 33, 1000, 4097)
CHECKS: dict[str, Check] = {}


def _named(name: str) -> None:
    function = sixteen_bits.FUNCTIONS[name]

    def numbers() -> Iterator[str | None]:
        jitted = jitgen.jit(backend="triton")(function)
        for kind in sixteen_bits.KINDS:
            for dtype in sixteen_bits.DTYPES:
                for length in LENGTHS:
                    x = sixteen_bits.rows(kind, 7, length, dtype)
                    wrong = sixteen_bits.mismatch(jitted(x), function(x.double()), function(x))
                    yield wrong and f"{kind}, {dtype} of length {length}: {wrong}"

    CHECKS[name] = numbers


for _name in sixteen_bits.FUNCTIONS:
    _named(_name)


within = quick_reductions

if __name__ == "__main__":
    serve(CHECKS, within())
