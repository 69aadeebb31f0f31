// SPDX-License-Identifier: Apache-2.0
// The benches of approximate attention have this in common: which data at which length, which
// indexes, and the solver of each thread.
#ifndef KVM_BENCH_APPROX_SETTINGS_H_
#define KVM_BENCH_APPROX_SETTINGS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/approx/index.h"
#include "bench/approx/solver.h"
#include "bench/harness.h"

namespace kvm::bench {

// --data, or what the bench takes by itself.
std::vector<std::string> chosen_data(const Options& options, std::vector<std::string> defaults);
// --tokens; else 8,192 for --quick; else the defaults, without those whose data would not fit the
// memory budget with room for one batch of heads. For a recorded file: 0, all that it has.
std::vector<uint32_t> chosen_tokens(const Options& options, const std::string& data,
                                    std::vector<uint32_t> defaults);
// The length at which the data is quoted.
uint32_t default_tokens(const std::string& data);

struct SketchChoice {
  std::string name;
  std::optional<hash_index::SketchKind> kind;
};
// "auto", which is the default of the product, and every kind.
const std::vector<SketchChoice>& sketch_choices();

// The settings of the paper; the first alone for `quick`.
std::vector<hash_index::LshParams> lsh_choices(bool quick);
std::string lsh_name(const hash_index::LshParams& params);  // "K10L150"

// Indexes of every head, one head to a thread.
std::vector<std::unique_ptr<Sketches>> build_sketches(const DataSet& data,
                                                      const SketchOptions& options,
                                                      uint32_t threads);
std::vector<std::unique_ptr<LshTables>> build_tables(const DataSet& data,
                                                     const hash_index::LshParams& params,
                                                     uint32_t threads);
std::vector<attention::HeadIndex> indexes_of(const std::vector<std::unique_ptr<Sketches>>& s);
std::vector<attention::HeadIndex> indexes_of(const std::vector<std::unique_ptr<LshTables>>& t);
// Bytes of index for a token and kv head.
double bytes_per_token(const DataSet& data, const std::vector<std::unique_ptr<Sketches>>& s);
double bytes_per_token(const DataSet& data, const std::vector<std::unique_ptr<LshTables>>& t);

// Returns the solver of the calling thread, which is kept from call to call.
Solver& thread_solver();

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_SETTINGS_H_
