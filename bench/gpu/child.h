// SPDX-License-Identifier: Apache-2.0
// A second process of kvm_gpu_check, with a socket to it.
#ifndef KVM_BENCH_GPU_CHILD_H_
#define KVM_BENCH_GPU_CHILD_H_

#include <sys/types.h>

#include <optional>
#include <string>

namespace kvm::bench::gpu {

// One end of a socket pair. Messages are a number and, maybe, a file descriptor.
class Link {
 public:
  explicit Link(int fd) : fd_(fd) {}
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link();

  struct Message {
    double value = 0;
    int fd = -1;  // the receiver's to close
  };
  bool send(double value, int fd = -1) const;
  // Nothing when the other side has gone, or says nothing for two minutes.
  std::optional<Message> receive() const;
  // Says whether a message is there.
  bool ready() const;

 private:
  int fd_;
};

// This program again, as `child --role ROLE`. Killed, if it still runs, when the object goes.
class Child {
 public:
  explicit Child(const std::string& role);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child();

  const Link& link() const { return link_; }
  void kill_now();  // SIGKILL; returns when it is gone

 private:
  struct Ends;
  Child(const std::string& role, const Ends& ends);
  pid_t pid_ = -1;
  Link link_;
};

// A child's role: keeps the books of device memory for its parent (engine.cu). The exit status.
int keep_books(const Link& link);

}  // namespace kvm::bench::gpu

#endif  // KVM_BENCH_GPU_CHILD_H_
