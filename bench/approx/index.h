// SPDX-License-Identifier: Apache-2.0
// The indexes of a head as the engine would hold them: sketches in frames of 8,192 tokens, and the
// hash tables of MagicPIG in runs of 65,536.
//
// Threads: building is the caller's to share out (one head a call); immutable afterwards.
#ifndef KVM_BENCH_APPROX_INDEX_H_
#define KVM_BENCH_APPROX_INDEX_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/sampled/approx.h"
#include "bench/approx/data.h"
#include "bench/attention/workers.h"

namespace kvm::bench {

inline constexpr uint64_t kFrameTokens = 8192;

struct SketchOptions {
  std::optional<hash_index::SketchKind> kind;  // none: chosen by the keys
  uint32_t n_observed = 0;                     // of the head's query sets, handed to the frames
  uint64_t seed = 1;
  // false: as the engine makes them while a sequence grows, frames are there before their keys: the
  // first from the first kFirstFrameTokens tokens but the kSinkTokens, each later one from the run
  // before, starting from its frame. true: each from its own keys.
  bool fresh = false;
};
// kvm_index_params' defaults of min_tokens and n_sinks.
inline constexpr uint64_t kFirstFrameTokens = 4096;
inline constexpr uint64_t kSinkTokens = 4;

// Codes of all whole blocks of a head but the last 64 tokens.
class Sketches {
 public:
  Sketches(const HeadData& head, const SketchOptions& options);
  const std::vector<attention::SketchedRun>& runs() const { return runs_; }
  uint64_t size_bytes() const { return size_bytes_; }  // of codes and frames
  uint64_t code_bytes() const { return code_bytes_; }
  uint64_t n_keys() const { return n_keys_; }
  // "1b", "8i8+1b", "2b", or "mixed".
  std::string kind_name() const;

 private:
  void encode(const HeadData& head);

  std::vector<hash_index::FramePtr> frames_;
  std::unique_ptr<HugeBuffer> blocks_;
  std::vector<attention::SketchedRun> runs_;
  uint64_t size_bytes_ = 0;
  uint64_t code_bytes_ = 0;
  uint64_t n_keys_ = 0;
};

const char* kind_name(hash_index::SketchKind kind);

// Tables of all tokens of a head, each run hashed minus the mean of its keys.
class LshTables {
 public:
  LshTables(const HeadData& head, hash_index::PlanesPtr planes,
            const hash_index::LshParams& params);
  const std::vector<attention::HashedRun>& runs() const { return runs_; }
  const hash_index::Planes* planes() const { return planes_.get(); }
  const hash_index::LshParams& params() const { return params_; }
  uint64_t size_bytes() const { return size_bytes_; }

  // Tokens that share two tables or more with a row of the set, ascending for each head, with their
  // inclusion probabilities.
  struct Candidates {
    std::vector<std::vector<uint64_t>> ids;  // [group]
    std::vector<std::vector<double>> inclusion;
    double bytes_read = 0;  // offsets and ids
  };
  Candidates lookup(const HeadData& head, uint32_t set) const;

 private:
  void look_up_run(const HeadData& head, uint32_t set, size_t run, const uint16_t* codes,
                   Candidates* out) const;

  hash_index::PlanesPtr planes_;
  hash_index::LshParams params_;
  std::vector<std::vector<float>> centers_;
  std::vector<std::unique_ptr<HugeBuffer>> tables_;
  std::vector<attention::HashedRun> runs_;
  uint64_t size_bytes_ = 0;
};

// Returns the index as approx.h takes it, with either part null.
attention::HeadIndex make_index(const Sketches* sketches, const LshTables* tables);

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_INDEX_H_
