"""Vectors whose length is a multiple of nothing, and one compiled kernel for all of them.

Run:   python examples/03_vector_add.py
Shows: sizes are symbolic: lengths from 1 to over a million, strided views and broadcasting share what was generated
       where they can; `specializations` and `explain` say what is fixed.
"""

from __future__ import annotations

import torch

import jitgen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@jitgen.jit
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def main() -> None:
    compiled: list[jitgen.CompileEvent] = []
    jitgen.on_compile(compiled.append)
    for length in (7, 33, 100, 1021, 65537, 1_000_003):
        x, y = (torch.randn(length, device=DEVICE) for _ in range(2))
        assert torch.equal(add(x, y), x + y)
        print(f"length {length:8d}: equal to torch bit for bit; compiled so far {len(compiled)}")
    x, column = torch.randn(513, 1027, device=DEVICE), torch.randn(513, 1, device=DEVICE)
    for what, a, b in (
        ("every second column", x[:, ::2], x[:, 1::2].new_ones(513, 514)),
        ("transposed", x.T, x.T),
        ("a column broadcast", x, column),
        ("an empty tensor", x[:0], x[:0]),
        ("a 0-d tensor", x[0, 0], x[1, 1]),
    ):
        assert torch.equal(add(a, b), a + b)
        print(f"{what}: equal; compiled so far {len(compiled)}")
    print("\nwhat this process has resolved:")
    for specialization in add.specializations:
        guards = "; ".join(map(str, specialization.guards)) or "nothing assumed of its sizes"
        print(f"  {specialization.signature}: {guards}")
    print(f"\n{add.lower(x, column).explain()}")


if __name__ == "__main__":
    main()
