// SPDX-License-Identifier: Apache-2.0
// A daemon in a child process of the bench: kvmd's own server on a socket in a temporary folder,
// and beside it a thread that measures the read ceiling over the server's pool when told to.
//
// REQUIRES: no request is in flight during run_ceiling.
#ifndef KVM_BENCH_DAEMON_CHILD_H_
#define KVM_BENCH_DAEMON_CHILD_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kvm.h"

namespace kvm::bench {

// How long threads of the daemon spin; kvmd's defaults.
struct DaemonSpin {
  uint64_t dispatcher_ns = 200'000;
  uint64_t worker_ns = 200'000;
};

class DaemonChild {
 public:
  // Returns when the socket answers. prefix_pages: kvmd's option; 0: its default.
  DaemonChild(uint32_t n_threads, uint64_t capacity_bytes, const DaemonSpin& spin = {},
              uint64_t prefix_pages = 0);
  // Ends the child and removes its folder.
  ~DaemonChild();
  DaemonChild(const DaemonChild&) = delete;
  DaemonChild& operator=(const DaemonChild&) = delete;

  const std::string& socket_path() const { return socket_path_; }
  // Ends it at once, whatever it does; nothing else may be asked of it then.
  void kill();
  // Reads all K and V of a layer once with every read-only kernel, on as many threads as compute.
  void run_ceiling(kvm_seq_id seq, uint32_t layer);
  // Best kernel's median over all run_ceiling calls.
  double ceiling_bytes_per_s() const;
  // p90 of its times over their p50.
  double ceiling_p90_ratio() const;
  uint64_t rss_bytes() const;

 private:
  const std::vector<double>& best_kernel() const;

  std::string folder_;
  std::string socket_path_;
  pid_t child_ = -1;
  int to_child_ = -1;
  int from_child_ = -1;
  std::vector<std::vector<double>> bytes_per_s_;  // per read kernel
};

}  // namespace kvm::bench

#endif  // KVM_BENCH_DAEMON_CHILD_H_
