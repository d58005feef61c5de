// A kernel as a torch operator, for the load_inline route: jitgen/compilers/load_inline.py appends this header's macro to
// the generated source.
//
//   JITGEN_TORCH_OPERATOR(name, entry) registers
//
//   jitgen::name(Tensor[] inputs, Tensor(a!)[] outputs, int[] input_offsets, int[] output_offsets,
//                int[] integers, float[] scalars, int[] launch) -> ()
//
// which calls (C++) or launches on the current stream (CUDA) the kernel `entry`. The kernel's parameter types say where
// each argument comes from: a pointer to const is the next of `inputs`, any other pointer the next of `outputs`, both
// moved by the byte offset at the same position; an integer is the next of `integers`, a floating-point value the next
// of `scalars`. A struct, which an entry takes, is read member by member. `launch` is empty for C++ and (grid x,
// y, z, block x, y, z, dynamic shared bytes) for CUDA.
//
// Only the C functions of torch's stable ABI (2.10 and later) are used: their one header costs 0.05 s to parse where
// torch/library.h costs 15, and one binary serves every later torch.
#pragma once

#ifdef __CUDACC__
#define USE_CUDA  // declares the stream query
#endif
#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#ifdef __CUDACC__
namespace jitgen {  // entry.cuh defines them; a kernel that jitgen has not generated may take none
template <class Element, class Index, int rank, int chosen>
struct Operand;
template <class Index, int rank>
struct Ramp;
}  // namespace jitgen
#endif

namespace jitgen_operator {

constexpr const char* parameters =
    "(Tensor[] inputs, Tensor(a!)[] outputs, int[] input_offsets, int[] output_offsets, int[] integers, "
    "float[] scalars, int[] launch) -> ()";
constexpr uint64_t parameter_count = 7;

inline void check(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("jitgen: torch could not ") + what);
}

// One list argument, owned by the callee, read from front to back. Lists are read to the end: an argument too many is
// as wrong as one too few.
class List {
 public:
  List(StableIValue value, const char* name) : name_(name) {
    __builtin_memcpy(&handle_, &value, sizeof handle_);
    check(torch_list_size(handle_, &size_), "read a list's size");
  }
  List(const List&) = delete;
  ~List() { torch_delete_list(handle_); }

  StableIValue next() {
    if (at_ == size_) fail("too few");
    StableIValue value = 0;
    check(torch_list_get_item(handle_, at_++, &value), "read a list");
    return value;
  }
  void finish() const {
    if (at_ != size_) fail("too many");
  }
  bool empty() const { return size_ == 0; }

 private:
  [[noreturn]] void fail(const char* how) const {
    throw std::runtime_error(std::string("jitgen: ") + how + " values in the argument " + name_);
  }

  StableListHandle handle_ = nullptr;
  size_t size_ = 0;
  size_t at_ = 0;
  const char* name_;
};

struct Arguments {
  List inputs, outputs, input_offsets, output_offsets, integers, scalars, launch;
  int32_t device = -1;

  explicit Arguments(const StableIValue* stack)
      : inputs(stack[0], "inputs"),
        outputs(stack[1], "outputs"),
        input_offsets(stack[2], "input_offsets"),
        output_offsets(stack[3], "output_offsets"),
        integers(stack[4], "integers"),
        scalars(stack[5], "scalars"),
        launch(stack[6], "launch") {}

  void* pointer(List& tensors, List& offsets) {
    AtenTensorHandle tensor = nullptr;
    const StableIValue value = tensors.next();
    __builtin_memcpy(&tensor, &value, sizeof tensor);
    void* data = nullptr;
    const AOTITorchError found = aoti_torch_get_data_ptr(tensor, &data);
    const AOTITorchError placed = aoti_torch_get_device_index(tensor, &device);
    aoti_torch_delete_tensor_object(tensor);
    check(found, "give a tensor's address");
    check(placed, "give a tensor's device");
    return static_cast<char*>(data) + static_cast<int64_t>(offsets.next());
  }

  void finish() const {
    for (const List* list : {&inputs, &outputs, &input_offsets, &output_offsets, &integers, &scalars}) list->finish();
  }
};

template <class T>
T members(Arguments& arguments);

// The next argument of type T.
template <class T>
struct Take {
  static T from(Arguments& arguments) {
    if constexpr (std::is_class_v<T>) {
      return members<T>(arguments);
    } else if constexpr (std::is_floating_point_v<T>) {
      double value;
      const StableIValue bits = arguments.scalars.next();
      __builtin_memcpy(&value, &bits, sizeof value);
      return static_cast<T>(value);
    } else {
      return static_cast<T>(static_cast<int64_t>(arguments.integers.next()));
    }
  }
};
template <class T>
struct Take<T*> {
  static T* from(Arguments& arguments) {
    return static_cast<T*>(arguments.pointer(arguments.outputs, arguments.output_offsets));
  }
};
template <class T>
struct Take<const T*> {
  static const T* from(Arguments& arguments) {
    return static_cast<const T*>(arguments.pointer(arguments.inputs, arguments.input_offsets));
  }
};

#ifdef __CUDACC__
template <class Element, class Index, int rank, int chosen>
struct Take<jitgen::Operand<Element, Index, rank, chosen>> {
  static auto from(Arguments& arguments) {
    jitgen::Operand<Element, Index, rank, chosen> found;
    found.pointer = Take<Element*>::from(arguments);
    if constexpr (rank > 0) {
      for (Index& stride : found.strides) stride = Take<Index>::from(arguments);
    }
    if constexpr (chosen > 0) {
      for (Index& size : found.sizes) size = Take<Index>::from(arguments);
    }
    return found;
  }
};
template <class Index, int rank>
struct Take<jitgen::Ramp<Index, rank>> {
  static auto from(Arguments& arguments) {
    jitgen::Ramp<Index, rank> found;
    found.first = Take<Index>::from(arguments);
    if constexpr (rank > 0) {
      for (Index& stride : found.strides) stride = Take<Index>::from(arguments);
    }
    return found;
  }
};
#endif

// What initialises a member of a struct: the next argument, of whatever type the member has.
struct Next {
  Arguments* arguments;
  template <class T>
  operator T() const {
    return Take<T>::from(*arguments);
  }
};
template <class T, class Numbers, class = void>
struct HasMembers : std::false_type {};
template <class T, size_t... numbers>
struct HasMembers<T, std::index_sequence<numbers...>, std::void_t<decltype(T{(void(numbers), std::declval<Next>())...})>>
    : std::true_type {};

// A struct of at least `count` members; in a braced list they are initialised in their order.
template <class T, size_t count>
constexpr bool has_members = HasMembers<T, std::make_index_sequence<count>>::value;
template <class T, size_t count = 1>
constexpr size_t member_count() {
  if constexpr (has_members<T, count + 1>) {
    return member_count<T, count + 1>();
  } else {
    return count;
  }
}
template <class T, size_t... numbers>
T members(Next next, std::index_sequence<numbers...>) {
  return T{(void(numbers), next)...};
}
template <class T>
T members(Arguments& arguments) {
  return members<T>(Next{&arguments}, std::make_index_sequence<member_count<T>()>());
}

// How many allocations of the kernel failed so far; one of C++ counts them (templates/common/include/jitgen/memory.hpp).
inline int64_t failed_allocations() {
#ifdef JITGEN_ENTRY
  return jitgen::failed_allocations();
#else
  return 0;
#endif
}

// A constructor, because only in a braced list are arguments evaluated in their order.
template <class... Parameters>
struct Call {
#ifdef __CUDACC__
  Call(void (*entry)(Parameters...), Arguments& arguments, Parameters... values) {
    arguments.finish();
    uint32_t shape[7];
    for (uint32_t& extent : shape) extent = static_cast<uint32_t>(arguments.launch.next());
    void* stream = nullptr;
    check(aoti_torch_get_current_cuda_stream(arguments.device, &stream), "give the current stream");
    void* addresses[] = {const_cast<void*>(static_cast<const volatile void*>(&values))..., nullptr};
    if (shape[6] > 48 * 1024) cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shape[6]);
    const cudaError_t error =
        cudaLaunchKernel(reinterpret_cast<const void*>(entry), dim3(shape[0], shape[1], shape[2]),
                         dim3(shape[3], shape[4], shape[5]), addresses, shape[6], static_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string("jitgen: launch failed: ") + cudaGetErrorString(error));
  }
#else
  Call(void (*entry)(Parameters...), Arguments& arguments, Parameters... values) {
    arguments.finish();
    entry(values...);
  }
  // A kernel that checks indices.
  Call(int32_t (*entry)(Parameters...), Arguments& arguments, Parameters... values) {
    arguments.finish();
    if (entry(values...) != 0) throw std::out_of_range("jitgen: an index is out of range");
  }
#endif
};

template <class Result, class... Parameters>
void call(Result (*entry)(Parameters...), StableIValue* stack) {
  Arguments arguments(stack);
  const int64_t failed = failed_allocations();
  Call<Parameters...>{entry, arguments, Take<Parameters>::from(arguments)...};
  if (failed_allocations() != failed) throw std::runtime_error("jitgen: a kernel's scratch memory cannot be allocated");
}

// Outputs are allocated by the caller, so on tensors without data (Meta, fake tensors under torch.compile) there is
// nothing to do but to release the arguments.
inline void call_without_data(StableIValue* stack, uint64_t, uint64_t) { Arguments release(stack); }

// The handles live as long as the process: an operator is never unregistered.
inline void implement(const char* name, const char* key, void (*function)(StableIValue*, uint64_t, uint64_t)) {
  TorchLibraryHandle library = nullptr;
  check(aoti_torch_library_init_impl("jitgen", key, "", 0, &library), "open the operator library");
  check(aoti_torch_library_impl(library, name, function), "register an operator's kernel");
}

// Whether this library is one that load_inline has just built, and loads although nobody wants it registered yet.
inline bool under_construction() {
  Dl_info library;
  if (dladdr(reinterpret_cast<const void*>(&under_construction), &library) == 0) return false;
  const std::string path = library.dli_fname;
  return path.compare(path.rfind('/') + 1, 13, "unregistered_") == 0;
}

inline bool register_operator(const char* name, void (*function)(StableIValue*, uint64_t, uint64_t)) {
  if (under_construction()) return false;
  TorchLibraryHandle library = nullptr;
  check(aoti_torch_library_init_fragment("jitgen", "", 0, &library), "open the operator library");
  check(aoti_torch_library_def(library, (std::string(name) + parameters).c_str()), "define an operator");
#ifdef __CUDACC__
  implement(name, "CUDA", function);
#else
  implement(name, "CPU", function);
#endif
  implement(name, "Meta", call_without_data);
  return true;
}

}  // namespace jitgen_operator

#define JITGEN_TORCH_OPERATOR(name, entry)                                            \
  static const bool jitgen_registered_##name = jitgen_operator::register_operator( \
      #name, [](StableIValue* stack, uint64_t, uint64_t) { jitgen_operator::call(entry, stack); });
