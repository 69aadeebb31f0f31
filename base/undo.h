// SPDX-License-Identifier: Apache-2.0
// Undo: takes a step back where a later one fails, with a Status or with an exception of the
// standard library.
//
//   map(region);
//   Undo unmapping([&] { unmap(region); });
//   list.push_back(region);  // may find no memory
//   unmapping.dismiss();
#ifndef KVM_BASE_UNDO_H_
#define KVM_BASE_UNDO_H_

#include <utility>

namespace kvm {

// `undo` throws nothing.
template <typename F>
class [[nodiscard]] Undo {
 public:
  explicit Undo(F undo) : undo_(std::move(undo)) {}
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;
  ~Undo() {
    if (!is_dismissed_) {
      undo_();
    }
  }
  // All steps were taken.
  void dismiss() { is_dismissed_ = true; }

 private:
  F undo_;
  bool is_dismissed_ = false;
};

}  // namespace kvm

#endif  // KVM_BASE_UNDO_H_
