// Stands in for the header of CUTLASS: what is left is asked for sm_90a too.
#pragma once

namespace cutlass::arch {
namespace detail {
template <class Operator>
constexpr bool is_sm89_staged_policy_v = false;
}  // namespace detail

using detail::is_sm89_staged_policy_v;
}  // namespace cutlass::arch
