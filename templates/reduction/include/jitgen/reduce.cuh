// Combines values over the threads of a row. The lanes of a warp use shuffles, the warps of a block shared memory, and
// the blocks of a cluster send messages to one another's shared memory (as QuACK's row kernels do). Every thread gets
// the result, which is always combined in the same order, so that sums are reproducible.
//
//   float total = jitgen::combine_lanes<jitgen::Sum, 32>(mine);
//   jitgen::combine_row<jitgen::Sum, threads>(mine, scratch_of_row, thread)
//   jitgen::send_cluster<jitgen::Sum, warps, cluster>(mine, inbox, thread), then receive_cluster(inbox, thread)
//   jitgen::combine_columns<jitgen::Sum, lanes, threads>(mine, scratch)  // in place, for threads with several rows
#pragma once

#include "jitgen/barrier.cuh"
#include "jitgen/lanes.cuh"
#include "jitgen/states.cuh"

namespace jitgen {

// A value and its index in the row, for argmax and argmin. `nowhere` is greater than every index.
template <class T, class Index>
struct Indexed {
  static constexpr Index nowhere = ~(Index(1) << (8 * sizeof(Index) - 1));
  T value;
  Index index;
};

// ---------------------------------------------------------------------------------------------------- operations

struct Any {
  static JITGEN_DEVICE bool combine(bool a, bool b) { return a || b; }
};
struct All {
  static JITGEN_DEVICE bool combine(bool a, bool b) { return a && b; }
};

// The first index of the extremum. NaN counts as more extreme than every number, as in torch.
template <bool largest>
struct ArgExtremum {
  template <class T, class Index>
  static JITGEN_DEVICE bool wins(const Indexed<T, Index>& a, const Indexed<T, Index>& b) {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan || b_nan) return a_nan && (!b_nan || a.index < b.index);
    if (a.value == b.value) return a.index < b.index;
    return largest ? a.value > b.value : a.value < b.value;
  }
  template <class T, class Index>
  static JITGEN_DEVICE Indexed<T, Index> combine(const Indexed<T, Index>& a, const Indexed<T, Index>& b) {
    return wins(a, b) ? a : b;
  }
  // The same with one more value, whose index is greater than all before. The index stays `nowhere` as long as no value
  // is more extreme than the initial state; the caller then takes the first index.
  template <class T, class Index>
  static JITGEN_DEVICE Indexed<T, Index> with(const Indexed<T, Index>& state, T value, Index index) {
    const bool behind = largest ? value <= state.value : value >= state.value;
    const bool wins = !behind && state.value == state.value;
    return {wins ? value : state.value, wins ? index : state.index};
  }
};
using ArgMax = ArgExtremum<true>;
using ArgMin = ArgExtremum<false>;

// ------------------------------------------------------------------------------------------ the lanes of a warp

// For a state of several numbers, what they are measured from is combined first. Each lane then rescales its state
// once.
template <class Op, int lanes, class T>
JITGEN_DEVICE Exponentials<T> combine_lanes(const Exponentials<T>& state) {
  const T top = combine_lanes<Max, lanes>(state.top);
  return {top, combine_lanes<Sum, lanes>(state.sum * exp(state.top - top))};
}
// The base of the first lane serves all lanes: where there are any values, the first lane has some of them.
template <class Op, int lanes, class T>
JITGEN_DEVICE Shifted<T> combine_lanes(const Shifted<T>& state) {
  const T base = __shfl_sync(0xffffffffu, state.base, 0, lanes);
  return Op::centred(Shifted<T>{base, combine_lanes<Sum, lanes>(state.about(base))});
}
template <class Op, int lanes, class T>
JITGEN_DEVICE Spread<T> combine_lanes(const Spread<T>& state) {
  const auto all = combine_lanes<Op, lanes>(Shifted<T>{state.mean, {state.count, 0, state.squares}});
  return {all.mean(), all.squares(), all.moments.count};
}

// ------------------------------------------------------------------------------------- the blocks of a cluster

JITGEN_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A block's barriers must exist before another block sends to them. Every block arrives when it has made its barriers
// and waits before it sends. The arrival is relaxed, because a releasing one would wait for all earlier stores of the
// thread.
JITGEN_DEVICE void cluster_arrive() {
  waits_begin<true>();
  cluster_arrived();
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
JITGEN_DEVICE void cluster_wait() {
  cluster_bounded("the start of the cluster's blocks");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Sends one message of so many words to shared memory of a block of the cluster, whose `barrier` counts the bytes.
template <int words>
JITGEN_DEVICE void send_words(uint32_t to, const uint32_t* from, uint32_t barrier) {
  if (words == 4) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]), "r"(barrier)
                 : "memory");
  } else if (words == 2) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(from[0]), "r"(from[1]), "r"(barrier)
                 : "memory");
  } else {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(from[0]),
                 "r"(barrier)
                 : "memory");
  }
}

// The values that all blocks of a cluster send to this one, and the barrier that counts their bytes. Where a cluster
// takes rows one after another it uses two inboxes alternately and opens each again after it has waited for it. No
// value is overwritten before it was read: a block that has received all values of a row knows that every block has
// received the row before.
template <class T, int values>
struct Inbox {
  alignas(16) Words<T> from[values];
  alignas(8) uint64_t arrived;

  JITGEN_DEVICE void open() {  // one thread calls this and the next function
    barrier_init(shared_address(&arrived), 1);
    open_again();
  }
  JITGEN_DEVICE void open_again() { barrier_arrive_expect(shared_address(&arrived), values * int(sizeof(Words<T>))); }
  // `value` becomes number `position` in the inbox of the block with this rank.
  JITGEN_DEVICE void send(T value, int position, int rank) {
    Words<T> words;
    for (int i = 0; i < words.count; ++i) words.word[i] = 0;
    words.whole = value;
    uint32_t to, barrier;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(&from[position])), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(&arrived)), "r"(rank));
    constexpr int several = words.count % 4 == 0 ? 4 : words.count % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < words.count; i += several) send_words<several>(to + 4 * i, words.word + i, barrier);
  }
  JITGEN_DEVICE void wait(uint32_t parity) { barrier_wait(shared_address(&arrived), parity, "inbox"); }
};

// ------------------------------------------------------------------------------------------- the threads of a row

// Shared memory in which the warps of a row combine one value. It is used once in a kernel, so that no barrier is
// needed before it is written.
template <class T, int warps>
struct Scratch {
  alignas(16) T partial[warps];
};

template <class Op, int threads, class T, int warps>
JITGEN_DEVICE T combine_row(T value, Scratch<T, warps>& scratch, int thread) {
  value = combine_lanes<Op, (threads < 32 ? threads : 32)>(value);
  if (threads > 32) {
    if (thread % 32 == 0) scratch.partial[thread / 32] = value;
    __syncthreads();
    value = combine_lanes<Op, warps>(scratch.partial[thread % warps]);
  }
  return value;
}

// Combines over the threads of a whole cluster. Each warp sends its value to every block, and each block combines all
// of them by itself. No block exits while another one still sends to it, because it waits for all messages. A kernel
// that combines several values sends all of them before it waits for the first.
template <class Op, int warps, int cluster, class T>
JITGEN_DEVICE void send_cluster(T value, Inbox<T, warps * cluster>& inbox, int thread) {
  value = combine_lanes<Op, 32>(value);
  if (thread % 32 < cluster) inbox.send(value, cluster_rank() * warps + thread / 32, thread % 32);
}
// Combines `seen(value)` of all values of an inbox that has been waited for.
template <class Op, class T, int values, class Seen>
JITGEN_DEVICE auto combine_received(const Inbox<T, values>& inbox, int thread, const Seen& seen) {
  static_assert(values > 32 || 32 % values == 0, "a warp takes as many values as divide it, or more than it has lanes");
  auto value = seen(inbox.from[thread % (values < 32 ? values : 32)].whole);
#pragma unroll
  for (int i = 32; i < values; i += 32) {
    if (i + 32 <= values || i + thread % 32 < values) value = Op::combine(value, seen(inbox.from[i + thread % 32].whole));
  }
  return combine_lanes<Op, (values < 32 ? values : 32)>(value);
}
template <class Op, int warps, int cluster, class T>
JITGEN_DEVICE T receive_cluster(Inbox<T, warps * cluster>& inbox, int thread, uint32_t parity = 0) {
  inbox.wait(parity);
  return combine_received<Op>(inbox, thread, [](const T& value) { return value; });
}
template <class Op, int warps, int cluster, class T>
JITGEN_DEVICE Shifted<T> receive_cluster(Inbox<Shifted<T>, warps * cluster>& inbox, int thread, uint32_t parity = 0) {
  inbox.wait(parity);
  const T base = inbox.from[0].whole.base;
  const auto seen = [&](const Shifted<T>& state) { return state.about(base); };
  return Op::centred(Shifted<T>{base, combine_received<Sum>(inbox, thread, seen)});
}

// ------------------------------------------------------------------------------------------- the threads of columns

// Of columns, `lanes` neighbouring threads have `rows_per_thread` neighbouring rows each, and `threads` such groups share the
// rows.

// Shared memory in which the threads of a block combine one value of every row, for one reduction after another. No
// barrier is needed before it is written, because `partial` and `total` are written on different sides of a barrier.
template <int states, int rows, class... States>
struct ColumnScratch {
  static constexpr int largest() {
    int largest = 1;
    for (int size : {int(sizeof(States))...}) largest = size > largest ? size : largest;
    return largest;
  }
  alignas(16) unsigned char partial[states * rows * largest()];
  alignas(16) unsigned char total[rows * largest()];
};

// How many partial results of a row a block has: the lanes of a warp have combined theirs by shuffles before.
template <int lanes, int threads>
constexpr int column_groups = lanes < 32 ? lanes * threads / 32 : threads;

// Writes the partial results of all rows of the block to shared memory.
template <class Op, int lanes, int threads, class T, int rows_per_thread, class Scratch>
JITGEN_DEVICE void combine_groups(T (&own)[rows_per_thread], Scratch& scratch) {
  constexpr int group = lanes < 32 ? 32 : lanes;
#pragma unroll
  for (int distance = lanes; distance < 32; distance *= 2) {
#pragma unroll
    for (int j = 0; j < rows_per_thread; ++j) own[j] = Op::combine(own[j], from_lane(own[j], distance));
  }
  if (threadIdx.x % group < lanes) {
    T* const mine = reinterpret_cast<T*>(scratch.partial) + threadIdx.x / group * (lanes * rows_per_thread);
#pragma unroll
    for (int j = 0; j < rows_per_thread; ++j) mine[threadIdx.x % lanes * rows_per_thread + j] = own[j];
  }
  __syncthreads();
}

// The result of one row over the block.
template <class Op, int lanes, int threads, class T, int rows_per_thread, class Scratch>
JITGEN_DEVICE T group_total(const Scratch& scratch, int row) {
  const T* const partial = reinterpret_cast<const T*>(scratch.partial);
  T value = partial[row];
#pragma unroll
  for (int i = 1; i < column_groups<lanes, threads>; ++i) value = Op::combine(value, partial[i * (lanes * rows_per_thread) + row]);
  return value;
}

// Reads the results of this thread's rows.
template <class T, int rows_per_thread, class Scratch>
JITGEN_DEVICE void take_totals(T (&own)[rows_per_thread], const Scratch& scratch, int lane) {
  __syncthreads();
#pragma unroll
  for (int j = 0; j < rows_per_thread; ++j) own[j] = reinterpret_cast<const T*>(scratch.total)[lane * rows_per_thread + j];
}

template <class Op, int lanes, int threads, class T, int rows_per_thread, class Scratch>
JITGEN_DEVICE void combine_columns(T (&own)[rows_per_thread], Scratch& scratch) {
  if (threads == 1) return;
  combine_groups<Op, lanes, threads>(own, scratch);
#pragma unroll 1
  for (int row = threadIdx.x; row < lanes * rows_per_thread; row += lanes * threads) {
    reinterpret_cast<T*>(scratch.total)[row] = group_total<Op, lanes, threads, T, rows_per_thread>(scratch, row);
  }
  take_totals(own, scratch, threadIdx.x % lanes);
}

// The same over the blocks of a cluster.
template <class Op, int lanes, int threads, int cluster, class T, int rows_per_thread, class Scratch>
JITGEN_DEVICE void combine_columns(T (&own)[rows_per_thread], Scratch& scratch, Inbox<T, lanes * rows_per_thread * cluster>& inbox) {
  constexpr int rows = lanes * rows_per_thread;
  combine_groups<Op, lanes, threads>(own, scratch);
#pragma unroll 1
  for (int row = threadIdx.x; row < rows; row += lanes * threads) {
    const T value = group_total<Op, lanes, threads, T, rows_per_thread>(scratch, row);
    for (int rank = 0; rank < cluster; ++rank) inbox.send(value, cluster_rank() * rows + row, rank);
  }
  inbox.wait(0);
#pragma unroll 1
  for (int row = threadIdx.x; row < rows; row += lanes * threads) {
    T value = inbox.from[row].whole;
#pragma unroll
    for (int i = 1; i < cluster; ++i) value = Op::combine(value, inbox.from[i * rows + row].whole);
    reinterpret_cast<T*>(scratch.total)[row] = value;
  }
  take_totals(own, scratch, threadIdx.x % lanes);
}

}  // namespace jitgen
