// SPDX-License-Identifier: Apache-2.0
// OwnSeqs are the sequences that a connection has made: their ids answer LOST on the next one.
//
// Threads: any.
#ifndef KVM_CLIENT_OWN_SEQS_H_
#define KVM_CLIENT_OWN_SEQS_H_

#include <mutex>
#include <unordered_set>
#include <utility>

#include "kvm.h"

namespace kvm::client {

class OwnSeqs {
 public:
  // A Place is the memory by which a sequence will be noted; empty, or of prepare().
  using Place = std::unordered_set<kvm_seq_id>::node_type;

  // Makes room for one more, so that add() fails no more. Throws std::bad_alloc.
  // LIMIT: of kMaxPlaces that prepare() has given out and add() has not seen.
  Place prepare() {
    std::unordered_set<kvm_seq_id> one{0};
    const std::lock_guard lock(mutex_);
    seqs_.reserve(seqs_.size() + kMaxPlaces);
    return one.extract(0);
  }
  void add(Place place, kvm_seq_id seq) {
    place.value() = seq;
    const std::lock_guard lock(mutex_);
    seqs_.insert(std::move(place));
  }
  void erase(kvm_seq_id seq) {
    const std::lock_guard lock(mutex_);
    seqs_.erase(seq);
  }
  // Leaves none.
  std::unordered_set<kvm_seq_id> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(seqs_, {});
  }

 private:
  static constexpr size_t kMaxPlaces = 8192;  // more than the requests in flight of all queues

  std::mutex mutex_;
  std::unordered_set<kvm_seq_id> seqs_;
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_OWN_SEQS_H_
