// SPDX-License-Identifier: Apache-2.0
// FrameChannel: frames over a connected stream socket, of any length up to a limit, each with at
// most one file descriptor. For two sides that take turns: sending waits until the other reads.
//
// Threads: one that sends and one that receives, but for shut_down: any.
#ifndef KVM_IPC_FRAME_CHANNEL_H_
#define KVM_IPC_FRAME_CHANNEL_H_

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/status.h"
#include "ipc/fd.h"

namespace kvm::ipc {

// LIMIT: bytes of a frame, behind its head.
inline constexpr uint32_t kMaxFrameBytes = 64u << 20;

struct Frame {
  uint32_t kind = 0;
  std::vector<uint8_t> bytes;
  Fd fd;  // may be closed
};

class FrameChannel {
 public:
  explicit FrameChannel(Fd socket) : socket_(std::move(socket)) {}

  // Two ends of a new channel. Fails: LIMIT (no descriptors left).
  static Result<std::pair<Fd, Fd>> make_pair();

  // `fd`: passed along; -1: none. Fails: INVALID (more than kMaxFrameBytes), DISCONNECTED.
  Status send(uint32_t kind, std::span<const uint8_t> bytes, int fd = -1);
  // The next frame, into memory that is used again. Fails: TIMEOUT (no frame has begun within the
  // time), DISCONNECTED, PROTOCOL (no frame, or one of more than max_bytes). After PROTOCOL, and a
  // TIMEOUT in the middle of a frame, which is DISCONNECTED, the channel is of no use. Throws
  // std::bad_alloc: neither is it then.
  Status receive(uint64_t timeout_ns, Frame* into, uint32_t max_bytes = kMaxFrameBytes);

  // Ends it for both sides: whoever waits returns.
  void shut_down() const;
  int fd() const { return socket_.get(); }

 private:
  Status receive_all(uint8_t* to, size_t n, Fd* fd);

  Fd socket_;
};

// FrameWriter makes the bytes of a frame: plain structures, arrays of them behind their number,
// text.
class FrameWriter {
 public:
  void clear() { bytes_.clear(); }
  std::span<const uint8_t> bytes() const { return bytes_; }

  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof value);
  }
  template <class T>
  void put_all(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    put(static_cast<uint64_t>(values.size()));
    append(values.data(), values.size_bytes());
  }
  void put_text(std::string_view text) { put_all(std::span<const char>(text.data(), text.size())); }
  void put_status(const Status& status) {
    put(static_cast<int32_t>(status.code()));
    put_text(status.message());
  }

 private:
  void append(const void* from, size_t n) {
    if (n != 0) {
      const size_t at = bytes_.size();
      bytes_.resize(at + n);
      std::memcpy(bytes_.data() + at, from, n);
    }
  }

  std::vector<uint8_t> bytes_;
};

// FrameReader reads them. What is not there reads as zeros, and is_whole says so at the end.
class FrameReader {
 public:
  explicit FrameReader(std::span<const uint8_t> bytes) : rest_(bytes) {}

  template <class T>
  T get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    if (rest_.size() < sizeof value) {
      fail();
    } else {
      std::memcpy(&value, rest_.data(), sizeof value);
      rest_ = rest_.subspan(sizeof value);
    }
    return value;
  }
  // At most n_max of them: more are a failure, too.
  template <class T>
  std::vector<T> get_all(uint64_t n_max) {
    const auto n = get<uint64_t>();
    if (n > n_max || n > rest_.size() / sizeof(T)) {
      fail();
      return {};
    }
    std::vector<T> values(n);
    if (n != 0) {
      std::memcpy(values.data(), rest_.data(), n * sizeof(T));
    }
    rest_ = rest_.subspan(n * sizeof(T));
    return values;
  }
  std::string get_text() {
    const std::vector<char> text = get_all<char>(kMaxFrameBytes);
    return {text.begin(), text.end()};
  }
  Status get_status() {
    const auto code = get<int32_t>();
    std::string message = get_text();
    return code == KVM_OK ? Status::ok()
                          : Status(static_cast<kvm_status>(code), std::move(message));
  }
  // Everything was there, and nothing else.
  bool is_whole() const { return !failed_ && rest_.empty(); }

 private:
  void fail() {
    failed_ = true;
    rest_ = {};
  }

  std::span<const uint8_t> rest_;
  bool failed_ = false;
};

}  // namespace kvm::ipc

#endif  // KVM_IPC_FRAME_CHANNEL_H_
