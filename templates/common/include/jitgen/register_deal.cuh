// Registers that the warpgroups of a block deal among themselves (PTX ISA, "setmaxnreg"). At its launch every thread has
// the same number of registers. A warpgroup may then release some of its own, and another one may request no more than
// were released: a request beyond that waits forever. So the number of a computing thread is derived from what there is
// and never written down.
#pragma once

namespace jitgen {

// Registers of a thread of each kind, in a block of `consumers` warpgroups that compute and one that copies. All numbers
// are multiples of 8.
template <int consumers, int blocks, int copier>
struct RegisterDeal {
  static constexpr int warpgroups = consumers + 1;
  // The largest number with which `blocks` blocks fit the 65536 registers of a multiprocessor. The assembler takes it
  // from __launch_bounds__ in a kernel that deals registers; jitgen checks the cubin's number when it loads the kernel.
  static constexpr int at_launch = 65536 / 128 / blocks / warpgroups / 8 * 8;
  static constexpr int share = (at_launch * warpgroups - copier) / consumers / 8 * 8;
  static constexpr int consumer = share < 240 ? share : 240;
  static constexpr bool deals = consumer > at_launch;
  static_assert(copier >= 24 && copier % 8 == 0, "setmaxnreg takes multiples of 8 from 24 on");
  static_assert(!deals || copier < at_launch, "a warpgroup that copies has registers to release");
};

}  // namespace jitgen
