// SPDX-License-Identifier: Apache-2.0
// What a client does in its life, for tests that end it somewhere on the way.
#ifndef KVM_TESTS_CRASH_LIFE_H_
#define KVM_TESTS_CRASH_LIFE_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kvm.h"

namespace kvm::testing {

// Connects, makes a queue, an arena, a space and sequences; appends, attends, steps, forks, frees;
// closes. Returns the first failure, with its name and sentence in *what.
kvm_status live(const std::string& socket_path, std::string* what);

// A client that stays.
class Witness {
 public:
  explicit Witness(const std::string& socket_path);
  ~Witness();
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;

  kvm_stats stats();
  // An attend over its own sequence: always the same floats.
  std::vector<float> attend();
  const std::string& failure() const { return failure_; }

 private:
  void check(kvm_status status, const char* what);

  kvm_client* client_ = nullptr;
  kvm_queue* queue_ = nullptr;
  kvm_space_id space_ = 0;
  kvm_seq_id seq_ = 0;
  std::string failure_;
};

// A client that works without end: sequences grow, are attended, forked, cut and freed, and hold
// about target_bytes at any time.
class Loader {
 public:
  Loader(const std::string& socket_path, unsigned seed, uint64_t target_bytes);
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // False once a call has failed for another reason than a full service.
  bool do_something();
  const std::string& failure() const { return failure_; }

 private:
  void check(kvm_status status, const char* what);
  void step(kvm_seq_id seq, uint32_t n_append, uint32_t n_query);
  uint64_t held_bytes();

  kvm_client* client_ = nullptr;
  kvm_queue* queue_ = nullptr;
  kvm_space_id space_ = 0;
  std::mt19937 random_;
  uint64_t target_bytes_;
  uint64_t n_done_ = 0;
  bool is_full_ = false;
  std::vector<kvm_seq_id> seqs_;
  std::vector<float> floats_;
  std::string failure_;
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_CRASH_LIFE_H_
