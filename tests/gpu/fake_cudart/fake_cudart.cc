// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/gpu/device_rig.h"

using kvm::device::testing::FakeDriver;
using kvm::device::testing::last_driver;

struct FakeGraph {
  FakeDriver::Graph work;
};

namespace {

// Nothing of the program may be left when its client is closed, nor be wrong before.
const bool at_end = [] {
  kvm::device::testing::next_options.at_end = [](const FakeDriver& driver) {
    if (!driver.complaints().empty() || !driver.leftovers().empty()) {
      std::fprintf(stderr, "%s%s\n", driver.complaints().c_str(), driver.leftovers().c_str());
      std::abort();
    }
  };
  return true;
}();

cudaError_t result_of(const kvm::Status& status) {
  return status.is_ok() ? cudaSuccess : cudaErrorUnknown;
}

}  // namespace

const char* cudaGetErrorString(cudaError_t) { return "an error of the fake driver"; }

cudaError_t cudaMalloc(void** out, size_t size) {
  auto memory = last_driver->allocate(size);
  *out = memory.is_ok() ? memory.value() : nullptr;
  return memory.is_ok() ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t cudaFree(void* memory) {
  last_driver->settle();
  last_driver->free(static_cast<uint8_t*>(memory));
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) {
  constexpr size_t kPage = 4096;
  const size_t rounded = (size + kPage - 1) / kPage * kPage;
  *out = std::aligned_alloc(kPage, rounded);
  return *out == nullptr ? cudaErrorUnknown : result_of(last_driver->register_host(*out, rounded));
}

cudaError_t cudaFreeHost(void* memory) {
  last_driver->settle();
  last_driver->unregister_host(memory);
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, int, cudaStream_t) {
  last_driver->settle();
  std::memcpy(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) {
  auto stream = last_driver->create_stream();
  *out = stream.is_ok() ? stream.value() : nullptr;
  return stream.is_ok() ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  last_driver->settle();
  last_driver->destroy_stream(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
  last_driver->settle();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  auto event = last_driver->create_event();
  *out = event.is_ok() ? event.value() : nullptr;
  return event.is_ok() ? cudaSuccess : cudaErrorUnknown;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return result_of(last_driver->record(event, stream));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return result_of(last_driver->synchronize(event));
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  last_driver->destroy_event(event);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int) {
  last_driver->begin_capture(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  *out = new FakeGraph{last_driver->end_capture(stream)};
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  *out = new FakeGraph(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  last_driver->replay(graph->work, stream);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
