// What an entry in CUDA C++ takes: one struct, `params`, with a member for each operand. A launch packs it as C++ lays it
// out (jitgen/kernel/entry.py), which every source asserts of its own struct.
//
// The struct is a `const __grid_constant__` parameter: it stays in constant memory, where each thread reads what it needs,
// and where the copy engine finds the tensor maps.
#pragma once

// Where a member of `Params` is, in bytes. NVRTC before 13.5 lacks the builtin, and has the operator that EDG's compilers
// make `offsetof` of.
#ifdef __CUDACC_RTC__
#define JITGEN_OFFSET(member) __INTADDR__(&((Params*)0)->member)
#else
#define JITGEN_OFFSET(member) __builtin_offsetof(Params, member)
#endif

namespace jitgen {

// A tensor in memory: the address of its first element, the strides that a kernel cannot know when it is compiled, in
// elements and from the outermost dimension on, and the sizes of the dimensions that computed indices choose along.
template <class Element, class Index, int rank, int chosen = 0>
struct Operand {
  Element* pointer;
  Index strides[rank];
  Index sizes[chosen];
};
template <class Element, class Index, int rank>
struct Operand<Element, Index, rank, 0> {
  Element* pointer;
  Index strides[rank];
};
template <class Element, class Index, int chosen>
struct Operand<Element, Index, 0, chosen> {
  Element* pointer;
  Index sizes[chosen];
};
template <class Element, class Index>
struct Operand<Element, Index, 0, 0> {
  Element* pointer;
};

// A tensor whose elements are the sum of `first` and of indices times strides; it is in no memory.
template <class Index, int rank>
struct Ramp {
  Index first;
  Index strides[rank];
};
template <class Index>
struct Ramp<Index, 0> {
  Index first;
};

}  // namespace jitgen
