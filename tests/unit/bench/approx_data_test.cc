// SPDX-License-Identifier: Apache-2.0
// The generators have the statistics that they are made to have, and the fp64 reference agrees with
// the exact kernels. Sizes are small; the bands say how far a statistic moves with size and seed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <vector>

#include "bench/approx/data.h"
#include "bench/approx/reference.h"
#include "bench/attention/workers.h"
#include "bench/recorded/record_file.h"

namespace kvm::bench {
namespace {

DataSet make(const std::string& name, uint32_t tokens, uint32_t heads, uint32_t threads = 2,
             uint32_t first_head = 0) {
  DataSpec spec;
  spec.name = name;
  spec.tokens = tokens;
  spec.heads = heads;
  spec.first_head = first_head;
  spec.sets = 2;
  Result<DataSet> data = make_data(spec, threads);
  EXPECT_TRUE(data.is_ok()) << data.status().message();
  return std::move(data).value();
}

// Means over all rows of all heads.
struct Means {
  double top1 = 0, top5 = 0, top20 = 0;  // softmax mass of the largest 1, 5, 20 % of keys
  double oracle2 = 0, oracle10 = 0;      // error of the output where only 2, 10 % are read
};

double oracle_error(const HeadData& head, std::span<const double> logits,
                    std::span<const uint64_t> ids, const double* wanted) {
  std::vector<double> o(head.dim);
  attend_some(head, logits, ids, {}, o.data());
  return relative_error(o.data(), wanted, head.dim);
}

void add_row(const HeadData& head, std::span<const double> logits, double lse, const double* o,
             Means* sums) {
  const size_t n = logits.size();
  std::vector<uint64_t> ids(n);
  std::iota(ids.begin(), ids.end(), 0);
  std::sort(ids.begin(), ids.end(), [&](auto a, auto b) { return logits[a] > logits[b]; });
  double mass = 0;
  for (size_t i = 0; i < n; ++i) {
    mass += std::exp(logits[ids[i]] - lse);
    sums->top1 += i + 1 == n / 100 ? mass : 0;
    sums->top5 += i + 1 == n / 20 ? mass : 0;
    sums->top20 += i + 1 == n / 5 ? mass : 0;
  }
  const std::span<const uint64_t> all(ids);
  sums->oracle2 += oracle_error(head, logits, all.first(n / 50), o);
  sums->oracle10 += oracle_error(head, logits, all.first(n / 10), o);
}

Means measure(const DataSet& data) {
  Means m;
  double rows = 0;
  for (const HeadData& head : data.heads) {
    for (uint32_t set = 0; set < head.n_sets(); ++set) {
      const Logits logits = compute_logits(head, set);
      const Answer answer = attend_all(head, logits);
      for (uint32_t g = 0; g < head.group; ++g) {
        add_row(head, logits.of(g), answer.lse[g], answer.o.data() + size_t{g} * head.dim, &m);
        rows += 1;
      }
    }
  }
  for (double* x : {&m.top1, &m.top5, &m.top20, &m.oracle2, &m.oracle10}) {
    *x /= rows;
  }
  return m;
}

// Mean and standard deviation of logits over [begin, end).
std::pair<double, double> moments(std::span<const double> x, size_t begin, size_t end) {
  double sum = 0, square = 0;
  for (size_t i = begin; i < end; ++i) {
    sum += x[i];
    square += x[i] * x[i];
  }
  const double n = static_cast<double>(end - begin);
  return {sum / n, std::sqrt(square / n - sum / n * sum / n)};
}

// Logits of ordinary keys spread as their type says. Types and topics repeat, so the keys that the
// scaling did not look at move the figure by a few percent.
TEST(ModelData, LogitsSpreadAsAsked) {
  const DataSet data = make("model", 8192, 6);
  constexpr double kSigmas[] = {1.0, 1.8, 2.4, 3.0, 3.8, 2.2};
  EXPECT_EQ(data.heads[2].type, "sigma 2.4");
  EXPECT_EQ(data.heads[5].type, "needle");
  for (size_t h = 0; h < data.heads.size(); ++h) {
    for (uint32_t set = 0; set < 2; ++set) {
      const Logits logits = compute_logits(data.heads[h], set);
      for (uint32_t g = 0; g < 4; ++g) {
        const auto [mean, sd] = moments(logits.of(g), 4, logits.n - 64);
        // Eight needles 9 nats up raise the spread of 8,192 keys by 3 %.
        EXPECT_NEAR(sd / kSigmas[h], h == 5 ? 1.03 : 1.0, 0.06) << "head " << h;
      }
    }
  }
}

TEST(ModelData, SinkHoldsItsMassAndRecentTokensLieHigher) {
  const DataSet data = make("model", 8192, 6);
  double above = 0;
  for (const HeadData& head : data.heads) {
    for (uint32_t set = 0; set < 2; ++set) {
      const Logits logits = compute_logits(head, set);
      const Answer answer = attend_all(head, logits);
      for (uint32_t g = 0; g < 4; ++g) {
        const auto s = logits.of(g);
        const double sink = std::exp(s[0] - answer.lse[g]);
        // 30 to 60 %, set before the query is rounded to bf16: 0.05 nats at most.
        EXPECT_GT(sink, 0.28);
        EXPECT_LT(sink, 0.62);
        above += moments(s, logits.n - 64, logits.n).first - moments(s, 4, logits.n - 64).first;
      }
    }
    double value = 0, others = 0;
    for (uint32_t j = 0; j < head.dim; ++j) {
      value += std::pow(head.to_float(head.v_row(0)[j]), 2);
      others += std::pow(head.to_float(head.v_row(100)[j]), 2);
    }
    EXPECT_LT(std::sqrt(value), 0.1 * std::sqrt(others));
  }
  // 64 keys share a topic or two, so their mean wanders; 48 rows of six heads bring it to 0.3 nats.
  EXPECT_NEAR(above / 48, 1.5, 0.9);
}

// What is published of real models: 20.7 % and 7.7 % of error when an oracle reads the top 2 and
// 10 % of 32,768 keys; another generator with these properties gives 18.6 and 8.9. Shorter contexts
// are harder by about a tenth. The band is a third either way.
TEST(ModelData, OracleTopKIsAsWrongAsOnRealModels) {
  const Means m = measure(make("model", 8192, 6));
  EXPECT_GT(m.oracle2, 0.14);
  EXPECT_LT(m.oracle2, 0.30);
  EXPECT_GT(m.oracle10, 0.06);
  EXPECT_LT(m.oracle10, 0.15);
}

// Mass of the top 1, 5 and 20 % at 16,384 tokens is 0.60, 0.75, 0.89 (real) and 0.34, 0.51, 0.73
// (diffuse). At half the length it moves by 0.01 to 0.03; 48 rows have a standard error of 0.04.
TEST(ClusterData, SoftmaxMassIsAsPublished) {
  const Means real = measure(make("real", 8192, 6));
  EXPECT_NEAR(real.top1, 0.60, 0.12);
  EXPECT_NEAR(real.top5, 0.75, 0.10);
  EXPECT_NEAR(real.top20, 0.89, 0.06);
  const Means diffuse = measure(make("diffuse", 8192, 6));
  EXPECT_NEAR(diffuse.top1, 0.34, 0.12);
  EXPECT_NEAR(diffuse.top5, 0.51, 0.11);
  EXPECT_NEAR(diffuse.top20, 0.73, 0.08);
}

// Standard normal logits: the top 1 and 5 % of the weights hold Phi(1 - 2.326) and Phi(1 - 1.645).
TEST(GaussData, SoftmaxMassIsThatOfNormalLogits) {
  const Means m = measure(make("gauss", 8192, 2));
  EXPECT_NEAR(m.top1, 0.092, 0.02);
  EXPECT_NEAR(m.top5, 0.260, 0.03);
}

TEST(Data, IsTheSameWhateverTheThreadsAndTheHeadsAround) {
  for (const std::string name : {"model", "real", "drift", "voutliers"}) {
    const DataSet a = make(name, 1024, 3, 1);
    const DataSet b = make(name, 1024, 3, 3);
    const DataSet c = make(name, 1024, 1, 1, 2);
    for (uint64_t t = 0; t < 1024; ++t) {
      EXPECT_EQ(0, std::memcmp(a.heads[2].k_row(t), b.heads[2].k_row(t), 256));
      EXPECT_EQ(0, std::memcmp(a.heads[2].v_row(t), c.heads[0].v_row(t), 256));
    }
    EXPECT_EQ(a.heads[2].q, b.heads[2].q);
    EXPECT_EQ(a.heads[2].q, c.heads[0].q);
    EXPECT_NE(a.heads[1].q, a.heads[2].q);
  }
}

TEST(Data, VariantsAreWhatTheyAreCalled) {
  const DataSet even = make("even", 2048, 1);
  const Logits logits = compute_logits(even.heads[0], 0);
  EXPECT_NEAR(moments(logits.of(0), 4, 1984).second, 0.2, 0.02);

  const Logits capped = compute_logits(make("softcap", 2048, 1).heads[0], 0);
  const Logits bare = compute_logits(make("model", 2048, 1).heads[0], 0);
  for (size_t i = 0; i < capped.values.size(); ++i) {
    ASSERT_NEAR(capped.values[i], 10 * std::tanh(bare.values[i] / 10), 1e-9);
  }

  const DataSet late = make("latesink", 4096, 5);
  const Logits late_logits = compute_logits(late.heads[4], 0);
  const uint64_t at = 4096 / 4 * 3 + 5;
  // 90 % of what is not the sink's.
  const double share =
      std::exp(late_logits.of(0)[at] - attend_all(late.heads[4], late_logits).lse[0]);
  EXPECT_GT(share, 0.9 * 0.4 - 0.05);
  EXPECT_LT(share, 0.9 * 0.7 + 0.05);
}

TEST(Data, UnknownNamesAndShapesAreRefused) {
  DataSpec spec;
  spec.tokens = 1024;
  spec.name = "nothing";
  EXPECT_EQ(make_data(spec, 1).status().code(), KVM_ERR_INVALID);
  spec.name = "model";
  spec.dim = 96;
  EXPECT_EQ(make_data(spec, 1).status().code(), KVM_ERR_INVALID);
  spec.name = "absent.kvrec";
  EXPECT_EQ(make_data(spec, 1).status().code(), KVM_ERR_IO);
}

TEST(Data, RecordedTensorsArriveUnchanged) {
  const char* root = std::getenv("KVM_SOURCE_DIR");
  ASSERT_NE(root, nullptr);
  DataSpec spec;
  spec.name = std::string(root) + "/models/house/tests/tiny.kvrec";
  spec.sets = 2;
  // Its groups differ in dtype.
  EXPECT_EQ(make_data(spec, 1).status().code(), KVM_ERR_UNSUPPORTED);
  spec.heads = 1;
  Result<DataSet> made = make_data(spec, 1);
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  const DataSet data = std::move(made).value();
  const RecordFile file = std::move(RecordFile::open(spec.name)).value();
  const RecordedGroup& group = file.groups()[0];
  const HeadData& head = data.heads[0];
  ASSERT_EQ(head.q_position.back(), static_cast<uint64_t>(file.query_steps().back()));
  std::vector<float> row(head.dim);
  for (uint64_t t = 0; t < data.n_tokens; ++t) {
    group.v.read_row(t, row.data());
    for (uint32_t j = 0; j < head.dim; ++j) {
      EXPECT_EQ(head.to_float(head.v_row(t)[j]), row[j]);
    }
  }
  group.q.read_row(group.q.n_rows - 1, row.data());
  const uint16_t* q = head.q_rows(head.n_sets() - 1) + size_t{head.group - 1} * head.dim;
  EXPECT_EQ(head.to_float(q[3]), row[3]);
}

// The heads of a folder's files are numbered through in the order of the names.
TEST(Data, AFolderOfRecordsIsOneRecord) {
  namespace fs = std::filesystem;
  const char* root = std::getenv("KVM_SOURCE_DIR");
  ASSERT_NE(root, nullptr);
  const fs::path file = fs::path(root) / "models/house/tests/tiny.kvrec";
  const fs::path folder = fs::temp_directory_path() / ("kvm-data-" + std::to_string(getpid()));
  fs::create_directory(folder);
  EXPECT_EQ(count_recorded_heads(folder.string()).status().code(), KVM_ERR_IO);
  fs::copy_file(file, folder / "b.kvrec");
  fs::copy_file(file, folder / "a.kvrec");
  fs::copy_file(file, folder / "ignored.txt");
  EXPECT_TRUE(is_recorded(folder.string()));
  EXPECT_FALSE(is_recorded("model"));
  const uint32_t own = count_recorded_heads(file.string()).value();
  EXPECT_EQ(count_recorded_heads(folder.string()).value(), 2 * own);
  DataSpec spec;
  spec.name = folder.string();
  spec.heads = 1;
  for (spec.first_head = 0; spec.first_head < 2 * own; ++spec.first_head) {
    DataSpec single = spec;
    single.name = file.string();
    single.first_head = spec.first_head % own;
    const Result<DataSet> wanted = make_data(single, 1);
    const Result<DataSet> data = make_data(spec, 1);
    ASSERT_TRUE(wanted.is_ok() && data.is_ok()) << data.status().message();
    EXPECT_EQ(data.value().heads[0].type, wanted.value().heads[0].type);
    EXPECT_EQ(data.value().heads[0].q, wanted.value().heads[0].q);
  }
  EXPECT_EQ(make_data(spec, 1).status().code(), KVM_ERR_INVALID);
  fs::remove_all(folder);
}

// The kernels weigh values with bf16 weights: 2e-3 of the result.
TEST(Reference, AgreesWithTheExactKernels) {
  const DataSet data = make("model", 1000, 2);
  const HeadData& head = data.heads[1];
  std::vector<float> o(size_t{head.group} * head.dim), lse(head.group);
  const attention::Problem problem = make_problem(head, 1, o.data(), lse.data());
  const attention::Plan plan = attention::make_plan(problem);
  HugeBuffer prepared(plan.prepared_bytes), scratch(plan.scratch_bytes);
  HugeBuffer states(plan.n_chunks * attention::state_bytes(problem, plan.rows));
  attention::prepare_queries(problem, plan, prepared.data());
  attention::eval_chunks(problem, plan, prepared.data(), {0, plan.rows}, plan.first_chunk,
                         plan.n_chunks, scratch.data(), states.data());
  attention::merge_chunks(problem, plan, {0, plan.rows}, states.data());
  const Logits logits = compute_logits(head, 1);
  const Answer answer = attend_all(head, logits);
  std::vector<uint64_t> ids(logits.n);
  std::iota(ids.begin(), ids.end(), 0);
  for (uint32_t g = 0; g < head.group; ++g) {
    const double* wanted = answer.o.data() + size_t{g} * head.dim;
    EXPECT_LT(relative_error(o.data() + size_t{g} * head.dim, wanted, head.dim), 2e-3);
    EXPECT_NEAR(lse[g], answer.lse[g], 2e-3);
    EXPECT_LT(oracle_error(head, logits.of(g), ids, wanted), 1e-12);
  }
}

}  // namespace
}  // namespace kvm::bench
