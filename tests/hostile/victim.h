// SPDX-License-Identifier: Apache-2.0
// A well-behaved client beside offenders: the same work again and again, and a digest of every bit
// of its answers.
#ifndef KVM_TESTS_HOSTILE_VICTIM_H_
#define KVM_TESTS_HOSTILE_VICTIM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kvm.h"

namespace kvm::testing {

class Victim {
 public:
  // Connects, and registers a space of its own.
  explicit Victim(const std::string& socket_path);
  ~Victim();
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;

  // A sequence from its first token to its end: appends, exact and approximate attention, forks,
  // truncation, reads. Two calls with one seed give one digest, unless somebody interferes.
  uint64_t live_once(uint64_t seed);
  // The first call that failed; "" when none did.
  const std::string& failure() const { return failure_; }

 private:
  void check(kvm_status status, const char* what);
  void add(const void* data, size_t size_bytes);
  void append(kvm_seq_id seq, uint32_t n_tokens);
  void attend(kvm_seq_id seq, uint32_t mode, uint64_t budget);
  void read(kvm_seq_id seq, uint64_t position, uint64_t n_tokens);
  std::vector<float> floats(size_t n);

  kvm_client* client_ = nullptr;
  kvm_queue* queue_ = nullptr;
  kvm_space_id space_ = 0;
  kvm_seq_id anchor_ = 0;  // keeps the space in use
  uint64_t random_ = 0;
  uint64_t digest_ = 0;
  std::string failure_;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_HOSTILE_VICTIM_H_
