// SPDX-License-Identifier: Apache-2.0
// EventPool: events of a driver, used again when nobody holds them.  Threads: any.
#ifndef KVM_DEVICE_EVENT_POOL_H_
#define KVM_DEVICE_EVENT_POOL_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "device/driver.h"

namespace kvm::device {

// An event; the pool has it back when the last copy of the pointer goes.
using EventPtr = std::shared_ptr<void>;

class EventPool {
 public:
  explicit EventPool(MemoryDriver* driver) : driver_(driver) {}
  // REQUIRES: nobody holds an event.
  ~EventPool() {
    for (const Event event : free_) {
      driver_->destroy_event(event);
    }
  }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // Fails: DEVICE.
  Result<EventPtr> take() {
    Event event = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (free_.empty()) {
        free_.reserve(n_events_ + 1);  // so that giving them back asks for no memory
        KVM_TRY_ASSIGN(event, driver_->create_event());
        ++n_events_;
      } else {
        event = free_.back();
        free_.pop_back();
      }
    }
    return EventPtr(event, [this](Event unused) {
      const std::lock_guard lock(mutex_);
      free_.push_back(unused);
    });
  }

 private:
  MemoryDriver* const driver_;
  std::mutex mutex_;
  std::vector<Event> free_;
  size_t n_events_ = 0;  // that there are
};

}  // namespace kvm::device

#endif  // KVM_DEVICE_EVENT_POOL_H_
