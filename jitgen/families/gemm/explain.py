"""Explains a matmul kernel in words."""

from __future__ import annotations

from collections.abc import Sequence

from jitgen.device import Device
from jitgen.families.gemm.layout import GemmLayout
from jitgen.families.gemm.mainloops import (
    BlockMainloop,
    GemmSchedule,
    MmaQuantized,
    TritonMainloop,
    WgmmaMainloop,
    WgmmaTilings,
)
from jitgen.families.gemm.triton_mainloops import LEAST_CODES
from jitgen.ir.body import Body, Contraction, accumulator_dtype
from jitgen.ir.program import Kernel
from jitgen.kernel.explain import count_operations, operations_in, quantised_blocks
from jitgen.quant.codes import BLOCK, CODES


def explain(kernel: Kernel, layouts: Sequence[GemmLayout], schedule: GemmSchedule, device: Device) -> list[str]:
    """Explains the kernel: a title, the mainloop, and a line for each region."""
    count = sum(len(body.contractions) for body in kernel.bodies)
    products = f", {count} products of one activation" if count > 1 else ""
    ranges = kernel.bodies[0].contractions[0].k_splits
    where = "in the same kernel" if ranges == 1 else "in the kernel that follows"
    lines = [f"matrix product by the {schedule.path} mainloop{products}, the epilogue {where}"]
    for tiling in schedule.tilings if isinstance(schedule, WgmmaTilings) else (schedule,):
        lines.append(f"tiles of {tiling.block_m} x {tiling.block_n}, {tiling.block_k} of K at a time")
        if isinstance(tiling, BlockMainloop | WgmmaMainloop) and tiling.cluster_k_splits > 1:
            blocks = f"{tiling.cluster_k_splits} blocks of a cluster"
            number = f"at most {blocks}; a launch chooses how many" if isinstance(tiling, WgmmaMainloop) else blocks
            lines.append(f"K is split over {number}; their sums are added in order before the epilogue")
    if kernel.bodies[0].contractions[0].settled:
        lines.append("ids and weights are read while the kernel ahead runs, which has the same ids")
    if isinstance(schedule, MmaQuantized) and (pair := schedule.pair):
        tile = f"tiles of {pair.block_m} x {pair.block_n}"
        lines.append(f"for two rows {tile}, in {pair.shared_bytes} bytes of shared memory")
    if isinstance(schedule, WgmmaTilings):
        lines.append("a launch takes the tiles that are estimated to be the fastest for its rows")
    if ranges > 1:
        lines.append(
            f"K is split over {ranges} blocks, because there are few tiles: their sums go to a "
            "temporary, and the kernel that follows adds them in order and runs the epilogue once"
        )
    if isinstance(schedule, TritonMainloop) and schedule.decoded:
        short = schedule.slice_k < LEAST_CODES
        why = f"groups have no steps of {LEAST_CODES} columns" if short else "the target has no products of them"
        lines.append(f"codes of 8 bits are decoded to float16, because {why}")
    for region, (body, layout) in enumerate(zip(kernel.bodies, layouts, strict=True)):
        lines.append(
            f"region {region}: {_prologue(body)}weight {', '.join(map(_weight, body.contractions))}; epilogue of "
            f"{count_operations(body)} operations, {len(body.stores)} result{'s' * (len(body.stores) != 1)}; operands "
            f"{', '.join(layout.operands)}"
        )
        lines += quantised_blocks(body)
    return lines


def _prologue(body: Body) -> str:
    count = len(operations_in(body.contractions[0].x))
    return f"{count} operations on the activation as it is read; " if count else ""


def _weight(contraction: Contraction) -> str:
    format, group = contraction.format, contraction.group_size
    if format is None and contraction.dtype not in CODES:
        return "dense"
    if format is None:
        sums = accumulator_dtype(contraction.dtype)
        scaled = " and ".join(f"of {'x' if name == 'x' else 'the weight'}" for name in contraction.blocks)
        blocks = f" for each block of {BLOCK} of K, and these, times scales {scaled}, in float32" if scaled else ""
        fast = ", with the bits that tensor cores keep" if contraction.precision == "fast" else ""
        return f"dense, products of {contraction.dtype} codes summed in {sums}{fast}{blocks}"
    codes = f", times codes of {contraction.dtype}" if contraction.dtype in CODES else ""
    codes += " with scales of as many columns" if contraction.blocks else ""
    return f"{format} with {f'groups of {group}' if group else 'a scale for each row'}{codes}"
