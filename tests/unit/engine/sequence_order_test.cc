// SPDX-License-Identifier: Apache-2.0
#include "engine/run/sequence_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <random>
#include <set>
#include <vector>

namespace kvm::engine {
namespace {

// Whoever has no earlier request with a common sequence may run: found here by comparing all pairs.
struct Model {
  struct Entry {
    SequenceOrder::Ticket ticket;
    std::set<kvm_seq_id> seqs;
  };
  bool may_run(const Entry& entry) const {
    for (const Entry& earlier : entries) {
      if (&earlier == &entry) {
        return true;
      }
      for (kvm_seq_id seq : entry.seqs) {
        if (earlier.seqs.contains(seq)) {
          return false;
        }
      }
    }
    return true;
  }
  std::list<Entry> entries;  // in the order of arrival
};

TEST(SequenceOrder, AgreesWithComparingAllPairs) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    SequenceOrder order;
    Model model;
    for (int step = 0; step < 300; ++step) {
      if (model.entries.size() < 20 && random() % 2 == 0) {
        Model::Entry& entry = model.entries.emplace_back();
        for (auto n = random() % 5; n != 0; --n) {
          entry.seqs.insert(1 + random() % 8);
        }
        const std::vector<kvm_seq_id> seqs(entry.seqs.begin(), entry.seqs.end());
        order.enter(&entry.ticket, seqs);
        EXPECT_EQ(entry.ticket.may_run(), model.may_run(entry)) << "seed " << seed;
      } else if (!model.entries.empty()) {
        // Anyone may leave: those who run when they are done, the others when they are cancelled.
        const auto at = std::next(model.entries.begin(),
                                  static_cast<ptrdiff_t>(random() % model.entries.size()));
        std::set<SequenceOrder::Ticket*> waiting;
        for (Model::Entry& entry : model.entries) {
          if (!model.may_run(entry) && &entry != &*at) {
            waiting.insert(&entry.ticket);
          }
        }
        std::vector<SequenceOrder::Ticket*> ready;
        order.leave(&at->ticket, &ready);
        model.entries.erase(at);
        std::set<SequenceOrder::Ticket*> expected;
        for (Model::Entry& entry : model.entries) {
          EXPECT_EQ(entry.ticket.may_run(), model.may_run(entry)) << "seed " << seed;
          if (model.may_run(entry) && waiting.contains(&entry.ticket)) {
            expected.insert(&entry.ticket);
          }
        }
        EXPECT_EQ(std::set<SequenceOrder::Ticket*>(ready.begin(), ready.end()), expected);
        EXPECT_EQ(ready.size(), expected.size()) << "named twice, seed " << seed;
      }
      order.forget(1 + random() % 8);
    }
    // Lines of sequences that are gone go with the last who stands in them.
    for (kvm_seq_id seq = 1; seq <= 8; ++seq) {
      order.forget(seq);
    }
    while (!model.entries.empty()) {
      std::vector<SequenceOrder::Ticket*> ready;
      order.leave(&model.entries.back().ticket, &ready);
      model.entries.pop_back();
    }
    EXPECT_EQ(order.n_lines(), 0u) << "seed " << seed;
  }
}

}  // namespace
}  // namespace kvm::engine
