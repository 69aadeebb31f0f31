// SPDX-License-Identifier: Apache-2.0
// Memory that is used again and again for intermediate results: it grows and keeps its size.
//
// Contents are undefined after every reserve. One thread at a time.
#ifndef KVM_ENGINE_TASKS_WORKSPACE_H_
#define KVM_ENGINE_TASKS_WORKSPACE_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace kvm::engine {

// A Workspace is one such piece of memory.
class Workspace {
 public:
  static constexpr size_t kAlign = 64;
  static constexpr size_t kHugePage = 2 << 20;

  // At least `size_bytes`, aligned to kAlign; null when the machine refuses.
  std::byte* reserve(size_t size_bytes) {
    if (size_bytes > size_bytes_) {
      // An eighth more than asked for, so that a slowly growing need does not allocate each time.
      const size_t wanted = size_bytes + size_bytes / 8;
      const size_t align = wanted < kHugePage ? kAlign : kHugePage;
      const size_t rounded = (wanted + align) / align * align;
      data_.reset();
      size_bytes_ = 0;
      data_.reset(static_cast<std::byte*>(std::aligned_alloc(align, rounded)));
      if (data_ == nullptr) {
        return nullptr;
      }
      if (align == kHugePage) {
        // In pages of 4 KiB it takes the driver 4 ms to give 70 MiB back. A refusal costs that.
        (void)madvise(data_.get(), rounded, MADV_HUGEPAGE);
      }
      size_bytes_ = rounded;
    }
    // A need of nothing still gets an address.
    return data_ != nullptr ? data_.get() : reserve(kAlign);
  }
  // Gives memory beyond `keep_bytes` back.
  void shrink(size_t keep_bytes) {
    if (size_bytes_ > keep_bytes) {
      data_.reset();
      size_bytes_ = 0;
    }
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_bytes_ = 0;
};

// A ThreadWorkspace is what each compute thread has to itself.
struct ThreadWorkspace {
  Workspace prepared;
  Workspace scratch;
  Workspace states;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_TASKS_WORKSPACE_H_
