"""Functions of more tensors than one kernel should read: split through temporaries, and right."""

from __future__ import annotations

import pytest
import torch
from jitgen_cases import lowered

import jitgen
from jitgen.ir.regions import MAX_READS


def tensors(count: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return list(torch.randn(count, *shape, generator=torch.Generator().manual_seed(count)).to(dtype))


def reads(function: object, *arguments: torch.Tensor) -> int:
    """The most operands any region of any kernel reads."""
    kernels = lowered(function, *arguments).program.kernels  # type: ignore[arg-type]
    return max(sum(o.kind == "load" for o in body.operands) for kernel in kernels for body in kernel.bodies)


@pytest.mark.parametrize(("count", "kernels"), [(80, 2), (200, 4)])
@pytest.mark.quick(where=lambda count: count == 80)
def test_a_sum_of_many_tensors(count: int, kernels: int) -> None:
    function = jitgen.jit(lambda *xs: sum(xs))
    given = tensors(count, 3, 7)
    torch.testing.assert_close(function(*given), function.reference(*given))
    assert reads(function, *given) <= MAX_READS
    assert len(lowered(function, *given).program.kernels) == kernels


def test_a_cat_of_many_tensors() -> None:
    function = jitgen.jit(lambda *xs: torch.cat(xs) * 2)
    given = [torch.arange(float(length)) for length in range(1, 101)]
    assert torch.equal(function(*given), function.reference(*given))


@pytest.mark.parametrize(("count", "step"), [(50, 20), (100, 5)])
@pytest.mark.slow
def test_wide_expressions_of_every_shape(count: int, step: int) -> None:
    """A product of two wide sums, one of them broadcast; many wide results; a wide update of an argument."""
    given = tensors(count, 4, 5)
    rows = [tensor[:1] for tensor in given]

    @jitgen.jit
    def product(*xs: torch.Tensor) -> torch.Tensor:
        half = len(xs) // 2
        return sum(xs[:half]) * sum(xs[half:])  # type: ignore[operator]

    torch.testing.assert_close(product(*given, *rows), product.reference(*given, *rows))
    assert reads(product, *given, *rows) <= MAX_READS

    @jitgen.jit
    def several(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [sum(xs[first : first + 40]) for first in range(0, count - 40, step)]  # type: ignore[misc]

    for got, want in zip(several(*given), several.reference(*given), strict=True):
        torch.testing.assert_close(got, want)
    assert reads(several, *given) <= MAX_READS

    update = jitgen.jit(lambda x, *xs: x.add_(sum(xs)))
    ours, theirs = given[0].clone(), given[0].clone()
    update(ours, *given[1:])
    update.reference(theirs, *given[1:])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_wide_kernels_do_not_spill_on_a_gpu(dtype: torch.dtype) -> None:
    specs = [jitgen.TensorSpec((4096,), dtype)] * 80
    report = jitgen.jit(lambda *xs: sum(xs)).lower(*specs, target="sm_90a", backend="cuda").compile().report
    assert [kernel["spill_bytes"] for kernel in report] == [0, 0]
