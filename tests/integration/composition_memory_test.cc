// SPDX-License-Identifier: Apache-2.0
// Every pair of a retention policy and a codec, run in an engine in this process: exact attention,
// forks, drafts, prefixes, and approximate modes over each kind of index. What they answered is the
// first part of docs/policies/composition.md.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/common/environment.h"
#include "tests/integration/composition_page.h"
#include "tests/integration/composition_rig.h"

namespace kvm::testing {
namespace {

constexpr uint64_t kPairTokens = 446;  // where sequences are forked: 2 before a page's end
constexpr uint64_t kGrowth = 130;      // behind a draft that was taken back
constexpr uint64_t kWindow = 128;
// Fewer than 2,048 keys are not worth to be verified.
constexpr uint64_t kLongTokens = 2500;
constexpr uint64_t kLongWindow = 2200;
constexpr char kCuts[] = "Exact attention, forks, drafts, prefixes";
constexpr char kModes[] = "Approximate modes";
constexpr char kSpaces[] = "What spaces and layers say beside";

bool folds(const PolicyCase& policy) {
  return policy.entry.retention == KVM_RETAIN_SINKS_RECENT_FOLD;
}

// Others are refused one whatever else is asked for.
bool may_have_index(const CodecCase& codec) { return codec.k <= KVM_CODEC_F8E4M3; }

class CompositionMemory : public PairTest {
 protected:
  void SetUp() override { ASSERT_NO_FATAL_FAILURE(open("composition")); }

  // What a fork at n_tokens is.
  std::string fork_at(const Pair& pair, kvm_seq_id seq, uint64_t n_tokens) {
    kvm_seq_id child = 0;
    const std::string refusal = said(kvm_seq_fork(client_, seq, n_tokens, &child), pair.codec);
    if (!refusal.empty()) {
      return refusal;
    }
    EXPECT_EQ(check(pair, child, n_tokens), "");
    free_seq(child);
    return "works";
  }

  std::string fork_at_end(const Pair& pair, kvm_seq_id seq) {
    const std::vector<PairAnswer> before = attend_all(pair, seq, kPairTokens);
    const kvm_seq_id child = fork(seq);
    EXPECT_EQ(attend_all(pair, child, kPairTokens), before);
    append(pair, child, kPairTokens, kPairTokens, 3);
    EXPECT_EQ(check(pair, child, kPairTokens + 3), "");
    EXPECT_EQ(attend_all(pair, seq, kPairTokens), before);
    free_seq(child);
    return "works";
  }

  // A draft that is taken back, against none at all, and what comes after both.
  std::string draft_taken_back(Pair* pair, kvm_seq_id seq, bool is_careful) {
    const kvm_seq_id tried = fork(seq);
    const kvm_seq_id untried = fork(seq);
    const uint32_t flags = is_careful ? uint32_t{KVM_STEP_NO_STATISTICS} : 0;
    const std::string refusal = draft(*pair, tried, kPairTokens, flags);
    std::string fact = refusal;
    if (refusal.empty()) {
      constexpr uint64_t kEnd = kPairTokens + kGrowth;
      bool same = attend_all(*pair, tried, kPairTokens) == attend_all(*pair, untried, kPairTokens);
      grow(pair, tried, kPairTokens, kEnd, is_careful, false);
      grow(pair, untried, kPairTokens, kEnd, is_careful, false);
      same = same && attend_all(*pair, tried, kEnd) == attend_all(*pair, untried, kEnd);
      if (!same && !folds(pair->policy)) {  // what was folded since has not been read
        EXPECT_EQ(check(*pair, tried, kEnd), "");
      }
      const bool is_heavy = pair->policy.entry.retention == KVM_RETAIN_HEAVY;
      fact = same ? "same bits" : is_heavy ? "may keep other tokens" : "rounded once more";
    }
    free_seq(tried);
    free_seq(untried);
    return fact;
  }

  std::string publish(const Pair& pair, kvm_seq_id seq) {
    const kvm_seq_id child = fork(seq);
    std::vector<kvm_prefix_hash> hashes(kPairTokens / KVM_PREFIX_TOKENS);
    for (kvm_prefix_hash& hash : hashes) {
      ++n_hashes_;
      hash.bytes[0] = static_cast<uint8_t>(n_hashes_);
      hash.bytes[1] = static_cast<uint8_t>(n_hashes_ >> 8);
      hash.bytes[31] = 1;
    }
    const std::string refusal = said(
        kvm_prefix_publish(client_, child, hashes.data(), static_cast<uint32_t>(hashes.size()), 0),
        pair.codec);
    if (refusal.empty()) {
      kvm_seq_id found = 0;
      EXPECT_EQ(kvm_seq_fork(client_, child, KVM_POSITION_END, &found), KVM_OK);
      EXPECT_EQ(attend_all(pair, found, kPairTokens), attend_all(pair, seq, kPairTokens));
      free_seq(found);
    }
    free_seq(child);
    return refusal.empty() ? "works" : refusal;
  }

  void run_cuts(const PolicyCase& policy, const CodecCase& codec) {
    const auto add = [&](const char* column, const std::string& fact) {
      page_.add(kCuts, policy.name, column, codec.family, fact);
    };
    Pair pair;
    ASSERT_EQ(add_space(policy, codec, KVM_INDEX_NONE, &pair), "");
    const kvm_seq_id seq = add_seq(pair);
    constexpr uint64_t kWithinPrompt = kPairPrompt - 8;
    grow(&pair, seq, 0, kWithinPrompt, false, folds(policy));
    EXPECT_EQ(check(pair, seq, kWithinPrompt), "");
    const std::string modes = modes_of(pair, seq, kWithinPrompt, KVM_PROPOSAL_DEFAULT);
    grow(&pair, seq, kWithinPrompt, kPairTokens, false, folds(policy));
    EXPECT_EQ(check(pair, seq, kPairTokens), "");
    const PairAnswer answer = attend(pair, seq, 0, kPairTokens);
    add("exact attention",
        answer.refusal.empty() ? "works" : "within the prompt; then " + answer.refusal);
    page_.add(kModes, policy.name, "no index", codec.family, modes);
    add("fork at the end", fork_at_end(pair, seq));
    add("20 tokens before", fork_at(pair, seq, kPairTokens - 20));
    add("at token 100", fork_at(pair, seq, 100));
    add("draft taken back", draft_taken_back(&pair, seq, false));
    const kvm_seq_id careful = add_seq(pair, KVM_SEQ_MANUAL_COMMIT);
    grow(&pair, careful, 0, kPairTokens, true, folds(policy));
    add("the same with care", draft_taken_back(&pair, careful, true));
    add("prefix", publish(pair, seq));
    free_seq(careful);
    free_seq(seq);
    drop_space(pair);
  }

  // Which of the modes answer as such.
  std::string modes_of(const Pair& pair, kvm_seq_id seq, uint64_t length, uint32_t proposal) {
    const struct {
      const char* name;
      Ask ask;
    } asked[] = {{"sampled", {.mode = KVM_MODE_SAMPLED, .proposal = proposal, .budget = 48}},
                 {"topk", {.mode = KVM_MODE_TOPK, .proposal = proposal, .budget = 32}},
                 {"verified",
                  {.mode = KVM_MODE_VERIFIED, .proposal = proposal, .budget = 1000, .eps = 0.3f}}};
    const PairAnswer exact = attend(pair, seq, 0, length);
    std::map<std::string, std::string> modes;  // what became of them: which
    for (const auto& [name, ask] : asked) {
      const PairAnswer answer = attend(pair, seq, 0, length, ask);
      std::string& list = modes[!answer.refusal.empty()         ? answer.refusal
                                : answer.mode == ask.mode       ? "works"
                                : answer.mode == KVM_MODE_EXACT ? "exact"
                                                                : "another mode"];
      list += (list.empty() ? "" : ", ") + std::string(name);
      if (answer.mode == KVM_MODE_EXACT) {
        EXPECT_EQ(answer.o, exact.o) << name;
      } else if (answer.refusal.empty()) {
        const std::vector<double> expected(exact.o.begin(), exact.o.end());
        EXPECT_LT(difference(answer.o.data(), expected), 0.5) << name;
      }
    }
    std::string fact = modes["works"];
    if (!modes["exact"].empty()) {
      const bool all = fact.empty() && modes.size() == 2;
      fact += all ? "all exact" : (fact.empty() ? "" : "; ") + modes["exact"] + " exact";
    }
    for (const auto& [what, list] : modes) {
      if (what.rfind("refused", 0) == 0) {
        fact += (fact.empty() ? "" : "; ") + list + " " + what;
      }
    }
    return fact;
  }

  void run_modes(const PolicyCase& policy, const CodecCase& codec, uint32_t kind, bool is_run) {
    const bool hashes = kind == KVM_INDEX_LSH;
    const std::string column = hashes ? "`KVM_INDEX_LSH`" : "`KVM_INDEX_SKETCH`";
    Pair pair;
    const std::string refusal = add_space(policy, codec, kind, &pair);
    // Codecs that are not run by day are at least registered, as their family's first was.
    const std::string key = std::string(policy.name) + column + codec.family;
    EXPECT_EQ(refusals_.emplace(key, refusal).first->second, refusal) << key;
    if (!refusal.empty()) {
      page_.add(kModes, policy.name, column, codec.family, refusal);
      return;
    }
    if (is_run) {
      const uint32_t proposal = hashes ? uint32_t{KVM_PROPOSAL_LSH} : uint32_t{KVM_PROPOSAL_SKETCH};
      pair.prompt = UINT64_MAX;  // all is within it
      const kvm_seq_id seq = add_seq(pair);
      grow(&pair, seq, 0, kLongTokens, false, false);
      const std::string fact = modes_of(pair, seq, kLongTokens, proposal);
      page_.add(kModes, policy.name, column, codec.family, fact);
      const kvm_seq_id child = fork(seq);
      append(pair, child, kLongTokens, kLongTokens, 3);
      EXPECT_EQ(modes_of(pair, child, kLongTokens + 3, proposal), fact) << key << ": of a fork";
      EXPECT_EQ(kvm_seq_truncate(client_, child, kLongTokens - 10), KVM_OK) << kvm_last_error();
      EXPECT_EQ(modes_of(pair, child, kLongTokens - 10, proposal), fact) << key << ": of a cut";
      free_seq(child);
      free_seq(seq);
    }
    drop_space(pair);
  }

  void run_extra(const PolicyCase& policy, const CodecCase& codec, Extra extra, bool is_grown) {
    const char* const column = extra == Extra::kWindow  ? "window of a layer"
                               : extra == Extra::kAlibi ? "`alibi_slopes`"
                               : extra == Extra::kVInK  ? "`KVM_SPACE_V_IN_K`"
                               : extra == Extra::kPair  ? "`KVM_LAYER_PAIR`"
                                                        : "`KVM_LAYER_ALIAS`";
    Pair pair;
    std::string fact = add_space(policy, codec, KVM_INDEX_NONE, &pair, extra);
    if (fact.empty()) {
      fact = "works";
      if (is_grown) {
        const kvm_seq_id seq = add_seq(pair);
        constexpr uint64_t kEnd = 330;
        pair.prompt = policy.is_prompt() ? UINT64_MAX : kPairPrompt;
        grow(&pair, seq, 0, kEnd, false, folds(policy));
        EXPECT_EQ(check(pair, seq, kEnd), "") << column;
        if (extra == Extra::kAlias) {
          EXPECT_EQ(attend(pair, seq, 1, kEnd), attend(pair, seq, 0, kEnd));
        }
        free_seq(seq);
      }
      drop_space(pair);
    }
    page_.add(kSpaces, policy.name, column, codec.family, fact);
    if ((extra == Extra::kAlibi || extra == Extra::kVInK) && may_have_index(codec)) {
      std::string with_index = add_space(policy, codec, KVM_INDEX_SKETCH, &pair, extra);
      if (with_index.empty()) {
        drop_space(pair);
        with_index = "works";
      }
      page_.add(kModes, policy.name, std::string("an index beside ") + column, codec.family,
                with_index);
    }
  }

  CompositionPage page_{"memory"};
  std::map<std::string, std::string> refusals_;
  uint32_t n_hashes_ = 0;
};

TEST_F(CompositionMemory, IsAsThePageSays) {
  const std::vector<PolicyCase> of_long = policy_cases(kLongWindow);
  size_t index = 0;
  for (const PolicyCase& policy : policy_cases(kWindow)) {
    const PolicyCase& with_long_window = of_long[index++];
    std::set<std::string> families;
    for (const CodecCase& codec : codec_cases()) {
      SCOPED_TRACE(std::string(policy.name) + " over " + kvm_codec_name(codec.k) + " and " +
                   kvm_codec_name(codec.v));
      const bool is_run = families.insert(codec.family).second || by_day(0, 1) != 0;
      if (is_run) {
        run_cuts(policy, codec);
      }
      for (const uint32_t kind : {KVM_INDEX_SKETCH, KVM_INDEX_LSH}) {
        run_modes(with_long_window, codec, kind, is_run);
      }
      if (is_run) {
        for (const Extra extra :
             {Extra::kWindow, Extra::kAlibi, Extra::kVInK, Extra::kAlias, Extra::kPair}) {
          const bool is_grown = codec.k == KVM_CODEC_BF16 || codec.k == KVM_CODEC_I4_CHANNEL;
          run_extra(policy, codec, extra, is_grown || by_day(0, 1) != 0);
        }
      }
    }
  }
  page_.check();
}

}  // namespace
}  // namespace kvm::testing
