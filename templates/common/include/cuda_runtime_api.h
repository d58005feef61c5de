// Stands in for the toolkit's header of this name under NVRTC; see jitgen/wgmma_atoms.cuh.
#pragma once
#ifndef __CUDACC_RTC__
#include_next <cuda_runtime_api.h>
#endif
