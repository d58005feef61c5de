// Stands in for the header of CUTLASS: epilogues by tensor copies alone, for sm_90a; the builder names the others.
#pragma once

#include <cutlass/detail/dependent_false.hpp>

namespace cutlass::epilogue::collective {
template <class Policy, class... Others>
class CollectiveEpilogue {
  static_assert(cutlass::detail::dependent_false<Policy>, "no epilogue for this policy");
};
template <class...>
class DefaultEpilogue;
template <class...>
class DefaultEpilogueArray;
template <int, int, int, class...>
class Sm90EpilogueTmaWarpSpecializedBiasElementwise;
}  // namespace cutlass::epilogue::collective

#include <cutlass/epilogue/collective/detail.hpp>
#include <cutlass/epilogue/collective/sm90_epilogue_tma_warpspecialized.hpp>
