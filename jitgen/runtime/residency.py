"""Checks, when a launch is prepared, what its kernel assumes of the device: an error instead of a hang.

* The registers that its warpgroups deal among themselves (PTX ISA, "setmaxnreg"): a warpgroup that asks for more than
  there are waits forever. The artifact says what is asked for, the driver what a thread has.
* A cluster whose blocks run at once: its barriers wait for all of them.
* A cooperative grid, all of whose blocks run at once. No other kernel waits for blocks beyond its cluster.
* The threads of a block. Shared memory is checked where the kernel is loaded (``runtime/cuda.py``).

A persistent kernel's grid has no more blocks than are resident, which is what ``resident_grid`` is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from jitgen.runtime.cuda import (
    Dim3,
    DriverError,
    Function,
    bindings,
    checked,
    function_attribute,
    launch_config,
    multiprocessors,
)
from jitgen.spec import register_shortage

if TYPE_CHECKING:
    from jitgen.kernel.launch import LaunchShape

REMEDY = "this is a fault of jitgen: please report it, and use backend='triton' meanwhile"


def check(function: Function, shape: LaunchShape, register_pool: Sequence[int] = (), cooperative: bool = False) -> None:
    """Checks that the function's device can run a launch of ``shape`` to its end.

    Args:
        register_pool: the registers of a thread of each warpgroup after they are dealt; empty where none are.
        cooperative: whether all blocks of the grid must be resident at once.

    Raises:
        DriverError: it cannot. The message has the kernel, the numbers and what to do.
    """
    what = f"kernel {function.described} on CUDA device {function.device}"
    threads = prod(shape.block)
    with function.current():
        most = function_attribute(function.handle, "MAX_THREADS_PER_BLOCK", what)
        registers = function_attribute(function.handle, "NUM_REGS", what)
    if threads > most:
        raise DriverError(f"{what} has registers for {most} threads a block, and is launched with {threads}; {REMEDY}")
    shortage = register_shortage(register_pool, registers)
    if shortage is not None:
        raise DriverError(f"{what} would wait forever: {shortage}; {REMEDY}")
    if shape.cluster > 1:
        resident_clusters(function, threads, shape.cluster)
    if cooperative:
        blocks, resident = prod(shape.grid), _resident_blocks(function, threads)
        if blocks > resident:
            raise DriverError(
                f"{what} would wait forever: its {blocks} blocks wait for one another, and the device runs {resident} "
                f"of them at once ({threads} threads and {function.shared_bytes} bytes of dynamic shared memory each); "
                "launch fewer blocks, or smaller ones"
            )


def resident_clusters(function: Function, threads: int, cluster: int) -> int:
    """Returns how many clusters of ``cluster`` blocks of ``threads`` threads a device runs at once.

    It is less than the multiprocessors have room for, since a cluster runs within one GPC, and GPCs differ in size.

    Raises:
        DriverError: the device runs none.
    """
    driver = bindings()
    config = launch_config((cluster, 1, 1), (threads, 1, 1), function.shared_bytes, (cluster, 1, 1), False, False)
    what = f"clusters of {cluster} blocks of kernel {function.described} on CUDA device {function.device}"
    with function.current():
        most: int = checked(driver.cuOccupancyMaxActiveClusters(function.handle, config), f"asking how many {what} run")
    if most < 1:
        block = f"{threads} threads and {function.shared_bytes} bytes of dynamic shared memory a block"
        raise DriverError(
            f"{what} do not run ({block}): "
            "it has no room for one, as where it is divided into instances (MIG) or shared (MPS); "
            "use backend='triton', whose kernels have no clusters"
        )
    return most


def _resident_blocks(function: Function, threads: int) -> int:
    """Returns how many blocks of ``threads`` threads a device runs at once."""
    driver = bindings()
    with function.current():
        answer = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function.handle, threads, function.shared_bytes)
    per_multiprocessor: int = checked(answer, f"asking how many blocks of {function.described} a multiprocessor runs")
    return per_multiprocessor * multiprocessors(function.device)


def resident_grid(function: Function, shape: LaunchShape) -> Dim3:
    """Returns the grid of a launch of ``shape``. A persistent kernel's has no more blocks than are resident at once."""
    if shape.persistence is None:
        return shape.grid
    blocks, *others = shape.grid
    if shape.persistence.scope == "clusters":  # one more would start only after another has done all its work
        most = resident_clusters(function, shape.block[0], shape.cluster) * shape.cluster
    else:
        resident = multiprocessors(function.device) * shape.persistence.blocks
        most = max(resident // shape.cluster * shape.cluster, shape.cluster)
    return (min(blocks, most), *others)  # type: ignore[return-value]
