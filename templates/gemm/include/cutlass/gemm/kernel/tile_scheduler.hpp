// Stands in for the header of CUTLASS: the persistent scheduler of sm_90 alone.
#pragma once

#include <cutlass/arch/arch.h>
#include <cutlass/gemm/kernel/sm90_tile_scheduler.hpp>

namespace cutlass::gemm {
struct PersistentScheduler {};
struct StreamKScheduler {};

namespace kernel::detail {
template <class Tag, class Arch, class Tile, class Cluster, uint32_t stages = 2, class Problem = void>
struct TileSchedulerSelector {
  using Scheduler = PersistentTileSchedulerSm90;
};
}  // namespace kernel::detail
}  // namespace cutlass::gemm
