// SPDX-License-Identifier: Apache-2.0
// The opaque handles of kvm.h, and the boundary that every C function is wrapped in.
#ifndef KVM_CLIENT_HANDLES_H_
#define KVM_CLIENT_HANDLES_H_

#include <exception>
#include <memory>
#include <new>
#include <string>

#include "base/status.h"
#include "client/arena_allocator.h"
#include "client/backend.h"
#include "client/last_error.h"
#include "client/process_token.h"
#include "kvm.h"

struct kvm_client {
  uint64_t token = 0;  // of the process that made it
  std::shared_ptr<kvm::client::Client> client;
};

struct kvm_queue {
  uint64_t token = 0;
  std::shared_ptr<kvm::client::Client> client;
  std::unique_ptr<kvm::client::Queue> queue;
  kvm::client::Interrupt interrupt;  // of kvm_wait
};

struct kvm_arena {
  uint64_t token = 0;
  std::shared_ptr<kvm::client::Client> client;
  kvm::client::ArenaMemory memory;
  std::unique_ptr<kvm::client::ArenaAllocator> allocator;
};

namespace kvm::client {

// Runs `body` (which returns a Status), and turns a failure or an exception into a code and the
// thread's sentence. Nothing of C++ leaves through a C function.
template <typename Body>
kvm_status guarded(Body&& body) noexcept {
  try {
    const Status status = body();
    if (!status.is_ok()) [[unlikely]] {
      set_last_error(status.message());
    }
    return status.code();
  } catch (const std::bad_alloc&) {
    set_last_error("the process is out of memory");
    return KVM_ERR_NO_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return KVM_ERR_INTERNAL;
  } catch (...) {
    set_last_error("an exception of unknown type");
    return KVM_ERR_INTERNAL;
  }
}

// Checks that the handle is there and belongs to this process. Fails: INVALID, FORKED.
template <typename Handle>
Status check_handle(const Handle* handle, const char* name) {
  if (handle == nullptr) [[unlikely]] {
    return Status(KVM_ERR_INVALID, std::string(name) + " is NULL");
  }
  if (handle->token != process_token()) [[unlikely]] {
    return Status(KVM_ERR_FORKED,
                  std::string(name) + " belongs to the parent of this process: connect again");
  }
  return Status::ok();
}

inline Status check_not_null(const void* pointer, const char* name) {
  if (pointer == nullptr) [[unlikely]] {
    return Status(KVM_ERR_INVALID, std::string(name) + " is NULL");
  }
  return Status::ok();
}

}  // namespace kvm::client

#endif  // KVM_CLIENT_HANDLES_H_
