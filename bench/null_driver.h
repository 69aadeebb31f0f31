// SPDX-License-Identifier: Apache-2.0
// A driver of device/ that does nothing: what is enqueued is counted and forgotten. What a call
// then takes is the host's own share of it, without what CUDA takes for each of the calls counted.
//
// Threads: any.
#ifndef KVM_BENCH_NULL_DRIVER_H_
#define KVM_BENCH_NULL_DRIVER_H_

#include <cstdint>

#include "device/driver.h"

namespace kvm::bench {

struct NullCounts {
  uint64_t n_copies = 0;
  uint64_t copied_bytes = 0;
  uint64_t n_launches = 0;
  uint64_t n_events = 0;  // recorded, waited for, asked
};

class NullDriver final : public device::Driver {
 public:
  // The device has so much memory, and runs so many blocks at once. *counts must outlive it.
  NullDriver(uint64_t memory_bytes, uint32_t blocks, NullCounts* counts);

  const device::DriverFacts& facts() const override { return facts_; }
  Result<uint8_t*> reserve(uint64_t size_bytes) override;
  void release(uint8_t* range, uint64_t size_bytes) override;
  Status map(uint8_t*, uint64_t) override { return Status::ok(); }
  Result<ipc::Fd> map_shared(uint8_t*, uint64_t) override { return ipc::Fd(); }
  Status map_from(uint8_t*, uint64_t, const ipc::Fd&) override { return Status::ok(); }
  void unmap(uint8_t*, uint64_t) override {}
  Result<uint8_t*> allocate(uint64_t size_bytes) override;
  void free(uint8_t*) override {}
  Status register_host(void*, uint64_t) override { return Status::ok(); }
  void unregister_host(void*) override {}
  Result<device::Stream> create_stream() override { return handle(); }
  void destroy_stream(device::Stream) override {}
  Result<device::Event> create_event() override { return handle(); }
  void destroy_event(device::Event) override {}
  Status record(device::Event, device::Stream) override { return event(); }
  Status wait(device::Stream, device::Event) override { return event(); }
  Result<bool> is_done(device::Event) override { return true; }
  Status synchronize(device::Event) override { return event(); }
  Status synchronize_stream(device::Stream) override { return event(); }
  Status synchronize_device() override { return event(); }
  Result<bool> is_capturing(device::Stream) override { return false; }
  Status copy(void*, const void*, uint64_t size_bytes, device::Stream) override;
  Status write_word(uint64_t*, uint64_t, device::Stream) override { return event(); }
  Status wait_word(const uint64_t*, uint64_t, device::Stream) override { return event(); }
  Result<uint32_t> decode_blocks(const attention::gpu::DecodeKernel&) override { return blocks_; }
  Status decode(const attention::gpu::DecodeKernel&, const attention::gpu::DecodeParams&, uint32_t,
                device::Stream) override {
    return launch();
  }
  Status merge(uint32_t, const attention::gpu::MergeParams&, uint32_t, device::Stream) override {
    return launch();
  }
  Status append(CodecId, const attention::gpu::AppendParams&, uint32_t, device::Stream) override {
    return launch();
  }
  Status lengths(const attention::gpu::LengthsParams&, uint32_t, device::Stream) override {
    return launch();
  }
  Status read(CodecId, const attention::gpu::ReadParams&, uint32_t, device::Stream) override {
    return launch();
  }
  Status merge_states(const attention::gpu::StatesParams&, uint32_t, device::Stream) override {
    return launch();
  }
  Status scatter(const attention::gpu::ScatterParams&, device::Stream) override { return launch(); }
  Status move(const attention::gpu::MoveParams&, device::Stream) override { return launch(); }

 private:
  void* handle();
  Status event();
  Status launch();

  device::DriverFacts facts_;
  const uint32_t blocks_;
  NullCounts* const counts_;
  uintptr_t last_ = 0;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_NULL_DRIVER_H_
