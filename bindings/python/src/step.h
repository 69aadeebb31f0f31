// SPDX-License-Identifier: Apache-2.0
// What a request asks for, read from Python once and run as often as wanted.
#ifndef KVM_BINDINGS_PYTHON_SRC_STEP_H_
#define KVM_BINDINGS_PYTHON_SRC_STEP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include "bindings/python/src/client.h"
#include "bindings/python/src/tensor.h"
#include "kvm.h"

namespace kvm::python {

// An Item is one sequence's share of a step.
struct Item {
  static constexpr uint32_t kNext = UINT32_MAX;  // behind the rows of the items before it

  kvm_item item{};
  std::vector<kvm_range> ranges;
  std::vector<uint64_t> tree;
};

// A Request is anything that a queue takes: kvm.h's parameters with what they point to.
struct Request {
  enum class Verb : uint8_t {
    kAppend,
    kAttend,
    kStep,
    kRead,
    kObserve,
    kCreate,
    kFork,
    kTruncate,
    kCommit,
    kFree,
    kPublish,
    kTake,
    kPrefetch,
    kSave,
    kLoad,
    kDeleteSnapshot,
    kPublishPrefix,
    kSetPriority,
    kDrop,
    kNop
  };

  Verb verb = Verb::kNop;
  std::shared_ptr<Client> client;
  kvm_step_params step{};
  kvm_read_params read{};
  kvm_observe_params observe{};
  kvm_seq_params create{};
  uint64_t id = 0;                      // of the space or the sequence
  uint64_t n_tokens = 0;                // of kDrop: where it ends
  uint64_t begin = 0;                   // of kDrop
  std::string name;                     // of a snapshot
  uint32_t flags = 0;                   // of kSave
  std::vector<kvm_prefix_hash> hashes;  // of kPublishPrefix
  uint64_t keep_ns = 0;                 // of kPublishPrefix
  kvm_priority_params priority{};
  std::vector<kvm_item> items;
  std::vector<kvm_range> ranges;
  std::vector<uint64_t> tree;
  uint64_t copied_bytes = 0;
  std::vector<Owner> owners;
};

// n_q_heads, n_kv_heads: of the layer, 0 where they are not known. The rest: of kvm_step_params.
// Throws StatusError: arrays and items do not fit.
std::shared_ptr<Request> make_step(std::shared_ptr<Client> client, uint64_t space, uint32_t layer,
                                   uint32_t n_q_heads, uint32_t n_kv_heads, uint32_t dim_k,
                                   uint32_t dim_v, const nanobind::list& items, nanobind::handle k,
                                   nanobind::handle v, nanobind::handle q, nanobind::handle o,
                                   nanobind::handle lse, nanobind::handle err, bool heads_first,
                                   uint32_t flags, uint32_t mode, uint32_t proposal, float scale,
                                   float eps, float delta, uint64_t budget, uint64_t seed,
                                   uint64_t deadline_ns);

kvm_priority_params priority_params(uint64_t seq, uint32_t priority, uint64_t begin, uint64_t end,
                                    uint64_t keep_ns);

void register_step(nanobind::module_& module);

}  // namespace kvm::python

#endif  // KVM_BINDINGS_PYTHON_SRC_STEP_H_
