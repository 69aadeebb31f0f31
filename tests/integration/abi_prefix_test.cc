// SPDX-License-Identifier: Apache-2.0
// Prefixes through kvm.h, over both libraries: hashes, publishing, finding, forking.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/common/another_user.h"
#include "tests/integration/abi_rig.h"

namespace kvm::testing {
namespace {

std::string hex(const kvm_prefix_hash& hash) {
  std::string text;
  for (const uint8_t byte : hash.bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

// The vectors of docs/prefixes.md, computed by Python's hashlib.
TEST(PrefixHashes, AreThoseOfThePage) {
  kvm_prefix_hash before{};
  std::iota(std::begin(before.bytes), std::end(before.bytes), uint8_t{0});
  std::vector<uint32_t> tokens(200);
  for (uint32_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = i * 2654435761u;
  }
  std::array<kvm_prefix_hash, 3> hashes{};
  ASSERT_EQ(kvm_prefix_hashes(&before, tokens.data(), tokens.size(), hashes.data()), KVM_OK);
  EXPECT_EQ(hex(hashes[0]), "00109cd471d2026ce60907ec8813ca30fd5f836c31e8685a68269af51c1c4208");
  EXPECT_EQ(hex(hashes[1]), "80a7b45d0eb71aa8739fb139e4d9fadb98c523dc308ffb75f33e292f996e3fd8");
  EXPECT_EQ(hex(hashes[2]), "88181d2d7f30f9c30d6878ccc2af33ed42ab184ae497005cb596d5c1205b241e");
  // Going on from a page is the same.
  kvm_prefix_hash again{};
  ASSERT_EQ(kvm_prefix_hashes(&hashes[1], tokens.data() + 128, 72, &again), KVM_OK);
  EXPECT_EQ(hex(again), hex(hashes[2]));
  EXPECT_EQ(kvm_prefix_hashes(&before, tokens.data(), 63, nullptr), KVM_OK);
  EXPECT_EQ(kvm_prefix_hashes(nullptr, tokens.data(), 64, hashes.data()), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_prefix_hashes(&before, nullptr, 64, hashes.data()), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_prefix_hashes(&before, tokens.data(), 64, nullptr), KVM_ERR_INVALID);
}

class AbiPrefix : public ServiceTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(open("abi-prefix-test"));
    space_ = register_space(client_, "prefix", geometry_);
  }

  // K and V of a token follow from it alone, so that equal prompts have equal contents.
  kvm_seq_id prompt(kvm_client* client, kvm_queue* queue, const std::vector<uint32_t>& tokens) {
    kvm_seq_id seq = 0;
    EXPECT_EQ(kvm_seq_create(client, space_, nullptr, &seq), KVM_OK) << kvm_last_error();
    append(queue, seq, tokens);
    return seq;
  }
  void append(kvm_queue* queue, kvm_seq_id seq, const std::vector<uint32_t>& tokens) {
    std::vector<float> values;
    for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
      for (const uint32_t token : tokens) {
        std::mt19937 random(token * 31 + layer);
        const std::vector<float> row =
            random_floats(&random, size_t{geometry_.n_kv_heads} * geometry_.dim);
        values.insert(values.end(), row.begin(), row.end());
      }
    }
    kvm_item item{};
    item.seq = seq;
    item.append_position = KVM_POSITION_END;
    item.n_append = static_cast<uint32_t>(tokens.size());
    kvm_step_params step{};
    step.struct_size = sizeof(step);
    step.space = space_;
    step.n_layers = geometry_.n_layers;
    step.n_items = 1;
    step.items = &item;
    step.k = tensor_of(values);
    step.v = tensor_of(values);
    ASSERT_EQ(kvm_append(queue, &step), KVM_OK) << kvm_last_error();
  }
  std::vector<float> attend(kvm_queue* queue, kvm_seq_id seq) {
    std::mt19937 random(99);
    const std::vector<float> q =
        random_floats(&random, size_t{geometry_.n_q_heads} * geometry_.dim);
    std::vector<float> o(q.size());
    kvm_item item{};
    item.seq = seq;
    item.n_query = 1;
    item.query_position = KVM_POSITION_END;
    kvm_step_params step{};
    step.struct_size = sizeof(step);
    step.space = space_;
    step.layer_begin = 1;
    step.n_items = 1;
    step.items = &item;
    step.q = tensor_of(q);
    step.o = tensor_of(o);
    EXPECT_EQ(kvm_attend(queue, &step, nullptr), KVM_OK) << kvm_last_error();
    return o;
  }
  std::vector<kvm_prefix_hash> hashes(const std::vector<uint32_t>& tokens,
                                      const std::string& salt = "") {
    kvm_prefix_hash seed{};
    EXPECT_EQ(kvm_prefix_seed(client_, space_, salt.data(), salt.size(), &seed), KVM_OK)
        << kvm_last_error();
    std::vector<kvm_prefix_hash> out(tokens.size() / KVM_PREFIX_TOKENS);
    EXPECT_EQ(kvm_prefix_hashes(&seed, tokens.data(), tokens.size(), out.data()), KVM_OK);
    return out;
  }
  kvm_prefix find(kvm_client* client, const std::vector<kvm_prefix_hash>& hashes) {
    kvm_prefix_find_params params{};
    params.struct_size = sizeof(params);
    params.space = space_;
    params.hashes = hashes.data();
    params.n_hashes = hashes.size();
    kvm_prefix found{};
    found.struct_size = sizeof(found);
    EXPECT_EQ(kvm_prefix_find(client, &params, &found), KVM_OK) << kvm_last_error();
    return found;
  }
  kvm_status publish(kvm_seq_id seq, const std::vector<kvm_prefix_hash>& hashes,
                     uint64_t keep_ns = 0) {
    return kvm_prefix_publish(client_, seq, hashes.data(), static_cast<uint32_t>(hashes.size()),
                              keep_ns);
  }
  static std::vector<uint32_t> tokens(uint32_t first, size_t n) {
    std::vector<uint32_t> all(n);
    std::iota(all.begin(), all.end(), first);
    return all;
  }

  Geometry geometry_;
  kvm_space_id space_ = 0;
};

TEST_F(AbiPrefix, IsFoundAndForked) {
  const std::vector<uint32_t> system = tokens(1, 300);
  const kvm_seq_id seq = prompt(client_, queue_, system);
  const std::vector<kvm_prefix_hash> known = hashes(system);
  ASSERT_EQ(known.size(), 4u);
  EXPECT_EQ(find(client_, known).n_tokens, 0u);
  ASSERT_EQ(publish(seq, known), KVM_OK) << kvm_last_error();

  std::vector<uint32_t> longer = system;
  longer.insert(longer.end(), 500, 7);
  kvm_prefix found = find(client_, hashes(longer));
  EXPECT_EQ(found.seq, seq);
  EXPECT_EQ(found.n_tokens, 256u);
  std::vector<uint32_t> other = system;
  other[130] = 0;
  found = find(client_, hashes(other));
  EXPECT_EQ(found.n_tokens, 128u);
  EXPECT_EQ(found.seq, seq);
  other[3] = 0;
  found = find(client_, hashes(other));
  EXPECT_EQ(found.n_tokens, 0u);
  EXPECT_EQ(found.seq, 0u);
  EXPECT_EQ(find(client_, hashes(system, "salted")).n_tokens, 0u);

  // A fork that goes on is what was computed anew, bit for bit.
  kvm_seq_id chat = 0;
  ASSERT_EQ(kvm_seq_fork(client_, seq, 128, &chat), KVM_OK) << kvm_last_error();
  other = system;
  other[130] = 0;
  append(queue_, chat, {other.begin() + 128, other.end()});
  EXPECT_EQ(attend(queue_, chat), attend(queue_, prompt(client_, queue_, other)));

  ASSERT_EQ(kvm_seq_free(client_, seq), KVM_OK);
  EXPECT_EQ(find(client_, known).n_tokens, 0u);
}

TEST_F(AbiPrefix, StaysFoundWhileAnyPrefixHasIt) {
  const std::vector<uint32_t> one = tokens(1, 192);
  std::vector<uint32_t> two = one;
  two[100] = 0;
  const kvm_seq_id first = prompt(client_, queue_, one);
  const kvm_seq_id second = prompt(client_, queue_, two);
  ASSERT_EQ(publish(first, hashes(one)), KVM_OK) << kvm_last_error();
  const kvm_seq_id same = prompt(client_, queue_, one);
  EXPECT_EQ(publish(same, hashes(one)), KVM_ERR_EXISTS);
  ASSERT_EQ(publish(second, hashes(two)), KVM_OK) << kvm_last_error();
  EXPECT_EQ(find(client_, hashes(one)).seq, first);
  EXPECT_EQ(find(client_, hashes(two)).seq, second);
  ASSERT_EQ(kvm_seq_free(client_, first), KVM_OK);
  const kvm_prefix found = find(client_, hashes(one));
  EXPECT_EQ(found.seq, second);
  EXPECT_EQ(found.n_tokens, 64u);
  // Nobody can change what others have found.
  EXPECT_EQ(kvm_seq_take(client_, second), KVM_ERR_UNSUPPORTED);
  EXPECT_EQ(find(client_, hashes(two)).n_tokens, 192u);
}

TEST_F(AbiPrefix, GoesWhenNobodyForksIt) {
  const std::vector<uint32_t> system = tokens(1, 128);
  const kvm_seq_id seq = prompt(client_, queue_, system);
  const std::vector<kvm_prefix_hash> known = hashes(system);
  ASSERT_EQ(publish(seq, known, 1), KVM_OK) << kvm_last_error();
  // Whatever comes drives an embedded engine; kvmd drives itself.
  for (int i = 0; i < 2000 && find(client_, known).n_tokens != 0; ++i) {
    kvm_seq_id other = 0;
    ASSERT_EQ(kvm_seq_create(client_, space_, nullptr, &other), KVM_OK);
    ASSERT_EQ(kvm_seq_free(client_, other), KVM_OK);
  }
  EXPECT_EQ(find(client_, known).n_tokens, 0u);
  kvm_seq_id chat = 0;
  const kvm_status status = kvm_seq_fork(client_, seq, 64, &chat);
  EXPECT_TRUE(status == KVM_ERR_STALE || status == KVM_ERR_NOT_FOUND) << status;
}

TEST_F(AbiPrefix, BadArgumentsAreRefused) {
  const std::vector<uint32_t> system = tokens(1, 128);
  const kvm_seq_id seq = prompt(client_, queue_, system);
  std::vector<kvm_prefix_hash> known = hashes(tokens(1, 192));
  EXPECT_EQ(publish(seq, known), KVM_ERR_INVALID);
  EXPECT_NE(std::string(kvm_last_error()).find("192 tokens"), std::string::npos)
      << kvm_last_error();
  known.resize(2);
  EXPECT_EQ(publish(seq, known, (uint64_t{1} << 62) + 1), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_prefix_publish(client_, seq, known.data(), 0, 0), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_prefix_publish(client_, seq, nullptr, 2, 0), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_prefix_publish(client_, seq, known.data(), 65537, 0), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_prefix_publish(client_, seq + 1'000'000, known.data(), 2, 0), KVM_ERR_NOT_FOUND);
  kvm_prefix_hash seed{};
  EXPECT_EQ(kvm_prefix_seed(client_, space_, "x", 65, &seed), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_prefix_seed(client_, space_, nullptr, 1, &seed), KVM_ERR_INVALID);
  EXPECT_EQ(kvm_prefix_seed(client_, space_ + 1000, nullptr, 0, &seed), KVM_ERR_NOT_FOUND);
  kvm_prefix_find_params params{};
  params.struct_size = sizeof(params);
  params.n_hashes = 1;
  kvm_prefix found{};
  found.struct_size = sizeof(found);
  EXPECT_EQ(kvm_prefix_find(client_, &params, &found), KVM_ERR_INVALID);
  params.n_hashes = 0;
  EXPECT_EQ(kvm_prefix_find(client_, &params, &found), KVM_OK);
  EXPECT_EQ(found.n_tokens, 0u);
  EXPECT_EQ(attend(queue_, seq).size(), size_t{geometry_.n_q_heads} * geometry_.dim)
      << "it stays as it was";
}

// Heads that forget: behind the tokens that they still have, a prefix can be forked; before, not.
TEST_F(AbiPrefix, OfHeadsThatForgetIsFoundWhereItCanBeForked) {
  kvm_policy_params policy{};
  policy.n_layers = geometry_.n_layers;
  policy.kv_head_mask[0] = 1;
  policy.retention = KVM_RETAIN_SINKS_RECENT;
  policy.n_sinks = 4;
  policy.n_recent = 100;
  kvm_space_params params{};
  params.struct_size = sizeof(params);
  params.name = "forgets";
  params.n_layers = geometry_.n_layers;
  params.n_q_heads = geometry_.n_q_heads;
  params.n_kv_heads = geometry_.n_kv_heads;
  params.head_dim_k = geometry_.dim;
  params.policies = &policy;
  params.n_policies = 1;
  ASSERT_EQ(kvm_space_register(client_, &params, &space_), KVM_OK) << kvm_last_error();
  const std::vector<uint32_t> system = tokens(1, 640);
  const kvm_seq_id seq = prompt(client_, queue_, system);
  const std::vector<kvm_prefix_hash> known = hashes(system);
  ASSERT_EQ(publish(seq, known), KVM_OK) << kvm_last_error();
  EXPECT_EQ(find(client_, known).n_tokens, 640u);
  size_t n_forkable = 0;
  for (size_t n = 1; n <= known.size(); ++n) {
    const kvm_prefix found = find(client_, {known.begin(), known.begin() + n});
    kvm_seq_id chat = 0;
    if (found.n_tokens != 0) {
      EXPECT_EQ(kvm_seq_fork(client_, found.seq, found.n_tokens, &chat), KVM_OK)
          << n << " " << kvm_last_error();
    }
    EXPECT_EQ(kvm_seq_fork(client_, seq, n * 64, &chat) == KVM_OK, found.n_tokens == n * 64) << n;
    n_forkable += found.n_tokens == n * 64 ? 1 : 0;
  }
  EXPECT_GT(n_forkable, 1u);
  EXPECT_LT(n_forkable, known.size());

  policy.retention = KVM_RETAIN_HEAVY;
  policy.n_heavy = 64;
  params.name = "chooses";
  ASSERT_EQ(kvm_space_register(client_, &params, &space_), KVM_OK) << kvm_last_error();
  const kvm_seq_id chosen = prompt(client_, queue_, system);
  EXPECT_EQ(publish(chosen, hashes(system)), KVM_ERR_UNSUPPORTED);
}

// Other clients of the user, in a kvmd.
TEST_F(AbiPrefix, IsFoundByOtherClients) {
  if (is_embedded()) {
    return;  // it has one client
  }
  kvm_client* other = connect_to_daemon(*daemon_, "other");
  kvm_queue* queue = nullptr;
  ASSERT_EQ(kvm_queue_create(other, nullptr, &queue), KVM_OK);
  const std::vector<uint32_t> system = tokens(1, 5000);
  const kvm_seq_id seq = prompt(client_, queue_, system);
  const std::vector<kvm_prefix_hash> known = hashes(system);
  EXPECT_EQ(find(other, known).n_tokens, 0u);
  ASSERT_EQ(publish(seq, known), KVM_OK) << kvm_last_error();
  const kvm_prefix found = find(other, known);
  EXPECT_EQ(found.seq, seq);
  EXPECT_EQ(found.n_tokens, 4992u);
  const std::vector<float> expected = attend(queue_, seq);
  kvm_queue_destroy(queue_);
  kvm_client_close(client_);
  queue_ = nullptr;
  client_ = nullptr;
  kvm_seq_id chat = 0;
  ASSERT_EQ(kvm_seq_fork(other, found.seq, KVM_POSITION_END, &chat), KVM_OK) << kvm_last_error();
  EXPECT_EQ(attend(queue, chat), expected);
  ASSERT_EQ(kvm_seq_free(other, seq), KVM_OK) << kvm_last_error();
  EXPECT_EQ(find(other, known).n_tokens, 0u);
  EXPECT_EQ(attend(queue, chat), expected) << "forks stay";
  kvm_queue_destroy(queue);
  kvm_client_close(other);
}

TEST_F(AbiPrefix, OfAnotherUserAreNotFound) {
  if (is_embedded()) {
    return;  // it has one client
  }
  if (!AnotherUser::is_possible()) {
    GTEST_SKIP() << "needs a second user";
  }
  AnotherUser::admit_to(daemon_->socket_path());
  kvm_client* other = nullptr;
  {
    const AnotherUser nobody;
    other = connect_to_daemon(*daemon_, "other");
  }
  const std::vector<uint32_t> system = tokens(1, 300);
  const kvm_seq_id seq = prompt(client_, queue_, system);
  const std::vector<kvm_prefix_hash> known = hashes(system);
  EXPECT_EQ(find(other, known).n_tokens, 0u);
  ASSERT_EQ(publish(seq, known), KVM_OK) << kvm_last_error();
  EXPECT_EQ(find(client_, known).n_tokens, 256u);
  EXPECT_EQ(find(other, known).n_tokens, 0u);
  kvm_seq_id stolen = 0;
  EXPECT_EQ(kvm_seq_fork(other, seq, 64, &stolen), KVM_ERR_PERMISSION);
  kvm_client_close(other);
}

TEST_F(AbiPrefix, AsynchronousPublishingIsTheSame) {
  const std::vector<uint32_t> system = tokens(1, 6400);
  const kvm_seq_id seq = prompt(client_, queue_, system);
  const std::vector<kvm_prefix_hash> known = hashes(system);
  ASSERT_EQ(kvm_prefix_publish_async(queue_, seq, known.data(), static_cast<uint32_t>(known.size()),
                                     0, 5),
            KVM_OK)
      << kvm_last_error();
  ASSERT_EQ(kvm_submit(queue_), KVM_OK);
  kvm_completion done{};
  ASSERT_EQ(kvm_wait(queue_, &done, 1, 1, 5'000'000'000), 1);
  EXPECT_EQ(done.status, KVM_OK);
  EXPECT_EQ(done.user_data, 5u);
  EXPECT_EQ(find(client_, known).n_tokens, 6400u);
}

}  // namespace
}  // namespace kvm::testing
