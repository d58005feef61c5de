// jitgen 0.1.0: template reduction/reduction.cpp.j2
// target x86-64-v4: one row at a time, groups of 64 elements, costly values stay in scratch memory
// stages: reduce over j0; map; reduce over j0; map
// (N0, N1), rows of the last dimension: load bfloat16 contiguous, store bfloat16 contiguous
#include <jitgen/storage.hpp>
#include <jitgen/math.hpp>
#include <jitgen/parallel.hpp>
#define JITGEN_LANES 64
#include <jitgen/entry.hpp>
#include <jitgen/reduce.hpp>
#include <jitgen/walk.hpp>

namespace {

// What a launch packs, a value in each slot of eight bytes; first what may differ between two calls of one shape.
struct Params {
  const jitgen::bfloat16* input_pointer;
  jitgen::bfloat16* result_pointer;
  alignas(8) int32_t threads;
  int64_t length, size0;
  int64_t input_stride0;
  int64_t result_stride0;
  alignas(8) int32_t streaming;

  void run() const;
};
static_assert(sizeof(Params) == 64, "the launch packs it so");

constexpr int64_t block = 4096;  // elements walked at once: they fit the first-level cache
// The last pass of a row, which stores: what it needs to be done later.
struct Last {
  const jitgen::bfloat16* x0;
  jitgen::bfloat16* x1;
  float v5;
  int64_t length;
  bool streaming;
  char* scratch;
};

// A row on its way out, block by block.
struct Way {
  alignas(jitgen::cache_line) jitgen::bfloat16 buffer1[block];
  const jitgen::Output<jitgen::bfloat16> output1;
  jitgen::bfloat16* target1;
  const Last& of;

  Way(const Last& of, jitgen::Seam& seam1) :
    output1(of.x1, buffer1, of.length, of.streaming, seam1),
    of(of) {}
  JITGEN_MEMBER void begin(int64_t start) {
    target1 = output1.begin(start);
  }
  template <class Size>
  JITGEN_MEMBER void group(int64_t start, int64_t first, Size size) const {
    const auto x0 = of.x0;
    const auto x1 = of.x1;
    const float v5 = of.v5;
    const int64_t length = of.length;
    char* const scratch = of.scratch;
    float* const kept_v3 = reinterpret_cast<float*>(scratch + 0 * length);
      jitgen::GroupOfNarrowNan<jitgen::bfloat16, decltype(size)> group1(target1 + first, size);
#pragma omp simd
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t i = first + lane;
        const float v3 = kept_v3[start + i];
        const float v6 = v3 * v5;
        group1.set(lane, v6);
      }
      group1.write(output1.past);
  }
  JITGEN_MEMBER void end(int64_t start, int64_t count) const {
    output1.end(start, count);
  }
  void finish(const jitgen::Range& mine) {
    for (int64_t number = mine.begin; number < mine.end; ++number) {
      const int64_t start = number * block;
      const int64_t count = of.length - start < block ? of.length - start : block;
      begin(start);
      jitgen::groups(count, [&](int64_t first, auto size) __attribute__((always_inline)) { group(start, first, size); });
      end(start, count);
    }
  }
};
// Where there is a row before (`beside`), its last pass is done too.
void row(const jitgen::Team& team, const jitgen::bfloat16* x0, jitgen::bfloat16* x1, int64_t length, bool streaming, char* scratch, int64_t next0, jitgen::Seam& seam1, const Last& before, Last& last, bool beside) {
  const int64_t blocks = (length + block - 1) / block;
  const jitgen::Range mine = team.share(blocks);
  Way way(before, seam1);
  float* const kept_v3 = reinterpret_cast<float*>(scratch + 0 * length);
  // Pass 0
  jitgen::Blocks<jitgen::MaxOfNumbers<float>> blocks_v1(team, 0, blocks);
  for (int64_t number = mine.begin; number < mine.end; ++number) {
    const int64_t start = number * block;
    const int64_t count = length - start < block ? length - start : block;
    jitgen::Lanes<jitgen::MaxOfNumbers<float>> lanes_v1;
    lanes_v1.clear();
    jitgen::groups(count, [&](int64_t first, auto size) __attribute__((always_inline)) {
      const jitgen::Halves<decltype(size)> halves_v0(x0 + start + first, size);
#pragma omp simd
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t i = first + lane;
        const float v0 = halves_v0.at(lane);
        lanes_v1.take(lane, i, v0);
      }
    });
    blocks_v1.put(number, lanes_v1.fold(start));
  }
  team.meet();
  const float v1 = blocks_v1.result();
  // Pass 1
  jitgen::Blocks<jitgen::Sum<float>> blocks_v4(team, 1, blocks);
  for (int64_t number = mine.begin; number < mine.end; ++number) {
    const int64_t start = number * block;
    const int64_t count = length - start < block ? length - start : block;
    jitgen::Lanes<jitgen::Sum<float>> lanes_v4;
    lanes_v4.clear();
    if (beside) way.begin(start);
    jitgen::groups(count, [&](int64_t first, auto size) __attribute__((always_inline)) {
      if (next0 != 0) jitgen::fetch(x0 + next0 + start + first);
      const jitgen::Halves<decltype(size)> halves_v0(x0 + start + first, size);
#pragma omp simd
      for (int64_t lane = 0; lane < size; ++lane) {
        const int64_t i = first + lane;
        const float v0 = halves_v0.at(lane);
        const float v2 = v0 - v1;
        const float v3 = jitgen::coarse_exp_below(v2);
        kept_v3[start + i] = v3;
        lanes_v4.take(lane, i, v3);
      }
      if (beside) way.group(start, first, size);
    });
    blocks_v4.put(number, lanes_v4.fold(start));
    if (beside) way.end(start, count);
  }
  team.meet();
  const float v4 = blocks_v4.result();
  // Pass 2
  const float v5 = jitgen::reciprocal(v4);
  last = {x0, x1, v5, length, streaming, scratch};
  team.meet();
}

void Params::run() const {
  const int64_t sizes[] = {size0};
  const int64_t rows = size0;
  const bool fetches = length <= 524288;  // a later row, while this one is computed
  const int64_t ahead = jitgen::runs_ahead(1024, length);
  const int64_t blocks = (length + block - 1) / block;
  // Fewer rows than threads: all threads share each row, and leave their blocks' results here.
  const bool shared = threads > 1 && rows < threads && blocks >= threads;
  char* const memory = shared ? jitgen::room(2 * blocks * jitgen::partial_bytes) : nullptr;
  // What is costly to compute again is stored, each block's by the thread that walks it.
  const int64_t kept_bytes = length * 4;
  char* const shared_scratch = shared ? jitgen::room(kept_bytes) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t thread = omp_get_thread_num(), present = omp_get_num_threads();
    const jitgen::Team team = memory ? jitgen::Team{thread, present, memory} : jitgen::Team::alone();
    const jitgen::Range mine = memory ? jitgen::Range{0, rows} : jitgen::share(rows, 1, thread, present);
    auto at = jitgen::Walk<1>::from(sizes, mine.begin);
    char* const scratch = shared ? shared_scratch : jitgen::room(2 * kept_bytes);
    jitgen::Seam seam1;
    if (shared) {
      Last last = {};
      for (int64_t number = mine.begin; number < mine.end; ++number, at.next()) {
        row(team, input_pointer + at.index[0] * input_stride0, result_pointer + at.index[0] * result_stride0, length, streaming, scratch, fetches ? input_stride0 * ahead : 0, seam1, last, last, false);
        Way(last, seam1).finish(team.share(blocks));
        team.meet();
      }
    } else {
      // The last pass of a row is done with the next row's first one, so two rows are stored in alternation.
      Last lasts[2] = {};
      for (int64_t number = mine.begin; number < mine.end; ++number, at.next()) {
        const bool odd = number & 1;
        row(team, input_pointer + at.index[0] * input_stride0, result_pointer + at.index[0] * result_stride0, length, streaming, scratch + odd * kept_bytes, fetches ? input_stride0 * ahead : 0, seam1, lasts[!odd], lasts[odd], number != mine.begin);
      }
      if (mine.begin < mine.end) Way(lasts[(mine.end - 1) & 1], seam1).finish({0, blocks});
    }
    seam1.flush();
    if (!shared) __builtin_free(scratch);
    if (streaming) jitgen::stream_fence();
  }
  __builtin_free(shared_scratch);
  __builtin_free(memory);
}
}  // namespace

JITGEN_ENTRY(jitgen_reduction_c2788a2e)
