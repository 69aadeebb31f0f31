// SPDX-License-Identifier: Apache-2.0
// A CostModel says what attention costs on this machine; KVM_MODE_AUTO chooses by it for each
// problem (one item, one kv head) whether exact, sampled or TopK answers what was asked for
// soonest, or best.
//
// Rates are those of one thread while all others work as well. They are measured once a process
// (engine/attend/calibration.h), or written down in the configuration, which makes choices
// reproducible.
//
// With n the keys that the index covers:
//   sample of m rows    start + scan n + (keys always read) + gather m
//   TopK over tables    start + lookup n + (keys always read) + (K of candidates) + gather k / 2
//
// Where P pages are away exact takes at least as long as to read them in order, and a sample of m
// rows, of each of the heads that share them, reads P (1 - e^(-heads m / P)) apart, as if rows were
// drawn anywhere. Beyond a certain share of the pages nothing is (engine/attend/drawn_stream.h).
//
// Threads: CostModel is plain data; Costs belongs to the driver.
#ifndef KVM_ENGINE_ATTEND_COST_MODEL_H_
#define KVM_ENGINE_ATTEND_COST_MODEL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/status.h"
#include "tiers/read_rates.h"
#include "tiers/slow_tier.h"

namespace kvm::engine {

// A CostModel has rates in nanoseconds, of heads of 128 channels and up to 4 rows. Other sizes are
// taken in proportion.
struct CostModel {
  double exact_bf16 = 13.5;  // a key of 512 bytes, read in order
  double exact_int8 = 8;     // a key of 260 bytes, likewise
  double scan = 1.5;         // a key's sketch
  double gather = 28;        // a row of 512 bytes that lies alone
  double start = 40000;      // of an approximate problem: its pilot, its end
  uint32_t threads = 0;      // that share a time budget; 0: those of the engine

  bool operator==(const CostModel&) const = default;
};

// "measure" (nothing), or all rates as "exact_bf16=13.5,exact_int8=8,scan=1.5,gather=28,
// start=40000" in any order, with "threads=2" where time budgets shall not depend on the engine's.
// Fails: INVALID, with a sentence that names the part.
Result<std::optional<CostModel>> parse_cost_model(std::string_view text);
// As parse_cost_model reads it.
std::string format_cost_model(const CostModel& model);

// A ProblemCost is what the cost of one problem depends on.
struct ProblemCost {
  uint32_t rows = 0;         // query tokens times group
  uint32_t dim = 0;          // channels of K and V together
  uint64_t row_bytes = 0;    // K and V of one token
  bool is_scaled = false;    // K and V both int8 or fp8: read at the rate of int8
  bool is_hashed = false;    // the index are hash tables; else sketches
  uint64_t n_present = 0;    // keys that are visible
  uint64_t n_indexed = 0;    // of them, that need not be read
  uint64_t exact_bytes = 0;  // what exact reads, computation converted to bytes
  // Pages that are away: problems that share them read each once, and each has its part of the
  // time, in nanoseconds of one thread like all others.
  uint64_t n_pages_away = 0;
  uint32_t n_sharing = 1;
  double stream_ns = 0;  // its part of all of them, in order
  double page_ns = 0;    // its part of one that is read apart
};

enum class AutoMode : uint8_t { kExact, kVerified, kSampled, kTopK };

struct AutoChoice {
  AutoMode mode = AutoMode::kExact;
  uint64_t budget = 0;          // kSampled, kTopK: keys of each row
  float max_read_fraction = 0;  // kVerified: of n_present, beyond which exact is cheaper
};

double exact_ns(const CostModel& model, const ProblemCost& problem);
// Returns the time of a sample that reads n_rows rows beside those always read, or of a TopK over
// tables of n_rows keys for all rows together.
double approx_ns(const CostModel& model, const ProblemCost& problem, double n_rows);

// An error is given. Sketches: VERIFIED, unless even its least costs as much as exact; what its
// pilot finds to need more than max_read_fraction is exact as well. Hash tables give no bar that
// could be held against an error: exact.
AutoChoice choose_for_error(const CostModel& model, const ProblemCost& problem);

// A time is given, of one thread: the least error within it. Exact where it fits, or where nothing
// is faster; else as many keys as fit, kLeastBudget a row at least: sampled over sketches. Over
// hash tables sampled (MagicPIG, whatever the budget) where all that they propose fits, for it is
// nearer than TopK of the same keys (docs/approximate_attention.md); else TopK, which reads the
// values of some.
inline constexpr uint64_t kLeastBudget = 16;
AutoChoice choose_for_time(const CostModel& model, const ProblemCost& problem, double time_ns);

// Costs hold the model of an engine: pinned, or measured.
class Costs {
 public:
  // slow_tier: may be null.
  Costs(std::optional<CostModel> pinned, uint32_t n_threads,
        const tiers::SlowTier* slow_tier = nullptr)
      : pinned_(pinned), n_threads_(n_threads), slow_tier_(slow_tier) {}
  ~Costs();
  Costs(const Costs&) = delete;
  Costs& operator=(const Costs&) = delete;

  // Begins to measure, on threads of its own, where that is to be done. Who asks for the model
  // before it is there waits; where nobody has called this, he measures.
  void prepare();
  const CostModel& model() const;
  // The model as text, or "" as long as it is not measured. Does not wait.
  std::string text() const;
  // Of pages that are away, as they are now.
  tiers::ReadRates read_rates() const {
    return slow_tier_ == nullptr ? tiers::ReadRates() : slow_tier_->read_rates();
  }
  // Threads that share a time budget.
  uint32_t n_threads() const { return model().threads != 0 ? model().threads : n_threads_; }

 private:
  std::optional<CostModel> pinned_;
  uint32_t n_threads_;
  const tiers::SlowTier* slow_tier_;
  std::thread measuring_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_COST_MODEL_H_
