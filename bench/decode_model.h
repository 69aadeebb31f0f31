// SPDX-License-Identifier: Apache-2.0
// A model of Llama-3.1-8B geometry as the service sees it: 32 layers of 32 query and 8 kv heads of
// 128, whose keys, values and queries come from the generators of bench/approx/data.h.
//
// The generators make kDataLayers layers of distinct heads; layer l of the model has a copy of
// number l % kDataLayers, in pages of its own. No two layers of a token have the same queries.
// Sequences are filled up to kHeldTokens short of their length; each token that is decoded appends
// the next one of these.
//
// Threads: one at a time. Failures end the program.
#ifndef KVM_BENCH_DECODE_MODEL_H_
#define KVM_BENCH_DECODE_MODEL_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bench/approx/data.h"
#include "bench/service_client.h"
#include "kvm.h"

namespace kvm::bench {

// How a step is answered: the attend half of kvm_step_params.
struct StepMode {
  uint32_t mode = KVM_MODE_EXACT;
  uint64_t budget = 0;
  float eps = 0;
  float delta = 0;
};

// Totals of what the steps of one token, a layer each, did together.
struct TokenStats {
  double seconds = 0;  // that the client waited
  double compute_s = 0;
  uint64_t keys_present = 0;
  uint64_t keys_read = 0;
  uint64_t bytes_read = 0;
  uint64_t n_exact = 0;  // rows of an approximate mode that were answered exactly
};

class DecodeModel {
 public:
  static constexpr uint32_t kLayers = 32;
  static constexpr uint32_t kQHeads = 32;
  static constexpr uint32_t kKvHeads = 8;
  static constexpr uint32_t kDim = 128;
  static constexpr uint64_t kTokenBytes = uint64_t{kKvHeads} * kDim * 2 * 2;  // of one layer
  static constexpr uint32_t kBlock = 4096;                                    // tokens an append
  static constexpr uint32_t kDataLayers = 4;
  static constexpr uint32_t kSets = kLayers / kDataLayers;  // query sets of a layer's data
  static constexpr uint64_t kRowSize = uint64_t{kQHeads} * kDim;
  static constexpr uint32_t kMaxHeldTokens = 64;

  // is_indexed: heads have sketches, of the kind that suits them.
  DecodeModel(kvm_client* client, kvm_queue* queue, uint64_t n_tokens, bool is_indexed);
  ~DecodeModel();
  DecodeModel(const DecodeModel&) = delete;
  DecodeModel& operator=(const DecodeModel&) = delete;

  // Generates data of a name and appends all tokens but the last n_held to every layer.
  // REQUIRES: 0 < n_held <= kMaxHeldTokens.
  void fill(const std::string& data, uint32_t n_held, uint32_t threads);

  // Appends the next held token and attends, layer by layer. o(layer) has the answers.
  TokenStats decode(const StepMode& mode);
  // Takes the last decoded token back, so that another mode can decode the same one.
  void undo();
  // Attends one layer without appending.
  TokenStats attend(uint32_t layer, uint32_t set, const StepMode& mode);

  kvm_seq_id seq() const { return seq_; }
  // The last answer of a layer, [kQHeads][kDim].
  std::span<const float> o(uint32_t layer) const { return o_[layer]; }

 private:
  kvm_step_params make_step(kvm_item* item, uint32_t layer);
  void set_mode(const StepMode& mode, uint32_t layer, uint32_t set, kvm_step_params* params);
  void append_data(const DataSet& data, uint32_t layer, uint32_t threads);
  void keep_rest(const DataSet& data, uint32_t number);
  void take(uint32_t layer, const kvm_step_stats& stats, TokenStats* out);

  kvm_client* client_;
  kvm_queue* queue_;
  kvm_arena* arena_ = nullptr;
  kvm_space_id space_ = 0;
  kvm_seq_id seq_ = 0;
  uint64_t n_tokens_;
  uint32_t n_held_ = 0;
  uint32_t n_decoded_ = 0;
  ArenaTensor k_, v_, q_, o_tensor_, lse_;
  // [kDataLayers]: rows of the held tokens, [token][kv head][dim], and queries, [set][q head][dim].
  std::array<std::vector<uint16_t>, kDataLayers> held_k_, held_v_, queries_;
  std::array<std::vector<float>, kLayers> o_;
};

// Adds the relative L2 error of each q head of an answer against the exact one.
void add_errors(std::span<const float> o, std::span<const float> exact,
                std::vector<double>* errors);

}  // namespace kvm::bench

#endif  // KVM_BENCH_DECODE_MODEL_H_
