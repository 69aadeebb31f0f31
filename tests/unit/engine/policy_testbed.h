// SPDX-License-Identifier: Apache-2.0
// What the tests of retention policies share: tokens that are functions of their positions, and
// attention over chosen tokens in double precision.
#ifndef KVM_TESTS_UNIT_ENGINE_POLICY_TESTBED_H_
#define KVM_TESTS_UNIT_ENGINE_POLICY_TESTBED_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "base/kv_view.h"
#include "tests/unit/engine/rig.h"

namespace kvm::engine::testing {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kInstrumented = true;
#else
inline constexpr bool kInstrumented = false;
#endif

inline bool is_nightly() { return std::getenv("KVM_NIGHTLY") != nullptr; }

using Row = std::vector<double>;
// Row of a token (or of the query at its position) and a head.
using RowOf = std::function<Row(uint64_t position, uint32_t head)>;

// Uniform in [-scale, scale], the same for the same arguments.
inline Row hashed_row(uint64_t seed, uint64_t position, uint32_t head, uint32_t dim, double scale) {
  Row row(dim);
  for (uint32_t i = 0; i < dim; ++i) {
    uint64_t x =
        seed + position * 0x9e3779b97f4a7c15u + head * 0xd1342543de82ef95u + i * 0x632be5abu;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    row[i] = scale * (static_cast<double>(x >> 11) * 0x1p-52 - 1.0);
  }
  return row;
}

// A key that counts exp(log_weight) times.
struct Entry {
  Row k;
  Row v;
  double log_weight = 0;
};

inline Answer attention_over(const Row& q, const std::vector<Entry>& entries, double scale) {
  std::vector<double> logits;
  double most = -std::numeric_limits<double>::infinity();
  for (const Entry& entry : entries) {
    double logit = 0;
    for (size_t i = 0; i < q.size(); ++i) {
      logit += q[i] * entry.k[i];
    }
    logits.push_back(logit * scale + entry.log_weight);
    most = std::max(most, logits.back());
  }
  Answer answer;
  answer.o.assign(entries.empty() ? 0 : entries[0].v.size(), 0.0);
  double sum = 0;
  for (size_t t = 0; t < entries.size(); ++t) {
    const double weight = std::exp(logits[t] - most);
    sum += weight;
    for (size_t i = 0; i < answer.o.size(); ++i) {
      answer.o[i] += weight * entries[t].v[i];
    }
  }
  for (double& x : answer.o) {
    x /= sum;
  }
  answer.lse = most + std::log(sum);
  return answer;
}

// One layer of fp32 rows, and what goes in and comes out.
class PolicyRig {
 public:
  PolicyRig(SpaceSpec spec, RowOf k, RowOf v, RowOf q, uint64_t capacity_bytes = 256 << 20,
            uint32_t n_threads = 1)
      : rig(n_threads, capacity_bytes),
        spec_(std::move(spec)),
        k_(std::move(k)),
        v_(std::move(v)),
        q_(std::move(q)) {
    spec_.params.codec = KVM_CODEC_F32;
    space = rig.space(spec_);
    seq = rig.create(space);
  }

  // Appends n_append tokens to `to` and attends with the last n_query, in one request.
  RequestResult step(kvm_seq_id to, uint32_t n_append, uint32_t n_query, uint32_t flags = 0) {
    const uint64_t before = rig.length(to);
    const uint32_t dim = spec_.params.head_dim_k;
    const uint32_t n_kv = spec_.params.n_kv_heads;
    const uint32_t n_q = spec_.params.n_q_heads;
    Buffer k(Dtype::kF32, 1, n_append, n_kv, dim);
    Buffer v(Dtype::kF32, 1, n_append, n_kv, dim);
    Buffer q(Dtype::kF32, 1, n_query, n_q, dim);
    o_ = Buffer(Dtype::kF32, 1, n_query, n_q, dim);
    lse_ = Buffer(Dtype::kF32, 1, n_query, n_q, 1);
    for (uint32_t t = 0; t < n_append; ++t) {
      for (uint32_t h = 0; h < n_kv; ++h) {
        put(&k, t, h, k_(before + t, h));
        put(&v, t, h, v_(before + t, h));
      }
    }
    first_query = before + n_append - n_query;
    for (uint32_t t = 0; t < n_query; ++t) {
      for (uint32_t h = 0; h < n_q; ++h) {
        put(&q, t, h, q_(first_query + t, h));
      }
    }
    StepRequest request;
    request.space = space;
    request.append = n_append != 0;
    request.attend = n_query != 0;
    kvm_item item = append_item(to, n_append);
    item.n_query = n_query;
    item.flags = flags;
    item.n_ranges = static_cast<uint32_t>(ranges.size());
    request.items = {item};
    request.ranges = ranges;
    if (request.append) {
      request.k = k.view();
      request.v = v.view();
    }
    if (request.attend) {
      request.q = q.view();
      request.o = o_.view();
      if (wants_lse) {
        request.lse = lse_.view();
      }
    }
    if ((flags & KVM_ITEM_TREE) != 0) {
      request.tree_mask = tree_mask;
    }
    RequestResult result = rig.run(std::move(request));
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    return result;
  }
  // K and V of tokens [position, position + n), in read_k and read_v.
  Status read(kvm_seq_id from, uint64_t position, uint64_t n) {
    const uint32_t n_kv = spec_.params.n_kv_heads;
    read_k = Buffer(Dtype::kF32, 1, n, n_kv, spec_.params.head_dim_k);
    read_v = Buffer(Dtype::kF32, 1, n, n_kv, spec_.params.head_dim_k);
    ReadRequest request;
    request.seq = from;
    request.position = position;
    request.n_tokens = n;
    request.k = read_k.view();
    request.v = read_v.view();
    return rig.run(std::move(request)).status;
  }
  // Of the last step: the largest difference of row `row` and q head `head` to what is expected.
  double error(uint32_t row, uint32_t head, const Answer& expected) const {
    double worst = wants_lse ? std::fabs(double{lse_.get(0, row, head, 0)} - expected.lse) : 0.0;
    for (size_t i = 0; i < expected.o.size(); ++i) {
      worst = std::max(worst, std::fabs(double{o_.get(0, row, head, i)} - expected.o[i]));
    }
    return worst;
  }
  std::vector<float> output(uint32_t row, uint32_t head) const { return o_.get_row(0, row, head); }
  float lse(uint32_t row, uint32_t head) const { return lse_.get(0, row, head, 0); }
  const std::vector<std::byte>& output_bytes() const { return o_.bytes(); }

  uint64_t bytes(kvm_seq_id of) { return info(of).bytes; }
  kvm_seq_info info(kvm_seq_id of) { return rig.engine->seq_info(rig.client, of).value(); }
  kvm_seq_id fork(kvm_seq_id of, uint64_t n_tokens = KVM_POSITION_END) {
    RequestResult result = rig.verb(SeqVerb::kFork, of, n_tokens);
    EXPECT_TRUE(result.status.is_ok()) << result.status.message();
    return result.seq;
  }

  Rig rig;
  kvm_space_id space = 0;
  kvm_seq_id seq = 0;
  uint64_t first_query = 0;  // position of row 0 of the last step
  std::vector<uint64_t> tree_mask;
  std::vector<kvm_range> ranges;  // of the item
  bool wants_lse = true;
  Buffer read_k;
  Buffer read_v;

 private:
  static void put(Buffer* buffer, uint32_t row, uint32_t head, const Row& values) {
    for (uint32_t i = 0; i < values.size(); ++i) {
      buffer->set(0, row, head, i, static_cast<float>(values[i]));
    }
  }

  SpaceSpec spec_;
  RowOf k_;
  RowOf v_;
  RowOf q_;
  Buffer o_;
  Buffer lse_;
};

}  // namespace kvm::engine::testing

#endif  // KVM_TESTS_UNIT_ENGINE_POLICY_TESTBED_H_
