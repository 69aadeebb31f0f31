// SPDX-License-Identifier: Apache-2.0
// Yi-Lightning (docs/policies/yi_lightning.md): three window layers to a full one, of which two
// share a store, as a configuration of kvm.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kvm.h"
#include "tests/integration/abi_rig.h"
#include "tests/integration/abi_steps.h"

namespace kvm::testing {
namespace {

constexpr uint32_t kLayers = 8;
constexpr uint32_t kLeader = 3;
constexpr uint32_t kFollower = 7;
constexpr uint32_t kStored = 7;   // layers 0 to 6
constexpr uint32_t kWindows = 6;  // of them
constexpr uint32_t kDim = 8;
constexpr uint64_t kPage = KVM_PREFIX_TOKENS;
// fp32 throughout, up to 400 terms.
constexpr double kNear = 1e-5;

class AbiYi : public StepTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(open("abi-yi-test"));
    follower_.layer_begin = kFollower;
    follower_.n_layers = 1;
    follower_.kind = KVM_LAYER_ALIAS;
    follower_.target = kLeader;
  }
  void make(uint32_t n_heads, uint64_t window, uint64_t slack = 0) {
    n_heads_ = n_heads;
    for (uint32_t block = 0; block < 2; ++block) {
      windows_[block] = {};
      windows_[block].layer_begin = 4 * block;
      windows_[block].n_layers = 3;
      windows_[block].retention = KVM_RETAIN_SINKS_RECENT;
      windows_[block].n_recent = window;
      windows_[block].slack = slack;
    }
    kvm_space_params params = params_of("yi", kLayers, n_heads, kDim);
    params.layers = &follower_;
    params.n_layer_params = 1;
    params.policies = windows_;
    params.n_policies = 2;
    space_ = add_space(params);
    seq_ = add_seq(space_);
  }
  uint64_t row_bytes() const { return uint64_t{n_heads_} * kDim * 2 * sizeof(float); }
  State attend_at(kvm_seq_id seq, uint32_t layer, const std::vector<float>& q, uint32_t n_rows) {
    return attend(space_, seq, layer, KVM_POSITION_END, q, n_rows, n_heads_);
  }
  std::vector<float> floats(size_t n_rows) {
    return random_floats(&random_, n_rows * n_heads_ * kDim);
  }

  std::mt19937 random_{21};
  kvm_layer_params follower_{};
  kvm_policy_params windows_[2];
  uint32_t n_heads_ = 1;
  kvm_space_id space_ = 0;
  kvm_seq_id seq_ = 0;
};

// 1/4 of the layers are full and two share a store; 3/4 have a window: at 64K it is the 82.81 %
// that were published, and what the service's pages take is exactly that.
TEST_F(AbiYi, BytesAreThoseOfTheFormula) {
  constexpr uint64_t kWindow = 4096;
  constexpr uint64_t kAtOnce = 4096;
  make(1, kWindow);
  const kvm_space_id plain = add_space(params_of("plain", kLayers, 1, kDim));
  const kvm_seq_id whole = add_seq(plain);
  const std::vector<float> kv = floats(kLayers * kAtOnce);
  const std::vector<float> stored(kv.begin(), kv.begin() + kStored * kAtOnce * kDim);
  const auto grow = [&](uint64_t to) {
    while (info_of(seq_).n_tokens_max < to) {
      const auto n = static_cast<uint32_t>(std::min(kAtOnce, to - info_of(seq_).n_tokens_max));
      ASSERT_EQ(append(space_, seq_, 0, kStored, n, stored, stored), KVM_OK) << kvm_last_error();
    }
  };
  struct Length {
    uint64_t n_tokens;
    double saved;
  };
  // Also before the window is full, and where neither it nor the end is at a page's.
  for (const auto& [n, saved] : {Length{4096, 0.125},
                                 {16384, 0.6875},
                                 {32768, 0.78125},
                                 {65536, 0.828125},
                                 {131072, 0.8515625},
                                 {131072 + 37, 0}}) {
    SCOPED_TRACE(n);
    ASSERT_NO_FATAL_FAILURE(grow(n));
    const kvm_seq_info info = info_of(seq_);
    const uint64_t n_full = (n + kPage - 1) / kPage;
    const uint64_t n_window = n_full - (n - kWindow) / kPage;
    EXPECT_EQ(info.bytes, (n_full + kWindows * n_window) * kPage * row_bytes());
    EXPECT_EQ(info.n_entries_dropped, kWindows * ((n - kWindow) / kPage) * kPage);
    EXPECT_EQ(info.n_committed, n);
    if (saved != 0) {
      const auto all = static_cast<double>(kLayers * n * row_bytes());
      EXPECT_EQ(1 - static_cast<double>(info.bytes) / all, saved);
    }
    if (n == 16384) {  // what a model of eight full layers takes
      for (uint64_t at = 0; at < n; at += kAtOnce) {
        ASSERT_EQ(append(plain, whole, 0, kLayers, kAtOnce, kv, kv), KVM_OK) << kvm_last_error();
      }
      const uint64_t all = info_of(whole).bytes;
      EXPECT_EQ(all, kLayers * n * row_bytes());
      kvm_stats stats{};
      stats.struct_size = sizeof(stats);
      ASSERT_EQ(kvm_get_stats(client_, &stats), KVM_OK);
      EXPECT_EQ(stats.host_page_bytes, info.bytes + all) << "of the service";
      ASSERT_EQ(kvm_seq_free(client_, whole), KVM_OK);
    }
  }
}

// The follower answers with the leader's bits, and both, and the windows, as their masks say.
TEST_F(AbiYi, AFollowerHasTheLeadersBits) {
  constexpr uint32_t kTokens = 400;
  constexpr uint64_t kWindow = 128;
  make(2, kWindow, 64);  // rows behind the commit point still see all of their windows
  NaiveLayer leader({.n_q_heads = 2, .n_kv_heads = 2, .dim = kDim});
  NaiveLayer window = leader;
  for (uint32_t layer = 0; layer < kStored; ++layer) {
    const std::vector<float> k = floats(kTokens), v = floats(kTokens);
    ASSERT_EQ(append(space_, seq_, layer, 1, kTokens, k, v), KVM_OK) << kvm_last_error();
    if (layer == kLeader || layer == 0) {
      (layer == 0 ? window : leader).append(k, v);
    }
  }
  std::vector<double> o, lse;
  for (const uint32_t n_rows : {1u, 7u, 40u}) {
    const std::vector<float> q = floats(n_rows);
    const State follower = attend_at(seq_, kFollower, q, n_rows);
    EXPECT_EQ(follower, attend_at(seq_, kLeader, q, n_rows)) << n_rows << " rows";
    const State in_window = attend_at(seq_, 0, q, n_rows);
    for (uint32_t row = 0; row < n_rows; ++row) {
      const uint64_t p = kTokens - n_rows + row;
      const size_t at = size_t{row} * 2;
      leader.attend(
          &q[at * kDim], [&](uint64_t x) { return x <= p; }, &o, &lse);
      EXPECT_LE(difference(&follower.o[at * kDim], o), kNear) << "row " << row;
      EXPECT_LE(difference(&follower.lse[at], lse), kNear) << "row " << row;
      window.attend(
          &q[at * kDim], [&](uint64_t x) { return x <= p && x + kWindow > p; }, &o, &lse);
      EXPECT_LE(difference(&in_window.o[at * kDim], o), kNear) << "row " << row;
      EXPECT_LE(difference(&in_window.lse[at], lse), kNear) << "row " << row;
    }
  }
}

// A shared store is appended to once a token, by its leader.
TEST_F(AbiYi, AFollowerIsNotAppendedTo) {
  make(1, 64);
  const std::vector<float> kv = floats(kLayers * 100);
  ASSERT_EQ(append(space_, seq_, 0, kStored, 100, kv, kv), KVM_OK) << kvm_last_error();
  const std::vector<float> q = floats(1);
  const State before = attend_at(seq_, kFollower, q, 1);
  const uint64_t bytes = info_of(seq_).bytes;
  const auto expect_refused = [&](uint32_t layer, uint32_t n_layers) {
    EXPECT_EQ(append(space_, seq_, layer, n_layers, 1, kv, kv), KVM_ERR_INVALID);
    EXPECT_STREQ(kvm_last_error(), "layer 7 reads the store of layer 3; append there");
    const kvm_seq_info info = info_of(seq_);
    EXPECT_EQ(info.n_tokens_min, 100u);
    EXPECT_EQ(info.n_tokens_max, 100u);
    EXPECT_EQ(info.bytes, bytes);
    EXPECT_EQ(attend_at(seq_, kFollower, q, 1), before);
    EXPECT_EQ(attend_at(seq_, kLeader, q, 1), before);
  };
  expect_refused(kFollower, 1);
  expect_refused(0, kLayers);  // nor the layers before it
  expect_refused(6, 2);
}

// Forks and cuts take leader and follower along; each branch goes its own way.
TEST_F(AbiYi, BranchesKeepSharing) {
  make(1, 128, 64);
  const std::vector<float> kv = floats(kLayers * 500);
  ASSERT_EQ(append(space_, seq_, 0, kStored, 500, kv, kv), KVM_OK) << kvm_last_error();
  kvm_seq_id child = 0;
  EXPECT_EQ(kvm_seq_fork(client_, seq_, 300, &child), KVM_ERR_PARTIAL) << "windows are gone";
  ASSERT_EQ(kvm_seq_fork(client_, seq_, 460, &child), KVM_OK) << kvm_last_error();
  const std::vector<float> q = floats(1);
  const State parent = attend_at(seq_, kFollower, q, 1);
  for (int i = 0; i < 3; ++i) {
    const std::vector<float> more = floats(kLayers * 50);
    ASSERT_EQ(append(space_, child, 0, kStored, 50, more, more), KVM_OK) << kvm_last_error();
    ASSERT_EQ(kvm_seq_truncate(client_, child, 480 + 20 * i), KVM_OK) << kvm_last_error();
    const State state = attend_at(child, kFollower, q, 1);
    EXPECT_EQ(state, attend_at(child, kLeader, q, 1));
    EXPECT_NE(state, parent);
  }
  EXPECT_EQ(attend_at(seq_, kFollower, q, 1), parent);
}

}  // namespace
}  // namespace kvm::testing
