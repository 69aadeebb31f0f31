// SPDX-License-Identifier: Apache-2.0
// One of many clients of a service that has too little memory for all of them: does everything that
// kvm.h offers, in an order that its seed decides, and knows what its sequences hold.
//
// A token is a number from 1 to 100, which all channels of its value have. Queries of zero weigh
// all visible tokens alike: an exact answer is their mean, and lse the logarithm of their number.
#ifndef KVM_TESTS_INTEGRATION_CROWD_CLIENT_H_
#define KVM_TESTS_INTEGRATION_CROWD_CLIENT_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvm.h"

namespace kvm::testing {

// What is counted when it went well, and three ways in which it may fail.
enum class Deed : uint32_t {
  kOpen,
  kCreate,
  kAppend,
  kAppendLayers,
  kStep,
  kExact,
  kTopK,
  kSampled,
  kVerified,
  kAuto,
  kRead,
  kObserve,
  kFork,
  kTruncate,
  kCommit,
  kFree,
  kInfo,
  kList,
  kStats,
  kSpaces,
  kArena,
  kBurst,
  kCancelled,
  kLate,        // DEADLINE
  kQueueGone,   // with requests in flight
  kClientGone,  // likewise
  kForeign,     // a sequence of another client is refused
  kFull,
  kEvicted,
  kDisconnected,
  kCount
};
const char* deed_name(Deed deed);
using Deeds = std::array<std::atomic<uint64_t>, static_cast<size_t>(Deed::kCount)>;

class CrowdClient {
 public:
  // what is done is counted in *deeds, which may be common to clients on several threads, like
  // *foreign: the id of some sequence of some client.
  CrowdClient(std::string socket_path, unsigned seed, Deeds* deeds,
              std::atomic<kvm_seq_id>* foreign);
  ~CrowdClient();
  CrowdClient(const CrowdClient&) = delete;
  CrowdClient& operator=(const CrowdClient&) = delete;

  // False once something has gone wrong; failure() says what.
  bool do_something();
  const std::string& failure() const { return failure_; }

 private:
  static constexpr uint32_t kLayers = 2;
  using Tokens = std::vector<float>;

  struct Seq {
    kvm_seq_id id = 0;
    uint32_t space = 0;
    std::array<Tokens, kLayers> layers;

    uint64_t longest() const { return std::max(layers[0].size(), layers[1].size()); }
    uint64_t shortest() const { return std::min(layers[0].size(), layers[1].size()); }
    void cut(uint64_t n_tokens);
  };

  // Memory of requests: HOST, or of an arena.
  struct Block {
    std::vector<float> own;
    kvm_buffer buffer{};
    float* floats = nullptr;
  };

  // A request of a burst.
  struct Staged {
    kvm_seq_id seq = 0;
    uint32_t kind = 0;
    uint64_t n_tokens = 0;
    Tokens appended;
  };

  void open();
  // Queues, arena and what is known of sequences; the client stays.
  void drop_connection();
  void close(bool client_first);
  void reopen();
  void make_blocks();
  Block make_block(size_t n_floats);
  kvm_tensor tensor(const Block& block, size_t at, size_t n_floats) const;

  uint32_t pick(uint32_t low, uint32_t high);
  bool one_in(uint32_t n) { return pick(1, n) == 1; }
  size_t some_seq() { return pick(0, static_cast<uint32_t>(seqs_.size()) - 1); }
  void count(Deed deed);
  void fail(const std::string& what);
  void fail_answer(const std::string& what);
  // Whether it is KVM_OK, which counts as the deed. Else what that means for the sequence, if it is
  // one of the failures that may happen to anybody or is `allowed`; a failure of the test if not.
  bool succeeded(kvm_status status, Deed deed, kvm_seq_id seq, kvm_status allowed = KVM_OK);
  void forget(kvm_seq_id seq);

  // Puts n tokens into K and V, from row `row` on.
  Tokens fill_tokens(uint32_t row, uint32_t n);
  void fill_queries(uint32_t row, uint32_t n, bool zero);
  kvm_step_params step_params(uint32_t space, uint32_t layer, const std::vector<kvm_item>& items);
  void add_append(kvm_step_params* step, uint32_t row, uint32_t n);
  void add_attend(kvm_step_params* step, uint32_t row, uint32_t n);

  void choose_mode(uint32_t space, kvm_step_params* step);

  void create();
  void append();
  void step();
  void attend();
  void attend_late();
  void read();
  void observe();
  void fork();
  void truncate();
  void commit();
  void free_one();
  void look();
  void look_at_foreign();
  void use_space();
  void use_arena();
  void burst();
  bool stage(uint32_t slot, Staged* staged);
  void finish_burst(std::map<uint64_t, Staged>* staged);
  void apply(const Staged& staged, const kvm_completion& completion);
  void check_exact(const Seq& seq, uint32_t layer, uint32_t n_query);
  void check_finite(uint32_t n_rows);
  void check_read(const Seq& seq, uint32_t layer, uint64_t position, uint64_t n_tokens);

  std::string socket_path_;
  std::string name_;
  std::mt19937 random_;
  Deeds* deeds_;
  std::atomic<kvm_seq_id>* foreign_;
  bool in_arena_;
  kvm_client* client_ = nullptr;
  kvm_queue* queue_ = nullptr;
  kvm_queue* async_ = nullptr;
  kvm_arena* arena_ = nullptr;
  std::vector<kvm_space_id> spaces_;
  std::vector<Seq> seqs_;
  Block k_, v_, q_, o_, lse_, sums_;
  bool is_full_ = false;
  bool is_lost_ = false;
  std::string failure_;
};

// Registers the spaces of the crowd, one for each kind of policy, index and codec.
std::vector<kvm_space_id> register_crowd_spaces(kvm_client* client);

}  // namespace kvm::testing

#endif  // KVM_TESTS_INTEGRATION_CROWD_CLIENT_H_
