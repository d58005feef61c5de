// Groups of a product on the host: rows, or ranges of K, that a tensor divides among matrices.
//
// Groups of few rows are computed side by side, each by one thread that takes the next one when it is done; those with
// more rows than a thread's share are computed one after another, by all threads. So threads share the work however the
// rows are distributed, and the sums of a row have the same order at every call.
#pragma once

#include "jitgen/gemm.hpp"

namespace jitgen {
namespace gemm {

// offsets: the end of each group of rows. ids: the group of each row. lengths: the end of each group's range of K.
enum class By { offsets, ids, lengths };

constexpr int32_t bad_groups = 1;  // the status of a kernel whose offsets or ids are not valid

// The numbers of `count` rows in the order of the matrices that their ids choose, so that a matrix that several rows
// choose is read from memory once; nullptr where there are too few of them. Freed by the caller.
template <class Matrix>
int64_t* by_matrix(int64_t count, int64_t groups, const Matrix& matrix_of) {
  if (count < 3 || groups < 2) return nullptr;
  int64_t* const order = static_cast<int64_t*>(__builtin_malloc((count + groups + 1) * sizeof(int64_t)));
  if (!order) return nullptr;
  int64_t* const starts = order + count;
  for (int64_t group = 0; group <= groups; ++group) starts[group] = 0;
  for (int64_t number = 0; number < count; ++number) ++starts[matrix_of(number) + 1];
  for (int64_t group = 0; group < groups; ++group) starts[group + 1] += starts[group];
  for (int64_t number = 0; number < count; ++number) order[starts[matrix_of(number)]++] = number;
  return order;
}

// Calls function(group, begin, end, threads) for each group with rows, where group `groups` has the rows behind the last
// offset; by lengths for every group, and by ids for each row. Returns `bad_groups` without a call where offsets descend
// or exceed `total`, or an id is not below `groups`.
template <By by, class Integer, class Function>
int32_t each_group(const Integer* divided, int64_t stride, int64_t groups, int64_t total, int32_t threads,
                   const Function& function) {
  const int64_t count = by == By::ids ? total : by == By::offsets ? groups + 1 : groups;
  const auto range = [&](int64_t number) -> Range {
    if (by == By::ids) return {number, number + 1};
    return {number == 0 ? 0 : int64_t(divided[(number - 1) * stride]),
            number == groups ? total : int64_t(divided[number * stride])};
  };
  const auto matrix_of = [&](int64_t number) -> int64_t {
    if (by != By::ids) return number;
    const int64_t id = divided[number * stride];
    return id < 0 ? id + groups : id;  // a negative one counts from the end
  };
  int64_t used = 0;
  for (int64_t number = 0; number < count; ++number) {
    const Range here = range(number);
    if (here.begin < 0 || here.end < here.begin || here.end > total) return bad_groups;
    if (by == By::ids && (matrix_of(number) < 0 || matrix_of(number) >= groups)) return bad_groups;
    used += here.begin < here.end;
  }
  int64_t* const order = by == By::ids ? by_matrix(count, groups, matrix_of) : nullptr;
  const auto in_order = [&](int64_t place) { return order ? order[place] : place; };
  // A group is large if it has more than a thread's share, and where there are too few for all threads.
  const int64_t share = used < threads ? 0 : total / threads;
  const bool is_serial = threads == 1 || share == 0;
  const auto is_done_by_all = [&](const Range& range) { return is_serial || range.end - range.begin > share; };
  {
    Workspace workspace;
    const WorkspaceScope scope(workspace);
    for (int64_t place = 0; place < count; ++place) {
      const int64_t number = in_order(place);
      const Range here = range(number);
      if (by != By::lengths && here.begin == here.end) continue;
      if (is_done_by_all(here)) function(matrix_of(number), here.begin, here.end, threads);
    }
  }
  if (is_serial) {
    __builtin_free(order);
    return 0;
  }
  int64_t next = 0;
#pragma omp parallel num_threads(threads)
  {
    Workspace workspace;
    const WorkspaceScope scope(workspace);
    for (int64_t place; (place = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) {
      const int64_t number = in_order(place);
      const Range here = range(number);
      if (by != By::lengths && here.begin == here.end) continue;
      if (!is_done_by_all(here)) function(matrix_of(number), here.begin, here.end, 1);
    }
  }
  __builtin_free(order);
  return 0;
}

}  // namespace gemm
}  // namespace jitgen
