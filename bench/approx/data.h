// SPDX-License-Identifier: Apache-2.0
// Queries, keys and values for the benches of approximate attention: generated from a seed, or
// recorded from a model, all through one type and laid out in pages as the engine lays them.
//
//   model      spectra of keys and queries that fall as powers of the index; token types and topics
//              in keys and values; a common mean; a sink with a tiny value; the last 64 tokens 1.5
//              nats up. Heads cycle through sd of the logits 1.0, 1.8, 2.4, 3.0, 3.8 nats and
//              "needle" (2.2, and 8 keys 8 to 10 nats up).
//   flat       the same with spectra that fall slowly: nothing is held by few coordinates
//   isotropic  the same with no falling spectrum at all
//   outliers   model, and 4 channels of the keys with 15 times the spread
//   voutliers  model, and one value in a thousand 30 times as large
//   latesink   model, and one late key that holds 1 to 99 % of the mass, by head
//   even       model with logits of sd 0.2: attention is nearly uniform
//   softcap    model with a soft cap of 10 nats on its logits
//   drift      model, with mean and axes of keys and queries moving over the last 32,768 tokens
//   turn       model, whose spectra change at half its length: queries of even heads then ask for
//              what keys vary least in; odd heads were flat, and draw together
//   real       clusters of keys that come in short segments, queries that look at four of them
//   diffuse    the same with flatter queries
//   gauss      independent normals: nothing to find
//   needle     one key with 30 to 70 % of the mass, by head, in a flat context of like values
//   line       values on a line
//   cancel     values that nearly cancel: a small one, plus or minus a large one
//   equalkeys  the same with keys that are all equal
//   longkeys   independent normals, and 20 of 8,192 keys 3 to 10 times as long
//   heavytail  weights with the tail of a Pareto distribution of index 1.5
//   zeros      two thirds of the keys zero, and a fifth of values that are alike
//   minority   values that are alike, but for 2 to 6 %, by head, which are the opposite
// The last eight are `fragile`: groups of two, made to have wrong error bars.
//
// Threads: immutable once made; any number of readers.
#ifndef KVM_BENCH_APPROX_DATA_H_
#define KVM_BENCH_APPROX_DATA_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/dtype.h"
#include "base/kv_view.h"
#include "base/status.h"
#include "bench/attention/workers.h"

namespace kvm::bench {

// One kv head with queries for it. Values are those stored: bf16 or fp16.
struct HeadData {
  std::string type;
  KvRuns runs;         // of all tokens, dense from position 0, one run a page
  KvRuns kernel_runs;  // what kernels read: the same, or rows in int8
  uint32_t head = 0;   // in the pages
  uint32_t dim = 0;    // of keys and values
  uint32_t group = 0;
  float scale = 0;
  float softcap = 0;  // 0: none
  Dtype dtype = Dtype::kBf16;
  std::vector<uint16_t> q;           // [n_sets][group][dim]
  std::vector<uint64_t> q_position;  // [n_sets]; a query sees the tokens up to here, this included

  uint32_t n_sets() const { return static_cast<uint32_t>(q_position.size()); }
  uint64_t n_visible(uint32_t set) const { return q_position[set] + 1; }
  const uint16_t* q_rows(uint32_t set) const { return q.data() + size_t{set} * group * dim; }
  const uint16_t* k_row(uint64_t token) const { return row(runs[token / kPageTokens].k, token); }
  const uint16_t* v_row(uint64_t token) const { return row(runs[token / kPageTokens].v, token); }
  float to_float(uint16_t bits) const {
    return dtype == Dtype::kBf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  }
  // Bytes of K and V of a token at 16 bits.
  uint64_t row_bytes() const { return uint64_t{dim} * 4; }

 private:
  const uint16_t* row(const KvPlane& plane, uint64_t token) const {
    return static_cast<const uint16_t*>(plane.rows) +
           (size_t{head} * kPageTokens + token % kPageTokens) * dim;
  }
};

// The problem of one query set: all heads of the group, one query token. o [group][dim] fp32.
attention::Problem make_problem(const HeadData& head, uint32_t set, float* o, float* lse);

inline constexpr uint32_t kMinTokens = 256;

struct DataSpec {
  // A name of the list above, or the path of a .kvrec file, or of a folder of such: the heads of
  // the files are numbered through in the order of their names, and a data set has those of one
  // file.
  std::string name = "model";
  uint32_t tokens = 0;      // at least kMinTokens; of a file: at most so many; 0: all
  uint32_t heads = 8;       // kv heads; of a file: at most so many groups
  uint32_t first_head = 0;  // heads are numbered from here: other numbers, independent heads
  uint32_t sets = 4;        // query sets; of a file: at most so many
  uint64_t seed = 1;
  uint32_t dim = 128;  // of a file: the file's; else a power of two
};

class DataSet {
 public:
  std::string name;
  uint32_t n_tokens = 0;
  std::vector<HeadData> heads;

  // Lays out pages for n_heads heads, shuffled in memory; heads are given views, but no queries.
  void lay_out(uint32_t n_heads, uint32_t tokens, uint32_t dim, uint32_t group, Dtype dtype);
  uint16_t* k_row(uint32_t head, uint64_t token) {
    return const_cast<uint16_t*>(heads[head].k_row(token));
  }
  uint16_t* v_row(uint32_t head, uint64_t token) {
    return const_cast<uint16_t*>(heads[head].v_row(token));
  }
  KvRuns runs() const { return *runs_; }

  // Kernels read int8 rows made of these from now on, or these again.
  void use_int8_rows(uint32_t threads);
  void use_own_rows();

 private:
  void lay_out_int8();

  std::unique_ptr<HugeBuffer> pool_, int8_pool_;
  std::unique_ptr<std::vector<KvRun>> runs_, int8_runs_;
};

// The names that make_data knows, files apart.
const std::vector<std::string>& data_names();
const std::vector<std::string>& fragile_names();
bool is_fragile(const std::string& name);
// Says whether a name is a file or a folder, and how many heads it has. Errors: as make_data.
bool is_recorded(const std::string& name);
Result<uint32_t> count_recorded_heads(const std::string& name);

// Errors: KVM_ERR_INVALID for an unknown name or a dim that is no power of two; those of
// RecordFile; KVM_ERR_UNSUPPORTED where heads of a file differ in layout.
// The same data whatever the threads.
Result<DataSet> make_data(const DataSpec& spec, uint32_t threads);

// How the keys of "model" are made; the other names are settings of it.
struct ModelOptions {
  double key_power = 1.3;    // variance of coordinate j of the keys ~ j^-key_power
  double query_power = 0.7;  // and of the queries
  double sigma = 0;          // sd of the logits, nats; 0: by head
  bool outlier_channels = false;
  bool value_outliers = false;
  bool late_sink = false;
  uint32_t drift_tokens = 0;  // at the end
  uint32_t turn_at = 0;       // 0: never
};

// make_data is put together from these.
DataSet make_model_data(const DataSpec& spec, const ModelOptions& options, uint32_t threads);
DataSet make_cluster_data(const DataSpec& spec, double sharpness, uint32_t threads);
DataSet make_fragile_data(const DataSpec& spec, uint32_t threads);
DataSet make_gauss_data(const DataSpec& spec, uint32_t threads);
Result<DataSet> read_recorded_data(const DataSpec& spec);

}  // namespace kvm::bench

#endif  // KVM_BENCH_APPROX_DATA_H_
