// SPDX-License-Identifier: Apache-2.0
#include "ipc/ring.h"

#include <algorithm>
#include <string>

#include "ipc/shared_words.h"

namespace kvm::ipc {

namespace {

// INVARIANT: ring sizes are powers of two, so free-running 32-bit indices may wrap.
constexpr uint32_t kRequestMask = kRequestEntries - 1;
constexpr uint32_t kCompletionMask = kCompletionEntries - 1;
static_assert((kRequestEntries & kRequestMask) == 0);
static_assert((kCompletionEntries & kCompletionMask) == 0);

Status bad_index(const char* name, uint32_t peer, uint32_t own, uint32_t entries) {
  return Status(KVM_ERR_PROTOCOL, std::string(name) + " is " + std::to_string(peer) +
                                      " while the other index is " + std::to_string(own) +
                                      "; they may differ by 0 to " + std::to_string(entries));
}

}  // namespace

Result<uint32_t> RequestProducer::room() {
  if (tail_ - head_seen_ < kRequestEntries) [[likely]] {
    return kRequestEntries - (tail_ - head_seen_);
  }
  // SYNC: acquire: the daemon has finished copying every entry below sq_head, so its slot may be
  // written again.
  const uint32_t head = load_acquire(daemon_->sq_head);
  const uint32_t used = tail_ - head;
  if (used > kRequestEntries) {
    return bad_index("sq_head", head, tail_, kRequestEntries);
  }
  head_seen_ = head;
  return kRequestEntries - used;
}

void RequestProducer::stage(const RequestEntry& entry) {
  copy_to_shared(&client_->entries[tail_ & kRequestMask], &entry, sizeof(entry));
  ++tail_;
}

bool RequestProducer::publish() {
  published_ = tail_;
  // SYNC: release: entries below sq_tail, and the blocks they refer to, are visible to the daemon.
  // Sequentially consistent because of the load below: see "Waking" in the header.
  store_seq_cst(&client_->sq_tail, tail_);
  return load_seq_cst(daemon_->sq_need_wakeup) != 0;
}

Result<uint32_t> RequestConsumer::take(RequestEntry* out, uint32_t n_max) {
  // SYNC: acquire: entries below sq_tail and their blocks, as the client wrote them.
  const uint32_t tail = load_acquire(client_->sq_tail);
  const uint32_t available = tail - head_;
  if (available > kRequestEntries) {
    return bad_index("sq_tail", tail, head_, kRequestEntries);
  }
  const uint32_t n = std::min(available, n_max);
  for (uint32_t i = 0; i < n; ++i) {
    copy_once(&out[i], &client_->entries[(head_ + i) & kRequestMask], sizeof(RequestEntry));
  }
  if (n > 0) {
    head_ += n;
    // SYNC: release: our copies are done before the client may write the slots again.
    store_release(&daemon_->sq_head, head_);
  }
  return n;
}

bool RequestConsumer::prepare_sleep() {
  // SYNC: sequentially consistent store and load: see "Waking" in the header.
  raise_wakeup();
  if (load_seq_cst(client_->sq_tail) == head_) {
    return true;
  }
  finish_sleep();
  return false;
}

void RequestConsumer::raise_wakeup() {
  // SYNC: sequentially consistent: what is looked at next is at least as new as this.
  store_seq_cst(&daemon_->sq_need_wakeup, 1);
}

void RequestConsumer::finish_sleep() {
  // SYNC: relaxed would do: a client that still sees 1 rings once more than needed.
  store_release(&daemon_->sq_need_wakeup, 0);
}

Result<uint32_t> CompletionProducer::room() const {
  // SYNC: acquire: the client has finished copying every entry below cq_head. Sequentially
  // consistent (the same instruction) for a daemon that is about to sleep: see "Waking".
  const uint32_t head = load_seq_cst(client_->cq_head);
  const uint32_t used = tail_ - head;
  // An entry that is staged cannot have been taken.
  if (used > kCompletionEntries || used < n_staged()) {
    return bad_index("cq_head", head, tail_, kCompletionEntries);
  }
  return kCompletionEntries - used;
}

void CompletionProducer::stage(const CompletionEntry& entry) {
  copy_to_shared(&daemon_->entries[tail_ & kCompletionMask], &entry, sizeof(entry));
  ++tail_;
}

bool CompletionProducer::publish() {
  if (published_ == tail_) {
    return false;
  }
  published_ = tail_;
  // SYNC: release: completions below cq_tail, the result blocks and outputs of their requests are
  // visible to the client. Sequentially consistent because of the load below: see "Waking".
  store_seq_cst(&daemon_->cq_tail, tail_);
  if (load_seq_cst(client_->cq_waiting) != 0) {
    wake_waiters(daemon_->cq_tail);
  }
  return true;
}

bool CompletionProducer::wants_eventfd() const {
  // SYNC: after the store of cq_tail, both sequentially consistent: see "Waking" in the header.
  return load_seq_cst(client_->cq_eventfd) != 0;
}

Result<uint32_t> CompletionConsumer::take(CompletionEntry* out, uint32_t n_max) {
  // SYNC: acquire: completions below cq_tail with the outputs and result blocks of their requests.
  const uint32_t tail = load_acquire(daemon_->cq_tail);
  const uint32_t available = tail - head_;
  if (available > kCompletionEntries) {
    return bad_index("cq_tail", tail, head_, kCompletionEntries);
  }
  const uint32_t n = std::min(available, n_max);
  for (uint32_t i = 0; i < n; ++i) {
    copy_once(&out[i], &daemon_->entries[(head_ + i) & kCompletionMask], sizeof(CompletionEntry));
  }
  if (n > 0) {
    head_ += n;
    // SYNC: release: our copies are done before the daemon may write the slots again.
    store_release(&client_->cq_head, head_);
  }
  return n;
}

bool CompletionConsumer::is_ready() const { return load_acquire(daemon_->cq_tail) != head_; }

void CompletionConsumer::sleep(uint64_t timeout_ns) {
  // SYNC: sequentially consistent store and load: see "Waking" in the header. The futex compares
  // cq_tail with head_ again inside the kernel.
  store_seq_cst(&client_->cq_waiting, 1);
  if (load_seq_cst(daemon_->cq_tail) == head_) {
    wait_while_equal(daemon_->cq_tail, head_, timeout_ns);
  }
  store_release(&client_->cq_waiting, 0);
}

bool CompletionConsumer::request_eventfd() {
  // SYNC: sequentially consistent store and load: see "Waking" in the header.
  store_seq_cst(&client_->cq_eventfd, 1);
  return load_seq_cst(daemon_->cq_tail) != head_;
}

}  // namespace kvm::ipc
