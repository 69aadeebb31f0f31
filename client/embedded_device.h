// SPDX-License-Identifier: Apache-2.0
// A client whose sequences lie in the memory of a GPU (kvm_cuda.h): spaces and sequences of kvm.h
// over device/, and the batches that steps are planned in.
//
// One mutex guards everything of a client. Batches hold the service too, so that they may outlive
// the client; they answer DISCONNECTED then.
#ifndef KVM_CLIENT_EMBEDDED_DEVICE_H_
#define KVM_CLIENT_EMBEDDED_DEVICE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/backend.h"
#include "device/batch.h"
#include "device/sequence_store.h"
#include "device/states.h"
#include "engine/space/space.h"
#include "engine/store/id_table.h"
#include "kvm_cuda.h"

namespace kvm::client {

class DeviceService {
 public:
  struct SpaceRecord {
    std::shared_ptr<const engine::Space> space;
    std::shared_ptr<const device::SpaceLayout> layout;
    uint64_t n_sequences = 0;
  };
  struct SeqRecord {
    device::SequencePtr seq;
    kvm_space_id space = 0;
  };

  explicit DeviceService(uint32_t epoch_tag)
      : spaces("space", epoch_tag, 0), seqs("sequence", epoch_tag, 1) {}

  // REQUIRES: locked, here and below.
  Status check_open() const;
  void close();

  std::mutex mutex;
  std::unique_ptr<device::SequenceStore> store;  // before the ids: sequences end first
  device::Driver* driver = nullptr;              // what kernels are launched with; the store's
  engine::IdTable<SpaceRecord> spaces;
  engine::IdTable<SeqRecord> seqs;
  bool is_closed = false;
  uint64_t batch_bytes = 0;
  uint64_t n_launches = 0;
  uint64_t stored_bytes = 0;  // of rows that bridges have brought to the host
  uint64_t loaded_bytes = 0;  // and from there
};

class DeviceClient final : public Client {
 public:
  DeviceClient(std::shared_ptr<DeviceService> service, uint64_t start_ns);
  ~DeviceClient() override;

  // --- Of kvm.h ----------------------------------------------------------------------------------
  void close() override;
  Status reconnect() override { return Status::ok(); }
  bool is_closed() const override;
  kvm_client_info info() const override { return info_; }
  Status ping() override;
  // UNSUPPORTED: steps are enqueued on the caller's streams.
  Result<std::unique_ptr<Queue>> create_queue(uint32_t n_entries, uint64_t spin_ns) override;
  Result<ArenaMemory> create_arena(uint64_t size_bytes) override;
  void destroy_arena(const ArenaMemory&) override {}
  Result<kvm_space_id> register_space(const SpaceSpec& space) override;
  Result<kvm_space_id> find_space(const std::string& name) override;
  Result<kvm_space_info> space_info(kvm_space_id space) override;
  Result<std::vector<kvm_space_info>> list_spaces() override;
  Status drop_space(kvm_space_id space) override;
  Result<kvm_seq_id> seq(const SeqRequest& call) override;
  Result<kvm_seq_info> seq_info(kvm_seq_id seq) override;
  Result<std::vector<kvm_seq_info>> list_seqs(kvm_space_id space, uint32_t flags) override;
  Result<kvm_stats> stats() override;
  Result<std::string> stats_text() override;

  // --- Of kvm_cuda.h -----------------------------------------------------------------------------
  // What the client launches with; as long as the client.
  device::Driver* driver() const { return service_->driver; }
  Result<std::shared_ptr<const device::SpaceLayout>> layout(kvm_space_id space);
  Result<std::unique_ptr<device::Batch>> create_batch(kvm_space_id space,
                                                      const device::BatchOptions& options);
  // From here on the batch's memory does not count any more.
  void destroy_batch(std::unique_ptr<device::Batch> batch);
  Status update(device::Batch* batch, const kvm_cuda_item* items, uint32_t n_items,
                device::Stream stream);
  // Calls `launch(batch)` with everything locked.
  template <typename Launch>
  Status with_batch(device::Batch* batch, Launch&& launch) {
    const std::lock_guard lock(service_->mutex);
    KVM_TRY(service_->check_open());
    const uint64_t before = batch->n_launches();
    const Status status = launch(*batch);
    service_->n_launches += batch->n_launches() - before;
    return status;
  }
  void count_stored(uint64_t n_bytes);
  void count_loaded(uint64_t n_bytes);
  Status merge(const device::StatesCall& call, device::Stream stream);
  Status spill(kvm_seq_id seq, uint64_t begin, uint64_t end, device::Stream stream);
  Status fetch(kvm_seq_id seq, uint64_t begin, uint64_t end, device::Stream stream);
  Result<kvm_cuda_seq_info> cuda_seq_info(kvm_seq_id seq);
  Result<kvm_cuda_stats> cuda_stats();

 private:
  Result<kvm_seq_info> describe(uint64_t id, const DeviceService::SeqRecord& record) const;
  kvm_space_info describe(uint64_t id, const DeviceService::SpaceRecord& record) const;
  // Returns when the last moves of sequences are enqueued; what is no sequence has none.
  // REQUIRES: not locked: calls that would wait for moves do so here, where nobody else has to.
  void finish_moves(std::span<const kvm_seq_id> seqs, bool also_spills);
  kvm_seq_id add_seq(device::SequencePtr seq, kvm_space_id space);
  Result<kvm_seq_id> create_seq(const SeqRequest& call);

  std::shared_ptr<DeviceService> service_;
  const uint64_t start_ns_;
  kvm_client_info info_{};
};

struct DeviceOptions {
  uint32_t ordinal = 0;
  uint64_t pool_bytes = 0;
  uint64_t host_bytes = 0;
  std::optional<ConnectOptions> server;  // the kvmd whose memory it is; none: this process's
};
Result<std::shared_ptr<Client>> open_device_client(const DeviceOptions& options);

// The layout that a device can hold of a space. Fails: UNSUPPORTED, with what is in the way.
Result<device::SpaceLayout> layout_of(const engine::Space& space);

}  // namespace kvm::client

#endif  // KVM_CLIENT_EMBEDDED_DEVICE_H_
