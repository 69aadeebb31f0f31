// SPDX-License-Identifier: Apache-2.0
// StoreServer: keeps the books of one client's sequences, in memory of a device that this process
// owns. The client's RemoteStore asks; what it says is checked here, and what it sends that its
// own books would not have sent ends it.
//
// Memory: what the client's budget of pages gives, host_bytes of locked memory, and the books.
// Threads: open, serve and the destructor are for one thread, which waits for the client; stop:
// any.
#ifndef KVM_DEVICE_STORE_SERVER_H_
#define KVM_DEVICE_STORE_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/budget.h"
#include "device/client_driver.h"
#include "device/device_store.h"
#include "device/store_wire.h"
#include "ipc/fd.h"
#include "ipc/frame_channel.h"
#include "ipc/memory.h"

namespace kvm::device {

class StoreServer {
 public:
  // `device` and `memory` must outlive it. words: of sizeof(wire::Words).
  StoreServer(SharingDriver* device, Budget* memory, ipc::Fd channel, ipc::Mapping words);
  // REQUIRES: serve has returned, or was never called. Gives everything back.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  // Opens the store, says so to the client or why not, and answers its calls until it goes, or
  // breaks the rules, or stop. Returns why. Throws std::bad_alloc, where there is no memory for a
  // call: the client is to go then.
  Status serve(const DeviceStoreOptions& options);
  // Makes serve return soon.
  void stop();

 private:
  using Sequences = std::unordered_map<uint64_t, SequencePtr>;

  Status open(const DeviceStoreOptions& options);
  Status answer(const ipc::Frame& frame);
  // Another client has been refused memory: gives back what this one does not use.
  void give_way();
  // These fail with PROTOCOL only.
  Status judge(wire::Verdict verdict);
  Status note(const wire::Note& note);
  Result<DeviceSequence*> find(uint64_t id) const;
  // Fails: LIMIT.
  Status check_entries(uint64_t n_new) const;
  // Answers go to reply_ behind the status. What fails with PROTOCOL ends the client.
  Status ask(const wire::Call& call, ipc::FrameReader* reader);
  Status prepare(uint64_t id, ipc::FrameReader* reader);
  Status grow(ipc::FrameReader* reader);
  Status settle(uint64_t id);
  Status is_moving(const wire::Call& call, ipc::FrameReader* reader);

  SharingDriver* const device_;
  Budget* const memory_;
  ipc::FrameChannel channel_;
  ipc::Mapping words_;
  bool words_registered_ = false;
  const std::shared_ptr<ClientDriver> driver_;
  std::unique_ptr<DeviceStore> store_;
  std::unordered_map<uint64_t, std::shared_ptr<const SpaceLayout>> spaces_;
  Sequences sequences_;
  uint64_t n_entries_ = 0;      // wire::n_entries of all sequences
  uint64_t n_refused_ = 0;      // of the budget, when it was looked at
  uint64_t n_new_entries_ = 0;  // of the last growth
  bool growing_ = false;        // a growth waits for its verdict
  ipc::FrameWriter reply_;
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_STORE_SERVER_H_
