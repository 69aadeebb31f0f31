// SPDX-License-Identifier: Apache-2.0
// The life of an engine that uses kvm.h, from opening to closing, while calls may fail: what each
// call returned, what attention answered, and what does not fit together.
#ifndef KVM_TESTS_FAULTS_LIFE_H_
#define KVM_TESTS_FAULTS_LIFE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvm.h"
#include "tests/faults/loop.h"

namespace kvm::testing {

struct Answer {
  uint32_t mode = 0;
  uint64_t keys_read = 0;
  std::vector<float> o;

  bool operator==(const Answer&) const = default;
};

class Life {
 public:
  using Open = std::function<kvm_status(kvm_client**)>;

  // again: whether a call that failed is made once more, and must then succeed. Without, the life
  // goes straight to its end.
  Life(Open open, bool again) : open_(std::move(open)), again_(again) {}

  // Opens, does a little of everything, gives everything back, closes.
  void live();

  // Calls that failed, and what is wrong whatever was refused: a call that fails twice, sequences
  // or pages that are left.
  const Outcome& outcome() const { return outcome_; }
  const std::vector<Answer>& answers() const { return answers_; }
  // Whether everything was done and given back.
  bool is_complete() const { return is_complete_; }

 private:
  using Call = std::function<kvm_status()>;

  bool call(const char* name, const Call& call);
  bool use();
  bool make_objects();
  bool work_with_sequences();
  bool look();
  bool give_back();
  bool append(kvm_seq_id seq, uint32_t first_row, uint32_t n_tokens);
  bool attend(kvm_seq_id seq, uint32_t mode, uint64_t budget, bool appends);
  bool attend_left(kvm_seq_id seq);
  bool read(kvm_seq_id seq);
  bool fork(kvm_seq_id seq, kvm_seq_id* child);
  bool free(kvm_seq_id seq);
  bool work_with_policies();
  bool age_as_it_grows();
  bool age_by_commits();
  bool append_aged(kvm_seq_id seq, uint32_t n_tokens);
  bool attend_aged(kvm_seq_id seq);
  bool observe_aged(kvm_seq_id seq, uint64_t n_columns);
  void complain(const std::string& what) { outcome_.complain(what.c_str()); }

  Open open_;
  const bool again_;
  kvm_client* client_ = nullptr;
  kvm_queue* queue_ = nullptr;
  kvm_arena* arena_ = nullptr;
  kvm_space_id space_ = 0;
  kvm_space_id aged_space_ = 0;
  kvm_seq_id seq_ = 0;
  kvm_seq_id child_ = 0;
  Outcome outcome_;
  std::vector<Answer> answers_;
  bool is_complete_ = false;
};

// What an answer given under faults may differ in from that of a clean life: nothing, or, where an
// approximate one had no index for want of memory, it read more and is as near to the exact one.
// "" or what is wrong.
std::string compare(const std::vector<Answer>& clean, const std::vector<Answer>& got);

}  // namespace kvm::testing

#endif  // KVM_TESTS_FAULTS_LIFE_H_
