"""Counts what a piece of a plan costs, so that plans can be compared before they have kernels.

The cost of work is the time that its bytes, its operations and its launches take one after another. It is an upper
bound, since a kernel computes while it reads; of two plans for the same values it still tells the cheaper one, because
they differ in few of these. The rates are those of the chip by whose record schedules are chosen too (``chips.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jitgen.device import Device


class Effort(NamedTuple):
    """Counts what some kernels amount to. Sizes in it may be symbolic.

    Attributes:
        moved: bytes read and written.
        operations: outside of products, by the weights of ``ir/ops.py``.
        products: operations of products; a multiply-add is two.
        dtype: of the operands of these products.
        launches: kernels.
    """

    moved: Any = 0
    operations: Any = 0
    products: Any = 0
    dtype: str = "float32"
    launches: int = 0

    def microseconds(self, device: Device) -> float:
        """Estimates the time of all of it on ``device``; its sizes are numbers."""
        rates = device.rates
        seconds = self.moved / rates.memory + self.operations / rates.vector + self.products / rates.matrix(self.dtype)
        return float(1e6 * (seconds + self.launches * rates.launch))
