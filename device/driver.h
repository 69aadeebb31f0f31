// SPDX-License-Identifier: Apache-2.0
// The operations of a GPU that this folder is written with: the seam between it and CUDA.
//
// Implemented by cuda_memory.h and cuda_driver.cu where there is a CUDA toolkit, by no_cuda.cc
// where there is none (it opens nothing), and for tests over plain memory
// (tests/gpu/fake_driver.h). All implementations pass one suite, tests/gpu/driver_test.cc.
//
// Work that is enqueued on one stream happens in order, and at some time; nothing here waits for it
// but synchronize and synchronize_device. Memory that enqueued work uses stays as it is until the
// work has been done, memory of the host too; parameters of launches are copied.
//
// Fails, unless said otherwise: DEVICE, with what the driver says. After a kernel has faulted every
// call may.
// Threads: any; the order on a stream is that of the calls.
#ifndef KVM_DEVICE_DRIVER_H_
#define KVM_DEVICE_DRIVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "attention/cuda/params.h"
#include "base/status.h"
#include "device/uuid.h"
#include "ipc/fd.h"

namespace kvm::device {

using Stream = void*;  // cudaStream_t
using Event = void*;

struct DriverFacts {
  std::string name;
  DeviceUuid uuid{};
  uint64_t free_bytes = 0;         // of device memory, when it was opened
  uint64_t granularity_bytes = 0;  // of map
  uint32_t n_sms = 0;
  // Copies between device and host are enqueued by a thread of their own. False: by whoever has to
  // wait for one, so that tests can say when.
  bool moves_in_a_thread = true;
};

// A MemoryDriver is what a process needs of a device to keep memory there: no kernels. kvmd has one
// for each client whose memory it keeps (device/client_driver.h).
class MemoryDriver {
 public:
  virtual ~MemoryDriver() = default;

  virtual const DriverFacts& facts() const = 0;

  // Addresses without memory. REQUIRES: size_bytes is a multiple of the granularity.
  virtual Result<uint8_t*> reserve(uint64_t size_bytes) = 0;
  // REQUIRES: as reserved, and nothing is mapped there.
  virtual void release(uint8_t* range, uint64_t size_bytes) = 0;
  // Puts memory of the device, contents undefined, behind a part of a reserved range.
  // REQUIRES: both numbers are multiples of the granularity; nothing is mapped there.
  // Fails: NO_SPACE (the device has none left), DEVICE.
  virtual Status map(uint8_t* at, uint64_t size_bytes) = 0;
  // REQUIRES: as mapped, by whichever function; no enqueued work uses it.
  virtual void unmap(uint8_t* at, uint64_t size_bytes) = 0;

  // Memory of the device, aligned to 256 bytes. Fails: NO_SPACE, DEVICE.
  virtual Result<uint8_t*> allocate(uint64_t size_bytes) = 0;
  // REQUIRES: no enqueued work uses it.
  virtual void free(uint8_t* memory) = 0;

  // Makes memory of this process readable and writable by copies. REQUIRES: aligned to 4096 bytes.
  // Fails: NO_MEMORY, DEVICE.
  virtual Status register_host(void* memory, uint64_t size_bytes) = 0;
  virtual void unregister_host(void* memory) = 0;

  virtual Result<Stream> create_stream() = 0;
  virtual void destroy_stream(Stream stream) = 0;  // what is enqueued is still done
  virtual Result<Event> create_event() = 0;
  virtual void destroy_event(Event event) = 0;
  // The event happens when everything enqueued on the stream so far has been done.
  virtual Status record(Event event, Stream stream) = 0;
  // Makes all that is enqueued on the stream from now on wait for the event as recorded last.
  virtual Status wait(Stream stream, Event event) = 0;
  // Says whether the event, as recorded last, has happened. An event never recorded has.
  virtual Result<bool> is_done(Event event) = 0;
  virtual Status synchronize(Event event) = 0;
  virtual Status synchronize_stream(Stream stream) = 0;
  virtual Status synchronize_device() = 0;
  virtual Result<bool> is_capturing(Stream stream) = 0;

  // Between device memory and device memory or registered host memory.
  virtual Status copy(void* to, const void* from, uint64_t size_bytes, Stream stream) = 0;
};

// A SharingDriver has memory that several processes map, and words that order what they enqueue.
class SharingDriver : public MemoryDriver {
 public:
  // As map, with memory of zeros that drivers of other processes can map, too: whoever has the
  // descriptor. The memory is there as long as somebody maps it or has a descriptor of it.
  virtual Result<ipc::Fd> map_shared(uint8_t* at, uint64_t size_bytes) = 0;
  // As map, with what another driver of the same device has mapped so. The descriptor stays the
  // caller's.  Fails: DEVICE.
  virtual Status map_from(uint8_t* at, uint64_t size_bytes, const ipc::Fd& memory) = 0;
  // Words lie in registered memory of the host, aligned to 8 bytes; every process that has it
  // registered may write and await them, and so may its threads, as atomics.
  //
  // When the stream comes to it, *word becomes value, visible to all behind everything that was
  // enqueued before.
  virtual Status write_word(uint64_t* word, uint64_t value, Stream stream) = 0;
  // What is enqueued from now on waits until *word - value, as a signed number, is not negative.
  virtual Status wait_word(const uint64_t* word, uint64_t value, Stream stream) = 0;
};

// A Driver launches kernels, too.
class Driver : public SharingDriver {
 public:
  // Blocks of the kernel that run at once on the whole device, at least 1.
  virtual Result<uint32_t> decode_blocks(const attention::gpu::DecodeKernel& kernel) = 0;
  // n_blocks, n_merges, n_tokens: for so many there are blocks; 0 is nothing. What the parameters
  // point to is device memory. kernel: that of decoding or, with kPrefillRows, of prompts; with
  // kMlaDim, of latent rows. dim: channels of a result.
  virtual Status decode(const attention::gpu::DecodeKernel& kernel,
                        const attention::gpu::DecodeParams& params, uint32_t n_blocks,
                        Stream stream) = 0;
  virtual Status merge(uint32_t dim, const attention::gpu::MergeParams& params, uint32_t n_merges,
                       Stream stream) = 0;
  virtual Status append(CodecId stored, const attention::gpu::AppendParams& params,
                        uint32_t n_tokens, Stream stream) = 0;
  // Tensors may lie in registered memory of the host, too; n_blocks may be any.
  virtual Status read(CodecId stored, const attention::gpu::ReadParams& params, uint32_t n_blocks,
                      Stream stream) = 0;
  virtual Status merge_states(const attention::gpu::StatesParams& params, uint32_t n_blocks,
                              Stream stream) = 0;
  // n_threads: at least; 0 is nothing.
  virtual Status lengths(const attention::gpu::LengthsParams& params, uint32_t n_threads,
                         Stream stream) = 0;
  virtual Status scatter(const attention::gpu::ScatterParams& params, Stream stream) = 0;
  virtual Status move(const attention::gpu::MoveParams& params, Stream stream) = 0;
};

// The device with this ordinal. Defined by whichever implementation is linked; a program without
// kernels has the second only.
// Fails: UNSUPPORTED (built without CUDA), DEVICE (no driver, no such device).
Result<std::unique_ptr<Driver>> open_driver(uint32_t ordinal);
Result<std::unique_ptr<SharingDriver>> open_sharing_driver(uint32_t ordinal);

}  // namespace kvm::device

#endif  // KVM_DEVICE_DRIVER_H_
