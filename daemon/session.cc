// SPDX-License-Identifier: Apache-2.0
#include "daemon/session.h"

#include <spdlog/spdlog.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <new>
#include <utility>

namespace kvm::daemon {

namespace {

void discard(Service* service, ipc::Mapping* mapping) {
  const uint64_t size_bytes = mapping->size_bytes();
  mapping->discard_contents();
  service->arena_bytes -= size_bytes;
}

}  // namespace

void discard_on_reaper(Service* service, ipc::Mapping mapping) {
  std::function<void()> job;
  try {
    // A mapping travels in a std::function, which wants copies.
    auto held = std::make_shared<ipc::Mapping>();
    job = [service, held] { discard(service, held.get()); };
    *held = std::move(mapping);
    service->reaper.post(std::move(job));
  } catch (const std::bad_alloc&) {
    job ? job() : discard(service, &mapping);  // here, and slower
  }
}

Session::Session(Service* service, uint64_t id, ipc::Fd socket, ipc::PeerCredentials peer)
    : regions([this](ipc::Mapping mapping) {
        give_back(engine::Resource::kArenas, 1);
        give_back(engine::Resource::kArenaBytes, mapping.size_bytes());
        discard_on_reaper(service_, std::move(mapping));
      }),
      service_(service),
      id_(id),
      socket_(std::move(socket)),
      peer_(peer) {}

void Session::send(std::span<const uint8_t> bytes, std::vector<ipc::Fd> fds) {
  if (doomed_) {
    return;
  }
  if (unsent_.empty()) {
    const Status status = send_now(bytes, fds);
    if (status.is_ok()) {
      return;
    }
    if (status.code() != KVM_ERR_AGAIN) {
      doom(status.message());
      return;
    }
    watch_socket(true);
  }
  if (unsent_.size() >= kMaxUnsentReplies) {
    doom("it does not read its replies");
    return;
  }
  try {
    unsent_.push_back(Unsent{{bytes.begin(), bytes.end()}, std::move(fds)});
  } catch (const std::bad_alloc&) {
    doom("there is no memory for a reply that it does not read");
  }
}

void Session::flush() {
  while (!unsent_.empty()) {
    const Status status = send_now(unsent_.front().bytes, unsent_.front().fds);
    if (status.code() == KVM_ERR_AGAIN) {
      return;
    }
    if (!status.is_ok()) {
      doom(status.message());
      return;
    }
    unsent_.pop_front();
  }
  watch_socket(false);
}

Status Session::send_now(std::span<const uint8_t> bytes, const std::vector<ipc::Fd>& fds) {
  std::array<int, ipc::kMaxFdsPerMessage> numbers{};
  const size_t n = std::min<size_t>(fds.size(), numbers.size());
  for (size_t i = 0; i < n; ++i) {
    numbers[i] = fds[i].get();
  }
  return ipc::send_message(socket_, bytes, std::span<const int>(numbers.data(), n));
}

void Session::watch_socket(bool writable) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (writable ? uint32_t{EPOLLOUT} : 0);
  event.data.u64 = event_token(EventKind::kSocket, id_);
  ::epoll_ctl(service_->epoll.get(), EPOLL_CTL_MOD, socket_.get(), &event);
}

void Session::doom(std::string_view reason) {
  if (doomed_) {
    return;
  }
  doomed_ = true;
  const size_t n = std::min(reason.size(), doom_reason_.size() - 1);
  std::copy_n(reason.begin(), n, doom_reason_.begin());
}

void Session::doom_for_violation(std::string_view reason) {
  if (!doomed_) {
    violator_ = true;
    ++service_->n_protocol_errors;
    doom(reason);
  }
}

void Session::note_engine() {
  if (!is_engine_) {
    is_engine_ = true;
    spdlog::info("client {:#x} '{}' (process {}, user {}) works with sequences", client, name,
                 peer_.pid, peer_.uid);
  }
}

void Session::hang_up() {
  // Closing takes them out of the epoll set; the client has a copy of the doorbell's open file,
  // which would stay in it.
  if (doorbell.is_open()) {
    ::epoll_ctl(service_->epoll.get(), EPOLL_CTL_DEL, doorbell.get(), nullptr);
  }
  doorbell.reset();
  if (device != nullptr) {
    device->stop();
  }
  socket_.reset();
  pidfd.reset();
  unsent_.clear();
}

ServedQueue* Session::find_queue(uint32_t id) {
  for (const auto& queue : queues) {
    if (queue->id() == id) {
      return queue.get();
    }
  }
  return nullptr;
}

uint64_t Session::private_bytes() const {
  uint64_t total = 0;
  for (const auto& queue : queues) {
    total += queue->private_bytes();
  }
  return total;
}

void Session::give_back(engine::Resource resource, uint64_t n) {
  if (account != nullptr) {
    account->give_back(resource, n);
  }
}

void Session::note_arrival(uint64_t now_ns) {
  if (last_answer_ns_ == 0) {
    return;
  }
  uint64_t sample = now_ns > last_answer_ns_ ? now_ns - last_answer_ns_ : 0;
  if (gap_ns_ == 0) {
    gap_ns_ = sample + 1;
    return;
  }
  // One long pause (an engine that samples a token between two passes over its layers) must not
  // hide the short gaps around it.
  sample = std::min(sample, 2 * gap_ns_ + 1000);
  gap_ns_ = (3 * gap_ns_ + sample) / 4 + 1;
}

}  // namespace kvm::daemon
