// SPDX-License-Identifier: Apache-2.0
// Every pair of a retention policy and a codec, over a kvmd with a disk: a sequence that is saved
// and loaded lies there until it is used. What they answered is the second part of
// docs/policies/composition.md.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/common/environment.h"
#include "tests/common/temporary_directory.h"
#include "tests/integration/composition_page.h"
#include "tests/integration/composition_rig.h"

namespace kvm::testing {
namespace {

constexpr uint64_t kTokens = 900;
constexpr uint64_t kEnd = kTokens + 150;
constexpr uint64_t kWindow = 600;
constexpr char kDisk[] = "Saved, freed, loaded";

class CompositionDisk : public PairTest {
 protected:
  void SetUp() override {
    daemon_ = std::make_unique<Daemon>(std::vector<std::string>{
        "--disk-directories", folder_.path(), "--disk-capacity", "256MiB"});
    ASSERT_FALSE(HasFatalFailure());
    client_ = connect_to_daemon(*daemon_, "composition");
    ASSERT_NE(client_, nullptr);
    ASSERT_EQ(kvm_queue_create(client_, nullptr, &queue_), KVM_OK) << kvm_last_error();
  }

  // What the client has that cannot go to a disk.
  uint64_t memory_bytes() {
    kvm_client_entry entry{};
    entry.struct_size = sizeof(entry);
    size_t n = 0;
    EXPECT_EQ(kvm_client_list(client_, &entry, 1, &n), KVM_OK) << kvm_last_error();
    return entry.used.memory_bytes;
  }

  kvm_seq_id load(const Pair& pair) {
    kvm_seq_id loaded = 0;
    EXPECT_EQ(kvm_seq_load(client_, pair.space, "pair", &loaded), KVM_OK) << kvm_last_error();
    return loaded;
  }

  void wait_until_back(kvm_seq_id seq) {
    ASSERT_EQ(kvm_seq_prefetch(client_, seq), KVM_OK) << kvm_last_error();
    kvm_seq_info info{};
    info.struct_size = sizeof(info);
    for (int i = 0; i < 5000; ++i) {
      ASSERT_EQ(kvm_seq_get_info(client_, seq, &info), KVM_OK) << kvm_last_error();
      if (info.bytes_away == 0) {
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    FAIL() << info.bytes_away << " bytes are still away";
  }

  // How a sample is answered; the exact answer is of the same sequence when it was in memory.
  std::string sample(const Pair& pair, kvm_seq_id seq, const PairAnswer& exact) {
    const Ask ask = {.mode = KVM_MODE_SAMPLED, .budget = 48};
    const PairAnswer answer = attend(pair, seq, 0, kTokens, ask);
    if (!answer.refusal.empty()) {
      EXPECT_EQ(answer.refusal, exact.refusal);
      return answer.refusal;
    }
    const std::vector<double> expected(exact.o.begin(), exact.o.end());
    EXPECT_LT(difference(answer.o.data(), expected), 0.5);
    return answer.mode == KVM_MODE_SAMPLED ? "sampled" : "exact";
  }

  // Answers to a sequence that has grown, and to one that a draft was taken back from.
  std::vector<PairAnswer> go_on(Pair* pair, kvm_seq_id seq) {
    const kvm_seq_id drafted = fork(seq);
    EXPECT_EQ(draft(*pair, drafted, kTokens, KVM_STEP_NO_STATISTICS), "");
    std::vector<PairAnswer> answers = attend_all(*pair, drafted, kTokens);
    grow(pair, seq, kTokens, kEnd, false, false);
    for (PairAnswer& answer : attend_all(*pair, seq, kEnd)) {
      answers.push_back(std::move(answer));
    }
    free_seq(drafted);
    return answers;
  }

  void run(const PolicyCase& policy, const CodecCase& codec) {
    const auto add = [&](const char* column, const std::string& fact) {
      page_.add(kDisk, policy.name, column, codec.family, fact);
    };
    Pair pair;
    if (!add_space(policy, codec, KVM_INDEX_SKETCH, &pair).empty()) {
      ASSERT_EQ(add_space(policy, codec, KVM_INDEX_NONE, &pair), "");
    }
    const uint64_t before = memory_bytes();
    const kvm_seq_id seq = add_seq(pair);
    grow(&pair, seq, 0, kTokens, false, false);
    add("pages", memory_bytes() == before ? "leave memory" : "stay in memory");
    ASSERT_EQ(kvm_seq_save(client_, seq, "pair", KVM_SAVE_REPLACE), KVM_OK) << kvm_last_error();
    const PairAnswer exact = attend(pair, seq, 0, kTokens);
    const std::string modes = sample(pair, seq, exact);
    const std::vector<PairAnswer> now = attend_all(pair, seq, kTokens);
    const std::vector<PairAnswer> later = go_on(&pair, seq);
    free_seq(seq);  // what is loaded comes from the disk
    const kvm_seq_id to_sample = load(pair);
    // Until all of it is back there is no index, and it is answered exactly.
    EXPECT_EQ(attend_all(pair, to_sample, kTokens), now);
    wait_until_back(to_sample);
    EXPECT_EQ(sample(pair, to_sample, exact), modes);
    free_seq(to_sample);
    const kvm_seq_id loaded = load(pair);
    const bool is_same = attend_all(pair, loaded, kTokens) == now;
    add("exact attention", is_same ? "same bits" : "other bits");
    add("sampled", modes);
    add("forked, drafted, grown", go_on(&pair, loaded) == later ? "same bits" : "other bits");
    free_seq(loaded);
    drop_space(pair);
  }

  const TemporaryDirectory folder_;
  CompositionPage page_{"disk"};
};

TEST_F(CompositionDisk, IsAsThePageSays) {
  for (const PolicyCase& policy : policy_cases(kWindow)) {
    std::set<std::string> families;
    for (const CodecCase& codec : codec_cases()) {
      SCOPED_TRACE(std::string(policy.name) + " over " + kvm_codec_name(codec.k) + " and " +
                   kvm_codec_name(codec.v));
      if (families.insert(codec.family).second || by_day(0, 1) != 0) {
        run(policy, codec);
      }
    }
  }
  page_.check();
}

}  // namespace
}  // namespace kvm::testing
