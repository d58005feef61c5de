"""The reader of PTX that ``tests/barriers.py`` counts arrivals with: integers, warps that part, and barriers."""

from __future__ import annotations

import numpy as np
import pytest
from ptx import parse
from ptx_integers import result
from ptx_threads import Hang, Launch, Machine


@pytest.mark.parametrize(
    ("name", "operands", "expected"),
    [
        ("add.s32", (2**32 - 1, 2), 1),
        ("sub.s32", (1, 2), 2**32 - 1),
        ("mul.lo.s32", (2**31, 3), 2**31),
        ("mul.hi.u32", (2**31, 6), 3),
        ("mul.hi.s32", (2**32 - 1, 5), 2**32 - 1),
        ("mul.wide.s32", (2**32 - 3, 5), 2**64 - 15),
        ("mad.lo.s32", (5, 2**32 - 1, 7), 2),
        ("div.s32", (2**32 - 7, 2), 2**32 - 3),
        ("rem.s32", (2**32 - 7, 2), 2**32 - 1),
        ("div.u32", (2**32 - 7, 2), 2**31 - 4),
        ("min.s32", (2**32 - 1, 1), 2**32 - 1),
        ("max.u32", (2**32 - 1, 1), 2**32 - 1),
        ("shr.s32", (2**31, 31), 2**32 - 1),
        ("shr.u32", (2**31, 31), 1),
        ("shr.u32", (2**31, 32), 0),
        ("shl.b32", (3, 31), 2**31),
        ("shl.b64", (3, 63), 2**63),
        ("not.b32", (1,), 2**32 - 2),
        ("neg.s32", (1,), 2**32 - 1),
        ("setp.lt.s32", (2**32 - 1, 0), 1),
        ("setp.lt.u32", (2**32 - 1, 0), 0),
        ("setp.ge.and.s32", (3, 3, 0), 0),
        ("selp.b32", (4, 5, 0), 5),
        ("cvt.s64.s32", (2**32 - 1,), 2**64 - 1),
        ("cvt.u64.u32", (2**32 - 1,), 2**32 - 1),
        ("cvt.u32.u64", (2**33 + 1,), 1),
        ("bfe.u32", (0b110100, 2, 3), 0b101),
        ("bfi.b32", (0b11, 0, 4, 2), 0b110000),
        ("brev.b32", (1,), 2**31),
        ("popc.b32", (2**32 - 1,), 32),
        ("clz.b32", (1,), 31),
        ("bfind.u32", (0b1000,), 3),
        ("bfind.shiftamt.u32", (0b1000,), 28),
        ("prmt.b32", (0x33221100, 0x77665544, 0x5410), 0x55441100),
        ("lop3.b32", (0b1100, 0b1010, 0b1001, 0xEA), 0b1001 | 0b1000),
        ("shf.l.wrap.b32", (2**31, 1, 1), 3),
    ],
)
def test_integers(name: str, operands: tuple[int, ...], expected: int) -> None:
    found, bits = result(tuple(name.split(".")), [np.array([number], dtype=np.uint64) for number in operands])
    assert int(found[0]) & (1 << bits) - 1 == expected


KERNEL = """
.file 1 "of.cuh"
.visible .entry f(
	.param .u32 f_param_0
)
{
	.shared .align 8 .b8 arrived[8];
	.loc	1 7 0
	ld.param.u32 	%r1, [f_param_0];
	mov.u32 	%r2, %tid.x;
	mov.u32 	%r3, arrived;
	setp.ne.s32 	%p1, %r2, 0;
	@%p1 bra 	$L__BB0_1;
	mbarrier.init.shared::cta.b64 [%r3], %r1;
$L__BB0_1:
	bar.sync 	0;
	setp.gt.u32 	%p2, %r2, 31;
	@%p2 bra 	$L__BB0_2;
	shfl.sync.idx.b32 	%r4|%p3, %r2, 5, 31, -1;
	setp.ne.s32 	%p4, %r2, %r4;
	@%p4 bra 	$L__BB0_3;
	.loc	1 9 0
	mbarrier.arrive.shared::cta.b64 _, [%r3];
	bra.uni 	$L__BB0_3;
$L__BB0_2:
	mov.u32 	%r5, 0;
	// begin inline asm
	{
.reg .pred done;
wait:
mbarrier.try_wait.parity.shared::cta.b64 done, [%r3], %r5;
@done bra finished;
bra wait;
finished:
}
	// end inline asm
$L__BB0_3:
	ret;
}
"""
"""Thread 5 of the first warp arrives, which the lanes learn from each other; those of the second wait."""


def machine(count: int) -> Machine:
    return Machine(parse(KERNEL, "f"), Launch(64, 1, (1, 1, 1), {0: count}, {}))


def test_threads_part_and_wait() -> None:
    ran = machine(1)
    ran.run()
    (barrier,) = ran.barriers.values()
    assert [phase.threads for phase in barrier.phases] == [(5,)]
    assert barrier.site == ("of.cuh", 7)
    assert [len(round.threads) for round in ran.named[0, 0].rounds] == [64]


def test_threads_that_wait_for_ever() -> None:
    ran = machine(2)
    with pytest.raises(Hang, match="what never comes"):
        ran.run()
    assert sorted(ran.waits_for) == list(range(32, 64))
    assert set(ran.waits_for.values()) == set(ran.barriers)
