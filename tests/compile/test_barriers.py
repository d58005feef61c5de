"""Every barrier of a kernel is initialised for the threads that arrive at it: counted in PTX, without a card."""

from __future__ import annotations

import re

import barriers
import pytest
from backward_kernels import Backward
from barrier_cases import CASES, checked, lowered
from barrier_launches import of_backward, of_lowered, of_product
from wgmma_kernels import DENSE, QUANTIZED, Dense, Quantized

from jitgen.compilers import nvrtc

pytestmark = pytest.mark.skipif(nvrtc.toolchain() is None, reason="needs NVRTC")

SPLIT = Dense(down=1, across=1, columns=64, resident=3, stages=4, most_splits=3, staged=32)
SHARED = Dense(down=1, across=2, columns=64, multicast=2, stages=4, staged=32)
TURNS = Dense(pingpong=True, down=1, columns=64, stages=2, staged=32)
PRODUCTS = dict.fromkeys((SPLIT, SHARED, TURNS, *QUANTIZED, *DENSE))
FEW = (QUANTIZED[5], QUANTIZED[6], SHARED, TURNS)
BACKWARD = (
    Backward(depth=64, width=64, stages=2),
    Backward(False, 2, 64, 128, 128, 2, "window"),
    Backward(True, 3, 64, 64, 64, 3, "full"),
    Backward(False, 3, 64, 64, 64, 3, "causal", "float16", True),
)


def named(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Who arrives at each barrier, without the places in the source."""
    return {name.split(" (")[0]: words for name, words in found.items()}


@pytest.mark.quick(where=lambda config: config in FEW)
@pytest.mark.parametrize("config", PRODUCTS, ids=repr)
def test_products(config: Dense | Quantized) -> None:
    launch = of_product(config)
    found = named(barriers.check(config.source(), launch, least_phases=3))
    warps = config.threads // 32 - 4
    if isinstance(config, Dense) and config.pingpong:
        warps = 4  # of one tile; warpgroups take tiles in turns
    arrivals = warps * (config.multicast if isinstance(config, Quantized) else sum(config.shares) - 1)
    assert all(words.startswith(f"{arrivals} of warp") for words in found["kernel.empty(stage)"])
    sides = isinstance(config, Quantized) and (config.group > 0 or config.format == "uint4")
    assert all(words.startswith(f"{1 + 32 * sides} of ") for words in found["kernel.full(stage)"])


BEYOND = [config for config in DENSE if sum(config.shares) > 2]


@pytest.mark.quick(where=lambda config: config is BEYOND[0])
@pytest.mark.parametrize("config", BEYOND, ids=repr)
def test_tiles_beyond_the_result_are_not_copied(config: Dense) -> None:
    barriers.check(config.source(), of_product(config, beyond=True), least_phases=3)


@pytest.mark.quick(where=lambda config: config is BACKWARD[0])
@pytest.mark.parametrize("config", BACKWARD, ids=repr)
def test_gradients_of_attention(config: Backward) -> None:
    found = named(barriers.check(config.source(), of_backward(config), least_phases=3))
    consumers = config.warpgroups * 4
    released, copied = {f"{consumers} of warps 0-{consumers - 1} lane 0"}, {f"32 of warp {consumers}"}
    assert found == {
        "block_full()": copied,
        "block_empty()": released,
        "tile_full(stage, 0)": copied,
        "tile_full(stage, 1)": copied,
        "tile_empty(stage)": released,
        "barrier 0": {f"{config.threads} of warps 0-{config.threads // 32 - 1}"},
    }


def test_attention() -> None:
    source, launch = of_lowered(lowered("attention"), 0)
    found = named(barriers.check(source, launch, least_phases=3))
    warps = launch.threads // 32 - 4
    copier, released = {f"1 of warp {warps} lane 0"}, {f"{warps} of warps 0-{warps - 1} lane 0"}
    full, empty = ("query_full()", "key_full(stage)", "value_full(stage)"), ("query_empty()", "key_empty(stage)")
    turns = {number: words for number, words in found.items() if re.fullmatch("barrier [1-9]", number)}
    assert len(turns) == warps // 4
    assert all(each.startswith("256 of warps ") for words in turns.values() for each in words)
    expected = dict.fromkeys(full, copier) | dict.fromkeys((*empty, "value_empty(stage)"), released)
    assert found == expected | turns | {"barrier 0": {f"{launch.threads} of warps 0-{launch.threads // 32 - 1}"}}


def test_attention_of_few_keys() -> None:
    source, launch = of_lowered(lowered("attention of few keys"), 0)
    found = named(barriers.check(source, launch))
    warps = launch.threads // 32 - 4
    copied = {f"1 of warp {warps} lane 0"}
    released = found.pop("query_empty(stage)")
    assert released <= {f"4 of warps {first}-{first + 3} lane 0" for first in range(0, warps, 4)}
    assert found == {
        "query_full(stage)": copied,
        "keys_full(slot)": copied,
        "barrier 0": {f"{launch.threads} of warps 0-{launch.threads // 32 - 1}"},
    }


INBOX = "shared_address(&arrived)"
ROWS = {
    "softmax": {INBOX},
    "softmax of columns": {INBOX},
    "layer_norm, staged": {INBOX, "jitgen::shared_address(&barrier)"},
    "layer_norm, persistent": {INBOX, "arrived", "parked"},
}
"""mbarriers of each case: one thread of every block, or of every warp, arrives and expects bytes."""


@pytest.mark.parametrize("case", ROWS)
def test_rows(case: str) -> None:
    source, launch = of_lowered(lowered(case), 0)
    assert launch.cluster > 1
    found = named(barriers.check(source, launch))
    assert {name for name in found if not name.startswith("barrier ")} == ROWS[case]
    assert all(words.startswith("1 of warp") for name in ROWS[case] for words in found[name])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_schedules(case: str) -> None:
    assert list(checked(case, most=3))


# ------------------------------------------------------------------------------------------------------ planted faults

EMPTY = "barrier_init(kernel.empty(stage), Shape::tile_warps * (Shape::x_shares + Shape::weight_shares - 1));"
SYNC = 'group_barrier<Shape::consumers>(1, "end of the stages");'
IN_TWO_PHASES = "threads that wait for the same arrive in different phases"
FAULTS = {
    "a count too small": (SHARED, EMPTY, EMPTY.replace(");", " - 1);"), f"empty.*initialised for 15: {IN_TWO_PHASES}"),
    "half the count": (
        SHARED,
        EMPTY,
        EMPTY.replace(" + Shape::weight_shares - 1", ""),
        f"empty.*for 8: {IN_TWO_PHASES}",
    ),
    "a count too large": (SHARED, EMPTY, EMPTY.replace(");", " + 1);"), "hangs: .*initialised for 17, where 16 have"),
    "lanes too many": (
        SPLIT,
        "if (lane == 0) barrier_arrive(empty(stage));",
        "if (lane <= 1) barrier_arrive(empty(stage));",
        r"kernel.empty\(stage\) .*initialised for 4",
    ),
    "bytes too few": (SPLIT, "x_shares * 128 +", "x_shares * 112 +", "full.* bytes"),
    "threads of a named barrier": (
        TURNS,
        "if (followed) group_arrive<256>(first_barrier +",
        "if (followed) group_arrive<128>(first_barrier +",
        "threads meet at barrier 4 with counts 256 and 128",
    ),
    "all threads at a named barrier of some": (
        SPLIT,
        SYNC,
        SYNC.replace("Shape::consumers", "Shape::consumers + 128"),
        "hangs: .*barrier 1 among 256 threads",
    ),
    "a role that does not meet its cluster": (
        SPLIT,
        """          __syncwarp();
          cluster_sync("sums of the cluster's blocks");
          cluster_sync""",
        """          __syncwarp();
          cluster_sync""",
        "the cluster's barrier",
    ),
}


@pytest.mark.quick(where=lambda fault: fault in ("half the count", "a count too large", "threads of a named barrier"))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_product_that_miscounts(fault: str) -> None:
    config, old, new, message = FAULTS[fault]
    source = barriers.altered(config.source(), old, new)
    with pytest.raises(barriers.Miscounted, match=message) as raised:
        barriers.check(source, of_product(config))
    assert "kernel wgmma" in str(raised.value)


OF_BACKWARD = {
    "a role that skips its arrival": (
        "          warp_arrive(tile_empty(stage));\n", "", r"hangs: .*tile_empty\(stage\) .*initialised for 8"
    ),
    "the last piece is not released": (
        "      warp_arrive(block_empty());\n      finish<0", "      finish<0", r"hangs: .*block_empty\(\)"
    ),
    "one thread for a warp": (
        "barrier_init(block_full(), Shape::copiers);", "barrier_init(block_full(), 1);", r"block_full\(\).*for 1: "
    ),
    "bytes nobody copies": (
        "      arrive(block_full(), Shape::copied_block_bytes);", "      arrive(block_full(), 16);", "block_full.*bytes"
    ),
}  # fmt: skip


@pytest.mark.quick(where=lambda fault: fault in ("a role that skips its arrival", "one thread for a warp"))
@pytest.mark.parametrize("fault", OF_BACKWARD)
def test_gradients_that_miscount(fault: str) -> None:
    old, new, message = OF_BACKWARD[fault]
    config = Backward(depth=64, width=64, stages=2)
    with pytest.raises(barriers.Miscounted, match=message):
        barriers.check(barriers.altered(config.source(), old, new), of_backward(config))


OF_CASES = {
    "a stage of values is not released": (
        "attention",
        "            warp_arrive(value_empty(finished));\n",
        "",
        r"hangs: .*value_empty\(stage\) .*, where 0",
    ),
    "turns of one warpgroup": (
        "attention",
        'group_barrier<256>(1 + threadIdx.x / 128, "turn of a warpgroup")',
        'group_barrier<128>(1 + threadIdx.x / 128, "turn of a warpgroup")',
        "threads meet at barrier . with counts 256 and 128",
    ),
    "two arrivals for one": (
        "softmax", "barrier_init(shared_address(&arrived), 1);", "barrier_init(shared_address(&arrived), 2);",
        r"hangs: .*&arrived\) .*initialised for 2, where 1 have arrived"
    ),
    "a value fewer than is sent": (
        "softmax", "values * int(sizeof(Words<T>))", "(values - 1) * int(sizeof(Words<T>))", "&arrived.*bytes"
    ),
    "a row that nobody asks for": (
        "layer_norm, persistent", "    ask(row + clusters);", "", r"hangs: .*arrived .*initialised for 1, where 0"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_CASES)
def test_other_kernels_that_miscount(fault: str) -> None:
    case, old, new, message = OF_CASES[fault]
    source, launch = of_lowered(lowered(case), 0)
    with pytest.raises(barriers.Miscounted, match=message):
        barriers.check(barriers.altered(source, old, new), launch)
