// SPDX-License-Identifier: Apache-2.0
#ifndef KVM_ENGINE_STORE_SEQ_PAGE_H_
#define KVM_ENGINE_STORE_SEQ_PAGE_H_

#include <vector>

#include "kvm.h"

namespace kvm::engine {

// A SeqPage is a part of a list of sequences.
struct SeqPage {
  std::vector<kvm_seq_info> infos;  // in the order of their ids
  bool has_more = false;            // the list goes on behind the last of them
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_SEQ_PAGE_H_
