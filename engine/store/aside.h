// SPDX-License-Identifier: Apache-2.0
// An Aside is a sequence that no client sees: the fork of one that is being saved, or one that is
// being loaded (docs/adr/0022-snapshots.md).
//
// Threads: the driver thread.
#ifndef KVM_ENGINE_STORE_ASIDE_H_
#define KVM_ENGINE_STORE_ASIDE_H_

#include <cstdint>
#include <memory>

#include "engine/store/sequence.h"

namespace kvm::engine {

struct Aside {
  // Without an id. Its account is the client's that it is loaded for, or the library's of the user
  // whose sequence is saved.
  std::unique_ptr<Sequence> seq;
  // Whether it is one that is loaded: a sequence of the account, which is charged for pages that
  // are yet to come.
  bool is_loaded = false;
  KvBytes expected_bytes;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_STORE_ASIDE_H_
