// Stands in for the header of CUTLASS: what is left is named as a default argument of policies for sm_100.
#pragma once

namespace cute {
struct SM100_TMEM_LOAD_32dp32b32x;
}  // namespace cute
