// SPDX-License-Identifier: Apache-2.0
// Memory, streams and events of a device over the CUDA runtime, which is linked statically and
// looks for libcuda when it is first called; what it has no functions for is looked up in libcuda
// through it. For files that nvcc compiles: cuda_memory.cu is a driver of just these,
// cuda_driver.cu adds the kernels.
#ifndef KVM_DEVICE_CUDA_MEMORY_H_
#define KVM_DEVICE_CUDA_MEMORY_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <utility>

#include "device/driver.h"

namespace kvm::device::cuda {

inline Status failure(const char* what, cudaError_t error) {
  (void)cudaGetLastError();
  const bool memory = error == cudaErrorMemoryAllocation;
  return Status(memory ? KVM_ERR_NO_SPACE : KVM_ERR_DEVICE,
                std::string(what) + ": " + cudaGetErrorString(error));
}

inline Status check(const char* what, cudaError_t error) {
  return error == cudaSuccess ? Status::ok() : failure(what, error);
}

inline Status check(const char* what, CUresult result) {
  if (result == CUDA_SUCCESS) {
    return Status::ok();
  }
  return Status(result == CUDA_ERROR_OUT_OF_MEMORY ? KVM_ERR_NO_SPACE : KVM_ERR_DEVICE,
                std::string(what) + ": driver error " + std::to_string(static_cast<int>(result)));
}

template <class Function>
Status look_up(const char* name, Function* out) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  // As it is in this runtime's version, which has none of those we call in another way than 12.0.
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return Status(KVM_ERR_DEVICE, std::string("the driver has no ") + name);
  }
  *out = reinterpret_cast<Function>(found);
  return Status::ok();
}

// A device's primary context, which the runtime uses too, and how to make it current.
struct Context {
  CUdevice device = 0;
  CUcontext context = nullptr;
  decltype(&cuDevicePrimaryCtxRelease) release = nullptr;
  decltype(&cuCtxPushCurrent) push = nullptr;
  decltype(&cuCtxPopCurrent) pop = nullptr;

  Status open(int ordinal);
  Context() = default;
  ~Context() {
    if (context != nullptr) {
      (void)release(device);
    }
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
};

inline Status Context::open(int ordinal) {
  decltype(&cuDeviceGet) get = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
  KVM_TRY(look_up("cuDeviceGet", &get));
  KVM_TRY(look_up("cuDevicePrimaryCtxRetain", &retain));
  KVM_TRY(look_up("cuDevicePrimaryCtxRelease", &release));
  KVM_TRY(look_up("cuCtxPushCurrent", &push));
  KVM_TRY(look_up("cuCtxPopCurrent", &pop));
  KVM_TRY(check("cuDeviceGet", get(&device, ordinal)));
  return check("cuDevicePrimaryCtxRetain", retain(&context, device));
}

// Makes a device current for the calls of a scope. Not by cudaSetDevice: to go back by it would
// make a context on device 0 for threads that have chosen none.
class Current {
 public:
  explicit Current(const Context& context)
      : pop_(context.push(context.context) == CUDA_SUCCESS ? context.pop : nullptr) {}
  ~Current() {
    if (pop_ != nullptr) {
      CUcontext popped = nullptr;
      (void)pop_(&popped);
    }
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const decltype(&cuCtxPopCurrent) pop_;
};

// For calls that CUDA takes for unsafe while anybody in the process captures a stream: memory,
// queries. They are none of what is captured, and must not end it.
class Uncaptured : public Current {
 public:
  explicit Uncaptured(const Context& context)
      : Current(context), changed_(cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess) {}
  ~Uncaptured() {
    if (changed_) {
      (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    }
  }
  Uncaptured(const Uncaptured&) = delete;
  Uncaptured& operator=(const Uncaptured&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // before changed_; then the old one
  const bool changed_;
};

inline cudaStream_t runtime(Stream stream) { return static_cast<cudaStream_t>(stream); }
inline cudaEvent_t runtime_event(Event event) { return static_cast<cudaEvent_t>(event); }

inline CUmemAllocationProp properties_of(int device, bool shared) {
  CUmemAllocationProp properties{};
  properties.requestedHandleTypes =
      shared ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

// Base is SharingDriver, or Driver, whose kernels cuda_driver.cu adds.
template <class Base>
class CudaMemory : public Base {
 public:
  Status open(int device);
  const DriverFacts& facts() const override { return facts_; }

  Result<uint8_t*> reserve(uint64_t size_bytes) override {
    const Uncaptured current(context_);
    CUdeviceptr range{};
    KVM_TRY(check("cuMemAddressReserve", reserve_(&range, size_bytes, 0, 0, 0)));
    return reinterpret_cast<uint8_t*>(range);
  }
  void release(uint8_t* range, uint64_t size_bytes) override {
    const Uncaptured current(context_);
    (void)free_range_(reinterpret_cast<CUdeviceptr>(range), size_bytes);
  }
  Status map(uint8_t* at, uint64_t size_bytes) override;
  Result<ipc::Fd> map_shared(uint8_t* at, uint64_t size_bytes) override;
  Status map_from(uint8_t* at, uint64_t size_bytes, const ipc::Fd& memory) override;
  void unmap(uint8_t* at, uint64_t size_bytes) override;

  Result<uint8_t*> allocate(uint64_t size_bytes) override {
    const Uncaptured current(context_);
    void* memory = nullptr;
    KVM_TRY(check("cudaMalloc", cudaMalloc(&memory, size_bytes)));
    return static_cast<uint8_t*>(memory);
  }
  void free(uint8_t* memory) override {
    const Uncaptured current(context_);
    (void)cudaFree(memory);
  }
  Status register_host(void* memory, uint64_t size_bytes) override {
    const Uncaptured current(context_);
    const cudaError_t error =
        cudaHostRegister(memory, size_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return Status(KVM_ERR_NO_MEMORY,
                    "the driver cannot lock " + std::to_string(size_bytes) + " bytes of the host");
    }
    return check("cudaHostRegister", error);
  }
  void unregister_host(void* memory) override {
    const Uncaptured current(context_);
    (void)cudaHostUnregister(memory);
  }

  Result<Stream> create_stream() override {
    const Uncaptured current(context_);
    cudaStream_t stream = nullptr;
    KVM_TRY(check("cudaStreamCreate", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
    return static_cast<Stream>(stream);
  }
  void destroy_stream(Stream stream) override {
    const Uncaptured current(context_);
    (void)cudaStreamDestroy(runtime(stream));
  }
  Result<Event> create_event() override {
    const Uncaptured current(context_);
    cudaEvent_t event = nullptr;
    // Threads that wait for one sleep: that of copies does so most of the time.
    const unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync;
    KVM_TRY(check("cudaEventCreate", cudaEventCreateWithFlags(&event, flags)));
    return static_cast<Event>(event);
  }
  void destroy_event(Event event) override {
    const Uncaptured current(context_);
    (void)cudaEventDestroy(runtime_event(event));
  }
  Status record(Event event, Stream stream) override {
    const Current current(context_);
    return check("cudaEventRecord", cudaEventRecord(runtime_event(event), runtime(stream)));
  }
  Status wait(Stream stream, Event event) override {
    const Current current(context_);
    return check("cudaStreamWaitEvent",
                 cudaStreamWaitEvent(runtime(stream), runtime_event(event), 0));
  }
  Result<bool> is_done(Event event) override {
    const Uncaptured current(context_);
    const cudaError_t error = cudaEventQuery(runtime_event(event));
    if (error == cudaSuccess || error == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return error == cudaSuccess;
    }
    return failure("cudaEventQuery", error);
  }
  Status synchronize(Event event) override {
    const Uncaptured current(context_);
    return check("cudaEventSynchronize", cudaEventSynchronize(runtime_event(event)));
  }
  Status synchronize_stream(Stream stream) override {
    const Uncaptured current(context_);
    return check("cudaStreamSynchronize", cudaStreamSynchronize(runtime(stream)));
  }
  Status synchronize_device() override {
    const Uncaptured current(context_);
    return check("cudaDeviceSynchronize", cudaDeviceSynchronize());
  }
  Result<bool> is_capturing(Stream stream) override {
    const Current current(context_);
    cudaStreamCaptureStatus status{};
    const cudaError_t error = cudaStreamIsCapturing(runtime(stream), &status);
    if (error == cudaErrorStreamCaptureImplicit) {
      // The legacy stream, while another one is captured.
      (void)cudaGetLastError();
      return false;
    }
    KVM_TRY(check("cudaStreamIsCapturing", error));
    return status != cudaStreamCaptureStatusNone;
  }
  Status copy(void* to, const void* from, uint64_t size_bytes, Stream stream) override {
    const Current current(context_);
    return check("cudaMemcpyAsync",
                 cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault, runtime(stream)));
  }

  Status write_word(uint64_t* word, uint64_t value, Stream stream) override {
    const Current current(context_);
    KVM_TRY_ASSIGN(const CUdeviceptr at, device_address(word));
    return check("cuStreamWriteValue64",
                 write_value_(runtime(stream), at, value, CU_STREAM_WRITE_VALUE_DEFAULT));
  }
  Status wait_word(const uint64_t* word, uint64_t value, Stream stream) override {
    const Current current(context_);
    KVM_TRY_ASSIGN(const CUdeviceptr at, device_address(const_cast<uint64_t*>(word)));
    return check("cuStreamWaitValue64",
                 wait_value_(runtime(stream), at, value, CU_STREAM_WAIT_VALUE_GEQ));
  }

 private:
  // Maps and opens what the handle names, and gives the handle back: the mapping keeps the memory.
  Status map_handle(uint8_t* at, uint64_t size_bytes, CUmemGenericAllocationHandle handle);
  Status clear(uint8_t* at, uint64_t size_bytes);
  // Of registered memory of the host.
  Result<CUdeviceptr> device_address(uint64_t* word) {
    void* at = nullptr;
    KVM_TRY(check("cudaHostGetDevicePointer", cudaHostGetDevicePointer(&at, word, 0)));
    return reinterpret_cast<CUdeviceptr>(at);
  }

  decltype(&cuMemAddressReserve) reserve_ = nullptr;
  decltype(&cuMemAddressFree) free_range_ = nullptr;
  decltype(&cuMemCreate) create_ = nullptr;
  decltype(&cuMemRelease) release_ = nullptr;
  decltype(&cuMemMap) map_ = nullptr;
  decltype(&cuMemUnmap) unmap_ = nullptr;
  decltype(&cuMemSetAccess) set_access_ = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity_ = nullptr;
  decltype(&cuMemExportToShareableHandle) export_ = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_ = nullptr;
  decltype(&cuStreamWriteValue64) write_value_ = nullptr;
  decltype(&cuStreamWaitValue64) wait_value_ = nullptr;

 protected:
  Context context_;
  DriverFacts facts_;
};

// --- Implementation -----------------------------------------------------------------------------

template <class Base>
Status CudaMemory<Base>::open(int device) {
  // Where there is no driver, the runtime says that it is too old.
  int version = 0, n_devices = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess && version == 0) {
    return Status(KVM_ERR_DEVICE, "no CUDA device: no NVIDIA driver (libcuda.so.1) was found");
  }
  KVM_TRY(check("no CUDA device", cudaGetDeviceCount(&n_devices)));
  if (device >= n_devices) {
    return Status(KVM_ERR_DEVICE, "device is " + std::to_string(device) + "; this machine has " +
                                      std::to_string(n_devices));
  }
  KVM_TRY(context_.open(device));
  const Uncaptured current(context_);
  KVM_TRY(check("cudaFree", cudaFree(nullptr)));  // makes the runtime take the context
  cudaDeviceProp properties{};
  KVM_TRY(check("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device)));
  facts_.name = properties.name;
  static_assert(sizeof properties.uuid.bytes == sizeof facts_.uuid);
  std::memcpy(facts_.uuid.data(), properties.uuid.bytes, facts_.uuid.size());
  facts_.n_sms = static_cast<uint32_t>(properties.multiProcessorCount);
  size_t free_bytes = 0, all_bytes = 0;
  KVM_TRY(check("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &all_bytes)));
  facts_.free_bytes = free_bytes;
  KVM_TRY(look_up("cuMemAddressReserve", &reserve_));
  KVM_TRY(look_up("cuMemAddressFree", &free_range_));
  KVM_TRY(look_up("cuMemCreate", &create_));
  KVM_TRY(look_up("cuMemRelease", &release_));
  KVM_TRY(look_up("cuMemMap", &map_));
  KVM_TRY(look_up("cuMemUnmap", &unmap_));
  KVM_TRY(look_up("cuMemSetAccess", &set_access_));
  KVM_TRY(look_up("cuMemGetAllocationGranularity", &granularity_));
  KVM_TRY(look_up("cuMemExportToShareableHandle", &export_));
  KVM_TRY(look_up("cuMemImportFromShareableHandle", &import_));
  KVM_TRY(look_up("cuStreamWriteValue64", &write_value_));
  KVM_TRY(look_up("cuStreamWaitValue64", &wait_value_));
  const CUmemAllocationProp pool = properties_of(device, false);
  size_t granularity = 0;
  KVM_TRY(check("cuMemGetAllocationGranularity",
                granularity_(&granularity, &pool, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)));
  facts_.granularity_bytes = granularity;
  return Status::ok();
}

template <class Base>
Status CudaMemory<Base>::map_handle(uint8_t* at, uint64_t size_bytes,
                                    CUmemGenericAllocationHandle handle) {
  const auto address = reinterpret_cast<CUdeviceptr>(at);
  const Status mapped = check("cuMemMap", map_(address, size_bytes, 0, handle, 0));
  (void)release_(handle);
  KVM_TRY(mapped);
  CUmemAccessDesc access{};
  access.location = properties_of(context_.device, false).location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const Status opened = check("cuMemSetAccess", set_access_(address, size_bytes, &access, 1));
  if (!opened.is_ok()) {
    (void)unmap_(address, size_bytes);
  }
  return opened;
}

template <class Base>
Status CudaMemory<Base>::map(uint8_t* at, uint64_t size_bytes) {
  const Uncaptured current(context_);
  const CUmemAllocationProp properties = properties_of(context_.device, false);
  CUmemGenericAllocationHandle handle{};
  KVM_TRY(check("cuMemCreate", create_(&handle, size_bytes, &properties, 0)));
  return map_handle(at, size_bytes, handle);
}

template <class Base>
Status CudaMemory<Base>::clear(uint8_t* at, uint64_t size_bytes) {
  cudaStream_t stream = nullptr;
  KVM_TRY(check("cudaStreamCreate", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
  cudaError_t error = cudaMemsetAsync(at, 0, size_bytes, stream);
  error = error == cudaSuccess ? cudaStreamSynchronize(stream) : error;
  (void)cudaStreamDestroy(stream);
  return check("cudaMemsetAsync", error);
}

template <class Base>
Result<ipc::Fd> CudaMemory<Base>::map_shared(uint8_t* at, uint64_t size_bytes) {
  const Uncaptured current(context_);
  const CUmemAllocationProp properties = properties_of(context_.device, true);
  CUmemGenericAllocationHandle handle{};
  KVM_TRY(check("cuMemCreate", create_(&handle, size_bytes, &properties, 0)));
  int descriptor = -1;
  const Status exported =
      check("cuMemExportToShareableHandle",
            export_(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  if (!exported.is_ok()) {
    (void)release_(handle);
    return exported;
  }
  ipc::Fd memory(descriptor);
  KVM_TRY(map_handle(at, size_bytes, handle));
  if (const Status cleared = clear(at, size_bytes); !cleared.is_ok()) {
    unmap(at, size_bytes);
    return cleared;
  }
  return Result<ipc::Fd>(std::move(memory));
}

template <class Base>
Status CudaMemory<Base>::map_from(uint8_t* at, uint64_t size_bytes, const ipc::Fd& memory) {
  const Uncaptured current(context_);
  CUmemGenericAllocationHandle handle{};
  // NOLINTNEXTLINE(performance-no-int-to-ptr): what the driver wants a descriptor as
  void* const descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(memory.get()));
  KVM_TRY(check("cuMemImportFromShareableHandle",
                import_(&handle, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)));
  return map_handle(at, size_bytes, handle);
}

template <class Base>
void CudaMemory<Base>::unmap(uint8_t* at, uint64_t size_bytes) {
  const Uncaptured current(context_);
  (void)unmap_(reinterpret_cast<CUdeviceptr>(at), size_bytes);
}

}  // namespace kvm::device::cuda

#endif  // KVM_DEVICE_CUDA_MEMORY_H_
