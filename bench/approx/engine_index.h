// SPDX-License-Identifier: Apache-2.0
// Measures what an index costs where the engine makes it: a space of one layer with the heads of a
// data set, whose sequence is appended whole and then attended to for the first time.
#ifndef KVM_BENCH_APPROX_ENGINE_INDEX_H_
#define KVM_BENCH_APPROX_ENGINE_INDEX_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/approx/data.h"
#include "bench/harness.h"

namespace kvm::bench {

class EngineIndex {
 public:
  // kind: KVM_INDEX_*.
  EngineIndex(const DataSet& data, uint32_t kind, uint32_t threads);
  // Seconds that making the index of a sequence takes, reading its keys included: a first sampled
  // attend minus one that finds the index made. Each call makes another sequence.
  double build_seconds();
  double n_keys() const;
  double bytes_per_key() const { return bytes_per_key_; }

 private:
  void append(kvm_seq_id seq);
  double attend_seconds(kvm_seq_id seq);
  kvm_seq_id seq_verb(SeqRequest&& request);

  const DataSet& data_;
  std::unique_ptr<engine::Engine> engine_;
  engine::ClientId client_ = 0;
  kvm_space_id space_ = 0;
  std::vector<uint16_t> k_, v_, q_, o_;
  double bytes_per_key_ = 0;
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_ENGINE_INDEX_H_
