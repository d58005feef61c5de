// Stands in for the header of CUTLASS, of which kernels for sm_90a need nothing.
#pragma once
