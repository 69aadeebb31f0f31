// SPDX-License-Identifier: Apache-2.0
// ClientDriver: a device as kvmd sees it for one client, whose process launches the kernels. A
// DeviceStore over it keeps the client's books as it would keep its own process's.
//
//  - Memory is this process's, of the device that it opened, and the client maps it too: every
//    range and every mapping is ordered of the client, which does it while it waits for its call.
//  - Streams that are made here are this process's: it copies on them. kClientStream is the stream
//    of the call that is being served. What is enqueued on it becomes commands of the reply.
//  - Between the two, words order what events order in one process (store_wire.h). An event that is
//    recorded on a stream of this process is also the number that the stream then writes to its
//    word; one that is recorded on the client's stream is the call's marker, and what the call has
//    made the stream wait for.
//
// No stream of this process waits for a client without an end: when it has gone, all words are
// poisoned until nothing waits for them any more. synchronize and its like poll, therefore.
//
// Threads: the server's, for what the client is ordered to do and for kClientStream; any for the
// rest.
#ifndef KVM_DEVICE_CLIENT_DRIVER_H_
#define KVM_DEVICE_CLIENT_DRIVER_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device/budget.h"
#include "device/driver.h"
#include "device/store_wire.h"
#include "ipc/frame_channel.h"

namespace kvm::device {

inline const Stream kClientStream = reinterpret_cast<Stream>(uintptr_t{1});

class ClientDriver final : public MemoryDriver {
 public:
  // All must outlive it. `memory`: what is mapped is taken from it. REQUIRES: *words is registered
  // with the device.
  ClientDriver(SharingDriver* device, ipc::FrameChannel* channel, wire::Words* words,
               Budget* memory);
  ~ClientDriver() override;
  ClientDriver(const ClientDriver&) = delete;
  ClientDriver& operator=(const ClientDriver&) = delete;

  // A call is served from here on.
  void begin_call(uint64_t marker);
  // What the client has to enqueue for it.
  std::span<const wire::Command> commands() const { return commands_; }
  // REQUIRES: an address that reserve has returned.
  uint32_t range_at(const uint8_t* base) const;

  // The client has gone, or is to: nothing is ordered of it from here on, and nothing waits for it.
  // Threads: any.
  void let_go();

  // --- MemoryDriver -----------------------------------------------------------------------------
  const DriverFacts& facts() const override { return device_->facts(); }
  Result<uint8_t*> reserve(uint64_t size_bytes) override;
  void release(uint8_t* range, uint64_t size_bytes) override;
  Status map(uint8_t* at, uint64_t size_bytes) override;
  void unmap(uint8_t* at, uint64_t size_bytes) override;
  Result<uint8_t*> allocate(uint64_t size_bytes) override { return device_->allocate(size_bytes); }
  void free(uint8_t* memory) override { device_->free(memory); }
  Status register_host(void* memory, uint64_t size_bytes) override {
    return device_->register_host(memory, size_bytes);
  }
  void unregister_host(void* memory) override { device_->unregister_host(memory); }
  Result<Stream> create_stream() override;
  void destroy_stream(Stream stream) override;
  Result<Event> create_event() override;
  void destroy_event(Event event) override;
  Status record(Event event, Stream stream) override;
  Status wait(Stream stream, Event event) override;
  Result<bool> is_done(Event event) override;
  Status synchronize(Event event) override;
  Status synchronize_stream(Stream stream) override;
  // Of the client, and of all streams of this process that are this client's.
  Status synchronize_device() override;
  Result<bool> is_capturing(Stream) override { return false; }  // the client looks
  Status copy(void* to, const void* from, uint64_t size_bytes, Stream stream) override;

 private:
  struct ClientEvent;
  // A Range is at `base` here, and wherever the client has it.
  struct Range {
    uint8_t* base = nullptr;
    uint64_t size_bytes = 0;
  };
  struct Place {
    uint32_t range = 0;
    uint64_t offset = 0;
  };

  Place place_of(const void* at) const;
  // Has the client do it. Fails: DISCONNECTED, PROTOCOL, as the client says.
  Status order(const wire::Order& order, int fd = -1);
  bool is_gone() const { return is_gone_.load(std::memory_order_relaxed); }
  bool has_reached(const wire::Words::Word& word, uint64_t value) const;
  // Polls until is_done, and keeps a client that has gone out of its way.
  Status await_event(Event real, bool of_device);
  // Until what is enqueued on a stream of this process has been done. Fails where events do.
  Status poll_stream(Stream stream);
  uint32_t index_of(Stream stream);

  SharingDriver* const device_;
  ipc::FrameChannel* const channel_;
  wire::Words* const words_;
  Budget* const memory_;
  std::atomic<bool> is_gone_{false};
  std::map<uint32_t, Range> ranges_;
  uint32_t last_range_ = 0;
  uint64_t marker_ = 0;
  std::vector<wire::Command> commands_;
  ipc::FrameWriter writer_;
  ipc::Frame answer_;

  std::mutex streams_mutex_;  // guards the two below, not what is enqueued
  Stream streams_[wire::kServerWords] = {};
  uint64_t written_[wire::kServerWords] = {};  // what each writes, or has written, last
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_CLIENT_DRIVER_H_
