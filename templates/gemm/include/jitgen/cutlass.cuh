// What a generated kernel of CUTLASS 3.x includes, and what takes the place of CUTLASS's host code.
//
// On the host, CUTLASS makes tensor maps and puts them, by value, into the parameters of its kernel. Here the driver
// makes them, a launch passes them before all other parameters, and the kernel makes CUTLASS's parameters itself: the
// copies below have a pointer to their tensor map. They are more specialized than those of CuTe, whose number of bits
// is any type, so every collective uses them.
//
// NVRTC takes the headers of the package `nvidia-cutlass`. The files of this folder that are named like some of them
// stand in for those, which are for other architectures.
#pragma once

// A call anywhere in a kernel, such as that of an assert which fails, makes every wgmma wait for the one before it.
#include <cuda/std/cassert>
#undef assert
#define assert(...) ((void)0)

#ifdef __CUDACC_RTC__
#include <cuda/std/type_traits>
namespace std {
using cuda::std::is_pointer_v;
using cuda::std::void_t;
}  // namespace std
#endif

#if 0  // stand-ins, which are passed to the compiler because they are named here
#include <builders/sm100_builder.inl>
#include <builders/sm103_builder.inl>
#include <builders/sm120_builder.inl>
#include <cute/arch/mma_sm90_gmma_sparse.hpp>
#include <cute/atom/copy_traits_sm100.hpp>
#include <cute/atom/copy_traits_sm100_tma.hpp>
#include <cute/atom/mma_traits_sm100.hpp>
#include <cute/atom/mma_traits_sm120.hpp>
#include <cute/atom/mma_traits_sm120_sparse.hpp>
#include <cute/atom/mma_traits_sm61.hpp>
#include <cute/atom/mma_traits_sm70.hpp>
#include <cute/atom/mma_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm89.hpp>
#include <cute/atom/mma_traits_sm90_gmma_sparse.hpp>
#include <cute/util/print_latex.hpp>
#include <cutlass/arch/mma_sm50.h>
#include <cutlass/arch/mma_sm60.h>
#include <cutlass/arch/mma_sm61.h>
#include <cutlass/arch/mma_sm70.h>
#include <cutlass/arch/mma_sm75.h>
#include <cutlass/arch/mma_sm80.h>
#include <cutlass/arch/mma_sm89.h>
#include <cutlass/arch/mma_sparse_sm80.h>
#include <cutlass/arch/mma_sparse_sm89.h>
#include <cutlass/epilogue/collective/collective_epilogue.hpp>
#include <cutlass/epilogue/fusion/sm120_callbacks_tma_warpspecialized.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_topk_softmax.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#endif

#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#ifdef __CUDACC_RTC__
// Structured bindings of constant tuples, for which CuTe relies on the host's library.
namespace std {
template <class... T>
struct tuple_size<const cute::tuple<T...>> : tuple_size<cute::tuple<T...>> {};

template <size_t i, class... T>
struct tuple_element<i, const cute::tuple<T...>> {
  using type = const typename tuple_element<i, cute::tuple<T...>>::type;
};
}  // namespace std
#endif

namespace cute {

template <int bits, class Aux>
struct JitgenMappedCopy {
  using ThrID = Layout<_1>;
  using SrcLayout = Layout<Shape<_1, C<bits>>>;
  using DstLayout = SrcLayout;
  using RefLayout = SrcLayout;
  using AuxParams = Aux;

  TmaDescriptor const* map = nullptr;
  Aux aux_params_;

  JitgenMappedCopy() = default;
  CUTE_HOST_DEVICE constexpr JitgenMappedCopy(TmaDescriptor const&, Aux const& aux) : aux_params_(aux) {}

  CUTE_HOST_DEVICE constexpr TmaDescriptor const* get_tma_descriptor() const { return map; }

  template <class Sizes>
  CUTE_HOST_DEVICE constexpr auto get_tma_tensor(Sizes const& sizes) const {
    return make_coord_tensor(make_layout(sizes, aux_params_.g_stride_));
  }
};

template <int bits, class Aux>
struct Copy_Traits<SM90_TMA_LOAD, C<bits>, Aux> : JitgenMappedCopy<bits, Aux> {
  using JitgenMappedCopy<bits, Aux>::JitgenMappedCopy;

  CUTE_HOST_DEVICE constexpr Copy_Traits<SM90_TMA_LOAD_OP, C<bits>> with(
      uint64_t& barrier, uint16_t const& = 0, TMA::CacheHintSm90 const& hint = TMA::CacheHintSm90::EVICT_NORMAL) const {
    return {this->map, &barrier, static_cast<uint64_t>(hint)};
  }
};

template <int bits, class Aux>
struct Copy_Traits<SM90_TMA_LOAD_MULTICAST, C<bits>, Aux> : JitgenMappedCopy<bits, Aux> {
  using JitgenMappedCopy<bits, Aux>::JitgenMappedCopy;

  CUTE_HOST_DEVICE constexpr Copy_Traits<SM90_TMA_LOAD_MULTICAST_OP, C<bits>> with(
      uint64_t& barrier, uint16_t const& blocks, TMA::CacheHintSm90 const& hint = TMA::CacheHintSm90::EVICT_NORMAL) const {
    return {this->map, &barrier, blocks, static_cast<uint64_t>(hint)};
  }
};

template <int bits, class Aux>
struct Copy_Traits<SM90_TMA_STORE, C<bits>, Aux> : JitgenMappedCopy<bits, Aux> {
  using JitgenMappedCopy<bits, Aux>::JitgenMappedCopy;

  template <class From, class FromLayout, class To, class ToLayout>
  CUTE_HOST_DEVICE friend constexpr void copy_unpack(
      Copy_Traits const& traits, Tensor<From, FromLayout> const& from, Tensor<To, ToLayout>& to) {
    return copy_unpack(Copy_Traits<SM90_TMA_STORE_PTR, C<bits>>{traits.map}, from, to);
  }
};

}  // namespace cute

#ifdef __CUDACC_RTC__
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder_decl.hpp>
#include <cutlass/gemm/collective/builders/sm90_gmma_builder.inl>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#else  // all that CUTLASS has
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#endif

namespace jitgen {

// The bytes of a tensor map, which the driver encodes.
using TensorMap = cute::TmaDescriptor;

// The tiles that are walked together along one dimension, at most `most`. CUTLASS walks as if there were a multiple of
// them in either dimension, and a tile outside the matrix takes as long as another: so where blocks have few tiles, or
// more than one tile in sixteen would be outside, fewer.
CUTLASS_DEVICE int swizzle_of(int tiles_m, int tiles_n, int most) {
  const int64_t tiles = int64_t(tiles_m) * tiles_n;
  if (tiles < 4 * int64_t(gridDim.x)) return 1;
  while (most > 1) {
    const int64_t walked = int64_t((tiles_m + most - 1) / most * most) * ((tiles_n + most - 1) / most * most);
    if (16 * (walked - tiles) <= tiles) break;
    most /= 2;
  }
  return most;
}

// Division by `divisor`, of numbers whose product with it is below 2^64. CUTLASS makes its own by division of 128 bits,
// which it has on the host alone.
CUTLASS_DEVICE cutlass::FastDivmodU64 division_by(uint64_t divisor) {
  cutlass::FastDivmodU64 made;
  made.divisor = divisor;
  made.multiplier = ~uint64_t(0) / divisor + 1;  // 0 for 1, by which nothing is divided
  return made;
}

// What CUTLASS's persistent scheduler takes for a matrix of m x n, whose clusters are neighbours along M.
template <class Scheduler, class BlockTile, class Cluster>
CUTLASS_DEVICE typename Scheduler::Params walk_of(int m, int n, int most) {
  using Order = typename Scheduler::RasterOrder;
  constexpr int rows = cute::size<0>(BlockTile{}), columns = cute::size<1>(BlockTile{}), share = cute::size<0>(Cluster{});
  const int clusters_m = (m + rows * share - 1) / (rows * share), tiles_n = (n + columns - 1) / columns;
  const int swizzle = swizzle_of(clusters_m * share, tiles_n, most);
  const uint64_t walked_m = (clusters_m + swizzle - 1) / swizzle * swizzle;
  const uint64_t walked_n = (tiles_n + swizzle - 1) / swizzle * swizzle;
  typename Scheduler::Params walk;
  walk.problem_tiles_m_ = uint32_t(walked_m);
  walk.problem_tiles_n_ = uint32_t(walked_n);
  walk.problem_tiles_l_ = 1;
  walk.cluster_shape_m_ = share;
  walk.cluster_shape_n_ = 1;
  walk.blocks_per_problem_ = walked_m * share * walked_n;
  walk.log_swizzle_size_ = 31 - __clz(swizzle);
  walk.divmod_batch_ = division_by(walk.blocks_per_problem_);
  const bool along_n = walked_n <= walked_m * share;
  walk.raster_order_ = along_n ? Order::AlongN : Order::AlongM;
  walk.divmod_cluster_shape_major_ = cutlass::FastDivmodU64Pow2(along_n ? 1 : share);
  walk.divmod_cluster_shape_minor_ = cutlass::FastDivmodU64Pow2(along_n ? share : 1);
  walk.divmod_cluster_blk_major_ = division_by(along_n ? walked_n : walked_m);
  return walk;
}

// A function of one element as a functor of fragments, as nodes of an EVT apply it.
template <class Function, class Fragment>
struct Elements {
  template <class... Arguments>
  CUTLASS_DEVICE Fragment operator()(Fragment const& first, Arguments const&... others) const {
    Fragment result;
#pragma unroll
    for (int i = 0; i < int(Fragment::kElements); ++i) result[i] = Function::of(first[i], others[i]...);
    return result;
  }
};

}  // namespace jitgen
