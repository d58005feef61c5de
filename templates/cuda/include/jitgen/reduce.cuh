// Combining values over the threads of a row: a warp's by shuffles, a block's through shared memory, a cluster's through
// messages between its blocks' shared memories (as QuACK's row kernels do). Every thread gets the result, always combined
// in the same order, so sums are reproducible.
//
//   float total = jitgen::combine_lanes<jitgen::Sum, 32>(mine);
//   jitgen::combine_row<jitgen::Sum, threads>(mine, scratch_of_row, thread)
//   jitgen::send_cluster<jitgen::Sum, warps, cluster>(mine, inbox, thread), then receive_cluster(inbox, thread)
//   jitgen::combine_columns<jitgen::Sum, lanes, threads>(mine, scratch)  // in place, of several rows a thread
#pragma once

#include "jitgen/barrier.cuh"

namespace jitgen {

// A value and where in the row it stands, for argmax and argmin; `nowhere` is behind every place.
template <class T, class Index>
struct Indexed {
  static constexpr Index nowhere = ~(Index(1) << (8 * sizeof(Index) - 1));
  T value;
  Index index;
};

// ---------------------------------------------------------------------------------------------------------- what

struct Sum {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return add(a, b);
  }
  static JITGEN_DEVICE float combine(float a, float b) { return a + b; }
  static JITGEN_DEVICE double combine(double a, double b) { return a + b; }
};
struct Prod {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return mul(a, b);
  }
  static JITGEN_DEVICE float combine(float a, float b) { return a * b; }
  static JITGEN_DEVICE double combine(double a, double b) { return a * b; }
};
struct Max {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return maximum(a, b);
  }
};
struct Min {
  template <class T>
  static JITGEN_DEVICE T combine(T a, T b) {
    return minimum(a, b);
  }
};
struct Any {
  static JITGEN_DEVICE bool combine(bool a, bool b) { return a || b; }
};
struct All {
  static JITGEN_DEVICE bool combine(bool a, bool b) { return a && b; }
};

// The first place of the extremum; NaN counts as beyond every number.
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
  // The same where the value stands behind all before it. Where none is beyond the first state, the caller knows where.
  template <class T, class Index>
  static JITGEN_DEVICE Indexed<T, Index> with(const Indexed<T, Index>& state, T value, Index index) {
    const bool behind = largest ? value <= state.value : value >= state.value;
    const bool wins = !behind && state.value == state.value;
    return {wins ? value : state.value, wins ? index : state.index};
  }
};
using ArgMax = ArgExtremum<true>;
using ArgMin = ArgExtremum<false>;

// The largest value met, finite or +inf, and the sum of exp(value - largest).
template <class T>
struct Exponentials {
  T top;
  T sum;
};

// One exponential for each value, and for each state combined (online softmax, Milakov and Gimelshein 2018). A state
// begins with the lowest finite number, so that -inf adds 0. The sum means nothing where the row's maximum is not finite:
// the kernel does not use it there.
template <bool coarse>
struct SumExp {
  // sum + exp(a)
  static JITGEN_DEVICE float plus(float sum, float a) {
    if (!coarse) return sum + exp(a);
    const float root = coarse_exp_root(a);
    return fma(root, root, sum);
  }
  static JITGEN_DEVICE double plus(double sum, double a) { return sum + exp(a); }
  static JITGEN_DEVICE float larger(float a, float b) { return ::fmaxf(a, b); }
  static JITGEN_DEVICE double larger(double a, double b) { return ::fmax(a, b); }

  // One value rescales the sum or is scaled itself; several rescale it together, by the largest of them.
  template <class T>
  static JITGEN_DEVICE Exponentials<T> with(const Exponentials<T>& state, const T (&values)[1]) {
    const bool higher = values[0] > state.top;
    const T scale = plus(T(0), -abs(values[0] - state.top));
    return {higher ? values[0] : state.top, fma(state.sum, higher ? scale : T(1), higher ? T(1) : scale)};
  }
  template <class T, int N>
  static JITGEN_DEVICE Exponentials<T> with(const Exponentials<T>& state, const T (&values)[N]) {
    T top = state.top;
    for (int i = 0; i < N; ++i) top = larger(top, values[i]);
    T sum = state.sum * plus(T(0), state.top - top);
    for (int i = 0; i < N; ++i) sum = plus(sum, values[i] - top);
    return {top, sum};
  }
  template <class T>
  static JITGEN_DEVICE Exponentials<T> combine(const Exponentials<T>& a, const Exponentials<T>& b) {
    const bool higher = b.top > a.top;
    const T scale = exp(-abs(b.top - a.top));
    return {higher ? b.top : a.top, fma(higher ? a.sum : b.sum, scale, higher ? b.sum : a.sum)};
  }
};

// The mean of `count` values and the sum of their squared deviations from it.
template <class T>
struct Spread {
  T mean;
  T squares;
  T count;
};

// Of `count` values, the sums of their distances from some number and of the squares of those.
template <class T>
struct Moments {
  T count;
  T first;
  T second;
};
template <class T>
JITGEN_DEVICE Moments<T> add(const Moments<T>& a, const Moments<T>& b) {
  return {a.count + b.count, a.first + b.first, a.second + b.second};
}

// 1 / count, to the last bit or two.
JITGEN_DEVICE float share_of(float count) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(count));
  return result;
}
JITGEN_DEVICE double share_of(double count) { return 1.0 / count; }

// Moments about `base`, a finite number near the mean, where that is finite; if it is the mean, the state is centred.
template <class T>
struct Shifted {
  T base;
  Moments<T> moments;

  JITGEN_DEVICE T apart() const { return moments.count == T(0) ? T(0) : moments.first * share_of(moments.count); }
  JITGEN_DEVICE T mean() const { return base + apart(); }
  JITGEN_DEVICE T squares() const { return moments.second; }  // of a centred state
  // The same values' about another base. The bases' distance is exact where they are near.
  JITGEN_DEVICE Moments<T> about(T other) const {
    const T distance = base - other, first = fma(moments.count, distance, moments.first);
    return {moments.count, first, fma(distance, moments.first + first, moments.second)};
  }
};

// Sums of squared deviations. Of a row that is read again and again, and of columns: a vector's own mean and squares join
// those of the vectors before it, which for one value is Welford's step of 1962 (Chan, Golub and LeVeque 1979).
//
// What a thread holds of a row takes three operations a value instead: moments about the mean of its first vector
// ("shifted data" of Chan, Golub and LeVeque 1983), which are then centred, and so are a warp's about its first lane's
// mean and a row's about its first warp's. Of `count` values of which the base is the mean of N, the second moment is at
// most 1 + count / N times the squared deviations, and rounded the more by that, whatever values there are and however
// far from 0: by as many times as a thread has vectors, a warp lanes and a row warps. Where the base lies among the values
// it is about once. An infinite value leaves the mean infinite, as a sum would be.
struct Deviations {
  template <class T, int N>
  static JITGEN_DEVICE Spread<T> with(const Spread<T>& state, const T (&values)[N]) {
    T sum = values[0], squares = 0;
    for (int i = 1; i < N; ++i) sum += values[i];
    const T mean = sum * (T(1) / N);
    for (int i = 0; i < N; ++i) squares = fma(values[i] - mean, values[i] - mean, squares);
    const T count = state.count + N;
    // The first vector's mean is the mean, exactly.
    const T weight = state.count == T(0) ? T(1) : N * share_of(count);
    const T apart = mean - state.mean;
    return {fma(apart, weight, state.mean), fma(apart * (state.count * weight), apart, state.squares + squares), count};
  }
  template <class T, int N>
  static JITGEN_DEVICE Shifted<T> with(Shifted<T> state, const T (&values)[N]) {
    if (state.moments.count == T(0)) {
      T sums[N];
      for (int i = 0; i < N; ++i) sums[i] = values[i];
      // Pairwise, so that the mean of equal values is exact.
      for (int step = 1; step < N; step *= 2) {
        for (int i = 0; i + step < N; i += 2 * step) sums[i] += sums[i + step];
      }
      const T mean = sums[0] * (T(1) / N);
      state.base = mean - mean == T(0) ? mean : T(0);
    }
    for (int i = 0; i < N; ++i) {
      const T apart = values[i] - state.base;
      state.moments.first += apart;
      state.moments.second = fma(apart, apart, state.moments.second);
    }
    state.moments.count += N;
    return state;
  }
  template <class T>
  static JITGEN_DEVICE Shifted<T> centred(const Shifted<T>& state) {
    const T mean = state.mean();
    if (!(mean - mean == T(0))) return state;
    const Moments<T> moments = state.about(mean);
    return {mean, {moments.count, moments.first, moments.second < T(0) ? T(0) : moments.second}};
  }

  // The same for both orders, so that partners agree: from the smaller mean towards the larger.
  template <class T>
  static JITGEN_DEVICE Spread<T> combine(const Spread<T>& a, const Spread<T>& b) {
    if (a.count == T(0)) return b;
    if (b.count == T(0)) return a;
    const bool ordered = a.mean <= b.mean;
    const T apart = ordered ? b.mean - a.mean : a.mean - b.mean;
    const T count = a.count + b.count;
    const T mean = fma(apart, (ordered ? b.count : a.count) * share_of(count), ordered ? a.mean : b.mean);
    // Weighted before it is squared: a product with nothing is nothing then, whatever else overflows.
    return {mean, fma(apart * (a.count * b.count * share_of(count)), apart, a.squares + b.squares), count};
  }
};

// ---------------------------------------------------------------------------------------------------- among lanes

// A value as the 32-bit words it is moved by; three are moved as four.
template <class T>
union Words {
  static constexpr int used = (sizeof(T) + 3) / 4, count = used == 3 ? 4 : used;
  T whole;
  uint32_t parts[count];
};

template <class T>
JITGEN_DEVICE T from_lane(T value, int distance) {
  Words<T> from, to;
  for (int i = 0; i < from.count; ++i) from.parts[i] = 0;
  from.whole = value;
#pragma unroll
  for (int i = 0; i < from.used; ++i) to.parts[i] = __shfl_xor_sync(0xffffffffu, from.parts[i], distance);
  return to.whole;
}

// Over aligned groups of `lanes` (a power of two) neighbours; both partners combine lower with upper, so they agree.
template <class Op, int lanes, class T>
JITGEN_DEVICE T combine_lanes(T value) {
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) value = Op::combine(value, from_lane(value, distance));
  return value;
}

// A state of several numbers: what they are measured from is combined first, and each lane's state is moved there once.
template <class Op, int lanes, class T>
JITGEN_DEVICE Exponentials<T> combine_lanes(const Exponentials<T>& state) {
  const T top = combine_lanes<Max, lanes>(state.top);
  return {top, combine_lanes<Sum, lanes>(state.sum * exp(state.top - top))};
}
// The first lane has some of all values, where there are any.
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

// ------------------------------------------------------------------------------------------------ among the cluster

JITGEN_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every block's barriers must exist before another block sends to them: arrive when they are made, wait before sending.
// Relaxed, because an arrival that releases would wait for all that the thread has stored to memory.
JITGEN_DEVICE void cluster_arrive() {
  asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
JITGEN_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// To shared memory of the cluster, whose `barrier` counts the bytes: one message.
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

// Values that the blocks of a cluster send to one another, and the barrier that counts their bytes. Of rows one after
// another two inboxes take turns, each opened again when it has been waited for: who has received all of a row knows
// that all have received the row before it.
template <class T, int values>
struct Inbox {
  alignas(16) Words<T> from[values];
  alignas(8) uint64_t arrived;

  JITGEN_DEVICE void open() {  // by one thread, as is the next
    barrier_init(shared_address(&arrived), 1);
    open_again();
  }
  JITGEN_DEVICE void open_again() { barrier_arrive_expect(shared_address(&arrived), values * int(sizeof(Words<T>))); }
  // `value` becomes number `place` of block `rank`'s inbox.
  JITGEN_DEVICE void send(T value, int place, int rank) {
    Words<T> words;
    for (int i = 0; i < words.count; ++i) words.parts[i] = 0;
    words.whole = value;
    uint32_t to, barrier;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(&from[place])), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(shared_address(&arrived)), "r"(rank));
    constexpr int several = words.count % 4 == 0 ? 4 : words.count % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < words.count; i += several) send_words<several>(to + 4 * i, words.parts + i, barrier);
  }
  JITGEN_DEVICE void wait(uint32_t parity) { barrier_wait(shared_address(&arrived), parity); }
};

// ------------------------------------------------------------------------------------------------------ over a row

// What a row's threads share while they combine one value. Never reused within a kernel, so nothing has to be awaited
// before it is written.
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

// A row of a whole cluster: each warp sends what it has to every block, each of which combines all of it for itself.
// No block leaves while another still sends to it, because it waits for all that it is sent. Of several values all are
// sent before the first is waited for.
template <class Op, int warps, int cluster, class T>
JITGEN_DEVICE void send_cluster(T value, Inbox<T, warps * cluster>& inbox, int thread) {
  value = combine_lanes<Op, 32>(value);
  if (thread % 32 < cluster) inbox.send(value, cluster_rank() * warps + thread / 32, thread % 32);
}
// Of an inbox that has been waited for, each value as `seen`.
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

// ------------------------------------------------------------------------------------------------------ over columns

// Neighbouring rows whose elements lie side by side: `lanes` neighbouring threads walk `beside` rows each, and `threads`
// groups of them share the rows.

// What the block's threads share while they combine one value of every row after another: nothing of it is awaited
// before it is written, because the two halves are written on different sides of a barrier.
template <int states, int rows, class... States>
struct ColumnScratch {
  static constexpr int largest() {
    int found = 1;
    for (int size : {int(sizeof(States))...}) found = size > found ? size : found;
    return found;
  }
  alignas(16) unsigned char partial[states * rows * largest()];
  alignas(16) unsigned char total[rows * largest()];
};

// Threads of a block that a row's partial results come from: lanes of a warp are combined by shuffles before.
template <int lanes, int threads>
constexpr int column_groups = lanes < 32 ? lanes * threads / 32 : threads;

template <class Op, int lanes, int threads, class T, int beside, class Scratch>
JITGEN_DEVICE void combine_groups(T (&part)[beside], Scratch& scratch) {
  constexpr int group = lanes < 32 ? 32 : lanes;
#pragma unroll
  for (int distance = lanes; distance < 32; distance *= 2) {
#pragma unroll
    for (int j = 0; j < beside; ++j) part[j] = Op::combine(part[j], from_lane(part[j], distance));
  }
  if (threadIdx.x % group < lanes) {
    T* const mine = reinterpret_cast<T*>(scratch.partial) + threadIdx.x / group * (lanes * beside);
#pragma unroll
    for (int j = 0; j < beside; ++j) mine[threadIdx.x % lanes * beside + j] = part[j];
  }
  __syncthreads();
}

// Of one row, over the block.
template <class Op, int lanes, int threads, class T, int beside, class Scratch>
JITGEN_DEVICE T group_total(const Scratch& scratch, int row) {
  const T* const partial = reinterpret_cast<const T*>(scratch.partial);
  T value = partial[row];
#pragma unroll
  for (int i = 1; i < column_groups<lanes, threads>; ++i) value = Op::combine(value, partial[i * (lanes * beside) + row]);
  return value;
}

template <class T, int beside, class Scratch>
JITGEN_DEVICE void take_totals(T (&part)[beside], const Scratch& scratch, int lane) {
  __syncthreads();
#pragma unroll
  for (int j = 0; j < beside; ++j) part[j] = reinterpret_cast<const T*>(scratch.total)[lane * beside + j];
}

template <class Op, int lanes, int threads, class T, int beside, class Scratch>
JITGEN_DEVICE void combine_columns(T (&part)[beside], Scratch& scratch) {
  if (threads == 1) return;
  combine_groups<Op, lanes, threads>(part, scratch);
#pragma unroll 1
  for (int row = threadIdx.x; row < lanes * beside; row += lanes * threads) {
    reinterpret_cast<T*>(scratch.total)[row] = group_total<Op, lanes, threads, T, beside>(scratch, row);
  }
  take_totals(part, scratch, threadIdx.x % lanes);
}

// Over the blocks of a cluster.
template <class Op, int lanes, int threads, int cluster, class T, int beside, class Scratch>
JITGEN_DEVICE void combine_columns(T (&part)[beside], Scratch& scratch, Inbox<T, lanes * beside * cluster>& inbox) {
  constexpr int rows = lanes * beside;
  combine_groups<Op, lanes, threads>(part, scratch);
#pragma unroll 1
  for (int row = threadIdx.x; row < rows; row += lanes * threads) {
    const T value = group_total<Op, lanes, threads, T, beside>(scratch, row);
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
  take_totals(part, scratch, threadIdx.x % lanes);
}

}  // namespace jitgen
