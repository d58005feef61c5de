// Operators of torch's stable ABI that launch generated kernels, for packages of AOTInductor: no Python runs.
//
// jitgen/export/source.py writes a file that includes this header, with a table for each operator and one registration:
//
//   name(Tensor[] tensors) -> Tensor[]
//
// An operator is for tensors of certain dtypes, sizes and strides. One size may vary: the key. A table has a segment
// for each range of keys in which the same kernels are launched and every integer of the launches is base + slope * key.
// The integers of a call are read in this order, each group for each of its items:
//
//   input        its sizes, its strides
//   allocation   temporaries and then results: the sizes, the strides
//   step         CUDA only: grid x, y, z, block x, y, z, shared bytes, cluster, persistence (0 none, 1 clusters, 2
//                blocks), blocks; then for each letter of `arguments`:
//                  P  pointer      the byte offset into the next of `buffers`
//                  v  value        its eight bytes; an int32 or float is their first four
//                  t  threads      1 if the kernel is worth several
//                  T  tensor map   of the next of `buffers`: data type, rank, swizzle, byte offset, and, innermost
//                                  dimension first, sizes, byte strides but the first, box
#pragma once

#ifdef JITGEN_CUDA
#define USE_CUDA  // declares the query of the current stream
#include <cuda.h>
#endif
#include <dlfcn.h>
#include <link.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace jitgen::operators {

using torch::stable::Tensor;

#ifdef JITGEN_CUDA
// A kernel on one device, and the most bytes of shared memory that its launches may have.
struct Loaded {
  CUfunction function = nullptr;
  int64_t shared_bytes = 48 * 1024;
};

// A cubin, and what is loaded of it: one for each device.
struct Kernel {
  const unsigned char* binary;
  const char* entry;
  bool any_cluster, overlaps;
  mutable std::mutex loading;
  mutable std::vector<Loaded> loaded;
};
#else
// Takes the packed arguments. Its status is 0, the number of a region with an index out of range, from 1, or -1: its
// scratch memory could not be allocated.
struct Kernel {
  int32_t (*packed)(const unsigned char*);
};
#endif

struct Step {
  const Kernel* kernel;
  const char* arguments;
  const int32_t* buffers;
  const char* const* regions;  // what each checked region is called in a message
  const int32_t* offsets;  // CUDA C++: where each argument is in the one struct that the kernel takes
  int32_t bytes;  // and the struct's size; 0 where each argument is a parameter
};

struct Buffer {
  int32_t rank;
  int32_t (*dtype)();  // such as aoti_torch_dtype_float32
};

struct Variant {
  const Buffer* allocations;
  int32_t allocated;
  const Step* steps;
  int32_t step_count;
  const int32_t* results;
  int32_t result_count;
};

struct Segment {
  int64_t first;  // the least key
  const Variant* variant;
  const int64_t* base;
  const int64_t* slope;
};

struct Operator {
  const char* name;
  const Buffer* inputs;
  int32_t input_count;
  int32_t key_tensor, key_dim;  // where the key is a size; -1 for an operator without one
  const Segment* segments;
  int32_t segment_count;
  int64_t last;  // the greatest key
};

[[noreturn]] inline void refuse(const Operator& op, const std::string& what) {
  throw std::runtime_error(std::string(op.name) + ": " + what);
}

inline void check(const Operator& op, AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) refuse(op, std::string("torch could not ") + what);
}

// The integers of one call, from front to back.
class Integers {
 public:
  Integers(const Segment& segment, int64_t key) : segment_(segment), key_(key) {}
  int64_t next() {
    const int64_t index = at_++;
    return segment_.base[index] + segment_.slope[index] * key_;
  }
  std::vector<int64_t> next(int64_t count) {
    std::vector<int64_t> found(count);
    for (int64_t& each : found) each = next();
    return found;
  }

 private:
  const Segment& segment_;
  int64_t key_;
  int64_t at_ = 0;
};

inline const Segment& segment_of(const Operator& op, int64_t key) {
  if (key < op.segments[0].first || key > op.last) {
    refuse(op, "size " + std::to_string(key) + " of dimension " + std::to_string(op.key_dim) + " of tensor " +
                   std::to_string(op.key_tensor) + "; the package is for " + std::to_string(op.segments[0].first) +
                   " to " + std::to_string(op.last));
  }
  int32_t index = 0;
  while (index + 1 < op.segment_count && op.segments[index + 1].first <= key) ++index;
  return op.segments[index];
}

inline std::string described(const std::vector<int64_t>& sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

struct Device {
  int32_t type = 0, index = 0;
  bool operator==(const Device&) const = default;
};

inline Device device_of(const Operator& op, const Tensor& tensor) {
  Device device;
  check(op, aoti_torch_get_device_type(tensor.get(), &device.type), "give a device");
  check(op, aoti_torch_get_device_index(tensor.get(), &device.index), "give a device");
  return device;
}

inline void check_input(const Operator& op, int32_t index, const Tensor& tensor, Device device, Integers& integers) {
  const Buffer& wanted = op.inputs[index];
  const std::string name = "tensor " + std::to_string(index);
  if (device_of(op, tensor) != device) refuse(op, name + " is on another device than tensor 0");
  int32_t dtype = 0;
  check(op, aoti_torch_get_dtype(tensor.get(), &dtype), "give a dtype");
  if (dtype != wanted.dtype() || tensor.dim() != wanted.rank) refuse(op, name + " is of another dtype or rank");
  const std::vector<int64_t> sizes = integers.next(wanted.rank), strides = integers.next(wanted.rank);
  bool empty = false;
  for (int32_t dim = 0; dim < wanted.rank; ++dim) empty = empty || sizes[dim] == 0;
  for (int32_t dim = 0; dim < wanted.rank; ++dim) {
    if (tensor.size(dim) != sizes[dim]) refuse(op, name + " is not of sizes " + described(sizes));
    if (sizes[dim] > 1 && !empty && tensor.stride(dim) != strides[dim])
      refuse(op, name + " is not of strides " + described(strides));
  }
#ifdef JITGEN_CUDA
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16) refuse(op, name + " is not at a multiple of 16 bytes");
#endif
}

inline Tensor allocate(const Operator& op, const Buffer& buffer, Device device, Integers& integers) {
  const std::vector<int64_t> sizes = integers.next(buffer.rank), strides = integers.next(buffer.rank);
  AtenTensorHandle made = nullptr;
  check(op,
        aoti_torch_empty_strided(buffer.rank, sizes.data(), strides.data(), buffer.dtype(), device.type, device.index,
                                 &made),
        "allocate a tensor");
  return Tensor(made);
}

#ifdef JITGEN_CUDA

// The driver's functions, from the library that torch has loaded.
struct Driver {
  decltype(&cuModuleLoadData) load;
  decltype(&cuModuleGetFunction) find;
  decltype(&cuFuncSetAttribute) set;
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuGetErrorString) describe;
  decltype(&cuTensorMapEncodeTiled) encode;
  decltype(&cuOccupancyMaxActiveClusters) clusters;
  decltype(&cuDeviceGetAttribute) attribute;
  decltype(&cuDriverGetVersion) version;
  decltype(&cuDevicePrimaryCtxRetain) retain;
  decltype(&cuCtxPushCurrent) push;
  decltype(&cuCtxPopCurrent) pop;

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) throw std::runtime_error("jitgen: this machine has no CUDA driver");
    const auto look_up = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) throw std::runtime_error(std::string("jitgen: the CUDA driver has no ") + name);
    };
    look_up(load, "cuModuleLoadData");
    look_up(find, "cuModuleGetFunction");
    look_up(set, "cuFuncSetAttribute");
    look_up(launch, "cuLaunchKernelEx");
    look_up(describe, "cuGetErrorString");
    look_up(encode, "cuTensorMapEncodeTiled");
    look_up(clusters, "cuOccupancyMaxActiveClusters");
    look_up(attribute, "cuDeviceGetAttribute");
    look_up(version, "cuDriverGetVersion");
    look_up(retain, "cuDevicePrimaryCtxRetain");
    look_up(push, "cuCtxPushCurrent_v2");
    look_up(pop, "cuCtxPopCurrent_v2");
  }
};

inline void check_driver(const Operator& op, CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  const char* words = nullptr;
  Driver::get().describe(status, &words);
  refuse(op, std::string(what) + ": " + (words ? words : "an unknown error of CUDA"));
}

// The primary context of a device, which torch uses. It is retained once and stays.
inline CUcontext primary_context(const Operator& op, int32_t device) {
  static std::mutex retaining;
  static std::vector<CUcontext> retained;
  const std::lock_guard lock(retaining);
  if (retained.size() <= static_cast<size_t>(device)) retained.resize(device + 1);
  if (retained[device] == nullptr) {
    check_driver(op, Driver::get().retain(&retained[device], device), "retaining the context of a device");
  }
  return retained[device];
}

// While it lives, that context is the current one of this thread. A new thread has none, and torch's device guard sets
// none where the device is the one that torch takes for current.
class CurrentContext {
 public:
  CurrentContext(const Operator& op, int32_t device) {
    check_driver(op, Driver::get().push(primary_context(op, device)), "making a context current");
  }
  ~CurrentContext() {
    CUcontext popped = nullptr;
    Driver::get().pop(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
};

// Refuses a kernel with more bytes of parameters than the driver knows: 4096 by any, 32764 from CUDA 12.1 on, as
// jitgen/runtime/cuda.py says.
inline void check_parameters(const Operator& op, int32_t bytes) {
  if (bytes <= 4096) return;
  int version = 0;
  check_driver(op, Driver::get().version(&version), "reading the version of the CUDA driver");
  if (version >= 12010) return;
  refuse(op, "a kernel takes " + std::to_string(bytes) +
                 " bytes of parameters; more than 4096 need the driver of CUDA 12.1 (530) or newer, and this one is of "
                 "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) +
                 ": update the driver, or make the package with fewer tensors at once");
}

inline CUfunction function_on(const Operator& op, const Kernel& kernel, int32_t device, int64_t shared_bytes) {
  const std::lock_guard lock(kernel.loading);
  if (kernel.loaded.size() <= static_cast<size_t>(device)) kernel.loaded.resize(device + 1);
  Loaded& loaded = kernel.loaded[device];
  if (loaded.function == nullptr) {
    CUmodule module_of_kernel = nullptr;
    CUfunction found = nullptr;
    check_driver(op, Driver::get().load(&module_of_kernel, kernel.binary), "loading a kernel");
    check_driver(op, Driver::get().find(&found, module_of_kernel, kernel.entry), "finding a kernel");
    loaded.function = found;
  }
  if (shared_bytes > loaded.shared_bytes) {  // never lowered: another thread may be about to launch with more
    check_driver(op,
                 Driver::get().set(loaded.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                   static_cast<int>(shared_bytes)),
                 "asking for shared memory");
    loaded.shared_bytes = shared_bytes;
  }
  return loaded.function;
}

struct Slot {
  alignas(64) unsigned char bytes[128];
};

inline void encode_map(const Operator& op, unsigned char* place, char* address, Integers& integers) {
  const auto type = static_cast<CUtensorMapDataType>(integers.next());
  const auto rank = static_cast<cuuint32_t>(integers.next());
  const auto swizzle = static_cast<CUtensorMapSwizzle>(integers.next());
  const int64_t offset = integers.next();
  cuuint64_t sizes[5] = {}, strides[5] = {};
  cuuint32_t box[5] = {}, steps[5] = {1, 1, 1, 1, 1};
  for (cuuint32_t dim = 0; dim < rank; ++dim) sizes[dim] = integers.next();
  for (cuuint32_t dim = 0; dim + 1 < rank; ++dim) strides[dim] = integers.next();
  for (cuuint32_t dim = 0; dim < rank; ++dim) box[dim] = static_cast<cuuint32_t>(integers.next());
  CUtensorMap map;
  check_driver(op,
               Driver::get().encode(&map, type, rank, address + offset, sizes, strides, box, steps,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               "encoding a tensor map");
  __builtin_memcpy(place, &map, sizeof map);
}

inline void run_step(const Operator& op, const Step& step, std::vector<Tensor>& buffers, Integers& integers) {
  int32_t device = 0;
  check(op, aoti_torch_get_device_index(buffers[step.buffers[0]].get(), &device), "give a device");
  void* stream = nullptr;
  check(op, aoti_torch_get_current_cuda_stream(device, &stream), "give the current stream");
  const std::vector<int64_t> shape = integers.next(10);
  const int64_t cluster = shape[7], persistence = shape[8];
  check_parameters(op, step.bytes);
  const CUfunction function = function_on(op, *step.kernel, device, shape[6]);

  CUlaunchAttribute attributes[2];
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(shape[0]);
  config.gridDimY = static_cast<unsigned>(shape[1]);
  config.gridDimZ = static_cast<unsigned>(shape[2]);
  config.blockDimX = static_cast<unsigned>(shape[3]);
  config.blockDimY = static_cast<unsigned>(shape[4]);
  config.blockDimZ = static_cast<unsigned>(shape[5]);
  config.sharedMemBytes = static_cast<unsigned>(shape[6]);
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = attributes;
  if (persistence != 0 || (step.kernel->any_cluster && cluster > 1)) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
  }
  if (persistence != 0) {
    int most = 0;
    if (persistence == 1) {  // as many clusters as are resident at once
      CUlaunchConfig one = config;
      one.gridDimX = static_cast<unsigned>(cluster);
      one.gridDimY = one.gridDimZ = 1;
      check_driver(op, Driver::get().clusters(&most, function, &one), "asking for resident clusters");
      most = (most < 1 ? 1 : most) * static_cast<int>(cluster);
    } else {
      check_driver(op, Driver::get().attribute(&most, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device),
                   "asking for multiprocessors");
      most = static_cast<int>(most * shape[9] / cluster * cluster);
      if (most < cluster) most = static_cast<int>(cluster);
    }
    if (config.gridDimX > static_cast<unsigned>(most)) config.gridDimX = static_cast<unsigned>(most);
    if (!(step.kernel->any_cluster && cluster > 1)) config.numAttrs = 0;
  }
  if (step.kernel->overlaps) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }

  const std::string letters = step.arguments;
  // A value is written as eight bytes: in a struct the next one overwrites those that are too many.
  std::vector<Slot> slots(step.bytes ? step.bytes / sizeof(Slot) + 2 : letters.size());
  std::vector<void*> addresses(letters.size() + 1);
  int32_t buffer = 0;
  for (size_t index = 0; index < letters.size(); ++index) {
    unsigned char* const place = step.bytes ? slots[0].bytes + step.offsets[index] : slots[index].bytes;
    addresses[step.bytes ? 0 : index] = step.bytes ? slots[0].bytes : place;
    char* start = letters[index] == 'v' ? nullptr : static_cast<char*>(buffers[step.buffers[buffer++]].data_ptr());
    if (letters[index] == 'T') {
      encode_map(op, place, start, integers);
      continue;
    }
    const int64_t value = integers.next();
    const uint64_t word = letters[index] == 'P' ? reinterpret_cast<uintptr_t>(start) + value : value;
    __builtin_memcpy(place, &word, sizeof word);
  }
  check_driver(op, Driver::get().launch(&config, function, addresses.data(), nullptr), "launching a kernel");
}

#else

inline void run_step(const Operator& op, const Step& step, std::vector<Tensor>& buffers, Integers& integers) {
  std::vector<uint64_t> slots;
  int32_t buffer = 0;
  for (const char* letter = step.arguments; *letter != 0; ++letter) {
    const int64_t value = integers.next();
    if (*letter == 'P') {
      slots.push_back(reinterpret_cast<uintptr_t>(buffers[step.buffers[buffer++]].data_ptr()) + value);
    } else if (*letter == 't') {
      uint32_t threads = 1;
      if (value != 0) check(op, torch_get_num_threads(&threads), "give the number of threads");
      slots.push_back(threads);
    } else {
      slots.push_back(static_cast<uint64_t>(value));
    }
  }
  const auto* packed = reinterpret_cast<const unsigned char*>(slots.data());
  const int32_t status = step.kernel->packed(packed);
  if (status < 0) refuse(op, "a kernel's scratch memory cannot be allocated");
  if (status > 0) refuse(op, std::string("an index is out of range at ") + step.regions[status - 1]);
}

#endif

inline std::vector<Tensor> run(const Operator& op, const std::vector<Tensor>& tensors) {
  if (static_cast<int32_t>(tensors.size()) != op.input_count) refuse(op, "another number of tensors");
  const int64_t key = op.key_tensor < 0 ? 0 : tensors[op.key_tensor].size(op.key_dim);
  const Segment& segment = segment_of(op, key);
  const Variant& variant = *segment.variant;
  Integers integers(segment, key);
  const Device device = device_of(op, tensors[0]);
  for (int32_t index = 0; index < op.input_count; ++index) check_input(op, index, tensors[index], device, integers);
#ifdef JITGEN_CUDA
  const torch::stable::accelerator::DeviceGuard guard(device.index);
  const CurrentContext context(op, device.index);
#endif
  std::vector<Tensor> buffers = tensors;
  for (int32_t index = 0; index < variant.allocated; ++index) {
    buffers.push_back(allocate(op, variant.allocations[index], device, integers));
  }
  for (int32_t index = 0; index < variant.step_count; ++index) run_step(op, variant.steps[index], buffers, integers);
  std::vector<Tensor> results;
  for (int32_t index = 0; index < variant.result_count; ++index) results.push_back(buffers[variant.results[index]]);
  return results;
}

template <const Operator& op>
std::vector<Tensor> call(std::vector<Tensor> tensors) {
  return run(op, tensors);
}

// Defines an operator, where the process that made the package has not: it may load the package as well.
template <class Library>
void define(Library& library, const char* schema) {
  try {
    library.def(schema);
  } catch (const std::exception&) {  // it is known, by this very schema: the namespace is a digest of its kernels
  }
}

// Keep this library in the process: it has registered operators, which other packages may call.
inline void stay_loaded() {
  Dl_info library;
  if (dladdr(reinterpret_cast<const void*>(&stay_loaded), &library) != 0) {
    dlopen(library.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

// Whether a library that this process has loaded has a true variable of this name.
inline bool another_library_has(const char* variable) {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* found) {
        static_cast<std::vector<std::string>*>(found)->push_back(library->dlpi_name);
        return 0;
      },
      &paths);
  for (const std::string& path : paths) {
    void* library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) continue;
    const auto* found = static_cast<const bool*>(dlsym(library, variable));
    const bool is_true = found != nullptr && *found;
    dlclose(library);
    if (is_true) return true;
  }
  return false;
}

}  // namespace jitgen::operators
