// Random bits that are a function of an index: Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
// 3", SC 2011). The counter is the offset and the index, the key the seed, as in curand. Part of math.hpp.
#pragma once

#include "jitgen/base.hpp"

namespace jitgen {

// The first two of the four words.
JITGEN_INLINE int64_t philox(int64_t index, int64_t seed, int64_t offset) {
  uint32_t c0 = uint32_t(uint64_t(offset)), c1 = uint32_t(uint64_t(offset) >> 32);
  uint32_t c2 = uint32_t(uint64_t(index)), c3 = uint32_t(uint64_t(index) >> 32);
  uint32_t k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b);
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return int64_t(uint64_t(c1) << 32 | c0);
}

}  // namespace jitgen
