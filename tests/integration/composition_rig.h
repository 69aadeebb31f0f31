// SPDX-License-Identifier: Apache-2.0
// Pairs of a retention policy and a codec, which the tests of the composition table run through
// kvm.h: how they are registered, grown, attended to and read, and what an attend should find, in
// double precision over what kvm_read says is stored.
#ifndef KVM_TESTS_INTEGRATION_COMPOSITION_RIG_H_
#define KVM_TESTS_INTEGRATION_COMPOSITION_RIG_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kvm.h"
#include "tests/integration/abi_rig.h"

namespace kvm::testing {

constexpr uint32_t kPairLayers = 2;
constexpr uint64_t kPairPrompt = 256;  // tokens before the prompt ends

// A retention policy as a row of the table has it.
struct PolicyCase {
  const char* name;
  kvm_policy_params entry;

  bool is_prompt() const { return entry.retention == KVM_RETAIN_PROMPT; }
  // The codec of a pair is what it demotes to, from fp32.
  bool demotes() const { return entry.merge == KVM_MERGE_DEMOTED; }
};

// A codec of keys and one of values. Those of a family answer alike.
struct CodecCase {
  const char* family;
  uint32_t k;
  uint32_t v;
  double off;  // by so much of their length stored rows may be off
};

// window: of those that have one, but for what is to be too short for an index.
std::vector<PolicyCase> policy_cases(uint64_t window);
// The first of each family is its example.
const std::vector<CodecCase>& codec_cases();

// What else a space may say, which not every policy and codec goes with.
enum class Extra {
  kNone,
  kWindow,  // a window of 100 in each layer
  kAlibi,   // slopes of both q heads
  kVInK,    // V is K
  kAlias,   // the last layer reads the store of the first
  kPair     // both layers share directions
};

// A space of a policy and a codec.
struct Pair {
  PolicyCase policy{};
  CodecCase codec{};
  Extra extra = Extra::kNone;
  uint64_t prompt = kPairPrompt;
  kvm_space_id space = 0;
  std::array<std::vector<float>, kPairLayers> k, v;  // rows as they were last read, where asked for

  // Whether a layer that has `length` tokens answers.
  bool answers(uint32_t layer, uint64_t length) const {
    return storage(layer) != 0 || !policy.is_prompt() || length < prompt;
  }
  // The layer whose store a layer reads.
  uint32_t storage(uint32_t layer) const { return extra == Extra::kAlias ? 0 : layer; }
  uint32_t n_stored() const { return extra == Extra::kAlias ? kPairLayers - 1 : kPairLayers; }
};

// What a call answered: "" is KVM_OK, else "refused{STATUS: sentence}", without what differs from
// run to run.
std::string said(kvm_status status, const CodecCase& codec);

// What an attend is asked for, beside a sequence and a layer.
struct Ask {
  uint32_t n_rows = 1;  // the last ones
  uint32_t mode = KVM_MODE_DEFAULT;
  uint32_t proposal = KVM_PROPOSAL_DEFAULT;
  uint64_t budget = 0;
  float eps = 0;
  uint32_t flags = KVM_STEP_NO_STATISTICS;
};

struct PairAnswer {
  std::string refusal;  // as said() has it
  std::vector<float> o;
  std::vector<float> lse;
  uint32_t mode = 0;

  bool operator==(const PairAnswer& other) const = default;  // bits
};

// What is stored of a layer.
struct Stored {
  std::vector<bool> is_there;
  std::vector<float> k, v;  // [token][dim]; 0 of those that are not there

  bool operator==(const Stored& other) const = default;
};

class PairTest : public ServiceTest {
 protected:
  // Fills pair->space, or says why not. index_kind: KVM_INDEX_*.
  std::string add_space(const PolicyCase& policy, const CodecCase& codec, uint32_t index_kind,
                        Pair* pair, Extra extra = Extra::kNone);
  kvm_seq_id add_seq(const Pair& pair, uint32_t flags = 0);
  kvm_seq_id fork(kvm_seq_id parent);  // at its end
  void free_seq(kvm_seq_id seq);
  void drop_space(const Pair& pair);

  // Appends rows [first_row, first_row + n) of the pair's text to all layers.
  void append(const Pair& pair, kvm_seq_id seq, uint64_t at, uint64_t first_row, uint32_t n,
              uint32_t item_flags = 0);
  // The text from token `from` on, in chunks, each with attends that feed statistics. `commits`:
  // and a commit. `reads`: what is stored is read into pair->k and v after each.
  void grow(Pair* pair, kvm_seq_id seq, uint64_t from, uint64_t to, bool commits, bool reads);
  // Four tokens that are not of the text are appended, attended to, and taken back.
  std::string draft(const Pair& pair, kvm_seq_id seq, uint64_t at, uint32_t step_flags);

  PairAnswer attend(const Pair& pair, kvm_seq_id seq, uint32_t layer, uint64_t length,
                    const Ask& ask = {});
  // Of all layers that answer.
  std::vector<PairAnswer> attend_all(const Pair& pair, kvm_seq_id seq, uint64_t length);
  Stored read(const Pair& pair, kvm_seq_id seq, uint32_t layer, uint64_t length);

  // "" where the exact answer of the first layer that answers is that over what is stored, and what
  // is stored is what was appended but for the codec's error; else what is wrong.
  std::string check(const Pair& pair, kvm_seq_id seq, uint64_t length);

 private:
  void read_range(const Pair& pair, kvm_seq_id seq, uint32_t layer, uint64_t begin, uint64_t end,
                  Stored* stored);
};

}  // namespace kvm::testing

#endif  // KVM_TESTS_INTEGRATION_COMPOSITION_RIG_H_
