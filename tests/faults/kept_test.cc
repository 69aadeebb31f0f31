// SPDX-License-Identifier: Apache-2.0
// Tokens that heads choose to keep, while memory is refused: heads that drop what they do not keep
// stand in one slice with heads that join it to others, which ask for memory when rows of the
// first have long been written.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/splitmix.h"
#include "engine/engine.h"
#include "tests/common/items.h"
#include "tests/faults/faults.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kDim = 32;
// Of layers, one head each.
constexpr uint32_t kMerges[] = {KVM_MERGE_NONE, KVM_MERGE_COUNTED, KVM_MERGE_DEMOTED};
constexpr uint32_t kLayers = 3;
constexpr uint32_t kFirst = 400;
constexpr uint32_t kSecond = 320;

enum class Kind : uint64_t { kKey = 1, kValue = 2, kQuery = 3 };

// Channel i of a token: what it is follows from where it stands.
float element(uint64_t position, uint32_t layer, Kind kind, uint32_t i) {
  const uint64_t at = ((position * kLayers + layer) * 4 + static_cast<uint64_t>(kind)) * kDim + i;
  return static_cast<float>(static_cast<int64_t>(splitmix64((at + 1) * kSplitMixStep))) * 0x1p-63f;
}

class World {
 public:
  World() {
    engine::EngineOptions options;
    options.n_threads = 1;
    options.host_capacity_bytes = 64 << 20;
    engine_ = std::move(engine::Engine::open(options)).value();
    client_ = engine_->add_client({});
    SpaceSpec spec;
    spec.name = "kept";
    spec.params.struct_size = sizeof(kvm_space_params);
    spec.params.n_layers = kLayers;
    spec.params.n_q_heads = 1;
    spec.params.head_dim_k = kDim;
    spec.params.codec = KVM_CODEC_F32;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      spec.policies.push_back({.layer_begin = layer,
                               .n_layers = 1,
                               .retention = KVM_RETAIN_HEAVY,
                               .n_sinks = 4,
                               .n_recent = 64,
                               .n_heavy = 64,
                               .merge = kMerges[layer]});
      if (kMerges[layer] == KVM_MERGE_DEMOTED) {
        spec.codecs.push_back({.layer_begin = layer,
                               .n_layers = 1,
                               .codec_k = KVM_CODEC_F32,
                               .codec_v = KVM_CODEC_F32,
                               .demoted_k = KVM_CODEC_I8,
                               .demoted_v = KVM_CODEC_F16});
      }
    }
    space_ = engine_->register_space(spec).value();
    SeqRequest create;
    create.space = space_;
    create.flags = KVM_SEQ_MANUAL_COMMIT;
    seq_ = run(create).seq;
  }

  // n more tokens in all layers, and queries that weigh some of them more than others.
  void append(uint32_t n) {
    constexpr uint32_t kQueries = 16;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      std::vector<float> k = rows(layer, Kind::kKey, n, 1);
      std::vector<float> v = rows(layer, Kind::kValue, n, 1);
      std::vector<float> q = rows(layer, Kind::kQuery, kQueries, 6);
      std::vector<float> o(q.size());
      StepRequest step;
      step.space = space_;
      step.layer_begin = layer;
      step.append = true;
      step.attend = true;
      step.items = {item_of(seq_, n, kQueries)};
      step.k = view(&k);
      step.v = view(&v);
      step.q = view(&q);
      step.o = view(&o);
      ASSERT_TRUE(run(std::move(step)).status.is_ok());
    }
    length_ += n;
  }
  void commit() {
    SeqRequest request;
    request.verb = SeqVerb::kCommit;
    request.seq = seq_;
    request.n_tokens = KVM_POSITION_END;
    run(std::move(request));
  }
  // Each token that the first layer has is the one of its position. Returns how many there are.
  uint32_t expect_own_rows() {
    uint32_t n = 0;
    for (uint64_t position = 0; position < length_; ++position) {
      std::vector<float> k(kDim);
      std::vector<float> v(kDim);
      ReadRequest request;
      request.seq = seq_;
      request.position = position;
      request.n_tokens = 1;
      request.k = view(&k);
      request.v = view(&v);
      if (!run(std::move(request)).status.is_ok()) {
        continue;  // it was given up
      }
      ++n;
      for (uint32_t i = 0; i < kDim; ++i) {
        if (k[i] != element(position, 0, Kind::kKey, i) ||
            v[i] != element(position, 0, Kind::kValue, i)) {
          ADD_FAILURE() << "the token at " << position << " is another one";
          return n;
        }
      }
    }
    return n;
  }
  void check_accounts() const { engine_->check_accounts(); }

 private:
  static TensorView view(std::vector<float>* values) {
    return {.data = values->data(),
            .size_bytes = values->size() * sizeof(float),
            .dtype = KVM_DTYPE_F32};
  }
  std::vector<float> rows(uint32_t layer, Kind kind, uint32_t n, float size) const {
    std::vector<float> values;
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t i = 0; i < kDim; ++i) {
        values.push_back(size * element(length_ + t, layer, kind, i));
      }
    }
    return values;
  }
  template <typename What>
  RequestResult run(What what) {
    RequestResult answer;
    bool is_done = false;
    const InProduct in_product;
    engine_->submit(client_, {1, ++n_requests_}, std::move(what), [&](RequestResult&& result) {
      answer = std::move(result);
      is_done = true;
    });
    for (uint32_t i = 0; i < 20'000 && !is_done; ++i) {
      if (engine_->poll() == 0 && !engine_->work()) {
        engine_->wait(1'000'000);
      }
    }
    EXPECT_TRUE(is_done);
    return answer;
  }

  std::unique_ptr<engine::Engine> engine_;
  engine::ClientId client_ = 0;
  kvm_space_id space_ = 0;
  kvm_seq_id seq_ = 0;
  uint64_t length_ = 0;
  uint64_t n_requests_ = 0;
};

TEST(KeptFaults, TokensStayThemselvesWhateverIsRefused) {
  for (const Until until : {Until::kOnce, Until::kForEver}) {
    // Once something fails, all else does alike.
    const uint64_t step = until == Until::kOnce ? 1 : 7;
    for (uint64_t n = 1;; n += step) {
      SCOPED_TRACE("allocation " + std::to_string(n) + (until == Until::kOnce ? "" : " and on"));
      World world;
      world.append(kFirst);
      world.commit();
      world.append(kSecond);
      arm(Refused::kAllocation, n, until, Of::kThisThread);
      world.commit();
      const Seen seen = disarm();
      world.check_accounts();
      world.expect_own_rows();
      world.commit();  // what was left
      world.check_accounts();
      const uint32_t n_rows = world.expect_own_rows();
      ASSERT_FALSE(HasFailure());
      if (seen.n_refused == 0) {
        EXPECT_GT(n, 50u) << "hardly anything was refused";
        EXPECT_LT(n_rows, kFirst + kSecond) << "nothing was given up";
        break;
      }
      ASSERT_LT(n, 2000u);
    }
  }
}

}  // namespace
}  // namespace kvm::testing
