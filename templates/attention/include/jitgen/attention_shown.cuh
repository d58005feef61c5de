// Which keys a mask in memory shows: from the first to the last. The mask of a cache hides its end, which is not filled
// yet, and what pads shorter sequences. It is read from both ends until it shows a key, so that a mask that hides nothing
// there costs one look; keys that it hides between these are computed and masked.
#pragma once

#include "jitgen/attention_walk.cuh"

namespace jitgen {

// Of some keys' flags: whether one is true, and whether all are.
struct Flags {
  bool some, all;
};
JITGEN_DEVICE Flags flags_of(const uint4& bytes) {
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  uint32_t some = 0, zeros = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    some |= words[i];
    zeros |= (words[i] - 0x01010101u) & ~words[i] & 0x80808080u;  // of words without a byte of 0 it is 0
  }
  return {some != 0, zeros == 0};
}

// What a warp sees of 128 runs of 16 aligned flags, which it reads at once.
struct ShownRuns {
  static constexpr int words = 4, count = 32 * words;
  uint32_t seen[words];  // bit l of word i: whether run 32 i + l shows a key

  JITGEN_DEVICE bool none() const { return (seen[0] | seen[1] | seen[2] | seen[3]) == 0; }
  JITGEN_DEVICE int first() const {
    int found = 0;
#pragma unroll
    for (int i = words - 1; i >= 0; --i) found = seen[i] != 0 ? i * 32 + __ffs(seen[i]) - 1 : found;
    return found;
  }
  JITGEN_DEVICE int last() const {
    int found = 0;
#pragma unroll
    for (int i = 0; i < words; ++i) found = seen[i] != 0 ? i * 32 + 31 - __clz(seen[i]) : found;
    return found;
  }
};

// The keys from the first to the one after the last that `mask` shows, whose flags are neighbours; both may be up to 15
// farther out. Called by whole warps. The first look at either end is short, for masks that show all keys.
//
//   shows(first, last, flags): whether keys `first` to `last`, with these flags, may have a score
template <class Shows>
JITGEN_DEVICE Ends shown_keys(const uint8_t* mask, int keys, const Shows& shows) {
  if (keys <= 0) return {0, 0};
  constexpr int run = 16, count = ShownRuns::count;
  const int lane = threadIdx.x % 32;
  const int before = int(reinterpret_cast<uint64_t>(mask) % run);  // bytes of the first run that are not the mask's
  const int runs = (before + keys + run - 1) / run;
  const auto first_of = [&](int number) { return number * run - before; };
  const auto is_whole = [&](int first) { return first >= 0 && first + run <= keys; };
  const auto read = [&](int number) {
    const int first = first_of(number);
    return is_whole(first) ? *reinterpret_cast<const uint4*>(mask + first) : uint4{0u, 0u, 0u, 0u};
  };
  // Of the first and of the last run each lane reads a byte: they may begin before the mask and end behind it.
  const int key = first_of(lane < run ? 0 : runs - 1) + lane % run;
  const bool exists = key >= 0 && key < keys, flag = exists && mask[key] != 0;
  int low = 0, high = runs - 32;  // the first runs of the looks at both ends
  const uint4 low_bytes = read(low + lane), high_bytes = read(high + lane);
  const uint32_t some = __ballot_sync(0xffffffffu, flag), missing = __ballot_sync(0xffffffffu, exists && !flag);
  const Flags of_first = {(some & 0xffffu) != 0, (missing & 0xffffu) == 0};
  const Flags of_last = {some >> run != 0, missing >> run == 0};
  const auto is_shown = [&](int number, const uint4& bytes) {
    const int first = first_of(number);
    const Flags flags = is_whole(first) ? flags_of(bytes) : number == 0 ? of_first : of_last;
    const bool is_run = number >= 0 && number < runs;
    return is_run && shows(first < 0 ? 0 : first, smaller(first + run, keys) - 1, flags);
  };
  const auto look = [&](int from) {
    uint4 bytes[ShownRuns::words];
    ShownRuns found;
#pragma unroll
    for (int i = 0; i < ShownRuns::words; ++i) bytes[i] = read(from + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < ShownRuns::words; ++i) {
      found.seen[i] = __ballot_sync(0xffffffffu, is_shown(from + i * 32 + lane, bytes[i]));
    }
    return found;
  };
  const uint32_t at_low = __ballot_sync(0xffffffffu, is_shown(low + lane, low_bytes));
  const uint32_t at_high = __ballot_sync(0xffffffffu, is_shown(high + lane, high_bytes));
  int first_run = low + __ffs(at_low) - 1, last_run = high + 31 - __clz(at_high);
  if (at_low == 0) {
    ShownRuns found = {};
    for (low += 32; low < runs && found.none(); low += count) {
      found = look(low);
      first_run = low + found.first();
    }
    if (found.none()) return {0, 0};
  }
  if (at_high == 0) {
    ShownRuns found = {};
    while (high > 0 && found.none()) {
      high -= count;
      found = look(high);
      last_run = high + found.last();
    }
    if (found.none()) return {0, 0};
  }
  const int first = first_of(first_run);
  return {first < 0 ? 0 : first, smaller(first_of(last_run + 1), keys)};
}

// The tiles of keys that a mask in memory shows; see AllKeys in attention_decode.cuh.
struct ShownKeys {
  template <int tile_keys, class Operands>
  static JITGEN_DEVICE TileRange tiles(
      const Operands& operands, const typename Operands::Task& task, const typename Operands::Block& block) {
    const Ends keys = operands.shown_keys(task, block);
    return {int(keys.low) / tile_keys, int(keys.high + tile_keys - 1) / tile_keys};
  }
};

}  // namespace jitgen
