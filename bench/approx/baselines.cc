// SPDX-License-Identifier: Apache-2.0
#include "bench/approx/baselines.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "bench/approx/random.h"

namespace kvm::bench {
namespace {

bool in_rest(uint64_t token, uint64_t n) { return token >= kSinks && token + kRecents < n; }

std::vector<uint64_t> rest_of(uint64_t n) {
  std::vector<uint64_t> ids;
  for (uint64_t t = kSinks; t + kRecents < n; ++t) {
    ids.push_back(t);
  }
  return ids;
}

std::vector<uint64_t> fixed_of(uint64_t n) {
  std::vector<uint64_t> ids;
  for (uint64_t t = 0; t < n; t = in_rest(t + 1, n) ? n - kRecents : t + 1) {
    ids.push_back(t);
  }
  return ids;
}

// The first `count` of the ids in the order of `key`, largest first; in no order among themselves.
template <typename Key>
void keep_largest(std::vector<uint64_t>* ids, uint64_t count, const Key& key) {
  if (count < ids->size()) {
    std::nth_element(
        ids->begin(), ids->begin() + static_cast<ptrdiff_t>(count), ids->end(),
        [&](uint64_t a, uint64_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
    ids->resize(count);
  }
}

struct Choice {
  std::vector<uint64_t> ids;        // of R
  std::vector<double> log_weights;  // empty: all 0
};

// Evaluates what `choose` takes for each head together with F.
Estimate evaluate(const HeadData& head, const Logits& logits,
                  const std::function<Choice(uint32_t g)>& choose) {
  Estimate out;
  out.answer.o.resize(size_t{head.group} * head.dim);
  std::vector<bool> seen(logits.n);
  const std::vector<uint64_t> fixed = fixed_of(logits.n);
  for (uint32_t g = 0; g < head.group; ++g) {
    Choice choice = choose(g);
    out.rows += choice.ids.size();
    choice.ids.insert(choice.ids.end(), fixed.begin(), fixed.end());
    if (!choice.log_weights.empty()) {
      choice.log_weights.resize(choice.ids.size());
    }
    for (const uint64_t id : choice.ids) {
      seen[id] = true;
    }
    out.answer.lse.push_back(attend_some(head, logits.of(g), choice.ids, choice.log_weights,
                                         out.answer.o.data() + size_t{g} * head.dim));
  }
  out.unique_rows = static_cast<uint64_t>(std::count(seen.begin(), seen.end(), true));
  return out;
}

}  // namespace

Estimate oracle_top_k(const HeadData& head, const Logits& logits, uint64_t count) {
  return evaluate(head, logits, [&](uint32_t g) {
    Choice choice{rest_of(logits.n), {}};
    keep_largest(&choice.ids, count, [&](uint64_t t) { return logits.of(g)[t]; });
    return choice;
  });
}

Estimate uniform_residual(const HeadData& head, const Logits& logits, uint64_t count,
                          uint64_t seed) {
  // The same order of tokens for all heads of the group, so that they share rows.
  const auto draw = [&](uint64_t t) { return splitmix64(splitmix64(seed) + t); };
  return evaluate(head, logits, [&](uint32_t g) {
    Choice choice{rest_of(logits.n), {}};
    const uint64_t n_top = std::min<uint64_t>(count / 2, choice.ids.size());
    keep_largest(&choice.ids, n_top, [&](uint64_t t) { return logits.of(g)[t]; });
    std::vector<bool> taken(logits.n);
    for (const uint64_t id : choice.ids) {
      taken[id] = true;
    }
    std::vector<uint64_t> pool = rest_of(logits.n);
    std::erase_if(pool, [&](uint64_t t) { return taken[t]; });
    const double n_pool = static_cast<double>(pool.size());
    keep_largest(&pool, count - n_top, draw);
    choice.log_weights.assign(choice.ids.size(), 0.0);
    choice.ids.insert(choice.ids.end(), pool.begin(), pool.end());
    choice.log_weights.resize(choice.ids.size(),
                              std::log(n_pool / static_cast<double>(pool.size())));
    return choice;
  });
}

PageBounds::PageBounds(const HeadData& head) : dim_(head.dim) {
  const uint64_t n = head.runs.back().position + head.runs.back().n_tokens;
  const uint64_t n_pages = (n + kTokens - 1) / kTokens;
  low_.assign(n_pages * dim_, std::numeric_limits<float>::infinity());
  high_.assign(n_pages * dim_, -std::numeric_limits<float>::infinity());
  for (uint64_t t = 0; t < n; ++t) {
    const uint16_t* k = head.k_row(t);
    float* low = low_.data() + t / kTokens * dim_;
    float* high = high_.data() + t / kTokens * dim_;
    for (uint32_t j = 0; j < dim_; ++j) {
      const float x = head.to_float(k[j]);
      low[j] = std::min(low[j], x);
      high[j] = std::max(high[j], x);
    }
  }
}

std::vector<double> PageBounds::scores(const HeadData& head, const uint16_t* q, uint64_t n) const {
  std::vector<double> out((n + kTokens - 1) / kTokens);
  std::vector<float> wide(dim_);
  for (uint32_t j = 0; j < dim_; ++j) {
    wide[j] = head.to_float(q[j]);
  }
  for (size_t page = 0; page < out.size(); ++page) {
    const float* low = low_.data() + page * dim_;
    const float* high = high_.data() + page * dim_;
    for (uint32_t j = 0; j < dim_; ++j) {
      out[page] += std::max(wide[j] * low[j], wide[j] * high[j]);
    }
  }
  return out;
}

Estimate page_bounds(const HeadData& head, const Logits& logits, const PageBounds& bounds,
                     uint32_t set, uint64_t count) {
  Estimate out = evaluate(head, logits, [&](uint32_t g) {
    const std::vector<double> score =
        bounds.scores(head, head.q_rows(set) + size_t{g} * head.dim, logits.n);
    std::vector<uint64_t> pages(score.size());
    for (size_t i = 0; i < pages.size(); ++i) {
      pages[i] = i;
    }
    keep_largest(&pages, (count + PageBounds::kTokens - 1) / PageBounds::kTokens,
                 [&](uint64_t page) { return score[page]; });
    Choice choice;
    for (const uint64_t page : pages) {
      const uint64_t end = std::min<uint64_t>(logits.n, (page + 1) * PageBounds::kTokens);
      for (uint64_t t = page * PageBounds::kTokens; t < end; ++t) {
        if (in_rest(t, logits.n)) {
          choice.ids.push_back(t);
        }
      }
    }
    return choice;
  });
  out.index_bytes = bounds.bytes_per_token() * static_cast<double>(logits.n);
  return out;
}

Estimate magicpig(const HeadData& head, const Logits& logits, const LshTables& tables, uint32_t set,
                  bool weighted) {
  const LshTables::Candidates found = tables.lookup(head, set);
  Estimate out = evaluate(head, logits, [&](uint32_t g) {
    Choice choice;
    for (size_t i = 0; i < found.ids[g].size(); ++i) {
      if (in_rest(found.ids[g][i], logits.n)) {
        choice.ids.push_back(found.ids[g][i]);
        choice.log_weights.push_back(weighted ? -std::log(found.inclusion[g][i]) : 0.0);
      }
    }
    return choice;
  });
  out.index_bytes = found.bytes_read;
  return out;
}

}  // namespace kvm::bench
