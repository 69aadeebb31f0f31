// SPDX-License-Identifier: Apache-2.0
// Sentences of completions: kvm_completion.message points to them.
//
// Threads: one at a time.
#ifndef KVM_CLIENT_SENTENCES_H_
#define KVM_CLIENT_SENTENCES_H_

#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "base/assert.h"

namespace kvm::client {

// A Sentences keeps those of the completions that one call takes, until the next call.
class Sentences {
 public:
  // REQUIRES: no call keeps more than n_most.
  explicit Sentences(uint32_t n_most) : texts_(n_most) {}
  void clear() { n_ = 0; }
  // Returns a copy of `text`; "" where memory is refused, for a sentence is worth no failure of its
  // own. Valid until it is kept over: after the next clear().
  const char* keep(std::string_view text) {
    if (text.empty()) {
      return "";
    }
    KVM_ASSERT(n_ < texts_.size());
    std::string& kept = texts_[n_++];
    try {
      kept.assign(text);
    } catch (const std::bad_alloc&) {
      return "";
    }
    return kept.c_str();
  }

 private:
  std::vector<std::string> texts_;  // never resized: what keep() returned points into them
  uint32_t n_ = 0;
};

}  // namespace kvm::client

#endif  // KVM_CLIENT_SENTENCES_H_
