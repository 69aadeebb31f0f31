// SPDX-License-Identifier: Apache-2.0
// DeviceBridge: tokens copied between sequences of a device and of host memory (kvm_cuda_bridge).
//
// The host's side is a client of kvm.h, used through kvm.h, as an engine would: a queue, and an
// arena that the driver has locked. The device's is a batch of one item, and a stream. A copy is
// pieces, some tokens of a layer, each in a slot of the arena and in one of device memory.
//
//   store   the bridge's stream                     queue of the host's client
//           read: pages -> slot on the device
//           copy: -> slot in the arena    --event-->  append: -> pages of the host; slot is free
//   load    queue                                   stream
//           read: pages -> slot in the arena --done-->  copy: -> slot on the device
//                                                   append: -> pages       --event--> slot is free
//
// Updates, which reserve pages, are enqueued on the caller's stream, as the client's timeline wants
// it; the bridge's stream waits for them. Nothing that is enqueued on the caller's stream waits for
// the bridge's: of a store a fork of the source holds the pages that are read, of a load nobody
// else has the pages that are written, and the call ends when all has been done.
//
// Threads: one at a time.
#ifndef KVM_CLIENT_EMBEDDED_BRIDGE_H_
#define KVM_CLIENT_EMBEDDED_BRIDGE_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "client/embedded_device.h"
#include "client/handles.h"
#include "device/event_pool.h"
#include "kvm.h"

namespace kvm::client {

struct BridgeOptions {
  const kvm_client* host = nullptr;
  kvm_space_id host_space = 0;
  kvm_space_id space = 0;
  uint64_t max_tokens = 0;
  uint64_t staging_bytes = 0;
};

// Tokens [begin, end) of `source` are to come behind the first `begin` ones of `onto`, if that is
// not 0.
struct BridgeCopy {
  kvm_seq_id source = 0;
  kvm_seq_id onto = 0;
  uint64_t begin = 0;
  uint64_t end = 0;  // KVM_POSITION_END: all
  uint64_t deadline_ns = UINT64_MAX;
};

// HostRequests are those of the bridge's queue that are under way, at most one for each slot.
class HostRequests {
 public:
  Status open(kvm_client* client);
  ~HostRequests() { kvm_queue_destroy(queue_); }

  // `stage(queue, user_data)` makes the request of a slot.
  template <class Stage>
  Status begin(uint32_t slot, Stage&& stage);
  // Whether that of the slot is done. Fails: with what any of them has failed with.
  Result<bool> is_done(uint32_t slot);
  // Returns when it is. Fails: likewise, TIMEOUT.
  Status await(uint32_t slot, uint64_t deadline_ns);
  // Returns when none touches memory any more, whatever became of it, and forgets failures.
  void end_all();

 private:
  Status take(uint32_t n_least, uint64_t deadline_ns);

  kvm_queue* queue_ = nullptr;
  std::vector<bool> is_done_;  // [slot]
  uint32_t n_outstanding_ = 0;
  Status failure_;
};

class DeviceBridge {
 public:
  // Fails: as kvm_cuda_bridge_create.
  static Result<std::unique_ptr<DeviceBridge>> create(std::shared_ptr<DeviceClient> client,
                                                      const BridgeOptions& options);
  ~DeviceBridge();
  DeviceBridge(const DeviceBridge&) = delete;
  DeviceBridge& operator=(const DeviceBridge&) = delete;

  // As kvm_cuda_store and kvm_cuda_load: the new sequence of the other side.
  Result<kvm_seq_id> store(const BridgeCopy& copy, device::Stream stream);
  Result<kvm_seq_id> load(const BridgeCopy& copy, device::Stream stream);

 private:
  struct Slot {
    uint64_t at = 0;  // in the arena's buffer, and in device memory
    device::EventPtr event;
  };
  // Tokens of one layer: `first` counts from the beginning of what is copied.
  struct Piece {
    uint32_t layer = 0;
    uint64_t first = 0;
    uint32_t n_tokens = 0;
  };
  // How the rows of a piece lie in a slot, packed.
  struct Rows {
    uint64_t k_bytes = 0;
    uint64_t v_at = 0;
    uint64_t v_bytes = 0;  // 0: V is in K
    uint64_t n_bytes() const { return v_at + v_bytes; }
  };

  DeviceBridge(std::shared_ptr<DeviceClient> client, const BridgeOptions& options)
      : client_(std::move(client)),
        options_(options),
        host_(*options.host),
        events_(client_->driver()) {}
  Status init();
  Status compare_spaces();
  Status divide_staging();

  // Copies n_tokens in pieces, each by `first`, then by `second`.
  template <class First, class Second>
  Status run(uint64_t n_tokens, First&& first, Second&& second);
  Rows rows_of(const Piece& piece, Dtype dtype) const;
  // Bytes of the rows of so many tokens, of all layers.
  uint64_t row_bytes(uint64_t n_tokens, Dtype dtype) const;
  kvm_tensor host_tensor(const Slot& slot, uint64_t at, uint64_t n_bytes, Dtype dtype) const;
  device::DeviceTensor device_tensor(const Slot& slot, uint64_t at, uint64_t n_bytes,
                                     Dtype dtype) const;
  Status update(kvm_seq_id seq, uint64_t n_append, device::Stream stream);
  // Sequences to copy to: forks of `onto` with n_before tokens or, where onto is 0, empty ones.
  Result<kvm_seq_id> make_here(kvm_seq_id onto, uint64_t n_before);
  Result<kvm_seq_id> make_there(kvm_seq_id onto, uint64_t n_before, uint64_t n_new);
  void free_here(kvm_seq_id seq);
  Status copy_out(const BridgeCopy& copy, kvm_seq_id to);
  Status copy_in(const BridgeCopy& copy, kvm_seq_id to, device::Stream stream);
  // Nothing of a copy is under way on either side from here on.
  void end_copy();

  const std::shared_ptr<DeviceClient> client_;
  const BridgeOptions options_;
  kvm_client host_;  // a handle of its own: the caller's may be closed
  std::shared_ptr<const device::SpaceLayout> layout_;
  std::vector<uint32_t> layers_;  // that store keys
  Dtype dtype_out_ = Dtype::kF32;
  Dtype dtype_in_ = Dtype::kF32;
  uint32_t piece_tokens_ = 0;
  uint64_t staging_bytes_ = 0;

  HostRequests requests_;
  kvm_arena* arena_ = nullptr;
  kvm_buffer buffer_{};
  uint8_t* in_arena_ = nullptr;  // its bytes, locked; null: not yet
  device::EventPool events_;
  device::EventPtr behind_;  // the caller's stream, when a copy began
  std::unique_ptr<device::Batch> batch_;
  device::Stream stream_ = nullptr;
  uint8_t* on_device_ = nullptr;
  std::vector<Slot> slots_;
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_EMBEDDED_BRIDGE_H_
