// Which of two types, and whether they are one: of every dialect of C++, so that this includes nothing.
#pragma once

namespace jitgen {

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

template <bool condition, class A, class B>
struct Choice {
  using type = A;
};
template <class A, class B>
struct Choice<false, A, B> {
  using type = B;
};
template <bool condition, class A, class B>
using Select = typename Choice<condition, A, B>::type;

}  // namespace jitgen
