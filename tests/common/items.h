// SPDX-License-Identifier: Apache-2.0
// Items of kvm_step as most tests want them.
#ifndef KVM_TESTS_COMMON_ITEMS_H_
#define KVM_TESTS_COMMON_ITEMS_H_

#include <cstdint>

#include "kvm.h"

namespace kvm::testing {

// n_append tokens at the end of a sequence, and its last n_query tokens as queries.
inline kvm_item item_of(kvm_seq_id seq, uint32_t n_append, uint32_t n_query) {
  kvm_item item{};
  item.seq = seq;
  item.append_position = KVM_POSITION_END;
  item.n_append = n_append;
  item.n_query = n_query;
  item.query_position = KVM_POSITION_END;
  return item;
}

}  // namespace kvm::testing

#endif  // KVM_TESTS_COMMON_ITEMS_H_
